"""Mazes as a task: text and tokens, boards as text, verdicts and symmetries."""
# B, N = mazes, S = cells of a maze, T = transforms

import re

import numpy as np
import pytest
import torch

from dataset import maze
from dataset.evaluators import build_evaluators
from dataset.maze import allowed_transforms
from dataset.schema import PuzzleSet
from dataset.tasks.maze import MazeTask
from dataset.tasks.square import SquareSymmetries
from dataset.tta import Variations
from tests.dataset.mazes import solved, turned_row
from tests.dataset.shapes import maze_split, split_of, tensors
from tests.dataset.variations import spread

ANSI = re.compile(r"\x1b\[[0-9;]*m")

# The path along the top has four steps, and the path around the walls has twelve.
MAZE = "S   G" + " ### " * 3 + "     "
SHORT = "SoooG" + " ### " * 3 + "     "
LONG = "S   G" + "o###o" * 3 + "ooooo"
MAZE_5 = MazeTask(5)


def test_maze_text_and_tokens() -> None:
    tokens_S = MAZE_5.parse(MAZE, "puzzle")
    np.testing.assert_array_equal(tokens_S, maze.to_tokens(MAZE))
    rows = "\n".join(MAZE[start : start + 5] for start in range(0, 25, 5))
    np.testing.assert_array_equal(MAZE_5.parse(rows, "puzzle"), tokens_S)
    assert MAZE_5.plain(tokens_S) == MAZE
    np.testing.assert_array_equal(MAZE_5.parse_solution(LONG, "answer", tokens_S), maze.to_tokens(LONG))
    assert MAZE_5.plain(np.arange(6)) == "?# SGo"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (MAZE[:-1], "here has 24 characters, this model's puzzles have 25 (maze 5x5)"),
        (SHORT, "here has 'o' in cell 2 (row 1, column 2), where only # for a wall, blank, S and G can be"),
        (MAZE.replace("S", " "), "here has no S, where a maze has one"),
        (MAZE.replace(" ", "G", 1), "here has 2 G, where a maze has one"),
        ("S#  G" + "#### " + MAZE[10:], "here has no way from S to G"),
    ],
)
def test_malformed_mazes_are_refused(text: str, expected: str) -> None:
    with pytest.raises(ValueError, match=re.escape(expected)):
        MAZE_5.parse(text, "here")


@pytest.mark.parametrize(
    ("answer", "valid", "solved", "reason"),
    [
        (SHORT, True, True, "a path of 4 steps, and there is no shorter one"),
        (LONG, True, False, "a path of 12 steps, but the shortest has 4"),
        (MAZE, False, False, "no path is marked"),
        (SHORT[:-1] + "o", False, False, "the marked cells are not one path from S to G"),
        (SHORT.replace("#", "o"), False, False, "9 cells of the maze altered"),
        (SHORT.replace("G", "o"), False, False, "1 cell of the maze altered"),
    ],
)
def test_verdicts_on_mazes(answer: str, valid: bool, solved: bool, reason: str) -> None:
    verdict = MAZE_5.verdict(maze.to_tokens(MAZE), maze.to_tokens(answer))
    assert (verdict.valid, verdict.solved, verdict.reason) == (valid, solved, reason)
    if not valid:
        with pytest.raises(ValueError, match="there is no solution of its question"):
            MAZE_5.parse_solution(answer, "there", maze.to_tokens(MAZE))


def test_a_maze_as_text() -> None:
    question_S, before_S = maze.to_tokens(MAZE), maze.to_tokens(LONG)
    answer_S = maze.to_tokens("SoooG" + "o## o" + LONG[10:])
    shown = MAZE_5.show(answer_S, question_S=question_S, previous_S=before_S, color=False)
    assert shown.splitlines() == [
        "┌──────────┐",
        "│S o*o*o*G │",
        "│o ████ ×o │",
        "│o ██████o │",
        "│o ██████o │",
        "│o o o o o │",
        "└──────────┘",
    ]
    colored = MAZE_5.show(answer_S, question_S=question_S, previous_S=before_S, color=True)
    assert ANSI.sub("", colored) == re.sub("[*×]", " ", shown)
    assert "\x1b[36;7mo \x1b[0m" in colored and "\x1b[31;7m  \x1b[0m" in colored and "\x1b[90m██\x1b[0m" in colored


# ---- evaluation --------------------------------------------------------------------------------


def test_mazes_are_judged_by_the_path_alone() -> None:
    """The maze has two shortest paths. A label would be only one of them."""
    question = "S   #   G"
    answers = {
        question: (False, False),  # no path is marked
        "Soo #o  G": (True, True),
        "S  o# ooG": (True, True),
        "Soo #ooG ": (False, False),  # another cell is the goal
        "Sooo#oooG": (False, False),  # both paths together form a ring
        "Soo  o  G": (False, False),  # the wall is missing
    }
    inputs_BS = torch.from_numpy(np.stack([maze.to_tokens(question)] * len(answers))).int()
    predictions_BS = torch.from_numpy(np.stack([maze.to_tokens(answer) for answer in answers])).long()
    found = build_evaluators(["maze"], split_of(9, 6)).judge(inputs_BS, predictions_BS)
    assert list(zip(found["path_valid"].tolist(), found["path_optimal"].tolist(), strict=True)) == list(
        answers.values()
    )
    assert found["path_valid"].dtype == torch.bool


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


def test_examples_are_numbered_over_all_sets() -> None:
    one, other = maze_split().sets["all"], maze_split().sets["all"]
    together = _symmetries(one, other)
    uniform_BU = np.full((12, 1), 0.99)
    for shift in (0, 12):
        np.testing.assert_array_equal(
            together.choose(uniform_BU, np.arange(12) + shift)["cells"],
            _symmetries(one).choose(uniform_BU, np.arange(12))["cells"],
        )


def test_variations_of_a_maze_are_the_eight_of_the_square() -> None:
    board_S = torch.from_numpy(maze.to_tokens("S  ## # G").astype(np.int64))
    variations = Variations.of(split_of(9, 6), 8)
    numbers, varied_NS = spread(variations, [5], board_S[None])
    grid = board_S.numpy().reshape(3, 3)
    turned = [np.rot90(image, k) for image in (grid, grid.T) for k in range(4)]
    assert {tuple(board) for board in varied_NS.tolist()} == {tuple(image.ravel()) for image in turned}
    assert varied_NS[0].tolist() == board_S.tolist()
    assert torch.equal(variations.undo(numbers, varied_NS), board_S[None].repeat(8, 1))
