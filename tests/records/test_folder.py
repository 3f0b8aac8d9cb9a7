"""What a run notes about its start is read back. Anything else in its place counts as absent."""

import os
from pathlib import Path

from records.folder import Launched

START = Launched(last_step=20, ranks=2, device="cuda", host="a")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Other versions may have more keys."""
    assert Launched.read(tmp_path) is None
    START.model_copy(update={"last_step": 10}).write(tmp_path)
    START.write(tmp_path)
    assert Launched.read(tmp_path) == START
    assert [path.name for path in tmp_path.iterdir()] == ["launch.json"]
    (tmp_path / "launch.json").write_text(f'{START.model_dump_json()[:-1]}, "pid": 7}}')
    assert Launched.read(tmp_path) == START


def test_strange_contents_count_as_absent(tmp_path: Path) -> None:
    file = tmp_path / "launch.json"
    for text in (b"[]", b'{"last_step": 3}', b"\xff", START.model_dump_json().replace("20", "9" * 400).encode()):
        file.write_bytes(text)
        assert Launched.read(tmp_path) is None
    file.unlink()
    os.mkfifo(file)
    assert Launched.read(tmp_path) is None, "a pipe is not waited for"
