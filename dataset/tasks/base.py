"""What a task can say of its boards. Each kind of task has a file of its own beside this one.

A task is a kind of puzzle in one size, told by the shape of a dataset: the number of tokens and of their kinds.
"""
# N = examples, S = cells of a board, L = side of a board

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from utils.errors import UserError

Plain = str | list[list[int]]
"""A board for programs: a text with a character for each cell, or the rows of a grid of numbers."""

Cell = Callable[[int, str, str], str]
"""Writes a cell, two columns wide, from its number, its text and a colour of its own ("": none)."""

Fault = tuple[str, str]
"""The array in which something is wrong ("inputs" or "labels"), and a phrase: "has padding inside the board"."""

# ANSI codes of cells that were given, that the answer adds, that are wrong, that changed, and of the background.
_GIVEN, _ADDED, _WRONG, _CHANGED, GREY = "1", "36", "31", "7", "90"


@dataclass(frozen=True)
class Verdict:
    """What is known of an answer.

    `valid`: whether the answer has the form that the task asks for, such as one path through the maze.
    `solved`: whether the answer is right; None where nobody can tell.
    `reason`: a phrase for people.
    """

    valid: bool
    solved: bool | None
    reason: str


class BoardTask(ABC):
    """A kind of puzzle in one size. Boards are arrays of tokens (S,), row by row."""

    kind: ClassVar[str]  # one word, such as "sudoku"
    plural: ClassVar[str]  # for messages, such as "Sudokus"
    shapes: ClassVar[str]  # for messages, such as "Sudoku: 81 of 11": how many tokens of how many kinds
    checked: ClassVar[str]  # for the help of dataset.validate: which faults are found
    same_examples: ClassVar[str] = ""  # for that help too: when examples with other tokens are the same (`identity`)

    name: str  # such as "sudoku 3x3"
    title: str  # the name in reports, such as "Sudoku 3x3"
    side: int  # L
    has_one_solution = True  # if so, a cell that differs from the solution is wrong
    _added_mark = ""
    _colors_are_marks = True

    @classmethod
    @abstractmethod
    def of_shape(cls, seq_len: int, vocab_size: int) -> "BoardTask | None":
        """Return the task whose examples have this shape. None: it is no shape of this kind of task."""

    # ---- boards for programs and people ------------------------------------------------------------------

    @abstractmethod
    def plain(self, tokens_S: np.ndarray) -> Plain:
        """Return the board as programs take it. Any tokens are allowed; "?" stands for one that no board has."""

    @abstractmethod
    def verdict(self, question_S: np.ndarray, answer_S: np.ndarray, solution_S: np.ndarray | None = None) -> Verdict:
        """Judge an answer by the rules of the task or, where there are none, by the solution."""

    @abstractmethod
    def _against_rules(self, question_S: np.ndarray, answer_S: np.ndarray) -> np.ndarray:
        """Return which cells are wrong by the rules alone, (S,) bool."""

    @abstractmethod
    def _lines(self, tokens_S: np.ndarray, cell: Cell) -> list[str]:
        """Return the board for a terminal, line by line."""

    def show(
        self,
        tokens_S: np.ndarray,
        *,
        question_S: np.ndarray | None = None,
        previous_S: np.ndarray | None = None,
        solution_S: np.ndarray | None = None,
        color: bool,
    ) -> str:
        """Return a board for a terminal, without a line end behind the last line.

        Args:
            question_S: The puzzle that the tokens answer. Cells that differ from it are shown as the answer's.
            previous_S: An earlier answer. Cells that differ from it are marked.
            solution_S: Cells that differ from it are marked as wrong. Without it, those against the rules are.
            color: Show this by ANSI colours instead of marks behind the cells.
        """
        none_S = np.zeros(len(tokens_S), dtype=bool)
        added_S = none_S if question_S is None else tokens_S != question_S
        changed_S = none_S if previous_S is None else tokens_S != previous_S
        wrong_S = none_S
        if solution_S is not None:
            wrong_S = tokens_S != solution_S
        elif question_S is not None:
            wrong_S = self._against_rules(question_S, tokens_S)

        def cell(number: int, text: str, own_color: str) -> str:
            is_wrong, is_changed, is_added = wrong_S[number], changed_S[number], added_S[number]
            mark = self._added_mark if is_added else ""
            if is_wrong or is_changed:
                mark = "×" if is_wrong and is_changed else "!" if is_wrong else "*"
            marked = text[0] + mark if mark else text
            if not color:
                return marked
            if not self._colors_are_marks:
                return f"\x1b[{own_color}m{marked}\x1b[0m"
            style = _WRONG if is_wrong else own_color or (_ADDED if is_added else _GIVEN)
            return f"\x1b[{style}{';' + _CHANGED if is_changed else ''}m{text}\x1b[0m"

        return "\n".join(self._lines(tokens_S, cell))

    def legend(self, *, color: bool) -> str:
        """Return what the marks of `show` mean."""
        if color and self._colors_are_marks:
            return "bold: given, cyan: the model's, reversed: changed, red: wrong"
        added = f"{self._added_mark} the model's, " if self._added_mark else ""
        return f"{added}* changed, ! wrong, × changed and wrong"

    @property
    def drawing(self) -> dict[str, Any]:
        """What the viewer's page has to know to draw a board, as JSON."""
        return {"kind": self.kind, "rows": self.side, "columns": self.side}

    # ---- validation --------------------------------------------------------------------------------------

    @abstractmethod
    def faults(self, inputs_NS: np.ndarray, labels_NS: np.ndarray, labelled_NS: np.ndarray) -> dict[Fault, np.ndarray]:
        """Return for each fault that examples can have which examples have it, (N,) bool.

        Args:
            inputs_NS, labels_NS: Tokens within the vocabulary; ignored labels are 0.
            labelled_NS: Which labels are not ignored, bool.
        """

    def identity(self, tokens: bytes) -> bytes:
        """Return what tells an input or a label from others, of its tokens as bytes."""
        return tokens

    # ---- for subclasses ----------------------------------------------------------------------------------

    def _row(self, row: int) -> range:
        return range(row * self.side, (row + 1) * self.side)


