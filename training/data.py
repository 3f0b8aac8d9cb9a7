"""The data of a run: its splits, their sizes, and the slots of a batch that each rank has."""

import math
import os
from dataclasses import asdict, dataclass

from dataset.schema import Split, SplitName, check_contents, open_datasets
from models import ArchConfig
from training.config import PretrainConfig
from utils.checkpoint.reader import Checkpoint
from utils.dist.world import World, shares
from utils.errors import UserError


@dataclass(frozen=True)
class Sizes:
    """The sizes of a dataset that a model is built for."""

    seq_len: int
    vocab_size: int
    num_puzzle_identifiers: int

    @staticmethod
    def of(split: Split) -> "Sizes":
        metadata = split.metadata
        return Sizes(metadata.seq_len, metadata.vocab_size, metadata.num_puzzle_identifiers)

    @staticmethod
    def of_checkpoint(checkpoint: Checkpoint) -> "Sizes":
        """Return the sizes of the data that a checkpoint was trained on.

        Raise UserError if it lacks one.
        """
        try:
            return Sizes(**checkpoint.state.task)
        except TypeError as error:
            raise UserError(f"checkpoint {checkpoint.path} is damaged: state.json has other sizes than data") from error

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass
class Data:
    """The splits of a run and the sha256 of their contents, by the name of the split."""

    train: Split
    test: Split | None
    fingerprint: dict[str, str]

    @property
    def sizes(self) -> Sizes:
        return Sizes.of(self.train)


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
            require_same_sizes(Sizes.of(train), split, config.arch, " + ".join(config.train_paths))
            if world.is_main:
                fingerprint[split.path.name] = check_contents(split)
    return Data(train, test, world.broadcast_object(fingerprint))


def open_own(config: PretrainConfig, name: SplitName) -> Split:
    """Open the train or the test split of a run.

    Raises:
        UserError: The data are missing or damaged. If the run was started in another folder, the
            message names it.
    """
    paths, here = (config.train_paths if name == "train" else config.test_paths), os.getcwd()
    for path in [*config.train_paths, *paths]:
        if config.started_in not in (None, here) and not (os.path.isabs(path) or os.path.exists(path)):
            key = "data_paths_test" if path not in config.train_paths else "data_path"
            raise UserError(
                f"no dataset at {path}: the run was started in {config.started_in}, and it is neither there nor here "
                f"in {here}; give {key}=<folder of the dataset>"
            )
    return open_datasets(paths, name, numbered_by=config.train_paths)


def require_whole_shares(config: PretrainConfig, world: World) -> None:
    """Check that each rank has slots of the global batch, and that they split into microbatches.

    Raises:
        UserError: Ranks would hold different numbers of slots although rank_weights is not given,
            or a rank would hold none, or the microbatches would differ in size.
    """
    batch_size, num_ranks = config.global_batch_size, world.data_size
    if batch_size % num_ranks and not config.dist.rank_weights:
        raise UserError(
            f"global_batch_size={batch_size} can't be split over {num_ranks} ranks; "
            f"take {-(-batch_size // num_ranks) * num_ranks}, or another number of ranks"
        )
    slots = world.slice_of(batch_size)
    if slots.start == slots.stop:
        raise UserError(
            f"dist.rank_weights={config.dist.rank_weights} leaves rank {world.rank} none of the {batch_size} slots; "
            "take other weights, or a larger global_batch_size"
        )
    config.parallel.require_parts(math.gcd(*slots_of_ranks(config, world)), config.grad_accumulation)


def slots_of_ranks(config: PretrainConfig, world: World) -> list[int]:
    """Return how many slots of the global batch each share of the ranks holds."""
    return [share.stop - share.start for share in shares(world.share_weights, config.global_batch_size)]


def require_same_sizes(sizes: Sizes, other: Split, arch: ArchConfig, trained_on: str) -> None:
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
