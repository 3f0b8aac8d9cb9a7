"""metrics.jsonl has every step once, W&B never stops a run, and a redirected log is readable."""

import io
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import runs
from utils.dist.world import World
from utils.errors import UserError
from utils.metrics import Metrics, WandbConfig, _Progress

CONFIG = {"project_name": "p", "run_name": "r", "lr": 1e-4}
SINGLE = World.single()


def _metrics(run: Path, *, mode: str = "disabled", first: int = 0, last: int = 10, world: World = SINGLE) -> Metrics:
    wandb = WandbConfig.model_validate({"mode": mode, "entity": None, "group": None, "tags": []})
    return Metrics(world, run, wandb, "abc123", CONFIG, first, last)


def _rows(run: Path) -> list[dict[str, float]]:
    return runs.rows(run)


def _times(run: Path) -> list[float]:
    """Return time_s of every row, in seconds."""
    return [json.loads(line)["time_s"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr("utils.metrics.time.monotonic", lambda: now.s)
    return now


# ---- metrics.jsonl -----------------------------------------------------------------------------


def test_a_row_is_a_line_of_scalars(tmp_path: Path) -> None:
    metrics = _metrics(tmp_path)
    metrics.write(1, {"train/lm_loss": 1.5, "train/lr": 1e-4})
    metrics.write(10, {"eval/all/exact_accuracy": 0.5})
    # The rows are on the disk at once, so that a kill loses no row.
    assert _rows(tmp_path) == [
        {"step": 1, "train/lm_loss": 1.5, "train/lr": 1e-4},
        {"step": 10, "eval/all/exact_accuracy": 0.5},
    ]
    metrics.close()


@pytest.mark.parametrize("torn", ["", '{"step": 4, "train/lm', '{"step"', "\0\0\0", '{"step": 4}garbage', "[1]", "3"])
def test_resuming_drops_later_rows_and_a_torn_last_line(tmp_path: Path, torn: str) -> None:
    whole = "".join(json.dumps({"step": step, "train/lm_loss": step / 2}) + "\n" for step in (1, 2, 3, 4))
    (tmp_path / "metrics.jsonl").write_text(whole + torn)
    metrics = _metrics(tmp_path, first=2)
    assert [row["step"] for row in _rows(tmp_path)] == [1, 2]
    for step in (3, 4, 5):
        metrics.write(step, {"train/lm_loss": 0.0})
    assert [row["step"] for row in _rows(tmp_path)] == [1, 2, 3, 4, 5]
    assert _rows(tmp_path)[1]["train/lm_loss"] == 1.0
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
    metrics.close()


def test_resuming_completes_a_row_without_its_newline(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}')
    metrics = _metrics(tmp_path, first=2)
    metrics.write(3, {"a": 1.0})
    assert [row["step"] for row in _rows(tmp_path)] == [1, 2, 3]
    metrics.close()


def test_every_row_says_when_it_was_written(tmp_path: Path, clock: SimpleNamespace) -> None:
    metrics = _metrics(tmp_path)
    for step, seconds in ((1, 0.25), (2, 1.0), (3, 0.0004)):
        clock.s += seconds
        metrics.write(step, {"a": 1.0})
    assert _times(tmp_path) == [0.25, 1.25, 1.25], "to the millisecond"
    assert list(json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])) == ["step", "time_s", "a"]


def test_the_time_of_a_resumed_run_goes_on_without_the_pause(tmp_path: Path, clock: SimpleNamespace) -> None:
    for first, steps in ((0, (1, 2, 3, 4)), (2, (3, 4)), (4, (5,))):
        clock.s += 1000
        metrics = _metrics(tmp_path, first=first)
        for step in steps:
            clock.s += 10
            metrics.write(step, {"a": 1.0})
    # Steps 3 and 4 were computed twice. The first time is gone with its rows.
    assert _times(tmp_path) == [10.0, 20.0, 30.0, 40.0, 50.0]


@pytest.mark.parametrize("time_s", [None, '"3"', "NaN", "-Infinity", "-1.0", "1" * 400], ids=lambda text: str(text)[:9])
@pytest.mark.parametrize("before_s", [7.5, None])
def test_the_time_goes_on_from_the_last_row_that_has_one(
    before_s: float | None, time_s: str | None, tmp_path: Path, clock: SimpleNamespace
) -> None:
    """Rows of older versions have none, and a stranger's may hold anything."""
    first = "" if before_s is None else f', "time_s": {before_s}'
    second = "" if time_s is None else f', "time_s": {time_s}'
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": 1{first}}}\n{{"step": 2{second}}}\n')
    metrics = _metrics(tmp_path, first=2)
    clock.s += 1
    metrics.write(3, {"a": 1.0})
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["time_s"] == (before_s or 0) + 1


def test_other_ranks_write_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    metrics = _metrics(tmp_path, world=World(rank=1, size=2), mode="online")
    metrics.write(1, {"a": 1.0})
    metrics.advance(1)
    metrics.say("hello")
    metrics.close()
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr() == ("", "")


