"""Follow docs/extending.md literally, in a copy of the repository: its code, then its commands.

Processes are forked from one that has imported PyTorch, and import the project from the copy.
"""

import os
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests import runs
from tests.runs import REPOSITORY

# Another test follows the section on a task.
PAGE = re.sub(r"^## A task\n.*?(?=^## )", "", (REPOSITORY / "docs" / "extending.md").read_text(), flags=re.S | re.M)
FOLDERS = ("config", "dataset", "models", "optim", "search", "tests", "training", "utils", "viewer")


def _changes() -> list[tuple[str, str, str]]:
    """Return the file, the language and the code of each block that has a file above it."""
    return re.findall(r"^`([\w/.]+)`:\n\n```(\w+)\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


def _commands() -> list[tuple[str, list[str]]]:
    """Return each command, and the lines that the page says it prints.

    What is printed stands in a block below those commands of which the last one prints it.
    """
    found: list[tuple[str, list[str]]] = []
    for typed, printed in re.findall(r"^```bash\n(.*?)^```\n(?:\n```\n(.*?)^```)?", PAGE, re.DOTALL | re.MULTILINE):
        found += [(line, []) for line in typed.replace("\\\n", " ").splitlines()]
        found[-1][1].extend(printed.splitlines())
    return found


def _apply(folder: Path, file: str, language: str, code: str) -> None:
    path = folder / file
    if language != "diff":
        assert not path.exists(), f"the page writes {file} as a new file, but it exists"
        path.write_text(code)
        return
    before, after = ("".join(line[1:] for line in code.splitlines(True) if line[0] in kept) for kept in (" -", " +"))
    text = path.read_text()
    assert text.count(before) == 1, f"{file} no longer has these lines, which the page changes:\n{before}"
    path.write_text(text.replace(before, after))


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the repository with the changes of the page."""
    folder = tmp_path_factory.mktemp("extending") / "clone"
    folder.mkdir()
    for path in [*REPOSITORY.glob("*.py"), REPOSITORY / "pyproject.toml"]:
        shutil.copy(path, folder)
    for name in FOLDERS:
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    for file, language, code in _changes():
        _apply(folder, file, language, code)
    return folder


def _become(words: list[str], folder: str, output: str) -> None:
    """Run a command of the page. Nothing of the project is imported from anywhere but the copy."""
    runs._redirect(output, output)
    torch.set_num_threads(1)
    os.chdir(folder)
    own = {path.stem for path in Path(folder).iterdir()}
    for name in [name for name in sys.modules if name.split(".")[0] in own]:
        del sys.modules[name]
    sys.path[:] = [folder, *(path for path in sys.path if Path(path).resolve() != REPOSITORY)]
    program, *arguments = words
    if program == "-m":
        assert arguments[0] == "pytest", words
        sys.exit(pytest.main(["-p", "no:cacheprovider", *arguments[1:]]))
    sys.argv = words
    runpy.run_path(program, run_name="__main__")


def test_the_walks(clone: Path, tmp_path: Path) -> None:
    """The walks follow one another, so that each command sees all of the page's changes."""
    commands = _commands()
    assert len(commands) > 5
    for number, (command, printed) in enumerate(commands):
        python, *words = shlex.split(command)
        assert python == "python", command
        log = tmp_path / str(number)
        process = runs.fork(_become, words, str(clone), str(log))
        process.join(180)
        output = log.read_text()
        assert process.exitcode == 0, f"{command}\n{output}"
        if "pytest" in command:
            passed = re.search(r"^(\d+) passed", output, re.MULTILINE)
            assert passed and int(passed[1]) >= 5, f"{command}: the tables of the tests lack the new entry\n{output}"
        for line in printed:
            pattern = ".*".join(map(re.escape, line.split("...")))
            assert re.search(pattern, output), f"{command}\ndoes not print\n{line}\nbut\n{output}"


def test_every_block_is_followed() -> None:
    """Each block is a change of a file, a command, or what a command prints."""
    languages = re.findall(r"^```(\w*)\n.*?^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    printed = sum(1 for _, lines in _commands() if lines)
    assert len(languages) == len(_changes()) + languages.count("bash") + printed
