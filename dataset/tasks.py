"""The tasks whose boards people can read: text to tokens, tokens to lines for a terminal, and whether an answer is
right. A closed table, told by the shape of a dataset: Sudoku, mazes, ARC.
"""
# S = cells of a board, L = side of a board, D = digits, U = rows, columns, boxes

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dataset import arc, maze
from dataset.augment import BOXES, Box, box_of
from dataset.sudoku import unit_ids, valid_solutions

Plain = str | list[list[int]]
"""A board for programs: text, a character for each cell, or of ARC the rows of a grid."""

Cell = Callable[[int, str, str], str]
"""Writes a cell of a board, two columns wide: from its number, its text and, where it has one, a colour of its own."""

# ANSI codes of what was given, what the answer adds, what is wrong, what changed, and what is in the background.
_GIVEN, _ADDED, _WRONG, _CHANGED, _GREY = "1", "36", "31", "7", "90"


@dataclass(frozen=True)
class Verdict:
    """What is known of an answer.

    `valid`: whether it is what the task asks for in form: a complete Sudoku that keeps its clues, one path through the
    maze, a grid. `solved`: whether it is right; None where nobody can tell. `reason`: a phrase for people.
    """

    valid: bool
    solved: bool | None
    reason: str


class BoardTask(ABC):
    """One task of one size. Boards are arrays of tokens (S,), row by row."""

    name: str  # such as "sudoku 3x3"
    side: int  # L
    has_one_solution = True  # so that a cell that differs from it is wrong
    _added_mark = ""
    _colors_are_marks = True

    @abstractmethod
    def plain(self, tokens_S: np.ndarray) -> Plain:
        """The board as programs take it, whatever the tokens are; "?" is a token that can't be on a board."""

    @abstractmethod
    def check(self, question_S: np.ndarray, answer_S: np.ndarray, solution_S: np.ndarray | None = None) -> Verdict:
        """Judges an answer by the rules of the task; only where it has none, as ARC, by the solution."""

    @abstractmethod
    def _against_rules(self, question_S: np.ndarray, answer_S: np.ndarray) -> np.ndarray:
        """(S,) bool: cells that need no solution to be told as wrong."""

    @abstractmethod
    def _lines(self, tokens_S: np.ndarray, cell: Cell) -> list[str]:
        """The board for a terminal."""

    def show(
        self,
        tokens_S: np.ndarray,
        *,
        question_S: np.ndarray | None = None,
        previous_S: np.ndarray | None = None,
        solution_S: np.ndarray | None = None,
        color: bool,
    ) -> str:
        """A board for a terminal: lines of text, without a line end behind the last.

        Args:
            question_S: the puzzle that the tokens answer; what isn't in it is told from what was given.
            previous_S: an earlier answer; cells that differ from it are marked.
            solution_S: cells that differ from it are marked as wrong; without it, those that are against the rules.
            color: with ANSI colours; else marks behind the cells.
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
        """What the marks of `show` mean."""
        if color and self._colors_are_marks:
            return "bold: given, cyan: the model's, reversed: changed, red: wrong"
        added = f"{self._added_mark} the model's, " if self._added_mark else ""
        return f"{added}* changed, ! wrong, × changed and wrong"

    def _row(self, row: int) -> range:
        return range(row * self.side, (row + 1) * self.side)


class TextTask(BoardTask):
    """A task whose boards are texts with a character for each cell."""

    @abstractmethod
    def parse(self, text: str, where: str) -> np.ndarray:
        """The tokens of a puzzle, uint8. Raises ValueError that begins with `where` for a text that is none."""

    @abstractmethod
    def parse_solution(self, text: str, where: str, question_S: np.ndarray) -> np.ndarray:
        """The tokens of a solution of the question, uint8. Raises ValueError that begins with `where`."""

    def split(self, text: str, where: str) -> Iterator[tuple[str, str]]:
        """The puzzles of a text, with where each begins: one on a line, or on L lines of L characters.

        Raises ValueError for a line that is neither.
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
                raise ValueError(
                    f"{where}:{number} has {len(line)} characters, but is row {len(rows) + 1} of a board whose rows "
                    f"have {self.side}; correct it, or give a puzzle on each line"
                )
            elif line:
                yield f"{where}:{number}", line
        if rows:
            raise ValueError(f"{where} ends after row {len(rows)} of a board of {self.side} rows; give the others too")

    def _clean(self, line: str) -> str:
        """A line without what surrounds its cells."""
        return line

    def _parse_cells(self, text: str, where: str, token_of: dict[str, int], only: str) -> np.ndarray:
        cells = "".join(self._clean(line) for line in text.splitlines())
        if len(cells) != self.side**2:
            raise ValueError(
                f"{where} has {len(cells)} characters, this model's puzzles have {self.side**2} ({self.name}); "
                "give one for every cell, row by row"
            )
        for number, symbol in enumerate(cells):
            if symbol not in token_of:
                raise ValueError(
                    f"{where} has {symbol!r} in cell {number + 1} (row {number // self.side + 1}, column "
                    f"{number % self.side + 1}), where only {only} can be; correct it"
                )
        return np.array([token_of[symbol] for symbol in cells], dtype=np.uint8)


