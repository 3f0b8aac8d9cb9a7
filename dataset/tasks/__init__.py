"""List the tasks. A task is a kind of puzzle; the class of a task holds all that depends on it."""

from dataset.schema import Split
from dataset.tasks.arc import ArcTask
from dataset.tasks.base import BoardTask
from dataset.tasks.lights_out import LightsOutTask
from dataset.tasks.maze import MazeTask
from dataset.tasks.sudoku import SudokuTask

# The order counts, because the first task with a matching shape is taken: a Sudoku of 4x4 cells has
# the shape of a maze of 4x4 cells.
TASKS: tuple[type[BoardTask], ...] = (
    SudokuTask,
    MazeTask,
    ArcTask,
    LightsOutTask,
)

# Boards are arrays of uint8.
_MOST_KINDS = 256


def task_of_shape(seq_len: int, vocab_size: int) -> BoardTask | None:
    """Return the first task in the table whose examples have this shape; None if there is none."""
    found = (task.of_shape(seq_len, vocab_size) for task in TASKS)
    return next((task for task in found if task is not None), None)


def task_of_set(split: Split, set_name: str) -> BoardTask | None:
    """Return the task of one set of a split, whose boards may be smaller than those of others."""
    return task_of_shape(*split.shape_of(set_name))


def task_of_tokens(seq_len: int, largest: int) -> BoardTask | None:
    """Return the task with the smallest vocabulary that holds the largest token of the examples."""
    tasks = (task_of_shape(seq_len, vocab_size) for vocab_size in range(largest + 1, _MOST_KINDS + 1))
    return next((task for task in tasks if task is not None), None)
