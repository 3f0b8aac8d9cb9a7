"""metrics.jsonl has every step once, no optional sink stops a run, a redirected log is readable."""

import contextlib
import io
import json
import os
import re
import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import matplotlib
import pytest

from records.metrics import Metrics, Picture, WandbConfig
from records.metrics.progress import Progress
from tests import runs
from utils.errors import UserError
from utils.ranks.world import World

CONFIG = {"project_name": "p", "run_name": "r", "lr": 1e-4}
SINGLE = World.single()
WANDB: dict[str, object] = {"entity": None, "group": None, "tags": [], "pictures": 0, "artifacts": "none"}


def _metrics(
    run: Path,
    *,
    mode: str = "disabled",
    first: int = 0,
    last: int = 10,
    world: World = SINGLE,
    tensorboard: bool = False,
    trackio: bool = False,
    **options: object,
) -> Metrics:
    wandb = WandbConfig.model_validate(WANDB | {"mode": mode, **options})
    named = {"id": "abc123", "project": "p", "name": "r", "config": CONFIG}
    return Metrics(world, run, wandb, tensorboard, trackio, named, first, last)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(s=100.0)
    monkeypatch.setattr("time.monotonic", lambda: now.s)
    return now


# ---- metrics.jsonl -----------------------------------------------------------------------------


@pytest.mark.parametrize("torn", ["", '{"step"', "\0\0\0", '{"step": 4}garbage', "[1]"])
def test_resuming_drops_later_rows_and_a_torn_last_line(tmp_path: Path, torn: str) -> None:
    whole = "".join(json.dumps({"step": step, "train/lm_loss": step / 2}) + "\n" for step in (1, 2, 3, 4))
    (tmp_path / "metrics.jsonl").write_text(whole + torn)
    metrics = _metrics(tmp_path, first=2)
    assert [row["step"] for row in runs.rows(tmp_path)] == [1, 2]
    for step in (3, 4, 5):
        metrics.write(step, {"train/lm_loss": 0.0})
    assert [row["train/lm_loss"] for row in runs.rows(tmp_path)] == [0.5, 1.0, 0.0, 0.0, 0.0]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_time_of_a_resumed_run_goes_on_without_the_pause(
    tmp_path: Path, clock: SimpleNamespace, capfd: pytest.CaptureFixture[str]
) -> None:
    for first, steps in ((0, (1, 2, 3, 4)), (2, (3, 4)), (4, (5,))):
        clock.s += 1000
        metrics = _metrics(tmp_path, first=first)
        for step in steps:
            clock.s += 10
            metrics.write(step, {"train/loss": 1.0})
    assert capfd.readouterr().err.endswith("ETA 00:50\n"), "the last start took 10 s for each step"
    # Steps 3 and 4 were computed twice. The first time is gone with its rows.
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["time_s"] for line in lines] == [10.0, 20.0, 30.0, 40.0, 50.0]


def test_other_ranks_write_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    metrics = _metrics(tmp_path, world=World(rank=1, size=2), mode="online")
    metrics.write(1, {"a": 1.0})
    metrics.advance(1)
    metrics.say("hello")
    metrics.close()
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr() == ("", "")


def test_what_cannot_be_written_is_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = _metrics(tmp_path / "gone")
    with pytest.raises(UserError, match=r"metrics\.jsonl could not be written"):
        metrics.write(1, {"a": 1.0})
    (tmp_path / "gone").mkdir()
    metrics.close()
    assert [row["step"] for row in runs.rows(tmp_path / "gone")] == [1], "the row that waited is lost"
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    expected = r"^tensorboard=true, but tensorboard isn't installed; pip install -r requirements-tensorboard.txt, or"
    with pytest.raises(UserError, match=expected):
        _metrics(tmp_path, tensorboard=True)
    assert list(tmp_path.iterdir()) == [tmp_path / "gone"]


# ---- the log -----------------------------------------------------------------------------------


def _train_row(loss: float) -> dict[str, float]:
    return {
        "train/lm_loss": loss,
        "train/accuracy": 0.25,
        "train/exact_accuracy": 0.125,
        "train/lr": 1e-4,
        "perf/examples_per_second": 1234.5,
    }


