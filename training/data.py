"""The sizes of data, what a model requires of them, and what each rank has of a batch."""

import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dataset.schema import Split
from dataset.text.schema import UNKNOWN, Form, TextSplit
from models import shapes_of
from models.base import CommonConfig
from models.model import Model
from training.config import PretrainConfig
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

    def as_dict(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        return asdict(self)

    of_model = as_dict  # what `build_arch` takes

    def __str__(self) -> str:
        return ", ".join(f"{key} {value:,}" for key, value in asdict(self).items())


@dataclass(frozen=True)
class TextSizes:
    """What a text model and those who use it need to know of a dataset."""

    vocab_size: int  # that of the model, which is the dataset's, rounded up (VOCAB_MULTIPLE)
    max_len: int  # the most tokens of a sequence that the model has seen
    mean_context: int  # about the length of the sequence that a token lies in, for counts of FLOPs
    tokenizer: str  # as in dataset.json: "bytes", the sha256 of tokenizer.json, or "unknown"
    special_tokens: dict[str, int]  # their numbers by name; empty if nobody knows them
    form: Form | None = None  # what most samples are; None if nobody knows it

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

    def __str__(self) -> str:
        return f"vocab_size {self.vocab_size:,}, sequences of {self.mean_context:,} tokens"


AnySizes = Sizes | TextSizes
AnySplit = Split | TextSplit


@dataclass
class Data:
    """The splits of a run and the sha256 of their contents, by the name of the split."""

    train: AnySplit
    test: AnySplit | None
    sizes: AnySizes  # of the training data
    fingerprint: dict[str, str]


def model_on_meta(config: PretrainConfig, sizes: AnySizes) -> Model:
    """Return the whole model of a run on the meta device, whose tensors have no memory."""
    arch = config.arch
    if arch.forward_dtype == "auto":
        arch = arch.model_copy(update={"forward_dtype": "float32"})
    model = shapes_of(arch, **sizes.of_model())
    model.freeze("weights" if config.freeze_weights else config.freeze)
    return model


def num_parameters(config: PretrainConfig, sizes: AnySizes) -> int:
    """Return the number of parameters of a run's whole model, without its puzzle table."""
    return sum(weight.numel() for weight in model_on_meta(config, sizes).parameters())


def require_whole_shares(config: PretrainConfig, world: World) -> None:
    """Check that each rank has slots of the global batch, which split into microbatches."""
    batch_size, num_ranks = config.num_slots, world.data_size
    key, slots_name = config.slots_key
    if batch_size % num_ranks and not config.dist.rank_weights:
        raise UserError(
            f"{key}={batch_size} can't be split over {num_ranks} ranks; "
            f"take {-(-batch_size // num_ranks) * num_ranks}, or another number of ranks"
        )
    held = slots_of_ranks(config, world)
    if not min(held):
        raise UserError(
            f"dist.rank_weights={config.dist.rank_weights} leaves a rank none of the {batch_size} {slots_name}; take "
            f"other weights, or a larger {key}"
        )
    config.parallel.require_parts(math.gcd(*held), config.grad_accumulation, key=key, slots=slots_name)


def slots_of_ranks(config: PretrainConfig, world: World) -> list[int]:
    """Return how many slots (rows of text) each share of the ranks holds."""
    return [share.stop - share.start for share in shares(world.share_weights, config.num_slots)]


def with_tokens_of(sizes: TextSizes, found: TextSizes, data: str | Path, trained_on: str) -> TextSizes:
    """Return the sizes of a model, with the tokenizer of data if the model does not name its own.

    Published models do not. Data with as many tokens are then taken for theirs.
    """
    if sizes.tokenizer == UNKNOWN and found.vocab_size == sizes.vocab_size:
        sizes = replace(sizes, tokenizer=found.tokenizer, special_tokens=found.special_tokens)
    tokens = (found.tokenizer, found.special_tokens, found.vocab_size)
    if tokens != (sizes.tokenizer, sizes.special_tokens, sizes.vocab_size):
        raise UserError(
            f"{data} has other tokens ({found.tokenizer[:12]}, vocab_size {found.vocab_size}) than {trained_on}, on "
            f"which the model was trained ({sizes.tokenizer[:12]}, vocab_size {sizes.vocab_size}); build it with that "
            "tokenizer"
        )
    return sizes


def require_same_sizes(sizes: Sizes, other: Split, arch: CommonConfig, trained_on: str) -> None:
    """Raise UserError if a model that was built for `sizes` cannot read another split."""
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
