"""Check, solve and generate Sudokus, and recognise puzzles that are symmetries of one another.

Boards are flat uint8 arrays of S cells, row by row, with 0 for a blank. The solver keeps for each
digit the set of cells that may still hold it. The set is one Python integer with a bit for each
cell, so that a step of deduction treats the whole board at once.
"""
# N = boards, L = side of a board, S = cells of a board, T = geometric symmetries of a board

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np

from dataset.augment import (
    Box,
    cell_sources,
    column_orders,
    draw_symmetries,
    num_column_orders,
    num_row_orders,
    row_orders,
)
from utils.errors import UserError

# The digits of the largest board, as text. Digits above 9 are letters, read in both cases.
DIGITS = "123456789ABCDEFG"

# The largest share of cells that are clues in generated puzzles. The fewest clues are those of a
# minimal puzzle.
MAX_CLUES = 2 / 3
# The smallest share of cells that are clues in generated puzzles of larger sides than 9. Singles
# alone need about a third of the cells at side 12, and 0.37 at side 16.
MIN_CLUES = 0.4
# For larger sides than this, a search for a second solution may take minutes.
LARGEST_SEARCHED_SIDE = 9
# The generator gives up after this many symmetries of earlier puzzles in a row, because it has
# probably found all classes.
MAX_DUPLICATES = 3000


@dataclass(frozen=True)
class _Board:
    """Sets of cells as bits of integers."""

    units: tuple[int, ...]  # the rows, columns and boxes
    peers: tuple[int, ...]  # for each cell the cells that may not repeat its digit
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
    units = tuple(
        sum(1 << int(cell) for cell in np.flatnonzero(ids == unit)) for ids in unit_ids(box) for unit in range(box.side)
    )
    peers = []
    for cell in range(box.num_cells):
        bit = 1 << cell
        seen = 0
        for unit in units:
            if unit & bit:
                seen |= unit
        peers.append(seen & ~bit)
    return _Board(units, tuple(peers), (1 << box.num_cells) - 1)


def valid_solutions(boards_NS: np.ndarray, box: Box) -> np.ndarray:
    """Return whether each row, column and box of the boards holds each digit once, (N,) bool."""
    bits_NS = np.left_shift(1, boards_NS.astype(np.int32), dtype=np.int32)
    full = (1 << (box.side + 1)) - 2
    valid_N = np.ones(len(boards_NS), dtype=bool)
    for ids_S in unit_ids(box):
        by_unit = bits_NS[:, np.argsort(ids_S, kind="stable")].reshape(-1, box.side, box.side)
        valid_N &= (np.bitwise_or.reduce(by_unit, axis=2) == full).all(axis=1)
    return valid_N


def _reach(cells: int, peers: tuple[int, ...]) -> int:
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

    Returns:
        The settled cells; -1 for a contradiction.
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

    Args:
        rng: draws the order in which digits are tried; None: ascending order.
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
    board_S = np.zeros(box.num_cells, dtype=np.uint8)
    for digit, cells in enumerate(solution, start=1):
        for cell in range(box.num_cells):
            if cells >> cell & 1:
                board_S[cell] = digit
    return board_S


def solve(puzzle_S: np.ndarray, box: Box) -> np.ndarray | None:
    """Return a solution (S,) uint8 of the puzzle (S,); None if there is none."""
    solution = next(_search(_candidates(puzzle_S, box), 0, _board(box)), None)
    return None if solution is None else _to_array(solution, box)


def count_solutions(puzzle_S: np.ndarray, box: Box, limit: int = 2) -> int:
    """Return the number of solutions of the puzzle (S,), but at most `limit`."""
    solutions = _search(_candidates(puzzle_S, box), 0, _board(box))
    return sum(1 for _ in zip(range(limit), solutions, strict=False))


