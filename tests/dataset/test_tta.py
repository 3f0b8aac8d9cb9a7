"""Variations are symmetries of the task that can be undone; votes count, and confidence decides between equals."""

import itertools

import numpy as np
import pytest
import torch

from dataset import maze
from dataset.augment import BOXES, Box
from dataset.sudoku import random_solution, valid_solutions
from dataset.tta import Ballots, Variations, winner
from tests.dataset.shapes import split_of

# N = boards, K = variations, S = tokens


def _spread(variations: Variations, rows: list[int], boards_NS: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    batch = {"inputs": boards_NS, "labels": boards_NS + 100, "puzzle_identifiers": torch.arange(len(rows))}
    ((numbers, varied),) = variations.spread(iter([(np.array(rows), batch)]))
    count = variations.count
    assert varied["labels"].tolist() == (boards_NS + 100).repeat_interleave(count, 0).tolist()
    assert varied["puzzle_identifiers"].tolist() == [n for n in range(len(rows)) for _ in range(count)]
    assert numbers.tolist() == [row * count + k for row in rows for k in range(count)]
    return numbers, varied["inputs"]


@pytest.mark.parametrize("box", BOXES.values(), ids=str)
def test_variations_of_a_sudoku_are_sudokus_and_come_back(box: Box) -> None:
    rng = np.random.default_rng(1)
    boards_NS = torch.from_numpy(np.stack([random_solution(box, rng) for _ in range(3)]).astype(np.int64)) + 1
    boards_NS[1, :5] = 1  # blanks stay blanks
    boards_NS[2, 7] = 0
    variations = Variations.of(split_of(box.num_cells, box.side + 2), 6)
    numbers, varied_NS = _spread(variations, [4, 9, 1000], boards_NS)
    assert torch.equal(variations.undo(numbers, varied_NS), boards_NS.repeat_interleave(6, 0))
    assert torch.equal(varied_NS[::6], boards_NS), "the first is the puzzle itself"
    assert len({tuple(board) for board in varied_NS[:6].tolist()}) == 6
    assert valid_solutions((varied_NS[:6] - 1).numpy().astype(np.uint8), box).all()
    assert ((varied_NS == 1).sum(1) == torch.tensor([0, 5, 0]).repeat_interleave(6)).all()
    # Of any order and company.
    for index in (17, 3, 8):
        assert torch.equal(variations.undo(numbers[[index]], varied_NS[[index]])[0], boards_NS[index // 6])


def test_variations_of_a_maze_are_the_eight_of_the_square() -> None:
    board_S = torch.from_numpy(maze.to_tokens("S  ## # G").astype(np.int64))
    variations = Variations.of(split_of(9, 6), 8)
    numbers, varied_NS = _spread(variations, [5], board_S[None])
    grid = board_S.numpy().reshape(3, 3)
    turned = [np.rot90(image, k) for image in (grid, grid.T) for k in range(4)]
    assert {tuple(board) for board in varied_NS.tolist()} == {tuple(image.ravel()) for image in turned}
    assert varied_NS[0].tolist() == board_S.tolist()
    assert torch.equal(variations.undo(numbers, varied_NS), board_S[None].repeat(8, 1))


@pytest.mark.parametrize(
    "sizes, count, expected",
    [
        ((900, 6), 9, "tta=9, but a maze has 8 symmetries; take 8 or fewer"),
        ((900, 12), 4, "augmentations of an ARC dataset vote with evaluators="),
        ((10, 3), 4, "10 tokens of 3 kinds, whose answers can't be turned back"),
    ],
)
def test_tasks_without(sizes: tuple[int, int], count: int, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Variations.of(split_of(*sizes), count)


def _answer(*tokens: int) -> np.ndarray:
    return np.array(tokens)


def test_votes_count_before_confidence() -> None:
    few, many = _answer(1, 2), _answer(1, 3)
    assert winner([(few, 0.99), (many, 0.1), (many, 0.2)]).tolist() == [1, 3]
    assert winner([(few, 0.2), (many, 0.1), (few, 0.2), (many, 0.4)]).tolist() == [1, 3]  # mean 0.25 against 0.2
    assert winner([(few, 0.3), (many, 0.3)]).tolist() == [1, 2]  # the single pass, among equals
    assert winner([(many, 0.3)]).tolist() == [1, 3]


def test_ballots_come_in_any_order() -> None:
    ballots = Ballots(3)
    answers = {6: _answer(7), 7: _answer(8), 8: _answer(8), 30: _answer(1), 31: _answer(1), 32: _answer(2)}

    def cast(*numbers: int) -> list[tuple[int, list[int]]]:
        stacked = np.stack([answers[number] for number in numbers])
        decided = ballots.cast(np.array(numbers), stacked, np.zeros(len(numbers)))
        return [(index, answer.tolist()) for index, answer in decided]

    assert cast(31, 8, 6) == []
    assert cast(32, 7) == [(1, [8])]
    assert cast(30) == [(0, [1])]
    assert ballots._cast == {}, "nothing is kept of what is decided"


def test_ballots_are_counted_in_the_order_of_variations() -> None:
    """Ballots arrive in an order that depends on the batch size. Between equal answers the earlier variation wins."""
    for arrival in itertools.permutations(range(3)):
        ballots = Ballots(3)
        decided = []
        for variation in arrival:
            answer_S = _answer(variation)  # three answers, of one vote and of one confidence each
            decided += ballots.cast(np.array([15 + variation]), answer_S[None], np.array([0.5]))
        ((_, winner_S),) = decided
        assert winner_S.tolist() == [0], f"the ballots that arrived as {arrival} were counted in another order"
