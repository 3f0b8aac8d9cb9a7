"""Do what another process asks for, so that several programs can be timed in turn.

A line on the standard input asks for something, and the answer is a line of JSON on the standard
output. Each request is a method of the program that answers:

describe   what trains here, and on what
steps N    train N steps, and return the mean time of a step
parts N    train N steps, and return how long each part takes; asked for if flops are described
evaluate   evaluate once, and return `seconds` and metrics

benchmarks.our_steps answers more requests. The steps of a request run without waiting for the
device in between. The first request comes after work that was not timed.
"""

import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import cached_property
from queue import Empty, Queue
from typing import IO, Any, Self

import torch

from benchmarks.harness import REPOSITORY

WARMUP = 4  # the fourth step may be captured (training/step_graph.py)
_ENDING_S = 60  # a program that has nothing more to answer


class Program:
    """What answers requests: it has a method of the name of each request."""

    is_main = True

    def next_request(self, read: Callable[[], str]) -> str:
        return read()


def answer_requests(program: Program, warm_up: Callable[[], object]) -> None:
    """Warm up, then answer requests until the standard input ends. Every rank."""
    answers = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no answer
    warm_up()
    while request := program.next_request(sys.stdin.readline).split():
        kind, *arguments = request
        answer = getattr(program, kind)(*map(int, arguments))
        if program.is_main:
            print(json.dumps(answer), file=answers, flush=True)


def timed(train: Callable[[], object], num_steps: int, device: torch.device) -> dict[str, float]:
    """Return the mean ms of `num_steps` calls without waits in between, and of their CPU time."""
    wait_for(device)
    began, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(num_steps):
        train()
    wait_for(device)
    ms = 1e3 / num_steps
    return {"step_ms": ms * (time.perf_counter() - began), "cpu_ms": ms * (time.process_time() - cpu_s)}


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Ended(Exception):
    """A program that was asked has ended, or did not answer in time."""


class Asked:
    """A process that answers requests. It warms up while other work goes on.

    Args:
        errors: where its standard error goes; None: to that of this process.
    """

    def __init__(self, command: list[str], errors: IO[str] | None = None) -> None:
        self._command = command
        self._answers: Queue[dict[str, Any] | None] = Queue()
        self._process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()
        self._send("describe")

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # what a library prints past Python is no answer
                self._answers.put(json.loads(line))
        self._answers.put(None)

    def _send(self, request: str) -> None:
        assert self._process.stdin is not None
        try:
            print(request, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            self._answers.put(None)

    def _answer(self, limit_s: float | None) -> dict[str, Any]:
        try:
            answer = self._answers.get(timeout=limit_s)
        except Empty:
            raise Ended(f"{shlex.join(self._command)} did not answer in time") from None
        if answer is None:
            raise Ended(f"{shlex.join(self._command)} ended with status {self._process.wait()}")
        return answer

    @cached_property
    def description(self) -> dict[str, Any]:
        """What the program says of itself once it is warm."""
        return self._answer(None)

    def await_ready(self, limit_s: float) -> None:
        """Wait until the program is warm. Raise Ended if that takes longer."""
        self.__dict__["description"] = self._answer(max(0.0, limit_s))

    def ask(self, request: str, limit_s: float | None = None) -> dict[str, Any]:
        """Return the answer to a request. Raise Ended if there is none."""
        assert self.description is not None
        self._send(request)
        return self._answer(limit_s)

    def kill(self) -> None:
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
