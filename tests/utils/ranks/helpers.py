"""Options of the process group, and a look at the cards that threads use, for tests."""

import threading

import pytest
import torch

from utils.ranks.config import DEFAULT_MEETING, DistConfig


def dist_config(**changes: object) -> DistConfig:
    values = {"backend": "auto", "timeout_s": 30.0, "num_threads": None, "rank_weights": []}
    return DistConfig.model_validate(DEFAULT_MEETING.model_dump() | values | changes)


def devices_of_threads(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.device]:
    """Return a dict that gets the CUDA device that each thread chooses, by the thread's name."""
    chosen: dict[str, torch.device] = {}

    def choose(device: torch.device) -> None:
        chosen[threading.current_thread().name] = device

    monkeypatch.setattr(torch.cuda, "set_device", choose)
    return chosen
