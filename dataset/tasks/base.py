"""Define the interface of a task. Each task has a file of its own beside this file.

A task is a kind of puzzle, such as Sudoku. A `BoardTask` is a task with boards of one size. The
shape of a dataset, its number of tokens and of kinds of tokens, tells which task it holds.
"""
# B, N = examples, S = cells of a board, U = random numbers for a symmetry, V = vocabulary

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dataset.schema import PuzzleSet, Split
from utils.errors import UserError

# dataset.validate and other programs import all tasks. They start much faster without PyTorch.
if TYPE_CHECKING:
    import torch

    from utils.batch import Batch

Plain = str | list[list[int]]
"""A board for programs: a text with a character for each cell, or the rows of a grid of numbers."""

Cell = Callable[[int, str, str], str]
"""Formats a cell: its number, its text, and its own colour as an ANSI code ("": none).

The texts of all cells are equally wide, and end in a column for a mark.
"""

Line = tuple[int, str]
"""The number of a line, from 1, and its text."""

Fault = tuple[str, str]
"""The name of the wrong array ("inputs" or "labels"), and a phrase such as "has no path"."""

# ANSI codes for given cells, cells that the answer adds, wrong cells, changed cells, and the
# background.
_GIVEN, _ADDED, _WRONG, _CHANGED, GREY = "1", "36", "31", "7", "90"
# A board of one row is shown in lines of so many cells.
_CELLS_IN_LINE = 30


@dataclass(frozen=True)
class Verdict:
    """The judgement of one answer."""

    valid: bool  # whether the answer has the form that the task asks for, such as one path through the maze
    solved: bool | None  # whether the answer is right; None if that can't be decided
    reason: str  # a phrase that explains the judgement to people


class Symmetries(ABC):
    """The symmetries of a task: `choose` runs on the host, in NumPy, and `apply` on the device."""

    description: str  # for the first lines of a run's log, such as "symmetries of Sudoku 3x3"
    num_draws: int  # U

    @abstractmethod
    def choose(self, uniform_BU: np.ndarray, examples_B: np.ndarray) -> dict[str, np.ndarray]:
        """Return the symmetries that random numbers in [0, 1) draw, as small arrays for `apply`.

        The arrays are "cells" and "names" as in `move`, unless a subclass overrides `apply`.
        """

    def apply(self, batch: Batch, chosen: Batch) -> Batch:
        """Return the batch with inputs and labels transformed by the same symmetries."""
        return {**batch, **{name: move(batch[name], chosen) for name in ("inputs", "labels")}}


def move(tokens_BS: torch.Tensor, chosen: Batch) -> torch.Tensor:
    """Return boards with moved cells and renamed tokens, (B, S).

    "cells" (B, S) holds for each cell of the result the number of the original cell, and "names"
    (B, V) the new value of each token; without "names" tokens keep their values.
    """
    moved_BS = tokens_BS.gather(1, chosen["cells"].long())
    return rename(moved_BS, chosen["names"]) if "names" in chosen else moved_BS


def rename(tokens_BS: torch.Tensor, names_BV: torch.Tensor) -> torch.Tensor:
    """Replace each token by its new value, (B, S). Ignored labels, which are negative, stay."""
    renamed_BS = names_BV.to(tokens_BS.dtype).gather(1, tokens_BS.clamp(min=0).long())
    return renamed_BS.where(tokens_BS >= 0, tokens_BS)


