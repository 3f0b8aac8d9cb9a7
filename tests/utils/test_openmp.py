"""OpenMP's threads sleep instead of waiting busily, unless the user says how they wait."""

import os
import runpy
import subprocess
import sys

import pytest
import torch

from tests.runs import REPOSITORY


@pytest.mark.skipif("OpenMP" not in torch.__config__.parallel_info(), reason="this torch has no OpenMP")
@pytest.mark.skipif(sys.platform != "linux", reason="other systems have another OpenMP")
def test_openmp_reads_the_number_of_rounds() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_WAIT", "GOMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", "import utils.openmp, torch"],
        cwd=REPOSITORY,
        env=environment | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert "GOMP_SPINCOUNT = '3000'" in done.stderr, done.stderr


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_what_the_user_says_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.setenv(name, "active")
    before = dict(os.environ)
    runpy.run_module("utils.openmp")
    assert dict(os.environ) == before
