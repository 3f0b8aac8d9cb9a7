"""Read the puzzles that a model is to solve: from texts, files, standard input and ARC tasks."""
# S = cells of a board

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np

from dataset.arc import Task, parse_tasks, read_tasks, to_tokens
from dataset.boards import read_fields
from dataset.schema import read_names
from dataset.tasks.base import BoardTask, TextTask, joined
from utils.errors import UserError
from utils.files import opened
from utils.json_files import parse_json

# In the published datasets, puzzles without a row of their own in the puzzle table have this
# number.
BLANK_IDENTIFIER = 0
STDIN = "-"
# No board has more cells.
_MOST_CELLS = 1600
# Far more than a list of a million Sudokus has.
_MOST_CHARACTERS = 1 << 28


@dataclass(frozen=True)
class Puzzle:
    """One board to be solved, and its solution if that is known."""

    name: str  # its source: "puzzle", "puzzles.csv:2", "0a1b2c3d test 1"
    question_S: np.ndarray = field(repr=False)
    solution_S: np.ndarray | None = field(default=None, repr=False)
    identifier: int = BLANK_IDENTIFIER  # its row in the puzzle table
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PuzzleTable:
    """Says which row of a model's puzzle table belongs to an ARC task."""

    data_paths: Sequence[str]  # the folders of the training data; none if they are unknown
    data: str  # what the data are called if there are no folders
    num_rows: int  # of the table; 0 if the model has none

    @cached_property
    def rows(self) -> dict[str, int]:
        """The row of every puzzle that has a name; nothing if the data are not here."""
        rows: dict[str, int] = {}
        first = 0
        for path in self.data_paths:
            try:
                names = read_names(Path(path))
            except FileNotFoundError:
                return {}
            rows |= {name: first + index for index, name in enumerate(names)}
            first += len(names)  # the rows of the datasets follow one another in the table
        return rows

    def find(self, task: Task) -> tuple[int, tuple[str, ...]]:
        """Return the row of an ARC task, and a note if it has none."""
        if not self.num_rows:
            return BLANK_IDENTIFIER, ()
        row = self.rows.get(task.name, BLANK_IDENTIFIER)
        if BLANK_IDENTIFIER < row < self.num_rows:
            return row, ()
        data = " + ".join(self.data_paths) or self.data
        why = f"{task.name} is not among the puzzles of {data}: the model has not seen this task"
        if not self.rows:
            why = f"there is no identifiers.json in {data} (data_path=... says where the data are)"
        return BLANK_IDENTIFIER, (f"{why}, and the puzzle embedding of {task.name} is the blank one",)


