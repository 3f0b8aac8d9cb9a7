"""Helpers for tests of mazes: a slow search, random mazes, and transforms of one grid."""
# S = cells of a maze, L = side

from collections import deque

import numpy as np

from dataset import maze
from dataset.maze import BLANK, GOAL, PATH, START, WALL

Cell = tuple[int, int]


def search(maze_LL: list[list[int]]) -> list[Cell] | None:
    """Return the path from S to G that breadth-first search finds, or None.

    The search goes down, left, right and up in this order. A cell keeps the first parent.
    """
    side = len(maze_LL)
    cells = [(row, column) for row in range(side) for column in range(side)]
    (start,) = [(r, c) for r, c in cells if maze_LL[r][c] == START]
    (goal,) = [(r, c) for r, c in cells if maze_LL[r][c] == GOAL]
    parent = {start: start}
    queue = deque([start])
    while queue:
        row, column = queue.popleft()
        for down, right in ((1, 0), (0, -1), (0, 1), (-1, 0)):
            cell = (row + down, column + right)
            if min(cell) < 0 or max(cell) >= side or maze_LL[cell[0]][cell[1]] == WALL or cell in parent:
                continue
            parent[cell] = (row, column)
            queue.append(cell)
    if goal not in parent:
        return None
    path = [goal]
    while path[-1] != start:
        path.append(parent[path[-1]])
    return path[::-1]


def solved(maze_S: np.ndarray) -> np.ndarray | None:
    """Return the label of a maze, or None if no path leads from S to G."""
    side = int(len(maze_S) ** 0.5)
    path = search(maze_S.reshape(side, side).tolist())
    if path is None:
        return None
    label_LL = maze_S.reshape(side, side).copy()
    for cell in path[1:-1]:
        label_LL[cell] = PATH
    return label_LL.ravel()


def any_maze(rng: np.random.Generator, side: int) -> np.ndarray:
    maze_S = np.where(rng.random(side * side) < rng.uniform(0, 0.5), WALL, BLANK).astype(np.uint8)
    maze_S[rng.choice(side * side, 2, replace=False)] = START, GOAL
    return maze_S


def random_maze(rng: np.random.Generator, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a maze with a path from S to G, and its label."""
    while True:
        maze_S = any_maze(rng, side)
        label_S = solved(maze_S)
        if label_S is not None:
            return maze_S, label_S


def turned(grid_LL: np.ndarray, transform: int) -> np.ndarray:
    """Return the transformed grid.

    The bits of `transform` are 4 for transpose, 2 for upside down and 1 for mirror. The grid is
    transposed first.
    """
    grid_LL = grid_LL.T if transform & 4 else grid_LL
    grid_LL = grid_LL[::-1] if transform & 2 else grid_LL
    return grid_LL[:, ::-1] if transform & 1 else grid_LL


def turned_row(grid_S: np.ndarray, transform: int) -> np.ndarray:
    side = int(len(grid_S) ** 0.5)
    return turned(grid_S.reshape(side, side), transform).ravel()


def to_tokens(text: str) -> np.ndarray:
    return np.array([maze.SYMBOLS.index(character, 1) for character in text], np.uint8)


def to_text(tokens_S: np.ndarray) -> str:
    return "".join(maze.SYMBOLS[token] for token in tokens_S)
