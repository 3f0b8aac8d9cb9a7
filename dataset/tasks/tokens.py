"""Define the task of a dataset whose task has no class here: its boards are numbers of tokens."""
# S = cells of a board

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dataset.tasks.base import TextTask, Verdict, count


class TokensTask(TextTask):
    """Rows of tokens, written as numbers with blanks or commas between them.

    A board whose number of tokens is a square is shown as a square.
    """

    kind = "tokens"
    plural = "token numbers"
    _between = " "
    dtype = np.dtype(np.int32)

    def __init__(self, seq_len: int, vocab_size: int) -> None:
        side = math.isqrt(seq_len)
        self.rows, self.columns = (side, side) if side * side == seq_len else (1, seq_len)
        self.name = self.title = f"{seq_len} tokens of {vocab_size} kinds"
        self._vocab_size = vocab_size

    @classmethod
    def of_shape(cls, seq_len: int, vocab_size: int) -> TokensTask:
        return cls(seq_len, vocab_size)

    def of_other_size(self, num_cells: int) -> None:
        return None

    def cells_in(self, text: str) -> Sequence[str]:
        return text.replace(",", " ").split()

    def parse(self, text: str, where: str) -> np.ndarray:
        """Return the tokens of a board, (S,) int32."""
        token_of = {str(token): token for token in range(self._vocab_size)}
        return self._parse_cells(text, where, token_of, f"0 to {self._vocab_size - 1}")

    def parse_solution(self, text: str, where: str, question_S: np.ndarray) -> np.ndarray:
        return self.parse(text, where)

    def plain(self, tokens_S: np.ndarray) -> str:
        return " ".join(map(str, tokens_S.tolist()))

    def verdict(self, question_S: np.ndarray, answer_S: np.ndarray, solution_S: np.ndarray | None = None) -> Verdict:
        if solution_S is None:
            return Verdict(True, None, "not checked, since the rules of this task and the answer are not known")
        if num_wrong := int((answer_S != solution_S).sum()):
            return Verdict(True, False, f"{num_wrong} of {count(len(answer_S), 'token')} not as in the answer")
        return Verdict(True, True, "the answer that the file gives")