class TextTask(BoardTask):
    """A task whose boards are texts with a character for each cell."""

    @abstractmethod
    def parse(self, text: str, where: str) -> np.ndarray:
        """Return the tokens of a puzzle, (S,) uint8.

        Raises:
            UserError: If the text is no puzzle. The message begins with `where`.
        """

    @abstractmethod
    def parse_solution(self, text: str, where: str, question_S: np.ndarray) -> np.ndarray:
        """Return the tokens of a solution of the question, (S,) uint8.

        Raises:
            UserError: If the text is no such solution. The message begins with `where`.
        """

    def split(self, text: str, where: str) -> Iterator[tuple[str, str]]:
        """Yield where each puzzle of a text begins, and its cells. A puzzle takes a line, or L lines of L characters.

        Raises:
            UserError: If a line is neither.
        """
        rows: list[str] = []
        for number, line in enumerate(text.splitlines(), start=1):
            line = self._clean(line)
            if len(line) == self.side:
                rows.append(line)
                if len(rows) == self.side:
                    yield f"{where}:{number - self.side + 1}", "".join(rows)
                    rows = []
            elif rows:
                raise UserError(
                    f"{where}:{number} has {len(line)} characters, but is row {len(rows) + 1} of a board whose rows "
                    f"have {self.side}; correct it, or give a puzzle on each line"
                )
            elif line:
                yield f"{where}:{number}", line
        if rows:
            raise UserError(f"{where} ends after row {len(rows)} of a board of {self.side} rows; give the others too")

    def _clean(self, line: str) -> str:
        """Return a line without the characters around its cells."""
        return line

    def _parse_cells(self, text: str, where: str, token_of: dict[str, int], only: str) -> np.ndarray:
        cells = "".join(self._clean(line) for line in text.splitlines())
        if len(cells) != self.side**2:
            raise UserError(
                f"{where} has {len(cells)} characters, this model's puzzles have {self.side**2} ({self.name}); "
                "give one for every cell, row by row"
            )
        for number, symbol in enumerate(cells):
            if symbol not in token_of:
                raise UserError(
                    f"{where} has {symbol!r} in cell {number + 1} (row {number // self.side + 1}, column "
                    f"{number % self.side + 1}), where only {only} can be; correct it"
                )
        return np.array([token_of[symbol] for symbol in cells], dtype=np.uint8)


def joined(names: Sequence[str], last: str = "and") -> str:
    """Return "a, b and c"."""
    return f" {last} ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def some(names: Sequence[str], most: int = 3) -> str:
    """Return "a, b and c", or the first names and how many more there are."""
    return f"{', '.join(names[:most])} and {len(names) - most} more" if len(names) > most else joined(names)


def count(number: int, what: str) -> str:
    """Return "1 cell" or "2 cells"."""
    return f"{number} {what}{'' if number == 1 else 's'}"
