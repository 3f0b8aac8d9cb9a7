"""sweep.py as its users meet it: real processes, killed and stopped, and mistakes in one line."""

import re
import runpy
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from optuna.trial import TrialState

import sweep as program
from search.study import Study, open_study
from search.sweep import Sweep
from tests import runs
from tests.forked_runs import fork_runs
from tests.runs import REPOSITORY
from utils.errors import UserError

COMMON = [
    *("debug=tiny", "device=cpu", "checkpoint_every_n_steps=4"),
    *("arch.H_layers=1", "arch.L_layers=1", "arch.halt_max_steps=2"),
]


class Started:
    """A sweep in a process of its own, and the runs below it."""

    def __init__(self, arguments: list[str], log: Path, hook: runs.Hook) -> None:
        self.log = log
        self._running = runs.start(arguments, log, program="sweep", hook=hook)
        self.process = psutil.Process(self._running.processes[0].pid)

    @property
    def runs(self) -> list[psutil.Process]:
        return self.process.children()

    def until(self, condition: Callable[[], bool]) -> None:
        runs.until(condition, self._running)

    def wait(self) -> str:
        return self._running.wait().ok()

    def kill(self) -> None:
        self._running.signal(signal.SIGKILL)
        self._running.wait().killed()

    def end(self) -> None:
        """Kill the sweep and its runs, if they are still there."""
        if self._running.alive:
            for process in [*self.process.children(recursive=True), self.process]:
                process.kill()


def forked(rank: int) -> None:
    fork_runs()


