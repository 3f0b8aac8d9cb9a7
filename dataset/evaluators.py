"""Evaluate answers beyond their exact accuracy: by the rules of the task, or by votes.

An evaluator has the name of a task, such as "sudoku". The task's file in dataset/tasks/ defines it.
"""
# B = examples, S = cells of a board

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from dataset.arc_votes import ArcVotes
from dataset.schema import Split
from dataset.tasks import TASKS, task_of_set, task_of_shape
from dataset.tasks.base import BoardTask
from utils.batch import Batch
from utils.errors import UserError
from utils.ranks.world import World

if TYPE_CHECKING:
    EvaluatorName = str
else:  # the config checks the names, and lists the possible names in its error message
    EvaluatorName = Literal[tuple(task.kind for task in TASKS)]


class Evaluators:
    """Combines any number of evaluators, also none.

    Args:
        judges: the tasks that judge each answer by itself.
        votes: the object that counts answers as votes; None: answers don't vote.
        of_sets: the judges of sets whose boards are smaller than those of the split.
    """

    def __init__(
        self,
        judges: Sequence[BoardTask],
        votes: ArcVotes | None = None,
        of_sets: Mapping[str, Sequence[BoardTask]] | None = None,
    ) -> None:
        self._judges, self._votes, self._of_sets = judges, votes, of_sets or {}
        self.checks = tuple(name for judge in judges for name in judge.metrics)
        self.metrics = (*self.checks, *(votes.metrics if votes is not None else ()))

    @property
    def let_vote(self) -> bool:
        return self._votes is not None

    @property
    def num_tasks(self) -> int:
        """The number of ARC tasks in the means of the votes' metrics; 0 if answers don't vote."""
        return 0 if self._votes is None else self._votes.num_tasks

    def clear(self) -> None:
        """Forget all votes, before another checkpoint is evaluated."""
        if self._votes is not None:
            self._votes.clear()

    def judge(
        self, inputs_BS: torch.Tensor, predictions_BS: torch.Tensor, set_name: str | None = None
    ) -> dict[str, torch.Tensor]:
        """Return for every name in `checks` whether it holds of each answer, (B,) bool.

        Args:
            inputs_BS, predictions_BS: boards by themselves, and not on a larger canvas.
            set_name: the set of the boards; None if all boards of the split have one size.
        """
        found: dict[str, torch.Tensor] = {}
        for judge in self._of_sets.get(set_name or "", self._judges):
            found |= judge.judge(inputs_BS, predictions_BS)
        return found

    def vote(self, batch: Batch, predictions_BS: torch.Tensor, confidence_B: torch.Tensor) -> None:
        """Count the answers as votes, if they vote.

        Args:
            batch: the examples that were answered.
            predictions_BS: the answers, tokens.
            confidence_B: the confidence in [0, 1] that each answer is right.
        """
        if self._votes is not None:
            tensors = (batch["puzzle_identifiers"], batch["inputs"], predictions_BS, confidence_B.float())
            self._votes.add(*(tensor.cpu().numpy() for tensor in tensors))

    def results(self, world: World, save_to: Path | None) -> dict[str, float]:
        """Return the metrics of the votes, the same on all ranks. Every rank.

        Args:
            save_to: the folder for files about the votes; None: no files.
        """
        return {} if self._votes is None else self._votes.result(world, save_to)


NO_EVALUATORS = Evaluators([])


def build_evaluators(names: Sequence[EvaluatorName], split: Split) -> Evaluators:
    """Return the evaluators with these names, each once.

    Raises:
        UserError: An evaluator can't judge the split.
    """
    kinds = {task.kind: task for task in TASKS}
    seq_len, vocab_size = split.metadata.seq_len, split.metadata.vocab_size
    task = task_of_shape(seq_len, vocab_size)
    judges: list[BoardTask] = []
    votes: ArcVotes | None = None
    for kind in (kinds[name] for name in dict.fromkeys(names)):
        if not isinstance(task, kind):
            raise UserError(f"{split.path} has {seq_len} tokens of {vocab_size} kinds, {kind.wrong_shape}")
        if kind.lets_vote:
            votes = ArcVotes(split)
        else:
            judges.append(task)
    of_sets: dict[str, list[BoardTask]] = {}
    for name in _smaller_sets(split):
        own = task_of_set(split, name)
        for judge in judges:
            if own is None or not isinstance(own, type(judge)):
                num_tokens, num_kinds = split.shape_of(name)
                raise UserError(
                    f"the set {name} has boards of {num_tokens} tokens of {num_kinds} kinds, {judge.wrong_shape}"
                )
            of_sets.setdefault(name, []).append(own)
    return Evaluators(judges, votes, of_sets)


def _smaller_sets(split: Split) -> list[str]:
    """Return the names of the sets whose boards are smaller than those of the split."""
    return [name for name, puzzle_set in split.sets.items() if puzzle_set.corner is not None]


def fitting_evaluators(split: Split) -> list[EvaluatorName]:
    """Return the names of the evaluators that can judge the split."""
    task = task_of_shape(split.metadata.seq_len, split.metadata.vocab_size)
    if task is None or not task.scores(split):
        return []
    others = [task_of_set(split, name) for name in _smaller_sets(split)]
    return [task.kind] if all(isinstance(other, type(task)) for other in others) else []


def training_evaluators(names: Sequence[EvaluatorName] | None, split: Split) -> Evaluators:
    """Return the evaluators of a run.

    Args:
        names: None: those that fit the split and judge each answer by itself. Votes take memory and
            time at each evaluation, so that a run has them only if it names them.

    Raises:
        UserError: An evaluator can't judge the split.
    """
    if names is None:
        vote = {task.kind for task in TASKS if task.lets_vote}
        names = [name for name in fitting_evaluators(split) if name not in vote]
    return build_evaluators(names, split)


def able_evaluators(
    names: Sequence[EvaluatorName], split: Split, tell: Callable[[str], None] | None = None
) -> Evaluators:
    """Return the evaluators with these names and those that fit the split, as far as they work.

    Args:
        tell: takes a line about an evaluator that is left out.
    """
    able: list[EvaluatorName] = []
    for name in dict.fromkeys([*names, *fitting_evaluators(split)]):
        try:
            build_evaluators([name], split)
        except UserError as error:  # datasets of other programs may lack what votes need
            if tell is not None:
                tell(f"without the evaluator {name}: {error}")
        else:
            able.append(name)
    return build_evaluators(able, split)
