"""Run the builder and the commands of docs/datasets.md as written, from a task to a trained model.

They run in a folder that looks like a clone. The test appends options that make them small.
"""

import re
from pathlib import Path

import numpy as np
import pytest

from dataset import validate
from dataset.schema import open_split
from tests import runs
from tests.dataset.builders import write_small_arc_tasks
from tests.pages import blocks, commands
from tests.runs import REPOSITORY

pytestmark = pytest.mark.docs

PAGE = (REPOSITORY / "docs" / "datasets.md").read_text()
SMALL = {
    "build_sudoku_dataset": "--generate 20 --generate-test 5",
    "build_lights_out_dataset": "--generate 20 --generate-test 5",
    "build_maze_dataset": "--generate 10 --size 8",
    "build_arc_dataset": "--num-aug 2",
    "pretrain.py": "device=cpu max_steps=3 eval_every_n_steps=3",
    "evaluate.py": "device=cpu",
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder like a clone, with the page's builder and three small ARC tasks."""
    folder = tmp_path_factory.mktemp("docs")
    for path in REPOSITORY.iterdir():
        if path.name not in ("data", "checkpoints", "dataset", ".venv", ".git"):
            (folder / path.name).symlink_to(path)
    (folder / "dataset").mkdir()
    packages = [REPOSITORY / "dataset" / name for name in ("tasks", "text")]
    for path in [*(REPOSITORY / "dataset").glob("*.py"), *packages]:
        (folder / "dataset" / path.name).symlink_to(path)
    (builder,) = blocks(REPOSITORY / "docs/datasets.md", "python")
    file = re.search(r"Save this as `(.*?)`", PAGE)
    assert file is not None
    (folder / file.group(1)).write_text(builder)

    write_small_arc_tasks(folder / "kaggle" / "combined")
    return folder


@pytest.mark.parametrize("command", commands("docs/datasets.md"))
def test_command(clone: Path, command: str) -> None:
    small = [options for program, options in SMALL.items() if program in command]
    done = runs.command(" ".join([command, *small]), clone)
    assert done.status == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    if "dataset.validate" in command:
        assert done.stdout.splitlines()[-1] == "ok: 0 errors, 0 warnings"
    if "pretrain.py" in command:
        assert "steps of" in done.stderr, "pretrain.py did not train"
    if "evaluate.py" in command:
        assert re.fullmatch(r"exact_accuracy=[01]\.\d{4}", done.stdout.splitlines()[-1]), done.stdout


def test_what_was_built(clone: Path) -> None:
    """The page's puzzles are Latin squares, and every dataset passes the check."""
    for path in sorted((clone / "data").iterdir()):
        assert validate.main([str(path), "--allow-leak"]) == 0, path.name
    latin = open_split(clone / "data" / "latin-5x5", "train").sets["all"]
    squares = latin.labels.reshape(-1, 5, 5)
    for axis in (1, 2):
        assert (np.sort(squares, axis=axis) == np.arange(2, 7).reshape((5, 1) if axis == 1 else (1, 5))).all()
    assert ((latin.inputs == 1) | (latin.inputs == latin.labels)).all() and (latin.inputs == 1).any(axis=1).all()
