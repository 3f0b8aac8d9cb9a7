"""The commands that people copy: from pages, from the usage of programs, and from heads of YAML."""

import ast
import re
import subprocess
from pathlib import Path

from tests.runs import REPOSITORY

# docs/lab/log.md is a notebook: its commands are those of the day.
PAGES = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "examples").rglob("*.md")]
_HEADS = [*(REPOSITORY / "config").rglob("*.yaml")]
_PROGRAMS = [
    *REPOSITORY.glob("*.py"),
    *(path for room in ("dataset", "launch", "models", "search") for path in (REPOSITORY / room).glob("*.py")),
]
_COMMAND = re.compile(r"  +(\w+=\S+ )*(python|torchrun) \S")
# A PATH that leads nowhere leaves every program to this function, which notes the words.
_NOTE = 'PATH=/nowhere; command_not_found_handle() { printf "%s\\0" "$@" END >&3; }; exec 3>words\n'


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(*pages: str) -> list[str]:
    """Return every line of every bash block once. Join continued lines and drop comments."""
    text = "".join(block for page in pages for block in blocks(REPOSITORY / page, "bash"))
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return list(dict.fromkeys(line for line in (re.sub(r"\s+#.*", "", line).strip() for line in lines) if line))


def scripts() -> dict[str, str]:
    """Return what a shell would get from each file, by the file's path."""
    found = {path: _of_page(path) for path in PAGES if path.name != "log.md"}
    found |= {path: "".join(re.findall(r"^#   ( *\S.*\n)", path.read_text(), re.MULTILINE)) for path in _HEADS}
    found |= {path: _of_usage(path) for path in _PROGRAMS}
    return {str(path.relative_to(REPOSITORY)): text for path, text in found.items() if text}


def _of_page(path: Path) -> str:
    """Return the bash blocks, and from the console blocks each command from its $ to its end.

    Commands inside a sentence may be parts of one: bash reads them, and runs nothing.
    """
    lines = blocks(path, "bash")
    inside = re.findall(r"`((?:python|torchrun) [^`]+)`", path.read_text())
    lines += [f": {' '.join(typed.split())}\n" for typed in inside]
    for block in blocks(path, "console"):
        for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            typed = command.splitlines(keepends=True)
            num_lines = next(n for n in range(1, len(typed) + 1) if n == len(typed) or _is_whole("".join(typed[:n])))
            lines.append("".join(typed[:num_lines]))
    return "".join(lines)


def _is_whole(command: str) -> bool:
    checked = subprocess.run(["bash", "-n", "-c", command], capture_output=True)
    return checked.returncode == 0 and not command.endswith("\\\n")


def _of_usage(path: Path) -> str:
    """Return the indented commands of all texts, without [OPTIONS] and what explains them."""
    texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    lines = re.sub(r"\\\n\s*", "", "\n".join(text for text in texts if isinstance(text, str))).splitlines()
    found = (re.split(r"(?<=\S)  +| \[", line.strip())[0] for line in lines if _COMMAND.match(line))
    return "".join(f"{command}\n" for command in found)


def words_of(script: str, folder: Path) -> list[list[str]]:
    """Return the words of each command of a script, after bash has expanded loops and variables.

    Nothing is run. A name in angle brackets is filled in, and a word of three dots is left out.

    Raises:
        AssertionError: bash can't read the script.
    """
    script = re.sub(r"<[a-z][^<>\n]*>", "it", script)
    (folder / "csv").mkdir(parents=True, exist_ok=True)  # files for the redirections of docs/results.md
    (folder / "EasyReasoning/data/sudoku").mkdir(parents=True, exist_ok=True)
    for name in ("train", "test_hard"):
        (folder / f"EasyReasoning/data/sudoku/{name}.csv").touch()
    done = subprocess.run(["/bin/bash", "-c", _NOTE + script], cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.stderr == "", f"bash can't read the commands: {done.stderr}"
    found = [command.split("\0") for command in (folder / "words").read_text().split("\0END\0")[:-1]]
    return [[word for word in words if word != "..."] for words in found]
