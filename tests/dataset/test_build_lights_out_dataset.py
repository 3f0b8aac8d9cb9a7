"""The Lights Out builder: the dataset that it writes, and the mistakes that it refuses."""
# N = boards, S = cells of a board

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dataset import build_lights_out_dataset, validate
from dataset.build_lights_out_dataset import BUILDER, main
from dataset.schema import Split, check_contents
from dataset.tasks.lights_out import LIT, PRESS
from tests.dataset.builders import build, refused
from tests.dataset.mazes import turned_row

_build = partial(build, main)


def _keys(split: Split) -> list[bytes]:
    """Return a key of each board. Symmetries of one board have the same key."""
    inputs_NS = np.array(split.sets["all"].inputs)
    return [min(turned_row(board_S, transform).tobytes() for transform in range(8)) for board_S in inputs_NS]


@pytest.mark.parametrize("side", [3, 7])
def test_format(tmp_path: Path, capsys: pytest.CaptureFixture[str], side: int) -> None:
    splits = _build(tmp_path / "data", "--side", side, "--generate", 40, "--num-aug", 3, "--max-presses", side**2)
    assert [len(splits[name].sets["all"].inputs) for name in ("train", "test")] == [160, 4]
    assert splits["train"].sets["all"].group_indices.tolist() == list(range(0, 161, 4))
    said = capsys.readouterr().out
    assert "train  160 boards = 40 puzzles x (1 + 3 augmentations)\n  test   4 boards\n" in said
    assert f"leave 3, press 4: vocab_size 5, seq_len {side**2}\n  labels " in said
    # `validate` judges every label.
    assert validate.main([str(tmp_path / "data")]) == 0
    assert capsys.readouterr().out.endswith("ok: 0 errors, 0 warnings\n")


def test_only_the_boards_of_a_group_are_symmetries_of_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_lights_out_dataset, "MAX_DUPLICATES", 1000)  # in a row, not in all
    splits = _build(tmp_path / "3", "--side", 3, "--generate", 80, "--generate-test", 21)
    keys = _keys(splits["train"]) + _keys(splits["test"])
    assert len(set(keys)) == 101, "the splits must hold all 101 boards of 3x3"
    splits = _build(tmp_path / "4", "--side", 4, "--generate", 30, "--num-aug", 7)
    keys = _keys(splits["train"])
    assert [len(set(keys[start : start + 8])) for start in range(0, 240, 8)] == [1] * 30
    assert len(set(keys)) == 30 and not set(keys) & set(_keys(splits["test"]))


def test_seed_and_max_presses_change_the_boards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Test boards are not augmented."""
    typed = (["--num-aug", 0], ["--num-aug", 2], ["--seed", 1])
    built = [_build(tmp_path / str(n), "--side", 5, "--generate", 30, *options) for n, options in enumerate(typed)]
    first, augmented, other = ([check_contents(splits[name]) for name in ("train", "test")] for splits in built)
    assert augmented[1] == first[1] and not set(other) & set(first)
    few = _build(tmp_path / "few", "--generate", 50, "--max-presses", 3)["train"].sets["all"]
    assert "  labels 1 to 3 presses, 2." in capsys.readouterr().out
    assert BUILDER.parse(["--generate", "5"]).generate_test == 1
    assert set((few.labels == PRESS).sum(1).tolist()) == {1, 2, 3} and (few.inputs == LIT).any(1).all()


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, list[object]] = {
        "--side is 2; it must be 3 to 7": ["--side", 2],
        "--num-aug is 8; it must be at most 7": ["--num-aug", 8],
        "--max-presses is 30, but a board has 25 cells": ["--max-presses", 30],
        "found only 101 boards of 3x3": ["--side", 3, "--generate", 101],
    }
    for expected, typed in options.items():
        assert expected in refused(main, capsys, tmp_path / "data", *typed)
