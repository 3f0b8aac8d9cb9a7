"""After kill -9, signals, damage and a full disk, a resumed run equals an undisturbed run."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from tests import runs
from tests.in_process import LOSS_SCALE_GROWS_AFTER, LOSS_SCALE_START, mistake, train_here
from tests.runs import LAST_STEP, Torchrun, assert_same_run, rows, settings, train, until, with_arguments
from utils.checkpoint.reader import Checkpoint, find_checkpoint

pytestmark = pytest.mark.faults

HANDLED = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]


def _resume(data: Path, run: Path, log: Path, **changes: object) -> runs.Finished:
    return train(settings(data, run, resume="auto", **changes), log)


def _gone(processes: list[psutil.Process], timeout_s: float) -> bool:
    return not psutil.wait_procs(processes, timeout=timeout_s)[1]


# ---- kill -9 -----------------------------------------------------------------------------------


def test_killed_between_changes_on_disk(data: Path, quiet_2: Path, tmp_path: Path, log: Path) -> None:
    """The kills come before a random write, rename or removal, mostly within saves.

    Old checkpoints are removed at the same time.
    """
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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_before_each_change_on_disk_of_the_first_saves(
    data: Path, quiet: Path, tmp_path: Path, log: Path
) -> None:
    for moment in range(1, 50):
        run = tmp_path / f"run_{moment}"
        train(
            settings(data, run, keep_last_k=1),
            log,
            hook=with_arguments(runs.killed_at_file_event, str(run), moment),
        ).killed()
        _resume(data, run, log, keep_last_k=1).ok()
        assert_same_run(run, quiet)


def test_leftovers_of_killed_writes_are_removed(data: Path, quiet: Path, copied: Path, log: Path) -> None:
    """write_atomically leaves a file behind, and an unfinished step leaves a folder behind."""
    runs.rewind(copied, 4)
    (copied / ".incomplete_latest").write_text("step_")
    (copied / ".incomplete_step_00000006").mkdir()
    _resume(data, copied, log).ok()
    assert not list(copied.glob(".incomplete*"))
    assert_same_run(copied, quiet)


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


@pytest.mark.parametrize(
    ("ranks", "name", "to"), [(1, "SIGTERM", [0]), (1, "SIGINT", [0]), (1, "SIGUSR1", [0]), (2, "SIGTERM", [1])]
)
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


def test_a_stop_in_the_last_step_ends_the_run(data: Path, tmp_path: Path, log: Path) -> None:
    """A finished run has no marker, because a scheduler would queue the run again."""
    run = tmp_path / "run"
    train(settings(data, run, eval_every_n_steps=None), log, hook=with_arguments(runs.stopped_after, LAST_STEP)).ok()
    assert runs.latest(run) == LAST_STEP
    assert not (run / "stopped").exists(), "a finished run has the marker of a stop"


def _stopped_with_a_full_disk(at_step: int, rank: int) -> None:
    runs.small_disk_later(at_step, 50_000, [0], rank)  # the weights alone are larger
    runs.stopped_after(at_step, rank)


def test_a_stop_that_saves_nothing_leaves_no_marker(data: Path, tmp_path: Path, log: Path) -> None:
    """The marker promises a checkpoint to resume from."""
    run = tmp_path / "run"
    typed = settings(data, run, checkpoint_every_n_steps=None, eval_every_n_steps=None)
    message = train(typed, log, hook=with_arguments(_stopped_with_a_full_disk, 3)).error()
    assert "the checkpoint of step 3 could not be written" in message
    assert not (run / "stopped").exists(), "the marker was written before the checkpoint was whole"


# Stops within an evaluation need smaller batches. Their losses would add up to other last bits, so
# the resumed run uses the batch size of the quiet run.
QUIETS_BATCH = {"eval_batch_size": None}


@pytest.mark.parametrize("evaluation", [1, 2, 3])
def test_stop_in_an_evaluation(data: Path, quiet: Path, tmp_path: Path, log: Path, evaluation: int) -> None:
    """An abandoned evaluation is done after the resume.

    It belongs to a logged step, to a step with a checkpoint, or to the last step.
    """
    run = tmp_path / "run"
    step = min(5 * evaluation, LAST_STEP)
    if evaluation > 1:  # the evaluations before have the batches of the quiet run
        stop = with_arguments(runs.stopped_after, 5 * (evaluation - 1) + 1)
        train(settings(data, run), log, hook=stop).ok()
    hook = with_arguments(runs.stopped_in_evaluation, 1, 0)
    train(settings(data, run, resume="auto", eval_batch_size=8), log, hook=hook).ok()
    assert runs.latest(run) == step
    assert all(row["step"] < step for row in rows(run)), "the row of the step was logged before its evaluation"
    _resume(data, run, log, **QUIETS_BATCH).ok()
    assert_same_run(run, quiet)


def test_stop_of_one_rank_in_an_evaluation(data: Path, quiet_2: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    hook = with_arguments(runs.stopped_in_evaluation, 1, 1)
    train(settings(data, run, eval_batch_size=8), log, ranks=2, hook=hook).ok()
    train(settings(data, run, resume="auto", **QUIETS_BATCH), log, ranks=2).ok()
    assert_same_run(run, quiet_2)


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
    _resume(data, run, log, **rarely, **QUIETS_BATCH).ok()
    assert rows(run) == rows(quiet)


def test_resuming_a_finished_run_removes_the_marker_of_a_stop(data: Path, copied: Path, log: Path) -> None:
    (copied / "stopped").write_text("SIGUSR1\n")
    _resume(data, copied, log).ok()
    assert not (copied / "stopped").exists()


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
    """All processes end within 30 s and name the reason and the last good checkpoint.

    The run can be resumed.
    """
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


@pytest.mark.parametrize(("ranks", "on_rank"), [(1, 0), (2, 0), (2, 1)])
def test_a_rank_that_raises_ends_all_ranks(data: Path, tmp_path: Path, log: Path, ranks: int, on_rank: int) -> None:
    run = tmp_path / "run"
    began = time.monotonic()
    done = train(settings(data, run), log, ranks=ranks, hook=with_arguments(runs.raises, 6, on_rank))
    assert time.monotonic() - began < 30
    assert done.status == 1
    assert f"fault on rank {on_rank}: RuntimeError: the ceiling fell down" in done.output
    assert "at step 6; the last good checkpoint is" in done.output and "step_00000005" in done.output
    assert "says nothing" not in done.output


def test_disk_full_while_saving(data: Path, quiet: Path, copied: Path, log: Path) -> None:
    runs.rewind(copied, 4)
    hook = with_arguments(runs.small_disk, 100_000)  # the weights alone are larger
    message = train(settings(data, copied, resume="auto"), log, hook=hook).error()
    assert "the checkpoint of step 5 could not be written" in message and "step_00000004" in message
    assert (copied / "latest").read_text() == "step_00000004\n"
    assert sorted(path.name for path in copied.glob("*step_*")) == ["step_00000002", "step_00000004"]
    _resume(data, copied, log).ok()
    assert_same_run(copied, quiet)


def test_disk_full_at_a_log_line(data: Path, quiet: Path, tmp_path: Path, log: Path) -> None:
    """The incomplete line is no row of the resumed run."""
    run = tmp_path / "run"
    typed = settings(data, run, checkpoint_every_n_steps=None, checkpoint_every_eval="false")
    message = train(typed, log, hook=with_arguments(runs.small_disk_later, 5, 1200, [0])).error()
    assert f"error: {run / 'metrics.jsonl'} could not be written: File too large; free the disk" in message, message
    train([*typed, "resume=auto"], log).ok()
    assert_same_run(run, quiet)


def test_disk_full_on_one_rank(data: Path, tmp_path: Path, log: Path) -> None:
    """Both ranks end with the reason, and no step folder is published."""
    run = tmp_path / "run"
    done = train(settings(data, run), log, ranks=2, hook=with_arguments(_small_disk_on_rank_1))
    assert "the checkpoint of step 2 could not be written" in done.error()
    assert "there is no checkpoint yet" in done.error()
    assert not list(run.glob("*step_*")) and not (run / "latest").exists()


def _small_disk_on_rank_1(rank: int) -> None:
    if rank == 1:
        runs.small_disk(1000, rank)


def test_disk_full_from_the_start(data: Path, tmp_path: Path, log: Path) -> None:
    hook = with_arguments(runs.small_disk, 900)  # config.yaml is larger
    assert "can't write to" in train(settings(data, tmp_path / "run"), log, hook=hook).error()


def test_folder_that_cannot_be_written(data: Path, tmp_path: Path, log: Path) -> None:
    (tmp_path / "file").touch()
    message = train(settings(data, tmp_path / "file" / "run"), log).error()
    assert str(tmp_path / "file") in message


def test_numbers_that_are_not_finite_stop_the_run_and_keep_its_checkpoints(data: Path, copied: Path, log: Path) -> None:
    runs.rewind(copied, 4)
    before = _files_of_steps(copied)
    message = _resume(data, copied, log, lr=1e30, weight_decay=1e30, eval_every_n_steps=100).error()
    assert "not finite" in message and "since step" in message
    assert "the last good checkpoint is" in message and "step_00000004" in message
    assert (copied / "latest").read_text() == "step_00000004\n"
    assert _files_of_steps(copied) == before


def _files_of_steps(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.glob("step_*/**/*") if path.is_file()}


# ---- what resume means -------------------------------------------------------------------------


def test_resume_auto_without_a_checkpoint_starts_fresh(data: Path, quiet: Path, tmp_path: Path, log: Path) -> None:
    assert "starting afresh" in _resume(data, tmp_path / "run", log).ok()
    assert_same_run(tmp_path / "run", quiet)


def test_resume_with_damaged_latest_warns(data: Path, quiet: Path, copied: Path, log: Path) -> None:
    weights = copied / "step_00000012" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    output = _resume(data, copied, log).ok()
    assert "step_00000012 is damaged: model.safetensors has" in output and "going back to step_00000010" in output
    assert_same_run(copied, quiet)


def test_resume_without_an_intact_checkpoint_is_an_error(data: Path, copied: Path, log: Path) -> None:
    for weights in copied.glob("step_*/model.safetensors"):
        weights.unlink()
    before = sorted(copied.rglob("*"))
    assert "none of the 7 checkpoints" in _resume(data, copied, log).error()
    assert sorted(copied.rglob("*")) == before, "a refused run changed files"


def test_finished_run_says_so(data: Path, copied: Path, log: Path) -> None:
    before = runs.contents(copied)
    assert "is finished: it has done 12 of 12 steps" in _resume(data, copied, log).ok()
    assert runs.contents(copied) == before


def _times(run: Path) -> dict[int, float]:
    """Return time_s by step."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["time_s"] for row in found}


