"""A run that the tests of checkpoints share."""

from pathlib import Path

import pytest

from tests.records.checkpoint.helpers import save_step
from utils.ranks.world import World


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run with steps 2, 4 and 6."""
    for step in (2, 4, 6):
        save_step(tmp_path / "run", step, World.single())
    return tmp_path / "run"
