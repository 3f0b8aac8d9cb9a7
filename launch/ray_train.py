"""Run pretrain.py on workers of Ray, in Ray Train.

python -m launch.ray_train ray.num_workers=2 experiment=sudoku_extreme_1k
"""

import logging
import os
import re
import signal
import socket
import sys
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from launch.ray_config import USAGE, RayConfig, read_ray, reserved, with_folder
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

from launch.ray_rank import MISTAKE, Desk, TellFailures, run_rank
from utils.errors import UserError
from utils.overrides import typed_override
from utils.programs import ENVIRONMENT, ROOT
from utils.shell import run_command
from utils.stop import StopSignal
from utils.text import one_line

_LOOK_EVERY_S = 0.3
_ANSWER_WITHIN_S = 10
_INTERRUPTED = "interrupted; nothing runs"


def ray_train(argv: list[str] | None = None) -> str | tuple[str, int]:
    command = CommandLine.parse(sys.argv[1:] if argv is None else argv, "ray", USAGE)
    if command.page:
        return command.page
    config, overrides = read_ray(command.overrides)
    arguments, run = with_folder(overrides)
    _connect(config)
    try:
        # After ray.init, which handles SIGTERM in its own way.
        with StopSignal() as stop:
            return _run(config, arguments, run, stop)
    finally:
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


def _run(config: RayConfig, arguments: list[str], run: Path, stop: StopSignal) -> tuple[str, int]:
    # Here, because it is to live as long as this program; without a core, so that it always finds a
    # place.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    desk = ray.remote(num_cpus=0, scheduling_strategy=here)(Desk).remote()
    share = reserved(config.cpus, config.gpus, config.memory_gb)
    name = f"{run.name}_{time.strftime('%Y%m%d-%H%M%S')}"
    trainer = DataParallelTrainer(
        run_rank,
        train_loop_config={"arguments": arguments, "cwd": os.getcwd(), "run": str(run), "name": name, "desk": desk},
        scaling_config=ScalingConfig(
            num_workers=config.num_workers,
            use_gpu=config.gpus > 0,
            resources_per_worker=share,
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
    # In the main thread Ray takes Ctrl-C and kills the ranks.
    training = ThreadPoolExecutor(1).submit(trainer.fit)
    try:
        _follow(training, stop, desk)
        status = training.result().return_value
        return "", status if status in (0, MISTAKE) else 1
    except KeyboardInterrupt:
        _leave(f"error: {_INTERRUPTED}", 130)
    except RayActorError:  # Ray itself has told why: this node's Ray ended, or memory ran out
        _leave(
            "fault: Ray lost the actor that passes on what the ranks print; the ranks end; "
            f"resume=auto {typed_override('checkpoint_path', str(run))} goes on from their last checkpoint",
            1,
        )
    except WorkerGroupError as error:  # the ranks have told why
        ranks = ", ".join(map(str, sorted(error.worker_failures)))
        tell(f"fault: rank {ranks} failed in attempt {config.max_failures + 1} of {config.max_failures + 1}")
        return "", 1
    except ControllerError as error:
        if isinstance(error.controller_failure, WorkerGroupStartupTimeoutError | InsufficientClusterResourcesError):
            raise UserError(
                f"Ray found no place for {config.num_workers} workers of {share} each "
                f"({config.placement}) in {config.placement_timeout_s:g} s; the cluster has "
                f"{ray.cluster_resources()}; lower what they reserve, or raise ray.placement_timeout_s"
            ) from error
        raise
    except Exception:
        if not training.done():
            _leave(traceback.format_exc().rstrip(), 1)
        raise


def _follow(training: "Future[Any]", stop: StopSignal, desk: Any) -> None:
    """Print what the ranks print until there is a result. After a signal, the ranks save and end.

    Raises:
        KeyboardInterrupt: The signal came while there were no ranks yet, or Ctrl-C came again.
    """
    is_told = is_done = False
    while not is_done:
        is_done = bool(wait_for([training], timeout=_LOOK_EVERY_S).done)
        for line in ray.get(desk.take_lines.remote()):
            tell(line)
        if stop.requested() and not is_told:
            is_told = True
            if not ray.get(desk.request_stop.remote()):
                raise KeyboardInterrupt  # Ray waits for a place, and the end of the program ends that
            tell(f"{stop.name}: the ranks save a checkpoint and end; Ctrl-C ends them at once")
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(last_line: str, status: int) -> NoReturn:
    """End this process, after which Ray ends the ranks.

    Ray crashes if it is shut down while a thread waits for it, also at the usual end of Python.
    """
    tell(last_line)
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(run_command(ray_train, None, interrupted=_INTERRUPTED))
