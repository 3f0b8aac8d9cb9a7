"""Mazes: their tokens, the path of the label, the judge of other paths, transforms, and generation.

A maze is a square grid without a wall around it, with one start S and one goal G. Steps go up,
down, left and right. The label is the path that breadth-first search from S finds if it
tries the directions in the order down, left, right, up and keeps the first way to each cell.
"""
# N = mazes, L = side, S = cells (L * L), T = 8 transforms, V = mazes whose answer has a
# line from S to G, K = candidates for a new maze

import math
from collections.abc import Iterator

import numpy as np

from dataset.transforms import NUM_TRANSFORMS, transformed

PADDING, WALL, BLANK, START, GOAL, PATH = range(6)
VOCAB_SIZE = 6
# The published characters of the tokens. Padding looks like a blank, but no maze has padding.
SYMBOLS = " # SGo"

# The order in which the search for the label tries the directions: down, left, right, up, each as
# (rows, columns).
_DIRECTIONS = ((1, 0), (0, -1), (0, 1), (-1, 0))

MIN_SIDE, MAX_SIDE = 6, 40
# The number of candidates for new mazes that are drawn at a time, and the range of their shares of
# walls. With this range hard mazes have 37 % walls on average, as the published mazes do.
_CANDIDATES, _LEAST_WALLS, _MOST_WALLS = 8192, 0.32, 0.45


def side_of(num_cells: int) -> int | None:
    """Return the side of a maze with this many cells; None if the number is not a square."""
    side = math.isqrt(num_cells)
    return side if side * side == num_cells else None


