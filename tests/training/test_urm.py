"""URM runs as published."""

from pathlib import Path

import pytest

from tests import runs
from tests.in_process import train_here

SMALL = {"arch": "urm", "arch.num_layers": 1, "arch.H_cycles": 2, "arch.L_cycles": 2, "lr_warmup_steps": 3}
SHORT = {"max_steps": 4, "checkpoint_every_n_steps": 2, "eval_every_n_steps": None, "log_interval": 1}


def _settings(data: Path, run: Path, **changes: object) -> list[str]:
    values = {"data_path": data, "device": "cpu", "checkpoint_path": run, **SMALL, **SHORT, **changes}
    return ["debug=tiny", *(f"{key}={'null' if value is None else value}" for key, value in values.items())]


def test_a_published_schedule_begins_with_a_rate_of_0(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_here(_settings(data, run, lr=3e-3, lr_scaling="none"))
    rates = [row["train/lr"] for row in runs.rows(run) if "train/lr" in row]
    assert rates == pytest.approx([0.0, 1e-3, 2e-3, 3e-3])