def test_a_redirected_log_has_few_lines_up_to_the_end(clock: SimpleNamespace) -> None:
    """An evaluation shows what evaluators found."""
    stream = io.StringIO()
    progress = Progress(100, 1100, stream)
    for step in range(110, 1101, 10):
        clock.s += 1
        progress.advance(step)
        progress.write(step, _train_row(1.0))
    names = ("lm_loss", "accuracy", "exact_accuracy", "valid_boards", "pass@2", "exact_accuracy_at_step/1", "steps")
    progress.write(1100, {"train/loss": 2.5, "perf/tokens_per_second": 6.0})
    progress.write(1100, {f"eval/{of}/{name}": 0.25 for of in ("b", "a") for name in names} | {"perf/eval_share": 0.1})
    text = stream.getvalue()
    assert "\r" not in text and "\x1b" not in text and text.endswith("\n")
    assert all(re.match(r"[0-2]\d:[0-5]\d:[0-6]\d  \S", line) for line in text.splitlines())
    *lines, evaluated = [line.split("  ", 1)[1] for line in text.splitlines()]
    assert 10 <= len(lines) <= 12
    assert lines[0] == "step 110/1100  loss 1.0000  acc 0.250  exact 0.125  ex/s 1234  ETA 01:39"
    assert lines[-2].startswith("step 1100/1100")
    assert lines[-1] == "step 1100/1100  loss 2.5000  tok/s 6  ETA 00:00", "of text"
    shown = ("exact_accuracy", "accuracy", "valid_boards", "pass@2")
    expected = [f"eval/{of}/{name} 0.2500" for of in "ab" for name in shown]
    assert evaluated == "  ".join(["step 1100/1100", *expected])


def test_a_progress_bar_outlives_its_terminal() -> None:
    stream = io.StringIO()
    stream.isatty = lambda: True  # type: ignore[method-assign]
    progress = Progress(5, 20, stream)
    for write in (stream.write, Mock(side_effect=BrokenPipeError(32, "Broken pipe"))):
        stream.write = write  # type: ignore[method-assign]
        progress.advance(10)
        progress.write(10, _train_row(1.5) | {"eval/all/exact_accuracy": 0.5})
        progress.say("a line")
        progress.advance(20)
    progress.close()
    text = stream.getvalue()
    shown = ("\r", " 5/20", "20/20", "loss 1.5000", "ex/s 1234", "a line\n")
    assert [each for each in shown if each in text] == [*shown]


# ---- W&B ---------------------------------------------------------------------------------------


class _FakeWandb(SimpleNamespace):
    """Takes the place of the package and records the calls."""

    class Error(Exception):
        pass

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(account=True, reachable=True, sweep_id=None, inits=[], logged=[], logins=[], artifacts=[])
        monkeypatch.setitem(sys.modules, "wandb", self)
        monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("somebody was asked"))

    def setup(self) -> Any:
        return SimpleNamespace(settings=SimpleNamespace(sweep_id=self.sweep_id))

    def login(self, **options: Any) -> bool:
        self.logins.append(options)
        if self.account is None:
            raise self.Error("no credentials")
        return bool(self.account)

    def init(self, **options: Any) -> Any:
        self.inits.append(options)
        if options["mode"] == "online" and not self.reachable:
            raise self.Error("network\nis unreachable")
        return SimpleNamespace(
            id=options["id"],
            log=lambda row, step: self.logged.append((step, row)),
            log_artifact=lambda artifact, aliases: self.artifacts.append((artifact, aliases)),
            finish=lambda exit_code: self.logged.append(("finish", exit_code)),
        )

    def Table(self, **table: Any) -> list[dict[str, Any]]:
        return [dict(zip(table["columns"], line, strict=True)) for line in table["data"]]

    def Artifact(self, name: str, **options: Any) -> SimpleNamespace:
        files: dict[str, bytes] = {}

        def add_file(path: str, *, name: str, skip_cache: bool) -> None:
            files[name] = Path(path).read_bytes()

        return SimpleNamespace(name=name, files=files, add_file=add_file, **options)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> _FakeWandb:
    return _FakeWandb(monkeypatch)


