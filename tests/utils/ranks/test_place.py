"""Which processes have ended, and which share a host."""

import subprocess
import sys
from dataclasses import replace

from utils.ranks.world import Place


def test_a_process_counts_as_gone_only_if_it_can_be_seen_from_here() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        place = replace(Place.here(), pid=process.pid)
    assert place.is_gone and not Place.here().is_gone and not replace(place, pid=1).is_gone
    assert not replace(place, host="another").is_gone
    assert not replace(place, pid_namespace="of a container").is_gone
