"""A typed architecture in place of that of a recipe is told, with the size that results."""

import re
from pathlib import Path

import pytest

from tests import runs
from training.arch_of_recipe import note_on_arch
from training.config import PretrainConfig
from training.data import Sizes
from training.dry_run import dry_run
from utils.command_line import read_config, validate

DEMO = ["experiment=demo", "arch=hrm"]
SIZES = Sizes(seq_len=36, vocab_size=8, num_puzzle_identifiers=1)


def _note(overrides: list[str]) -> list[str]:
    return note_on_arch(overrides, validate(PretrainConfig, read_config("pretrain", overrides)), SIZES)


def test_the_size_of_another_architecture_is_told() -> None:
    (line,) = _note(DEMO)
    assert "arch=hrm replaces arch=se_mixer" in line and "27,272,194 parameters" in line


@pytest.mark.parametrize("typed", [["experiment=demo"], ["arch=hrm"], ["experiment=demo", "arch=se_mixer"]])
def test_nothing_is_said_if_the_architecture_is_that_of_the_recipe(typed: list[str]) -> None:
    assert _note(typed) == []


def test_a_dry_run_and_a_run_say_it_once(data: Path, tmp_path: Path) -> None:
    small = ["arch.hidden_size=32", "arch.num_heads=2", f"data_path={data}", "device=cpu"]
    page = [*dry_run([*DEMO, *small], 1)]
    typed = [*DEMO, *small, "max_steps=1", f"checkpoint_path={tmp_path / 'run'}"]
    log = runs.train(typed, tmp_path / "log").ok().splitlines()
    for lines in page, log:
        assert len([line for line in lines if "arch=hrm replaces" in line]) == 1
    (parameters,) = {match[1] for line in [*page, *log] for match in re.finditer(r"([\d,]+) parameters\b", line)}
    assert int(parameters.replace(",", "")) < 1_000_000
