"""Mazes as a task: text and tokens, boards as text, verdicts and symmetries."""
# B, N = mazes, S = cells of a maze, T = transforms

import re

import numpy as np
import pytest
import torch

from dataset.maze import allowed_transforms
from dataset.schema import PuzzleSet
from dataset.tasks import square
from dataset.tasks.maze import MazeTask
from dataset.tasks.square import SquareSymmetries
from tests.dataset.mazes import solved, to_tokens, turned_row
from tests.dataset.shapes import maze_split, tensors

ANSI = re.compile(r"\x1b\[[0-9;]*m")

# The path along the top has four steps, and the path around the walls has twelve.
MAZE = "S   G" + " ### " * 3 + "     "
SHORT = "SoooG" + " ### " * 3 + "     "
LONG = "S   G" + "o###o" * 3 + "ooooo"
MAZE_5 = MazeTask(5)


def test_maze_text_and_tokens() -> None:
    tokens_S = to_tokens(MAZE)
    rows = "\n".join(MAZE[start : start + 5] for start in range(0, 25, 5))
    for text in (MAZE, rows):
        np.testing.assert_array_equal(MAZE_5.parse(text, "puzzle"), tokens_S)
    assert MAZE_5.plain(np.arange(6)) == "?# SGo"
    np.testing.assert_array_equal(MAZE_5.parse_solution(LONG, "answer", tokens_S), to_tokens(LONG))
    for text, expected in (
        (SHORT, r"here has 'o' in cell 2 \(row 1, column 2\)"),
        (MAZE.replace("S", " "), "here has no S"),
        (MAZE.replace(" ", "G", 1), "here has 2 G"),
        ("S#  G" + "#### " + MAZE[10:], "here has no way from S to G"),
    ):
        with pytest.raises(ValueError, match=expected):
            MAZE_5.parse(text, "here")


def test_verdicts_on_mazes() -> None:
    for answer, valid, is_solved, reason in (
        (SHORT, True, True, "a path of 4 steps, and there is no shorter one"),
        (LONG, True, False, "a path of 12 steps, but the shortest has 4"),
        (MAZE, False, False, "no path is marked"),
        (SHORT[:-1] + "o", False, False, "the marked cells are not one path from S to G"),
        (SHORT.replace("#", "o"), False, False, "9 cells of the maze altered"),
    ):
        verdict = MAZE_5.verdict(to_tokens(MAZE), to_tokens(answer))
        assert (verdict.valid, verdict.solved, verdict.reason) == (valid, is_solved, reason)
    with pytest.raises(ValueError, match="there is no solution of its question"):
        MAZE_5.parse_solution(MAZE, "there", to_tokens(MAZE))


def test_a_maze_as_text() -> None:
    question_S, before_S = to_tokens(MAZE), to_tokens(LONG)
    answer_S = to_tokens("SoooG" + "o## o" + LONG[10:])
    shown = MAZE_5.show(answer_S, question_S=question_S, previous_S=before_S, color=False)
    assert shown.splitlines()[1:4] == ["│S o*o*o*G │", "│o ████ ×o │", "│o ██████o │"]
    colored = MAZE_5.show(answer_S, question_S=question_S, previous_S=before_S, color=True)
    assert ANSI.sub("", colored) == re.sub("[*×]", " ", shown)


# ---- symmetries --------------------------------------------------------------------------------


def _symmetries(*sets: PuzzleSet) -> SquareSymmetries:
    return MazeTask(6).symmetries(sets)


def test_every_maze_is_turned_as_its_label_allows_and_equally_often() -> None:
    split = maze_split()
    puzzle_set = split.sets["all"]
    allowed_NT = allowed_transforms(puzzle_set.inputs, puzzle_set.labels)
    symmetries = _symmetries(puzzle_set)
    assert symmetries.description == f"symmetries of mazes 6x6 ({allowed_NT.sum()} of 96 keep the label)"
    examples_B = np.repeat(np.arange(12), 400)
    uniform_BU = np.random.default_rng(0).random((len(examples_B), 1))
    transforms_B = symmetries.transforms(uniform_BU, examples_B)
    counts_NT = np.zeros((12, 8), int)
    np.add.at(counts_NT, (examples_B, transforms_B), 1)
    expected_NT = 400 * allowed_NT / allowed_NT.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(counts_NT > 0, allowed_NT)
    assert (abs(counts_NT - expected_NT) < 6 * np.sqrt(expected_NT + 1)).all()

    batch = tensors(puzzle_set.inputs[examples_B], puzzle_set.labels[examples_B])
    chosen = symmetries.choose(uniform_BU, examples_B)
    batch = symmetries.apply(batch, {name: torch.from_numpy(array) for name, array in chosen.items()})
    for row in range(0, len(examples_B), 37):
        inputs_S, labels_S = (batch[name][row].numpy() for name in ("inputs", "labels"))
        transform = int(transforms_B[row])
        np.testing.assert_array_equal(inputs_S, turned_row(puzzle_set.inputs[examples_B[row]], transform))
        np.testing.assert_array_equal(labels_S, solved(inputs_S))


def test_examples_are_numbered_over_all_sets_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = maze_split().sets["all"], maze_split().sets["all"]
    alone = _symmetries(one)
    monkeypatch.setattr(square, "_CHECKED_AT_ONCE", 5)
    together = _symmetries(one, other)
    uniform_BU = np.full((12, 1), 0.99)
    for shift in (0, 12):
        np.testing.assert_array_equal(
            together.choose(uniform_BU, np.arange(12) + shift)["cells"],
            alone.choose(uniform_BU, np.arange(12))["cells"],
        )
