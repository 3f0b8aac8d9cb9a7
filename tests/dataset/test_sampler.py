"""The stream of examples is a pure function of (seed, step, slot)."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataset.sampler import Sampler
from dataset.schema import PuzzleSet
from tests.spawn import world_of

# The groups of a set. A group lists the number of examples of each of its puzzles.
Layout = list[list[int]]

LAYOUTS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=4)
DATA = st.lists(LAYOUTS, min_size=1, max_size=3)
SEEDS = st.integers(0, 2**40)


def _set(layout: Layout, name: str = "all") -> PuzzleSet:
    sizes = [size for group in layout for size in group]
    num_examples, num_puzzles = sum(sizes), len(sizes)
    return PuzzleSet(
        name,
        inputs=np.zeros((num_examples, 1), np.uint8),
        labels=np.zeros((num_examples, 1), np.uint8),
        puzzle_identifiers=np.arange(num_puzzles),
        puzzle_indices=np.cumsum([0, *sizes]),
        group_indices=np.cumsum([0, *map(len, layout)]),
    )


def _sampler(data: list[Layout], **options: Any) -> Sampler:
    defaults = {"seed": 0, "epochs": 3, "global_batch_size": 2}
    return Sampler([_set(layout, f"set{i}") for i, layout in enumerate(data)], **(defaults | options))


def _stream(sampler: Sampler) -> list[int]:
    """Return all draws of the run: those of its steps, and the rest that fills no batch."""
    size = sampler.global_batch_size
    steps = range(sampler.first_step, sampler.last_step + 1)
    draws = [int(example) for step in steps for example in sampler.examples(step, slice(0, size))]
    rest = sampler.num_draws - sampler.first_draw - len(draws)
    assert 0 <= rest < size
    return draws + [int(example) for example in sampler.examples(sampler.last_step + 1, slice(0, rest))]


@given(data=DATA, seed=SEEDS, epochs=st.integers(1, 4), size=st.integers(1, 7))
@settings(max_examples=60, deadline=None)
def test_an_epoch_takes_every_group_once_and_one_whole_puzzle_of_it(
    data: list[Layout], seed: int, epochs: int, size: int
) -> None:
    sampler = _sampler(data, seed=seed, epochs=epochs, global_batch_size=size)
    stream = _stream(sampler)
    numbers = itertools.count()
    groups = [[[*itertools.islice(numbers, size)] for size in group] for layout in data for group in layout]
    owner = {
        example: (group, puzzle)
        for group, puzzles in enumerate(groups)
        for puzzle, examples in enumerate(puzzles)
        for example in examples
    }

    position = 0
    for _ in range(epochs):
        visited: list[int] = []
        while len(visited) < len(groups):
            group, puzzle = owner[stream[position]]
            expected = groups[group][puzzle]
            # The examples of a puzzle are neighbours in the stream, in any order.
            assert sorted(stream[position : position + len(expected)]) == expected
            position += len(expected)
            visited.append(group)
        assert sorted(visited) == list(range(len(groups)))
    # A batch may continue in the next epoch. Therefore the end of an epoch drops and adds nothing,
    # and the count is exact although puzzles differ in size.
    assert position == len(stream) == sampler.num_draws
    assert sampler.last_step == sampler.num_draws // size


@given(data=DATA, seed=SEEDS, epochs=st.integers(1, 4), size=st.integers(1, 7), first=st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_the_epoch_of_a_step_counts_draws_within_their_own_epoch(
    data: list[Layout], seed: int, epochs: int, size: int, first: int
) -> None:
    """Puzzles of a group differ in size, and so do epochs. A resumed run has the same epochs."""
    whole = _sampler(data, seed=seed, epochs=epochs, global_batch_size=size)
    share_of_draw: list[float] = []
    for epoch in range(epochs):
        until = _sampler(data, seed=seed, epochs=epoch + 1).num_draws
        share_of_draw += [1 / (until - len(share_of_draw))] * (until - len(share_of_draw))
    resumed = _sampler(
        data, seed=seed, epochs=epochs, global_batch_size=size, first_step=first + 1, first_draw=first * size
    )
    for step in range(first, whole.last_step + 1):
        expected = sum(share_of_draw[: step * size])
        assert whole.epoch(step) == pytest.approx(expected) == resumed.epoch(step)
        assert int(whole.epoch(step)) == whole.epochs_done(step)


@given(data=DATA, seed=SEEDS, size=st.integers(1, 9), num_ranks=st.integers(1, 5), order=st.randoms())
@settings(max_examples=40, deadline=None)
def test_ranks_together_draw_the_global_batch_whatever_was_asked_before(
    data: list[Layout], seed: int, size: int, num_ranks: int, order: Any
) -> None:
    whole = _sampler(data, seed=seed, global_batch_size=size)
    steps = range(1, whole.last_step + 1)
    expected = {step: whole.examples(step, slice(0, size)) for step in steps}
    ranks = [_sampler(data, seed=seed, global_batch_size=size) for _ in range(num_ranks)]
    for step in order.sample([*steps] * 2, 2 * len(steps)):
        assert len(expected[step]) == size
        slots = [world_of(rank, num_ranks).slice_of(size) for rank in range(num_ranks)]
        shares = [sampler.examples(step, each) for sampler, each in zip(ranks, slots, strict=True)]
        np.testing.assert_array_equal(np.concatenate(shares), expected[step])


def test_seeds_and_epochs_give_other_orders_and_groups_draw_evenly() -> None:
    data = [[[1]] * 50]
    streams = [_stream(_sampler(data, seed=seed, epochs=2)) for seed in range(5)]
    epochs = [tuple(stream[i : i + 50]) for stream in streams for i in (0, 50)]
    assert len(set(epochs)) == 10
    assert all(list(epoch) != sorted(epoch) for epoch in epochs)
    counts = Counter(_stream(_sampler([[[1, 1, 1]]], epochs=3000)))
    assert sorted(counts) == [0, 1, 2]
    assert all(900 <= count <= 1100 for count in counts.values())  # expected: 1000, with a standard deviation of 26


@given(data=DATA, seed=SEEDS, old=st.integers(1, 5), new=st.integers(1, 5), share=st.floats(0, 1))
@settings(max_examples=40, deadline=None)
def test_a_resumed_run_with_another_batch_size_continues_at_the_same_draw(
    data: list[Layout], seed: int, old: int, new: int, share: float
) -> None:
    before = _sampler(data, seed=seed, epochs=5, global_batch_size=old)
    done = int(share * before.last_step)
    after = _sampler(
        data,
        seed=seed,
        epochs=5,
        global_batch_size=new,
        first_step=done + 1,
        first_draw=before.draws_before(done + 1),
    )
    consumed = [int(e) for step in range(1, done + 1) for e in before.examples(step, slice(0, old))]
    assert consumed + _stream(after) == _stream(before)
    assert after.draws_before(done + 1) == len(consumed)
    if old == new:
        assert after.last_step == before.last_step


def test_repeat_first_batch_repeats_it_after_a_resume_too() -> None:
    data = [[[2], [2], [3]]]
    plain = _sampler(data, epochs=4)
    repeating = _sampler(data, epochs=4, repeat_first_batch=True)
    assert repeating.last_step == plain.last_step
    resumed = _sampler(data, epochs=4, repeat_first_batch=True, first_step=4, first_draw=6)
    for step in range(1, plain.last_step + 1):
        np.testing.assert_array_equal(repeating.examples(step, slice(0, 2)), plain.examples(1, slice(0, 2)))
        if step >= 4:
            np.testing.assert_array_equal(resumed.examples(step, slice(0, 2)), plain.examples(1, slice(0, 2)))
