"""The table of tasks: the shape of the data tells the task, and published answers are right."""

import pytest

from dataset.tasks import task_of_shape


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((16, 6), "sudoku 2x2"),  # a maze of 4x4 has the same shape, but nobody trains on such mazes
        ((36, 8), "sudoku 2x3"),
        ((81, 11), "sudoku 3x3"),
        ((36, 6), "maze 6x6"),
        ((900, 6), "maze 30x30"),
        ((900, 12), "arc"),
        ((144, 12), "arc"),
        ((100, 12), None),  # a Sudoku of 10x10 would have this shape
        ((35, 6), None),
        ((961, 12), None),
        ((16, 12), None),
    ],
)
def test_the_shape_tells_the_task(shape: tuple[int, int], name: str | None) -> None:
    task = task_of_shape(*shape)
    assert name == (task and task.name)
    assert task is None or task.rows * task.columns == shape[0]
