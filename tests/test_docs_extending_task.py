"""Follow the section "A task" of docs/extending.md literally, in a folder like a clone."""

import re
import shutil
from pathlib import Path

import pytest

from tests import runs
from tests.runs import REPOSITORY

PAGE = (REPOSITORY / "docs" / "extending.md").read_text()
SECTION = re.split(r"^## ", PAGE.split("\n## A task\n")[1], flags=re.MULTILINE)[0]
SMALL = {
    "pretrain.py": "device=cpu max_steps=3 eval_every_n_steps=3",
    "evaluate.py": "device=cpu max_examples=4",
    "view.py": "--max-examples 4",
    "solve.py": "device=cpu",
}


def _blocks(language: str, text: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


def _commands() -> list[str]:
    return re.sub(r"\\\n\s*", "", "".join(_blocks("bash", SECTION))).splitlines()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder after the first two steps of the walk, with the builder of datasets.md."""
    folder = tmp_path_factory.mktemp("extending")
    for path in REPOSITORY.iterdir():
        if path.name not in ("data", "checkpoints", ".venv", ".git", "tests") and not path.name.startswith("."):
            if path.is_dir():
                shutil.copytree(path, folder / path.name)
            else:
                shutil.copy(path, folder)
    (builder,) = _blocks("python", (REPOSITORY / "docs" / "datasets.md").read_text())
    (folder / "dataset" / "build_latin_dataset.py").write_text(builder)
    (task,) = _blocks("python", SECTION)
    (folder / "dataset" / "tasks" / "latin.py").write_text(task)
    table = folder / "dataset" / "tasks" / "__init__.py"
    text = table.read_text().replace(
        "from dataset.tasks.maze", "from dataset.tasks.latin import LatinTask\nfrom dataset.tasks.maze", 1
    )
    text = re.sub(r"(TASKS: .*?)\n\)", r"\1\n    LatinTask,\n)", text, count=1, flags=re.DOTALL)
    table.write_text(text)
    return folder


@pytest.mark.parametrize("command", _commands())
def test_command(clone: Path, command: str) -> None:
    small = [options for program, options in SMALL.items() if program in command]
    done = runs.command(" ".join([command, *small]), clone, sources_of_cwd=True)
    # After three steps of training, the square is not solved.
    assert done.status == ("solve.py" in command), f"{command}\n{done.stdout}\n{done.stderr}"
    if "show.py" in command:
        assert "latin square 5x5" in done.stdout and "12345" not in done.stdout
    if "pretrain.py" in command:
        assert "symmetries of Latin squares 5x5" in done.stderr
    if "evaluate.py" in command:
        assert "eval/all/latin_squares" in done.stdout and "eval/all/tta/latin_squares" in done.stdout
    if "view.py" in command:
        assert "Latin square 5x5" not in done.stderr and (clone / "checkpoints/latin/task/puzzle.png").is_file()
        assert "4 examples" in done.stdout, "view.py has not saved the missing answers"
    if "solve.py" in command:
        assert "not solved: a" in done.stdout
