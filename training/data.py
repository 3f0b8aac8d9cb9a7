"""The data of a run: its splits, their sizes, and what each rank has of a batch."""

import json
import math
import os
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError

from dataset.schema import Split, SplitName, check_contents, open_datasets, open_split
from dataset.text.schema import (
    UNKNOWN,
    Form,
    TextSplit,
    check_text_contents,
    has_split,
    is_text,
    open_text_split,
    require_same_tokens,
)
from models import ArchConfig
from models.base import CommonConfig
from training.config import PretrainConfig
from utils.checkpoint.reader import Checkpoint
from utils.config_files import CONFIG_DIR
from utils.errors import UserError
from utils.ranks.world import World, shares

# The vocabulary of a text model is rounded up to a multiple of this, because products of matrices
# with odd sides are slow. The tokens beyond the dataset's are never a label.
VOCAB_MULTIPLE = 256


@dataclass(frozen=True)
class Sizes:
    """The sizes of a dataset of puzzles that a model is built for."""

    seq_len: int
    vocab_size: int
    num_puzzle_identifiers: int

    @staticmethod
    def of(split: Split) -> "Sizes":
        metadata = split.metadata
        return Sizes(metadata.seq_len, metadata.vocab_size, metadata.num_puzzle_identifiers)

    def of_model(self) -> dict[str, int]:
        """Return the sizes that `build_arch` takes."""
        return asdict(self)

    def as_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return asdict(self)


