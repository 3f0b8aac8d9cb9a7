"""Define the Sudoku task. The solver and the symmetries are in dataset/sudoku.py and augment.py."""
# B, N = boards, S = cells of a board, L = side of a board, D = digits, V = vocabulary
# U = the three kinds of units (row, column, box); in symmetries: random numbers for one symmetry

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from dataset.augment import BOXES, Box, box_of, draws_per_symmetry, symmetries_from
from dataset.schema import PuzzleSet
from dataset.sudoku import DIGITS, count_solutions, digits_in_words, symmetry_keys, unit_ids, valid_solutions
from dataset.tasks.base import GREY, Cell, Fault, Line, Symmetries, TextTask, Verdict, count, some
from utils.errors import UserError

if TYPE_CHECKING:
    import torch

_FIRST_DIGIT = 2
# Keeps the random numbers of variations independent of other random numbers.
_VARIATIONS_STREAM = 0x77A
# Simple Sudoku writes blanks as X.
_BLANKS = ".0Xx"
# The section of a .sdk file that holds the clues, and what frames the boxes of a .ss file.
_PUZZLE, _FRAME = "[puzzle]", set(" |+-*=")
_WITHOUT_FRAME = str.maketrans("", "", " |")
_UNITS = ("row", "column", "box")


class SudokuTask(TextTask):
    """Sudokus of one size. Token 0 is padding, 1 a blank, and d + 1 the digit d."""

    kind = "sudoku"
    plural = "Sudokus"
    shapes = f"Sudoku: {', '.join(f'{box.num_cells} of {box.side + 2}' for box in BOXES.values())}"
    checked = "Sudoku: labels that are no valid board or change a clue."
    # Whether an answer is a valid board, and whether it keeps the clues. An answer with both
    # properties solves the puzzle, even if it differs from the label.
    metrics = ("valid_boards", "clues_kept")
    most_variations = math.inf
    blank = 1
    _added_mark = "'"

    def __init__(self, box: Box) -> None:
        self.name, self.title, self.side, self._box = f"sudoku {box}", f"Sudoku {box}", box.side, box
        self.rows = self.columns = box.side
        self.symbols = "?." + DIGITS[: box.side]
        self.tokens = ("padding", "blank", *self.symbols[2:])
        digits = list(enumerate(self.symbols))[_FIRST_DIGIT:]
        self._token_of = {written: token for token, digit in digits for written in (digit, digit.lower())}
        # The numbers of the cells in every row, column and box.
        self._cells_ULL = unit_ids(box).argsort(1, kind="stable").reshape(len(_UNITS), box.side, box.side)

    @classmethod
    def of_shape(cls, seq_len: int, vocab_size: int) -> SudokuTask | None:
        box = box_of(seq_len, vocab_size)
        return None if box is None else cls(box)

    def of_other_size(self, num_cells: int) -> SudokuTask | None:
        return next((SudokuTask(box) for box in BOXES.values() if box.num_cells == num_cells), None)

    def parse(self, text: str, where: str) -> np.ndarray:
        token_of = self._token_of | dict.fromkeys(_BLANKS, 1)
        tokens_S = self._parse_cells(text, where, token_of, f"{digits_in_words(self.side)}, and . or 0 for a blank,")
        for unit, number, digit in self._repeated(tokens_S):
            raise UserError(f"{where} has the digit {DIGITS[digit - 1]} twice in {unit} {number}; correct it")
        return tokens_S

    def symbols_of_solutions(self) -> tuple[dict[str, int], str]:
        return self._token_of, digits_in_words(self.side)

    def verdict(self, question_S: np.ndarray, answer_S: np.ndarray, solution_S: np.ndarray | None = None) -> Verdict:
        faults = []
        if num_blank := int((answer_S < 2).sum()):
            faults.append(f"{count(num_blank, 'cell')} left blank")
        if num_altered := int(((question_S > 1) & (answer_S != question_S)).sum()):
            faults.append(f"{count(num_altered, 'clue')} altered")
        if units := list(dict.fromkeys(f"{unit} {number}" for unit, number, _ in self._repeated(answer_S))):
            faults.append(f"a digit stands twice in {some(units)}")
        if faults:
            return Verdict(False, False, "; ".join(faults))
        assert valid_solutions((answer_S - 1)[None], self._box)[0], "no blanks and nothing twice is all that there is"
        return Verdict(True, True, "every row, column and box holds each digit once, and the clues are kept")

    def _repeated(self, tokens_S: np.ndarray) -> list[tuple[str, int, int]]:
        """Return the unit, its number from 1, and the digit that it holds more than once."""
        units_ULL = tokens_S[self._cells_ULL]
        num_ULD = (units_ULL[:, :, :, None] == np.arange(2, self.side + 2)).sum(2)
        return [(_UNITS[unit], number + 1, digit + 1) for unit, number, digit in np.argwhere(num_ULD > 1).tolist()]

    def _against_rules(self, question_S: np.ndarray, answer_S: np.ndarray) -> np.ndarray:
        wrong_S = (question_S > 1) & (answer_S != question_S)
        for unit, number, digit in self._repeated(answer_S):
            cells_L = self._cells_ULL[_UNITS.index(unit), number - 1]
            # If the answer repeats a clue, the clue itself is not wrong.
            wrong_S[cells_L] |= (answer_S[cells_L] == digit + 1) & (answer_S[cells_L] != question_S[cells_L])
        return wrong_S

    def _lines(self, tokens_S: np.ndarray, cell: Cell) -> list[str]:
        rows, columns = self._box
        edge = "─" * (3 * columns + 1)
        top, between, bottom = (f"{ends[0]}{ends[1].join([edge] * rows)}{ends[2]}" for ends in ("┌┬┐", "├┼┤", "└┴┘"))
        cells = [
            " " + cell(number, f"{self.symbols[token]} ", GREY if token < 2 else "")
            for number, token in enumerate(tokens_S.tolist())
        ]
        lines = [top]
        for first in range(0, len(cells), self.side):
            if first and first % (self.side * rows) == 0:
                lines.append(between)
            stacks = ["".join(cells[first + left :][:columns]) + " " for left in range(0, self.side, columns)]
            lines.append(f"│{'│'.join(stacks)}│")
        return [*lines, bottom]

    def lines_in(self, text: str) -> list[Line]:
        """Return the lines of boards, also of those that SadMan and Simple Sudoku write."""
        lines, section = [], _PUZZLE
        for number, line in super().lines_in(text):
            line = line.strip()
            if line.startswith("["):
                section = line.lower()
            elif section == _PUZZLE and not line.startswith("#") and (not line or set(line) - _FRAME):
                lines.append((number, line.translate(_WITHOUT_FRAME)))
        return lines

    @property
    def drawing(self) -> dict[str, Any]:
        return super().drawing | {"box": [self._box.rows, self._box.columns]}

    def symmetries(self, sets: Sequence[PuzzleSet]) -> SudokuSymmetries:
        return SudokuSymmetries(self._box)

    def variations(self, numbers_N: np.ndarray, count: int) -> dict[str, np.ndarray]:
        num_draws = draws_per_symmetry(self._box)
        drawn = {
            row: np.random.default_rng([_VARIATIONS_STREAM, row]).random((count, num_draws))
            for row in set((numbers_N // count).tolist())
        }
        uniform_NU = np.stack([drawn[number // count][number % count] for number in numbers_N.tolist()])
        chosen = SudokuSymmetries(self._box).choose(uniform_NU, numbers_N)
        is_itself_N = numbers_N % count == 0
        for array in chosen.values():
            array[is_itself_N] = np.arange(array.shape[1], dtype=array.dtype)
        return chosen

    def judge(self, inputs_BS: torch.Tensor, predictions_BS: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = self._box
        bits_BS = (1 << (predictions_BS.int() - _FIRST_DIGIT).clamp(min=0)) * (predictions_BS >= _FIRST_DIGIT)
        # A sum of at most L powers of two has L bits only if the powers are L different ones.
        every_digit = (1 << self.side) - 1
        # The axes are: board, band, row in the band, stack, column in the stack.
        bands = bits_BS.view(-1, columns, rows, rows, columns)
        sums = (bands.sum((3, 4)), bands.sum((1, 2)), bands.sum((2, 4)))  # rows, columns, boxes
        of_rows_B, of_columns_B, of_boxes_B = ((unit_sums == every_digit).flatten(1).all(1) for unit_sums in sums)
        kept_B = ((inputs_BS < _FIRST_DIGIT) | (predictions_BS == inputs_BS)).all(1)
        return {"valid_boards": of_rows_B & of_columns_B & of_boxes_B, "clues_kept": kept_B}

    def faults(self, inputs_NS: np.ndarray, labels_NS: np.ndarray, labelled_NS: np.ndarray) -> dict[Fault, np.ndarray]:
        complete_N = labelled_NS.all(axis=1)
        # Blanks, padding and ignored labels become 0, which is no digit of a valid board.
        digits_NS = np.where(labelled_NS & (labels_NS > 0), labels_NS - 1, 0)
        changed_NS = (inputs_NS > 1) & labelled_NS & (inputs_NS != labels_NS)
        return {
            ("inputs", "has padding inside the board"): (inputs_NS == 0).any(axis=1),
            ("labels", f"is no valid board with boxes of {self._box}"): complete_N
            & ~valid_solutions(digits_NS, self._box),
            ("labels", "changes a clue of its input"): changed_NS.any(axis=1),
        }

    def images(
        self, inputs_NS: np.ndarray, labels_NS: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        yield from super().images(inputs_NS, labels_NS)
        # There are too many symmetries to try. Keys that all of them share stand for the images.
        puzzles_NS, solutions_NS = (np.maximum(tokens_NS, 1) - 1 for tokens_NS in (inputs_NS, labels_NS))
        yield *symmetry_keys(puzzles_NS, solutions_NS, self._box), np.ones(len(inputs_NS), bool)

    def may_have_several_answers(self, inputs_NS: np.ndarray) -> np.ndarray:
        return count_solutions(np.maximum(inputs_NS, 1) - 1, self._box) > 1


class SudokuSymmetries(Symmetries):
    """The symmetries that the builder draws too: see dataset/augment.py."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self.description = f"symmetries of Sudoku {box}"
        self.num_draws = draws_per_symmetry(box)

    def choose(self, uniform_BU: np.ndarray, examples_B: np.ndarray) -> dict[str, np.ndarray]:
        drawn = symmetries_from(uniform_BU, self._box)
        padding_B1 = np.zeros((len(uniform_BU), 1), np.uint8)
        # Digit d has token d + 1. The arrays are uint8, because they are copied to the device.
        return {
            "cells": drawn.cells_NS.astype(np.uint8),
            "names": np.concatenate([padding_B1, drawn.digits_ND + np.uint8(1)], axis=1),
        }
