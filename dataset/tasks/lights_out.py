"""Define the task Lights Out: turn every lamp off by presses.

A press toggles a lamp and its neighbours above, below, left and right. The label is the solution
with the fewest presses. If several solutions have equally few, the label is the solution that
presses the first cell, row by row, in which they differ. So the board alone decides the label.
"""
# B, N = boards, L = side of a board, S = cells (L * L), T = 8 transforms,
# K = sets of presses that toggle nothing

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from dataset.tasks.base import Fault, Verdict, count
from dataset.tasks.square import SquareTask
from dataset.transforms import transform_sources
from utils.errors import UserError

if TYPE_CHECKING:
    import torch

PADDING, DARK, LIT, LEAVE, PRESS = range(5)
VOCAB_SIZE = 5
SYMBOLS = "?.*-x"
MIN_SIDE, MAX_SIDE = 3, 7
# The number of boards that are solved at a time, so that memory does not grow with the dataset.
_SOLVED_AT_ONCE = 4096


class LightsOutTask(SquareTask):
    """Lights Out boards of one size. Puzzles have the tokens 1 and 2, and answers 3 and 4."""

    kind, noun = "lights_out", "Lights Out"
    plural = "Lights Out boards"
    shapes = f"Lights Out: a square of {VOCAB_SIZE} with sides from {MIN_SIDE} to {MAX_SIDE}"
    checked = "Lights Out: labels that leave a lamp on, or are not the fewest presses."
    # Whether the presses turn every lamp off, and whether fewer presses could not. The label does
    # not matter, because a board can have several solutions.
    metrics = ("lamps_off", "fewest_presses")
    has_one_solution = False
    tokens = ("padding", "dark", "lit", "leave", "press")
    symbols = SYMBOLS
    looks = (("? ", ""), ("· ", ""), ("● ", ""), ("· ", ""), ("x ", ""))

    @classmethod
    def of_shape(cls, seq_len: int, vocab_size: int) -> LightsOutTask | None:
        sides = {side * side: side for side in range(MIN_SIDE, MAX_SIDE + 1)}
        return cls(sides[seq_len]) if vocab_size == VOCAB_SIZE and seq_len in sides else None

    def parse(self, text: str, where: str) -> np.ndarray:
        token_of = {".": DARK, "0": DARK, "*": LIT, "1": LIT}
        tokens_S = self._parse_cells(text, where, token_of, "* or 1 for a lit lamp, and . or 0 for a dark one,")
        if not solve((tokens_S == LIT)[None])[1][0]:
            raise UserError(f"{where} has no solution: no presses turn all of these lamps off; correct the board")
        return tokens_S

    def symbols_of_solutions(self) -> tuple[dict[str, int], str]:
        return {"-": LEAVE, "0": LEAVE, "x": PRESS, "1": PRESS}, "x or 1 for a press, and - or 0 for none,"

    def verdict(self, question_S: np.ndarray, answer_S: np.ndarray, solution_S: np.ndarray | None = None) -> Verdict:
        if num_wrong := int((answer_S < LEAVE).sum()):
            return Verdict(False, False, f"{count(num_wrong, 'cell')} neither pressed nor left alone")
        if num_lit := int(_left_on(question_S[None], answer_S[None]).sum()):
            return Verdict(True, False, f"{count(num_lit, 'lamp')} left on")
        num_presses = int((answer_S == PRESS).sum())
        fewest = int(solve((question_S == LIT)[None])[0].sum())
        presses = f"{num_presses} press{'' if num_presses == 1 else 'es'}"
        least = "and no fewer do" if num_presses == fewest else f"but {fewest} would do"
        return Verdict(True, True, f"every lamp is off after {presses}, {least}")

    def _against_rules(self, question_S: np.ndarray, answer_S: np.ndarray) -> np.ndarray:
        return (answer_S < LEAVE) | _left_on(question_S[None], answer_S[None])[0]

    def _allowed_transforms(self, inputs_NS: np.ndarray, labels_NS: np.ndarray) -> np.ndarray:
        # The identity is always allowed, even if the label is wrong.
        lit_NS, presses_NS = inputs_NS == LIT, labels_NS == PRESS
        others = transform_sources(self.side)[1:]
        allowed = [(solve(lit_NS[:, cells_S])[0] == presses_NS[:, cells_S]).all(1) for cells_S in others]
        return np.stack([np.ones(len(inputs_NS), bool), *allowed], axis=1)

    def judge(self, inputs_BS: torch.Tensor, predictions_BS: torch.Tensor) -> dict[str, torch.Tensor]:
        questions_BS, answers_BS = inputs_BS.cpu().numpy(), predictions_BS.cpu().numpy()
        off_B = (answers_BS >= LEAVE).all(1) & ~_left_on(questions_BS, answers_BS).any(1)
        fewest_B = solve(questions_BS == LIT)[0].sum(1) == (answers_BS == PRESS).sum(1)
        found = {"lamps_off": off_B, "fewest_presses": off_B & fewest_B}
        return {name: inputs_BS.new_tensor(found[name]).bool() for name in self.metrics}

    def faults(self, inputs_NS: np.ndarray, labels_NS: np.ndarray, labelled_NS: np.ndarray) -> dict[Fault, np.ndarray]:
        no_lamps_N = ((inputs_NS != DARK) & (inputs_NS != LIT)).any(1)
        complete_N = labelled_NS.all(1)
        no_presses_N = complete_N & (labels_NS < LEAVE).any(1)
        left_on_N = complete_N & ~no_presses_N & _left_on(inputs_NS, labels_NS).any(1)
        is_label_N = (solve(inputs_NS == LIT)[0] == (labels_NS == PRESS)).all(1)
        return {
            ("inputs", "has a cell that is neither dark nor lit"): no_lamps_N,
            ("labels", "has a cell that is neither pressed nor left alone"): no_presses_N,
            ("labels", "leaves a lamp on"): left_on_N,
            ("labels", "is not the first of the solutions with the fewest presses"): (
                complete_N & ~no_presses_N & ~left_on_N & ~is_label_N
            ),
        }