@dataclass(frozen=True)
class TextSizes:
    """What a text model and those who use it need to know of a dataset.

    Attributes:
        vocab_size: that of the model, which is the dataset's, rounded up (VOCAB_MULTIPLE).
        max_len: the most tokens of a sequence that the model has seen.
        mean_context: about the length of the sequence that a token lies in, for counts of FLOPs.
        tokenizer: as in dataset.json: "bytes", the sha256 of tokenizer.json, or "unknown".
        special_tokens: their numbers by name; empty if nobody knows them.
        form: what most samples are; None if nobody knows it.
    """

    vocab_size: int
    max_len: int
    mean_context: int
    tokenizer: str
    special_tokens: dict[str, int]
    form: Form | None = None

    @staticmethod
    def of(split: TextSplit) -> "TextSizes":
        metadata, lengths_N = split.metadata, split.epochs[0].lengths()
        special = metadata.special_tokens
        return TextSizes(
            vocab_size=-(-metadata.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE,
            max_len=metadata.max_len,
            mean_context=round(float((lengths_N.astype(float) ** 2).sum() / lengths_N.sum())),
            tokenizer=metadata.tokenizer,
            special_tokens=special.model_dump() if special is not None else {},
            form=split.form,
        )

    def of_model(self) -> dict[str, int]:
        return {"vocab_size": self.vocab_size}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


AnySizes = Sizes | TextSizes


def sizes_of(split: Split | TextSplit) -> AnySizes:
    return TextSizes.of(split) if isinstance(split, TextSplit) else Sizes.of(split)


def sizes_from(stored: dict[str, Any], arch: ArchConfig) -> AnySizes:
    """Return the sizes that a checkpoint of this architecture holds.

    Raises:
        TypeError: They are others.
    """
    kind: type[AnySizes] = TextSizes if arch.kind == "text" else Sizes
    known = {field.name: field.default is MISSING for field in fields(kind)}
    if not {name for name, is_required in known.items() if is_required} <= stored.keys() <= known.keys():
        raise TypeError(f"{sorted(stored)} are no sizes of data")
    try:
        return TypeAdapter(kind).validate_json(json.dumps(stored), strict=True)
    except ValidationError as error:
        raise TypeError(str(error)) from error


def sizes_of_data(data_path: str, arch: ArchConfig) -> AnySizes:
    """Return the sizes of data that an architecture reads.

    Raises:
        UserError: There are no such data.
    """
    if arch.kind == "text":
        name: SplitName = "train" if has_split(Path(data_path), "train") else "test"
        return TextSizes.of(open_text_split(data_path, name))
    return Sizes.of(open_split(data_path, "test"))


def sizes_of_checkpoint(checkpoint: Checkpoint, arch: ArchConfig) -> AnySizes:
    """Return the sizes of the data that a checkpoint was trained on.

    Raises:
        UserError: It lacks one.
    """
    try:
        return sizes_from(checkpoint.state.task, arch)
    except TypeError as error:
        raise UserError(f"checkpoint {checkpoint.path} is damaged: state.json has other sizes than data") from error


@dataclass
class Data:
    """The splits of a run and the sha256 of their contents, by the name of the split."""

    train: Split | TextSplit
    test: Split | TextSplit | None
    fingerprint: dict[str, str]

    def puzzles(self, name: SplitName) -> Split:
        """Return a split, in code that knows that it holds puzzles."""
        split = self.train if name == "train" else self.test
        assert isinstance(split, Split)
        return split

    @cached_property
    def sizes(self) -> AnySizes:
        return sizes_of(self.train)


def open_data(config: PretrainConfig, world: World) -> Data:
    """Open the splits of a run. Rank 0 also reads their contents once and checks them. Every rank.

    Raises:
        UserError: The data are missing, damaged or of another task than the model, or the ranks
            cannot share the batch.
    """
    fingerprint: dict[str, str] = {}
    with world.shared_errors():
        train = open_own(config, "train")
        test = open_own(config, "test") if config.evaluates else None
        require_whole_shares(config, world)
        for split in filter(None, (train, test)):
            if isinstance(train, TextSplit):
                assert isinstance(split, TextSplit)
                require_same_tokens(train, split)
            else:
                assert isinstance(split, Split) and isinstance(config.arch, CommonConfig)
                require_same_sizes(Sizes.of(train), split, config.arch, " + ".join(config.train_paths))
                _require_no_smoothing_of_small_boards(config.arch, split)
            if world.is_main:
                fingerprint[split.path.name] = (
                    check_text_contents(split) if isinstance(split, TextSplit) else check_contents(split)
                )
    return Data(train, test, world.broadcast_object(fingerprint))


def _require_no_smoothing_of_small_boards(arch: CommonConfig, split: Split) -> None:
    """Raise UserError if a part of the label would be spread over symbols that a board lacks."""
    smoothing = arch.loss.label_smoothing
    if smoothing and any(puzzle_set.corner is not None for puzzle_set in split.sets.values()):
        raise UserError(
            f"arch.loss.label_smoothing is {smoothing:g}, which would ask small boards for symbols that they lack; set "
            "it to 0"
        )


def open_own(config: PretrainConfig, name: SplitName) -> Split | TextSplit:
    """Open the train or the test split of a run.

    Raises:
        UserError: The data are missing or damaged, or the architecture reads others. If the run was
            started in another folder, the message names it.
    """
    paths, here = (config.train_paths if name == "train" else config.test_paths), os.getcwd()
    for path in [*config.train_paths, *paths]:
        if config.started_in not in (None, here) and not (os.path.isabs(path) or os.path.exists(path)):
            key = "data_paths_test" if path not in config.train_paths else "data_path"
            raise UserError(
                f"no dataset at {path}: the run was started in {config.started_in}, and it is neither there nor here "
                f"in {here}; give {key}=<folder of the dataset>"
            )
    _require_kind(config.arch, paths)
    if config.arch.kind == "text":
        if len(paths) > 1:
            raise UserError(
                f"arch={config.arch.name} reads one folder of text, but {len(paths)} are given ({', '.join(paths)}); "
                "build one dataset of all sources"
            )
        is_missing = not os.path.exists(paths[0])
        if is_missing and paths[0] == OmegaConf.select(OmegaConf.load(CONFIG_DIR / "pretrain.yaml"), "data_path"):
            raise UserError(
                f"arch={config.arch.name} reads text, and the default of data_path is a folder of puzzles; give "
                "data_path=<folder of a dataset of text>. dataset/build_text_dataset.py builds one"
            )
        return open_text_split(paths[0], name)
    any_size = config.puzzle_arch.reads_boards_of_any_size
    return open_datasets(paths, name, numbered_by=config.train_paths, any_size=any_size)


def _require_kind(arch: ArchConfig, paths: list[str]) -> None:
    """Raise UserError if a folder holds what the architecture doesn't read."""
    for path in paths:
        holds_text = is_text(path)
        if arch.kind == "puzzles" and holds_text:
            raise UserError(
                f"arch={arch.name} reads puzzles, but {path} holds text; take arch=gpt or arch=hrm_text, or a dataset "
                "of puzzles"
            )
        if arch.kind == "text" and not holds_text and (Path(path) / "train" / "dataset.json").is_file():
            raise UserError(
                f"arch={arch.name} reads text, but {path} holds puzzles; take arch=hrm or arch=trm, or a dataset that "
                "dataset/build_text_dataset.py wrote"
            )


def require_whole_shares(config: PretrainConfig, world: World) -> None:
    """Check that each rank has a part of the global batch, which splits into microbatches.

    The ranks share the slots of puzzles, or the rows of text.

    Raises:
        UserError: Ranks would hold different numbers of slots although rank_weights is not given,
            or a rank would hold none, or the microbatches would differ in size.
    """
    batch_size, num_ranks = config.num_slots, world.data_size
    key, slots_name = config.slots_key
    if batch_size % num_ranks and not config.dist.rank_weights:
        raise UserError(
            f"{key}={batch_size} can't be split over {num_ranks} ranks; "
            f"take {-(-batch_size // num_ranks) * num_ranks}, or another number of ranks"
        )
    slots = world.slice_of(batch_size)
    if slots.start == slots.stop:
        raise UserError(
            f"dist.rank_weights={config.dist.rank_weights} leaves rank {world.rank} none of the {batch_size} "
            f"{slots_name}; take other weights, or a larger {key}"
        )
    config.parallel.require_parts(
        math.gcd(*slots_of_ranks(config, world)), config.grad_accumulation, key=key, slots=slots_name
    )


def slots_of_ranks(config: PretrainConfig, world: World) -> list[int]:
    """Return how many slots (rows of text) each share of the ranks holds."""
    return [share.stop - share.start for share in shares(world.share_weights, config.num_slots)]


def with_tokens_of(sizes: TextSizes, found: TextSizes) -> TextSizes:
    """Return the sizes of a model, with the tokenizer of data if the model does not name its own.

    Published models do not. Data with as many tokens are then taken for theirs.
    """
    if sizes.tokenizer == UNKNOWN and found.vocab_size == sizes.vocab_size:
        return replace(sizes, tokenizer=found.tokenizer, special_tokens=found.special_tokens)
    return sizes


def require_own_tokens(sizes: TextSizes, split: TextSplit, trained_on: str) -> None:
    """Raise UserError unless a token of a split means what it means to a model.

    Args:
        sizes: those of the model.
        trained_on: names the data of the model.
    """
    own = TextSizes.of(split)
    sizes = with_tokens_of(sizes, own)
    if (own.tokenizer, own.special_tokens, own.vocab_size) != (sizes.tokenizer, sizes.special_tokens, sizes.vocab_size):
        raise UserError(
            f"{split.path} has other tokens ({own.tokenizer[:12]}, vocab_size {own.vocab_size}) than {trained_on}, on "
            f"which the model was trained ({sizes.tokenizer[:12]}, vocab_size {sizes.vocab_size}); build it with that "
            "tokenizer"
        )


def require_same_sizes(sizes: Sizes, other: Split, arch: CommonConfig, trained_on: str) -> None:
    """Raise UserError if a model that was built for `sizes` cannot read another split.

    Args:
        trained_on: the training data of the model, for the message.
    """
    theirs = Sizes.of(other)
    if (theirs.seq_len, theirs.vocab_size) != (sizes.seq_len, sizes.vocab_size):
        raise UserError(
            f"{other.path} has puzzles of {theirs.seq_len} tokens and a vocabulary of {theirs.vocab_size}, but the "
            f"model was trained on {trained_on}, with {sizes.seq_len} and {sizes.vocab_size}; "
            "take data of the same task"
        )
    if arch.puzzle_emb_ndim and theirs.num_puzzle_identifiers > sizes.num_puzzle_identifiers:
        raise UserError(
            f"{other.path} has {theirs.num_puzzle_identifiers} puzzle identifiers, but the model's table only "
            f"{sizes.num_puzzle_identifiers} rows, of {trained_on}; take data with puzzles that it was trained on"
        )
