"""Train a model of puzzles or of text on request (benchmarks/on_request.py).

python -m benchmarks.our_steps OVERRIDE...
torchrun --nproc-per-node N -m benchmarks.our_steps OVERRIDE...

Besides describe, steps and parts it answers these requests:

metrics    return the train metrics of all steps so far
peak       multiply the model's matrices alone, and copy memory; ask for it while nothing else runs
kernels N  trace N steps, and return the largest kernels and what bounds each
"""

import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import record_function

from benchmarks.gpu.kernels import summary, trace
from benchmarks.matrix_peak import ceilings, measure_products, peak_tflops
from benchmarks.on_request import WARMUP, Program, answer_requests, timed
from models.puzzle_embedding import PUZZLE_TABLE
from models.text.objective import TextBatch
from pretrain import build_state, open_run, stepper
from records.checkpoint.writer import Snapshot
from training.config import PretrainConfig
from training.flops import flops_of_step
from training.plan import Plan
from training.resume import Start
from training.step import StepSettings
from utils.batch import Batch
from utils.command_line import read_config, validate
from utils.perf.devices import max_memory_gb
from utils.perf.recording import (
    AVERAGE,
    BACKWARD,
    FORWARD,
    NO_GRAD,
    OPTIMIZER,
    Span,
    is_transfer,
    recording,
    transfers,
    union,
)
from utils.ranks.setup import join_ranks

METRICS = "metrics"


class OurTrainer(Program):
    """Trains like pretrain.py, without evaluations, logs and checkpoints."""

    def __init__(self, overrides: list[str]) -> None:
        world = join_ranks()
        start = Start(validate(PretrainConfig, read_config("pretrain", overrides)))
        self.world, self._data = open_run(start, world)
        data = self._data
        self._state = build_state(start, data, self.world)
        self._take = stepper(self._state, print, self.world)
        self._config, self._sizes = start.config, data.sizes
        self._plan = plan = Plan.make(self._config, data, self._state.progress, self.world)
        loader = plan.kind.loader(self._config, data.train, plan.sampler, plan.augmentation, self.world)
        self._batches: Iterator[Batch | TextBatch] = loader.batches(range(1, plan.last_step + 1))
        self._data_s = 0.0
        self.is_main = self.world.is_main

    def next_request(self, read: Callable[[], str]) -> str:
        """Return the next request, which rank 0 reads. Every rank."""
        return str(self.world.broadcast_object(read() if self.is_main else None))

    def describe(self) -> dict[str, Any]:
        config, world = self._config, self.world
        device = world.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        return {
            "what": f"{config.arch.name}, {config.arch.forward_dtype}, compile={config.compile}",
            "device": f"{world.size} x {name}",
            "device_type": device.type,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "batch_size": config.global_batch_size,
            "unit": self._plan.kind.unit,
            "flops": flops_of_step(config, self._sizes, self._plan.kind.usual_depth(config)),
        }

    def peak(self) -> dict[str, Any]:
        """Measure the products of the blocks with what this rank computes at once."""
        config = self._config
        num_units = config.global_batch_size // self.world.size // config.grad_accumulation
        products = measure_products(self._state.model, num_units, config.arch.hidden_size)
        return {
            "peak_tflops": self.world.size * peak_tflops(products),
            "best": self._ceilings(),
            "products": [asdict(product) for product in products],
        }

    def kernels(self, num_steps: int) -> dict[str, Any]:
        """Train some steps, and return what took their time on the device."""
        step_ms = self.steps(WARMUP)["step_ms"]
        events = trace(lambda: self.train(num_steps), self.world.device)
        return summary(events, num_steps, step_ms, self._ceilings())

    def _ceilings(self) -> dict[str, float]:
        found = ceilings(self.world.device, self._state.model.dtype)
        torch.cuda.empty_cache()  # the programs of benchmarks.gpu share a card
        return found

    def steps(self, num_steps: int) -> dict[str, float]:
        """Train some steps, and return the mean ms of one and of its wait for data. Every rank."""
        self._data_s = 0.0
        return timed(self._step, num_steps, self.world.device) | {
            "data_ms": 1e3 * self._data_s / num_steps,
            "max_memory_gb": max_memory_gb(self.world.device),
        }

    def train(self, num_steps: int) -> None:
        """Train some steps without waiting for the device. Every rank."""
        for _ in range(num_steps):
            self._step()

    def _step(self) -> None:
        state, began = self._state, time.perf_counter()
        batch = next(self._batches)
        self._data_s += time.perf_counter() - began
        state.progress.step += 1
        result = self._take(batch, StepSettings.at(state.progress.step, self._plan, self.world))
        with record_function(METRICS):
            state.sums.add(result.sums, result.grad_norm)

    def metrics(self) -> dict[str, float]:
        """Return the train metrics of all steps since the start; call it once. Every rank."""
        num_steps = self._state.progress.step
        return self._state.sums.reduce(num_steps, num_steps * self._config.global_batch_size)

    def parts(self, num_steps: int) -> dict[str, float]:
        """Train some steps, and return the ms that each part of one takes. Every rank.

        The parts are exclusive. What ranks send while they compute is not part of the reduction. On
        CUDA a part is the time of its kernels, and `rest` has what the card waits.
        """
        with recording(self.world.device) as events:
            row = self.steps(num_steps)
        return parts_of(events, row, num_steps, self.world.device)

    def snapshot(self) -> Snapshot:
        """Return what a checkpoint saves now. Every rank."""
        return self._state.snapshot(self._config, self._data, self.world)


