"""The command lines and the environment of the ranks of a run on Ray.

Ray's workers import this module, so it imports neither PyTorch nor Ray.
"""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from records.folder import LAUNCH_FILE
from utils.overrides import as_override


@dataclass(frozen=True)
class RayJob:
    overrides: tuple[str, ...]  # as typed, without those of Ray
    run: str  # the folder, chosen before the first attempt, so that each later attempt finds it
    resume: str | None  # the path that was typed after resume=; None for none and for resume=auto
    cwd: str  # the working directory of the ranks, to which all paths refer

    def arguments(self, *, has_begun: bool, has_checkpoints: bool) -> list[str]:
        """Return the arguments of pretrain.py in an attempt.

        Args:
            has_begun: whether an earlier attempt has begun to train. Otherwise the folder may hold
                another run, which pretrain.py refuses.
            has_checkpoints: whether the folder holds checkpoints. Without one, a run that was to go
                on from another run's step goes on from there again.
        """
        words = [*self.overrides]
        if not any(word.lstrip("+").startswith("checkpoint_path=") for word in words):
            words.append(f"checkpoint_path={as_override(self.run)}")
        if has_begun and (self.resume is None or has_checkpoints):
            words.append("resume=auto")
        return words

    def beginning(self) -> tuple[int, int] | None:
        """Return what changes when an attempt begins to train and writes launch.json anew."""
        with suppress(FileNotFoundError):
            found = os.stat(Path(self.cwd) / self.run / LAUNCH_FILE)
            return found.st_ino, found.st_mtime_ns
        return None


def rank_environment(
    *, rank: int, size: int, local_rank: int, local_size: int, meeting: tuple[str, int], has_device: bool
) -> dict[str, str]:
    """Return the variables by which pretrain.py finds its rank, named as torchrun names them.

    Args:
        has_device: whether Ray gave the worker a CUDA device, which then is its number 0.
    """
    host, port = meeting
    values: dict[str, int | str] = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": 0 if has_device else local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    if not has_device:
        values["CUDA_VISIBLE_DEVICES"] = ""  # device=auto would take a GPU that others have reserved
    return {name: str(value) for name, value in values.items()}


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])