def task_of_shape(seq_len: int, vocab_size: int) -> BoardTask | None:
    """The task of examples of so many tokens of so many kinds; None where none is known."""
    box = box_of(seq_len, vocab_size)
    if box is not None:
        return SudokuTask(box)
    if (seq_len, vocab_size) == (arc.SEQ_LEN, arc.VOCAB_SIZE):
        return ArcTask()
    if maze.is_maze(seq_len, vocab_size):
        return MazeTask(math.isqrt(seq_len))
    return None


KNOWN_SHAPES = (
    f"Sudoku: {', '.join(f'{box.num_cells} of {box.side + 2}' for box in BOXES.values())}; "
    f"maze: a square of {maze.VOCAB_SIZE}; ARC: {arc.SEQ_LEN} of {arc.VOCAB_SIZE}"
)
"""How many tokens of how many kinds, for messages."""


def _some(names: Sequence[str], most: int = 3) -> str:
    """a, b and c; or the first of them and how many more there are."""
    if len(names) > most:
        return f"{', '.join(names[:most])} and {len(names) - most} more"
    return " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


# ---- Sudoku ----------------------------------------------------------------------------------------------

_UNITS = ("row", "column", "box")


class SudokuTask(TextTask):
    """Tokens: 0 padding, 1 a blank, 2 the digit 1."""

    _added_mark = "'"

    def __init__(self, box: Box) -> None:
        self.name, self.side, self._box = f"sudoku {box}", box.side, box
        self._symbols = "?." + "123456789"[: box.side]
        # The cells of every row, column and box.
        self._cells_ULL = unit_ids(box).argsort(1, kind="stable").reshape(len(_UNITS), box.side, box.side)

    def parse(self, text: str, where: str) -> np.ndarray:
        token_of = {symbol: token for token, symbol in enumerate(self._symbols) if token} | {"0": 1}
        tokens_S = self._parse_cells(text, where, token_of, f"1 to {self.side}, and . or 0 for a blank,")
        for unit, number, digit, places in self._repeated(tokens_S):
            across = {"row": "columns", "column": "rows", "box": "its cells"}[unit]
            raise ValueError(
                f"{where} has the digit {digit} twice in {unit} {number} ({across} {_some(places)}); correct it"
            )
        return tokens_S

    def parse_solution(self, text: str, where: str, question_S: np.ndarray) -> np.ndarray:
        token_of = {symbol: token for token, symbol in enumerate(self._symbols) if token > 1}
        solution_S = self._parse_cells(text, where, token_of, f"1 to {self.side}")
        verdict = self.check(question_S, solution_S)
        if not verdict.solved:
            raise ValueError(f"{where} is no solution of its question: {verdict.reason}; correct it")
        return solution_S

    def plain(self, tokens_S: np.ndarray) -> str:
        return "".join(self._symbols[token] for token in tokens_S)

    def check(self, question_S: np.ndarray, answer_S: np.ndarray, solution_S: np.ndarray | None = None) -> Verdict:
        faults = []
        if num_blank := int((answer_S < 2).sum()):
            faults.append(f"{_count(num_blank, 'cell')} left blank")
        if num_altered := int(((question_S > 1) & (answer_S != question_S)).sum()):
            faults.append(f"{_count(num_altered, 'clue')} altered")
        if units := list(dict.fromkeys(f"{unit} {number}" for unit, number, _, _ in self._repeated(answer_S))):
            faults.append(f"a digit stands twice in {_some(units)}")
        if faults:
            return Verdict(False, False, "; ".join(faults))
        assert valid_solutions((answer_S - 1)[None], self._box)[0], "no blanks and nothing twice is all that there is"
        return Verdict(True, True, "every row, column and box holds each digit once, and the clues are kept")

    def _repeated(self, tokens_S: np.ndarray) -> list[tuple[str, int, int, list[str]]]:
        """Digits that a unit holds more than once: the unit, its number, the digit, its places there, all from 1."""
        units_ULL = tokens_S[self._cells_ULL]
        num_ULD = (units_ULL[:, :, :, None] == np.arange(2, self.side + 2)).sum(2)
        found = []
        for unit, number, digit in np.argwhere(num_ULD > 1).tolist():
            places = np.flatnonzero(units_ULL[unit, number] == digit + 2) + 1
            found.append((_UNITS[unit], number + 1, digit + 1, [str(place) for place in places]))
        return found

    def _against_rules(self, question_S: np.ndarray, answer_S: np.ndarray) -> np.ndarray:
        wrong_S = (question_S > 1) & (answer_S != question_S)
        for unit, number, digit, _ in self._repeated(answer_S):
            cells_L = self._cells_ULL[_UNITS.index(unit), number - 1]
            # The clue that a digit repeats is right.
            wrong_S[cells_L] |= (answer_S[cells_L] == digit + 1) & (answer_S[cells_L] != question_S[cells_L])
        return wrong_S

    def _lines(self, tokens_S: np.ndarray, cell: Cell) -> list[str]:
        rows, columns = self._box
        edge = "─" * (3 * columns + 1)
        top, between, bottom = (f"{ends[0]}{ends[1].join([edge] * rows)}{ends[2]}" for ends in ("┌┬┐", "├┼┤", "└┴┘"))
        lines = [top]
        for row in range(self.side):
            if row and row % rows == 0:
                lines.append(between)
            cells = []
            for number in self._row(row):
                token = tokens_S[number]
                cells.append(" " + cell(number, f"{self._symbols[token]} ", _GREY if token < 2 else ""))
            stacks = ["".join(cells[left : left + columns]) + " " for left in range(0, self.side, columns)]
            lines.append(f"│{'│'.join(stacks)}│")
        return [*lines, bottom]

    def _clean(self, line: str) -> str:
        return line.strip()


