"""Check, solve and generate Sudokus, and recognise puzzles that are symmetries of one another.

Boards are flat uint8 arrays of S cells, row by row, with 0 for a blank. The solver keeps for each
digit the set of cells that may still hold it. The set is one Python integer with a bit for each
cell, so that a step of deduction treats the whole board at once.
"""
# N = boards, L = side of a board, S = cells of a board, T = geometric symmetries of a board,
# M = boards of a search; B, R, C, K = bands, rows of a band, stacks, columns of a stack

import hashlib
from collections.abc import Iterator
from functools import cache, reduce
from operator import or_
from typing import NamedTuple

import numpy as np

from dataset.augment import (
    Box,
    cell_sources,
    draw_symmetries,
    num_row_orders,
    row_orders,
)
from utils.errors import UserError

# The digits of the largest board, as text. Digits above 9 are letters, read in both cases.
DIGITS = "123456789ABCDEFG"

# The largest share of clues in generated puzzles, and the smallest for sides above 9.
# Singles alone need about a third of the cells at side 12, and 0.37 at side 16.
MAX_CLUES, MIN_CLUES = 2 / 3, 0.4
# For larger sides than this, a search for a second solution may take minutes.
LARGEST_SEARCHED_SIDE = 9
# The number of boards that `count_solutions` searches at a time. They fit into a core's cache.
_SEARCHED_AT_ONCE = 2048
# The generator gives up after this many symmetries of earlier puzzles in a row, because it has
# probably found all classes.
MAX_DUPLICATES = 3000


class _Board(NamedTuple):
    """Sets of cells as bits of integers."""

    units: list[int]  # the rows, columns and boxes
    peers: list[int]  # for each cell the cells that may not repeat its digit
    all_cells: int


def digits_in_words(side: int) -> str:
    """Return the digits of a board for messages: "1 to 9 and A to G" for side 16."""
    return f"1 to {side}" if side <= 9 else f"1 to 9 and A to {DIGITS[side - 1]}"