def random_solution(box: Box, rng: np.random.Generator) -> np.ndarray:
    """Return a random complete board (S,) uint8."""
    empty_S = np.zeros(box.num_cells, dtype=np.uint8)
    solution = next(_search(_candidates(empty_S, box), 0, _board(box), rng))
    # The search fills cells in a fixed order. A random symmetry hides that order.
    return draw_symmetries(rng, 1, box).apply(_to_array(solution, box)[None])[0]


def _random_puzzle(solution_S: np.ndarray, box: Box, rng: np.random.Generator) -> np.ndarray:
    """Return a random puzzle (S,) whose only solution is `solution_S`.

    Each clue is removed, in random order, unless the solution would no longer be unique. The result
    is a minimal puzzle: a clue that was needed is needed after further removals as well. Then clues
    are put back in random order, up to a number that is drawn uniformly.
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

    Such a puzzle has one solution by construction. Clues are removed in random order, down to a
    number that is drawn uniformly. A clue stays if singles would no longer derive the board. More
    clues never derive less, so several clues are tried at once.
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

    No two puzzles have the same `symmetry_class`. Up to side 9 the number of clues varies from
    minimal puzzles to easy ones. Puzzles of larger sides need no guesses: naked and hidden singles
    derive the whole board. If there are few classes (4x4 puzzles have about 4,000), rare classes
    come late: shuffle the puzzles before splitting them.

    Raises:
        UserError: There seem to be fewer than `num` classes.
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
    """Return the `cell_sources` of all symmetries that keep the digits, (T, S).

    There are 128 of them for 2x2 boxes, and 3,456 for 2x3 boxes.
    """
    num_each = num_row_orders(box), num_column_orders(box), 2 if box.is_square else 1
    rows_T, columns_T, transposed_T = np.indices(num_each).reshape(3, -1)
    return cell_sources(row_orders(rows_T, box), column_orders(columns_T, box), transposed_T.astype(bool))


def _canonical_form(puzzle_S: np.ndarray, box: Box) -> bytes:
    """Return the smallest of all symmetries of the puzzle, compared as bytes.

    In each of them the digits are numbered in the order in which they first appear.
    """
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


def _refined_colours(puzzle_S: np.ndarray, box: Box, num_rounds: int = 6) -> bytes:
    """Return a hash of the puzzle that all its symmetries share, by colour refinement.

    In each round a cell takes in the colours of all cells of its row, column, box, band, stack and
    digit. Only sums enter, and symmetries only permute their terms. Puzzles that are not symmetric
    rarely share a hash.
    """
    rows_S, columns_S, boxes_S = unit_ids(box)
    # Rows and columns have different salts only if transposition is not a symmetry.
    other = 0 if box.is_square else 1
    groups = [  # the group of each cell, and the salt of its kind
        (rows_S, 1),
        (columns_S, 1 + other),
        (rows_S // box.rows, 3),
        (columns_S // box.columns, 3 + other),
        (boxes_S, 5),
        (puzzle_S.astype(np.intp), 6),
    ]
    colours_S = (puzzle_S > 0).astype(np.uint64)
    for _ in range(num_rounds):
        scattered_S = _mix(colours_S, 7)
        refined_S = _mix(colours_S, 8)
        for ids_S, salt in groups:
            sums = np.zeros(box.num_cells, dtype=np.uint64)
            np.add.at(sums, ids_S, scattered_S)
            refined_S += _mix(sums[ids_S], salt)
        colours_S = refined_S
    return hashlib.blake2b(np.sort(colours_S).tobytes(), digest_size=16).digest()


def symmetry_class(puzzle_S: np.ndarray, box: Box) -> bytes:
    """Return a key that all symmetries of a puzzle (S,) share.

    For sides 4 and 6 the key is exact (a canonical form). Side 9 has 3,359,232 geometric
    symmetries, so the key of larger sides is a hash of invariants. Different keys then prove that
    two puzzles are not symmetries of one another, and equal keys almost always mean that they are.
    """
    return _canonical_form(puzzle_S, box) if box.side <= 6 else _refined_colours(puzzle_S, box)
