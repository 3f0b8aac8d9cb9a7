"""The table of tasks: the shape of the data tells the task, and published answers are right."""

import csv
import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from dataset.tasks import task_of_shape
from dataset.tasks.base import TextTask

REPOSITORY = Path(__file__).resolve().parents[2]
REAL_DATA = REPOSITORY.parent / "shared" / "data"


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
    ],
)
def test_the_shape_tells_the_task(shape: tuple[int, int], name: str | None) -> None:
    task = task_of_shape(*shape)
    assert name == (task and task.name)
    assert task is None or task.rows * task.columns == shape[0]


@pytest.mark.parametrize(
    ("folder", "shape"), [("sudoku-extreme-1k", (81, 11)), ("maze-30x30-hard-1k", (900, 6))], ids=["sudoku", "maze"]
)
def test_published_answers_are_right(folder: str, shape: tuple[int, int]) -> None:
    file = REAL_DATA / folder / "test.csv.gz"
    if not file.exists():
        pytest.skip("the published puzzles are not here")
    task = task_of_shape(*shape)
    assert isinstance(task, TextTask)
    with gzip.open(file, "rt", newline="") as stream:
        for row, _ in zip(csv.DictReader(stream), range(40), strict=False):
            question_S = task.parse(row["question"], "question")
            answer_S = task.parse_solution(row["answer"], "answer", question_S)
            assert task.verdict(question_S, answer_S).solved
            assert not task.verdict(question_S, question_S).valid
            assert task.plain(answer_S) == row["answer"]


def test_the_table_of_tasks_does_not_import_pytorch() -> None:
    """The import of PyTorch would take longer than most work of these programs."""
    code = "import sys, dataset.validate, dataset.show, view; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, timeout=60).returncode == 0
