"""The first lines of a log: what a person needs to repeat and to debug the run."""

import platform
import subprocess
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

    host: str
    device: str  # cpu, mps, or the name of a GPU
    gpu: int | None
    threads: int


def heading(arguments: list[str], run: Path, world: World) -> list[str]:
    """Return lines about the command, the code, the ranks and the folder. Every rank.

    Args:
        arguments: the program and its overrides, as typed.

    Returns:
        No lines on ranks other than 0, which does not need them.
    """
    seats = world.gather_objects(_own_seat(world))
    if not world.is_main:
        return []
    program = "hrm-train" if PACKAGE else Path(arguments[0]).name
    lines = [
        f"command: {for_shell([program, *arguments[1:]])}",
        f"code: {_git_state()}; {_versions()}",
        f"ranks: {_ranks(world)}",
    ]
    for host in dict.fromkeys(seat.host for seat in seats):
        lines.append(f"  {host}: {_on_host([(rank, seat) for rank, seat in enumerate(seats) if seat.host == host])}")
    lines.append(f"folder: {run.absolute()}")
    return ["  " * line.startswith("  ") + for_a_terminal(line) for line in lines]


def _own_seat(world: World) -> _Seat:
    device, host, threads = world.device, world.places[world.rank].host, torch.get_num_threads()
    if device.type == "cuda":
        return _Seat(host, torch.cuda.get_device_name(device), device.index, threads)
    return _Seat(host, device.type, None, threads)


def _on_host(seats: list[tuple[int, _Seat]]) -> str:
    """Return a phrase for all ranks of a host that have the same device and number of threads."""
    phrases = []
    for (device, threads), group in groupby(seats, key=lambda entry: (entry[1].device, entry[1].threads)):
        members = list(group)
        gpus = [seat.gpu for _, seat in members if seat.gpu is not None]
        where = f"cuda:{_numbers(gpus)} ({device})" if gpus else device
        ranks = [rank for rank, _ in members]
        phrases.append(
            f"rank{'s' * (len(ranks) > 1)} {_numbers(ranks)} on {where}, {threads} thread{'s' * (threads > 1)}"
            f"{' each' * (len(ranks) > 1)}"
        )
    return "; ".join(phrases)


def _numbers(numbers: list[int]) -> str:
    """Return numbers as 0-3,6: the first and the last of each row without a gap."""
    rows: list[list[int]] = []
    for number in numbers:
        if rows and number == rows[-1][-1] + 1:
            rows[-1].append(number)
        else:
            rows.append([number])
    return ",".join(f"{row[0]}-{row[-1]}" if len(row) > 1 else str(row[0]) for row in rows)


def _ranks(world: World) -> str:
    if world.size == 1:
        return "1"
    where = meeting_point(world.launch, world.meeting)
    return f"{world.size}, as told by {world.launch.teller}, met at {where}, connected by {world.backend}"


def _versions() -> str:
    cuda = f" with CUDA {torch.version.cuda}" if torch.version.cuda else ""
    return f"Python {platform.python_version()}, torch {torch.__version__}{cuda}, {platform.system()}"


def _git_state() -> str:
    """Return the commit of this code, and how many of its files differ from it or are new."""
    if PACKAGE:
        return f"{PACKAGE} {VERSION}"
    try:
        if Path(_git("rev-parse", "--show-toplevel")).resolve() != ROOT:
            return _noted_commit()
        commit = _git("log", "-1", "--format=%h of %cs")
        num_changed = len(_git("status", "--porcelain", "--untracked-files=no").splitlines())
        # Only code of the repository's own folders counts. Untracked data and results are no code.
        within = ["", *(f"{folder}/**/" for folder in _git("ls-tree", "-d", "--name-only", "HEAD").splitlines())]
        code = [f":(glob){folder}*.{end}" for folder in within for end in ("py", "yaml")]
        num_new = len(_git("ls-files", "--others", "--exclude-standard", "--", *code).splitlines())
    except (OSError, subprocess.SubprocessError):
        return _noted_commit()
    changed = f", {num_changed} file{'s' * (num_changed > 1)} changed" if num_changed else ""
    new = f", {num_new} new{'' if num_changed else ' file' + 's' * (num_new > 1)}" if num_new else ""
    return f"commit {commit}{changed}{new}"


def _noted_commit() -> str:
    """Return the commit that the build of an image has written into the file COMMIT."""
    file = ROOT / "COMMIT"
    noted = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    return f"commit {noted}" if noted else "not under git"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), "--no-optional-locks", *arguments]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=True, timeout=_GIT_TIMEOUT_S)
    return done.stdout.strip()
