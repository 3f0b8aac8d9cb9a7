"""After kill -9, signals, damage and a full disk, a resumed run equals an undisturbed run."""

import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from records.checkpoint.reader import Checkpoint
from tests import runs
from tests.in_process import train_here
from tests.runs import LAST_STEP, Torchrun, assert_same_run, rows, settings, train, until, with_arguments

pytestmark = pytest.mark.faults

HANDLED = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]


def _gone(processes: list[psutil.Process], timeout_s: float) -> bool:
    return not psutil.wait_procs(processes, timeout=timeout_s)[1]


# ---- kill -9 -----------------------------------------------------------------------------------


def test_killed_between_changes_on_disk(data: Path, quiet_2: Path, tmp_path: Path, log: Path) -> None:
    """The kills come before a random write, rename or removal, also of old checkpoints."""
    draw = random.Random(2)
    run, moments = tmp_path / "run", []
    arguments = settings(data, run, resume="auto", keep_last_k=1)
    for _ in range(4):
        moments.append(draw.randrange(1, 45))
        before = runs.latest(run)
        done = train(arguments, log, ranks=2, hook=with_arguments(runs.killed_at_file_event, str(run), moments[-1]))
        if done.status == 0:
            break
        done.killed()
        assert runs.latest(run) >= before, f"killed at {moments}: the checkpoint of step {before} is lost"
        assert not before or "starting afresh" not in done.output
    train(arguments, log, ranks=2).ok()
    assert_same_run(run, quiet_2)
    leftovers = [path.name for path in run.iterdir() if path.name.startswith(".incomplete")]
    assert not leftovers, f"killed at {moments}"


@pytest.mark.parametrize("by", ["auto", "path"])
def test_killed_while_the_only_checkpoint_was_being_replaced(quiet: Path, copied: Path, by: str) -> None:
    """A writer that replaces a step first renames the old folder.

    A run that ignored the renamed folder would start afresh and delete it.
    """
    runs.rewind(copied, 4)
    shutil.rmtree(copied / "step_00000002")
    (copied / "step_00000004").rename(copied / ".incomplete_replaced_step_00000004")
    train_here(["resume=auto", f"checkpoint_path={copied}"] if by == "auto" else [f"resume={copied}"])
    steps = sorted(path.name for path in copied.glob("step_*"))
    assert steps[0] == "step_00000004", f"the run did not go on from step 4, but began anew: {steps}"
    assert not list(copied.glob(".incomplete*"))
    assert_same_run(copied, quiet)


# ---- a graceful stop ---------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "name", "to"), [(1, "SIGINT", [0]), (1, "SIGUSR1", [0]), (2, "SIGTERM", [1])])
def test_stop_on_a_signal(
    data: Path, quiet: Path, quiet_2: Path, tmp_path: Path, log: Path, ranks: int, name: str, to: list[int]
) -> None:
    run = tmp_path / "run"
    # Only the stop saves a checkpoint.
    arguments = settings(data, run, checkpoint_every_n_steps=None, checkpoint_every_eval="false", best_metric=None)
    running = runs.start(arguments, log, ranks=ranks, hook=runs.slowly)
    until(lambda: (run / "metrics.jsonl").exists(), running)
    running.signal(signal.Signals[name], ranks=to)
    assert f"stopped by {name if 0 in to else 'a signal to another rank'}" in running.wait().ok()
    assert (run / "stopped").exists()
    assert 0 < runs.latest(run) < LAST_STEP, "the stop must save a checkpoint and end the run before its last step"
    train(settings(data, run, resume="auto"), log, ranks=ranks).ok()
    assert not (run / "stopped").exists()
    reference = quiet if ranks == 1 else quiet_2
    assert rows(run) == rows(reference)
    assert_same_run(run, reference, metrics=False)  # the best metric was set only after the stop


def test_a_terminal_that_is_gone_is_no_reason_to_end(data: Path, tmp_path: Path) -> None:
    """Ctrl-C in `python pretrain.py 2>&1 | tee log` also ends tee. The stop must still work."""
    run = tmp_path / "run"
    command = [sys.executable, str(runs.REPOSITORY / "pretrain.py"), *settings(data, run, max_steps=100_000)]
    # PYTHONUNBUFFERED would hide that Python exits with 120 if it can't write its buffer at the
    # end.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as process:
        assert process.stdout is not None
        head = process.stdout.readline()
        process.stdout.close()
        try:
            before = runs.latest(run)
            wait_until = time.monotonic() + 60
            while runs.latest(run) < before + 12:  # the run writes lines that nobody reads
                assert process.poll() is None and time.monotonic() < wait_until, (
                    f"the run ended, or saves too slowly, after {head!r}"
                )
                time.sleep(0.05)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        finally:
            process.kill()
    assert (run / "stopped").exists() and rows(run)[-1]["step"] <= runs.latest(run)


