"""A sweep runs each trial once, goes on after a stop, retries failures, and prunes what is poor."""

import signal
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from optuna.trial import FrozenTrial, TrialState

from records.lock import RunLock
from search import driver as driver_module
from search.driver import Driver
from search.report import best_first
from search.study import Study, open_study
from search.sweep import Sweep
from tests.search.finished import Ended, add_trials, finished, read_sweep
from tests.search.helpers import Curve, FakeLauncher, rising, sweep_of
from utils.errors import UserError
from utils.stop import StopSignal


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_module, "_POLL_S", 0.001)


def _run(sweep: Sweep, launcher: FakeLauncher, stop: StopSignal | None = None) -> bool:
    with (
        mock.patch.object(driver_module, "ProcessLauncher", return_value=launcher),
        open_study(sweep, create=True) as study,
    ):
        return Driver(study, stop or StopSignal()).run()


def _trials(sweep: Sweep) -> list[FrozenTrial]:
    with open_study(sweep, create=False) as study:
        return study.trials()


def _states(sweep: Sweep) -> list[TrialState]:
    return [trial.state for trial in _trials(sweep)]


COMPLETE, PRUNED, FAIL, RUNNING = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING


def test_every_point_of_a_grid_runs_once_and_the_best_is_found(data: Path, tmp_path: Path) -> None:
    sweep = sweep_of(data, tmp_path / "s", "lr=1e-4,1e-3,1e-2", "arch=hrm,trm", "sweep.launcher.at_once=2")
    launcher = FakeLauncher(lambda keys, step: rising(keys, step) - 0.2 * (step == 4))
    assert _run(sweep, launcher)
    assert sorted(launcher.started) == [f"trial_{number:04d}" for number in range(6)]
    assert launcher.most_running == 2
    best = best_first(sweep, _trials(sweep))[0]
    assert sweep.space.point_of(best.params) == {"lr": 1e-3, "arch": "hrm"} and best.value == pytest.approx(0.2)
    again = FakeLauncher(rising)
    assert _run(sweep, again) and again.started == [], "a finished sweep repeats nothing"


def test_the_value_of_a_trial_is_the_mean_over_its_seeds(data: Path, tmp_path: Path) -> None:
    """The curve is that of the first seed. It and the second fail once; the third goes ahead."""
    sweep = sweep_of(data, tmp_path / "s", "lr=1e-3,1e-2", "seed=range(3)", "sweep.launcher.at_once=4")
    launcher = FakeLauncher(_fails(2))
    assert _run(sweep, launcher)
    assert sorted(launcher.started)[:5] == [f"trial_0000_seed_{seed}" for seed in (0, 0, 1, 1, 2)]
    best = best_first(sweep, _trials(sweep))[0]
    assert best.value == pytest.approx(0.401)
    assert best.user_attrs["seeds"] == {"0": pytest.approx(0.4), "1": pytest.approx(0.401), "2": pytest.approx(0.402)}
    assert best.intermediate_values == pytest.approx({step: step / 10 for step in (1, 2, 3, 4)})
    assert best.user_attrs["seconds"] == {"0": 40.0, "1": 40.0, "2": 40.0}


class _Stop(StopSignal):
    """A stop that comes after a number of rows."""

    def __init__(self, launcher: FakeLauncher, rows: int) -> None:
        super().__init__()
        self._launcher, self._rows = launcher, rows

    def requested(self) -> bool:
        if self._launcher.ticks >= self._rows:
            self.name = signal.Signals.SIGINT.name
        return super().requested()


def test_a_stopped_sweep_goes_on_where_it_was(data: Path, tmp_path: Path) -> None:
    sweep = sweep_of(data, tmp_path / "s", "lr=1e-4,1e-3", "seed=0,1")
    first = FakeLauncher(rising)
    assert not _run(sweep, first, _Stop(first, 14))
    assert first.started[2:] == ["trial_0001_seed_0", "trial_0001_seed_1"] and not first.running
    assert _states(sweep) == [COMPLETE, RUNNING] and (tmp_path / "s/trial_0001_seed_1/stopped").exists()
    assert not _run(sweep, first, _Stop(first, 0)), "a sweep that was stopped between two trials is not done"

    def stopped_by_somebody_else(keys: dict[str, object], step: int) -> float:
        (tmp_path / "s/trial_0001_seed_1/stopped").touch()
        return rising(keys, step)

    second = FakeLauncher(stopped_by_somebody_else)
    assert _run(sweep, second)
    assert second.started == ["trial_0001_seed_1"] * 2 and second.ticks == 2, "the rest of the last run is left"
    assert [trial.value for trial in _trials(sweep)] == pytest.approx([0.3905, 0.4005])


def _fails(times: int, at_step: int = 2) -> Curve:
    """Return a curve whose run at lr=1e-3 fails so many times at a step."""
    left = [times]

    def curve(keys: dict[str, object], step: int) -> float | None:
        if keys["lr"] == 1e-3 and step == at_step and left[0]:
            left[0] -= 1
            return None
        return rising(keys, step)

    return curve


