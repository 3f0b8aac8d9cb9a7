"""Mazes: labels, verdicts on paths, transforms and new mazes equal those of slow searches."""
# N = mazes, S = cells of a maze, L = side, T = transforms

import itertools
from pathlib import Path

import numpy as np
import pytest

from dataset import maze
from dataset.boards import read_boards
from dataset.build_maze_dataset import to_mazes
from dataset.maze import (
    BLANK,
    GOAL,
    PATH,
    START,
    WALL,
    allowed_transforms,
    generate,
    judge_paths,
    least_distance,
    shortest_path,
)
from tests.dataset.mazes import Cell, any_maze, random_maze, search, solved, to_tokens, turned, turned_row

REAL_MAZES = Path(__file__).resolve().parents[3] / "shared" / "data" / "maze-30x30-hard-1k"


def _is_solved(maze_S: np.ndarray, label_S: np.ndarray) -> bool:
    expected_S = solved(maze_S)
    return expected_S is not None and np.array_equal(expected_S, label_S)


# ---- paths -------------------------------------------------------------------------------------


def _all_paths(maze_LL: np.ndarray, cell: Cell, visited: frozenset[Cell]) -> list[list[int]]:
    """Return every way to G, as directions: 0 for down, 1 for left, 2 for right and 3 for up."""
    if maze_LL[cell] == GOAL:
        return [[]]
    found = []
    for direction, (down, right) in enumerate(((1, 0), (0, -1), (0, 1), (-1, 0))):
        ahead = (cell[0] + down, cell[1] + right)
        if min(ahead) >= 0 and max(ahead) < len(maze_LL) and maze_LL[ahead] != WALL and ahead not in visited:
            found += [[direction, *rest] for rest in _all_paths(maze_LL, ahead, visited | {ahead})]
    return found


@pytest.mark.parametrize("side", [2, 3, 4])
def test_the_label_is_the_first_of_all_shortest_paths(side: int) -> None:
    """Shortest paths are compared by their directions, in the order down, left, right, up."""
    rng = np.random.default_rng(side)
    num_choices = num_without = 0
    for _ in range(100):
        maze_LL = any_maze(rng, side).reshape(side, side)
        (start,) = zip(*np.nonzero(maze_LL == START), strict=True)
        paths = _all_paths(maze_LL, start, frozenset([start]))
        found = shortest_path(maze_LL)
        if not paths:
            num_without += 1
            assert found is None
            continue
        expected = min(paths, key=lambda path: (len(path), path))
        num_choices += sum(len(path) == len(expected) for path in paths) > 1
        assert found is not None and maze_LL[found[0]] == START and maze_LL[found[-1]] == GOAL
        taken = [(r - row, c - column) for (row, column), (r, c) in itertools.pairwise(found)]
        assert [((1, 0), (0, -1), (0, 1), (-1, 0)).index(step) for step in taken] == expected
        assert found == search(maze_LL.tolist())
    assert num_without and (num_choices > 10 or side == 2)


def _judge(maze_LL: np.ndarray, answer_LL: np.ndarray) -> tuple[bool, bool]:
    """Walk along the answer from S to G. Return whether it is one path, and a shortest path."""
    is_mark_LL = (maze_LL == BLANK) & (answer_LL == PATH)
    if ((answer_LL != maze_LL) & ~is_mark_LL).any():
        return False, False
    ((start,), (goal,)) = (list(zip(*np.nonzero(maze_LL == token), strict=True)) for token in (START, GOAL))
    left = {*zip(*np.nonzero(is_mark_LL), strict=True), goal}
    (row, column), num_steps = start, 0
    while (row, column) != goal:
        ahead = [c for c in ((row + 1, column), (row - 1, column), (row, column + 1), (row, column - 1)) if c in left]
        if len(ahead) != 1:
            return False, False
        left.remove(ahead[0])
        (row, column), num_steps = ahead[0], num_steps + 1
    shortest = search(maze_LL.tolist())
    assert shortest is not None
    return not left, not left and num_steps == len(shortest) - 1


def _compare(mazes_NS: np.ndarray, answers_NS: np.ndarray) -> np.ndarray:
    judged = judge_paths(mazes_NS, answers_NS)
    found_N2 = np.stack([judged["path_valid"], judged["path_optimal"]], axis=1)
    side = int(mazes_NS.shape[1] ** 0.5)
    pairs = zip(mazes_NS.reshape(-1, side, side), answers_NS.reshape(-1, side, side), strict=True)
    np.testing.assert_array_equal(found_N2, [_judge(maze_LL, answer_LL) for maze_LL, answer_LL in pairs])
    return found_N2


def test_verdicts_on_answers_equal_those_of_a_walk() -> None:
    """Damaged answers, and all ways to mark the blanks of small mazes, with loose ends."""
    rng = np.random.default_rng(0)
    pairs = [random_maze(rng, 5) for _ in range(1500)]
    for _, answer_S in pairs:
        for cell in rng.choice(25, rng.integers(0, 4), replace=False):
            if rng.random() < 0.8:  # add or remove a mark, else write any token
                answer_S[cell] = {BLANK: PATH, PATH: BLANK}.get(int(answer_S[cell]), answer_S[cell])
            else:
                answer_S[cell] = rng.integers(0, 7)
    mazes_NS, answers_NS = map(np.stack, zip(*pairs, strict=True))
    assert 0.2 < _compare(mazes_NS, answers_NS)[:, 0].mean() < 0.8
    num_longer = 0
    for question in ("S      G ", "S   G    ", "    S   G"):
        maze_S = to_tokens(question)
        (blanks,) = np.nonzero(maze_S == BLANK)
        answers_NS = np.tile(maze_S, (2 ** len(blanks), 1))
        answers_NS[:, blanks] = list(itertools.product((BLANK, PATH), repeat=len(blanks)))
        found_N2 = _compare(np.tile(maze_S, (len(answers_NS), 1)), answers_NS)
        assert found_N2[:, 1].any()
        num_longer += int((found_N2[:, 0] & ~found_N2[:, 1]).sum())
    assert num_longer > 0


