"""The recipes of the benchmark are valid, and its table tells when each reached the target."""

import pytest

from benchmarks.time_to_accuracy import ARMS, SHARED, Reached, seconds_of, shown
from training.config import PretrainConfig
from utils.command_line import read_config, validate


@pytest.mark.parametrize("arm", ARMS)
def test_the_recipes_are_valid(arm: str) -> None:
    config = validate(PretrainConfig, read_config("pretrain", [*ARMS[arm], *SHARED, "data_path=data"]))
    assert config.augment == "online"
    assert config.eval_every_n_steps is not None and config.eval_every_n_steps % config.log_interval == 0


def test_each_row_counts_for_the_steps_since_the_row_before() -> None:
    times = {1: 1000.0, 5: 100.0, 10: 10.0, 12: None, 15: 20.0}
    rows = [{"step": step} | ({} if ms is None else {"perf/step_ms": ms}) for step, ms in times.items()]
    assert seconds_of(rows, 10) == pytest.approx(1.0 + 4 * 0.1 + 5 * 0.01)
    assert seconds_of(rows, 15) == pytest.approx(1.0 + 4 * 0.1 + 5 * 0.01 + 5 * 0.02)


def test_a_recipe_that_never_reached_the_target_has_no_time() -> None:
    results = [
        Reached("fast", 0, 30, 3.0),
        Reached("slow", 0, None, None),
        Reached("fast", 1, 10, 1.0),
        Reached("fast", 2, 20, 2.5),
        Reached("slow", 1, 400, 90.0),
        Reached("never", 0, None, None),
    ]
    assert shown(results, 0.83).splitlines()[2:] == [
        "| fast | 30, 10, 20 | 2.5 (1.0 to 3.0) |",
        "| slow | never, 400 | 90.0 (90.0 to 90.0), 1 of 2 seeds |",
        "| never | never | never |",
    ]
