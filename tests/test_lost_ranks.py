"""If a rank hangs, dies or loses its launcher, the others name it and no rank goes on writing."""

import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import runs
from tests.runs import Torchrun, assert_same_run, settings, train, until

pytestmark = pytest.mark.faults

TIMEOUT_S = 3


def _of(output: str, rank: int) -> int:
    """Return the id of the process that is named for a rank."""
    (named,) = set(re.findall(rf"rank {rank} \(process (\d+) on [^)]+\) says nothing", output))
    return int(named)


def test_a_rank_that_hangs_is_named_within_the_timeout(data: Path, tmp_path: Path, log: Path) -> None:
    run, hanging = tmp_path / "run", 1
    typed = settings(data, run, global_batch_size=18, **{"dist.timeout_s": TIMEOUT_S})
    running = runs.start(typed, log, ranks=3, hook=runs.slowly)
    until(lambda: runs.latest(run) >= 2, running)
    running.signal(signal.SIGSTOP, ranks=[hanging])
    stopped_at = time.monotonic()
    others = [process for rank, process in enumerate(running.processes) if rank != hanging]
    for process in others:
        process.join(TIMEOUT_S + 15)
    took = time.monotonic() - stopped_at
    output, pid = running.output, running.processes[hanging].pid
    running.processes[hanging].join(5)
    killed = running.processes[hanging].exitcode
    running.signal(signal.SIGKILL)
    assert [process.exitcode for process in others] == [1, 1], output
    assert took < TIMEOUT_S + 12, f"{took:.0f} s"
    assert _of(output, hanging) == pid
    assert killed == -signal.SIGKILL, "torchrun would wait for it for 30 s"
    assert not [rank for rank in range(3) if rank != hanging and f"rank {rank} (process" in output]
    assert "the last good checkpoint is" in output


def _hang_in_user_code(place: str, rank: int) -> None:
    def my_own_function(*_: Any) -> None:
        time.sleep(1000)

    def hang_at_step(number: int) -> None:
        if number == 3 and rank == 1:
            my_own_function()

    if place == "step":
        runs.before_step(hang_at_step)
    elif rank == 1:
        from dataset.loader import TrainLoader
        from records.checkpoint import writer

        target, name = (TrainLoader, "_read") if place == "loader" else (writer, "write_weights")
        setattr(target, name, my_own_function)


@pytest.mark.parametrize("place", ["step", "loader", "save"])
def test_a_rank_that_hangs_shows_where(data: Path, tmp_path: Path, log: Path, place: str) -> None:
    typed = settings(data, tmp_path / "run", **{"dist.timeout_s": TIMEOUT_S})
    done = train(typed, log, ranks=2, hook=partial(_hang_in_user_code, place))
    assert done.status != 0
    assert "rank 1 (process" in done.output
    assert "in my_own_function" in done.output, done.output


def _refuse_new_groups_amid_training(rank: int) -> None:
    import torch.distributed as dist

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a group is made amid training")

    def from_now_on(step: int) -> None:
        dist.distributed_c10d._new_process_group_helper = refuse

    runs.before_step(from_now_on)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "pipeline"])
def test_ranks_make_no_group_once_they_train(data: Path, tmp_path: Path, log: Path, parallel: str) -> None:
    """To make a group, ranks wait in the store, where they do not notice that a rank was killed."""
    typed, ranks = [f"parallel={parallel}", *settings(data, tmp_path / "run")], 2
    if parallel == "pipeline":
        typed, ranks = _two_pipelines(data, tmp_path / "run"), 4
    typed += ["max_steps=3", "eval_every_n_steps=3"]
    train(typed, log, ranks=ranks, hook=_refuse_new_groups_amid_training).ok()


def _two_pipelines(data: Path, run: Path) -> list[str]:
    """Return the settings of two pipelines of two stages."""
    kept = [word for word in settings(data, run) if not word.startswith("arch.")]
    return ["parallel=pipeline", "arch=transformer", *kept, "parallel.stages=2"]


def _dies_while_another_is_slow(rank: int) -> None:
    def step(number: int) -> None:
        if number == 3 and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == 3 and rank == 2:
            time.sleep(8)  # rank 2 learns of the kill only after this

    runs.before_step(step)


def test_a_rank_that_is_only_slow_is_not_named(data: Path, tmp_path: Path, log: Path) -> None:
    """Nor is a rank named that waits for the slow rank, as in most collectives of three ranks."""
    done = train(settings(data, tmp_path / "run", global_batch_size=18), log, ranks=3, hook=_dies_while_another_is_slow)
    assert set(re.findall(r"rank (\d) \(process \d+ on [^)]+\) says nothing", done.output)) == {"1"}, done.output


