"""Follow docs/extending.md literally, in a copy of the repository, from the top to the bottom.

Each block is applied or run where it stands, so that a block may rest only on those above it.
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

PAGE = (REPOSITORY / "docs" / "extending.md").read_text()
# A block of code with its language, and the file that the line above it names.
BLOCK = re.compile(r"(?:^`([\w/.]+)`:\n\n)?^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
ROOMS = ("config", "dataset", "models", "optim", "records", "search", "tests", "training", "sharing", "utils", "viewer")
# The test trains and evaluates less than the page.
SHORTER = {
    "max_steps=400": "max_steps=3 eval_every_n_steps=3",
    "tta=8": "tta=8 max_examples=4",
    "--png": "--png --max-examples 4",
}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    folder.mkdir()
    for path in [*REPOSITORY.glob("*.py"), REPOSITORY / "pyproject.toml"]:
        shutil.copy(path, folder)
    for name in ROOMS:
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
    (builder,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "docs" / "datasets.md").read_text(), re.DOTALL)
    (folder / "dataset" / "build_latin_dataset.py").write_text(builder)
    return folder


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


def _become(words: list[str], folder: str, output: str) -> None:
    """Run a command of the page. Nothing of the project is imported from anywhere but the copy."""
    runs._redirect(output, output)
    torch.set_num_threads(1)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.chdir(folder)
    own = {path.stem for path in Path(folder).iterdir()}
    for name in [name for name in sys.modules if name.split(".")[0] in own]:
        del sys.modules[name]
    sys.path[:] = [folder, *(path for path in sys.path if Path(path).resolve() != REPOSITORY)]
    program, *arguments = words
    if program != "-m":
        sys.argv = words
        runpy.run_path(program, run_name="__main__")
    elif arguments[0] == "pytest":
        sys.exit(pytest.main(["-p", "no:cacheprovider", *arguments[1:]]))
    else:
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__")


def _run(folder: Path, command: str, log: Path) -> str:
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    python, *words = shlex.split(command)
    assert python == "python", command
    process = runs.fork(_become, words, str(folder), str(log))
    process.join(180)
    output = log.read_text()
    # After three steps of training, no board is solved.
    assert process.exitcode == (words[0] == "solve.py"), f"{command}\n{output}"
    if "pytest" in command:
        passed = re.search(r"^(\d+) passed", output, re.MULTILINE)
        assert passed and int(passed[1]) >= 5, f"{command}: the tables of the tests lack the new entry\n{output}"
    return output


@pytest.mark.slow
@pytest.mark.launch
def test_the_walks(clone: Path, tmp_path: Path) -> None:
    assert len(BLOCK.findall(PAGE)) * 2 == len(re.findall("^ *```", PAGE, re.MULTILINE)), "a block is not followed"
    assert all(long in PAGE for long in SHORTER), "change SHORTER"
    output = ""
    for number, (file, language, code) in enumerate(BLOCK.findall(PAGE)):
        if file:
            _apply(clone, file, language, code)
        elif language == "bash":
            for command in code.replace("\\\n", " ").splitlines():
                output = _run(clone, command, tmp_path / f"{number}-{len(command)}")
        else:
            assert output and not language, f"no file stands above this block:\n{code}"
            for line in code.splitlines():
                pattern = ".*".join(map(re.escape, line.split("...")))
                assert re.search(pattern, output), f"a command does not print\n{line}\nbut\n{output}"
    assert (clone / "checkpoints/latin/task/puzzle.png").is_file()
