"""Test-time augmentation: a puzzle is answered in several of its symmetries, and the answers, turned back, vote.

A puzzle's first variation is itself; the others are a function of its row in the dataset alone.
"""
# N = variations of examples, K = variations of an example, S = tokens, L = side of a maze

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import torch

from dataset import maze
from dataset.augment import box_of, draws_per_symmetry
from dataset.online import SudokuSymmetries, rename, square_sources
from dataset.schema import Split
from utils.batch import Batch
from utils.errors import UserError

# Tells this random stream from others.
_STREAM = 0x77A


class Variations(ABC):
    """`count` variations of every example of a split: example r's are numbered r * count, r * count + 1, ..."""

    def __init__(self, count: int) -> None:
        self.count = count

    @staticmethod
    def of(split: Split, count: int) -> "Variations":
        """Raises UserError for a task without symmetries that can be undone, and for more than it has."""
        seq_len, vocab_size = split.metadata.seq_len, split.metadata.vocab_size
        side = math.isqrt(seq_len)
        if box_of(seq_len, vocab_size) is not None:
            return SudokuVariations(split, count)
        if maze.is_maze(seq_len, vocab_size):
            if count > len(square_sources(side)):
                raise UserError(f"tta={count}, but a maze has 8 symmetries; take 8 or fewer")
            return MazeVariations(side, count)
        raise UserError(
            f"tta={count}, but {split.path} has {seq_len} tokens of {vocab_size} kinds, whose answers can't be turned "
            "back (those of Sudokus and mazes can; augmentations of an ARC dataset vote with evaluators=[arc])"
        )

    def spread(self, examples: Iterator[tuple[np.ndarray, Batch]]) -> Iterator[tuple[np.ndarray, Batch]]:
        """Every example K times, varied, with the variations' numbers in place of rows."""
        for rows, batch in examples:
            numbers_N = (rows[:, None] * self.count + np.arange(self.count)).ravel()
            repeated = {name: tensor.repeat_interleave(self.count, 0) for name, tensor in batch.items()}
            varied = self.vary(numbers_N, repeated["inputs"])
            yield numbers_N, {**repeated, "inputs": varied}

    @abstractmethod
    def vary(self, numbers_N: np.ndarray, boards_NS: torch.Tensor) -> torch.Tensor:
        """The variations with these numbers of boards as they are in the dataset."""

    @abstractmethod
    def undo(self, numbers_N: np.ndarray, boards_NS: torch.Tensor) -> torch.Tensor:
        """The inverse of `vary`."""


class SudokuVariations(Variations):
    """Symmetries as the builder draws them."""

    def __init__(self, split: Split, count: int) -> None:
        super().__init__(count)
        box = box_of(split.metadata.seq_len, split.metadata.vocab_size)
        assert box is not None
        self._symmetries, self._num_draws = SudokuSymmetries(box), draws_per_symmetry(box)

    def _chosen(self, numbers_N: np.ndarray, device: torch.device) -> Batch:
        drawn = {
            row: np.random.default_rng([_STREAM, row]).random((self.count, self._num_draws))
            for row in set((numbers_N // self.count).tolist())
        }
        uniform_NU = np.stack([drawn[number // self.count][number % self.count] for number in numbers_N.tolist()])
        chosen = self._symmetries.choose(uniform_NU, numbers_N)
        is_itself_N = numbers_N % self.count == 0
        for name in ("cells", "names"):
            chosen[name][is_itself_N] = np.arange(chosen[name].shape[1], dtype=chosen[name].dtype)
        return {name: torch.from_numpy(array).to(device) for name, array in chosen.items()}

    def vary(self, numbers_N: np.ndarray, boards_NS: torch.Tensor) -> torch.Tensor:
        chosen = self._chosen(numbers_N, boards_NS.device)
        return rename(boards_NS.gather(1, chosen["cells"].long()), chosen["names"])

    def undo(self, numbers_N: np.ndarray, boards_NS: torch.Tensor) -> torch.Tensor:
        chosen = self._chosen(numbers_N, boards_NS.device)
        named_NS = rename(boards_NS, chosen["names"].argsort(1))
        return torch.empty_like(boards_NS).scatter_(1, chosen["cells"].long(), named_NS)


class MazeVariations(Variations):
    """The k-th is the k-th transform of the square."""

    def __init__(self, side: int, count: int) -> None:
        super().__init__(count)
        self._sources_TS = square_sources(side)

    def _sources(self, numbers_N: np.ndarray, device: torch.device) -> torch.Tensor:
        return self._sources_TS[torch.from_numpy(numbers_N % self.count)].to(device)

    def vary(self, numbers_N: np.ndarray, boards_NS: torch.Tensor) -> torch.Tensor:
        return boards_NS.gather(1, self._sources(numbers_N, boards_NS.device))

    def undo(self, numbers_N: np.ndarray, boards_NS: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(boards_NS).scatter_(1, self._sources(numbers_N, boards_NS.device), boards_NS)


class Ballots:
    """Collects the answers to the variations of each example until all have come in; in any order."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._cast: dict[int, dict[int, tuple[np.ndarray, float]]] = {}

    def cast(
        self, numbers_N: np.ndarray, answers_NS: np.ndarray, confidence_N: np.ndarray
    ) -> list[tuple[int, np.ndarray]]:
        """Answers that were turned back. For each example that is complete now: which of these variations made it so,
        and the answer that won.
        """
        decided = []
        for index, number in enumerate(numbers_N.tolist()):
            row, variation = divmod(number, self._count)
            votes = self._cast.setdefault(row, {})
            votes[variation] = answers_NS[index], float(confidence_N[index])
            if len(votes) == self._count:
                decided.append((index, winner([votes[k] for k in range(self._count)])))
                del self._cast[row]
        return decided


def winner(votes: list[tuple[np.ndarray, float]]) -> np.ndarray:
    """The answer with the most votes; of equals the one with the greater mean confidence, then the earlier one."""
    tally: dict[bytes, list[float]] = {}
    answers: dict[bytes, np.ndarray] = {}
    for answer_S, confidence in votes:
        key = answer_S.tobytes()
        tally.setdefault(key, []).append(confidence)
        answers.setdefault(key, answer_S)
    return answers[max(tally, key=lambda key: (len(tally[key]), sum(tally[key]) / len(tally[key])))]
