"""Trace steps for TensorBoard and Perfetto, and print their largest operations."""

from collections.abc import Callable
from pathlib import Path

import torch
from pydantic import Field, field_validator, model_validator
from torch.profiler import ProfilerActivity, profile, schedule, tensorboard_trace_handler

from utils.config import Bool, Int, StrictModel
from utils.errors import UserError
from utils.ranks.world import World

FOLDER = "profile"

_LARGEST = 10
_MEMORY_EVENTS = 200_000  # how many allocations and frees are kept; the newest ones, over six steps


class ProfileConfig(StrictModel):
    """What is traced. config/pretrain.yaml holds the defaults and says what each key means."""

    enabled: Bool
    steps: list[Int]
    ranks: list[Int] | None = Field(min_length=1)
    shapes: Bool
    stacks: Bool

    @model_validator(mode="before")
    @classmethod
    def _is_a_switch_or_options(cls, value: object) -> object:
        if not isinstance(value, dict):
            raise ValueError(f"{value!r} is neither true nor false; give one of them, or profile.steps and the like")
        return value

    @field_validator("steps")
    @classmethod
    def _steps_are_a_range(cls, steps: list[int]) -> list[int]:
        if len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
            raise ValueError(f"{steps} is no range of steps; give the first and the last, such as [4, 6]")
        return steps

    def require_ranks(self, num_ranks: int) -> None:
        missing = [rank for rank in self.ranks or [] if not 0 <= rank < num_ranks]
        if self.enabled and missing:
            raise UserError(
                f"profile.ranks: there is no rank {', '.join(map(str, missing))} of {num_ranks}; "
                f"give numbers from 0 to {num_ranks - 1}, or null for all"
            )


class StepProfiler:
    """Traces some steps of this process if the config says so for this rank.

    <run>/profile/ gets rank_<n>.<time>.pt.trace.json.gz, the largest operations in rank_<n>.txt,
    and on CUDA the memory in rank_<n>.memory.pickle, which this program never reads.
    """

    def __init__(self, config: ProfileConfig, run: Path, say: Callable[[str], None], world: World) -> None:
        self._folder, self._say, self._on_cuda = run / FOLDER, say, world.device.type == "cuda"
        self._name, self._last_step = f"rank_{world.rank}", config.steps[1]
        self._num_steps = config.steps[1] - config.steps[0] + 1
        self._profile: profile | None = None
        self._written = False
        if not config.enabled or (config.ranks is not None and world.rank not in config.ranks):
            return
        if self._on_cuda:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        before = config.steps[0] - 1
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])],
            schedule=schedule(wait=max(before - 1, 0), warmup=min(before, 1), active=self._num_steps, repeat=1),
            on_trace_ready=self._write,
            record_shapes=config.shapes,
            with_stack=config.stacks,
            profile_memory=True,
        )
        self._profile.start()

    def step(self) -> None:
        if self._profile is not None:
            self._profile.step()

    def close(self) -> None:
        if self._profile is not None:
            self._profile.stop()
            # A run that was resumed may have been traced before.
            if not self._written and not any(self._folder.glob(f"{self._name}.*.pt.trace.json.gz")):
                self._say(f"no trace: the run ended before step {self._last_step}")

    def _write(self, finished: profile) -> None:
        if finished.step_num < self._last_step:  # the run ended during the trace
            return
        self._written = True
        tensorboard_trace_handler(str(self._folder), self._name, use_gzip=True)(finished)
        operations = finished.key_averages()
        of = "device" if self._on_cuda else "cpu"
        tables = "\n\n".join(
            operations.table(sort_by=f"self_{of}_{what}", row_limit=_LARGEST, max_name_column_width=56).strip()
            for what in ("time_total", "memory_usage")
        )
        self._say(tables)
        (self._folder / f"{self._name}.txt").write_text(tables + "\n", encoding="utf-8")
        memory = ""
        if self._on_cuda:
            snapshot = self._folder / f"{self._name}.memory.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
            memory = f" and {snapshot.name} (open it in https://pytorch.org/memory_viz)"
        self._say(
            f"{self._num_steps} steps: {self._folder} has {self._name}.*.pt.trace.json.gz (open it in "
            f"https://ui.perfetto.dev or TensorBoard), {self._name}.txt{memory}"
        )