def test_repeated_signals_change_nothing(data: Path, quiet: Path, tmp_path: Path, log: Path) -> None:
    """Launchers send signals twice, even to a process that is about to exit."""
    run = tmp_path / "run"
    # Only the stop saves a checkpoint.
    typed = settings(data, run, checkpoint_every_n_steps=None, checkpoint_every_eval="false", best_metric=None)
    running = runs.start(typed, log, hook=runs.slowly)
    until(lambda: (run / "metrics.jsonl").exists(), running)
    while running.alive:
        running.signal(signal.SIGTERM)
        time.sleep(0.002)
    output = running.wait().ok()
    assert output.count("stopped by SIGTERM at step") == 1 and "Traceback" not in output, output
    assert (run / "stopped").read_text() == "SIGTERM\n"
    step = runs.latest(run)
    assert 0 < step < LAST_STEP, "the stop left no checkpoint"
    assert [path.name for path in run.glob("*step_*")] == [f"step_{step:08d}"]
    assert Checkpoint.open(run / f"step_{step:08d}").state.step == step
    assert all(row["step"] <= step for row in rows(run)), "steps are logged that the checkpoint does not have"
    train_here(settings(data, run, resume="auto"))
    assert not (run / "stopped").exists()
    assert rows(run) == rows(quiet)
    assert_same_run(run, quiet, metrics=False)  # the best metric was set only after the stop


def _in_c_for_long(rank: int) -> None:
    """Let the first step stay in C, as compiling does, where Python calls no handler."""

    def first_step(_: int) -> None:
        c, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        for _ in range(2):  # the second waits for the first, and no signal ends it
            c.pthread_mutex_lock(mutex)

    runs.before_step(first_step)


def test_a_second_signal_in_the_first_step(data: Path, tmp_path: Path, log: Path) -> None:
    running = runs.start(settings(data, tmp_path / "run"), log, hook=_in_c_for_long)
    until(lambda: " steps of " in running.output, running)  # the last line before the first step
    time.sleep(1)
    running.signal(signal.SIGINT)
    running.signal(signal.SIGINT)  # from the terminal and from a launcher: one request
    until(lambda: "again to end now" in running.output, running, timeout_s=5)
    assert "stopping after the first step" in running.output
    time.sleep(1.1)
    running.signal(signal.SIGTERM)  # not from the user
    time.sleep(0.2)
    assert running.alive and not list((tmp_path / "run").glob("step_*"))
    running.signal(signal.SIGINT)
    ended = running.wait(5)
    assert ended.status == 128 + signal.SIGINT and "Traceback" not in ended.output, ended.output


def test_a_stop_in_the_last_step_ends_the_run(data: Path, tmp_path: Path, log: Path) -> None:
    """A finished run has no marker, because a scheduler would queue the run again."""
    run = tmp_path / "run"
    train(settings(data, run, eval_every_n_steps=None), log, hook=with_arguments(runs.stopped_after, LAST_STEP)).ok()
    assert runs.latest(run) == LAST_STEP
    assert not (run / "stopped").exists(), "a finished run has the marker of a stop"


# Stops within an evaluation need smaller batches. Their losses would add up to other last bits, so
# the resumed run uses the batch size of the quiet run.
QUIETS_BATCH = {"eval_batch_size": None}


@pytest.mark.parametrize(("evaluation", "ranks"), [(2, 1), (3, 1), (1, 2)])
def test_stop_in_an_evaluation(
    data: Path, quiet: Path, quiet_2: Path, tmp_path: Path, log: Path, evaluation: int, ranks: int
) -> None:
    """An abandoned evaluation is done after the resume.

    It belongs to a logged step, to a step with a checkpoint, or to the last step. One of two ranks
    gets the signal.
    """
    run = tmp_path / "run"
    step = min(5 * evaluation, LAST_STEP)
    if evaluation > 1:  # the evaluations before have the batches of the quiet run
        stop = with_arguments(runs.stopped_after, 5 * (evaluation - 1) + 1)
        train(settings(data, run), log, hook=stop).ok()
    hook = with_arguments(runs.stopped_in_evaluation, 1, ranks - 1)
    train(settings(data, run, resume="auto", eval_batch_size=8), log, ranks=ranks, hook=hook).ok()
    assert runs.latest(run) == step
    assert all(row["step"] < step for row in rows(run)), "the row of the step was logged before its evaluation"
    train(settings(data, run, resume="auto", **QUIETS_BATCH), log, ranks=ranks).ok()
    assert_same_run(run, quiet if ranks == 1 else quiet_2)


