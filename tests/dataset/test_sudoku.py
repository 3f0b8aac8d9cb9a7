"""Sudoku: the solver agrees with brute force, and the generator makes puzzles with one solution."""
# S = cells of a board, N = boards

import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset import sudoku
from dataset.augment import BOXES, Box, draw_symmetries
from dataset.sudoku import count_guesses, count_solutions, dig, generate, random_solution, symmetry_class
from tests.dataset.shapes import is_valid_sudoku, solved_sudoku

boxes = st.sampled_from(list(BOXES.values()))
seeds = st.integers(0, 2**32 - 1)


@cache
def _all_4x4() -> np.ndarray:
    """Return all 288 solutions of side 4, with shape (288, 16)."""
    rows = list(itertools.permutations(range(1, 5)))
    boards = [
        np.array(board, dtype=np.uint8).ravel()
        for board in itertools.product(rows, repeat=4)
        if all(len(set(column)) == 4 for column in zip(*board, strict=True))
    ]
    return np.stack([board_S for board_S in boards if is_valid_sudoku(board_S, BOXES["2x2"])])


def _random_puzzle(box: Box, seed: int, share: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    solution_S = random_solution(box, rng)
    return np.where(rng.random(box.num_cells) < share, solution_S, 0).astype(np.uint8)


@settings(deadline=None, max_examples=200)
@given(seed=seeds, share=st.floats(0, 0.7))
def test_counts_are_those_of_brute_force(seed: int, share: float) -> None:
    assert len(_all_4x4()) == 288
    puzzle_S = _random_puzzle(BOXES["2x2"], seed, share)
    expected = int(((_all_4x4() == puzzle_S) | (puzzle_S == 0)).all(axis=1).sum())
    assert count_solutions(puzzle_S[None], BOXES["2x2"]) == [min(expected, 2)]


@pytest.mark.parametrize("box", ["2x3", "2x4", "3x3"])
def test_many_puzzles_are_counted_as_one_is(box: str) -> None:
    """The slow search, which tries a digit after the other, counts the same."""
    shape = BOXES[box]
    puzzles_NS = np.stack([_random_puzzle(shape, seed, 0.35 + 0.004 * seed) for seed in range(60)])
    puzzles_NS[7, puzzles_NS[7] == 0] = 1  # a full board with a mistake
    searches = [sudoku._search(sudoku._candidates(each_S, shape), 0, sudoku._board(shape)) for each_S in puzzles_NS]
    slow_N = [len(list(itertools.islice(search, 2))) for search in searches]
    assert count_solutions(puzzles_NS, shape).tolist() == slow_N
    assert set(slow_N) == {0, 1, 2}


@pytest.mark.parametrize(("box", "num"), [("2x2", 300), ("2x3", 60), ("3x3", 25)])
def test_generated_puzzles_have_one_solution_and_differ(monkeypatch: pytest.MonkeyPatch, box: str, num: int) -> None:
    monkeypatch.setattr(sudoku, "MAX_DUPLICATES", 10)  # in a row, not in all
    shape = BOXES[box]
    pairs = list(generate(num, shape, np.random.default_rng(0)))
    assert len(pairs) == num
    for puzzle_S, solution_S in pairs:
        assert puzzle_S.dtype == solution_S.dtype == np.uint8
        np.testing.assert_array_equal(solved_sudoku(puzzle_S, shape), solution_S)
    assert (count_solutions(np.stack([puzzle_S for puzzle_S, _ in pairs]), shape) == 1).all()
    assert len({symmetry_class(puzzle_S, shape) for puzzle_S, _ in pairs}) == num
    shares = [np.count_nonzero(puzzle_S) / shape.num_cells for puzzle_S, _ in pairs]
    assert min(shares) < 0.35 and max(shares) > 0.6, "the puzzles must range from hard to easy"


@pytest.mark.parametrize(("box", "num_clues"), [("2x3", None), ("3x3", None), ("3x3", 40)])
def test_dug_puzzles_have_the_solution_and_no_clue_too_many(box: str, num_clues: int | None) -> None:
    shape, rng = BOXES[box], np.random.default_rng(0)
    solutions_NS = np.repeat([random_solution(shape, rng) for _ in range(2)], 3, axis=0)
    puzzles_NS = dig(solutions_NS, shape, rng, num_clues)
    assert len(np.unique(puzzles_NS, axis=0)) == len(puzzles_NS)
    for puzzle_S, solution_S in zip(puzzles_NS, solutions_NS, strict=True):
        np.testing.assert_array_equal(solved_sudoku(puzzle_S, shape), solution_S)
        clues = np.flatnonzero(puzzle_S)
        without_NS = np.where(np.eye(len(puzzle_S), dtype=bool)[clues], 0, puzzle_S)
        if num_clues is None:
            assert (count_solutions(without_NS, shape) == 2).all(), "a clue can be spared"
        else:
            assert len(clues) == num_clues
    assert (count_solutions(puzzles_NS, shape) == 1).all()


def test_guesses_are_counted_where_singles_end() -> None:
    box, rng = BOXES["3x3"], np.random.default_rng(0)
    puzzles_NS = dig(np.repeat(random_solution(box, rng)[None], 40, axis=0), box, rng)
    guesses_N = count_guesses(puzzles_NS, box)
    settled_N = [
        sudoku._deduce(sudoku._candidates(each_S, box), 0, sudoku._board(box)) == sudoku._board(box).all_cells
        for each_S in puzzles_NS
    ]
    assert not guesses_N[settled_N].any(), "these need singles alone"
    assert guesses_N.max() > 3 and count_guesses(puzzles_NS[::-1], box).tolist() == guesses_N[::-1].tolist()


def test_generate_refuses_more_puzzles_than_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sudoku, "MAX_DUPLICATES", 2)
    with pytest.raises(ValueError, match=r"found only [\d,]+ puzzles with boxes of 2x2 .* 100,000 are needed"):
        list(generate(100_000, BOXES["2x2"], np.random.default_rng(0)))


@settings(max_examples=40)
@given(box=boxes, seed=seeds, share=st.floats(0.2, 0.7))
def test_symmetries_have_the_same_key(box: Box, seed: int, share: float) -> None:
    puzzle_S = _random_puzzle(box, seed, share)
    symmetries = draw_symmetries(np.random.default_rng([seed, 1]), 3, box)
    keys = {symmetry_class(moved_S, box) for moved_S in symmetries.apply(np.tile(puzzle_S, (3, 1)))}
    assert keys == {symmetry_class(puzzle_S, box)}


@pytest.mark.parametrize("box", BOXES.values(), ids=str)
def test_other_puzzles_have_other_keys(box: Box) -> None:
    """Moving one clue to a blank nearly always changes the symmetry class."""
    num = 20 if box.side <= 9 else 10
    puzzles = [puzzle_S for puzzle_S, _ in generate(num, box, np.random.default_rng(3))]
    assert len({np.count_nonzero(puzzle_S) for puzzle_S in puzzles}) > 2, "puzzles are easy and hard"
    rng = np.random.default_rng(4)
    changed = 0
    for puzzle_S in puzzles:
        moved_S = puzzle_S.copy()
        source = rng.choice(np.flatnonzero(puzzle_S))
        moved_S[rng.choice(np.flatnonzero(puzzle_S == 0))] = puzzle_S[source]
        moved_S[source] = 0
        changed += symmetry_class(moved_S, box) != symmetry_class(puzzle_S, box)
    assert changed >= 0.9 * num
