"""The data of a run: its sizes, and the shares of the ranks in a batch."""

from contextlib import nullcontext
from dataclasses import replace
from fractions import Fraction

import pytest

from tests.dataset.shapes import split_of
from tests.in_process import pretrain_config
from tests.spawn import world_of
from training.data import Sizes, require_same_sizes, require_whole_shares, slots_of_ranks
from utils.ranks.world import World


def _weighted(*weights: float) -> World:
    return replace(world_of(0, len(weights)), share_weights=tuple(map(Fraction, weights)))


@pytest.mark.parametrize("num_ranks", [1, 3, 8])
def test_without_weights_the_ranks_must_divide_the_batch(num_ranks: int) -> None:
    world = world_of(0, num_ranks)
    for batch_size in range(num_ranks, 25):
        config = pretrain_config(f"global_batch_size={batch_size}")
        if batch_size % num_ranks == 0:
            require_whole_shares(config, world)
            assert slots_of_ranks(config, world) == [batch_size // num_ranks] * num_ranks
            continue
        fitting = min(n for n in range(batch_size, 100) if n % num_ranks == 0)
        with pytest.raises(ValueError, match=f"can't be split over {num_ranks} ranks; take {fitting},"):
            require_whole_shares(config, world)


def test_weighted_ranks_have_slots_in_proportion() -> None:
    """Every rank has a slot, and microbatches divide the slots of every rank."""
    typed, world = ("global_batch_size=18", "dist.rank_weights=[3,2,4]"), _weighted(3, 2, 4)
    assert slots_of_ranks(pretrain_config(*typed), world) == [6, 4, 8]
    for parts in (1, 2):
        require_whole_shares(pretrain_config(*typed, f"grad_accumulation={parts}"), world)
    for parts in (3, 4, 6):
        with pytest.raises(ValueError, match=f"grad_accumulation={parts} doesn't divide the 2 slots of a rank"):
            require_whole_shares(pretrain_config(*typed, f"grad_accumulation={parts}"), world)
    with pytest.raises(ValueError, match="leaves a rank none of the 4 slots; take other weights"):
        require_whole_shares(pretrain_config("global_batch_size=4", "dist.rank_weights=[0.1,9]"), _weighted(0.1, 9))


def test_microbatches_must_divide_the_slots_of_every_pipeline() -> None:
    """Every rank must refuse it here, also a rank whose slots would do."""
    typed = ("parallel=pipeline", "parallel.stages=1", "global_batch_size=12", "dist.rank_weights=[3,1,2]")
    weighted = _weighted(3, 1, 2)
    for microbatches, parts, is_fine in ((2, 1, True), (1, 2, True), (2, 2, False), (4, 1, False), (3, 1, False)):
        config = pretrain_config(*typed, f"parallel.microbatches={microbatches}", f"grad_accumulation={parts}")
        for rank in range(3):
            world = replace(world_of(rank, 3), share_weights=weighted.share_weights)
            with nullcontext() if is_fine else pytest.raises(ValueError, match="the 2 slots of a pipeline can't be"):
                require_whole_shares(config, world)


def test_a_model_refuses_data_of_other_sizes_or_with_more_puzzles() -> None:
    arch, sizes = pretrain_config().puzzle_arch, Sizes(81, 11, 3)
    require_same_sizes(sizes, split_of(81, 11), arch, "data/own")
    for other in (split_of(81, 12), split_of(82, 11)):
        with pytest.raises(ValueError, match=r"puzzles of 8\d tokens and .*trained on data/own, with 81 and 11;"):
            require_same_sizes(sizes, other, arch, "data/own")
    split = split_of(81, 11)
    split = replace(split, metadata=split.metadata.model_copy(update={"num_puzzle_identifiers": 4}))
    require_same_sizes(sizes, split, pretrain_config("arch.puzzle_emb_ndim=0").puzzle_arch, "data/own")
    require_same_sizes(Sizes(81, 11, 4), split, arch, "data/own")
    with pytest.raises(ValueError, match="has 4 puzzle identifiers, but the model's table only 3 rows, of data/own;"):
        require_same_sizes(sizes, split, arch, "data/own")
