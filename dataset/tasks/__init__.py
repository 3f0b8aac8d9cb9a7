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

KNOWN_SHAPES = "; ".join(task.shapes for task in TASKS)
"""How many tokens of how many kinds the tasks have, for messages."""


def task_of_shape(seq_len: int, vocab_size: int) -> BoardTask | None:
    """Return the task of examples with so many tokens of so many kinds. None: it is in no line of the table."""
    for task in TASKS:
        found = task.of_shape(seq_len, vocab_size)
        if found is not None:
            return found
    return None
