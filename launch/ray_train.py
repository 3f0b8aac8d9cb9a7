"""Run pretrain.py on workers of Ray, in Ray Train.

python -m launch.ray_train ray.num_workers=2 experiment=sudoku_extreme_1k
"""

import logging
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from launch.ray_config import USAGE, RayConfig, read_job, read_ray
from utils.command_line import CommandLine, only_help
from utils.terminal import tell

if find_spec("ray") is None:
    sys.exit(only_help("ray", USAGE, "python -m launch.ray_train needs ray; pip install -r requirements-ray.txt"))

import ray
from ray.exceptions import RayActorError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2._internal.exceptions import InsufficientClusterResourcesError, WorkerGroupStartupTimeoutError
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from launch.ray_job import RayJob
from launch.ray_rank import Desk, Outcome, TellFailures, run_rank
from utils.errors import UserError
from utils.overrides import typed_override
from utils.programs import ENVIRONMENT, ROOT
from utils.shell import run_command
from utils.stop import StopSignal
from utils.text import one_line

T = TypeVar("T")

_LOOK_EVERY_S = 0.3
_ANSWER_WITHIN_S = 10
_THREAD = "Ray Train"


def ray_train(argv: list[str] | None = None) -> str | tuple[str, int]:
    command = CommandLine.parse(sys.argv[1:] if argv is None else argv, "ray", USAGE)
    if command.page:
        return command.page
    config, overrides = read_ray(command.overrides)
    if config.shares_devices:
        tell(f"ray.gpus={config.gpus:g}: ranks share a device, so they talk over gloo, because NCCL refuses that")
    job = read_job(overrides)
    _connect(config)
    try:
        # After ray.init, which handles SIGTERM in its own way.
        with StopSignal() as stop:
            return _run(config, job, stop)
    finally:
        if not _waits_for_ray():
            ray.shutdown()


def _connect(config: RayConfig) -> None:
    # Ray Train reads this time from the environment only.
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = f"{config.placement_timeout_s:g}"
    address = config.address or os.environ.get("RAY_ADDRESS")
    if address and (parts := re.fullmatch(r"([^/]+):(\d+)", address)):  # Ray itself would try for minutes
        try:
            socket.create_connection((parts[1], int(parts[2])), timeout=_ANSWER_WITHIN_S).close()
        except OSError as error:
            raise UserError(
                f"no Ray cluster answers at {address} ({one_line(error)}); correct ray.address, or start a cluster "
                "with ray start --head"
            ) from error
    ray.init(
        address=address,
        logging_level=logging.ERROR,
        log_to_driver=False,  # the desk passes on what the ranks print
        # Each node has the project in the same folder, from which its workers import this package,
        # or has the package installed.
        runtime_env={"env_vars": ENVIRONMENT or {"PYTHONPATH": str(ROOT)}},
    )


def _run(config: RayConfig, job: RayJob, stop: StopSignal) -> str | tuple[str, int]:
    # Here, because it is to live as long as this program; without a core, so that it always finds a
    # place.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    desk = ray.remote(num_cpus=0, scheduling_strategy=here)(Desk).remote()
    name = f"{Path(job.run).name}_{time.strftime('%Y%m%d-%H%M%S')}"
    trainer = DataParallelTrainer(
        run_rank,
        train_loop_config={"job": job, "desk": desk},
        scaling_config=ScalingConfig(
            num_workers=config.num_workers,
            use_gpu=config.gpus > 0,
            resources_per_worker=config.resources,
            placement_strategy=config.placement,
        ),
        run_config=RunConfig(
            name=name,
            storage_path=str(Path(config.storage).absolute()),
            # A placement that takes too long counts as a failure of the controller.
            failure_config=FailureConfig(max_failures=config.max_failures, controller_failure_limit=0),
            callbacks=[TellFailures(desk)],
        ),
    )
    result = _in_thread(trainer.fit)
    try:
        _follow(result, stop, desk)
    except RayActorError:  # Ray itself has told why: this node's Ray ended, or memory ran out
        tell(
            "fault: Ray lost the actor that passes on what the ranks print; the ranks end; "
            f"resume=auto {typed_override('checkpoint_path', job.run)} goes on from their last checkpoint"
        )
        return "", 1
    return _told(result, config)


def _in_thread(function: Callable[[], T]) -> "Future[T]":
    """Call a function in a thread. In the main thread Ray takes Ctrl-C and kills the ranks."""
    result: Future[T] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=call, name=_THREAD, daemon=True).start()
    return result


def _waits_for_ray() -> bool:
    """Return whether the thread of the training goes on, although nobody wants its result."""
    for thread in threading.enumerate():
        if thread.name == _THREAD:
            thread.join(1)  # it ends in a moment if it has a result
            return thread.is_alive()
    return False


def _follow(result: "Future[Any]", stop: StopSignal, desk: Any) -> None:
    """Print what the ranks print until there is a result. After a signal, the ranks save and end.

    Raises:
        KeyboardInterrupt: The signal came while there were no ranks yet, or Ctrl-C came again.
    """
    is_told = is_done = False
    while not is_done:
        is_done = bool(wait_for([result], timeout=_LOOK_EVERY_S).done)
        for line in ray.get(desk.take_lines.remote()):
            tell(line)
        if stop.requested() and not is_told:
            is_told = True
            if not ray.get(desk.request_stop.remote()):
                raise KeyboardInterrupt  # Ray waits for a place, and the end of the program ends that
            tell(f"{stop.name}: the ranks save a checkpoint and end; Ctrl-C ends them at once")
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _told(result: "Future[Any]", config: RayConfig) -> str | tuple[str, int]:
    try:
        outcome: Outcome = result.result().return_value
    except WorkerGroupError as error:  # the ranks have told why
        ranks = ", ".join(map(str, sorted(error.worker_failures)))
        tell(f"fault: rank {ranks} failed in attempt {config.max_failures + 1} of {config.max_failures + 1}")
        return "", 1
    except ControllerError as error:
        if isinstance(error.controller_failure, WorkerGroupStartupTimeoutError | InsufficientClusterResourcesError):
            raise UserError(
                f"Ray found no place for {config.num_workers} workers of {config.resources} each "
                f"({config.placement}) in {config.placement_timeout_s:g} s; the cluster has "
                f"{ray.cluster_resources()}; lower what they reserve, or raise ray.placement_timeout_s"
            ) from error
        raise
    if outcome.mistake:
        raise UserError(outcome.mistake.removeprefix("error: "))
    return "", 0 if outcome.status == 0 else 1


def main() -> int:
    status = run_command(ray_train, None, interrupted="interrupted; nothing runs")
    if _waits_for_ray():
        # Ray crashes if it is shut down, also at the usual end of Python, while a thread waits for
        # it. When this process is gone, Ray ends the ranks.
        sys.stderr.flush()
        os._exit(status)
    return status


if __name__ == "__main__":
    sys.exit(main())
