"""watch.py shows real runs in every state, leaves the terminal as it was, and draws curves."""

import json
import math
import os
import pty
import re
import runpy
import select
import signal
import struct
import sys
import termios
import time
import warnings
from collections.abc import Callable
from fcntl import ioctl
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import yaml
from rich.console import Console

import watch as program
from records.folder import Launched
from records.lock import RunLock
from tests import runs
from tests.in_process import train_here
from tests.runs import contents
from tests.viewer.samples import shown
from utils.command_line import read_config
from utils.errors import UserError
from utils.shell import run_command
from viewer.curves import LoggedRun, choose_metrics, groups_of, panels_of
from viewer.live import COLUMNS, Watched, curve, find_runs, in_order, screen

Row = dict[str, Any]


# ---- runs --------------------------------------------------------------------------------------


def make_run(folder: Path, rows: list[Row], *, last_step: int = 100, **config: Any) -> Path:
    """Write the folder of a run, as pretrain.py would leave it."""
    folder.mkdir(parents=True)
    names = {"run_name": folder.name, "checkpoint_path": str(folder), "started_in": f"/home/{folder.name}"}
    (folder / "config.yaml").write_text(yaml.safe_dump({"seed": 0, **names, **config}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    launched = Launched(last_step=last_step, ranks=2, device="cuda", host="host-a")
    (folder / "launch.json").write_text(launched.model_dump_json())  # Launched.write waits for the disk
    return folder


def rows_of(num: int, *, pace: float = 1.0, offset: float = 0.0) -> list[Row]:
    """Return rows of every tenth step: a loss of 1/step, and an accuracy that grows to 1."""
    return [
        {
            "step": step,
            "time_s": pace * step,
            "epoch": step / 5,
            "train/lm_loss": 1 / step + offset,
            "train/exact_accuracy": step / (10 * num),
            "eval/all/exact_accuracy": step / (20 * num) + offset,
            "perf/examples_per_second": 1234.5,
        }
        for step in range(10, 10 * num + 1, 10)
    ]


def _strike(at_step: int, number: signal.Signals, rank: int) -> None:
    runs.before_step(lambda step: os.kill(os.getpid(), number) if step == at_step else None)


def test_the_state_of_real_runs(data: Path, tmp_path: Path) -> None:
    """Of runs that finished, were killed, and stopped. A snapshot changes nothing."""
    project, started = tmp_path / "project", {}
    strikes = {"dead": signal.SIGKILL, "stopped": signal.SIGTERM}
    for name, number in strikes.items():
        typed = runs.settings(data, project / name, log_interval=1)
        started[name] = runs.start(typed, tmp_path / name, hook=runs.with_arguments(_strike, 7, number))
    train_here(runs.settings(data, project / "finished"))
    for name in strikes:
        started[name].wait()
    before = contents(project)
    done = runs.command(f"python {runs.REPOSITORY / 'watch.py'} {project}", project)
    assert done.status == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == [*COLUMNS], "a pipe has room for all columns"
    assert {tuple(line.split()[:2]) for line in lines[1:4]} == {(name, name) for name in ("finished", *strikes)}
    assert lines[4] == "3 runs  1 finished  1 stopped  1 dead" and "\x1b" not in done.stdout
    assert contents(project) == before

    statuses = {path.name: Watched(path) for path in find_runs([project])}
    assert statuses["stopped"].note == "SIGTERM" and statuses["stopped"].checkpoint == 7
    assert statuses["finished"].checkpoint == 12 == statuses["finished"].step
    assert statuses["dead"].step < 12
    run = project / "finished"
    Launched(last_step=20, ranks=1, device="cpu", host="a").write(run)
    assert Watched(run).state == "dead"
    train_here([f"checkpoint_path={run}", "resume=auto", "max_steps=10"])
    assert Watched(run).state == "finished", "its plan became shorter"


# ---- what is shown -----------------------------------------------------------------------------


def shown_at(folder: Path, width: int, height: int) -> list[str]:
    console = Console(width=width, height=height, color_system=None, force_terminal=False)
    with console.capture() as captured:
        console.print(screen(in_order([Watched(run) for run in find_runs([folder])]), width, height))
    return captured.get().splitlines()


@pytest.mark.parametrize("num", [1, 3, 40])
def test_a_screen_fits_into_its_terminal(tmp_path: Path, num: int) -> None:
    for index in range(num):
        make_run(tmp_path / f"a-long-name-of-a-run-{index:02d}", rows_of(5 + index, offset=7), last_step=100_000)
    for width in (60, 100, 200):
        lines = shown_at(tmp_path, width, 24)
        text = "\n".join(lines)
        assert len(lines) <= 24 and "dead" in text and "q or Ctrl-C: leave" in text
        assert "7.0" in text, "the loss is missing"
        assert "…" not in re.sub(r"a-long[-\w]*…", "", text), "rich has cut a number"
        if num == 40:
            names = re.findall(r"^a-long\S+", text, re.MULTILINE)
            assert "40 runs  40 dead" in lines[0] and len(names) == 20 and "and 20 more" in text
            assert len(lines) == 24, "a line of the terminal is empty"
            titles = lines[1].split()
            assert "ETA" in titles and set(titles) <= COLUMNS.keys(), "rich has cut a column"


def test_running_runs_come_first_and_then_the_newest(tmp_path: Path) -> None:
    """A damaged run does not hide the others."""
    for index, name in enumerate(("old", "bad", "new", "running")):
        run = make_run(tmp_path / name, rows_of(9))
        os.utime(run / "config.yaml", (1000 - 1000 * (name == "running") + index,) * 2)
        (run / "best").write_text("step_00000008\n")
    (tmp_path / "bad" / "metrics.jsonl").write_text("[1]\n")
    with RunLock() as lock:
        lock.take(tmp_path / "running", print)
        lines = shown_at(tmp_path, 400, 24)
    assert re.findall(r"(\w+) (running|dead|damaged)", lines[0]) == [
        *[("running", "running"), ("new", "dead"), ("bad", "damaged"), ("old", "dead")]
    ]
    text = "\n".join(lines)
    assert "metrics.jsonl:1: is no JSON" in text
    for part in ("step 90 of 100", "loss 0.01111", "exact 1.000", "test 0.500", "1,234 examples/s"):
        assert text.count(part) == 3, part
    assert text.count("saved -, best 8") == 4 and text.count("on host-a") == 2 and "90%" in text
    assert text.count("2 x cuda") == 4


def test_a_curve_of_blocks() -> None:
    assert curve([0, 1, 2, 3], 4, 1) == ["▁▃▅█"]
    assert curve([0.0, 0.5, 1.0], 5, 2, least=0, most=1) == ["  █  ", "▁██  "]
    assert curve([1, 3, 5, 7], 2, 1) == ["▁█"], "two neighbours are averaged"
    assert curve([5, 5], 3, 2) == ["   ", "▁▁ "] and curve([], 2, 1) == ["  "]
    with warnings.catch_warnings(action="error"):
        assert curve([-1e308, 0, 1e308], 3, 1) == ["▁▄█"] and curve([1e308, 1e308, 0, 0], 2, 1) == ["█▁"]
        assert curve([-1e308, 1e308], 2, 1, least=0, most=1) == ["▁█"]


# ---- the terminal ------------------------------------------------------------------------------


def _in_terminal(name: str, words: list[str]) -> None:
    os.setsid()
    for number in range(3):
        os.dup2(os.open(name, os.O_RDWR), number)  # the first one opened becomes the controlling terminal
    # The terminal may lack the characters of the bars.
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", encoding="ascii"), os.fdopen(2, "w")
    os.environ["TERM"] = "xterm-256color"
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


@pytest.mark.parametrize("way", [b"q", b"\x03"])
def test_the_terminal_is_left_as_it_was(tmp_path: Path, way: bytes) -> None:
    """By q and by Ctrl-C, in a terminal of 100 columns and 30 lines. Ctrl-Z does nothing."""
    make_run(tmp_path / "project" / "one", rows_of(3))
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    before, output = termios.tcgetattr(theirs), ""
    words = [str(runs.REPOSITORY / "watch.py"), str(tmp_path / "project"), "--every", "0.05"]
    process = runs.fork(_in_terminal, os.ttyname(theirs), words)

    def until(done: Callable[[], bool]) -> None:
        nonlocal output
        end = time.monotonic() + 60
        while not done():
            assert time.monotonic() < end, f"watch.py goes on:\n{output[-2000:]}"
            if select.select([ours], [], [], 0.05)[0]:
                output += os.read(ours, 1 << 16).decode(errors="replace")

    try:
        until(lambda: "one" in output and "leave" in output)
        during = termios.tcgetattr(theirs)
        assert not during[3] & termios.ECHO and not during[3] & termios.ICANON
        os.write(ours, b"\x1a")
        time.sleep(0.2)
        make_run(tmp_path / "project" / "latecomer", rows_of(3))
        until(lambda: "latecomer" in output)
        (tmp_path / "project/one/metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(7)))
        until(lambda: "step 70" in output)
        os.write(ours, way)
        until(lambda: not process.is_alive())
        until(lambda: not select.select([ours], [], [], 0.05)[0])
        assert process.exitcode == 0, output[-2000:]
        assert termios.tcgetattr(theirs) == before
    finally:
        process.kill()
        process.join()
        os.close(ours)
        os.close(theirs)
    assert "Traceback" not in output
    for entered, left in (("\x1b[?1049h", "\x1b[?1049l"), ("\x1b[?25l", "\x1b[?25h")):  # other screen, hidden cursor
        assert output.rfind(left) > output.rfind(entered) >= 0
    after = re.sub(r"\x1b\[\??[0-9;]*[a-zA-Z]", "", output[output.rfind("\x1b[?1049l") :])
    assert not after.strip(), "something is printed after the program has left"


@pytest.mark.parametrize(("keys", "quits"), [(b" Q", True), (b"", True), (b"\x1bOQ", False)])
def test_only_q_quits(monkeypatch: pytest.MonkeyPatch, keys: bytes, quits: bool) -> None:
    """F2 sends ESC O Q, and a terminal that is gone sends nothing."""
    ours, theirs = pty.openpty()
    monkeypatch.setattr(sys, "stdin", os.fdopen(theirs))
    monkeypatch.setattr(os, "read", lambda *_: keys)
    with program.until_quit() as wait:
        assert all(callable(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT))
        assert signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN, "Ctrl-Z would leave the terminal as it is"
        os.write(ours, b"x")
        assert wait(0.1) is quits
    os.close(ours)


def test_the_time_between_two_looks_is_the_typed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", rows_of(3))
    monkeypatch.setattr(program, "watch_live", shown := Mock())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    program.watch([str(run), "--every", "7"])
    assert shown.call_args.args[:2] == ([run], 7.0)


# ---- curves ------------------------------------------------------------------------------------


def seeds(folder: Path, *offsets: float, pace: tuple[float, ...] = (1.0, 1.0, 1.0), **config: Any) -> list[Path]:
    """Return runs that differ in their seed only. Run i lies higher by offsets[i]."""
    return [
        make_run(
            folder / f"{folder.name}-{seed}",
            rows_of(5, offset=offset, pace=pace[seed]),
            **{**config, "seed": seed, "global_batch_size": 8},
        )
        for seed, offset in enumerate(offsets)
    ]


def opened(paths: list[Path]) -> list[LoggedRun]:
    return [LoggedRun(path) for path in paths]


def labels_of(paths: list[Path]) -> list[str]:
    return [group.label for group in groups_of(opened(paths))]


def test_runs_that_differ_in_the_seed_form_a_group(tmp_path: Path) -> None:
    hrm, trm = {"name": "hrm", "H_layers": 4}, {"name": "trm", "L_layers": 2}
    paths = [
        *seeds(tmp_path / "a", 0, 0, arch=hrm, lr=1e-3, wandb={"tags": ["x"]}),
        *seeds(tmp_path / "b", 0, 0, 0, arch=trm, lr=1e-3),
        *seeds(tmp_path / "c", 0, arch=trm, lr=5e-4),
        *seeds(tmp_path / "d", 0, arch=trm | {"L_layers": 3}, lr=1e-3),
    ]
    assert labels_of(paths) == [
        "arch=hrm lr=0.001 (2 seeds)",
        "arch=trm arch.L_layers=2 lr=0.0005",
        "arch=trm arch.L_layers=2 lr=0.001 (3 seeds)",
        "arch=trm arch.L_layers=3 lr=0.001",
    ]
    assert labels_of(paths[:2]) == ["2 seeds"]
    assert labels_of(paths[:1]) == ["a-0"]
    alike = [*seeds(tmp_path / "e", 0, 1, number=1.0), *seeds(tmp_path / "f", 0, 1, number=1)]
    assert labels_of(alike) == ["2 seeds e-0", "2 seeds f-0"]
    strange = [make_run(tmp_path / folder / "run", rows_of(3)) for folder in "gh"]
    for path in strange:
        (path / "config.yaml").unlink()
    assert labels_of(strange) == ["g/run", "h/run"]


def test_groups_are_named_by_what_was_typed(tmp_path: Path) -> None:
    """Not by the options that a file of config/arch sets, nor by those that follow from others.

    A key that is newer than a run has its default there.
    """
    typed = (["arch=trm_mlp", "lr=0.00123456"], ["arch=trm", "lr=3e-3"], ["arch=trm", "lr=3e-3", "arch.hidden_size=64"])
    paths = [make_run(tmp_path / f"{n}", rows_of(3), **read_config("pretrain", each)) for n, each in enumerate(typed)]
    assert labels_of(paths) == [
        "arch=trm arch.hidden_size=64 lr=0.003",
        "arch=trm arch.hidden_size=512 lr=0.003",
        "arch=trm_mlp lr=0.001235",
    ]
    wide = {"name": "hrm", "width_multiple": 256}
    paths = seeds(tmp_path / "old", 0, 0, arch={"name": "hrm"})
    paths += seeds(tmp_path / "new", 0, arch=wide, ema=False, tensorboard=True)
    assert labels_of(paths) == ["3 runs"]
    paths += seeds(tmp_path / "narrow", 0, arch=wide | {"width_multiple": 64})
    assert labels_of(paths) == ["arch.width_multiple=64", "arch.width_multiple=256 (3 runs)"]


def series_of(paths: list[Path], metric: str, axis: str = "steps") -> Any:
    logged = opened(paths)
    (panel,) = panels_of(groups_of(logged), [metric], axis, {run.path: run.x(axis) for run in logged})
    (series,) = panel.series
    return series


def test_mean_and_spread_of_equal_steps(tmp_path: Path) -> None:
    """Many points are averaged, and infinite ones left out."""
    series = series_of(seeds(tmp_path / "a", 0.0, 0.1, 0.5), "train/lm_loss")
    steps = np.arange(10, 51, 10)
    np.testing.assert_array_equal(series.x, steps)
    np.testing.assert_allclose(series.values, 1 / steps + 0.2)
    np.testing.assert_allclose(series.low, 1 / steps)
    np.testing.assert_allclose(series.high, 1 / steps + 0.5)
    assert series.note == ""
    rows: list[Row] = [{"step": step, "train/lm_loss": float(step)} for step in range(1, 6001)]
    rows[99]["train/lm_loss"] = math.inf
    series = series_of([make_run(tmp_path / "run", rows)], "train/lm_loss")
    assert len(series.x) <= 1500 and np.isfinite(series.values).all()
    np.testing.assert_allclose(series.values, series.x)


def test_unequal_seconds_are_interpolated_where_all_runs_are(tmp_path: Path) -> None:
    """The accuracy is step/50. At second s the runs have done s, s/2 and s/4 steps."""
    paths = seeds(tmp_path / "a", 0, 0, 0, pace=(1.0, 2.0, 4.0))
    series = series_of(paths, "train/exact_accuracy", "seconds")
    assert series.x[0] == 40 and series.x[-1] == 50, "the slowest begins at 40, the fastest ends at 50"
    for found, share in ((series.high, 1), (series.low, 1 / 4), (series.values, (1 + 1 / 2 + 1 / 4) / 3)):
        np.testing.assert_allclose(found, series.x * share / 50)
    assert "the mean ends at 50 seconds" in series.note


def test_a_run_that_ended_early_is_left_out(tmp_path: Path) -> None:
    paths = seeds(tmp_path / "a", 0, 0, 0)
    rows = rows_of(5)
    (paths[0] / "metrics.jsonl").write_text(json.dumps(rows[0] | {"step": 5}) + "\n")
    series = series_of(paths, "train/lm_loss")
    assert len(series.x) == 5
    done = program.plot(paths, tmp_path / "a.png", ["train/lm_loss"], "steps")
    assert "1 of 3 runs never logged train/lm_loss" in done
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    (paths[0] / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows_of(20)))
    assert "the mean ends at 50 steps" in program.plot(paths, tmp_path / "a.html", ["train/lm_loss"], "steps")


def test_metrics_by_their_short_names(tmp_path: Path) -> None:
    runs_ = opened(seeds(tmp_path / "a", 0))
    accuracies = ["train/exact_accuracy", "eval/all/exact_accuracy"]
    assert choose_metrics(runs_, []) == ["train/lm_loss", *accuracies]
    assert choose_metrics(runs_, ["exact_accuracy"]) == accuracies
    chosen = choose_metrics(runs_, ["examples_per_second", "train/lm_loss"])
    assert chosen == ["perf/examples_per_second", "train/lm_loss"]
    with pytest.raises(UserError, match=r"no run has logged 'exact_acuracy'; take one of exact_accuracy"):
        choose_metrics(runs_, ["exact_acuracy"])
    rows: list[Row] = [{"step": step, "train/loss": 1 / step, "eval/all/loss": 2 / step} for step in (1, 2, 4)]
    rows[-1]["perf/tokens_per_second"] = 12345.0
    path = make_run(tmp_path / "run", rows)
    assert choose_metrics(opened([path]), []) == ["train/loss", "eval/all/loss"]
    panel = "\n".join(shown_at(path, 100, 30))
    assert "loss 0.25" in panel and "█" in panel and "12,345 tokens/s" in panel


# ---- pictures ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("x", "first", "last"), [("steps", 10, 50), ("examples", 80, 400), ("epochs", 2, 10), ("seconds", 20, 100)]
)
def test_a_picture_over_each_axis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, x: str, first: float, last: float
) -> None:
    """A run that has logged nothing is left out."""
    drawn: list[Any] = []
    monkeypatch.setattr(program, "draw_png", lambda panels, _: drawn.extend(panels))
    nothing = make_run(tmp_path / "nothing", [], global_batch_size=8)
    (nothing / "step_00000020").mkdir()
    typed = [str(nothing / "step_00000020"), "--plot", str(tmp_path / "c.png"), "--x", x]
    with pytest.raises(UserError, match="none of these runs has logged anything yet"):
        program.watch(typed)
    for group, lr in (("a", 1e-3), ("b", 1e-4)):
        seeds(tmp_path / group, 0, 0.1, 0.2, lr=lr, pace=(2.0, 2.0, 2.0))
    assert program.watch([str(tmp_path / "a"), str(tmp_path / "b"), *typed]).splitlines() == [
        f"{nothing} has logged nothing yet, and is left out",
        f"drew {tmp_path / 'c.png'}: train/lm_loss, train/exact_accuracy, eval/all/exact_accuracy "
        f"over {x}; runs: 6, groups: 2",
    ]
    assert {(series.x[0], series.x[-1]) for panel in drawn for series in panel.series} == {(first, last)}


