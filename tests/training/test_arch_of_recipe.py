"""A typed architecture in place of that of a recipe: which keys of the recipe no longer hold."""

import re
from pathlib import Path

import pytest

from tests import runs
from training.arch_of_recipe import note_on_arch, replaced_keys
from training.config import PretrainConfig
from training.data import Sizes
from training.dry_run import dry_run
from utils.command_line import read_config, validate

DEMO = ["experiment=demo", "arch=hrm"]
SIZES = Sizes(seq_len=36, vocab_size=8, num_puzzle_identifiers=1)


def _note(overrides: list[str]) -> list[str]:
    return note_on_arch(overrides, validate(PretrainConfig, read_config("pretrain", overrides)), SIZES)


def test_the_values_of_the_recipe_and_those_of_the_run_are_named() -> None:
    keys = replaced_keys([*DEMO, "arch.expansion=2", "arch.H_layers=1"])
    assert keys["arch.hidden_size"] == ("16", "512") and keys["arch.backprop"] == ("all", "one_step")
    kept = {"arch.halt_max_steps", "arch.forward_dtype"}  # which the recipe sets for any architecture
    others = {"arch.name", "arch.expansion", "arch.H_layers", "arch.cells"}  # typed, or only of one of the two
    assert not keys.keys() & (kept | others)


def test_a_typed_size_changes_what_follows_from_it() -> None:
    keys = replaced_keys([*DEMO, "arch.hidden_size=64"])
    assert "arch.hidden_size" not in keys and keys["arch.puzzle_emb_ndim"] == ("0", "64")


def test_keys_that_the_architecture_lacks_are_named() -> None:
    keys = replaced_keys(["experiment=trm_sudoku_6x6", "arch=se_mixer"])
    assert {key for key, (_, now) in keys.items() if now is None} == {"arch.mlp", "arch.num_registers"}


def test_a_recipe_of_ones_own(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("# @package _global_\ndefaults:\n  - override /arch: trm\n\narch:\n  hidden_size: 64\n")
    keys = replaced_keys([f"experiment={recipe}", "arch=urm"])
    assert "arch.hidden_size" not in keys and keys["arch.H_cycles"] == ("3", "2")


@pytest.mark.parametrize("typed", [["experiment=demo"], ["arch=hrm"], ["experiment=demo", "arch=se_mixer"]])
def test_nothing_is_said_if_all_keys_hold(typed: list[str]) -> None:
    assert _note(typed) == []


def test_one_line_tells_the_size() -> None:
    (line,) = _note(DEMO)
    assert "\n" not in line and "27,272,194" in line and line.count("arch.hidden_size") == 1


def test_a_dry_run_and_a_run_say_it_once(data: Path, tmp_path: Path) -> None:
    small = ["arch.hidden_size=32", "arch.num_heads=2", f"data_path={data}", "device=cpu"]
    page = [*dry_run([*DEMO, *small], 1)]
    folder = tmp_path / "run"
    typed = [*DEMO, *small, "max_steps=1", f"checkpoint_path={folder}"]
    log = runs.train(typed, tmp_path / "log").ok().splitlines()
    for lines in page, log:
        assert len([line for line in lines if "arch.backprop" in line]) == 1
    (parameters,) = {match[1] for line in [*page, *log] for match in re.finditer(r"([\d,]+) parameters\b", line)}
    assert int(parameters.replace(",", "")) < 1_000_000
