"""Train steps when another process asks for them, so that two programs can be timed in turn.

A line on the standard input asks for something, and the answer is a line of JSON on the standard
output:

describe   what trains here, and on what
steps N    train N steps, and return the mean time of a step
parts N    train N steps, and return how long each part of a step takes; {} if nobody knows

The steps of a request run without waiting for the device in between. The first request comes after
steps that were not timed.
"""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, Self

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
WARMUP = 3


class Trainer(Protocol):
    """What a program has to offer to answer requests."""

    is_main: bool

    def describe(self) -> dict[str, Any]: ...

    def steps(self, num_steps: int) -> dict[str, float]: ...

    def parts(self, num_steps: int) -> dict[str, float]: ...

    def next_request(self, read: Callable[[], str]) -> str: ...


def answer_requests(trainer: Trainer) -> None:
    """Answer requests until the standard input ends. Every rank."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no answer
    trainer.steps(WARMUP)
    while request := trainer.next_request(sys.stdin.readline).split():
        kind, *arguments = request
        answer = getattr(trainer, kind)(*map(int, arguments))
        if trainer.is_main:
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

    Attributes:
        description: its answer to `describe`.
        start_s: how long it took to start, to train untimed steps, and to describe itself.
    """

    def __init__(self, command: list[str]) -> None:
        self._command, began = command, time.perf_counter()
        self._process = subprocess.Popen(
            command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.description = self.ask("describe")
        self.start_s = time.perf_counter() - began

    def ask(self, request: str) -> dict[str, Any]:
        """Return the answer to a request. If the process has ended, so does this one."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(request, file=self._process.stdin, flush=True)
            line = self._process.stdout.readline()
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