@pytest.mark.parametrize(
    ("times", "at_step", "kind", "starts", "state"),
    [
        (1, 2, "error: ", 2, COMPLETE),
        (5, 2, "error: ", 2, FAIL),
        (5, 1, "error: ", 1, FAIL),  # before its first row, as it would again
        (5, 1, "fault on rank 1: ", 2, FAIL),
    ],
)
def test_a_run_that_fails_is_started_once_more(
    data: Path, tmp_path: Path, times: int, at_step: int, kind: str, starts: int, state: TrialState
) -> None:
    sweep = sweep_of(data, tmp_path / "s", "lr=1e-4,1e-3", "sweep.launcher.at_once=2")
    launcher = FakeLauncher(_fails(times, at_step))
    launcher.last_words = f"{kind}the ceiling fell down\n"
    assert _run(sweep, launcher) and not launcher.running
    assert launcher.started.count("trial_0001") == starts and _states(sweep) == [COMPLETE, state]
    if state == FAIL:
        assert _trials(sweep)[1].user_attrs["error"] == f"{kind.removeprefix('error: ')}the ceiling fell down"


def test_a_second_start_inherits_no_error_no_stop_and_no_reason(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first start has a damaged row, and is stopped. Then another second start says nothing."""
    monkeypatch.setattr(driver_module, "_STOPS_WITHIN_S", 0.0)

    def curve(keys: dict[str, object], step: int) -> float | None:
        if step == 3 and launcher.started == ["trial_0000"]:
            with open(tmp_path / "s/trial_0000/metrics.jsonl", "a") as file:
                file.write("no row\n")
        launcher.last_words = "error: of the first start\n" if len(launcher.started) == 3 else ""
        return None if step == 2 and keys["lr"] == 2e-3 else rising(keys, step)

    sweep, launcher = sweep_of(data, tmp_path / "s", "lr=1e-3,2e-3"), FakeLauncher(curve)
    assert _run(sweep, launcher)
    assert launcher.started == ["trial_0000"] * 2 + ["trial_0001"] * 2 and _states(sweep) == [COMPLETE, FAIL]
    assert _trials(sweep)[1].user_attrs["error"].startswith("status 1, see ")


def test_trials_that_cannot_even_begin_end_the_sweep(data: Path, tmp_path: Path) -> None:
    """Their reason is a common one, such as data that are gone. It must not use up all points."""
    sweep = sweep_of(data, tmp_path / "s", "lr=1e-3,2e-3,3e-3,4e-3,5e-3")
    with pytest.raises(
        UserError, match=r"the last 3 trials failed before .* \(the ceiling fell down\); .*retry_failed"
    ):
        _run(sweep, FakeLauncher(lambda keys, step: None))
    assert _states(sweep) == [FAIL] * 3
    again = sweep_of(data, tmp_path / "s", "lr=1e-3,2e-3,3e-3,4e-3,5e-3", "sweep.retry_failed=true")
    with pytest.raises(UserError):
        _run(again, FakeLauncher(lambda keys, step: None))
    assert _run(again, FakeLauncher(lambda keys, step: rising(keys, step) if keys["lr"] in (2e-3, 4e-3) else None))
    assert _states(sweep) == [FAIL, COMPLETE] * 2 + [FAIL], "trials that were tried again do not count"


def test_a_value_that_is_no_number_is_a_failure_and_none_ends_the_sweep(data: Path, tmp_path: Path) -> None:
    sweep = sweep_of(data, tmp_path / "nan", "lr=1e-3,1e-4")
    assert _run(sweep, FakeLauncher(lambda keys, step: float("nan") if keys["lr"] == 1e-3 else rising(keys, step)))
    assert _states(sweep) == [FAIL, COMPLETE] and "is nan" in _trials(sweep)[0].user_attrs["error"]
    sweep, launcher = sweep_of(data, tmp_path / "none", "lr=1e-3,1e-4"), FakeLauncher(rising)
    launcher.metric = "eval/all/other"
    with pytest.raises(UserError, match=r"has ended without eval/all/exact_accuracy .*; it logged eval/all/other"):
        _run(sweep, launcher)
    assert _states(sweep) == [RUNNING], "the trial is open: with another metric the sweep would be another"


def test_poor_trials_are_pruned_by_their_first_seed(data: Path, tmp_path: Path) -> None:
    pruner = [f"sweep.pruner.{key}" for key in ("name=median", "startup_trials=2", "warmup_steps=2")]
    sweep = sweep_of(data, tmp_path / "s", "lr=1e-3,2e-3,1e-6", "seed=range(2)", *pruner)
    launcher = FakeLauncher(rising)
    assert _run(sweep, launcher)
    assert _states(sweep) == [COMPLETE, COMPLETE, PRUNED]
    assert "trial_0002_seed_0" in launcher.started and "trial_0002_seed_1" not in launcher.started
    pruned = _trials(sweep)[2]
    assert pruned.user_attrs["pruned_at"] == 2 and max(pruned.intermediate_values) == 2
    assert (tmp_path / "s/trial_0002_seed_0/stopped").exists(), "the run was stopped, not killed: it can be resumed"


@pytest.mark.parametrize(("seeds", "state"), [("0", COMPLETE), ("0,1", PRUNED)])
def test_the_last_step_prunes_only_the_other_seeds(data: Path, tmp_path: Path, seeds: str, state: TrialState) -> None:
    """A trial of one run has its value by then. Other seeds need not start."""
    typed = ["sweep.pruner.name=median", "sweep.pruner.startup_trials=1", "sweep.pruner.warmup_steps=4"]
    sweep = sweep_of(data, tmp_path / "s", "lr=1e-3,1e-6", f"seed={seeds}", *typed)
    launcher = FakeLauncher(rising)
    assert _run(sweep, launcher) and _states(sweep) == [COMPLETE, state]
    assert "trial_0001_seed_1" not in launcher.started


def test_a_pruned_trial_of_another_process_stays_pruned(data: Path, tmp_path: Path) -> None:
    sweep = sweep_of(data, tmp_path / "s", "lr=1e-3,1e-4")
    with open_study(sweep, create=True) as study:
        claim = study.claim()
        assert claim is not None
        claim.optuna.set_user_attr("pruned_at", 3)
        study.give_back(claim)
    launcher = FakeLauncher(rising)
    assert _run(sweep, launcher)
    assert launcher.started == ["trial_0001"] and _states(sweep) == [PRUNED, COMPLETE]


def test_a_trial_waits_until_no_other_process_trains_it(data: Path, tmp_path: Path) -> None:
    """A run whose sweep was killed saves a checkpoint first."""
    sweep = sweep_of(data, tmp_path / "s", "lr=1e-3,1e-4", "sweep.launcher.at_once=2")
    with open_study(sweep, create=True):
        sweep.run_folder(0, 0).mkdir()
    other = ExitStack()
    other.enter_context(RunLock()).take(sweep.run_folder(0, 0), print)

    def curve(keys: dict[str, object], step: int) -> float:
        if launcher.started == ["trial_0001"] and step == 3:
            other.close()
        return rising(keys, step)

    launcher = FakeLauncher(curve)
    assert _run(sweep, launcher)
    assert launcher.started == ["trial_0001", "trial_0000"] and _states(sweep) == [COMPLETE, COMPLETE]


@pytest.mark.parametrize(("budget", "expected"), [("sweep.trials=2", 2), ("sweep.steps=9", 2), ("sweep.steps=8", 1)])
def test_the_budget_ends_a_sweep(data: Path, tmp_path: Path, budget: str, expected: int) -> None:
    """A trial has eight steps. They are looked at before a trial begins. Hours end one start."""
    typed = ["lr=1e-3,1e-4,1e-5", "seed=0,1", budget]
    assert not _run(sweep_of(data, tmp_path / "s", *typed, "sweep.hours=1e-9"), FakeLauncher(rising))
    sweep = sweep_of(data, tmp_path / "s", *typed, "sweep.hours=1")
    assert _states(sweep) == [] and _run(sweep, FakeLauncher(rising))
    assert _states(sweep) == [COMPLETE] * expected


def test_points_that_the_config_refuses_fail_alone(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No probe has both ends of two ranges, so that a combination may turn out wrong later."""
    points = "[{global_batch_size:16,grad_accumulation:2},{global_batch_size:-1},{lr:-1},{global_batch_size:16}]"
    sweep, launcher, kept = sweep_of(data, tmp_path / "s", f"sweep.points={points}"), FakeLauncher(rising), list[int]()
    monkeypatch.setattr("search.study.HEARTBEAT_S", 1e-9)
    monkeypatch.setattr(Study, "keep", lambda _, trials: kept.append(len(trials)))
    assert _run(sweep, launcher)
    assert _states(sweep) == [COMPLETE, FAIL, FAIL, COMPLETE] and len(launcher.started) == 2
    assert "the config refuses global_batch_size=-1: global_batch_size: " in _trials(sweep)[1].user_attrs["error"]
    assert max(kept) > 1, "the trials that wait for their end are in good hands"


def test_a_line_has_the_best_and_the_time_left_of_this_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of four trials had ended before it. Then one takes 30 seconds."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("search.driver.time.monotonic", lambda: clock.now)
    study = finished(read_sweep(tmp_path, parameters={"lr": [0.1, 0.2, 0.3, 0.4]}), [Ended({"lr": 0.1}, (0.1,))])
    driver = Driver(study, StopSignal())
    driver.show("trial 0")
    add_trials(study.optuna, study.sweep, [Ended({"lr": 0.3}, (0.3,))])
    clock.now += 30
    driver.show("trial 1")
    assert capsys.readouterr().err.splitlines() == [
        "trial 0  [1/4, best 0.1000 (trial 0), time left unknown]",
        "trial 1  [2/4, best 0.3000 (trial 1), 01:00 left]",
    ]
