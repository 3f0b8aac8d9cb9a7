"""Every program refuses an impossible file name with one line and status 2."""

import argparse
from collections.abc import Callable
from pathlib import Path

import pytest

import dataset.build_arc_dataset
import dataset.build_lights_out_dataset
import dataset.build_maze_dataset
import dataset.build_sudoku_dataset
import dataset.show
import dataset.validate
import models.export
import view
from utils.arguments import typed_path
from utils.shell import run_command

TOO_LONG = "a" * 300
COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "view": (lambda argv: run_command(view.view, argv), TOO_LONG),
    "validate": (dataset.validate.main, TOO_LONG),
    "show": (dataset.show.main, TOO_LONG),
    "export": (models.export.main, f"{TOO_LONG} --format hrm -o out"),
    "build sudoku": (dataset.build_sudoku_dataset.main, f"--output-dir {TOO_LONG} --generate 1"),
    "build sudoku from": (dataset.build_sudoku_dataset.main, f"--output-dir out --source-dir {TOO_LONG}"),
    "build maze": (dataset.build_maze_dataset.main, f"--output-dir {TOO_LONG} --generate 1"),
    "build lights out": (dataset.build_lights_out_dataset.main, f"--output-dir {TOO_LONG}"),
    "build arc": (dataset.build_arc_dataset.main, f"--output-dir {TOO_LONG}"),
    "build arc from": (dataset.build_arc_dataset.main, f"--output-dir out --dataset-dirs {TOO_LONG}"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_name_that_is_too_long_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command, arguments = COMMANDS[name]
    assert command(arguments.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    assert TOO_LONG in err and "too long" in err, err
    assert not list(tmp_path.iterdir()), "the refused program left a file behind"


def test_every_possible_path_is_accepted(tmp_path: Path) -> None:
    """The program itself checks later whether the path exists."""
    for path in (tmp_path, tmp_path / "missing", Path("relative")):
        assert typed_path(str(path)) == path
    with pytest.raises(argparse.ArgumentTypeError, match="too long"):
        typed_path(TOO_LONG)
