"""The table of tasks. Whatever depends on the kind of puzzle is asked of the task that `task_of_shape` finds here."""

from dataset.tasks.arc import ArcTask
from dataset.tasks.base import BoardTask
from dataset.tasks.lights_out import LightsOutTask
from dataset.tasks.maze import MazeTask
from dataset.tasks.sudoku import SudokuTask

# In this order: a Sudoku of 4x4 cells has the shape of a maze as well.
TASKS: tuple[type[BoardTask], ...] = (
    SudokuTask,
    MazeTask,
    ArcTask,
    LightsOutTask,
)

# Boards are arrays of uint8.
_MOST_KINDS = 256

KNOWN_SHAPES = "; ".join(task.shapes for task in TASKS)
"""How many tokens of how many kinds the tasks have, for messages."""


def task_of_shape(seq_len: int, vocab_size: int) -> BoardTask | None:
    """Return the task of examples with so many tokens of so many kinds. None: it is in no line of the table."""
    for task in TASKS:
        found = task.of_shape(seq_len, vocab_size)
        if found is not None:
            return found
    return None


def task_of_tokens(seq_len: int, largest: int) -> BoardTask | None:
    """Return the task that has the fewest kinds of tokens among those whose examples can hold the largest token.

    Args:
        seq_len: The number of tokens of an example.
        largest: The largest token in the examples.
    """
    tasks = (task_of_shape(seq_len, vocab_size) for vocab_size in range(largest + 1, _MOST_KINDS + 1))
    return next((task for task in tasks if task is not None), None)
