"""What a task knows about its answers beyond comparing them with the labels: a closed table of evaluators by name.

An evaluator is made for a split and judges predictions where they are, without a wait for the device.
"""
# B = examples, S = cells of a board, L = side of a board

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

import torch

from dataset.augment import BOXES, box_of
from dataset.schema import Split

# Tokens of a Sudoku: 0 is padding, 1 a blank, 2 the digit 1.
_FIRST_DIGIT = 2


class Evaluator(Protocol):
    metrics: tuple[str, ...]

    def __call__(self, inputs_BS: torch.Tensor, predictions_BS: torch.Tensor) -> dict[str, torch.Tensor]:
        """Tokens (integers of any type) to what holds of each example: bool (B,) for every name in `metrics`, on the
        same device.
        """
        ...


class SudokuEvaluator:
    """Whether an answer is a valid board, whatever the label says, and whether it leaves the clues alone.

    An answer that is both solves the puzzle. Raises ValueError for a split that is no Sudoku.
    """

    metrics: tuple[str, ...] = ("valid_boards", "clues_kept")

    def __init__(self, split: Split) -> None:
        seq_len, vocab_size = split.metadata.seq_len, split.metadata.vocab_size
        box = box_of(seq_len, vocab_size)
        if box is None:
            known = ", ".join(f"{other.num_cells} of {other.side + 2}" for other in BOXES.values())
            raise ValueError(
                f"{split.path} has {seq_len} tokens of {vocab_size} kinds, which is no Sudoku ({known} are); "
                "leave the evaluator sudoku out"
            )
        self._box = box

    def __call__(self, inputs_BS: torch.Tensor, predictions_BS: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns, side = self._box.rows, self._box.columns, self._box.side
        is_digit_BS = predictions_BS >= _FIRST_DIGIT
        bits_BS = torch.where(is_digit_BS, 1 << (predictions_BS.int() - _FIRST_DIGIT).clamp(min=0), 0)
        # A sum of L or fewer powers of two has L bits only if it has L different ones: no carry, nothing twice.
        every_digit = (1 << side) - 1
        bands = bits_BS.view(-1, columns, rows, rows, columns)  # band, row in it, stack, column in it
        sums = (bands.sum((3, 4)), bands.sum((1, 2)), bands.sum((2, 4)))  # of rows, columns and boxes
        valid_B = torch.stack([(unit_sums == every_digit).flatten(1).all(1) for unit_sums in sums]).all(0)
        kept_B = ((inputs_BS < _FIRST_DIGIT) | (predictions_BS == inputs_BS)).all(1)
        return {"valid_boards": valid_B, "clues_kept": kept_B}


EvaluatorName = Literal["sudoku"]
EVALUATORS: Mapping[EvaluatorName, Callable[[Split], Evaluator]] = {"sudoku": SudokuEvaluator}


class Evaluators:
    """Any number of evaluators as one, none included."""

    def __init__(self, evaluators: Sequence[Evaluator]) -> None:
        self._evaluators = evaluators
        self.metrics = tuple(name for evaluator in evaluators for name in evaluator.metrics)

    def __call__(self, inputs_BS: torch.Tensor, predictions_BS: torch.Tensor) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for evaluator in self._evaluators:
            found |= evaluator(inputs_BS, predictions_BS)
        return found


NO_EVALUATORS = Evaluators([])


def build_evaluators(names: Sequence[EvaluatorName], split: Split) -> Evaluators:
    """The evaluators of these names, each once. Raises ValueError for a split that one of them can't judge."""
    return Evaluators([EVALUATORS[name](split) for name in dict.fromkeys(names)])
