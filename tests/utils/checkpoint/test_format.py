"""The names and numbers of a checkpoint on disk."""

from pathlib import Path

from utils.checkpoint.format import step_folders


def test_steps_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    for name in ("step_100000000", "step_00000009", "step_99999999", "step_1", ".incomplete_step_00000001", "best"):
        (tmp_path / name).mkdir()
    assert [path.name for path in step_folders(tmp_path)] == ["step_00000009", "step_99999999", "step_100000000"]
    assert step_folders(tmp_path / "nowhere") == []
