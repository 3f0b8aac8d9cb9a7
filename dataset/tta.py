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
    """Makes `count` variations of every example of a split, and undoes them in the answers.

    Variation k of the example in row r has the number r * count + k.

    Args:
        corner: where the boards lie on a larger canvas; None: they fill it.
    """

    def __init__(self, task: BoardTask, count: int, corner: Corner | None = None) -> None:
        self._task, self.count, self.corner = task, count, corner

    @staticmethod
    def of(split: Split, count: int) -> "Variations":
        """Return the variations of a split's task.

        Raises:
            UserError: The task has no symmetries that can be undone, or fewer than `count`.
        """
        return Variations.of_boards(split.metadata.seq_len, split.metadata.vocab_size, str(split.path), count)

    @staticmethod
    def of_boards(seq_len: int, vocab_size: int, where: str, count: int) -> "Variations":
        """Return the variations of boards of a size.

        Args:
            where: what has such boards, for messages.

        Raises:
            UserError: The task has no symmetries that can be undone, or fewer than `count`.
        """
        task = task_of_shape(seq_len, vocab_size)
        if task is None or not task.most_variations:
            raise UserError(
                f"tta={count}, but {where} has {seq_len} tokens of {vocab_size} kinds, whose answers can't be turned "
                "back; leave tta out (votes over augmentations of ARC need evaluators=[arc])"
            )
        most = task.most_variations
        if count > most:
            raise UserError(f"tta={count}, but {task.singular} has {most} symmetries; take {most} or fewer")
        return Variations(task, count)

    def of_set(self, split: Split, set_name: str) -> "Variations":
        """Return the variations of a set, whose boards may be smaller than those of the split."""
        task, corner = task_of_set(split, set_name), split.sets[set_name].corner
        if corner is None:
            return self
        assert task is not None, "only known tasks share a canvas"
        return Variations(task, self.count, corner)

    def spread(self, examples: Iterator[tuple[np.ndarray, Batch]]) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yield K variations of every example.

        Args:
            examples: the rows in the dataset and the examples of each batch.

        Yields:
            The numbers of the variations, (N,), and the batch of the variations.
        """
        for rows, batch in examples:
            numbers_N = (rows[:, None] * self.count + np.arange(self.count)).ravel()
            repeated = {name: tensor.repeat_interleave(self.count, 0) for name, tensor in batch.items()}
            varied = self.vary(numbers_N, repeated["inputs"])
            yield numbers_N, {**repeated, "inputs": varied}

    def vary(self, numbers_N: np.ndarray, boards_NS: torch.Tensor) -> torch.Tensor:
        """Return the variations of boards, (N, S).

        Args:
            numbers_N: the numbers of the variations.
            boards_NS: the boards as they are in the dataset, on their canvas.
        """
        chosen = self._task.variations(numbers_N, self.count)
        if self.corner is not None:
            chosen = self.corner.widen(chosen)
        return move(boards_NS, _to_device(chosen, boards_NS.device))

    def undo(self, numbers_N: np.ndarray, boards_NS: torch.Tensor) -> torch.Tensor:
        """Return the boards of the dataset from their variations, (N, S): undo `vary`.

        Boards that are smaller than their canvas are cropped to themselves.
        """
        if self.corner is not None:
            boards_NS = self.corner.crop_answers(boards_NS)
        chosen = _to_device(self._task.variations(numbers_N, self.count), boards_NS.device)
        if "names" in chosen:
            boards_NS = rename(boards_NS, chosen["names"].argsort(1))
        return torch.empty_like(boards_NS).scatter_(1, chosen["cells"].long(), boards_NS)


def _to_device(chosen: dict[str, np.ndarray], device: torch.device) -> Batch:
    return {name: torch.from_numpy(array).to(device) for name, array in chosen.items()}


class Ballots:
    """Collects the answers to the variations of each example until the example is complete.

    The answers may arrive in any order.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._cast: dict[int, dict[int, tuple[np.ndarray, float]]] = {}

    def cast(
        self, numbers_N: np.ndarray, answers_NS: np.ndarray, confidence_N: np.ndarray
    ) -> list[tuple[int, np.ndarray]]:
        """Add the votes of some variations.

        Args:
            numbers_N: the numbers of the variations.
            answers_NS: the answers, in which the symmetry is already undone.
            confidence_N: the confidence that each answer is right.

        Returns:
            For each example that is complete now the index in `numbers_N` of its last variation,
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
    """Return the answer with the most votes.

    Ties go to the answer with the greater mean confidence, then to the earlier answer.

    Args:
        votes: an answer (S,) and its confidence for each variation, in order.
    """
    tally: dict[bytes, list[float]] = {}
    answers: dict[bytes, np.ndarray] = {}
    for answer_S, confidence in votes:
        key = answer_S.tobytes()
        tally.setdefault(key, []).append(confidence)
        answers.setdefault(key, answer_S)
    return answers[max(tally, key=lambda key: (len(tally[key]), sum(tally[key]) / len(tally[key])))]
