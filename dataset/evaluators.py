"""What a task knows about its answers beyond comparing them with the labels: a closed table of evaluators by name.

An evaluator is made for a split. Most judge one answer at a time; that of ARC lets the answers vote.
"""
# B = examples, S = cells of a board, L = side of a board

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import torch

from dataset import maze
from dataset.arc import SEQ_LEN, VOCAB_SIZE
from dataset.arc_votes import ArcVotes
from dataset.augment import BOXES, box_of
from dataset.schema import Split
from utils.batch import Batch
from utils.dist.world import World
from utils.errors import UserError

# Tokens of a Sudoku: 0 is padding, 1 a blank, 2 the digit 1.
_FIRST_DIGIT = 2


class Judge(Protocol):
    """Judges each answer by itself."""

    metrics: tuple[str, ...]

    def __call__(self, inputs_BS: torch.Tensor, predictions_BS: torch.Tensor) -> dict[str, torch.Tensor]:
        """Tokens (integers of any type) to what holds of each example: bool (B,) for every name in `metrics`, on the
        same device.
        """
        ...


class SudokuEvaluator:
    """Whether an answer is a valid board, whatever the label says, and whether it leaves the clues alone.

    An answer that is both solves the puzzle. Raises UserError for a split that is no Sudoku.
    """

    metrics: tuple[str, ...] = ("valid_boards", "clues_kept")

    def __init__(self, split: Split) -> None:
        seq_len, vocab_size = split.metadata.seq_len, split.metadata.vocab_size
        box = box_of(seq_len, vocab_size)
        if box is None:
            known = ", ".join(f"{other.num_cells} of {other.side + 2}" for other in BOXES.values())
            raise UserError(
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


class MazeEvaluator:
    """Whether an answer is a path from S to G, and whether none is shorter, whatever the label says: there are many
    shortest paths, and the label is one of them.

    A breadth-first search on the host. Raises UserError for a split that is no maze.
    """

    metrics: tuple[str, ...] = ("path_valid", "path_optimal")

    def __init__(self, split: Split) -> None:
        if not maze.is_maze(split.metadata.seq_len, split.metadata.vocab_size):
            raise UserError(
                f"{split.path} has {split.metadata.seq_len} tokens of {split.metadata.vocab_size} kinds, which is no "
                f"maze (a square of {maze.VOCAB_SIZE} kinds is); leave the evaluator maze out"
            )

    def __call__(self, inputs_BS: torch.Tensor, predictions_BS: torch.Tensor) -> dict[str, torch.Tensor]:
        found = maze.judge_paths(inputs_BS.cpu().numpy(), predictions_BS.cpu().numpy())
        return {name: torch.from_numpy(found[name]).to(inputs_BS.device) for name in self.metrics}


EvaluatorName = Literal["sudoku", "maze", "arc"]
JUDGES: Mapping[str, Callable[[Split], Judge]] = {"sudoku": SudokuEvaluator, "maze": MazeEvaluator}


class Evaluators:
    """Any number of evaluators as one, none included."""

    def __init__(self, judges: Sequence[Judge], votes: ArcVotes | None = None) -> None:
        self._judges, self._votes = judges, votes
        self.checks = tuple(name for judge in judges for name in judge.metrics)
        self.metrics = (*self.checks, *(votes.metrics if votes is not None else ()))

    @property
    def let_vote(self) -> bool:
        return self._votes is not None

    @property
    def num_tasks(self) -> int:
        """Those that the metrics of votes are means over; 0 where answers don't vote."""
        return 0 if self._votes is None else self._votes.num_tasks

    def clear(self) -> None:
        """Forgets the votes of the checkpoint before."""
        if self._votes is not None:
            self._votes.clear()

    def judge(self, inputs_BS: torch.Tensor, predictions_BS: torch.Tensor) -> dict[str, torch.Tensor]:
        """What holds of each answer, bool (B,) for every name in `checks`."""
        found: dict[str, torch.Tensor] = {}
        for judge in self._judges:
            found |= judge(inputs_BS, predictions_BS)
        return found

    def vote(self, batch: Batch, predictions_BS: torch.Tensor, confidence_B: torch.Tensor) -> None:
        """Counts the answers where they vote."""
        if self._votes is not None:
            tensors = (batch["puzzle_identifiers"], batch["inputs"], predictions_BS, confidence_B.float())
            self._votes.add(*(tensor.cpu().numpy() for tensor in tensors))

    def results(self, world: World, save_to: Path | None) -> dict[str, float]:
        """What the votes came to, the same on all ranks. Every rank."""
        return {} if self._votes is None else self._votes.result(world, save_to)


NO_EVALUATORS = Evaluators([])


def build_evaluators(names: Sequence[EvaluatorName], split: Split) -> Evaluators:
    """The evaluators of these names, each once. Raises UserError for a split that one of them can't judge."""
    judges = [JUDGES[name](split) for name in dict.fromkeys(names) if name != "arc"]
    return Evaluators(judges, ArcVotes(split) if "arc" in names else None)


def fitting_evaluators(split: Split) -> list[EvaluatorName]:
    """The names of those that know a task of these sizes."""
    sizes = split.metadata.seq_len, split.metadata.vocab_size
    if box_of(*sizes) is not None:
        return ["sudoku"]
    if maze.is_maze(*sizes):
        return ["maze"]
    # Votes need the names of tasks and augmentations, which datasets of several parts and of other builders lack.
    if sizes == (SEQ_LEN, VOCAB_SIZE) and (split.path.parent / "test_puzzles.json").is_file():
        return ["arc"]
    return []