def forked_and_slow(rank: int) -> None:
    """Let a sweep fork its runs. Each step is long enough for a test to disturb it."""
    fork_runs()
    runs.each_step_takes(0.3, rank)  # six steps are left when the test kills the run


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Start sweeps, and end what is left of them after the test."""
    started: list[Started] = []

    def begin(*arguments: str, hook: runs.Hook = forked) -> Started:
        typed = [*arguments, f"sweep.path={tmp_path / 's'}"]
        started.append(Started(typed, tmp_path / f"log_{len(started)}", hook))
        return started[-1]

    yield begin
    for each in started:
        each.end()


def _rows(run: Path) -> list[dict[str, float]]:
    file = run / "metrics.jsonl"
    return runs.rows(run) if file.exists() and file.read_text().endswith("\n") else []


@pytest.mark.faults
def test_a_sweep_survives_kills_of_itself_and_of_its_runs(
    data: Path, tmp_path: Path, start: Callable[..., Started]
) -> None:
    """Eight trials over HRM and TRM, killed hard twice and joined by a second process."""
    typed = [*COMMON, "max_steps=12", "log_interval=2", f"data_path={data}"]
    typed += ["arch=hrm,trm", "lr=1e-3,2e-3", "weight_decay=0.0,0.1", "sweep.launcher.at_once=1"]
    folder = tmp_path / "s"
    first = start(*typed, hook=forked_and_slow)
    first.until(lambda: len(_rows(folder / "trial_0000")) >= 4 and bool(first.runs))
    first.runs[0].kill()
    first.until(lambda: "trial 0: failed, trying it once more (killed by signal 9" in first.log.read_text())
    first.until(lambda: len(_rows(folder / "trial_0001")) >= 4)
    (run,) = first.runs
    first.kill()
    run.wait(timeout=60)  # a run does not outlive its sweep
    assert (folder / "trial_0001/stopped").exists(), "the run has saved a checkpoint"
    finished = (folder / "trial_0000/metrics.jsonl").stat().st_mtime_ns

    second, third = (start(*typed) for _ in range(2))
    third.until(lambda: bool(third.runs))
    told = [second.wait(), third.wait()]
    ended = [int(number) for text in told for number in re.findall(r"^trial (\d+): exact_accuracy", text, re.MULTILINE)]
    assert sorted(ended) == [1, 2, 3, 4, 5, 6, 7], f"trial 0 was finished, and each other one ends once:\n{told}"
    assert (folder / "trial_0000/metrics.jsonl").stat().st_mtime_ns == finished, "a finished trial is not repeated"
    found = Sweep.open(str(folder))
    with open_study(found, create=False) as study:
        values = [trial.value for trial in study.trials()]
        points = [found.space.point_of(trial.params) for trial in study.trials()]
    assert len(values) == 8 and None not in values
    assert points[0] == {"arch": "hrm", "lr": 0.001, "weight_decay": 0.0} and points[7]["arch"] == "trm"
    for number in range(8):
        steps = [row["step"] for row in _rows(folder / f"trial_{number:04d}")]
        assert steps == [1, *range(2, 13, 2)], f"trial {number} has logged {steps}"
    assert values[0] == _rows(folder / "trial_0000")[-1]["eval/all/exact_accuracy"]


@pytest.mark.faults
def test_ctrl_c_stops_the_runs_and_the_same_command_goes_on(
    data: Path, tmp_path: Path, start: Callable[..., Started]
) -> None:
    typed = [*COMMON, "max_steps=2000", "log_interval=1", f"data_path={data}", "lr=1e-3,2e-3"]
    sweep = start(*typed, "sweep.launcher.at_once=2")
    sweep.until(lambda: all(len(_rows(tmp_path / f"s/trial_000{n}")) > 5 for n in range(2)))
    processes = sweep.runs
    assert len(processes) == 2
    sweep.process.send_signal(signal.SIGINT)
    sweep.process.send_signal(signal.SIGINT)  # an impatient user
    text = sweep.wait()
    assert "2 trials" in text.splitlines()[0]
    assert "SIGINT: stopping 2 runs; the same command goes on with them" in text and "Traceback" not in text
    assert not any(process.is_running() for process in processes)
    steps = [runs.latest(tmp_path / f"s/trial_000{n}") for n in range(2)]
    assert all(0 < step < 2000 for step in steps), "each run has saved its last step"
    for number in range(2):
        assert (tmp_path / f"s/trial_000{number}/stopped").read_text() == "SIGTERM\n"
    again = start(*typed, "sweep.launcher.at_once=2")
    again.until(lambda: all(runs.latest(tmp_path / f"s/trial_000{n}") > steps[n] for n in range(2)))
    again.process.send_signal(signal.SIGTERM)
    assert "SIGTERM: stopping 2 runs" in again.wait()
    log = (tmp_path / "s/logs/trial_0000.log").read_text()
    assert f"resuming {tmp_path}/s/trial_0000/step_{steps[0]:08d}" in log


# ---- pages -------------------------------------------------------------------------------------


def _page(*typed: str) -> str:
    page = program.sweep(list(typed))
    return page if isinstance(page, str) else page[0]


@pytest.fixture
def here(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("search.workload.time_steps", lambda *sizes: None)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/4").symlink_to(data)
    return tmp_path


def test_a_dry_run_prints_command_lines_that_run_and_writes_nothing(here: Path) -> None:
    common = ["data_path=data/4", "debug=tiny", "max_steps=2"]
    lines = _page("--dry-run", "lr=1e-4,2e-4", "arch=hrm,trm", "seed=range(3)", *common).splitlines()
    assert len(lines) == 12 and not Path("checkpoints").exists()
    first = "checkpoint_path=checkpoints/sweeps/lr+arch/trial_0000_seed_0"
    assert lines[0] == (
        f"OMP_NUM_THREADS=1 python pretrain.py {' '.join(common)} lr=0.0001 arch=hrm seed=0 {first} "
        "run_name=lr+arch_trial_0000_seed_0 wandb.group=lr+arch"
    )
    assert shlex.split(lines[-1])[6:9] == ["lr=0.0002", "arch=trm", "seed=2"]
    ended = runs.command(lines[-1].replace("pretrain.py", str(REPOSITORY / "pretrain.py")), here)
    assert ended.status == 0, ended.stderr
    assert (here / "checkpoints/sweeps/lr+arch/trial_0003_seed_2/latest").exists()
    search = ["lr=interval(1e-4,1e-2)", "sweep.trials=5", "sweep.sampler.startup_trials=3", "wandb.group=mine"]
    *lines, last = _page("--dry-run", *search, *common).splitlines()
    assert [re.findall(r"wandb\.group=\S+", line) for line in lines] == [["wandb.group=mine"]] * 3
    assert last.startswith("# 2 more trials ")


def test_a_sweep_without_a_value_fails_once_it_is_done(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_one(study: Study, _: object) -> SimpleNamespace:
        study.optuna.tell(study.draw().optuna, state=TrialState.FAIL)
        return SimpleNamespace(run=lambda: len(study.trials()) == 2)

    monkeypatch.setattr(program, "Driver", fail_one)
    typed = ["lr=1e-3,2e-3", "debug=tiny", "data_path=data/4"]
    assert _page("--dry-run", *typed).count("\n") == 1
    assert [program.sweep(typed)[1] for _ in range(2)] == [0, 1]
    assert re.findall(r"to do: (\d) trial", capsys.readouterr().err) == ["2", "2", "1"]


SWEEP_FILE = """
overrides: [debug=tiny, data_path=data/4]
parameters:
  arch: [hrm, trm]
  lr: {log_range: [1e-4, 1e-2]}