def _dies(rank: int) -> None:
    if rank == 3:
        runs.before_step(lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == 3 else None)


@pytest.mark.invariance
def test_a_killed_stage_is_named_by_the_other_pipeline_as_well(data: Path, tmp_path: Path, log: Path) -> None:
    """Rank 0 shares neither a pipeline nor a stage with rank 3, so that it learns of it in turn."""
    done = train(_two_pipelines(data, tmp_path / "run"), log, ranks=4, hook=_dies)
    assert set(re.findall(r"rank (\d) \(process \d+ on [^)]+\) says nothing", done.output)) == {"3"}, done.output


@pytest.mark.slow
def test_a_rank_0_that_hangs_is_named_by_the_other_rank(data: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    running = runs.start(settings(data, run, **{"dist.timeout_s": TIMEOUT_S}), log, ranks=2, hook=runs.slowly)
    until(lambda: runs.latest(run) >= 2, running)
    running.signal(signal.SIGSTOP, ranks=[0])
    running.processes[1].join(TIMEOUT_S + 20)
    output, pid = running.output, running.processes[0].pid
    running.signal(signal.SIGKILL)
    assert running.processes[1].exitcode == 1, output
    assert f"rank 0 (process {pid} on " in output and "it hangs or is gone" in output


def _fails_amid_a_slow_save(rank: int) -> None:
    from records.checkpoint import storage

    write = storage.write_tensors  # type: ignore[attr-defined]

    def slowly(*args: Any) -> Any:
        time.sleep(12)
        return write(*args)

    if rank == 1:
        storage.write_tensors = slowly  # type: ignore[attr-defined,assignment]
    runs.raises(3, 1, rank)


def test_a_rank_that_fails_during_a_slow_save_is_not_said_to_hang(data: Path, tmp_path: Path, log: Path) -> None:
    """The failing rank first waits for its save."""
    typed = settings(data, tmp_path / "run", **{"dist.timeout_s": 8})  # less than the save takes
    done = train(typed, log, ranks=2, hook=_fails_amid_a_slow_save)
    assert "fault on rank 1: RuntimeError: the ceiling fell down" in done.output
    assert "says nothing" not in done.output


def test_a_killed_launcher_takes_its_workers_along(data: Path, quiet_2: Path, tmp_path: Path, log: Path) -> None:
    """The workers end within seconds. A run that is resumed meanwhile waits for their end."""
    run = tmp_path / "run"
    launched = Torchrun(["--standalone"], runs.slowly, settings(data, run), log, tmp_path)
    try:
        until(lambda: runs.latest(run) >= 2, launched)
        workers = launched.workers()
        launched.signal(signal.SIGKILL)
        resumed = runs.start(settings(data, run, resume="auto"), tmp_path / "log_2", ranks=2)
        assert not psutil.wait_procs(workers, timeout=5)[1], "workers outlive their launcher"
        resumed.wait().ok()
    finally:
        launched.kill()
        for worker in workers:
            if worker.is_running():
                worker.kill()
    assert "its launcher is gone; ending" in log.read_text()
    assert_same_run(run, quiet_2)


def test_a_process_without_a_launcher_outlives_its_parent(data: Path, tmp_path: Path) -> None:
    """Under nohup the parent of pretrain.py ends."""
    run = tmp_path / "run"
    starter = runs.fork(_start_and_leave, settings(data, run), str(tmp_path / "log"))
    starter.join(60)
    end = time.monotonic() + 60
    while runs.latest(run) < runs.LAST_STEP:
        assert time.monotonic() < end, (tmp_path / "log").read_text()
        time.sleep(0.1)


def _start_and_leave(arguments: list[str], log: str) -> None:
    if os.fork() == 0:
        os.setsid()
        runs._child("pretrain", arguments, log, {"RANK": "0", "WORLD_SIZE": "1"}, runs.slowly)


def test_a_second_run_is_kept_out_of_the_folder(data: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    first = runs.start(settings(data, run, max_steps=300), log, hook=runs.slowly)
    until(lambda: runs.latest(run) >= 2, first)
    message = train(settings(data, run, resume="auto"), tmp_path / "log_2").error()
    assert f"{run} is in use by process {first.processes[0].pid} on " in message
    first.signal(signal.SIGKILL)
    first.wait(30).killed()
    assert "resuming" in train(settings(data, run, resume="auto", max_steps=runs.latest(run) + 1), log).ok()
