"""Do what another process asks for, so that two programs can be timed in turn.

A line on the standard input asks for something, and the answer is a line of JSON on the standard
output:

describe   what trains here, and on what
steps N    train N steps, and return the mean time of a step
parts N    train N steps, and return how long each part of a step takes; {} if nobody knows
metrics    return the train metrics of all steps so far; benchmarks.gpu.levers asks for this

evaluate   evaluate once, and return `seconds` and metrics; benchmarks.evaluation asks for this

The steps of a request run without waiting for the device in between. The first request comes after
work that was not timed.
"""

import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Protocol, Self

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
WARMUP = 3


class Program(Protocol):
    """What answers requests: it has a method of the name of each request."""

    is_main: bool

    def describe(self) -> dict[str, Any]: ...

    def next_request(self, read: Callable[[], str]) -> str: ...


class Trainer(Program, Protocol):
    """What answers requests for steps."""

    def steps(self, num_steps: int) -> dict[str, float]: ...

    def parts(self, num_steps: int) -> dict[str, float]: ...


def answer_requests(trainer: Trainer) -> None:
    """Train some steps, then answer requests until the standard input ends. Every rank."""
    answer_after(lambda: trainer.steps(WARMUP), trainer)


def answer_after(warm_up: Callable[[], object], program: Program) -> None:
    """Warm up, then answer requests until the standard input ends. Every rank."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no answer
    warm_up()
    while request := program.next_request(sys.stdin.readline).split():
        kind, *arguments = request
        answer = getattr(program, kind)(*map(int, arguments))
        if program.is_main:
            print(json.dumps(answer), file=answers, flush=True)


def timed(train: Callable[[], object], num_steps: int, device: torch.device) -> float:
    """Return the mean time of `num_steps` calls in ms, without waits in between."""
    wait_for(device)
    began = time.perf_counter()
    for _ in range(num_steps):
        train()
    wait_for(device)
    return 1e3 * (time.perf_counter() - began) / num_steps


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Asked:
    """A process that answers requests.

    Args:
        environment: variables that it gets beside those of this process.
        errors: where its standard error goes; None: to that of this process.

    Attributes:
        description: its answer to `describe`.
        start_s: how long it took to start, to train untimed steps, and to describe itself.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str] | None = None, errors: IO[str] | None = None
    ) -> None:
        self._command, began = command, time.perf_counter()
        self._process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | (environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        self.description = self.ask("describe")
        self.start_s = time.perf_counter() - began

    def ask(self, request: str) -> dict[str, Any]:
        """Return the answer to a request. If the process has ended, so does this one."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(request, file=self._process.stdin, flush=True)
            # What a library prints past Python is no answer. Every answer is an object.
            line = next((line for line in self._process.stdout if line.startswith("{")), "")
        except BrokenPipeError:
            line = ""
        if not line:
            sys.exit(f"{shlex.join(self._command)} ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
