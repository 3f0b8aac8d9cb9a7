"""No quantity lets the operators or the bytes of a training step grow faster than its formula.

The steps run on a device that has no values (tests/fake_accelerator.py), so that the counts are
exact, and nothing is timed.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import comb

import pytest

from tests.fake_accelerator import fake_accelerator, needs_fake_accelerator, register
from tests.fake_training import SEQ_LEN, SIZES, FakeTraining
from tests.in_process import pretrain_config
from tests.spawn import run_ranks
from training.data import Sizes
from utils.ranks.world import World

OPERATORS = "operators"
WIDTH = 64
SMALL = [
    "data_path=x",
    "arch.forward_dtype=float32",
    f"arch.hidden_size={WIDTH}",
    "arch.num_heads=2",
    # Then the width inside of a block is twice the hidden size.
    "arch.expansion=3",
    "arch.width_multiple=32",
    "arch.H_cycles=1",
    "arch.L_cycles=1",
    "arch.L_layers=1",
    "global_batch_size=8",
    "ema=true",
    "loss_spike=3",
]
ATTEND, EMA_UPDATE, BACKWARD = "models/attention.py attend", "optim/ema.py EMA.update", "(backward)"


@dataclass(frozen=True)
class Axis:
    """How the costs of a step may grow with a quantity.

    Attributes:
        value: changes the keys and the sizes of the data to the n-th value, from 1.
        operators, bytes: the degrees of the polynomials in n that the counts are. The bytes are
            those of each function.
        more: the functions whose bytes are of the next degree.
    """

    value: Callable[[int], tuple[str, Sizes]]
    operators: int
    bytes: int
    more: tuple[str, ...] = ()
    arch: str = "arch=hrm arch.H_layers=1"


AXES = {
    "batch": Axis(lambda n: (f"global_batch_size={8 * n}", SIZES), 0, 1),
    "width": Axis(
        lambda n: (f"arch.hidden_size={WIDTH * n} arch.num_heads={2 * n} arch.puzzle_emb_ndim={WIDTH * n}", SIZES),
        operators=0,
        bytes=2,
    ),
    "tokens": Axis(lambda n: ("", replace(SIZES, seq_len=SEQ_LEN * n)), 0, 1, more=(ATTEND, BACKWARD)),
    "layers": Axis(lambda n: (f"arch.L_layers={n} arch.H_layers={n}", SIZES), 1, 1),
    "cycles of H": Axis(lambda n: (f"arch.H_cycles={n}", SIZES), 1, 1),
    "cycles of L": Axis(lambda n: (f"arch.L_cycles={n}", SIZES), 1, 1),
    "cycles of L with gradient": Axis(lambda n: (f"arch.L_cycles={n}", SIZES), 1, 1, arch="arch=trm"),
    "puzzles": Axis(lambda n: ("", replace(SIZES, num_puzzle_identifiers=1001 * n)), 0, 0, more=(EMA_UPDATE,)),
}
Counts = Counter[str]
"""The number of operators of a step, as "operators", and the bytes by function."""


def _count_all(_: World) -> dict[str, list[Counts]]:
    """Count along every axis. The device is registered for good, so a process runs only this."""
    device = register()

    @cache
    def count(arch: str, keys: tuple[str, ...], sizes: Sizes) -> Counts:
        with fake_accelerator(device) as seen:
            training = FakeTraining(pretrain_config(*arch.split(), *SMALL, *keys), device, sizes)
            seen.forget()
            training.step()
        return seen.num_bytes + Counter({OPERATORS: sum(map(Counter.total, seen.operators.values()))})

    found = {}
    for name, axis in AXES.items():
        points = map(axis.value, range(1, axis.bytes + bool(axis.more) + 3))
        found[name] = [count(axis.arch, tuple(keys.split()), sizes) for keys, sizes in points]
    return found


@pytest.fixture(scope="module")
def counts() -> dict[str, list[Counts]]:
    (counts,) = run_ranks(_count_all, 1, timeout_s=300)
    return dict(counts)


def more_than(degree: int, values: list[int]) -> int:
    """Return how far the last value is above the polynomial through the values before it."""
    before = values[-degree - 2 : -1]
    return values[-1] - sum((-1) ** (degree - n) * comb(degree + 1, n) * value for n, value in enumerate(before))


@pytest.mark.slow
@needs_fake_accelerator
@pytest.mark.parametrize("name", AXES)
def test_operators_and_bytes_grow_as_their_formulas(name: str, counts: dict[str, list[Counts]]) -> None:
    axis, points = AXES[name], counts[name]
    operators = [point[OPERATORS] for point in points]
    assert more_than(axis.operators, operators) == 0, f"{operators} operators over {name}"
    wrong = {
        function: values
        for function in set().union(*points) - {OPERATORS}
        if more_than(axis.bytes + (function in axis.more), values := [point[function] for point in points])
    }
    assert not wrong, f"bytes over {name} that are no polynomial of degree {axis.bytes}: {wrong}"


@pytest.mark.slow
@needs_fake_accelerator
def test_only_the_average_reads_the_whole_puzzle_table(counts: dict[str, list[Counts]]) -> None:
    first, *_, last = counts["puzzles"]
    grown = {function: last[function] - first[function] for function in last if last[function] != first[function]}
    more_rows = 2 * 1001
    assert grown == {EMA_UPDATE: 2 * 4 * more_rows * WIDTH}, "the average and the table, float32"
