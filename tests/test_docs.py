"""Links of pages lead somewhere, and the commands of pages and usage texts can be typed."""

import argparse
import importlib
import re
import runpy
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from pydantic import BaseModel
from torch.distributed.run import parse_args

import solve
from evaluate import EvaluateConfig
from launch import kubernetes
from launch.ray_config import read_ray
from release.commands import COMMANDS
from search.sweep import Sweep
from tests.pages import PAGES, scripts, words_of
from tests.runs import REPOSITORY
from training.config import PretrainConfig
from training.dry_run import OwnKeys
from utils.command_line import CommandLine, read_config, validate

pytestmark = pytest.mark.docs
SCRIPTS = scripts()
# The files of a user that pages name.
FILES = {
    "path/to/my.yaml": "# @package _global_\n",
    "my_configs/experiment/my.yaml": "# @package _global_\n",
    "path/to/my_sweep.yaml": "parameters: {lr: [1e-4, 1e-3]}\n",
}
# What pages write themselves: tests/test_docs_datasets.py and test_docs_extending.py follow them.
WRITTEN = ("dataset.build_latin_dataset", "docs/extending.md")


def _composed(name: str, config: type[BaseModel], words: list[str]) -> object:
    command = CommandLine.parse([word for word in words if word != "--dry-run"], name, "")
    return command.page or validate(config, read_config(name, command.overrides))


def _pretrain(words: list[str]) -> object:
    return _composed(
        "pretrain", PretrainConfig, [word for word in words if word.split("=")[0] not in OwnKeys.model_fields]
    )


def _sweep(words: list[str]) -> None:
    words = [word for word in words if word != "--dry-run"]
    if words[0] in ("status", "best", "plot", "export", "again"):
        _stopped_after_parsing("sweep", words)
    else:
        Sweep.read([word for word in words if word != "--help"])


class _Parsed(BaseException):
    """A program has read its command line."""


def _stopped_after_parsing(module: str, words: list[str]) -> None:
    """Run a program that parses with argparse, and stop it then."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(_Parsed):
        for name in ("parse_args", "parse_intermixed_args"):
            parse = getattr(argparse.ArgumentParser, name)

            def parse_and_stop(*arguments: object, parse: Callable[..., object] = parse) -> None:
                parse(*arguments)
                raise _Parsed

            patch.setattr(argparse.ArgumentParser, name, parse_and_stop)
        patch.setattr("sys.argv", [module, *words])
        runpy.run_module(module, run_name="__main__")


READ: dict[str, Callable[[list[str]], object]] = {
    "pretrain": _pretrain,
    "evaluate": partial(_composed, "evaluate", EvaluateConfig),
    "solve": solve.read_command_line,
    "sweep": _sweep,
    "launch.kubernetes": kubernetes.parse,
    "launch.ray_train": lambda words: _pretrain(read_ray(words)[1]),
}


def _read(words: list[str]) -> None:
    """Read a command with the parser of its program. Programs of others are taken as they are."""
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE), "no such target"
        return
    if words[0] in COMMANDS:
        words = ["python", "-m", COMMANDS[words[0]], *words[1:]]
    if "torchrun" in words:
        launch = parse_args(words[words.index("torchrun") + 1 :])
        module, words = launch.training_script, launch.training_script_args
    elif "launch/slurm.sbatch" in words:
        module, words = "pretrain", words[words.index("launch/slurm.sbatch") + 1 :]
    elif "python" in words:
        words = words[words.index("python") + 1 :]
        if words[0] == "-c":
            compile(words[1], "-c", "exec")
            return
        module, *words = words[1:] if words[0] == "-m" else words
    else:
        return
    module = module.removesuffix(".py").replace("/", ".").removeprefix("hrm_trainer.")
    if module.startswith(("pytest", "tests.")) or module in WRITTEN:
        return
    if module in READ:
        READ[module](words)
    elif hasattr(importlib.import_module(module), "parse_settings"):
        importlib.import_module(module).parse_settings(words)
    else:
        _stopped_after_parsing(module, words)


@pytest.mark.parametrize("source", SCRIPTS)
def test_every_command_is_understood(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bash reads the commands as they are printed, and the program of each reads its words."""
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    monkeypatch.chdir(tmp_path)
    for command in words_of(SCRIPTS[source], tmp_path):
        try:
            if source not in WRITTEN:
                _read(command)
        except (Exception, SystemExit) as error:
            pytest.fail(f"{source}: {shlex.join(command)}\n{error}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_between_files_lead_somewhere(page: Path) -> None:
    """A link's file exists, and a Markdown file has the heading that a link names."""
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}, which does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in anchors, f"{page.name} links to {target}, but {path.name} has no such heading"


def test_a_file_defines_what_architecture_says() -> None:
    """A link such as [`dataset/sampler.py: Sampler.examples`] names a definition in that file."""
    page = (REPOSITORY / "docs/architecture.md").read_text()
    named = re.findall(r"\[`([\w/.]+): ([\w.]+)`\]\(\.\./([\w/.]+)\)", page)
    assert len(named) > 40
    for file, name, target in named:
        defined = re.compile(rf"^ *(def|class) {name.split('.')[-1]}\b|^{name}\b.* = ", re.MULTILINE)
        assert file == target and defined.search((REPOSITORY / file).read_text()), f"{file} does not define {name}"
