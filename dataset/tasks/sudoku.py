"""Sudoku as a task."""
# N = boards, S = cells of a board, L = side of a board, D = digits, U = rows, columns, boxes

from typing import Any

import numpy as np

from dataset.augment import BOXES, Box, box_of
from dataset.sudoku import unit_ids, valid_solutions
from dataset.tasks.base import GREY, Cell, Fault, TextTask, Verdict, count, some
from utils.errors import UserError

_UNITS = ("row", "column", "box")


class SudokuTask(TextTask):
    """Tokens: 0 padding, 1 a blank, 2 the digit 1."""

    kind = "sudoku"
    plural = "Sudokus"
    shapes = f"Sudoku: {', '.join(f'{box.num_cells} of {box.side + 2}' for box in BOXES.values())}"
    checked = "Sudoku: labels that are no valid board or change a clue."
    _added_mark = "'"

    def __init__(self, box: Box) -> None:
        self.name, self.title, self.side, self._box = f"sudoku {box}", f"Sudoku {box}", box.side, box
        self._symbols = "?." + "123456789"[: box.side]
        # The cells of every row, column and box.
        self._cells_ULL = unit_ids(box).argsort(1, kind="stable").reshape(len(_UNITS), box.side, box.side)

    @classmethod
    def of_shape(cls, seq_len: int, vocab_size: int) -> "SudokuTask | None":
        box = box_of(seq_len, vocab_size)
        return None if box is None else cls(box)

    def parse(self, text: str, where: str) -> np.ndarray:
        token_of = {symbol: token for token, symbol in enumerate(self._symbols) if token} | {"0": 1}
        tokens_S = self._parse_cells(text, where, token_of, f"1 to {self.side}, and . or 0 for a blank,")
        for unit, number, digit, places in self._repeated(tokens_S):
            across = {"row": "columns", "column": "rows", "box": "its cells"}[unit]
            raise UserError(
                f"{where} has the digit {digit} twice in {unit} {number} ({across} {some(places)}); correct it"
            )
        return tokens_S

    def parse_solution(self, text: str, where: str, question_S: np.ndarray) -> np.ndarray:
        token_of = {symbol: token for token, symbol in enumerate(self._symbols) if token > 1}
        solution_S = self._parse_cells(text, where, token_of, f"1 to {self.side}")
        verdict = self.verdict(question_S, solution_S)
        if not verdict.solved:
            raise UserError(f"{where} is no solution of its question: {verdict.reason}; correct it")
        return solution_S

    def plain(self, tokens_S: np.ndarray) -> str:
        return "".join(self._symbols[token] for token in tokens_S)

    def verdict(self, question_S: np.ndarray, answer_S: np.ndarray, solution_S: np.ndarray | None = None) -> Verdict:
        faults = []
        if num_blank := int((answer_S < 2).sum()):
            faults.append(f"{count(num_blank, 'cell')} left blank")
        if num_altered := int(((question_S > 1) & (answer_S != question_S)).sum()):
            faults.append(f"{count(num_altered, 'clue')} altered")
        if units := list(dict.fromkeys(f"{unit} {number}" for unit, number, _, _ in self._repeated(answer_S))):
            faults.append(f"a digit stands twice in {some(units)}")
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
                cells.append(" " + cell(number, f"{self._symbols[token]} ", GREY if token < 2 else ""))
            stacks = ["".join(cells[left : left + columns]) + " " for left in range(0, self.side, columns)]
            lines.append(f"│{'│'.join(stacks)}│")
        return [*lines, bottom]

    def _clean(self, line: str) -> str:
        return line.strip()

    @property
    def drawing(self) -> dict[str, Any]:
        return super().drawing | {"box": [self._box.rows, self._box.columns]}

    def faults(self, inputs_NS: np.ndarray, labels_NS: np.ndarray, labelled_NS: np.ndarray) -> dict[Fault, np.ndarray]:
        complete_N = labelled_NS.all(axis=1)
        # Token 1 is a blank, 2 the digit 1; where a label does not count, anything may stand.
        digits_NS = np.where(labelled_NS & (labels_NS > 0), labels_NS - 1, 0)
        changed_NS = (inputs_NS > 1) & labelled_NS & (inputs_NS != labels_NS)
        return {
            ("inputs", "has padding inside the board"): (inputs_NS == 0).any(axis=1),
            ("labels", f"is no valid board with boxes of {self._box}"): complete_N
            & ~valid_solutions(digits_NS, self._box),
            ("labels", "changes a clue of its input"): changed_NS.any(axis=1),
        }
