"""Read and prepare the start of a run, as rank 0 does."""

import pytest

from records.lock import RunLock
from training.resume import Start, prepare, read_start
from utils.ranks.launch import Launch


def read(*overrides: str) -> Start:
    return read_start(list(overrides), RunLock(), Launch.from_environment())


def prepare_run(start: Start) -> None:
    prepare(start, RunLock(), Launch.from_environment())


def set_attempt(monkeypatch: pytest.MonkeyPatch, run_id: str, restarts: int) -> None:
    variables = {"RANK": 0, "WORLD_SIZE": 1, "TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": restarts}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
