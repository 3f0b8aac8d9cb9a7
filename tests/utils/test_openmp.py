"""OpenMP's threads sleep instead of waiting busily, unless the user says how they wait."""

import os
import runpy

import pytest


@pytest.mark.parametrize("name", [None, "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_what_the_user_says_counts(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for each in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(each, raising=False)
    if name is not None:
        monkeypatch.setenv(name, "active")
    before = dict(os.environ)
    runpy.run_module("utils.openmp")
    assert dict(os.environ) == (before if name else before | {"GOMP_SPINCOUNT": "3000"})
    os.environ.pop("GOMP_SPINCOUNT", None)