# ---- the puzzle ----


def toggled(presses_NS: np.ndarray) -> np.ndarray:
    """Return which lamps change if these cells are pressed, (N, S) bool."""
    side = int(presses_NS.shape[1] ** 0.5)
    presses_NLL = presses_NS.reshape(-1, side, side)
    lamps_NLL = presses_NLL.copy()
    lamps_NLL[:, 1:] ^= presses_NLL[:, :-1]
    lamps_NLL[:, :-1] ^= presses_NLL[:, 1:]
    lamps_NLL[:, :, 1:] ^= presses_NLL[:, :, :-1]
    lamps_NLL[:, :, :-1] ^= presses_NLL[:, :, 1:]
    return lamps_NLL.reshape(presses_NS.shape)


def _left_on(questions_NS: np.ndarray, answers_NS: np.ndarray) -> np.ndarray:
    """Return which lamps are on after the presses, (N, S) bool."""
    return (questions_NS == LIT) ^ toggled(answers_NS == PRESS)


def solve(lit_NS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the presses that are the labels of boards, (N, S) bool, and which boards have one."""
    num_cells = lit_NS.shape[1]
    inverse_SS, idle_KS = _algebra(num_cells)
    # These presses solve the boards that have a solution, and leave lamps on in the others. The
    # sums have at most 49 terms, so uint8 holds them.
    some_NS = (lit_NS.astype(np.uint8) @ inverse_SS % 2).astype(bool)
    is_solved_N = (toggled(some_NS) == lit_NS).all(1)
    presses_NS = np.empty_like(lit_NS)
    for start in range(0, len(lit_NS), _SOLVED_AT_ONCE):
        # Two solutions of a board differ by presses that toggle nothing.
        all_NKS = some_NS[start : start + _SOLVED_AT_ONCE, None, :] ^ idle_KS
        # The label has the largest of these numbers. The upper bits grow as presses get fewer. The
        # lower bits list the pressed cells, the first cell first. The numbers fit into 55 bits.
        in_order_NK = all_NKS @ (1 << np.arange(num_cells)[::-1])
        best_N = (((num_cells - all_NKS.sum(2)) << num_cells) + in_order_NK).argmax(1)
        presses_NS[start : start + _SOLVED_AT_ONCE] = all_NKS[np.arange(len(all_NKS)), best_N]
    return presses_NS, is_solved_N


@cache
def _algebra(num_cells: int) -> tuple[np.ndarray, np.ndarray]:
    """Solve the linear equations modulo 2 that say which presses toggle which lamps.

    Return inverse_SS, with which lit_NS @ inverse_SS solves each board that has a solution, and
    idle_KS, bool: every set of presses that toggles nothing, the empty one first.
    """
    effects_SS = toggled(np.eye(num_cells, dtype=bool))
    # Gauss-Jordan elimination. The right half records which rows were added to each row.
    rows = np.concatenate([effects_SS, np.eye(num_cells, dtype=bool)], axis=1)
    pivots: list[int] = []
    for column in range(num_cells):
        below = np.flatnonzero(rows[len(pivots) :, column])
        if len(below) == 0:
            continue
        at = len(pivots)
        rows[[at, at + below[0]]] = rows[[at + below[0], at]]
        others = rows[:, column].copy()
        others[at] = False
        rows[others] ^= rows[at]
        pivots.append(column)
    inverse_SS = np.zeros((num_cells, num_cells), np.uint8)
    inverse_SS[:, pivots] = rows[: len(pivots), num_cells:].T
    free = [column for column in range(num_cells) if column not in pivots]
    idle_KS = np.zeros((1, num_cells), bool)
    for column in free:
        basis_S = np.zeros(num_cells, bool)
        basis_S[column] = True
        basis_S[pivots] = rows[: len(pivots), column]
        idle_KS = np.concatenate([idle_KS, idle_KS ^ basis_S])
    return inverse_SS, idle_KS