def test_a_row_that_cannot_be_written_is_a_mistake(tmp_path: Path) -> None:
    metrics = _metrics(tmp_path / "gone")
    with pytest.raises(UserError, match=r"metrics\.jsonl could not be written"):
        metrics.write(1, {"a": 1.0})


# ---- the log -----------------------------------------------------------------------------------


def _shown(progress: "_Progress", stream: io.StringIO) -> list[str]:
    text = stream.getvalue()
    assert "\r" not in text and "\x1b" not in text
    assert text == "" or text.endswith("\n")
    return text.splitlines()


def _train_row(loss: float) -> dict[str, float]:
    return {
        "train/lm_loss": loss,
        "train/accuracy": 0.25,
        "train/exact_accuracy": 0.125,
        "train/lr": 1e-4,
        "perf/examples_per_second": 1234.5,
    }


def test_a_redirected_log_has_lines_with_the_main_figures(clock: SimpleNamespace) -> None:
    stream = io.StringIO()
    progress = _Progress(0, 100, stream)
    clock.s += 10
    progress.advance(10)
    progress.show(10, _train_row(1.5))
    assert _shown(progress, stream) == ["step 10/100  loss 1.5000  acc 0.250  exact 0.125  ex/s 1234  ETA 01:30"]


def test_the_eta_of_a_resumed_run_counts_its_own_steps(clock: SimpleNamespace) -> None:
    stream = io.StringIO()
    progress = _Progress(80, 100, stream)
    clock.s += 10
    progress.show(90, _train_row(1.5))
    assert _shown(progress, stream)[0].endswith("ETA 00:10")


def test_a_long_run_has_few_lines_up_to_its_end(clock: SimpleNamespace) -> None:
    stream = io.StringIO()
    progress = _Progress(0, 1000, stream)
    for step in range(10, 1001, 10):
        clock.s += 1
        progress.advance(step)
        progress.show(step, _train_row(1.0))
    lines = _shown(progress, stream)
    assert 10 <= len(lines) <= 12
    assert lines[0].startswith("step 10/1000") and lines[-1].startswith("step 1000/1000")


def test_every_evaluation_is_shown(clock: SimpleNamespace) -> None:
    stream = io.StringIO()
    progress = _Progress(0, 1000, stream)
    row = {"eval/all/exact_accuracy": 0.5, "eval/all/accuracy": 0.75, "eval/all/exact_accuracy_at_step/1": 0.1}
    for step in (10, 20, 30):
        progress.show(step, row | (_train_row(1.0) if step != 20 else {}))
    lines = [line for line in _shown(progress, stream) if "eval/" in line]
    assert lines == [
        f"step {step}/1000  eval/all/exact_accuracy 0.5000  eval/all/accuracy 0.7500" for step in (10, 20, 30)
    ]
    assert not [line for line in stream.getvalue().splitlines() if "ETA" in line and "loss" not in line]


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_a_progress_bar() -> None:
    stream = _Terminal()
    progress = _Progress(5, 20, stream)
    progress.advance(10)
    progress.show(10, _train_row(1.5))
    progress.say("a line")
    progress.advance(20)
    progress.close()
    text = stream.getvalue()
    assert "\r" in text and "20/20" in text and "loss 1.5000" in text and "ex/s 1234" in text and "a line\n" in text


class _GoesAway(io.StringIO):
    gone = False

    def write(self, text: str) -> int:
        if self.gone:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


class _TerminalThatGoesAway(_GoesAway, _Terminal):
    pass


def test_a_closed_terminal_does_not_end_the_run() -> None:
    for stream in (_GoesAway(), _TerminalThatGoesAway()):
        progress = _Progress(0, 20, stream)
        stream.gone = True
        progress.advance(10)
        progress.show(10, _train_row(1.5) | {"eval/all/exact_accuracy": 0.5})
        progress.say("a line")
        progress.close()


# ---- W&B ---------------------------------------------------------------------------------------


class _WandbError(Exception):
    pass


class _FakeWandb(SimpleNamespace):
    """Takes the place of the package and records the calls."""

    Error = _WandbError

    def __init__(self, *, account: bool = True, reachable: bool = True, login_raises: bool = False) -> None:
        super().__init__(
            account=account, reachable=reachable, login_raises=login_raises, inits=[], logged=[], logins=[]
        )

    def login(self, **options: Any) -> bool:
        self.logins.append(options)
        if self.login_raises:
            raise _WandbError("no credentials")
        return bool(self.account)

    def init(self, **options: Any) -> Any:
        self.inits.append(options)
        if options["mode"] == "online" and not self.reachable:
            raise _WandbError("network\nis unreachable")
        return SimpleNamespace(
            log=lambda row, step: self.logged.append((step, row)),
            finish=lambda exit_code: self.logged.append(("finish", exit_code)),
        )


def _install(monkeypatch: pytest.MonkeyPatch, fake: Any) -> Any:
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))
    return fake


