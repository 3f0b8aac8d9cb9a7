"""Say what a measurement is of: which code, on which machine."""

import hashlib
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
# In the place of a card's name: the driver of the card did not answer.
_UNKNOWN = "unknown card"
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

        return cls(commit(), f"{'CPU' if rehearse else _card()}, torch {torch.__version__}")


def _card() -> str:
    """Return the name of the first card.

    Another process asks for it. A driver of a broken card may raise or hang, and this process must
    hold no memory of the card while the parts are measured.
    """
    said = said_by(sys.executable, "-c", "import torch; print(torch.cuda.get_device_name(0))", timeout_s=120)
    return said.splitlines()[-1] if said else _UNKNOWN


def is_other_machine(machine: str, here: str) -> bool:
    """Say whether two machines of origins differ. A card that did not tell its name may be any."""
    (card, version), (card_here, version_here) = (each.rpartition(", ")[::2] for each in (machine, here))
    return version != version_here or (_UNKNOWN not in (card, card_here) and card != card_here)


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


def said_by(*command: str, timeout_s: float = 20) -> str | None:
    """Return what a program prints; None if it is missing, fails or hangs."""
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=timeout_s)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