# ---- mazes -----------------------------------------------------------------------------------------------


class MazeTask(TextTask):
    """Tokens and characters are those of dataset/maze.py."""

    has_one_solution = False

    def __init__(self, side: int) -> None:
        self.name, self.side = f"maze {side}x{side}", side

    def parse(self, text: str, where: str) -> np.ndarray:
        token_of = {symbol: token for token, symbol in enumerate(maze.SYMBOLS) if 0 < token < maze.PATH}
        tokens_S = self._parse_cells(text, where, token_of, "# for a wall, blank, S and G")
        for symbol in "SG":
            num = int((tokens_S == token_of[symbol]).sum())
            if num != 1:
                raise ValueError(f"{where} has {num or 'no'} {symbol}, where a maze has one; correct it")
        if maze.shortest_path(tokens_S.reshape(self.side, self.side)) is None:
            raise ValueError(f"{where} has no way from S to G; open one")
        return tokens_S

    def parse_solution(self, text: str, where: str, question_S: np.ndarray) -> np.ndarray:
        token_of = {symbol: token for token, symbol in enumerate(maze.SYMBOLS) if token}
        solution_S = self._parse_cells(text, where, token_of, "# for a wall, blank, S, G and o for the path")
        verdict = self.check(question_S, solution_S)
        if not verdict.valid:
            raise ValueError(f"{where} is no solution of its question: {verdict.reason}; correct it")
        return solution_S

    def plain(self, tokens_S: np.ndarray) -> str:
        return "".join("?" if token == maze.PADDING else maze.SYMBOLS[token] for token in tokens_S)

    def check(self, question_S: np.ndarray, answer_S: np.ndarray, solution_S: np.ndarray | None = None) -> Verdict:
        judged = maze.judge_paths(question_S[None], answer_S[None])
        if not judged["path_valid"][0]:
            if num_altered := int(self._against_rules(question_S, answer_S).sum()):
                return Verdict(False, False, f"{_count(num_altered, 'cell')} of the maze altered")
            if not (answer_S == maze.PATH).any():
                return Verdict(False, False, "no path is marked")
            return Verdict(False, False, "the marked cells are not one path from S to G")
        num_steps = int((answer_S == maze.PATH).sum()) + 1
        if judged["path_optimal"][0]:
            return Verdict(True, True, f"a path of {_count(num_steps, 'step')}, and there is no shorter one")
        shortest = maze.shortest_path(question_S.reshape(self.side, self.side))
        assert shortest is not None
        return Verdict(True, False, f"a path of {num_steps} steps, but the shortest has {len(shortest) - 1}")

    def _against_rules(self, question_S: np.ndarray, answer_S: np.ndarray) -> np.ndarray:
        return (answer_S != question_S) & ~((answer_S == maze.PATH) & (question_S == maze.BLANK))

    def _lines(self, tokens_S: np.ndarray, cell: Cell) -> list[str]:
        edge = "─" * (2 * self.side)
        lines = [f"┌{edge}┐"]
        for row in range(self.side):
            cells = []
            for number in self._row(row):
                token = tokens_S[number]
                is_wall = token == maze.WALL
                text = "██" if is_wall else "? " if token == maze.PADDING else f"{maze.SYMBOLS[token]} "
                cells.append(cell(number, text, _GREY if is_wall else ""))
            lines.append(f"│{''.join(cells)}│")
        return [*lines, f"└{edge}┘"]


