"""Run a function on several ranks: real processes that communicate over gloo, as under torchrun."""

import multiprocessing as mp
import os
import random
import socket
import traceback
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from multiprocessing.connection import wait
from typing import Any

import torch

from utils.ranks.setup import join_ranks
from utils.ranks.world import World

# Importing torch takes seconds. A fork of a server that has imported it takes milliseconds.
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch", "utils.ranks.setup"])


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120) -> list[Any]:
    """Call `function(world, *args)` on each rank, and return the results by rank."""
    port = free_port()
    pipes, processes = [], []
    for rank in range(world_size):
        receiver, sender = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_rank, args=(function, rank, world_size, port, sender, args), daemon=True)
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        return _collect(pipes, timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.join()


def world_of(rank: int, size: int) -> World:
    """Return the world of a rank, for tests that need no communication."""
    return World(rank=rank, size=size, data_rank=rank, data_size=size, share_weights=(Fraction(1),) * size)


def environment_of(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the environment variables that torchrun sets for a rank."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in names.items()}


def free_port() -> int:
    """Return a port on which nobody listens now.

    It lies below those that Linux gives to outgoing connections (from 32768), because a connection
    of another test could take it before a rank listens there.
    """
    while True:
        port = random.SystemRandom().randrange(10_000, 32_768)
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def _collect(pipes: list[Any], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting: dict[Any, int] = dict(zip(pipes, range(len(pipes)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=timeout_s)
        assert ready, f"ranks {sorted(waiting.values())} did not answer for {timeout_s} s"
        pipe: Any
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                failure, results[rank] = pipe.recv()
            except EOFError:
                failure = "the process died"
            assert failure is None, f"rank {rank}:\n{failure}"
    return [results[rank] for rank in range(len(pipes))]


def _rank(function: Callable[..., Any], rank: int, size: int, port: int, pipe: Any, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(environment_of(rank, size, port))
    try:
        world = join_ranks()
        result = function(world, *args)
        world.barrier()
        world.close()
        pipe.send((None, result))
    except BaseException:
        pipe.send((traceback.format_exc(), None))