def test_auto_with_an_account_goes_online_under_the_run_s_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _install(monkeypatch, _FakeWandb())
    metrics = _metrics(tmp_path, mode="auto")
    metrics.write(3, {"train/lm_loss": 1.0})
    metrics.close()
    (options,) = fake.inits
    assert (options["mode"], options["id"], options["resume"]) == ("online", "abc123", "allow")
    assert (options["project"], options["name"], options["config"]) == ("p", "r", CONFIG)
    assert fake.logins == [{"prompt": False, "verify": False}]
    assert fake.logged == [(3, {"train/lm_loss": 1.0}), ("finish", 0)]


def test_a_failed_run_is_reported_to_wandb_as_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = _install(monkeypatch, _FakeWandb())
    _metrics(tmp_path, mode="online").close(failed=True)
    assert fake.logged == [("finish", 1)]
    assert fake.logins == []


def test_a_service_that_fails_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake = _install(monkeypatch, _FakeWandb())
    metrics = _metrics(tmp_path, mode="online")
    monkeypatch.setattr(fake, "logged", None)  # every call of log raises
    for step in (1, 2):
        metrics.write(step, {"a": 1.0})
    metrics.close()
    said = capfd.readouterr().err
    assert said.count("W&B fails at step 1 (AttributeError: ") == 1 and "metrics.jsonl goes on alone" in said
    assert [row["step"] for row in _rows(tmp_path)] == [1, 2]


def test_a_silent_server_delays_the_end_only_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    run = SimpleNamespace(finish=lambda exit_code: released.wait(60))
    _install(monkeypatch, SimpleNamespace(Error=_WandbError, init=lambda **options: run))
    began = time.monotonic()
    _metrics(tmp_path, mode="online").close(failed=True, at_most_s=0.2)
    assert time.monotonic() - began < 30
    released.set()


@pytest.mark.parametrize("fake", [_FakeWandb(account=False), _FakeWandb(login_raises=True)], ids=["none", "raises"])
def test_auto_without_an_account_disables_wandb(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _install(monkeypatch, fake)
    metrics = _metrics(tmp_path, mode="auto")
    metrics.write(1, {"a": 1.0})
    metrics.close()
    assert fake.inits == [] and len(_rows(tmp_path)) == 1
    assert "no account found; metrics go to metrics.jsonl only" in capfd.readouterr().err


def test_auto_without_a_network_goes_on_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fake = _install(monkeypatch, _FakeWandb(reachable=False))
    metrics = _metrics(tmp_path, mode="auto")
    metrics.write(1, {"a": 1.0})
    assert [options["mode"] for options in fake.inits] == ["online", "offline"]
    assert fake.inits[1]["resume"] is None
    assert fake.logged == [(1, {"a": 1.0})]
    assert "W&B can't be reached (network is unreachable); going on offline" in capfd.readouterr().err


def test_online_without_a_network_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _install(monkeypatch, _FakeWandb(reachable=False))
    with pytest.raises(
        ValueError, match=r"^wandb.mode=online failed: network is unreachable; wandb.mode=offline needs"
    ):
        _metrics(tmp_path, mode="online")


def test_without_the_package_only_online_and_offline_are_mistakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    _install(monkeypatch, None)
    _metrics(tmp_path, mode="disabled").close()
    assert capfd.readouterr().err == ""
    _metrics(tmp_path, mode="auto").close()
    assert "W&B: not installed; metrics go to metrics.jsonl only" in capfd.readouterr().err
    for mode in ("online", "offline"):
        with pytest.raises(ValueError, match=f"^wandb.mode={mode}, but wandb isn't installed; pip install wandb, or"):
            _metrics(tmp_path, mode=mode)


def test_disabled_never_imports_wandb(quiet: Path, tmp_path: Path) -> None:
    """A new process imports the whole program and writes a row."""
    code = f"""
import sys
from pathlib import Path
import pretrain
from utils.dist.world import World
from utils.metrics import Metrics, WandbConfig
config = WandbConfig(mode="disabled", entity=None, group=None, tags=[])
metrics = Metrics(World.single(), Path({str(tmp_path)!r}), config, "x", {{}}, 0, 1)
metrics.write(1, {{"a": 1.0}})
metrics.close()
assert not [name for name in sys.modules if name.split(".")[0] == "wandb"]
"""
    subprocess.run([sys.executable, "-c", code], cwd=runs.REPOSITORY, check=True, timeout=120)
    assert not list(quiet.rglob("*wandb*"))


def test_offline_needs_neither_an_account_nor_a_network(
    data: Path, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This test uses the real package, without a key and without a network."""
    run = tmp_path / "run"
    hook = runs.with_arguments(_without_account, str(tmp_path / "home"))
    runs.train(runs.settings(data, run, wandb__mode="offline", max_steps=3), log, hook=hook).ok()
    assert list(run.glob("wandb/offline-run-*/run-*.wandb"))
    assert [row["step"] for row in _rows(run)] == [1, 3]


def _without_account(home: str, rank: int) -> None:
    import os

    os.environ |= {"HOME": home, "NETRC": home + "/netrc", "WANDB_CONFIG_DIR": home, "WANDB_CACHE_DIR": home}
    os.environ.pop("WANDB_API_KEY", None)
