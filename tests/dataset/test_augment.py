"""Symmetries of Sudokus: how the orders of rows and columns are numbered."""
# N = boards, L = side of a board, S = cells of a board

import itertools
import math

import numpy as np
import pytest

from dataset.augment import BOXES, Box, num_row_orders, row_orders


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
