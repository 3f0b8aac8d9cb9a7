"""Pack samples into rows of a fixed number of tokens: two ways, and the arrays of a packed row.

`published_steps` is the packer of the published code, which takes samples in their order. `Shapes`
fills rows far better, because it may choose among all samples of an epoch.
"""
# N = samples, L = a length, C = tokens of a row (its capacity), K = sequences of a row, T = tokens

import bisect
import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from utils.batch import IGNORE_LABEL


def published_steps(
    lengths_N: np.ndarray, capacity: int, num_rows: int, *, drop_last_batch: bool
) -> Iterator[list[np.ndarray]]:
    """Yield, for each step of an epoch, the samples of each of `num_rows` rows.

    A step takes as many of the next samples as a bisection finds to fit. They fit if no row is
    above `capacity` when the longest sample goes first, and each goes to the least loaded row. The
    epoch ends with a step that has fewer samples than rows, which is not given out. With
    `drop_last_batch` the step that takes the last sample is left out, too.
    """
    ends = np.cumsum(lengths_N, dtype=np.int64)
    lengths_N = np.asarray(lengths_N, np.int64)
    first, num = 0, len(lengths_N)
    while first < num:
        used = int(ends[first - 1]) if first else 0
        # The window ends with the sample at which the running length reaches a full step.
        size = min(int(np.searchsorted(ends, used + capacity * num_rows)), num - 1) + 1 - first
        window = lengths_N[first : first + size]
        num_fit, too_many = 1, size + 1
        while too_many - num_fit > 1:
            middle = (num_fit + too_many) // 2
            if ends[first + middle - 1] - used <= capacity * num_rows and _fits(window[:middle], capacity, num_rows):
                num_fit = middle
            else:
                too_many = middle
        first += num_fit
        if num_fit < num_rows or (drop_last_batch and first >= num):
            return
        yield [row + (first - num_fit) for row in _hand_out(window[:num_fit], num_rows)]


def _fits(window: np.ndarray, capacity: int, num_rows: int) -> bool:
    if num_rows == 1:
        return True  # the caller has compared the sum
    loads = [0] * num_rows
    for length in np.sort(window)[::-1].tolist():
        load = loads[0] + length
        if load > capacity:
            return False
        heapq.heapreplace(loads, load)
    return True


def _hand_out(window: np.ndarray, num_rows: int) -> list[np.ndarray]:
    """Give each sample, the longest first, to the least loaded row. Return the samples of each row.

    Which of several least loaded rows is taken follows from a binary heap, so its moves are those
    of the published code: heapq breaks ties in another way.
    """
    # Of equal lengths the later sample comes first.
    order = np.argsort(window, kind="stable")[::-1]
    if num_rows == 1:
        return [order]
    loads, rows = [0] * num_rows, list(range(num_rows))
    taken: list[list[int]] = [[] for _ in range(num_rows)]
    for sample, length in zip(order.tolist(), window[order].tolist(), strict=True):
        load, row = loads[0] + length, rows[0]
        taken[row].append(sample)
        at = 0
        while (child := 2 * at + 1) < num_rows:
            if child + 1 < num_rows and loads[child + 1] < loads[child]:
                child += 1
            if loads[child] >= load:
                break
            loads[at], rows[at] = loads[child], rows[child]
            at = child
        loads[at], rows[at] = load, row
    return [np.array(row, np.int64) for row in taken]


class _Group(NamedTuple):
    """A number of rows that hold the same lengths, the longest first."""

    num: int
    lengths: tuple[int, ...]


class Shapes:
    """The rows of an epoch, as lengths: which lengths share a row, and how often.

    Best fit, the longest first: each sample goes into the fullest row that has room. Samples of one
    length are placed together, so a million samples take a fraction of a second. Only the number of
    samples of each length counts. Therefore an epoch in any order has as many rows as another.
    """

    def __init__(self, lengths_N: np.ndarray, capacity: int) -> None:
        groups = _best_fit(np.bincount(lengths_N), capacity)
        self._row_ends = np.cumsum(np.repeat([len(lengths) for _, lengths in groups], [num for num, _ in groups]))
        self.num_rows = len(self._row_ends)
        lengths_of_slots = np.concatenate([np.tile(lengths, num) for num, lengths in groups])
        # The slot of each sample, for samples sorted by length.
        self._slots_N = np.argsort(lengths_of_slots, kind="stable")
        self._lengths_N = lengths_N

    def fill(self, order_N: np.ndarray) -> np.ndarray:
        """Return the sample in each place of all rows, (N,), row after row."""
        filled_N = np.empty(len(order_N), np.int64)
        filled_N[self._slots_N] = order_N[np.argsort(self._lengths_N[order_N], kind="stable")]
        return filled_N

    def row(self, number: int) -> slice:
        """Return the places of a row in the result of `fill`."""
        return slice(int(self._row_ends[number - 1]) if number else 0, int(self._row_ends[number]))


