"""Test-time augmentation: answer several symmetries of each puzzle, and let the answers vote.

The symmetry is undone in each answer before it votes. The first variation of a puzzle is the puzzle
itself. The other variations depend only on the puzzle's row in the dataset.
"""
# N = variations of examples, K = variations of an example, S = tokens, V = vocabulary

from collections.abc import Iterator

import numpy as np
import torch

from dataset.canvas import Corner
from dataset.schema import Split
from dataset.tasks import task_of_set, task_of_shape
from dataset.tasks.base import BoardTask, move, rename
from utils.batch import Batch
from utils.errors import UserError


class Variations:
    """Makes `count` variations of every example of a split, and undoes them in the answers."""

    def __init__(self, task: BoardTask, count: int, corner: Corner | None = None) -> None:
        self._task, self.count, self.corner = task, count, corner

    @staticmethod
    def of(split: Split, count: int) -> "Variations":
        return Variations.of_boards(*split.metadata.shape, str(split.path), count)

    @staticmethod
    def of_boards(seq_len: int, vocab_size: int, where: str, count: int) -> "Variations":
        """Return the variations of boards of a size. Raise UserError if their task has fewer."""
        task = task_of_shape(seq_len, vocab_size)
        if task is None or not task.most_variations:
            raise UserError(
                f"tta={count}, but {where} has {seq_len} tokens of {vocab_size} kinds, whose answers can't be turned "
                "back; leave tta out (votes over augmentations of ARC need evaluators=[arc])"
            )
        if count > (most := task.most_variations):
            raise UserError(f"tta={count}, but {task.plural} have {most} symmetries; take {most} or fewer")
        return Variations(task, count)

    def of_set(self, split: Split, set_name: str) -> "Variations":
        """Return the variations of a set, whose boards may be smaller than those of the split."""
        task, corner = task_of_set(split, set_name), split.sets[set_name].corner
        if corner is None:
            return self
        assert task is not None, "only known tasks share a canvas"
        return Variations(task, self.count, corner)

    def spread(self, examples: Iterator[tuple[np.ndarray, Batch]]) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yield the numbers of K variations of every example, (N,), and their batch."""
        for rows, batch in examples:
            numbers_N = (rows[:, None] * self.count + np.arange(self.count)).ravel()
            repeated = {name: tensor.repeat_interleave(self.count, 0) for name, tensor in batch.items()}
            yield numbers_N, {**repeated, "inputs": self.vary(numbers_N, repeated["inputs"])}

    def vary(self, numbers_N: np.ndarray, boards_NS: torch.Tensor) -> torch.Tensor:
        """Return variations of boards on their canvas, (N, S)."""
        chosen = self._task.variations(numbers_N, self.count)
        if self.corner is not None:
            chosen = self.corner.widen(chosen)
        return move(boards_NS, _to_device(chosen, boards_NS.device))

    def undo(self, numbers_N: np.ndarray, boards_NS: torch.Tensor) -> torch.Tensor:
        """Return the boards of the dataset, cropped from their canvas, from their variations."""
        if self.corner is not None:
            boards_NS = self.corner.crop_answers(boards_NS)
        chosen = _to_device(self._task.variations(numbers_N, self.count), boards_NS.device)
        if "names" in chosen:
            boards_NS = rename(boards_NS, chosen["names"].argsort(1))
        return torch.empty_like(boards_NS).scatter_(1, chosen["cells"].long(), boards_NS)


def _to_device(chosen: dict[str, np.ndarray], device: torch.device) -> Batch:
    return {name: torch.from_numpy(array).to(device) for name, array in chosen.items()}


class Ballots:
    """Collects the answers to the variations of each example, which may arrive in any order."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._cast: dict[int, dict[int, tuple[np.ndarray, float]]] = {}

    def cast(
        self, numbers_N: np.ndarray, answers_NS: np.ndarray, confidence_N: np.ndarray
    ) -> list[tuple[int, np.ndarray]]:
        """Add the votes of some variations: answers in which the symmetry is already undone.

        Return for each example that is complete now the index in `numbers_N` of its last variation,
        and the answer that won, (S,).
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
    """Return the answer (S,) with the most votes.

    Ties go to the answer with the greater mean confidence, then to the earlier answer.
    """
    tally: dict[bytes, list[tuple[np.ndarray, float]]] = {}
    for answer_S, confidence in votes:
        tally.setdefault(answer_S.tobytes(), []).append((answer_S, confidence))
    best = max(tally.values(), key=lambda equal: (len(equal), sum(confidence for _, confidence in equal) / len(equal)))
    return best[0][0]
