"""Symmetries of Sudokus: boards stay valid, and every symmetry can be drawn."""
# N = boards, L = side of a board, S = cells of a board

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.augment import (
    BOXES,
    Box,
    draw_symmetries,
    num_row_orders,
    row_orders,
)
from dataset.sudoku import random_solution, valid_solutions

boxes = st.sampled_from(list(BOXES.values()))
seeds = st.integers(0, 2**32 - 1)


@settings(deadline=None)
@given(box=boxes, seed=seeds)
def test_valid_boards_stay_valid(box: Box, seed: int) -> None:
    rng = np.random.default_rng(seed)
    solution_NS = np.tile(random_solution(box, rng), (20, 1))
    assert valid_solutions(draw_symmetries(rng, 20, box).apply(solution_NS), box).all()


@pytest.mark.parametrize("box", [*BOXES.values(), BOXES["2x3"].transposed], ids=str)
def test_orders_are_numbered_as_in_a_table(box: Box) -> None:
    """Datasets and recorded runs depend on the numbering. Side 16 has 8 million orders."""
    num_groups, size, num_orders = box.columns, box.rows, num_row_orders(box)
    assert num_orders == math.factorial(num_groups) * math.factorial(size) ** num_groups
    table = (
        [group * size + line for group, lines in zip(groups, within, strict=True) for line in lines]
        for groups in itertools.permutations(range(num_groups))
        for within in itertools.product(itertools.permutations(range(size)), repeat=num_groups)
    )
    numbers = np.unique(np.linspace(0, num_orders - 1, min(num_orders, 20_000)).astype(np.intp))
    orders = row_orders(numbers, box)
    assert row_orders(np.arange(1000) % num_orders, box)[:num_orders].tolist() == [*itertools.islice(table, 1000)]
    assert len({tuple(order) for order in orders.tolist()}) == len(orders) == len(numbers)
    # The lines of one band stay side by side.
    groups = orders.reshape(len(orders), num_groups, size) // size
    assert (groups == groups[:, :, :1]).all()


def test_every_4x4_symmetry_is_drawn_about_equally_often() -> None:
    box, num = BOXES["2x2"], 50_000
    symmetries = draw_symmetries(np.random.default_rng(0), num, box)
    for table, expected in ((symmetries.cells_NS, 128), (symmetries.digits_ND, 24)):
        _, counts = np.unique(table, axis=0, return_counts=True)
        assert len(counts) == expected
        # The bound is six standard deviations of a binomial count.
        assert abs(counts - num / expected).max() < 6 * math.sqrt(num / expected)