def test_a_branch_starts_from_an_older_step(data: Path, quiet: Path, tmp_path: Path, log: Path) -> None:
    older, branch = quiet / "step_00000004", tmp_path / "branch"
    before = runs.contents(quiet)
    train([f"resume={older}", f"checkpoint_path={branch}"], log).ok()
    assert_same_run(branch, quiet)  # the stored config wins over the defaults of the YAML files
    assert runs.contents(quiet) == before
    times, times_of_source = list(_times(branch).values()), _times(quiet)
    assert times[0] == times_of_source[1] and times == sorted(times), "the clock goes on from the rows that are kept"


def test_a_branch_without_a_step_to_do_is_a_mistake(quiet: Path, tmp_path: Path) -> None:
    """The sentence that a run is finished would name a folder that does not exist."""
    branch, newest = tmp_path / "branch", quiet / "step_00000012"
    typed = [f"resume={quiet}", f"checkpoint_path={branch}", "lr=3e-5"]
    done = f"{newest} has done 12 steps, so a branch of 12 steps has nothing to do"
    assert mistake(typed) == f"{done}; give max_steps=... above 12 for the branch"
    assert mistake([*typed, "max_steps=null", "epochs=1"]).endswith("; give epochs=... above 1 for the branch")
    assert mistake([*typed, "epochs=1"]).endswith("; give max_steps=... above 12 and epochs=... above 1 for the branch")
    assert not branch.exists(), "a refused branch left a folder"
    train_here([*typed, "max_steps=13", "epochs=100"])
    assert runs.latest(branch) == 13