def test_killed_after_a_pending_evaluation_was_done(data: Path, quiet: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    rarely = {"checkpoint_every_n_steps": None, "checkpoint_every_eval": "false", "best_metric": None}
    train(
        settings(data, run, eval_batch_size=8, **rarely), log, hook=with_arguments(runs.stopped_in_evaluation, 1, 0)
    ).ok()
    running = runs.start(settings(data, run, resume="auto", **rarely, **QUIETS_BATCH), log, hook=runs.slowly)
    until(lambda: any(row["step"] == 5 for row in rows(run)), running)
    running.signal(signal.SIGKILL)
    running.wait().killed()
    runs.resume(data, run, log, **rarely, **QUIETS_BATCH).ok()
    assert rows(run) == rows(quiet)


# ---- torchrun ----------------------------------------------------------------------------------


def test_torchrun_stops_on_sigusr1(data: Path, quiet_2: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    launched = Torchrun(["--standalone", *HANDLED], runs.slowly, settings(data, run), log, tmp_path)
    try:
        until(lambda: (run / "metrics.jsonl").exists(), launched)
        workers = launched.workers()
        launched.signal(signal.SIGUSR1)
        done = launched.wait(30)
    finally:
        launched.kill()
    assert done.status == 1  # torchrun always exits with 1 here, so schedulers need the marker
    assert (run / "stopped").read_text() in ("SIGUSR1\n", "SIGTERM\n"), done.output
    assert runs.latest(run) < LAST_STEP and "Traceback" not in done.output.split("torch/distributed")[0]
    assert _gone(workers, 10)
    train(settings(data, run, resume="auto"), log, ranks=2).ok()
    assert_same_run(run, quiet_2)


def test_torchrun_ends_if_a_worker_is_killed(data: Path, quiet_2: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    launched = Torchrun(["--standalone", "--max-restarts", "0"], runs.slowly, settings(data, run), log, tmp_path)
    try:
        until(lambda: runs.latest(run) >= 2, launched)
        workers = launched.workers()
        began = time.monotonic()
        workers[1].kill()
        done = launched.wait(30)
    finally:
        launched.kill()
    assert _gone(workers, 1) and time.monotonic() - began < 30
    assert done.status == 1, done.output
    assert "fault on rank" in done.output and "the last good checkpoint is" in done.output
    train(settings(data, run, resume="auto"), log, ranks=2).ok()
    assert_same_run(run, quiet_2)


# ---- faults ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "on_rank"), [(1, 0), (2, 1)])
def test_a_rank_that_raises_ends_all_ranks(data: Path, tmp_path: Path, log: Path, ranks: int, on_rank: int) -> None:
    run = tmp_path / "run"
    began = time.monotonic()
    done = train(settings(data, run), log, ranks=ranks, hook=with_arguments(runs.raises, 6, on_rank))
    assert time.monotonic() - began < 30
    assert done.status == 1
    assert f"fault on rank {on_rank}: RuntimeError: the ceiling fell down" in done.output
    assert "at step 6; the last good checkpoint is" in done.output and "step_00000005" in done.output
    assert "says nothing" not in done.output


def test_disk_full_at_a_log_line(data: Path, quiet: Path, tmp_path: Path, log: Path) -> None:
    """The incomplete line is no row of the resumed run."""
    run = tmp_path / "run"
    typed = settings(data, run, checkpoint_every_n_steps=None, checkpoint_every_eval="false")
    message = train(typed, log, hook=with_arguments(runs.small_disk_later, 5, 1200, [0])).error()
    assert f"error: {run / 'metrics.jsonl'} could not be written: File too large; free the disk" in message, message
    train([*typed, "resume=auto"], log).ok()
    assert_same_run(run, quiet)


def test_disk_full_from_the_start(data: Path, tmp_path: Path, log: Path) -> None:
    hook = with_arguments(runs.small_disk, 900)  # config.yaml is larger
    assert "can't write to" in train(settings(data, tmp_path / "run"), log, hook=hook).error()