def spans_of(names: Iterable[str], events: list[Any], device: torch.device) -> dict[str, list[Span]]:
    """Return when each named part ran: its code, or on CUDA the kernels that its code launched.

    The profiler's own names on a device hold what their thread launched under no inner name. So
    they lack what autograd's thread launches, and what torch.optim does under a name of its own.
    """
    code: dict[str, list[Span]] = {name: [] for name in names}
    launched_ns, kernels = dict[int, int](), list[tuple[int, Span]]()
    for event in events:
        number, is_name = event.correlation_id(), event.is_user_annotation()
        span = event.start_ns(), event.end_ns()
        if event.device_type() == DeviceType.CUDA:
            if not is_name and not is_transfer(event):
                kernels.append((number, span))
        elif not is_name:  # names have numbers of their own, which may equal those of launches
            launched_ns[number] = span[0]
        elif event.name() in code:
            code[event.name()].append(span)
    if device.type != "cuda":
        return code
    ran = [(launched_ns[number], span) for number, span in kernels if number in launched_ns]
    return {name: [span for at, span in ran if any(b <= at < e for b, e in code[name])] for name in code}


def parts_of(events: list[Any], row: dict[str, float], num_steps: int, device: torch.device) -> dict[str, float]:
    """Return the ms of each part of a step, from the recorded events of some and their `row`."""
    spans = spans_of((NO_GRAD, FORWARD, BACKWARD, PUZZLE_TABLE, OPTIMIZER, AVERAGE, METRICS), events, device)
    ms = {name: union(each) / num_steps / 1e6 for name, each in spans.items()}
    ms[FORWARD] -= ms[NO_GRAD]
    if not spans[NO_GRAD]:  # a compiled segment does not name them
        del ms[NO_GRAD]
    # The update of the puzzle table waits for what the ranks send for it.
    sent = list(transfers(events))
    ms[PUZZLE_TABLE] = (union([*spans[PUZZLE_TABLE], *sent]) - union(sent)) / num_steps / 1e6
    computing = [span for name, each in spans.items() if name != PUZZLE_TABLE for span in each]
    reduction_ns = union([*computing, *sent]) - union(computing)
    ms = {"data": row["data_ms"], **ms, "reduction": reduction_ns / num_steps / 1e6}
    return {"step": row["step_ms"], **ms, "rest": row["step_ms"] - sum(ms.values())}


if __name__ == "__main__":
    trainer = OurTrainer(sys.argv[1:])
    answer_requests(trainer, lambda: trainer.train(WARMUP))
