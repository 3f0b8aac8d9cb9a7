"""What the launcher reveals about an attempt, and which processes have ended."""

import subprocess
import sys
from dataclasses import replace

import pytest

from utils.dist.launch import Launch, Place


def test_launch_is_the_same_for_all_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert Launch.from_environment() == Launch(restarts=0, identity=None)
    for run_id in ("job-7", "none"):  # torchrun sets "none" if it has no rendezvous id
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
        identities = []
        for restarts in range(2):
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
            assert Launch.from_environment().restarts == restarts
            identities.append(Launch.from_environment().identity)
        assert identities[0] == identities[1] not in (None, "", "none")


def test_a_process_counts_as_gone_only_if_it_can_be_seen_from_here() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        place = replace(Place.here(), pid=process.pid)
    assert place.is_gone and not Place.here().is_gone and not replace(place, pid=1).is_gone
    assert not replace(place, host="another").is_gone
    assert not replace(place, pid_namespace="of a container").is_gone
