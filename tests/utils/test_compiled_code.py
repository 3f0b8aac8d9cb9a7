"""Where compiled code is kept."""

import os
from pathlib import Path

import pytest

from utils.compiled_code import keep_compiled_code


@pytest.fixture(autouse=True)
def _nothing_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)


def test_compiled_code_is_kept_in_the_user_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch executes what lies there, so nobody else may write."""
    keep_compiled_code()
    (folder,) = (tmp_path / "hrm-compiled").iterdir()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder)
    assert (folder.stat().st_mode | folder.parent.stat().st_mode) & 0o077 == 0
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "what the user says counts")
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "what the user says counts"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    for shared in (folder.parent, folder):
        shared.chmod(0o777)
        keep_compiled_code()
        assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
        shared.chmod(0o700)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    keep_compiled_code()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == f"{tmp_path}/home/.cache/hrm-compiled/{folder.name}"