class BoardTask(ABC):
    """A task with boards of one size. Boards are arrays of tokens (S,), row by row."""

    kind: ClassVar[str]  # one word, such as "sudoku"
    plural: ClassVar[str]  # for messages, such as "Sudokus"
    # For messages: the numbers of tokens and of kinds of tokens, such as "Sudoku: 81 of 11".
    shapes: ClassVar[str]
    checked: ClassVar[str]  # for the help of dataset.validate: the faults that are found
    metrics: ClassVar[tuple[str, ...]] = ()  # the names of the metrics that `judge` returns
    most_variations: ClassVar[float] = 0  # the largest number of `variations` of a puzzle
    lets_vote: ClassVar[bool] = False  # true: dataset/arc_votes.py counts answers; `judge` is not called

    name: str  # such as "sudoku 3x3"
    title: str  # the name in reports, such as "Sudoku 3x3"
    tokens: tuple[str, ...] = ()  # what each token is called, such as "wall"; empty if tokens are just numbers
    symbols: str = ""  # a character for each token; empty if boards are shown as numbers
    rows: int  # a sequence has one row
    columns: int
    dtype: np.dtype[Any] = np.dtype(np.uint8)  # of a board's tokens
    has_one_solution = True  # true: a cell that differs from the solution is wrong
    blank: int | None = None  # the token of a cell that the puzzle leaves open; None: there is none
    _added_mark = ""  # the mark behind a cell that the answer adds
    _colors_are_marks = True  # false: colours show the tokens, so that marks must show the rest

    @classmethod
    @abstractmethod
    def of_shape(cls, seq_len: int, vocab_size: int) -> BoardTask | None:
        """Return the task for examples of this shape; None if the task has no such shape."""

    # ---- boards for programs and people ----

    def plain(self, tokens_S: np.ndarray) -> Plain:
        """Return the board in the form for programs. In a text "?" is a token that no board has."""
        rows: list[list[int]] = tokens_S.reshape(self.rows, self.columns).tolist()
        return rows

    @abstractmethod
    def verdict(self, question_S: np.ndarray, answer_S: np.ndarray, solution_S: np.ndarray | None = None) -> Verdict:
        """Judge an answer by the rules of the task or, if it has no rules, by the solution."""

    def _against_rules(self, question_S: np.ndarray, answer_S: np.ndarray) -> np.ndarray:
        """Return which cells break the rules, without knowing the solution, (S,) bool."""
        return np.zeros(len(answer_S), dtype=bool)

    def _lines(self, tokens_S: np.ndarray, cell: Cell) -> list[str]:
        """Return the lines of a board for a terminal: by default symbols or numbers."""
        texts = [self.symbols[token] if self.symbols else str(token) for token in tokens_S.tolist()]
        width = max(map(len, texts))
        cells = [cell(number, text.rjust(width) + " ", "") for number, text in enumerate(texts)]
        columns = self.columns if self.rows > 1 else min(self.columns, _CELLS_IN_LINE)
        return ["".join(cells[first : first + columns]).rstrip() for first in range(0, len(cells), columns)]

    def show(
        self,
        tokens_S: np.ndarray,
        *,
        question_S: np.ndarray | None = None,
        previous_S: np.ndarray | None = None,
        solution_S: np.ndarray | None = None,
        color: bool,
    ) -> str:
        """Return a board for a terminal, without a newline at the end.

        Args:
            question_S: the puzzle, if the board is an answer. Other cells are the answer's own.
            previous_S: an earlier answer. Cells that differ from it are marked as changed.
            solution_S: cells that differ from it are marked as wrong. None: cells that break the
                rules are.
            color: mark cells by ANSI colours instead of characters behind them.
        """
        added_S, changed_S, wrong_S = (
            np.zeros(len(tokens_S), dtype=bool) if other_S is None else tokens_S != other_S
            for other_S in (question_S, previous_S, solution_S)
        )
        if solution_S is None and question_S is not None:
            wrong_S = self._against_rules(question_S, tokens_S)

        def cell(number: int, text: str, own_color: str) -> str:
            is_wrong, is_changed, is_added = wrong_S[number], changed_S[number], added_S[number]
            mark = self._added_mark if is_added else ""
            if is_wrong or is_changed:
                mark = "×" if is_wrong and is_changed else "!" if is_wrong else "*"
            marked = text[:-1] + mark if mark else text
            if not color:
                return marked
            if not self._colors_are_marks:
                return f"\x1b[{own_color}m{marked}\x1b[0m"
            style = _WRONG if is_wrong else own_color or (_ADDED if is_added else _GIVEN)
            return f"\x1b[{style}{';' + _CHANGED if is_changed else ''}m{text}\x1b[0m"

        return "\n".join(self._lines(tokens_S, cell))

    def legend(self, *, color: bool) -> str:
        """Return a line that explains the marks of `show`."""
        if color and self._colors_are_marks:
            return "bold: given, cyan: the model's, reversed: changed, red: wrong"
        added = f"{self._added_mark} the model's, " if self._added_mark else ""
        return f"{added}* changed, ! wrong, × changed and wrong"

    @property
    def drawing(self) -> dict[str, Any]:
        """The data, as JSON, with which the viewer's page draws a board."""
        return {"kind": self.kind, "rows": self.rows, "columns": self.columns, "tokens": list(self.tokens)}

    # ---- symmetries ----

    def symmetries(self, sets: Sequence[PuzzleSet]) -> Symmetries | None:
        """Return the symmetries for augmentation on the fly; None if the task has none."""
        return None

    def variations(self, numbers_N: np.ndarray, count: int) -> dict[str, np.ndarray]:
        """Return symmetries that can be undone, for votes: "cells" and "names" as in `move`.

        Variation k of the example in row r of the dataset has the number r * count + k, and depends
        only on r and k. Variation 0 is the example itself.
        """
        raise NotImplementedError(f"answers of {self.kind} can't be turned back")

    # ---- evaluation ----

    def judge(self, inputs_BS: torch.Tensor, predictions_BS: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return for every name in `metrics` whether it holds of each answer, (B,) bool."""
        return {}

    def scores(self, split: Split) -> bool:
        """Return whether an evaluation of the split uses this task's evaluator by default."""
        return bool(self.metrics)

    # ---- validation ----

    def faults(self, inputs_NS: np.ndarray, labels_NS: np.ndarray, labelled_NS: np.ndarray) -> dict[Fault, np.ndarray]:
        """Return for each possible fault which examples have it, (N,) bool.

        Tokens are within the vocabulary. An ignored label is 0, and not in `labelled_NS`.
        """
        return {}

    def images(
        self, inputs_NS: np.ndarray, labels_NS: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield what the symmetries of training make of examples, first the examples themselves.

        These are images of inputs and of labels, (N, S) each, or keys of them, (N,) uint64 each;
        and which of them training can produce, (N,) bool. Examples with equal images of their
        inputs must have equal images of their labels.
        """
        yield inputs_NS, labels_NS, np.ones(len(inputs_NS), bool)

    def may_have_several_answers(self, inputs_NS: np.ndarray) -> np.ndarray:
        """Return for each question whether the rules allow several answers, (N,) bool."""
        return np.ones(len(inputs_NS), bool)

    def identity(self, tokens: bytes) -> bytes:
        """Return a key that is equal for inputs, or labels, that count as the same."""
        return tokens

    def of_other_size(self, num_cells: int) -> BoardTask | None:
        """Return the same kind of task with boards of so many cells; None if there is none."""
        return None


class TextTask(BoardTask):
    """A task whose boards can be written as texts with one character for each cell: `symbols`."""

    _between = ""  # what stands between two rows of a board in one line

    def plain(self, tokens_S: np.ndarray) -> str:
        return "".join(self.symbols[token] for token in tokens_S)

    def parse(self, text: str, where: str) -> np.ndarray:
        """Return the tokens of a puzzle, (S,) uint8. A mistake's message begins with `where`."""
        return self._parse_cells(text, where, *self.symbols_of_solutions())

    def parse_solution(self, text: str, where: str, question_S: np.ndarray) -> np.ndarray:
        """Return the tokens of a solution of the question, (S,) uint8."""
        token_of, only = self.symbols_of_solutions()
        solution_S = self._parse_cells(text, where, token_of, only)
        verdict = self.verdict(question_S, solution_S)
        if not verdict.solved:
            raise UserError(f"{where} is no solution of its question: {verdict.reason}; correct it")
        return solution_S

    def symbols_of_solutions(self) -> tuple[dict[str, int], str]:
        """Return the token of each symbol of a solution, and words for these symbols."""
        token_of = {symbol: token for token, symbol in enumerate(self.symbols) if token}
        return token_of, joined(list(token_of), "or")

    def of_other_size(self, num_cells: int) -> BoardTask | None:
        return self.of_shape(num_cells, len(self.symbols))

    def lines_in(self, text: str) -> list[Line]:
        """Return the lines of a text with their numbers, without characters that are no cells."""
        return list(enumerate(text.splitlines(), start=1))

    def cells_in(self, text: str) -> Sequence[str]:
        """Return the cells in a text, without line ends."""
        return "".join(line for _, line in self.lines_in(text))

    def split(self, lines: Iterable[Line], where: str) -> Iterator[tuple[str, str]]:
        """Split lines into puzzles. A puzzle takes one line, or a line for each of its rows.

        Yields:
            The place where the puzzle begins, as <where>:<line>, and the text of its cells.
        """
        rows: list[str] = []
        first = 0
        for number, line in lines:
            num_cells = len(self.cells_in(line))
            if num_cells == self.columns:
                first = first if rows else number
                rows.append(line)
                if len(rows) == self.rows:
                    yield f"{where}:{first}", self._between.join(rows)
                    rows = []
            elif rows:
                raise UserError(
                    f"{where}:{number} has {num_cells} characters, but row {len(rows) + 1} of this board needs "
                    f"{self.columns}; correct the row, or give each puzzle on one line"
                )
            elif line:
                yield f"{where}:{number}", line
        if rows:
            raise UserError(f"{where} ends after row {len(rows)} of a board of {self.rows} rows; add the missing rows")

    def _parse_cells(self, text: str, where: str, token_of: dict[str, int], only: str) -> np.ndarray:
        cells = self.cells_in(text)
        num = self.rows * self.columns
        if len(cells) != num:
            raise UserError(
                f"{where} has {len(cells)} characters, this model's puzzles have {num} ({self.name}); give "
                "one for every cell, row by row"
            )
        for number, symbol in enumerate(cells):
            if symbol not in token_of:
                row, column = divmod(number, self.columns)
                raise UserError(
                    f"{where} has {symbol!r} in cell {number + 1} (row {row + 1}, column {column + 1}), where only "
                    f"{only} can be; correct the cell"
                )
        return np.array([token_of[symbol] for symbol in cells], dtype=self.dtype)


def joined(names: Sequence[str], last: str = "and") -> str:
    """Return "a, b and c"."""
    return f" {last} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def some(names: Sequence[str], most: int = 3) -> str:
    """Return "a, b and c", or for many names "a, b, c and 4 more"."""
    return f"{', '.join(names[:most])} and {len(names) - most} more" if len(names) > most else joined(names)


def count(number: int, what: str) -> str:
    """Return "1 cell" or "2 cells"."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"
