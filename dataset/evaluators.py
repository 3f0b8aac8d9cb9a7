"""Evaluate answers beyond their exact accuracy: by the rules of the task, or by votes.

An evaluator has the name of a task, such as "sudoku". The task's file in dataset/tasks/ defines it.
"""
# B = examples, S = cells of a board

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from torch import Tensor

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
    """Judges each answer by itself, or lets answers vote, or does neither."""

    def __init__(self, judges: Mapping[str, BoardTask] | None = None, votes: ArcVotes | None = None) -> None:
        """Take the boards of each set, which are those of one task, or what counts the votes."""
        self._judges, self.votes = judges or {}, votes
        self.checks = next((judge.metrics for judge in self._judges.values()), ())
        self.metrics = (*self.checks, *(votes.metrics if votes is not None else ()))

    def clear(self) -> None:
        """Forget all votes, before another checkpoint is evaluated."""
        if self.votes is not None:
            self.votes.clear()

    def judge(self, inputs_BS: Tensor, predictions_BS: Tensor, set_name: str) -> dict[str, Tensor]:
        """Return for every name in `checks` whether it holds of each answer, (B,) bool.

        Boards are by themselves, and not on a canvas.
        """
        judge = self._judges.get(set_name)
        return {} if judge is None else judge.judge(inputs_BS, predictions_BS)

    def vote(self, batch: Batch, predictions_BS: Tensor, confidence_B: Tensor) -> None:
        """Count the answers as votes, if they vote, with the confidence in [0, 1] of each."""
        if self.votes is not None:
            tensors = (batch["puzzle_identifiers"], batch["inputs"], predictions_BS, confidence_B.float())
            self.votes.add(*(tensor.cpu().numpy() for tensor in tensors))

    def results(self, world: World, save_to: Path | None) -> dict[str, float]:
        """Return the metrics of the votes, and save files about them. Every rank."""
        return {} if self.votes is None else self.votes.result(world, save_to)


NO_EVALUATORS = Evaluators()


def build_evaluators(names: Sequence[EvaluatorName], split: Split) -> Evaluators:
    """Return the evaluators with these names. Raise UserError if one can't judge the split."""
    own = task_of_shape(*split.metadata.shape)
    tasks = {set_name: task_of_set(split, set_name) for set_name in split.sets}
    for name in names:
        for where, task in ((str(split.path), own), *tasks.items()):
            if task is None or task.kind != name:
                num_tokens, num_kinds = split.metadata.shape if task is own else split.shape_of(where)
                raise UserError(
                    f"{where} has {num_tokens} tokens of {num_kinds} kinds, which the evaluator {name} can't judge; "
                    "leave it out"
                )
    if own is None or not names:
        return NO_EVALUATORS
    if own.lets_vote:
        return Evaluators(votes=ArcVotes(split))
    return Evaluators({set_name: task for set_name, task in tasks.items() if task is not None})


def fitting_evaluators(split: Split) -> list[EvaluatorName]:
    """Return the names of the evaluators that can judge the split."""
    task = task_of_shape(*split.metadata.shape)
    tasks = [task_of_set(split, name) for name in split.sets]
    fits = task is not None and task.scores(split) and all(own and own.kind == task.kind for own in tasks)
    return [task.kind] if task is not None and fits else []


def training_evaluators(names: Sequence[EvaluatorName] | None, split: Split) -> Evaluators:
    """Return the evaluators of a run.

    Without names these fit the split and judge each answer by itself. Votes take memory and time at
    each evaluation, so that a run has them only if it names them.
    """
    if names is None:
        vote = {task.kind for task in TASKS if task.lets_vote}
        names = [name for name in fitting_evaluators(split) if name not in vote]
    return build_evaluators(names, split)


def able_evaluators(
    names: Sequence[EvaluatorName], split: Split, tell: Callable[[str], None] | None = None
) -> Evaluators:
    """Return the evaluators with these names and those that fit the split, as far as they work."""
    able = NO_EVALUATORS  # a split has one task, so that at most one of the evaluators works
    for name in dict.fromkeys([*names, *fitting_evaluators(split)]):
        try:
            able = build_evaluators([name], split)
        except UserError as error:  # datasets of other programs may lack what votes need
            if tell is not None:
                tell(f"without the evaluator {name}: {error}")
    return able