def _best_fit(num_of_length: np.ndarray, capacity: int) -> list[_Group]:
    """Return groups of rows that hold so many samples of each length."""
    open_groups: dict[int, list[_Group]] = {}  # by the room that is left
    rooms: list[int] = []  # the keys, sorted
    full: list[_Group] = []

    def put_back(group: _Group, room: int) -> None:
        if room == 0:
            full.append(group)
        elif room in open_groups:
            open_groups[room].append(group)
        else:
            bisect.insort(rooms, room)
            open_groups[room] = [group]

    for length in np.flatnonzero(num_of_length)[::-1].tolist():
        left = int(num_of_length[length])
        while left:
            at = bisect.bisect_left(rooms, length)
            room, group = capacity, _Group(left, ())
            if at < len(rooms):
                room = rooms[at]
                group = open_groups[room].pop()
                if not open_groups[room]:
                    del open_groups[room], rooms[at]
            available, copies = group.num, room // length
            if whole := min(available, left // copies):
                put_back(_Group(whole, (*group.lengths, *[length] * copies)), room - copies * length)
                available, left = available - whole, left - whole * copies
            if available and 0 < left < copies:
                put_back(_Group(1, (*group.lengths, *[length] * left)), room - left * length)
                available, left = available - 1, 0
            if group.lengths and available:
                put_back(group._replace(num=available), room)
    return full + [group for groups in open_groups.values() for group in groups]


@dataclass(frozen=True)
class PackedRow:
    """The tokens of one rank at one step: sequences one behind the other, then padding; int32."""

    inputs: np.ndarray  # (C,), 0 in the padding
    labels: np.ndarray  # (C,), what each place must predict; -100 where nothing counts
    position_ids: np.ndarray  # (C,), from 0 in each sequence; 0 in the padding
    prefix_lens: np.ndarray  # (K,), the tokens of each sequence that may see one another, P
    response_lens: np.ndarray  # (K,), the tokens behind them, R - 1, perhaps 0
    tasks: np.ndarray  # (K,), the number of each sequence's task


def packed_row(tokens_T: np.ndarray, places_K5: np.ndarray, num_tokens: int, *, target_only: bool) -> PackedRow:
    """Return the packed row of some samples.

    Args:
        places_K5: where the samples lie in the tokens (`Samples.take`).
        num_tokens: the length of the row. A row with longer samples in it is as long as they are.
        target_only: only responses are labelled; otherwise all tokens but the first are.
    """
    starts_K, prefix_K, response_starts_K, response_K, tasks_K = places_K5.T
    lens_K = prefix_K + response_K - 1
    ends_K = np.cumsum(lens_K)
    total = int(ends_K[-1]) if len(ends_K) else 0
    positions = np.arange(total) - np.repeat(ends_K - lens_K, lens_K)
    prefixes = np.repeat(prefix_K, lens_K)
    # The place in tokens.npy of each input, and of the token that follows it.
    from_instruction = np.repeat(starts_K, lens_K) + positions
    from_response = np.repeat(response_starts_K, lens_K) + positions - prefixes
    labels = tokens_T[np.where(positions + 1 < prefixes, from_instruction, from_response) + 1].astype(np.int32)
    if target_only:
        labels[positions + 1 < prefixes] = IGNORE_LABEL

    def padded(values: np.ndarray, fill: int) -> np.ndarray:
        row = np.full(max(num_tokens, total), fill, np.int32)
        row[:total] = values
        return row

    return PackedRow(
        inputs=padded(tokens_T[np.where(positions < prefixes, from_instruction, from_response)], 0),
        labels=padded(labels, IGNORE_LABEL),
        position_ids=padded(positions, 0),
        prefix_lens=prefix_K.astype(np.int32),
        response_lens=(response_K - 1).astype(np.int32),
        tasks=tasks_K.astype(np.int32),
    )
