"""Before its first trial a sweep says how much it is: trials, parameters, steps and time."""

from pathlib import Path

import pytest

from models import shapes_of
from search import workload as module
from search.study import open_study
from search.workload import Workload, announce
from tests.search.helpers import sweep_of

STEPS = "max_steps=100"


def _parameters(work: Workload) -> dict[str, int]:
    return {size.arch: size.num_parameters for size in work.sizes}


def test_a_grid_is_counted_by_the_sizes_of_its_runs(data: Path, tmp_path: Path) -> None:
    typed = ["arch=hrm,trm", "lr=1e-3,2e-3,3e-3", "seed=range(2)", STEPS]
    work = Workload.of(sweep_of(data, tmp_path / "s", *typed))
    assert (work.num_trials, work.num_runs) == (6, 12)
    assert [(size.arch, size.num_trials, size.num_steps) for size in work.sizes] == [("hrm", 3, 100), ("trm", 3, 100)]
    for size in work.sizes:
        model = shapes_of(size.config.arch, **size.sizes.of_model())
        assert size.num_parameters == sum(weight.numel() for weight in model.parameters())


def test_steps_follow_from_the_epochs(data: Path, tmp_path: Path) -> None:
    work = Workload.of(sweep_of(data, tmp_path / "s", "epochs=8,16", "max_steps=null", "global_batch_size=10"))
    assert [size.num_steps for size in work.sizes] == [24, 48], "30 puzzles in batches of 10"


def test_finished_trials_are_not_counted(data: Path, tmp_path: Path) -> None:
    sweep = sweep_of(data, tmp_path / "s", "arch=hrm,trm", "lr=1e-3,2e-3", STEPS)
    with open_study(sweep, create=True) as study:
        study.begin()
        for value in (0.5, 0.6):
            claim = study.claim()
            assert claim is not None and claim.point["arch"] == "hrm"
            study.optuna.tell(claim.trial, value)
        assert study.claim() is not None  # a trial that has begun is not finished
        work = Workload.of(sweep, study.trials())
    assert work.num_trials == 2 and [(size.arch, size.num_trials) for size in work.sizes] == [("trm", 2)]


def test_drawn_points_speak_for_a_search(data: Path, tmp_path: Path) -> None:
    typed = ["arch=hrm,trm", "lr=interval(1e-4,1e-2)", "sweep.trials=40", "sweep.sampler.name=tpe", STEPS]
    work = Workload.of(sweep_of(data, tmp_path / "s", *typed))
    assert work.num_trials == 40 and _parameters(work).keys() == {"hrm", "trm"}
    for size in work.sizes:
        size.step_s = 0.5
    assert work.seconds() == pytest.approx(40 * 100 * 0.5 / work.at_once)


@pytest.mark.parametrize(("at_once", "of_pairs"), [(1, 4), (2, 2), (8, 1)])
def test_the_time_is_that_of_the_runs_side_by_side(data: Path, tmp_path: Path, at_once: int, of_pairs: int) -> None:
    typed = ["arch=hrm,trm", "seed=range(2)", STEPS, f"sweep.launcher.at_once={at_once}"]
    work = Workload.of(sweep_of(data, tmp_path / "s", *typed))
    assert work.seconds() is None
    work.sizes[0].step_s, work.sizes[1].step_s = 1.0, 3.0
    assert work.seconds() == pytest.approx(200 * of_pairs)


def test_more_than_a_day_is_a_warning(data: Path, tmp_path: Path) -> None:
    def warns(*typed: str) -> bool:
        work = Workload.of(sweep_of(data, tmp_path / "s", "seed=range(2)", "sweep.launcher.at_once=1", *typed))
        work.sizes[0].step_s = 50.0
        return work.time().startswith("WARNING")

    assert warns("max_steps=900") and not warns("max_steps=800")


def test_what_cannot_be_timed_is_unknown_and_no_fault(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = sweep_of(data, tmp_path / "s", "arch=hrm,trm", STEPS)
    monkeypatch.setattr(module, "_TIMED_WITHIN_S", 0.01)
    announce(sweep)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4
    for arch, parameters in _parameters(Workload.of(sweep)).items():
        assert any(f"arch={arch}" in line and f"{parameters:,}" in line for line in lines)


def test_a_process_of_its_own_times_the_steps(data: Path, tmp_path: Path) -> None:
    work = Workload.of(sweep_of(data, tmp_path / "s", "arch=hrm,trm", STEPS))
    work.time_steps()
    assert all(size.step_s is not None and size.step_s > 0 for size in work.sizes)
