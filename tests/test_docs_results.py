"""The commands of docs/results.md have keys and recipes that exist. They are not run."""

import importlib
import re
import shlex
import subprocess
from collections.abc import Callable

import pytest

import solve
from evaluate import EvaluateConfig
from search.sweep import Sweep
from tests.runs import REPOSITORY
from training.config import PretrainConfig
from utils.command_line import read_config, validate

pytestmark = pytest.mark.docs

PAGE = REPOSITORY / "docs/results.md"
# Programs print their words and do not run, so that bash expands loops, functions and variables.
_PRINT = """
shown() { printf '%s\\0' "$@" "END"; }
python() { shown python "$@"; }; torchrun() { shown torchrun "$@"; }
git() { :; }; tr() { :; }; awk() { :; }; mkdir() { :; }
"""


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """Return the words of each command of the page, each once but for its seed and names."""
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    lines = [re.sub(r"^\$ ", "", line) for block in blocks for line in block.splitlines()]
    script = _PRINT + "\n".join(lines).replace("<run>", "run")
    folder = tmp_path_factory.mktemp("page")
    (folder / "csv").mkdir()
    (folder / "EasyReasoning/data/sudoku").mkdir(parents=True)
    for name in ("train", "test_hard"):
        (folder / f"EasyReasoning/data/sudoku/{name}.csv").touch()
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.stderr == "", f"bash can't read the commands: {done.stderr}"
    found = [words.split("\0")[:-1] for words in done.stdout.split("END\0")[:-1]]
    named = re.compile(r"seed=|run_name=|checkpoint=|data_path=|init_from=|out=")
    return list({tuple(word for word in words if not named.match(word)): words for words in found}.values())


READ: dict[str, Callable[[list[str]], object]] = {
    "pretrain.py": lambda words: validate(PretrainConfig, read_config("pretrain", words)),
    "evaluate.py": lambda words: validate(EvaluateConfig, read_config("evaluate", words)),
    "solve.py": solve.read_command_line,
    "sweep.py": Sweep.read,
}


def test_every_command_is_understood(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(REPOSITORY)
    for launcher, *words in commands:
        if launcher == "torchrun":
            words = words[words.index("evaluate.py") :]
        program, *arguments = words
        if program == "-c":
            compile(arguments[0], "-c", "exec")
            continue
        read = READ.get(program)
        if read is None:
            read = importlib.import_module(program.removesuffix(".py").replace("/", ".")).parse_settings
        try:
            read(arguments)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{shlex.join(words)}\n{error}")


def test_every_program_has_commands_on_the_page(commands: list[list[str]]) -> None:
    """Otherwise this file would read nothing and pass."""
    programs = [word for words in commands for word in words if word.endswith(".py")]
    assert len(programs) > 50 and set(READ) <= set(programs)
