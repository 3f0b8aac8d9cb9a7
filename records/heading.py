"""The first lines of a log: what a person needs to repeat and to debug the run."""

import platform
import re
import subprocess
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import torch

from utils.programs import PACKAGE, ROOT, VERSION
from utils.ranks.rendezvous import meeting_point
from utils.ranks.world import World
from utils.text import for_a_terminal, for_shell

_GIT_TIMEOUT_S = 10


class _Seat(NamedTuple):
    """Where a rank computes."""

    rank: int
    host: str
    device: str  # cpu, mps, or the name of a GPU
    gpu: int | None
    threads: int


def heading(arguments: list[str], run: Path, world: World) -> list[str]:
    """Return lines about the command, the code, the ranks and the folder, on rank 0. Every rank.

    Args:
        arguments: the program and its overrides, as typed.
    """
    device = world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    host = world.places[world.rank].host
    seats = world.gather_objects(_Seat(world.rank, host, name, device.index, torch.get_num_threads()))
    if not world.is_main:
        return []
    ranks = str(world.size)
    if world.size > 1:
        where = meeting_point(world.launch, world.meeting)
        ranks += f", as told by {world.launch.teller}, met at {where}, connected by {world.backend}"
    cuda = f" with CUDA {torch.version.cuda}" if torch.version.cuda else ""
    versions = f"Python {platform.python_version()}, torch {torch.__version__}{cuda}, {platform.system()}"
    program = "hrm-train" if PACKAGE else Path(arguments[0]).name
    # The address of a web hook may be a secret, and W&B keeps what a run prints.
    typed = [re.sub(r"^(\+*on_event=).+", r"\1...", each, flags=re.DOTALL) for each in arguments[1:]]
    lines = [
        f"command: {for_shell([program, *typed])}",
        f"code: {_git_state()}; {versions}",
        f"ranks: {ranks}",
    ]
    for host in dict.fromkeys(seat.host for seat in seats):
        lines.append(f"  {host}: {_on_host([seat for seat in seats if seat.host == host])}")
    lines.append(f"folder: {run.absolute()}")
    return ["  " * line.startswith("  ") + for_a_terminal(line) for line in lines]


def _on_host(seats: list[_Seat]) -> str:
    """Return a phrase for all ranks of a host that have the same device and number of threads."""
    phrases = []
    for (device, threads), group in groupby(seats, key=lambda seat: (seat.device, seat.threads)):
        ranks, gpus = zip(*((seat.rank, seat.gpu) for seat in group), strict=True)
        where = device if gpus[0] is None else f"cuda:{_numbers(gpus)} ({device})"
        plural, each = ("s", " each") if len(ranks) > 1 else ("", "")
        phrases.append(f"rank{plural} {_numbers(ranks)} on {where}, {threads} thread{'s' * (threads > 1)}{each}")
    return "; ".join(phrases)


def _numbers(numbers: tuple[int, ...]) -> str:
    """Return numbers as 0-3, or as 0,2,5 if there are gaps."""
    first, last = numbers[0], numbers[-1]
    return f"{first}-{last}" if last - first == len(numbers) - 1 > 0 else ",".join(map(str, numbers))


def _git_state() -> str:
    """Return the commit of this code, and how many of its files differ from it or are new."""
    if PACKAGE:
        return f"{PACKAGE} {VERSION}"

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), "--no-optional-locks", *words]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=_GIT_TIMEOUT_S)
        return done.stdout.rstrip()

    with suppress(OSError, subprocess.SubprocessError):
        if Path(git("rev-parse", "--show-toplevel")).resolve() == ROOT:
            lines = git("status", "--porcelain", "--untracked-files=normal").splitlines()
            num_changed = sum(not line.startswith("??") for line in lines)
            # Untracked folders, such as those of data and results, are no code.
            num_new = sum(line.startswith("??") and line.endswith((".py", ".yaml")) for line in lines)
            parts = [f"commit {git('log', '-1', '--format=%h of %cs')}"]
            if num_changed:
                parts.append(f"{num_changed} changed")
            if num_new:
                parts.append(f"{num_new} new")
            return ", ".join(parts)
    # The build of an image has written its commit into a file.
    file = ROOT / "COMMIT"
    noted = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    return f"commit {noted}" if noted else "not under git"