def shortest_path(maze_LL: np.ndarray) -> list[tuple[int, int]] | None:
    """Return the cells (row, column) of the label's path, or None if there is no path.

    The path includes S and G. The maze must have one S and one G.
    """
    # Cells are numbered row by row, so a step adds a number. With a wall around the maze no step
    # leaves it.
    padded_LL = np.pad(maze_LL, 1, constant_values=WALL)
    width = len(padded_LL)
    (start,), (goal,) = (np.flatnonzero(padded_LL == token).tolist() for token in (START, GOAL))
    steps = [down * width + right for down, right in _DIRECTIONS]
    is_open = (padded_LL != WALL).ravel().tolist()
    came_from, queue = {start: start}, [start]
    for cell in queue:  # which grows
        for step in steps:
            if is_open[ahead := cell + step] and ahead not in came_from:
                came_from[ahead] = cell
                queue.append(ahead)
    if goal not in came_from:
        return None
    path = [goal]
    while path[-1] != start:
        path.append(came_from[path[-1]])
    return [(cell // width - 1, cell % width - 1) for cell in reversed(path)]


def distances(open_NLL: np.ndarray, from_NLL: np.ndarray) -> np.ndarray:
    """Return the steps over open cells from the nearest cell of `from_NLL`, (N, L, L) int32.

    Cells that can't be reached have -1.
    """
    # The axis of the mazes comes last. A step is then a few operations on long rows, which are
    # faster than many operations on short rows.
    front_LLN, unseen_LLN = (np.ascontiguousarray(a.transpose(1, 2, 0)) for a in (from_NLL, open_NLL & ~from_NLL))
    distance_LLN = np.where(front_LLN, np.int32(0), np.int32(-1))
    steps = 0
    while front_LLN.any():
        steps += 1
        reached_LLN = np.zeros_like(front_LLN)
        reached_LLN[1:] |= front_LLN[:-1]
        reached_LLN[:-1] |= front_LLN[1:]
        reached_LLN[:, 1:] |= front_LLN[:, :-1]
        reached_LLN[:, :-1] |= front_LLN[:, 1:]
        front_LLN = reached_LLN & unseen_LLN
        unseen_LLN &= ~front_LLN
        distance_LLN[front_LLN] = steps
    return distance_LLN.transpose(2, 0, 1)


def judge_paths(inputs_NS: np.ndarray, answers_NS: np.ndarray) -> dict[str, np.ndarray]:
    """Judge answers, of any numbers, to mazes by their paths, which may differ from the labels'.

    Returns:
        (N,) bool for each of these names:
        "path_valid": the answer only turns blanks of the maze into path, and its path cells with S
            and G form one path from S to G. S and G have one neighbour on the path, all other cells
            of the path have two, and no path cell lies elsewhere.
        "path_optimal": the path is valid, and no path is shorter.
    """
    num = len(inputs_NS)
    side = side_of(inputs_NS.shape[1])
    assert side is not None
    mazes_NLL, answers_NLL = (array_NS.reshape(num, side, side) for array_NS in (inputs_NS, answers_NS))
    is_start_NLL, is_goal_NLL = mazes_NLL == START, mazes_NLL == GOAL
    is_maze_N = (is_start_NLL.sum((1, 2)) == 1) & (is_goal_NLL.sum((1, 2)) == 1)
    is_drawn_NLL = (answers_NLL == PATH) & (mazes_NLL == BLANK)
    is_kept_N = ((answers_NLL == mazes_NLL) | is_drawn_NLL).all((1, 2))

    on_path_NLL = is_drawn_NLL | is_start_NLL | is_goal_NLL
    num_beside_NLL = np.zeros(on_path_NLL.shape, np.int8)
    num_beside_NLL[:, 1:] += on_path_NLL[:, :-1]
    num_beside_NLL[:, :-1] += on_path_NLL[:, 1:]
    num_beside_NLL[:, :, 1:] += on_path_NLL[:, :, :-1]
    num_beside_NLL[:, :, :-1] += on_path_NLL[:, :, 1:]
    is_line_N = ((num_beside_NLL == 2 - (is_start_NLL | is_goal_NLL)) | ~on_path_NLL).all((1, 2))
    path_valid_N = is_maze_N & is_kept_N & is_line_N

    # A valid answer so far is a path from S to G, perhaps with separate rings. A search along the
    # path does not reach the rings.
    (rows_V,) = np.nonzero(path_valid_N)
    on_path_VLL, is_start_VLL, is_goal_VLL = (array[rows_V] for array in (on_path_NLL, is_start_NLL, is_goal_NLL))
    path_valid_N[rows_V] = ((distances(on_path_VLL, is_start_VLL) >= 0) == on_path_VLL).all((1, 2))
    least_V = distances(mazes_NLL[rows_V] != WALL, is_start_VLL)[is_goal_VLL]
    path_optimal_N = path_valid_N.copy()
    path_optimal_N[rows_V] &= on_path_VLL.sum((1, 2)) == least_V + 1
    return {"path_valid": path_valid_N, "path_optimal": path_optimal_N}


def allowed_transforms(inputs_NS: np.ndarray, labels_NS: np.ndarray) -> np.ndarray:
    """Return whether a transform turns the label into the transformed maze's label, (N, T) bool.

    From each cell of the label the path takes the first direction, in the order of the search, that
    leads closer to G. A transform only changes the order of the directions. The identity is always
    allowed.
    """
    num, side = len(inputs_NS), math.isqrt(inputs_NS.shape[1])
    # With a wall around the maze no step leaves the grid or comes back on the opposite side.
    padded = side + 2
    inside = (slice(None), slice(1, -1), slice(1, -1))
    inputs_NLL = np.full((num, padded, padded), WALL, np.uint8)
    inputs_NLL[inside] = inputs_NS.reshape(num, side, side)
    is_goal_NLL = inputs_NLL == GOAL
    on_path_NLL = is_goal_NLL | (inputs_NLL == START)
    on_path_NLL[inside] |= labels_NS.reshape(num, side, side) == PATH
    distance_NLL = distances(inputs_NLL != WALL, is_goal_NLL)

    # For each direction: whether a step from a cell leads closer to G, and whether it leads to a
    # cell of the label.
    closer, along = [], []
    for rows, columns in _DIRECTIONS:
        shift = (-rows, -columns)
        ahead_NLL = np.roll(distance_NLL, shift, (1, 2))
        closer.append((ahead_NLL >= 0) & (ahead_NLL == distance_NLL - 1))
        along.append(np.roll(on_path_NLL, shift, (1, 2)))

    distance_to_start_N = np.where(inputs_NLL == START, distance_NLL, -1).max((1, 2))
    is_shortest_N = (distance_to_start_N >= 0) & (on_path_NLL.sum((1, 2)) == distance_to_start_N + 1)
    leaves_NLL = on_path_NLL & ~is_goal_NLL
    allowed_NT = np.ones((num, NUM_TRANSFORMS), bool)
    for transform, order in enumerate(_direction_orders()):
        wrong_NLL = np.zeros_like(on_path_NLL)
        passed_over_NLL = np.zeros_like(on_path_NLL)
        for direction in order:
            wrong_NLL |= closer[direction] & ~passed_over_NLL & ~along[direction]
            passed_over_NLL |= closer[direction]
        if transform:
            allowed_NT[:, transform] = is_shortest_N & ~(wrong_NLL & leaves_NLL).any((1, 2))
    return allowed_NT


def _direction_orders() -> list[list[int]]:
    """Return for each transform the order of directions in a search of the transformed maze."""
    orders = []
    for transform in range(NUM_TRANSFORMS):
        cells = transformed(np.arange(9).reshape(1, 3, 3), transform).ravel().tolist()
        shown = [cells[4 + 3 * rows + columns] for rows, columns in _DIRECTIONS]
        orders.append([_DIRECTIONS.index((cell // 3 - 1, cell % 3 - 1)) for cell in shown])
    return orders


def least_distance(side: int) -> int:
    """Return the least distance from S to G in a hard maze: 109 steps for side 30, as published.

    In percolation, at the share of walls where a grid is just passable, shortest paths grow with
    the side to the power of 1.13.
    """
    return int(109 * (side / 30) ** 1.13)


def generate(num: int, side: int, rng: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield `num` hard mazes with their labels, (S,) uint8 each.

    Walls are placed at random. A maze is kept if two of its cells are at least `least_distance`
    apart, and two such cells become S and G. No maze is a transform of another.
    """
    assert MIN_SIDE <= side <= MAX_SIDE
    seen: set[bytes] = set()
    while True:
        for question_LL in _hard_mazes(side, rng):
            key = min(transformed(question_LL[None], transform).tobytes() for transform in range(NUM_TRANSFORMS))
            if key in seen:
                continue
            seen.add(key)
            path = shortest_path(question_LL)
            assert path is not None
            answer_LL = question_LL.copy()
            for cell in path[1:-1]:
                answer_LL[cell] = PATH
            yield question_LL.ravel(), answer_LL.ravel()
            if len(seen) == num:
                return


def _hard_mazes(side: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the next candidates and return the hard mazes among them, (N, L, L) uint8."""
    least = least_distance(side)
    share_K11 = rng.uniform(_LEAST_WALLS, _MOST_WALLS, (_CANDIDATES, 1, 1))
    open_KLL = rng.random((_CANDIDATES, side, side), dtype=np.float32) >= share_K11
    # The cell farthest from any other cell is an end of nearly the longest shortest path.
    is_end_KLL, depth_K = _farthest(open_KLL, _one_of(open_KLL, rng))
    # If no cell is farther than half the least distance from a cell, no two cells that it reaches
    # are the least distance apart.
    open_KLL, is_end_KLL = (array_KLL[2 * depth_K >= least] for array_KLL in (open_KLL, is_end_KLL))
    end_KLL = _one_of(is_end_KLL, rng)
    _, length_K = _farthest(open_KLL, end_KLL)
    open_NLL, end_NLL = (array_KLL[length_K >= least] for array_KLL in (open_KLL, end_KLL))
    far_NLL = _one_of(distances(open_NLL, end_NLL) >= least, rng)
    swapped_N11 = rng.random((len(open_NLL), 1, 1)) < 0.5
    mazes_NLL = np.where(open_NLL, np.uint8(BLANK), np.uint8(WALL))
    mazes_NLL[np.where(swapped_N11, far_NLL, end_NLL)] = START
    mazes_NLL[np.where(swapped_N11, end_NLL, far_NLL)] = GOAL
    return mazes_NLL


def _one_of(cells_NLL: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw one of the marked cells of each grid uniformly, (N, L, L) bool."""
    num = len(cells_NLL)
    lots_NS = np.where(cells_NLL, rng.random(cells_NLL.shape, dtype=np.float32), -1).reshape(num, -1)
    chosen_NS = np.zeros(lots_NS.shape, bool)
    chosen_NS[np.arange(num), lots_NS.argmax(1)] = True
    return chosen_NS.reshape(cells_NLL.shape)


def _farthest(open_KLL: np.ndarray, from_KLL: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the cells farthest from the marked ones, (K, L, L) bool, and their distance, (K,)."""
    distance_KLL = distances(open_KLL, from_KLL)
    depth_K = distance_KLL.max((1, 2))
    return distance_KLL == depth_K[:, None, None], depth_K
