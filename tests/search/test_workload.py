"""Before its first trial a sweep says how much it is: trials, parameters, steps and time."""

import json
import subprocess
from pathlib import Path

import pytest

from search import workload
from search.launchers import ProcessLauncher, SeedRun
from search.study import open_study
from search.sweep import Sweep
from search.workload import Size, announce, time_line, time_steps
from tests.search.helpers import sweep_of


def _fixed(sweep: Sweep, sizes: list[Size]) -> None:
    """Let a step of the first size take a second, and a step of the others three."""
    for number, size in enumerate(sizes):
        size.step_s = 3.0 if number else 1.0


def test_what_is_left_is_counted_by_the_sizes_of_its_runs(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Finished trials do not count, and runs are side by side."""
    typed = ["arch=hrm,trm", "lr=1e-3,2e-3", "seed=range(2)", "max_steps=100", "sweep.launcher.at_once=2"]
    sweep = sweep_of(data, tmp_path / "s", *typed)
    monkeypatch.setattr(workload, "time_steps", _fixed)
    announce(sweep)
    with open_study(sweep, create=True) as study:
        for value in (0.5, 0.6):
            claim = study.claim()
            assert claim is not None and claim.point["arch"] == "hrm"
            study.optuna.tell(claim.optuna, value)
        assert study.claim() is not None  # a trial that has begun is not finished
        announce(sweep, study.trials())
    hrm, trm = (
        f"  arch={arch}: {number} parameters, 100 steps" for arch, number in (("hrm", "229,826"), ("trm", "57,794"))
    )
    steps = "for the training steps alone, by a step of 1 s with arch"
    assert capsys.readouterr().err.splitlines() == [
        *(
            "to do: 4 trials of 2 seeds, 8 runs, 2 at a time",
            hrm,
            trm,
            f"time: about 13:20 {steps}=hrm, 3 s with arch=trm",
        ),
        *("to do: 2 trials of 2 seeds, 4 runs, 2 at a time", trm, f"time: about 03:20 {steps}=trm"),
    ]


def test_steps_follow_from_the_epochs_and_more_than_a_day_is_a_warning(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """30 puzzles in batches of 10. What can't be timed is unknown, and no fault."""
    typed = ["epochs=8,16", "max_steps=null", "global_batch_size=10", "sweep.launcher.at_once=9"]
    monkeypatch.setattr(workload, "_TIMED_WITHIN_S", 0.0)
    announce(sweep_of(data, tmp_path / "s", *typed))
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "to do: 2 trials, 2 runs, 2 at a time"
    assert lines[1].endswith("parameters, 24 to 48 steps") and lines[2].startswith("time: not known")
    sizes = [Size("hrm", [], 1, 24, 1, 1e4), Size("hrm", [], 1, 48, 1)]
    line = time_line(sweep_of(data, tmp_path / "s", *typed), sizes, 2)
    assert line.startswith("WARNING: this sweep takes more than a day; time: about 133:20:00")
    for budget in ("sweep.steps=100", "sweep.pruner.name=median"):
        line = time_line(sweep_of(data, tmp_path / "s", *typed, budget, "sweep.hours=2"), sizes, 2)
        assert line.startswith("time: at most about 133:20:00") and line.endswith("; it stops after sweep.hours=2")


def test_ctrl_c_leaves_no_training(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once the time is over, no other size is started."""
    started: list[SeedRun] = []
    rows = [{"step": step, "perf/step_ms": step_ms} for step, step_ms in enumerate((900, 250, 500, 300), 1)]

    def start(launcher: ProcessLauncher, runs: list[SeedRun]) -> None:
        started.extend(runs)
        runs[0].folder.mkdir()
        (runs[0].folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        runs[0].job = subprocess.Popen(["sleep", "60"])

    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ProcessLauncher, "start", start)
    sweep, sizes = sweep_of(data, tmp_path / "s", "lr=1e-3,2e-3"), [Size("hrm", [], 1, 1), Size("trm", [], 1, 1)]
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr("search.workload.time.sleep", interrupt)
        time_steps(sweep, sizes)
    time_steps(sweep, sizes[:1])
    assert sizes[0].step_s == 0.25
    monkeypatch.setattr(workload, "_TIMED_WITHIN_S", 0.02)
    rows.clear()
    time_steps(sweep, sizes)
    assert sizes[0].step_s is None, "a run that logged no step has no time"
    assert not (tmp_path / "s").exists() and not any(run.folder.exists() for run in started)
    own = {"log_interval=1", "wandb.mode=disabled"}
    assert all(own <= {*run.arguments} for run in started), "each step is timed, but not shown in W&B"
    assert len(started) == 3 and all(run.job is not None and run.job.poll() == -9 for run in started)
