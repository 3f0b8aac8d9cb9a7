"""Test-time augmentation: the tasks that have variations, and how the variations vote."""

import itertools

import numpy as np
import pytest

from dataset.tta import Ballots, Variations, winner
from tests.dataset.shapes import split_of


def test_tasks_without_variations_are_refused() -> None:
    assert Variations.of(split_of(900, 6), 8).count == 8
    one, other = Variations.of(split_of(81, 11), 2)._task.variations(np.array([1, 3]), 2)["cells"]
    assert (one != other).any(), "each Sudoku must draw its own variations"
    for sizes, count, expected in (
        ((900, 6), 9, "tta=9, but mazes have 8 symmetries"),
        ((900, 12), 4, "augmentations of ARC need evaluators="),
        ((10, 3), 4, "10 tokens of 3 kinds, whose answers can't be turned back"),
    ):
        with pytest.raises(ValueError, match=expected):
            Variations.of(split_of(*sizes), count)


def test_votes_count_before_confidence() -> None:
    few, many = np.array([1, 2]), np.array([1, 3])
    assert winner([(few, 0.99), (many, 0.1), (many, 0.2)]).tolist() == [1, 3]
    assert winner([(few, 0.3), (many, 0.05), (few, 0.3), (many, 0.45)]).tolist() == [1, 2]  # 0.3 beats a mean of 0.25
    assert winner([(few, 0.2), (many, 0.1), (few, 0.2), (many, 0.4)]).tolist() == [1, 3]  # a mean of 0.25 beats 0.2
    # In a tie the first answer wins, which is the answer to the puzzle itself.
    assert winner([(few, 0.3), (many, 0.3)]).tolist() == [1, 2]
    assert winner([(many, 0.3)]).tolist() == [1, 3]


def test_ballots_are_counted_in_the_order_of_variations() -> None:
    """Ballots arrive in any order. If answers tie, the earlier variation wins."""
    for arrival in itertools.permutations(range(3)):
        ballots = Ballots(3)
        decided = ballots.cast(np.array([30]), np.array([[5]]), np.array([0.5]))  # of another example
        for variation in arrival:
            answer_S = np.array([variation])  # the three answers have one vote each and the same confidence
            decided += ballots.cast(np.array([15 + variation]), answer_S[None], np.array([0.5]))
        ((index, winner_S),) = decided
        assert (index, winner_S.tolist()) == (0, [0]), f"the ballots that arrived as {arrival} were counted otherwise"
        assert list(ballots._cast) == [10], "the ballots of decided puzzles must be dropped"
