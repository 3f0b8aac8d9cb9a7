"""Before its first trial a sweep says how much it is: trials, parameters, steps and time."""

from pathlib import Path

import pytest

from models import shapes_of
from search import workload as module
from search.study import open_study
from search.workload import Workload
from tests.search.helpers import sweep_of

STEPS = "max_steps=100"


def test_a_grid_is_counted_by_the_sizes_of_its_runs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What can't be timed is unknown, and no fault."""
    typed = ["arch=hrm,trm", "lr=1e-3,2e-3,3e-3", "seed=range(2)", STEPS]
    monkeypatch.setattr(module, "_TIMED_WITHIN_S", 0.01)
    work = Workload(sweep_of(data, tmp_path / "s", *typed))
    assert [(size.arch, size.num_trials, size.num_steps) for size in work.sizes] == [("hrm", 3, 100), ("trm", 3, 100)]
    work.announce()
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "to do: 6 trials of 2 seeds, 12 runs, 1 at a time" and lines[-1].startswith("time: not known")
    for size in work.sizes:
        weights = shapes_of(size.config.arch, **size.sizes.of_model()).parameters()
        line = f"  arch={size.arch}: {sum(weight.numel() for weight in weights):,} parameters, 100 steps"
        assert line in lines


def test_finished_trials_are_not_counted(data: Path, tmp_path: Path) -> None:
    sweep = sweep_of(data, tmp_path / "s", "arch=hrm,trm", "lr=1e-3,2e-3", STEPS)
    with open_study(sweep, create=True) as study:
        study.begin()
        for value in (0.5, 0.6):
            claim = study.claim()
            assert claim is not None and claim.point["arch"] == "hrm"
            study.optuna.tell(claim.trial, value)
        assert study.claim() is not None  # a trial that has begun is not finished
        work = Workload(sweep, study.trials())
    assert work.num_trials == 2 and [(size.arch, size.num_trials) for size in work.sizes] == [("trm", 2)]


def test_the_time_is_that_of_the_runs_side_by_side(data: Path, tmp_path: Path) -> None:
    """More than a day is a warning. Steps follow from the epochs: 30 puzzles in batches of 10."""
    for at_once, time in ((1, "13:20"), (2, "06:40"), (8, "03:20")):
        typed = ["arch=hrm,trm", "seed=range(2)", STEPS, f"sweep.launcher.at_once={at_once}"]
        work = Workload(sweep_of(data, tmp_path / "s", *typed))
        work.sizes[0].step_s, work.sizes[1].step_s = 1.0, 3.0
        assert work.time().startswith(f"time: about {time} for the training steps alone")
    work.sizes[0].step_s = 1e4
    assert work.time().startswith("WARNING")
    work = Workload(sweep_of(data, tmp_path / "s", "epochs=8,16", "max_steps=null", "global_batch_size=10"))
    assert [size.num_steps for size in work.sizes] == [24, 48]


def test_a_process_of_its_own_times_the_steps(data: Path, tmp_path: Path) -> None:
    work = Workload(sweep_of(data, tmp_path / "s", "arch=hrm,trm", STEPS))
    work.time_steps()
    assert all(size.step_s is not None and size.step_s > 0 for size in work.sizes)
