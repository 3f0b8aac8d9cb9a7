"""The campaign of faults: five of its trials, and its reports of what was lost."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import faults
from benchmarks.faults import Ending, Kind, Trial

SEED = 0


# The five trials: one worker killed, all workers killed, a disk that fills up, a truncated file, a
# flipped bit. tests/test_lost_ranks.py tests the launcher, the hang and the second run.
# tests/test_interrupted.py tests every moment of a save.
@pytest.mark.faults
@pytest.mark.parametrize("number", [0, 3, 7, 9, 10], ids=faults.kind_of)
def test_nothing_is_lost(data: Path, quiet: Path, quiet_2: Path, tmp_path: Path, number: int) -> None:
    result = faults.run_trial(number, SEED, tmp_path, data, {1: quiet, 2: quiet_2})
    assert result.ending == "on resume", f"{result.story}\n{result.failure}"


def _half_a_step(trial: Trial) -> None:
    (trial.run / ".incomplete_step_00000012").mkdir()


def _damaged_older_step(trial: Trial) -> None:
    (trial.run / "step_00000004" / "state.json").write_text("{}")


def _newer_step_is_gone(trial: Trial) -> None:
    trial.newest = 13
    trial.resume()


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_half_a_step, "left behind: ['.incomplete_step_00000012']"),
        (_damaged_older_step, "is damaged: state.json has"),
        (_newer_step_is_gone, "latest names step 12, and named step 13 before"),
    ],
)
def test_a_lost_trial_is_reported_with_its_reason(
    data: Path,
    quiet: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Trial], None],
    told: str,
) -> None:
    def strike(trial: Trial) -> Ending:
        shutil.copytree(quiet, trial.run)
        damage(trial)
        trial.require_quiet_end()
        return "by itself"

    monkeypatch.setitem(faults.KINDS, faults.kind_of(0), Kind(strike, ranks=(1,)))
    result = faults.run_trial(0, SEED, tmp_path, data, {1: quiet})
    assert result.ending == "lost" and result.failure is not None and told in result.failure, result.failure