def test_a_page_with_a_band_and_a_line_for_each_group(tmp_path: Path) -> None:
    evil = "</script><script>document.title='taken over'</script>"
    paths = [*seeds(tmp_path / "a", 0, 0.1, lr=1e-3), *seeds(tmp_path / "b", 0, lr=1e-4, augment=evil)]
    page = tmp_path / "c.html"
    program.plot(paths, page, ["train/lm_loss", "train/exact_accuracy"], "steps")
    assert evil not in page.read_text()
    loss, accuracy = shown(page)["curves"]
    assert (loss["metric"], accuracy["metric"]) == ("train/lm_loss", "train/exact_accuracy")
    other, band = loss["over"]["steps"]
    assert other["name"].startswith("augment='<") and other["low"] is None
    assert band["name"] == "augment=none lr=0.001 (2 seeds)" and band["x"] == [10, 20, 30, 40, 50]
    assert [band[key][0] for key in ("values", "low", "high")] == pytest.approx([0.15, 0.1, 0.2])


def test_what_a_stranger_named_reaches_the_terminal_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Row] = [{"step": 1, "train/\x1b[2Jloss": 1.0, "eval/\x1b[2J/exact_accuracy": 0.5}]
    run = make_run(tmp_path / "run\x1b[2J", rows)
    make_run(tmp_path / "other\x1b[2J", [])
    (run / "stopped").write_text("\x1b[2J" * 10**6)
    (run / "latest").write_text(f"step_{'9' * 5000}\n")
    for width in (50, 300):
        assert "\x1b" not in "".join(shown_at(tmp_path, width, 24))
    monkeypatch.setattr(program, "draw_png", lambda panels, path: None)
    for name in ("\x1b[2Jloss", "loss"):  # a summary, and a mistake that proposes the first name
        run_command(program.watch, [str(tmp_path), "--plot", str(run / "a.png"), "--metric", name])
    output, mistake = capsys.readouterr()
    assert "run?[2J/a.png: train/?[2Jloss over steps" in output and "other?[2J has logged nothing" in output
    assert "take one of" in mistake and "\x1b" not in output + mistake


# ---- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "mistake"),
    [
        (["{}/empty"], "is no run and holds none"),
        (["{}/project", "--every", "0"], "--every is 0; give a number of seconds"),
        (["{}/project", "--metric", "lm_loss"], "--metric and --x say what --plot draws"),
        (["{}/project", "--plot", "a.pdf"], "--plot is a.pdf; give a file that ends in .png or .html"),
        (["{}/project", "--plot", "{}/gone/a.png"], "gone for a.png; create it, or choose another file"),
        (["{}/project", "--plot", "{}/a.png", "--x", "seconds"], "does not tell the seconds of all its rows"),
    ],
)
def test_mistakes(tmp_path: Path, options: list[str], mistake: str) -> None:
    (tmp_path / "empty").mkdir()
    make_run(tmp_path / "project" / "run", [{"step": 1, "train/lm_loss": 1.0}])
    with pytest.raises(UserError) as error:
        program.watch([option.format(tmp_path) for option in options])
    assert mistake in str(error.value) and "\n" not in str(error.value)
