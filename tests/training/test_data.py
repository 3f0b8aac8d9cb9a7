"""The data of a run: its sizes, and the shares of the ranks in a batch."""

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from tests.dataset.shapes import split_of
from tests.spawn import world_of
from training.config import PretrainConfig
from training.data import Sizes, require_same_sizes, require_whole_shares, slots_of_ranks
from training.splits import open_data
from utils.command_line import read_config, validate
from utils.ranks.world import World

SINGLE = World.single()


def _config(*typed: str) -> PretrainConfig:
    return validate(PretrainConfig, read_config("pretrain", list(typed)))


def _weighted(*weights: float) -> World:
    return replace(world_of(0, len(weights)), share_weights=tuple(map(Fraction, weights)))


def test_a_run_that_does_not_evaluate_opens_no_test_split(data: Path) -> None:
    opened = open_data(_config(f"data_path={data}", "eval_interval=null", "eval_every_n_steps=null"), SINGLE)
    assert opened.test is None and opened.fingerprint.keys() == {"train"}
    opened = open_data(_config(f"data_path={data}"), SINGLE)
    assert opened.test is not None and opened.fingerprint.keys() == {"train", "test"}
    assert opened.train.path == data / "train" and opened.test.path == data / "test"
    assert opened.sizes == Sizes.of(opened.puzzles("train"))


# ---- slots of ranks ----------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_without_weights_the_ranks_must_divide_the_batch(num_ranks: int) -> None:
    for batch_size in range(num_ranks, 25):
        config, world = _config(f"global_batch_size={batch_size}"), world_of(0, num_ranks)
        if batch_size % num_ranks == 0:
            require_whole_shares(config, world)
            assert slots_of_ranks(config, world) == [batch_size // num_ranks] * num_ranks
            continue
        with pytest.raises(ValueError, match=f"can't be split over {num_ranks} ranks; take ") as caught:
            require_whole_shares(config, world)
        fitting = int(str(caught.value).split("take ")[1].split(",")[0])
        assert fitting == min(n for n in range(batch_size, 100) if n % num_ranks == 0)


def test_weighted_ranks_have_slots_in_proportion() -> None:
    config, world = _config("global_batch_size=12", "dist.rank_weights=[3,1,2]"), _weighted(3, 1, 2)
    require_whole_shares(config, world)
    assert slots_of_ranks(config, world) == [6, 2, 4]


def test_a_rank_without_a_slot_is_refused() -> None:
    config, world = _config("global_batch_size=4", "dist.rank_weights=[0.1,9]"), _weighted(0.1, 9)
    with pytest.raises(ValueError, match="leaves a rank none of the 4 slots; take other weights"):
        require_whole_shares(config, world)


@pytest.mark.parametrize(("parts", "is_fine"), [(1, True), (2, True), (3, False), (4, False), (6, False)])
def test_microbatches_must_divide_the_slots_of_every_rank(parts: int, is_fine: bool) -> None:
    """The ranks have 6, 2 and 4 slots."""
    typed = ("global_batch_size=12", "dist.rank_weights=[3,1,2]", f"grad_accumulation={parts}")
    if is_fine:
        require_whole_shares(_config(*typed), _weighted(3, 1, 2))
    else:
        with pytest.raises(ValueError, match=f"grad_accumulation={parts} doesn't divide the 2 slots of a rank"):
            require_whole_shares(_config(*typed), _weighted(3, 1, 2))


@pytest.mark.parametrize(
    ("microbatches", "parts", "is_fine"), [(2, 1, True), (1, 2, True), (2, 2, False), (4, 1, False), (3, 1, False)]
)
def test_microbatches_must_divide_the_slots_of_every_pipeline(microbatches: int, parts: int, is_fine: bool) -> None:
    """The pipelines have 6, 2 and 4 slots.

    No step checks this again, so every rank must refuse it here, also a rank whose slots would do.
    """
    config = _config(
        "parallel=pipeline",
        "parallel.stages=1",
        f"parallel.microbatches={microbatches}",
        "global_batch_size=12",
        "dist.rank_weights=[3,1,2]",
        f"grad_accumulation={parts}",
    )
    for rank in range(3):
        world = replace(world_of(rank, 3), share_weights=tuple(map(Fraction, (3, 1, 2))))
        if is_fine:
            require_whole_shares(config, world)
        else:
            with pytest.raises(ValueError, match=r"the 2 slots of a pipeline can't be split into parallel.microbatch"):
                require_whole_shares(config, world)


# ---- other data --------------------------------------------------------------------------------


@pytest.mark.parametrize(("seq_len", "vocab_size"), [(81, 11), (81, 12), (82, 11)])
def test_a_model_refuses_data_of_other_sizes(seq_len: int, vocab_size: int) -> None:
    arch, sizes = _config().puzzle_arch, Sizes(81, 11, 1)
    if (seq_len, vocab_size) == (81, 11):
        require_same_sizes(sizes, split_of(seq_len, vocab_size), arch, "data/own")
    else:
        with pytest.raises(
            ValueError,
            match=r"puzzles of 8\d tokens and .*trained on data/own, with 81 and 11; take data of the same task$",
        ):
            require_same_sizes(sizes, split_of(seq_len, vocab_size), arch, "data/own")


@pytest.mark.parametrize(("own", "theirs", "is_fine"), [(3, 3, True), (5, 3, True), (3, 4, False)])
def test_a_model_needs_a_row_for_each_puzzle(own: int, theirs: int, is_fine: bool) -> None:
    split = split_of(81, 11)
    split = replace(split, metadata=split.metadata.model_copy(update={"num_puzzle_identifiers": theirs}))
    sizes = Sizes(81, 11, own)
    require_same_sizes(sizes, split, _config("arch.puzzle_emb_ndim=0").puzzle_arch, "data/own")
    if is_fine:
        require_same_sizes(sizes, split, _config().puzzle_arch, "data/own")
    else:
        with pytest.raises(
            ValueError, match="has 4 puzzle identifiers, but the model's table only 3 rows, of data/own;"
        ):
            require_same_sizes(sizes, split, _config().puzzle_arch, "data/own")