@dataclass(frozen=True)
class PuzzleReader:
    """Reads puzzles for a model. If a puzzle is wrong, a UserError names its place."""

    board: BoardTask  # the boards on which the model was trained
    other_board: Callable[[int], TextTask | None]  # the boards with so many cells; None: the model reads none
    mixes_sizes: bool  # whether boards of several sizes may follow one another
    is_for: str  # a phrase such as "checkpoints/a was trained on sudoku 3x3"
    table: PuzzleTable

    def of_typed(self, typed: str) -> list[Puzzle]:
        """Return the puzzles of a text, of the file that it names, or for - of standard input."""
        if typed == STDIN:
            return self.of_lines(read_stdin(), "stdin")
        if os.path.isfile(file := os.path.expanduser(typed)):
            return self.of_file(Path(file))
        if re.search(r"\.(sdk|ss|sdm|txt|csv|tsv|json|jsonl)(\.gz)?$", file, re.IGNORECASE):
            raise UserError(f"there is no file {file}; correct puzzle=...")
        return self.of_text(typed, "puzzle")

    def of_text(self, text: str, where: str) -> list[Puzzle]:
        """Return one board or, for ARC, the test inputs of ARC tasks as JSON."""
        if text.lstrip().startswith("{"):  # no board of text begins so
            return self.of_tasks(parse_tasks(parse_json(text, where, "correct the task"), where, where), where)
        return [Puzzle(Path(where).name, self._board_of(text, where).parse(text, where))]

    def of_lines(self, text: str, where: str) -> list[Puzzle]:
        """Return boards, each on one line or in rows, or the test inputs of ARC tasks as JSON."""
        if text.lstrip().startswith("{"):
            return self.of_text(text, where)
        board = self._text_board(where)
        boards = board.split(board.lines_in(text), where)
        if self.mixes_sizes:
            boards = split_sizes(text, where, board, self.other_board)
        puzzles = [puzzle for place, cells in boards for puzzle in self.of_text(cells, place)]
        if not puzzles:
            raise UserError(f"{where} holds no puzzle; give one on each line, or in rows")
        return puzzles

    def of_file(self, file: Path) -> list[Puzzle]:
        """Return the puzzles of a file: .json, .csv, or else text, each perhaps with .gz.

        A text has one board on each line, or boards in rows, as in .sdk and .ss files of Sudokus.
        """
        name = file.name.lower().removesuffix(".gz")
        if name.endswith(".json"):
            return self.of_tasks(read_tasks(file), str(file))
        if name.endswith(".csv"):
            return self.of_csv(file)
        with opened(file) as stream:
            contents = stream.read(_MOST_CHARACTERS + 1)
        if len(contents) > _MOST_CHARACTERS:
            raise UserError(f"{file}: holds more than {_MOST_CHARACTERS:,} characters; give a smaller file")
        return self.of_lines(contents.decode("utf-8-sig", errors="replace"), str(file))

    def of_csv(self, file: Path) -> list[Puzzle]:
        """Return the puzzles of a CSV file with a question and, if they are known, an answer."""
        self._text_board(str(file))
        puzzles = []
        for line, fields in read_fields(file, ("question",)):
            question, answer = fields["question"], fields.get("answer")
            where = f"{file}:{line}: the question"
            board = self._board_of(question, where)
            question_S = board.parse(question, where)
            solution_S = board.parse_solution(answer, f"{file}:{line}: the answer", question_S) if answer else None
            puzzles.append(Puzzle(f"{file.name}:{line}", question_S, solution_S))
        return puzzles

    def of_tasks(self, tasks: Sequence[Task], where: str) -> list[Puzzle]:
        """Return the test inputs of ARC tasks, with their outputs if these are known."""
        if isinstance(self.board, TextTask):
            raise UserError(
                f"{where} is JSON, as ARC tasks are, but {self.is_for}; give boards with puzzle= or csv=, or a "
                "checkpoint that was trained on ARC"
            )
        puzzles, side = [], self.board.rows
        for task in tasks:
            identifier, notes = self.table.find(task)
            for number, pair in enumerate(task.test, start=1):
                name = f"{task.name} test {number}"
                for grid in pair.grids:
                    if max(grid.shape) > side:
                        raise UserError(
                            f"{name} of {where} has a grid of {grid.shape[0]}x{grid.shape[1]}, but this model's canvas "
                            f"has {side}x{side} cells; leave the ARC task out, or train with data of a larger --side"
                        )
                output_S = None if pair.output is None else to_tokens(pair.output, side=side)
                puzzles.append(Puzzle(name, to_tokens(pair.input, side=side), output_S, identifier, notes))
        return puzzles

    def _text_board(self, where: str) -> TextTask:
        if not isinstance(self.board, TextTask):
            raise UserError(f"{where} is no ARC task as JSON, but {self.is_for}; give task=<file>.json")
        return self.board

    def _board_of(self, text: str, where: str) -> TextTask:
        """Return the board that a text shows."""
        own = self._text_board(where)
        num_cells = len(own.cells_in(text))
        if board := self.other_board(num_cells):
            return board
        sizes = [str(num) for num in range(1, _MOST_CELLS + 1) if self.other_board(num)]
        if len(sizes) > 1:
            raise UserError(
                f"{where} has {num_cells} characters, this model's puzzles have {joined(sizes, 'or')}; give one for "
                "every cell, row by row"
            )
        return own  # which says how many cells it has


def split_sizes(
    text: str, where: str, own: TextTask, board_of: Callable[[int], TextTask | None]
) -> Iterator[tuple[str, str]]:
    """Split a text into puzzles of the sizes that `board_of` knows, as `TextTask.split` does."""
    lines = own.lines_in(text)
    first = 0
    while first < len(lines):
        number, line = lines[first]
        length = len(line)
        board = board_of(length * length) if length else None
        rows = [row for _, row in lines[first : first + length]]
        if board is not None and _are_rows(rows, own, board, board_of(length)):
            yield from board.split(lines[first : first + board.rows], where)
            first += board.rows
            continue
        if length:
            yield f"{where}:{number}", line
        first += 1


def _are_rows(lines: Sequence[str], own: TextTask, board: TextTask, whole: TextTask | None) -> bool:
    """Return whether lines are the rows of a board, and not each a whole board.

    A line of 16 characters may be a Sudoku of 4x4, or a row of one of 16x16. It is a row if it has
    a digit above 4, or if the lines are a board.
    """
    if whole is None:
        return True
    if len(lines) < board.rows or any(len(line) != board.columns for line in lines):
        return False
    if set(board.symbols) == set(whole.symbols):
        return board.rows == own.rows
    try:
        board.parse("".join(lines), "")
    except UserError:
        return not set(lines[0].upper()) <= {*whole.symbols, "0", "X"}
    return True


def read_stdin() -> str:
    advice = "pipe puzzles into it, or give puzzle=<its cells>"
    try:
        # A closed standard input is None.
        contents = sys.stdin.buffer.read() if sys.stdin else b""
    except OSError as error:
        raise UserError(f"standard input can't be read ({error.strerror}); {advice}") from error
    text = contents.decode("utf-8-sig", errors="replace")
    if not text.strip("\r\n"):
        raise UserError(f"standard input is empty; {advice}")
    return text
