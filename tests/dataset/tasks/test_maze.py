"""Mazes as a task: text to tokens and back, boards for people, and verdicts."""

import re

import numpy as np
import pytest

from dataset import maze
from dataset.tasks.maze import MazeTask

ANSI = re.compile(r"\x1b\[[0-9;]*m")

# Four steps along the top, or twelve around the walls.
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
def test_what_is_no_maze(text: str, expected: str) -> None:
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