# ---- transforms --------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [2, 5, 8])
def test_a_transform_is_allowed_where_the_search_finds_its_label(side: int) -> None:
    rng = np.random.default_rng(side)
    mazes = [random_maze(rng, side) for _ in range(150)]
    allowed_NT = allowed_transforms(np.stack([m for m, _ in mazes]), np.stack([label for _, label in mazes]))
    expected_NT = [
        [_is_solved(turned_row(maze_S, t), turned_row(label_S, t)) for t in range(8)] for maze_S, label_S in mazes
    ]
    np.testing.assert_array_equal(allowed_NT, expected_NT)
    assert allowed_NT[:, 0].all()
    assert not allowed_NT.all() and allowed_NT[:, 1:].any(axis=0).all(), (
        "the mazes do not tell the transforms apart, so that the test proves little"
    )


def test_a_label_that_breaks_the_rule_allows_only_transforms_that_mend_it() -> None:
    """The rule is that the label is the path of the search. The identity is always allowed."""
    maze = "S.#...#.G"  # the search goes down first
    tokens_S = np.array([{"#": WALL, ".": BLANK, "S": START, "G": GOAL}[c] for c in maze], np.uint8)
    unreachable_S = tokens_S.copy()
    unreachable_S[[5, 7]] = WALL
    # The paths of the search in the maze and in the transposed maze, another shortest path, a path
    # with one more cell, a part of a path, and none.
    paths = [[3, 4, 7], [1, 4, 5], [3, 4, 5], [1, 3, 4, 7], [3, 4], []]
    mazes_NS = np.stack([*[tokens_S] * 5, unreachable_S])
    labels_NS = mazes_NS.copy()
    for label_S, path in zip(labels_NS, paths, strict=True):
        label_S[path] = PATH
    allowed_NT = allowed_transforms(mazes_NS, labels_NS)
    assert allowed_NT.tolist() == [
        [t == 0 or _is_solved(turned_row(maze_S, t), turned_row(label_S, t)) for t in range(8)]
        for maze_S, label_S in zip(mazes_NS, labels_NS, strict=True)
    ]
    assert allowed_NT[1, 4] and not allowed_NT[0, 4] and not allowed_NT[3:, 1:].any()


# ---- new mazes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("side", "num"), [(6, 40), (30, 6), (40, 2)])
def test_new_mazes_are_hard_and_labelled(side: int, num: int) -> None:
    pairs = list(generate(num, side, np.random.default_rng(0)))
    assert len(pairs) == num
    for question_S, answer_S in pairs:
        assert question_S.dtype == answer_S.dtype == np.uint8 and question_S.shape == (side * side,)
        assert set(question_S.tolist()) == {WALL, BLANK, START, GOAL}
        assert _is_solved(question_S, answer_S)
        assert (answer_S == PATH).sum() + 1 >= least_distance(side)
    judged = judge_paths(*(np.stack(column) for column in zip(*pairs, strict=True)))
    assert judged["path_optimal"].all()
    keys = [{turned_row(question_S, transform).tobytes() for transform in range(8)} for question_S, _ in pairs]
    assert all(one.isdisjoint(other) for one, other in itertools.combinations(keys, 2))


def test_symmetries_of_earlier_mazes_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def hard_mazes(side: int, rng: np.random.Generator) -> np.ndarray:
        return np.stack([turned(drawn[i], t) for i, t in next(order)])

    drawn = [question_S.reshape(6, 6) for question_S, _ in generate(3, 6, np.random.default_rng(0))]
    order = iter([[(0, 0), (0, 5)], [(0, 3), (1, 0), (1, 7)], [(2, 2)]])
    monkeypatch.setattr(maze, "_hard_mazes", hard_mazes)
    found = [question_S.reshape(6, 6) for question_S, _ in generate(3, 6, np.random.default_rng(0))]
    for question_LL, expected_LL in zip(found, [drawn[0], drawn[1], turned(drawn[2], 2)], strict=True):
        np.testing.assert_array_equal(question_LL, expected_LL)


@pytest.mark.skipif(not REAL_MAZES.exists(), reason="the shared mazes are not here")
def test_published_labels_are_the_paths_of_the_search() -> None:
    mazes = read_boards(REAL_MAZES / "test.csv.gz", to_mazes)
    assert mazes.questions_NS.shape == mazes.answers_NS.shape == (500, 900)
    for question_S, answer_S in zip(*mazes, strict=True):
        label_LL = question_S.reshape(30, 30).copy()
        for cell in (shortest_path(label_LL) or [])[1:-1]:
            label_LL[cell] = PATH
        np.testing.assert_array_equal(label_LL.ravel(), answer_S)
    assert allowed_transforms(*mazes).sum() == 951