def test_a_branch_has_no_best_and_no_patience_yet(data: Path, tmp_path: Path) -> None:
    """A branch ignores the exhausted patience of its source run.

    Its own first evaluation is its best.
    """
    run, branch = tmp_path / "run", tmp_path / "branch"
    never_better = {"best_metric": "steps", "eval_adaptive": "false", "eval_every_n_steps": 2}
    train_here(settings(data, run, early_stop_patience=2, max_steps=20, **never_better))
    assert runs.latest(run) == 6 and (run / "best").read_text() == "step_00000002\n", (
        "the source run must end by its patience"
    )
    train_here([f"resume={run}", f"checkpoint_path={branch}"])
    assert runs.latest(branch) > 0, "the branch made no step, because it inherited the exhausted patience"
    assert (branch / "best").exists(), (
        "no evaluation of the branch is its best, because it inherited the best of its source run"
    )
    assert (branch / "best").read_text() == "step_00000008\n", "the first evaluation of the branch must be its best"
    assert runs.latest(branch) == 12, "two evaluations must follow the best evaluation"


def test_a_resumed_run_keeps_its_wandb_run_and_a_branch_gets_another(data: Path, tmp_path: Path) -> None:
    def id_of(run: Path, step: int) -> str:
        return Checkpoint.open(run / f"step_{step:08d}").state.wandb_run_id

    run, branch = tmp_path / "run", tmp_path / "branch"
    train_here(settings(data, run, max_steps=2, eval_every_n_steps=None))
    train_here([f"resume={run}", "max_steps=3"])
    assert id_of(run, 3) == id_of(run, 2) != "", "the resumed run logs into another run of W&B"
    train_here([f"resume={run}", f"checkpoint_path={branch}", "max_steps=4"])
    assert id_of(branch, 4) != id_of(run, 3), "the branch logs into the W&B run of its source"


