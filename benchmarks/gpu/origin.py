"""Say what a measurement is of: which code, on which machine."""

import hashlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
_SOURCES = ("benchmarks", "config", "dataset", "models", "optim", "tests/gpu", "training", "utils")


@dataclass(frozen=True)
class Origin:
    """What a part was measured of.

    Attributes:
        machine: the card and the version of PyTorch.
    """

    commit: str
    machine: str

    @classmethod
    def here(cls, *, rehearse: bool) -> "Origin":
        import torch

        card = "CPU" if rehearse else torch.cuda.get_device_name(0)
        return cls(commit(), f"{card}, torch {torch.__version__}")


def commit() -> str:
    """Return the commit of this code. A digest stands for what is not committed.

    A machine that is borrowed may have the files without their history.
    """
    said = said_by("git", "describe", "--always", "--dirty", "--abbrev=10")
    if said and not said.endswith("-dirty"):
        return said
    files = [*REPOSITORY.glob("*.py"), *(file for folder in _SOURCES for file in (REPOSITORY / folder).rglob("*"))]
    digest = hashlib.sha256()
    for file in sorted(files):
        if file.suffix in (".py", ".yaml"):
            digest.update(file.read_bytes())
    return f"{said or 'no commit known'} (sources {digest.hexdigest()[:8]})"


def said_by(*command: str) -> str | None:
    """Return what a program prints; None if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