# ---- ARC -------------------------------------------------------------------------------------------------

# Of the 256 colours of a terminal the nearest to those in which ARC is usually shown: background, then text.
_ARC_COLORS = (
    *((16, 240), (26, 231), (160, 231), (34, 16), (220, 16)),
    *((246, 16), (163, 231), (208, 16), (117, 16), (88, 231)),
)


class ArcTask(BoardTask):
    """Tokens are those of dataset/arc.py. What counts of an answer is the grid that is cropped from it."""

    name, side = "arc", arc.SIDE
    _colors_are_marks = False

    def plain(self, tokens_S: np.ndarray) -> list[list[int]]:
        return arc.crop(tokens_S[None])[0].tolist()

    def check(self, question_S: np.ndarray, answer_S: np.ndarray, solution_S: np.ndarray | None = None) -> Verdict:
        (answer_hw,) = arc.crop(answer_S[None])
        if answer_hw.size == 0:
            return Verdict(False, False, "the answer is no grid")
        if solution_S is None:
            return Verdict(True, None, "not checked, since the task gives no output")
        (solution_hw,) = arc.crop(solution_S[None])
        if answer_hw.shape != solution_hw.shape:
            shapes = [f"{height}x{width}" for height, width in (answer_hw.shape, solution_hw.shape)]
            return Verdict(True, False, f"the grid is {shapes[0]}, the output {shapes[1]}")
        if num_wrong := int((answer_hw != solution_hw).sum()):
            return Verdict(True, False, f"{num_wrong} of {_count(answer_hw.size, 'cell')} not as in the output")
        return Verdict(True, True, "the output that the task gives")

    def _against_rules(self, question_S: np.ndarray, answer_S: np.ndarray) -> np.ndarray:
        return np.zeros(len(answer_S), dtype=bool)

    def _lines(self, tokens_S: np.ndarray, cell: Cell) -> list[str]:
        """The cropped grid; of a canvas whose grid begins elsewhere, as in training, the part that has colours."""
        canvas_LL = tokens_S.reshape(self.side, self.side)
        height, width = arc.crop(tokens_S[None])[0].shape
        rows, columns = range(height), range(width)
        if not height:
            colored = np.nonzero(canvas_LL >= arc.FIRST_COLOUR)
            if len(colored[0]) == 0:
                return ["(no grid)"]
            rows, columns = (range(axis.min(), axis.max() + 1) for axis in colored)
        lines = []
        for row in rows:
            cells = []
            for column in columns:
                color = int(canvas_LL[row, column]) - arc.FIRST_COLOUR
                number = row * self.side + column
                if color < 0:
                    cells.append(cell(number, "· ", _GREY))
                else:
                    background, text = _ARC_COLORS[color]
                    cells.append(cell(number, f"{color} ", f"48;5;{background};38;5;{text}"))
            lines.append("".join(cells).rstrip())
        return lines
