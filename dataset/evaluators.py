"""What is known of answers beyond comparing them with the labels: judged one by one, or by votes.

An evaluator is called as the kind of task is ("sudoku") and does what the task in dataset/tasks/ says.
"""
# B = examples, S = cells of a board

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from dataset.schema import Split
from dataset.tasks import TASKS, task_of_shape
from dataset.tasks.base import BoardTask, Votes
from utils.batch import Batch
from utils.dist.world import World
from utils.errors import UserError

if TYPE_CHECKING:
    EvaluatorName = str
else:  # for the config, which names the possible values where another one is given
    EvaluatorName = Literal[tuple(task.kind for task in TASKS)]


class Evaluators:
    """Any number of evaluators as one, none included.

    Args:
        judges: Tasks that judge each answer by itself.
        votes: Counts the answers where they vote.
    """

    def __init__(self, judges: Sequence[BoardTask], votes: Votes | None = None) -> None:
        self._judges, self._votes = judges, votes
        self.checks = tuple(name for judge in judges for name in judge.metrics)
        self.metrics = (*self.checks, *(votes.metrics if votes is not None else ()))

    @property
    def let_vote(self) -> bool:
        return self._votes is not None

    @property
    def num_tasks(self) -> int:
        """How many ARC tasks the metrics of votes are means over; 0 where answers don't vote."""
        return 0 if self._votes is None else self._votes.num_tasks

    def clear(self) -> None:
        """Forget the votes of the checkpoint before."""
        if self._votes is not None:
            self._votes.clear()

    def judge(self, inputs_BS: torch.Tensor, predictions_BS: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return what holds of each answer, (B,) bool for every name in `checks`."""
        found: dict[str, torch.Tensor] = {}
        for judge in self._judges:
            found |= judge.judge(inputs_BS, predictions_BS)
        return found

    def vote(self, batch: Batch, predictions_BS: torch.Tensor, confidence_B: torch.Tensor) -> None:
        """Count the answers where they vote."""
        if self._votes is not None:
            tensors = (batch["puzzle_identifiers"], batch["inputs"], predictions_BS, confidence_B.float())
            self._votes.add(*(tensor.cpu().numpy() for tensor in tensors))

    def results(self, world: World, save_to: Path | None) -> dict[str, float]:
        """Return the metrics of the votes, the same on all ranks. Every rank."""
        return {} if self._votes is None else self._votes.result(world, save_to)


NO_EVALUATORS = Evaluators([])


def build_evaluators(names: Sequence[EvaluatorName], split: Split) -> Evaluators:
    """Return the evaluators of these names, each once.

    Raises:
        UserError: If one of them can't judge the split.
    """
    kinds = {task.kind: task for task in TASKS}
    seq_len, vocab_size = split.metadata.seq_len, split.metadata.vocab_size
    task = task_of_shape(seq_len, vocab_size)
    judges: list[BoardTask] = []
    votes: Votes | None = None
    for kind in (kinds[name] for name in dict.fromkeys(names)):
        if kind.lets_vote:
            votes = kind.votes(split)
        elif isinstance(task, kind):
            judges.append(task)
        else:
            raise UserError(f"{split.path} has {seq_len} tokens of {vocab_size} kinds, {kind.wrong_shape}")
    return Evaluators(judges, votes)


def fitting_evaluators(split: Split) -> list[EvaluatorName]:
    """Return the names of the evaluators that can judge the split."""
    task = task_of_shape(split.metadata.seq_len, split.metadata.vocab_size)
    return [task.kind] if task is not None and task.scores(split) else []
