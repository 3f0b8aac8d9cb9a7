"""What a run notes about its start is read back. Anything else in its place counts as absent."""

import os
from pathlib import Path

import pytest

from utils.run.launched import Launched

START = Launched(last_step=20, ranks=2, device="cuda", host="a")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    assert Launched.read(tmp_path) is None
    START.model_copy(update={"last_step": 10}).write(tmp_path)
    START.write(tmp_path)
    assert Launched.read(tmp_path) == START
    assert [path.name for path in tmp_path.iterdir()] == ["launch.json"]


def test_other_versions_may_have_more_keys(tmp_path: Path) -> None:
    (tmp_path / "launch.json").write_text(f'{START.model_dump_json()[:-1]}, "pid": 7}}')
    assert Launched.read(tmp_path) == START


@pytest.mark.parametrize(
    "text",
    [b"[]", b'{"last_step": 3}', b"\xff", START.model_dump_json().replace("20", "9" * 400).encode()],
)
def test_strange_contents_count_as_absent(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "launch.json").write_bytes(text)
    assert Launched.read(tmp_path) is None


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "launch.json")
    assert Launched.read(tmp_path) is None