def test_a_service_that_fails_ends_no_run(
    fake: _FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Rows, copies and uploads of checkpoints fail. The agent that named the run hears its end."""
    fake.sweep_id = "a sweep"
    metrics = _metrics(tmp_path, mode="online", artifacts="all", pictures=2)
    monkeypatch.setattr(fake, "artifacts", None)
    metrics.add_checkpoint(_step_folder(tmp_path, 2), is_best=False)
    monkeypatch.setattr(fake, "Artifact", None)
    metrics.add_checkpoint(_step_folder(tmp_path, 4), is_best=False)
    metrics.write(1, {"a": 1.0})
    with monkeypatch.context() as broken:
        broken.setattr(fake, "logged", None)
        for step in (2, 3):
            metrics.write(step, {"a": 1.0})
    metrics.add_checkpoint(_step_folder(tmp_path, 6), is_best=False)
    metrics.close(failed=True)
    assert (fake.inits[0]["id"], metrics.num_pictures) == (None, 0)
    assert fake.logged == [(1, {"a": 1.0}), ("finish", 1)], "a run that W&B knows must end there"
    said = capfd.readouterr().err
    for what in ("step 2", "step_00000002", "step_00000004"):
        assert said.count(f"W&B does not take {what}") == 1, said
    assert said.count("W&B does not take") == 3, said
    assert [row["step"] for row in runs.rows(tmp_path)] == [1, 2, 3]


@pytest.mark.parametrize("account", [False, None])
def test_auto_without_an_account_or_a_network_goes_on(
    fake: _FakeWandb, tmp_path: Path, capfd: pytest.CaptureFixture[str], account: bool | None
) -> None:
    fake.account = account
    _metrics(tmp_path / "none", mode="auto").close()
    assert fake.inits == []
    assert "metrics go to metrics.jsonl only" in capfd.readouterr().err
    fake.account, fake.reachable = True, False
    _metrics(tmp_path, mode="auto").write(1, {"a": 1.0})
    assert [options["mode"] for options in fake.inits] == ["online", "offline"]
    assert fake.inits[1]["resume"] is None and fake.logged == [(1, {"a": 1.0})]
    assert "W&B can't be reached (network is unreachable); going on offline" in capfd.readouterr().err
    with pytest.raises(UserError, match=r"^wandb.mode=online failed: network is unreachable"):
        _metrics(tmp_path, mode="online")


@pytest.mark.parametrize("reason", ["not installed", "is not a valid server address"])
def test_what_hinders_wandb_is_a_mistake_only_where_it_was_asked_for(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The real package checks its settings before anything else."""
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_BASE_URL", "https://app.wandb.ai")  # no server of runs
    if reason == "not installed":
        monkeypatch.setitem(sys.modules, "wandb", None)
    _metrics(tmp_path, mode="disabled").close()
    assert capfd.readouterr().err == ""
    _metrics(tmp_path, mode="auto").close()
    said = capfd.readouterr().err
    assert reason in said and "metrics go to metrics.jsonl only" in said
    for mode in ("online", "offline"):
        with pytest.raises(UserError, match=f"^wandb.mode={mode} failed: .*{reason}"):
            _metrics(tmp_path, mode=mode)


# ---- W&B: the table of evaluations, pictures and checkpoints -----------------------------------


def test_the_table_has_a_line_for_each_set_of_each_evaluation(
    fake: _FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resumed run has those that it kept. Where they are too many, the oldest are left out."""
    monkeypatch.setattr("records.metrics.weights_and_biases._MOST_LINES", 3)
    of_run: dict[str, Any] = {"entity": "e", "group": "g", "tags": ["a", "b"]}
    scores = {"eval/all/accuracy": 0.1, "eval/all/exact_accuracy_at_step/2": 0.5, "eval/hard/accuracy": 0.0}
    metrics = _metrics(tmp_path, mode="auto", **of_run)
    metrics.write(1, scores | {"train/lm_loss": 1.0})
    metrics.write(2, {"train/lm_loss": 1.0})
    metrics.write(3, scores)
    metrics.close()
    _metrics(tmp_path, mode="auto", first=2, **of_run).write(3, {"eval/all/accuracy": 0.3, "eval/all/pass@2": 0.25})
    for options in fake.inits:
        assert (options["mode"], options["id"], options["resume"]) == ("online", "abc123", "allow")
        assert (options["project"], options["name"], options["config"]) == ("p", "r", CONFIG)
        assert {name: options[name] for name in of_run} == of_run and options["dir"] == str(tmp_path)
    assert fake.logins == [{"prompt": False, "verify": False}] * 2
    (_, first), (_, between), (_, third), finish, (_, last) = fake.logged
    assert [(line["step"], line["set"]) for line in third["evaluations"]] == [(1, "hard"), (3, "all"), (3, "hard")]
    assert finish == ("finish", 0)
    assert "evaluations" not in between and first["eval/all/accuracy"] == 0.1 and first["train/lm_loss"] == 1.0
    assert first["evaluations"] == [
        {"step": 1, "set": "all", "accuracy": 0.1, "exact_accuracy_at_step/2": 0.5},
        {"step": 1, "set": "hard", "accuracy": 0.0, "exact_accuracy_at_step/2": None},
    ]
    lines = [(line["step"], line["set"], line["accuracy"], line["pass@2"]) for line in last["evaluations"]]
    assert lines == [(1, "all", 0.1, None), (1, "hard", 0.0, None), (3, "all", 0.3, 0.25)]


def test_pictures_are_drawn_only_for_wandb_and_with_matplotlib(
    fake: _FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With the real package below, a run sends pictures."""
    unwanted = [Picture("puzzle", lambda file: pytest.fail("a picture was drawn"))]
    for mode in ("disabled", "online"):
        metrics = _metrics(tmp_path, mode=mode)
        metrics.show(5, unwanted)
        assert metrics.num_pictures == 0 and fake.logged == []
    assert _metrics(tmp_path, mode="online", pictures=2).num_pictures == 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert _metrics(tmp_path, mode="online", pictures=2).num_pictures == 0
    assert "pip install -r requirements-demo.txt" in capfd.readouterr().err


def _step_folder(run: Path, step: int) -> Path:
    folder = run / f"step_{step:08d}"
    (folder / "state").mkdir(parents=True)
    (folder / "state" / "rank_0000.safetensors").write_text(f"state {step}")
    (folder / "model.safetensors").write_text(f"weights {step}")
    return folder


@pytest.mark.parametrize(("artifacts", "uploaded"), [("none", []), ("best", [4]), ("all", [2, 4, 6])])
def test_checkpoints_are_uploaded_if_the_config_asks(
    fake: _FakeWandb, tmp_path: Path, artifacts: str, uploaded: list[int]
) -> None:
    metrics = _metrics(tmp_path, mode="online", artifacts=artifacts)
    for step in (2, 4, 6):
        folder = _step_folder(tmp_path, step)
        metrics.add_checkpoint(folder, is_best=step == 4)
        shutil.rmtree(folder)  # as keep_last_k may do
    metrics.close()
    assert fake.logged == [("finish", 0)], "the run must end after the uploads"
    assert [artifact.metadata for artifact, _ in fake.artifacts] == [{"step": step} for step in uploaded]
    for (artifact, aliases), step in zip(fake.artifacts, uploaded, strict=True):
        assert (artifact.name, artifact.type) == ("checkpoint-abc123", "checkpoint")
        assert aliases == ["latest", f"step_{step:08d}", *(["best"] if step == 4 else [])]
        contents = {"model.safetensors": b"weights %d", "state/rank_0000.safetensors": b"state %d"}
        assert artifact.files == {name: text % step for name, text in contents.items()}


def test_a_slow_upload_does_not_delay_training(
    fake: _FakeWandb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, has_begun, uploads = threading.Event(), threading.Event(), list[str]()
    metrics = _metrics(tmp_path, mode="online", artifacts="all")

    def upload(sent: Any) -> None:
        uploads.append(sent[1][1])
        has_begun.set()
        released.wait(60)

    monkeypatch.setattr(fake, "artifacts", SimpleNamespace(append=upload))
    began = time.monotonic()
    for step in (2, 4):
        metrics.add_checkpoint(_step_folder(tmp_path, step), is_best=False)
    metrics.close(failed=True, at_most_s=0.2)
    assert time.monotonic() - began < 30
    assert has_begun.wait(30)
    assert uploads == ["step_00000002"], "an upload overtakes one before, which is then called the latest"
    released.set()


# ---- TensorBoard -------------------------------------------------------------------------------


def _curves(run: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard")).Reload()
    found: dict[str, dict[int, float]] = {}
    for name in events.Tags()["scalars"]:
        scalars = events.Scalars(name)
        found[name] = {one.step: one.value for one in scalars}
        assert len(found[name]) == len(scalars), f"{name} has a step twice"
    return found


def test_trackio_keeps_a_run_and_goes_on_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # which is read when it is imported
    pytest.importorskip("trackio", reason="Trackio isn't installed (requirements-trackio.txt)")
    for first, steps in ((0, (1, 2)), (2, (3, 4))):
        metrics = _metrics(tmp_path, trackio=True, first=first)
        for step in steps:
            metrics.write(step, {"train/lm_loss": 1.0 / step})
        metrics.close()
    (file,) = (tmp_path / "trackio").glob("*.db")
    with contextlib.closing(sqlite3.connect(file)) as database:
        rows = database.execute("select step, metrics from metrics order by step").fetchall()
    assert [(step, json.loads(logged)["train/lm_loss"]) for step, logged in rows] == [
        (step, 1.0 / step) for step in (1, 2, 3, 4)
    ]


def test_tensorboard_reads_a_run_that_is_resumed_at_once_in_order(tmp_path: Path) -> None:
    """The resuming process may have the smaller number, which sorts first within a second."""
    first = _metrics(tmp_path, tensorboard=True)
    for step in (1, 2, 3):
        first.write(step, {"a": 1.0 * step})
    first.close()
    (file,) = (tmp_path / "tensorboard").iterdir()
    now = int(time.time()) + 1
    while time.time() < now:  # a second has just begun, and does not end before the second file is opened
        time.sleep(0.001)
    file.rename(file.with_name(f"events.out.tfevents.{now:010d}.zzz.999999999.0"))
    resumed = _metrics(tmp_path, first=1, tensorboard=True)
    resumed.write(2, {"a": 20.0})
    resumed.close()
    assert _curves(tmp_path)["a"] == {1: 1.0, 2: 20.0}


def test_tensorboard_that_fails_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from torch.utils.tensorboard import SummaryWriter

    metrics = _metrics(tmp_path, tensorboard=True)
    with monkeypatch.context() as broken:
        broken.setattr(SummaryWriter, "flush", lambda _: os.write(-1, b""))
        for step in (1, 2):
            metrics.write(step, {"a": 1.0})
    metrics.close()
    assert capfd.readouterr().err.count("TensorBoard does not take") == 1
    assert [row["step"] for row in runs.rows(tmp_path)] == [1, 2]


# ---- the real package --------------------------------------------------------------------------


def test_offline_needs_neither_an_account_nor_a_network(
    data: Path, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    # Without its list of the machine's fonts, matplotlib would search for them again.
    hook = runs.with_arguments(_without_account, str(tmp_path / "home"), matplotlib.get_cachedir())
    options = {"wandb.mode": "offline", "wandb.artifacts": "best", "wandb.pictures": 2, "wandb.group": "1_0"}
    often = {"max_steps": 4, "log_interval": 1, "eval_every_n_steps": 2, "checkpoint_every_n_steps": 1}
    typed = [*runs.settings(data, run, **options, **often), "run_name=1e3", "tensorboard=true"]
    runs.train(typed, log, hook=hook).ok()
    assert [row["step"] for row in runs.rows(run)] == [1, 2, 3, 4]
    assert _curves(run)["train/lm_loss"] == pytest.approx({row["step"]: row["train/lm_loss"] for row in runs.rows(run)})
    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    records = list(_records(file))
    named = [(record.run.display_name, record.run.run_group) for record in records if record.HasField("run")]
    assert named == [("1e3", "1_0")], "W&B has other names than those that were typed"

    history = [_logged(record.history) for record in records if record.HasField("history")]
    assert [row["_step"] for row in history] == [1, 2, 3, 4]
    for row, logged in zip(history, runs.rows(run), strict=True):
        assert row["train/lm_loss"] == logged["train/lm_loss"] and "time_s" not in row
    evaluated = [row for row in history if "eval/all/accuracy" in row]
    assert [row["_step"] for row in evaluated] == [2, 4]
    table = json.loads((file.parent / "files" / evaluated[-1]["evaluations.path"]).read_text())
    assert [line[table["columns"].index("step")] for line in table["data"]] == [2, 4]
    assert [row["puzzles.captions"] for row in evaluated] == [["row 0 of all", "row 1 of all"]] * 2
    pictures = [(file.parent / "files" / name).read_bytes() for row in evaluated for name in row["puzzles.filenames"]]
    assert len(pictures) == 4 and all(picture.startswith(b"\x89PNG") for picture in pictures)

    uploaded = [record.artifact for record in records if record.HasField("artifact")]
    (checkpoint, *_) = best = [artifact for artifact in uploaded if artifact.type == "checkpoint"]
    assert {"best", "step_00000002"} <= set(checkpoint.aliases) and len(best) < 4, "only the best checkpoints"


def _records(file: Path) -> Iterator[Any]:
    """Yield the records of W&B's file. It has the format of LevelDB's log, in blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    contents, at, text = file.read_bytes(), 7, b""
    while at + 7 <= len(contents):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = int.from_bytes(contents[at + 4 : at + 6], "little"), contents[at + 6]
        text += contents[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield wandb_internal_pb2.Record.FromString(text)  # type: ignore[attr-defined]
            text = b""


def _logged(history: Any) -> dict[str, Any]:
    return {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in history.item}


def _without_account(home: str, fonts: str, rank: int) -> None:
    names = ("HOME", "WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR")
    os.environ |= dict.fromkeys(names, home) | {"NETRC": home + "/netrc", "MPLCONFIGDIR": fonts}
    os.environ.pop("WANDB_API_KEY", None)