"""
MISTAKES = [
    ([], "there is nothing to search"),
    (["sweep=unknown.yaml"], "unknown.yaml:6: unknown key 'sweep.trialz'; did you mean "),
    (["lrr=1,2"], "the config refuses lrr=1: unknown key 'lrr'; did you mean lr?"),
    (["lr=1,2", "sweep.metric=exact_acuracy"], "did you mean eval/all/exact_accuracy"),
    (["lr=1,2", "eval_every_n_steps=null"], "the runs never evaluate"),
    (["lr=1,2", "data_path=data/no"], "no dataset at data/no: "),
    (["lr=shuffle(1,2)"], "is no list of values"),
    (["lr=1,[2"], "'lr=1,[2' can't be read"),
    (["status", "nope"], "there is no sweep at nope"),
]


@pytest.mark.parametrize(("typed", "message"), MISTAKES, ids=[message for _, message in MISTAKES])
def test_a_mistake_is_one_line_before_the_first_trial(here: Path, typed: list[str], message: str) -> None:
    Path("my.yaml").write_text(SWEEP_FILE)
    Path("unknown.yaml").write_text(SWEEP_FILE + "trialz: 3\n")
    common = [] if not typed or typed[0] in ("status", "again") or "sweep" in typed[0] else ["debug=tiny"]
    data = [] if not common or "data_path" in "".join(typed) else ["data_path=data/4"]
    with pytest.raises(UserError) as caught:
        _page(*typed, *common, *data)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not list(Path().rglob("trial_*"))


def test_again_runs_the_best_points_with_other_seeds(here: Path) -> None:
    typed = ["lr=1e-3,2e-3,3e-3", "arch=hrm,trm", "debug=tiny", "data_path=data/4", "sweep.name=old"]
    found = Sweep.read([*typed, "sweep.metric=train/lm_loss", "sweep.direction=minimize"])
    with open_study(found, create=True) as study:
        found.write()
        for value in (0.6, 0.1, 0.4, 0.5, 0.2, 0.3):
            claim = study.claim()
            assert claim is not None
            study.optuna.tell(claim.optuna, value)
    lines = _page("again", "old", "--best", "2", "--dry-run", "seed=range(2)", "max_steps=7").splitlines()
    assert [re.findall(r"(?:lr|arch|seed|max_steps)=(\S+)", line) for line in lines] == [
        ["7", "0.001", "trm", "0"],
        ["7", "0.001", "trm", "1"],
        ["7", "0.003", "hrm", "0"],
        ["7", "0.003", "hrm", "1"],
    ]
    assert "checkpoint_path=checkpoints/sweeps/old_again/trial_0001_seed_1" in lines[3]
    Path("my/arch").mkdir(parents=True)
    Path("my/arch/mine.yaml").write_text((REPOSITORY / "config/arch/hrm.yaml").read_text())
    (line,) = _page("again", "--config-dir", "my", "old", "--best=1", "--dry-run", "arch=mine").splitlines()
    assert " arch=my/arch/mine.yaml " in line
    config = program.read_again(["old", "sweep.name=other"])[0].config
    assert (config.name, config.metric, config.direction) == ("other", "train/lm_loss", "minimize")
    assert len(config.points) == 5
    for mistake in ("--cfg=job", "--best=0"):
        with pytest.raises(UserError, match=mistake[:5]):
            _page("again", "old", mistake)


@pytest.mark.parametrize(
    ("file", "package", "shown"),
    [("sweep.py", "optuna", "python sweep.py status lr_arch"), ("launch/ray_train.py", "ray", "num_workers: ")],
)
def test_without_its_extra_a_program_shows_its_help(
    file: str, package: str, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Anything else names the command, and what to install for it."""

    def without(name: str, *rest: Any) -> Any:
        return None if name.partition(".")[0] == package else find_spec(name, *rest)

    monkeypatch.setattr("importlib.util.find_spec", without)
    monkeypatch.setitem(sys.modules, package, None)
    for typed, status in (["--help"], 0), (["seed=1,2"], 2):
        monkeypatch.setattr("sys.argv", [file, *typed])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(REPOSITORY / file), run_name="__main__")
        assert ended.value.code == status
        out, err = capsys.readouterr()
        assert (shown in out and err == "") if status == 0 else f" needs {package}; pip install" in err


YAML_OF_THE_PAGE = re.findall(r"```yaml\n(.*?)```", (REPOSITORY / "docs/sweeps.md").read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("text", YAML_OF_THE_PAGE, ids=lambda text: text.splitlines()[0])
def test_the_yaml_of_the_page_is_a_sweep(here: Path, text: str) -> None:
    Path("page.yaml").write_text(text)
    found = Sweep.read(["sweep=page.yaml"])
    assert len(found.config.parameters) >= 2 and list(found.space.probes())
