"""The command lines and the environment of the ranks of a run on Ray.

Ray's workers import this module, so it imports neither PyTorch nor Ray.
"""

import re
import socket
from dataclasses import dataclass

from utils.config_files import quoted


@dataclass(frozen=True)
class RayJob:
    """A run of pretrain.py on workers of Ray.

    Attributes:
        overrides: as typed, without those of Ray.
        run: the folder of the run, which is chosen before its first attempt. So each later attempt
            finds it, and the first rank can follow its metrics.
        resume: the path that was typed after resume=; None for none and for resume=auto.
        cwd: the working directory of the ranks, to which all paths refer.
    """

    overrides: tuple[str, ...]
    run: str
    resume: str | None
    cwd: str

    def arguments(self, attempt: int, *, has_checkpoints: bool) -> list[str]:
        """Return the arguments of pretrain.py in an attempt, of which 1 is the first.

        Args:
            has_checkpoints: whether the run has checkpoints of its own. Without one, a run that was
                to go on from another run's step goes on from there again.
        """
        words = [*self.overrides]
        if not any(word.lstrip("+").startswith("checkpoint_path=") for word in words):
            is_plain = re.fullmatch(r"[\w./-]+", self.run)
            words.append(f"checkpoint_path={self.run if is_plain else quoted(self.run)}")
        if attempt > 1 and (self.resume is None or has_checkpoints):
            words.append("resume=auto")
        return words


def rank_environment(
    *, rank: int, size: int, local_rank: int, local_size: int, meeting: tuple[str, int], has_device: bool
) -> dict[str, str]:
    """Return the variables by which pretrain.py finds its rank, named as torchrun names them.

    Args:
        meeting: host and port of rank 0, where the ranks meet.
        has_device: whether the worker has a CUDA device. Ray hides all others from it, so that its
            own one is number 0.
    """
    host, port = meeting
    values = {
        "RANK": rank,
        "WORLD_SIZE": size,
        "LOCAL_RANK": 0 if has_device else local_rank,
        "LOCAL_WORLD_SIZE": local_size,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
    }
    return {name: str(value) for name, value in values.items()}


def free_port() -> int:
    """Return a port of this host that is free now."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        return int(taken.getsockname()[1])