def test_a_resumed_float16_run_keeps_its_loss_scale(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scale is halved a few times before the checkpoint, and is doubled after it."""
    monkeypatch.setattr(LOSS_SCALE_START, 2.0**22)
    monkeypatch.setattr(LOSS_SCALE_GROWS_AFTER, 5)
    changes = {"arch__forward_dtype": "float16", "log_interval": 1, "eval_every_n_steps": None, "best_metric": None}
    whole, run = tmp_path / "whole", tmp_path / "run"
    train_here(settings(data, whole, **changes, max_steps=14))
    scales = [row["train/loss_scale"] for row in rows(whole)]
    assert scales[5] < 2.0**22 and {*scales[6:]} != {scales[5]}, f"this test needs other scales than {scales}"
    train_here(settings(data, run, **changes, max_steps=6))
    train_here([f"resume={run}", "max_steps=14"])
    assert [row["train/loss_scale"] for row in rows(run)] == scales, "the resumed run started with a fresh scale"


def test_typed_values_win_over_stored_values(data: Path, copied: Path, log: Path) -> None:
    """All other stored values stay, such as the 12 steps and the warm-up of the learning rate."""
    runs.rewind(copied, 4)
    stored = json.loads((copied / "step_00000004" / "state.json").read_text())["config"]
    output = train([f"resume={copied}", "weight_decay=0.7"], log).ok()
    assert f"changed on the command line: weight_decay: {stored['weight_decay']} -> 0.7" in output
    assert output.count("changed on the command line") == 1, output
    state = json.loads((copied / "step_00000012" / "state.json").read_text())
    assert state["config"] == stored | {
        "weight_decay": 0.7,
        "resume": str(copied),
        "checkpoint_path": str(copied),
    }


def test_a_run_can_resume_with_another_global_batch_size(data: Path, copied: Path, log: Path) -> None:
    """The stream of examples goes on at the same draw. The slots are fresh."""
    runs.rewind(copied, 4)
    output = _resume(data, copied, log, global_batch_size=24).ok()
    assert "changed on the command line: global_batch_size: 16 -> 24" in output
    state = json.loads((copied / "step_00000012" / "state.json").read_text())
    assert state["draws"] == 4 * 16 + 8 * 24
    assert [row["step"] for row in rows(copied)] == [1, 5, 10, 12]


def test_a_finished_run_goes_on_with_more_steps(data: Path, copied: Path, log: Path) -> None:
    _resume(data, copied, log, max_steps=15).ok()
    assert [row["step"] for row in rows(copied)] == [1, 5, 10, 12, 15]


def test_another_architecture_or_dataset(data: Path, copied: Path, tmp_path: Path, log: Path) -> None:
    runs.rewind(copied, 4)
    message = _resume(data, copied, log, arch__hidden_size=64).error()
    assert "doesn't fit this model" in message and "hidden_size: 32 -> 64" in message
    other = Path(shutil.copytree(data, tmp_path / "other"))
    inputs = np.load(other / "train" / "all__inputs.npy")
    inputs[0, 0] = 1 if inputs[0, 0] != 1 else 2
    np.save(other / "train" / "all__inputs.npy", inputs)
    assert "was trained on other data" in _resume(other, copied, log).error()
    assert (copied / "latest").read_text() == "step_00000004\n"
    # allow_changed_data applies to this start only. Then the new data belong to the run.
    output = _resume(other, copied, log, allow_changed_data="true", max_steps=8).ok()
    assert "train data are others than before: " in output and "test data" not in output
    assert "was trained on other data" in _resume(data, copied, log, max_steps=10).error()
    _resume(other, copied, log, max_steps=10).ok()


# ---- a recipe with everything on ---------------------------------------------------------------

# Every option that has a state, and a patience that ends the run before its last step. In `max`
# mode the falling loss is best at the first evaluation.
EVERYTHING = {
    "arch": "trm_mlp",
    "optim": "muon",
    "augment": "online",
    "ema": "true",
    "ema_rate": 0.5,
    "ema_start": 0.1,
    "grad_clip": 1.0,
    "arch.depth_curriculum": "[{until: 0.4, H_cycles: 1, L_cycles: 1}]",
    "early_stop_patience": 2,
    "best_metric": "lm_loss",
    "best_mode": "max",
    "eval_every_n_steps": 3,
}


@pytest.fixture(scope="module")
def quiet_everything(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("quiet_everything") / "run"
    train_here(settings(data, run, **EVERYTHING))
    assert runs.latest(run) == 9 and (run / "best").read_text() == "step_00000003\n", "the run must end by its patience"
    assert "rank_0000.safetensors:ema.puzzle_embedding.weight" in runs.tensors(run, 9)
    return run


def test_a_run_with_all_options_can_be_killed_stopped_and_resumed(
    data: Path, quiet_everything: Path, tmp_path: Path, log: Path
) -> None:
    """The kill comes in the shallow stage, before the first evaluation.

    The stop comes after an evaluation without a new best was counted.
    """
    run = tmp_path / "run"
    typed = settings(data, run, **EVERYTHING)
    running = runs.start(typed, log, hook=runs.slowly)
    until(lambda: runs.latest(run) >= 2, running)
    running.signal(signal.SIGKILL)
    running.wait().killed()
    assert runs.latest(run) < 6
    running = runs.start([*typed, "resume=auto"], log, hook=runs.slowly)
    until(lambda: runs.latest(run) >= 6, running)
    running.signal(signal.SIGTERM)
    assert "stopped by SIGTERM" in running.wait().ok()
    assert runs.latest(run) < 9
    train([f"resume={run}"], log).ok()
    assert_same_run(run, quiet_everything)
    assert not (run / "stopped").exists()


def test_a_stop_in_the_evaluation_that_exhausts_patience(
    data: Path, quiet_everything: Path, tmp_path: Path, log: Path
) -> None:
    """At the stop the average is swapped in.

    The checkpoint must have the weights, not the average.
    """
    run = tmp_path / "run"
    hook = with_arguments(runs.stopped_in_evaluation, 3, 0)
    train(settings(data, run, eval_batch_size=8, **EVERYTHING), log, hook=hook).ok()
    assert runs.latest(run) == 9 and rows(run)[-1]["step"] < 9
    assert "no better eval/all/lm_loss" in train([f"resume={run}"], log).ok()
    # The resumed run keeps its batch size of evaluation, which changes only the order of summation.
    assert [row["step"] for row in rows(run)] == [row["step"] for row in rows(quiet_everything)]
    assert_same_run(run, quiet_everything, metrics=False)
    assert not (run / "stopped").exists()


def test_an_average_that_is_switched_on_later_starts_from_the_weights(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_here(settings(data, run, max_steps=4))
    train_here([f"resume={run}", "ema=true", "ema_rate=0.75", "max_steps=5", "lr=1e-2"])
    weights, end = runs.tensors(run, 4), runs.tensors(run, 5)
    averaged = [name for name in end if ":ema." in name]
    assert len(averaged) > 5
    for name in averaged:
        old, new = (tensors[f"model.safetensors:{name.split(':ema.')[1]}"] for tensors in (weights, end))
        torch.testing.assert_close(end[name], 0.75 * old + 0.25 * new)
    # After the average is switched off, the next checkpoint has none.
    train_here([f"resume={run}", "ema=false", "max_steps=6"])
    assert not [name for name in runs.tensors(run, 6) if ":ema." in name]


@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [
        ("adam_atan2", "muon", "holds the state of adam_atan2, but this run's optimizer is adamw and muon"),
        ("adamw", "adam_atan2", "state of adamw, but this run's optimizer is adam_atan2"),
        ("muon", "adamw", "of adamw and muon, but this run's optimizer is adamw"),
    ],
)
def test_resuming_with_another_optimizer_is_refused(
    data: Path, tmp_path: Path, first: str, then: str, expected: str
) -> None:
    run = tmp_path / "run"
    train_here(settings(data, run, optim=first, max_steps=2, eval_every_n_steps=None))
    before = runs.contents(run)
    message = mistake([f"resume={run}", f"optim={then}", "max_steps=3"])
    assert expected in message and f"give optim={first}" in message
    assert runs.contents(run) == before


def test_an_option_of_the_stored_optimizer_can_be_typed_alone(data: Path, tmp_path: Path) -> None:
    """The stored config names the optimizer, and its other options stay."""
    run = tmp_path / "run"
    begin_with = {"optim": "muon", "optim.muon_momentum": 0.8, "eval_every_n_steps": None}
    train_here(settings(data, run, max_steps=2, **begin_with))
    train_here([f"resume={run}", "optim.muon_lr=0.01", "max_steps=3"])
    optim = json.loads((run / "step_00000003" / "state.json").read_text())["config"]["optim"]
    assert (optim["name"], optim["muon_lr"], optim["muon_momentum"]) == ("muon", 0.01, 0.8)


# ---- what is kept ------------------------------------------------------------------------------


def test_keep_last_k_and_the_best(data: Path, tmp_path: Path, log: Path) -> None:
    """The best step is kept although it is old.

    Nothing is learned, so that the first evaluation is the best.
    """
    run = tmp_path / "run"
    never_better = {"best_metric": "eval/all/steps", "eval_adaptive": "false"}
    train(settings(data, run, keep_last_k=2, eval_every_n_steps=3, **never_better), log).ok()
    assert (run / "best").read_text() == "step_00000003\n"
    assert sorted(path.name[-2:] for path in run.glob("step_*")) == ["03", "10", "12"]
    for folder in run.glob("step_*"):
        Checkpoint.open(folder)


def test_keep_last_k_never_removes_the_step_just_saved(data: Path, copied: Path, log: Path) -> None:
    """A damaged newest step makes the run go back.

    The next save has a lower number than the damaged step, but must not be removed.
    """
    runs.rewind(copied, 8)
    (copied / "step_00000008" / "model.safetensors").write_bytes(b"")
    hook = with_arguments(runs.raises, 2, 0)  # the fault comes one step after step 6, after a checkpoint
    done = train(
        settings(data, copied, resume="auto", keep_last_k=1, checkpoint_every_n_steps=7, eval_every_n_steps=100),
        log,
        hook=hook,
    )
    assert done.status == 1 and (copied / "latest").read_text() == "step_00000007\n"
    found = find_checkpoint(copied, print)
    assert found is not None and found.state.step == 7


def test_no_checkpoint_at_evaluations(data: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    changes = {"checkpoint_every_eval": "false", "checkpoint_every_n_steps": 7, "best_metric": None}
    train(settings(data, run, **changes), log).ok()
    assert sorted(path.name[-2:] for path in run.glob("step_*")) == ["07", "12"]
    assert [row["step"] for row in rows(run)] == [1, 5, 10, 12] and not (run / "best").exists()


def test_evaluations_at_intervals_of_epochs(data: Path, tmp_path: Path, log: Path) -> None:
    """Five epochs of 30 draws are 9 steps of 16 draws.

    Every second epoch ends within steps 4 (draw 60 of 64) and 8 (draw 120 of 128). The last step is
    evaluated too.
    """
    run = tmp_path / "run"
    train(settings(data, run, epochs=5, eval_interval=2, eval_every_n_steps=None, max_steps=None), log).ok()
    evaluated = [row["step"] for row in rows(run) if "eval/all/exact_accuracy" in row]
    assert evaluated == [4, 8, 9]


# ---- what was pending, with another config -----------------------------------------------------


@pytest.mark.parametrize("changes", [{"eval_every_n_steps": None}, {"global_batch_size": 8}, {"eval_max_share": 1e-9}])
def test_a_pending_evaluation_is_logged_after_a_resume_with_changes(
    data: Path, tmp_path: Path, log: Path, changes: dict[str, object]
) -> None:
    """The pending row is logged whether or not its evaluation is still due.

    The rows of later steps are logged too.
    """
    run = tmp_path / "run"
    train(settings(data, run, eval_batch_size=8), log, hook=with_arguments(runs.stopped_in_evaluation, 1, 0)).ok()
    pending = runs.latest(run)
    _resume(data, run, log, **changes).ok()
    logged = [row["step"] for row in rows(run)]
    assert pending in logged and logged[-1] > pending and len(logged) == len(set(logged))
    if "eval_max_share" in changes:  # in a new process the pending evaluation has no time limit
        (row,) = [row for row in rows(run) if row["step"] == pending]
        assert row["eval/all/num_examples"] == 20


def test_with_another_metric_the_search_for_the_best_starts_again(data: Path, copied: Path, log: Path) -> None:
    lower = {"best_metric": "lm_loss", "best_mode": "min", "max_steps": 20}
    _resume(data, copied, log, **lower).ok()
    values = {row["step"]: row["eval/all/lm_loss"] for row in rows(copied) if "eval/all/lm_loss" in row}
    since = {step: value for step, value in values.items() if step > 12}
    assert (copied / "best").read_text() == f"step_{min(since, key=lambda step: since[step]):08d}\n"


def test_a_stop_while_data_are_read_takes_effect_after_the_first_step(data: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    train(settings(data, run), log, hook=runs.stopped_at_once).ok()
    assert runs.latest(run) == 1 and (run / "stopped").read_text() == "SIGTERM\n"
