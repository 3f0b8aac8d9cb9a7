"""The options of a pipeline: what contradicts itself, or doesn't suit the ranks, is refused."""

from typing import Any

import pytest

from models.parallel.pipeline import PipelineConfig
from tests.models.parallel.helpers import config_of
from utils.ranks.config import Axes


def _config(**changes: Any) -> PipelineConfig:
    config = config_of("pipeline", **({"microbatches": 4, "schedule": "gpipe"} | changes))
    assert isinstance(config, PipelineConfig)
    return config


@pytest.mark.parametrize(
    ("changes", "num_ranks", "advice"),
    [
        (
            {"stages": 3},
            4,
            "stages 3 doesn't divide 4 .* stages of 1, 2, 4 with shard 1, .* multiple of 3 ranks",
        ),
        ({"stages": 4, "shard": 2}, 4, "stages 4 x shard 2 .* stages of 1, 2 with shard 2, .* multiple of 8 ranks"),
        ({"shard": 3}, 4, "stages 1 x shard 3 .* stages of 1, 2, 4 with shard 1, .* multiple of 3 ranks"),
        ({"schedule": "1f1b", "microbatches": 2}, 4, "microbatches is 2, .* take 4 or more, or schedule gpipe"),
        ({"schedule": "interleaved", "microbatches": 9}, 4, "microbatches is 9, .* take 8 or 12"),
    ],
)
def test_a_schedule_that_does_not_suit_the_ranks_is_refused(
    changes: dict[str, Any], num_ranks: int, advice: str
) -> None:
    with pytest.raises(ValueError, match=advice):
        _config(**changes).axes(num_ranks)


@pytest.mark.parametrize(
    ("stages", "shard", "axes"),
    [
        (None, 1, Axes(model=8)),
        (2, 1, Axes(replicate=4, model=2)),
        (2, 2, Axes(replicate=2, shard=2, model=2)),
        (None, 2, Axes(shard=2, model=4)),
    ],
)
def test_ranks_that_are_left_make_further_pipelines(stages: int | None, shard: int, axes: Axes) -> None:
    assert _config(stages=stages, shard=shard).axes(8) == axes


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"stages_per_rank": 2}, "stages_per_rank is 2, but schedule gpipe .* set schedule to interleaved"),
        ({"puzzle_table": "sharded"}, "puzzle_table is sharded, .* set it to replicated"),
        ({"microbatches": 0}, "microbatches"),
        ({"schedule": "zigzag"}, "schedule"),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(changes: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        _config(**changes)


def test_microbatches_must_divide_the_slots() -> None:
    _config().require_parts(num_slots=24, num_parts=3)
    with pytest.raises(
        ValueError,
        match=r"30 slots .*microbatches=4 x grad_accumulation=3 .*take 36 slots of global_batch_size for each",
    ):
        _config().require_parts(num_slots=30, num_parts=3)