def unit_ids(box: Box) -> np.ndarray:
    """Return the row, the column and the box of each cell, each counted from 0, (3, S)."""
    row, column = np.divmod(np.arange(box.num_cells), box.side)
    # A band holds box.rows boxes side by side, because a row has rows * columns cells and a box is
    # `columns` wide.
    return np.stack([row, column, row // box.rows * box.rows + column // box.columns])


@cache
def _board(box: Box) -> _Board:
    units = [
        sum(1 << int(cell) for cell in np.flatnonzero(ids == unit)) for ids in unit_ids(box) for unit in range(box.side)
    ]
    bits = [1 << cell for cell in range(box.num_cells)]
    peers = [reduce(or_, (unit for unit in units if unit & bit)) & ~bit for bit in bits]
    return _Board(units, peers, (1 << box.num_cells) - 1)


def valid_solutions(boards_NS: np.ndarray, box: Box) -> np.ndarray:
    """Return whether each row, column and box of the boards holds each digit once, (N,) bool."""
    bits_NS = np.left_shift(1, boards_NS.astype(np.int32), dtype=np.int32)
    full = (1 << (box.side + 1)) - 2
    valid_N = np.ones(len(boards_NS), dtype=bool)
    for ids_S in unit_ids(box):
        by_unit = bits_NS[:, np.argsort(ids_S, kind="stable")].reshape(-1, box.side, box.side)
        valid_N &= (np.bitwise_or.reduce(by_unit, axis=2) == full).all(axis=1)
    return valid_N


def _reach(cells: int, peers: list[int]) -> int:
    """Return the union of the peers of all `cells`."""
    reach = 0
    while cells:
        lowest = cells & -cells
        reach |= peers[lowest.bit_length() - 1]
        cells ^= lowest
    return reach


def _candidates(puzzle_S: np.ndarray, box: Box) -> list[int]:
    """Return for each digit the cells that may hold it, judged by the clues alone."""
    board = _board(box)
    placed = [0] * (box.side + 1)
    for cell, digit in enumerate(puzzle_S.tolist()):
        placed[digit] |= 1 << cell
    blanks = placed[0]
    # A clue is no candidate if one of its peers is an equal clue: such a puzzle has no solution.
    return [(blanks | cells) & ~_reach(cells, board.peers) for cells in placed[1:]]


def _deduce(candidates: list[int], settled: int, board: _Board) -> int:
    """Remove in place the candidates that naked and hidden singles rule out.

    Return the settled cells, or -1 for a contradiction.
    """
    while True:
        once = twice = 0
        for cells in candidates:
            twice |= once & cells
            once |= cells
        if once != board.all_cells:
            return -1
        singles = once & ~twice & ~settled
        if singles:
            for digit, cells in enumerate(candidates):
                placed = cells & singles
                if placed:
                    reach = _reach(placed, board.peers)
                    if reach & placed:
                        return -1
                    candidates[digit] = cells & ~reach
            settled |= singles
            continue

        progress = False
        for digit, cells in enumerate(candidates):
            for unit in board.units:
                spots = cells & unit
                if not spots:
                    return -1
                if not spots & (spots - 1) and not spots & settled:
                    for other in range(len(candidates)):
                        if other != digit:
                            candidates[other] &= ~spots
                    progress = True
        if not progress:
            return settled


def _most_constrained(candidates: list[int], settled: int) -> int:
    """Return the first of the open cells with the fewest candidates, as a bit."""
    # at_least[k]: the open cells with k candidates or more
    at_least = [~settled] + [0] * len(candidates)
    for cells in candidates:
        for k in range(len(candidates), 0, -1):
            at_least[k] |= at_least[k - 1] & cells
    for k in range(2, len(candidates)):
        if exactly := at_least[k] & ~at_least[k + 1]:
            return exactly & -exactly
    return at_least[-1] & -at_least[-1]


def _search(
    candidates: list[int], settled: int, board: _Board, rng: np.random.Generator | None = None
) -> Iterator[list[int]]:
    """Yield each solution, as the set of cells of each digit. Changes `candidates`.

    `rng` draws the order in which digits are tried. Without it the order is ascending.
    """
    settled = _deduce(candidates, settled, board)
    if settled < 0:
        return
    if settled == board.all_cells:
        yield candidates
        return
    cell = _most_constrained(candidates, settled)
    digits = [digit for digit, cells in enumerate(candidates) if cells & cell]
    if rng is not None:
        rng.shuffle(digits)
    for digit in digits:
        branch = [cells if other == digit else cells & ~cell for other, cells in enumerate(candidates)]
        yield from _search(branch, settled, board, rng)


def _to_array(solution: list[int], box: Box) -> np.ndarray:
    is_digit_LS = [[cells >> cell & 1 for cell in range(box.num_cells)] for cells in solution]
    return (1 + np.argmax(is_digit_LS, axis=0)).astype(np.uint8)


def count_solutions(puzzles_NS: np.ndarray, box: Box) -> np.ndarray:
    """Return how many solutions each puzzle has, but at most 2, (N,) int."""
    return _search_all(puzzles_NS, box, most_rounds=2)[0]  # with two rounds a guess it is fastest


def count_guesses(puzzles_NS: np.ndarray, box: Box) -> np.ndarray:
    """Return how often a search of all solutions guesses, also in wrong branches, (N,) int."""
    return _search_all(puzzles_NS, box, most_rounds=box.num_cells * box.side)[1]


def _search_all(puzzles_NS: np.ndarray, box: Box, *, most_rounds: int) -> tuple[np.ndarray, np.ndarray]:
    """Return how many solutions each puzzle has, but at most 2, and how many guesses that took.

    Many boards are searched at once. One search costs more than `_search`, a thousand much less.
    Candidates are removed up to most_rounds times before a guess.
    """
    full = (1 << box.side) - 1
    # Each cell holds its candidates, a bit for each digit.
    boards_SM = np.array([full, *(1 << digit for digit in range(box.side))], np.uint16)[puzzles_NS].T
    puzzle_M = np.arange(len(puzzles_NS))
    num_N, guesses_N = np.zeros(len(puzzles_NS), int), np.zeros(len(puzzles_NS), int)
    while len(puzzle_M):
        # The boards that were guessed last come first, so that few boards wait.
        part_SM, of_M = boards_SM[:, -_SEARCHED_AT_ONCE:].copy(), puzzle_M[-_SEARCHED_AT_ONCE:]
        boards_SM, puzzle_M = boards_SM[:, :-_SEARCHED_AT_ONCE], puzzle_M[:-_SEARCHED_AT_ONCE]
        cells_BRCKM = part_SM.reshape(box.columns, box.rows, box.rows, box.columns, -1)
        for _ in range(most_rounds):
            before_SM = part_SM.copy() if most_rounds > 2 else None
            possible_M = _narrow(cells_BRCKM, full) & _narrow(cells_BRCKM.transpose(2, 3, 0, 1, 4), full)
            if before_SM is not None and np.array_equal(part_SM, before_SM):
                break
        left_SM = np.bitwise_count(part_SM)
        going_M = possible_M & left_SM.all(axis=0) & (num_N[of_M] < 2)
        part_SM, of_M, left_SM = part_SM[:, going_M], of_M[going_M], left_SM[:, going_M]
        # The open cell with the fewest candidates. For a cell that is settled, 1 - 2 becomes 255.
        cell_M = (left_SM - np.uint8(2)).argmin(axis=0)
        done_M = left_SM[cell_M, np.arange(len(cell_M))] == 1
        digits_SM = np.bitwise_count(part_SM[:, done_M] - np.uint16(1)) + np.uint8(1)
        np.add.at(num_N, of_M[done_M][valid_solutions(digits_SM.T, box)], 1)
        part_SM, of_M, cell_M = part_SM[:, ~done_M], of_M[~done_M], cell_M[~done_M]
        np.add.at(guesses_N, of_M, 1)
        at = cell_M, np.arange(len(cell_M))
        # Either the cell holds its lowest candidate, or it does not.
        guess_M = part_SM[at] & -part_SM[at]
        others_SM = part_SM.copy()
        others_SM[at] ^= guess_M
        part_SM[at] = guess_M
        boards_SM = np.concatenate([boards_SM, others_SM, part_SM], axis=1)
        puzzle_M = np.concatenate([puzzle_M, of_M, of_M])
    return np.minimum(num_N, 2), guesses_N


def dig(
    solutions_NS: np.ndarray,
    box: Box,
    rng: np.random.Generator,
    num_clues: int | None = None,
    start_NS: np.ndarray | None = None,
) -> np.ndarray:
    """Return for each solution a random puzzle, (N, S), that has no other solution.

    Clues are removed in random order as long as one solution is left, from all boards at once. Then
    some are put back, in random order, until there are num_clues.

    Args:
        start_NS: the boards from which clues are removed; None: the solutions.
    """
    puzzles_NS, rows_N = (solutions_NS if start_NS is None else start_NS).copy(), np.arange(len(solutions_NS))
    order_NS = rng.permuted(np.tile(np.arange(box.num_cells), (len(rows_N), 1)), axis=1)
    for cell_N in order_NS.T:
        rows = np.flatnonzero(puzzles_NS[rows_N, cell_N])
        tried_NS = puzzles_NS[rows]
        tried_NS[np.arange(len(rows)), cell_N[rows]] = 0
        is_needless = count_solutions(tried_NS, box) == 1
        puzzles_NS[rows[is_needless]] = tried_NS[is_needless]
    return puzzles_NS if num_clues is None else with_clues(puzzles_NS, solutions_NS, num_clues, rng)


def with_clues(
    puzzles_NS: np.ndarray, solutions_NS: np.ndarray, num_clues: int | np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Put clues back in random order until each puzzle has num_clues, or (N, 1) many, (N, S)."""
    # Clues come first, and blanks in random order.
    rank_NS = np.where(puzzles_NS > 0, -1.0, rng.random(puzzles_NS.shape)).argsort(axis=1).argsort(axis=1)
    return np.where((rank_NS < num_clues) | (puzzles_NS > 0), solutions_NS, puzzles_NS)


def _narrow(cells_BRCKM: np.ndarray, full: int) -> np.ndarray:
    """Remove candidates in place by what the rows and boxes say.

    Return whether all digits, `full`, still have a place in every row and box, and none has two,
    (M,). A piece is what a row and a box share. With rows and columns swapped, the columns are
    treated as the rows.
    """
    single = cells_BRCKM * (cells_BRCKM & (cells_BRCKM - np.uint16(1)) == 0)
    placed = np.bitwise_or.reduce(single, axis=3, keepdims=True)
    in_box, in_row = (np.bitwise_or.reduce(placed, axis=axis, keepdims=True) for axis in (1, 2))
    # The bits of different digits add up to their union.
    total = np.add.reduce(single, axis=3, keepdims=True, dtype=np.uint16)
    twice_in_box, twice_in_row = (
        np.add.reduce(total, axis=axis, keepdims=True, dtype=np.uint16) ^ union
        for axis, union in ((1, in_box), (2, in_row))
    )
    cells_BRCKM &= ~(in_box | in_row) | single
    piece, repeated = _some_and_several(cells_BRCKM, axis=3)
    of_box, several_in_box = _some_and_several(piece, axis=1)
    of_row, several_in_row = _some_and_several(piece, axis=2)
    # A digit that a row has in one piece alone lies there, and nowhere else in the box; and so the
    # other way round.
    box_alone, row_alone = piece & ~several_in_box, piece & ~several_in_row
    gone = np.bitwise_or.reduce(row_alone, axis=1, keepdims=True) & ~row_alone
    gone |= np.bitwise_or.reduce(box_alone, axis=2, keepdims=True) & ~box_alone
    cells_BRCKM &= ~gone
    hidden = cells_BRCKM & (box_alone | row_alone) & ~repeated
    cells_BRCKM &= hidden | -(hidden == 0).astype(np.uint16)
    right_in_box, right_in_row = (of_box == full) & (twice_in_box == 0), (of_row == full) & (twice_in_row == 0)
    return right_in_box.all(axis=(0, 1, 2, 3)) & right_in_row.all(axis=(0, 1, 2, 3))


def _some_and_several(parts: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the digits that any part along the axis has, and those that several parts have."""
    first, *others = np.split(parts, parts.shape[axis], axis)
    some, several = first.copy(), np.zeros_like(first)
    for part in others:
        several |= some & part
        some |= part
    return some, several


def random_solution(box: Box, rng: np.random.Generator) -> np.ndarray:
    """Return a random complete board (S,) uint8."""
    empty_S = np.zeros(box.num_cells, dtype=np.uint8)
    solution = next(_search(_candidates(empty_S, box), 0, _board(box), rng))
    # The search fills cells in a fixed order. A random symmetry hides that order.
    return draw_symmetries(rng, 1, box).apply(_to_array(solution, box)[None])[0]


def _random_puzzle(solution_S: np.ndarray, box: Box, rng: np.random.Generator) -> np.ndarray:
    """Return a random puzzle (S,) whose only solution is `solution_S`.

    Clues are removed, in random order, down to a minimal puzzle. Then clues are put back in random
    order, up to a number that is drawn uniformly.
    """
    board = _board(box)
    puzzle_S = solution_S.copy()
    removed = []
    for cell in rng.permutation(box.num_cells).tolist():
        digit = int(puzzle_S[cell])
        puzzle_S[cell] = 0
        # The other clues stay, so a second solution would have another digit in this cell.
        candidates = _candidates(puzzle_S, box)
        candidates[digit - 1] &= ~(1 << cell)
        if next(_search(candidates, 0, board), None) is None:
            removed.append(cell)
        else:
            puzzle_S[cell] = digit

    fewest = box.num_cells - len(removed)
    num_clues = int(rng.integers(fewest, max(fewest, round(MAX_CLUES * box.num_cells)) + 1))
    restored = rng.permutation(removed)[: num_clues - fewest]
    puzzle_S[restored] = solution_S[restored]
    return puzzle_S


def _random_puzzle_by_singles(solution_S: np.ndarray, box: Box, rng: np.random.Generator) -> np.ndarray:
    """Return a random puzzle (S,) that naked and hidden singles alone turn into `solution_S`.

    Clues are removed in random order, down to a number that is drawn uniformly. A clue stays if
    singles would no longer derive the board. More clues never derive less, so several clues are
    tried at once.
    """
    board = _board(box)
    puzzle_S = solution_S.copy()
    order = rng.permutation(box.num_cells)
    num_clues = int(rng.integers(round(MIN_CLUES * box.num_cells), round(MAX_CLUES * box.num_cells) + 1))
    start, at_once = 0, box.num_cells // 4
    while start < len(order) and (excess := int(np.count_nonzero(puzzle_S)) - num_clues) > 0:
        tried = order[start : start + min(at_once, excess)]
        without_S = puzzle_S.copy()
        without_S[tried] = 0
        if _deduce(_candidates(without_S, box), 0, board) == board.all_cells:
            puzzle_S = without_S
            at_once *= 2
        elif len(tried) > 1:
            at_once = len(tried) // 2
            continue
        start += len(tried)
    return puzzle_S


def generate(num: int, box: Box, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield `num` puzzles (S,) uint8 that have one solution, each with its solution (S,).

    No two puzzles have the same `symmetry_class`. If there are few classes (4x4 puzzles have about
    4,000), rare classes come late: shuffle the puzzles before splitting them.
    """
    random_puzzle = _random_puzzle if box.side <= LARGEST_SEARCHED_SIDE else _random_puzzle_by_singles
    seen: set[bytes] = set()
    duplicates = 0
    while len(seen) < num:
        solution_S = random_solution(box, rng)
        puzzle_S = random_puzzle(solution_S, box, rng)
        key = symmetry_class(puzzle_S, box)
        if key in seen:
            duplicates += 1
            if duplicates == MAX_DUPLICATES:
                raise UserError(
                    f"found only {len(seen):,} puzzles with boxes of {box} that are no symmetries of one another, "
                    f"and {num:,} are needed; ask for fewer or take larger boxes"
                )
            continue
        duplicates = 0
        seen.add(key)
        yield puzzle_S, solution_S


@cache
def _geometric_symmetries(box: Box) -> np.ndarray:
    """Return the `cell_sources` of all symmetries that keep the digits, (T, S)."""
    num_each = num_row_orders(box), num_row_orders(box.transposed), 2 if box.is_square else 1
    rows_T, columns_T, transposed_T = np.indices(num_each).reshape(3, -1)
    return cell_sources(row_orders(rows_T, box), row_orders(columns_T, box.transposed), transposed_T.astype(bool))


def _canonical_form(puzzle_S: np.ndarray, box: Box) -> bytes:
    """Return the smallest symmetry of the puzzle. Digits are numbered as they first appear."""
    boards_TS = puzzle_S[_geometric_symmetries(box)]
    first_TL = np.full((len(boards_TS), box.side), box.num_cells)
    for digit in range(1, box.side + 1):
        is_digit_TS = boards_TS == digit
        first_TL[:, digit - 1] = np.where(is_digit_TS.any(axis=1), is_digit_TS.argmax(axis=1), box.num_cells)
    names_TD = np.zeros((len(boards_TS), box.side + 1), dtype=np.uint8)
    names_TD[:, 1:] = first_TL.argsort(axis=1).argsort(axis=1) + 1
    return min(map(bytes, np.take_along_axis(names_TD, boards_TS, axis=1)))


def _mix(colours: np.ndarray, salt: int) -> np.ndarray:
    """Scatter uint64 values by a bijection (splitmix64's shifts, multiplications that wrap)."""
    x = colours + np.uint64(salt * 0x9E3779B97F4A7C15 % 2**64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _refined_colours(puzzles_NS: np.ndarray, box: Box, num_rounds: int = 3) -> np.ndarray:
    """Return a colour for each cell, (N, S) uint64, that moves with the cell under symmetries.

    In each round a cell takes in the sums of the colours of its row, column, box, band, stack and
    digit. Symmetries only permute the terms of sums.
    """
    rows_S, columns_S, boxes_S = unit_ids(box)
    # Rows and columns have different salts only if transposition is not a symmetry.
    other = 0 if box.is_square else 1
    groups = [  # the group of each cell, the cells group by group, and the salt of this kind
        (ids_S, np.argsort(ids_S, kind="stable").reshape(ids_S.max() + 1, -1), salt)
        for ids_S, salt in (
            (rows_S, 1),
            (columns_S, 1 + other),
            (rows_S // box.rows, 3),
            (columns_S // box.columns, 3 + other),
            (boxes_S, 5),
        )
    ]
    colours_NS = (puzzles_NS > 0).astype(np.uint64)
    for _ in range(num_rounds):
        scattered_NS = _mix(colours_NS, 7)
        colours_NS = _mix(colours_NS, 8)
        for ids_S, cells, salt in groups:
            colours_NS += _mix(scattered_NS[:, cells].sum(axis=2), salt)[:, ids_S]
        sums_ND = _mix(_sums_of_digits(scattered_NS, puzzles_NS, box), 6)
        colours_NS += np.take_along_axis(sums_ND, puzzles_NS.astype(np.intp), axis=1)
    return colours_NS


def _sums_of_digits(values_NS: np.ndarray, boards_NS: np.ndarray, box: Box) -> np.ndarray:
    """Return the sum over the cells of each digit, blanks first, (N, L + 1)."""
    return np.stack([(values_NS * (boards_NS == digit)).sum(axis=1) for digit in range(box.side + 1)], axis=1)


def symmetry_keys(puzzles_NS: np.ndarray, solutions_NS: np.ndarray, box: Box) -> tuple[np.ndarray, np.ndarray]:
    """Return a key of each puzzle, and of each puzzle with its solution, (N,) uint64 each.

    Symmetries of a puzzle share the keys. Other puzzles nearly always have other keys.
    """
    colours_NS = _mix(_refined_colours(puzzles_NS, box, num_rounds=2), 9)
    # All symmetries rename digits, so the digits have no order.
    answers_N = _mix(_sums_of_digits(colours_NS, solutions_NS, box), 10).sum(axis=1)
    return colours_NS.sum(axis=1), answers_N


def symmetry_class(puzzle_S: np.ndarray, box: Box) -> bytes:
    """Return a key that all symmetries of a puzzle (S,) share.

    For sides 4 and 6 the key is exact. Side 9 has 3,359,232 geometric symmetries, so the key of
    larger sides is a hash of invariants, which is almost always different for other puzzles.
    """
    if box.side <= 6:
        return _canonical_form(puzzle_S, box)
    return hashlib.blake2b(np.sort(_refined_colours(puzzle_S[None], box)).tobytes(), digest_size=16).digest()
