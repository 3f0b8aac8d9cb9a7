"""What a task can say of its boards. Each kind of task has a file of its own beside this one.

A task is a kind of puzzle in one size, told by the shape of a dataset: the number of tokens and of their kinds.
"""
# B, N = examples, S = cells of a board, L = side of a board, U = random numbers for a symmetry, V = vocabulary

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from dataset.schema import PuzzleSet, Split
from utils.errors import UserError

if TYPE_CHECKING:  # dataset.validate and other programs import all tasks, and start much faster without PyTorch
    import torch

    from utils.batch import Batch
    from utils.dist.world import World

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


class Symmetries(ABC):
    """The symmetries of a task, of which augmentation draws one for every visit of an example.

    On the host, `choose` says what random numbers mean, in NumPy. On the device, `apply` moves the tokens.
    """

    description: str  # for the head of a run, such as "symmetries of Sudoku 3x3"
    num_draws: int  # U

    @abstractmethod
    def choose(self, uniform_BU: np.ndarray, examples_B: np.ndarray) -> dict[str, np.ndarray]:
        """Return what `apply` needs, as small arrays: unless that is another one, "cells" and "names" as in `move`.

        Args:
            uniform_BU: Random numbers in [0, 1).
            examples_B: The numbers of the examples.
        """

    def apply(self, batch: Batch, chosen: Batch) -> Batch:
        """Return the batch with inputs and labels transformed alike. Ignored labels, below 0, keep their value."""
        return {**batch, **{name: move(batch[name], chosen) for name in ("inputs", "labels")}}


def move(tokens_BS: torch.Tensor, chosen: Batch) -> torch.Tensor:
    """Return boards whose cells have changed places and whose tokens have new names.

    Args:
        chosen: "cells" (B, S): for each cell of the result the cell of the original that it shows. And "names" (B, V),
            if tokens are renamed: what each token becomes.
    """
    moved_BS = tokens_BS.gather(1, chosen["cells"].long())
    return rename(moved_BS, chosen["names"]) if "names" in chosen else moved_BS


def rename(tokens_BS: torch.Tensor, names_BV: torch.Tensor) -> torch.Tensor:
    """Return each token's new name in the table of its row. Ignored labels, below 0, keep their value."""
    renamed_BS = names_BV.to(tokens_BS.dtype).gather(1, tokens_BS.clamp(min=0).long())
    return renamed_BS.where(tokens_BS >= 0, tokens_BS)


class Votes(Protocol):
    """Counts the answers to several versions of a puzzle as votes. dataset/arc_votes.py has an example."""

    metrics: tuple[str, ...]

    @property
    def num_tasks(self) -> int: ...

    def clear(self) -> None: ...

    def add(
        self, identifiers_N: np.ndarray, inputs_NS: np.ndarray, predictions_NS: np.ndarray, confidence_N: np.ndarray
    ) -> None: ...

    def result(self, world: World, save_to: Path | None = None) -> dict[str, float]: ...


class BoardTask(ABC):
    """A kind of puzzle in one size. Boards are arrays of tokens (S,), row by row."""

    kind: ClassVar[str]  # one word, such as "sudoku"
    singular: ClassVar[str]  # for messages, such as "a Sudoku"
    plural: ClassVar[str]  # for messages, such as "Sudokus"
    shapes: ClassVar[str]  # for messages, such as "Sudoku: 81 of 11": how many tokens of how many kinds
    wrong_shape: ClassVar[str]  # how a message ends about data of another shape, where this kind of task was asked for
    checked: ClassVar[str]  # for the help of dataset.validate: which faults are found
    same_examples: ClassVar[str] = ""  # for that help too: when examples with other tokens are the same (`identity`)
    metrics: ClassVar[tuple[str, ...]] = ()  # what `judge` finds out
    most_variations: ClassVar[float] = 0  # how many `variations` a puzzle has
    lets_vote: ClassVar[bool] = False  # if so, `votes` counts answers, and nothing is judged

    name: str  # such as "sudoku 3x3"
    title: str  # the name in reports, such as "Sudoku 3x3"
    tokens: tuple[str, ...] = ()  # what each token is called, such as "wall"; empty if tokens are just numbers
    side: int  # L
    has_one_solution = True  # if so, a cell that differs from the solution is wrong
    _added_mark = ""
    _colors_are_marks = True

    @classmethod
    @abstractmethod
    def of_shape(cls, seq_len: int, vocab_size: int) -> BoardTask | None:
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
        return {"kind": self.kind, "rows": self.side, "columns": self.side, "tokens": list(self.tokens)}

    # ---- symmetries --------------------------------------------------------------------------------------

    def symmetries(self, sets: Sequence[PuzzleSet]) -> Symmetries | None:
        """Return the symmetries for augmentation on the fly. None: they are not known.

        Args:
            sets: The training sets, whose examples are numbered one set after the other.
        """
        return None

    def variations(self, numbers_N: np.ndarray, count: int) -> dict[str, np.ndarray]:
        """Return symmetries that can be undone, for answers that vote: "cells" and "names" as `move` takes them.

        Args:
            numbers_N: Variation k of the example in row r of the dataset has the number r * count + k. What it is
                depends on r and k alone, and the first variation is the example itself.
            count: How many variations every example has.
        """
        raise NotImplementedError(f"answers of {self.kind} can't be turned back")

    # ---- evaluation --------------------------------------------------------------------------------------

    def judge(self, inputs_BS: torch.Tensor, predictions_BS: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what holds of each answer, (B,) bool on the same device for every name in `metrics`.

        Args:
            inputs_BS, predictions_BS: Tokens, integers of any type.
        """
        return {}

    def scores(self, split: Split) -> bool:
        """Return whether an evaluation of the split makes use of this task unless told otherwise."""
        return bool(self.metrics)

    @classmethod
    def votes(cls, split: Split) -> Votes:
        """Return what counts the answers to a split as votes.

        Raises:
            UserError: If something is missing in the dataset, or wrong.
        """
        raise NotImplementedError(f"answers of {cls.kind} don't vote")

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
