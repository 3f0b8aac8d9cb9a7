"""Solve puzzles with a trained model, from Python or for solve.py."""
# N = puzzles, T = steps (segments), S = cells of a board

from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator

from dataset.arc import Task
from dataset.canvas import PADDING, Corner
from dataset.puzzle_input import Puzzle, PuzzleReader, PuzzleTable
from dataset.schema import open_split
from dataset.tasks import task_of_shape
from dataset.tasks.base import BoardTask, Plain, TextTask, count
from dataset.tasks.tokens import TokensTask
from dataset.tta import Variations
from models.base import RecursiveModel
from training.more_compute import MoreCompute, trace_with_more
from training.prompts import PromptConfig
from training.synonyms import aliases
from training.trained import Trained, TrainedConfig
from utils.command_line import read_config, validate
from utils.config import Int, page
from utils.errors import UserError
from utils.out_of_memory import advising, half
from utils.ranks.config import DeviceName
from utils.ranks.setup import connect_devices
from utils.ranks.world import World


@page("solve", bare="checkpoint", aliases=aliases())
class SolveConfig(TrainedConfig, PromptConfig, MoreCompute):
    """config/solve.yaml says what each key means."""

    puzzle: str | None
    csv: str | None
    task: str | None
    batch_size: Int = Field(gt=0)
    show: Literal["auto", "steps", "lines"]
    color: Literal["auto", "always", "never"]
    device: DeviceName

    @model_validator(mode="after")
    def _one_way_to_choose_the_answer(self) -> "SolveConfig":
        if len(self.methods) > 1:
            first, second, *_ = (f"{key}={getattr(self, key)}" for key in self.methods)
            raise ValueError(f"{first} and {second} each choose one answer; give one of them")
        return self


@dataclass(frozen=True, repr=False)
class Step:
    """The answer of a model after one segment."""

    number: int  # from 1
    answer: Plain  # a text with a character for each cell, or for ARC the rows of the grid
    tokens_S: np.ndarray
    # The cells that differ from the step before, or from the puzzle, counted from 0, row by row.
    changed: list[int]
    confidence: float  # the model's estimate of the probability that the answer is right

    def __repr__(self) -> str:
        return f"Step({self.number}, {count(len(self.changed), 'cell')} changed, confidence {self.confidence:.2f})"


@dataclass(frozen=True, repr=False)
class Solution:
    """A puzzle, the model's answer after each step, and a verdict on the last answer."""

    board: BoardTask
    puzzle: Puzzle
    steps: list[Step]
    settled_at: int  # the first step after which adaptive evaluation would stop; or else the last
    valid: bool  # the answer has the right form, such as one path through the maze
    solved: bool | None  # None: the output of an ARC task is not known
    reason: str

    def __repr__(self) -> str:
        confidence = f"confidence {self.steps[-1].confidence:.2f}"
        return f"Solution({self.puzzle.name!r}, {self.outcome}: {self.reason}, {confidence})"

    @property
    def outcome(self) -> str:
        return {True: "solved", False: "not solved", None: "answered"}[self.solved]

    @property
    def answer(self) -> Plain:
        return self.steps[-1].answer

    def as_json(self) -> dict[str, Any]:
        """Return the object that --json prints."""
        puzzle = self.puzzle
        return {
            "name": puzzle.name,
            "task": self.board.name,
            "question": self.board.plain(puzzle.question_S),
            "answer": self.answer,
            "expected": None if puzzle.solution_S is None else self.board.plain(puzzle.solution_S),
            "valid": self.valid,
            "solved": self.solved,
            "reason": self.reason,
            "settled_at": self.settled_at,
            "confidence": self.steps[-1].confidence,
            "steps": [
                {"step": step.number, "answer": step.answer, "changed": step.changed, "confidence": step.confidence}
                for step in self.steps
            ],
            "notes": list(puzzle.notes),
        }


class Solver:
    """A trained model, ready to solve the kind of puzzle on which it was trained.

        solver = Solver.from_checkpoint("checkpoints/<project>/<run>", device="cpu")
        for solution in solver.solve([first, second]):
            print(solution.answer, solution.solved, solution.steps[-1].confidence)

    A puzzle is a text, row by row (docs/solving.md). An ARC task, as JSON or as a
    `dataset.arc.Task`, has one solution for each of its test inputs.
    """

    def __init__(self, config: SolveConfig, trained: Trained) -> None:
        """Find the kind of board of a model. `load` reads its weights."""
        self.arch, _ = trained.of_puzzles()
        # A file names no folders of this machine.
        data_paths = trained.config.train_paths if trained.config is not None else []
        if config.data_path:
            trained, data_paths = trained.on(open_split(config.data_path, "test")), [config.data_path]
        self.config, self.trained = config, trained
        self._has_fixed_size = trained.file is not None and trained.file.has_fixed_size
        _, self._sizes = trained.of_puzzles()
        shape = self._sizes.seq_len, self._sizes.vocab_size
        self.board: BoardTask = task_of_shape(*shape) or TokensTask(*shape)
        if config.tta is not None:
            Variations.of_boards(*shape, config.checkpoint, config.tta)
        num_rows = self._sizes.num_puzzle_identifiers if self.arch.puzzle_emb_ndim > 0 else 0
        self.reader = PuzzleReader(
            self.board,
            self._board_of,
            mixes_sizes=bool(self.board.symbols)
            and (self.arch.reads_boards_of_any_size or (self.arch.is_free_of_seq_len and not self._has_fixed_size)),
            is_for=f"{config.checkpoint} was trained on {self.board.name}",
            table=PuzzleTable(data_paths, trained.data, num_rows),
        )
        self._models: dict[int, RecursiveModel] = {}  # by number of cells, all with the same weights

    def __repr__(self) -> str:
        device = f", {self._world.device.type}" if self._models else ""
        return f"Solver({self.trained.name!r}, {self.board.title}, {self.arch.name}{device})"

    @classmethod
    def from_checkpoint(
        cls, checkpoint: str | Path, overrides: Sequence[str] = (), *, device: DeviceName = "auto"
    ) -> "Solver":
        """Load a model for solving.

        Args:
            checkpoint: a run folder, <run>/best, a step folder, a weights file, or
                hf://owner/repo[/path].
            overrides: as on the command line of solve.py, such as ["num_steps=32"].
            device: "cuda", "mps" or "cpu"; "auto" takes the first of these that the machine has.

        Raises:
            UserError: The checkpoint is missing or damaged, or there is no such device.
        """
        # Hydra needs quotes around paths with special characters, so it gets a placeholder instead.
        typed = read_config("solve", ["checkpoint=_", *overrides]) | {"checkpoint": str(checkpoint), "device": device}
        world = connect_devices(World.single(), device)
        config = validate(SolveConfig, typed)
        return cls(config, config.open_trained(world)).load(world)

    @classmethod
    def from_file(cls, file: str | Path, overrides: Sequence[str] = ()) -> "Solver":
        """Load a file that `python -m sharing.export --format onnx` wrote, for the CPU.

        Args:
            file: model.onnx, with config.json beside it.
            overrides, and errors: as in `from_checkpoint`.
        """
        return cls.from_checkpoint(file, overrides, device="cpu")

    def load(self, world: World) -> "Solver":
        """Load the weights onto the world's device, and return the solver."""
        model = self.trained.load_puzzle_model(world)
        self.config.require_different_passes(model)
        self._world, self._models = world, {self.board.rows * self.board.columns: model}
        return self

    def solve(self, puzzles: Sequence[str | Task]) -> list[Solution]:
        """Solve any number of puzzles, `batch_size` at a time.

        Raises:
            UserError: A puzzle is not of the model's kind. No puzzle has been solved then.
        """
        if isinstance(puzzles, str):
            raise UserError("solve() takes a list of puzzles, and this is one text; give [puzzle]")
        parsed: list[Puzzle] = []
        for number, puzzle in enumerate(puzzles, start=1):
            where = f"puzzle {number}"
            if isinstance(puzzle, Task):
                parsed += self.reader.of_tasks([puzzle], where)
            elif isinstance(puzzle, str):
                parsed += self.reader.of_text(puzzle, where)
            else:
                raise UserError(f"{where} is of the type {type(puzzle).__name__}; give a text, or an ARC task as JSON")
        return list(self.solutions(parsed))

    def solutions(self, puzzles: Sequence[Puzzle]) -> Iterator[Solution]:
        """Solve puzzles that have been read, and yield their solutions one after another."""
        num_passes = self.config.tta or self.config.trajectories
        batch_size = max(1, self.config.batch_size // num_passes)
        for start in range(0, len(puzzles), batch_size):
            chunk = puzzles[start : start + batch_size]
            sizes_N, solved = np.array([len(puzzle.question_S) for puzzle in chunk]), dict[int, Solution]()
            with advising(partial(half, "batch_size", len(chunk) * num_passes)):
                for size in dict.fromkeys(sizes_N.tolist()):
                    same = np.flatnonzero(sizes_N == size).tolist()
                    solutions = self._solve_batch([chunk[n] for n in same], start + np.array(same))
                    solved |= zip(same, solutions, strict=True)
            yield from (solved[n] for n in range(len(chunk)))

    def _solve_batch(self, puzzles: Sequence[Puzzle], rows_N: np.ndarray) -> Iterator[Solution]:
        """Solve puzzles of one size, on whose numbers noise and symmetries depend."""
        config = self.config
        inputs_NS = torch.from_numpy(np.stack([puzzle.question_S for puzzle in puzzles]).astype(np.int32))
        num_cells, corner = inputs_NS.shape[1], None
        board = self._board_of(num_cells) or self.board
        own = self.board.rows * self.board.columns
        if num_cells != own and not self._weights_fit(board):
            corner = Corner(board.rows, self.board.rows)
            inputs_NS = corner.place(inputs_NS, PADDING)
        identifiers_N = torch.tensor([puzzle.identifier for puzzle in puzzles], dtype=torch.int32)
        batch = {
            "inputs": self._world.to_device(inputs_NS),
            "labels": self._world.to_device(torch.zeros_like(inputs_NS)),  # not used
            "puzzle_identifiers": self._world.to_device(identifiers_N),
        }
        variations = None if config.tta is None else Variations(board, config.tta, corner)
        model = self.model_of(own if corner is not None else num_cells)
        seen = trace_with_more(model, batch, rows_N, config, variations)
        predictions_TNS = seen.predictions_TNS
        if corner is not None and variations is None:  # votes are cropped when they are turned back
            predictions_TNS = corner.crop_answers(predictions_TNS)
        answers_TNS = predictions_TNS.cpu().numpy().astype(board.dtype)
        confidence_TN, settled_at_N = seen.confidence_TN.float().cpu().numpy(), seen.settled_at_N.cpu().numpy()
        for n, puzzle in enumerate(puzzles):
            steps, before_S = [], puzzle.question_S
            for t, answer_S in enumerate(answers_TNS[:, n]):
                changed = np.flatnonzero(answer_S != before_S).tolist()
                steps.append(Step(t + 1, board.plain(answer_S), answer_S, changed, float(confidence_TN[t, n])))
                before_S = answer_S
            verdict = board.verdict(puzzle.question_S, before_S, puzzle.solution_S)
            yield Solution(board, puzzle, steps, int(settled_at_N[n]), *astuple(verdict))

    def model_of(self, num_cells: int) -> RecursiveModel:
        """Return the loaded model for boards of so many cells, which the weights fit."""
        if num_cells not in self._models:
            board = self._board_of(num_cells)
            if board is None or not self._weights_fit(board):
                raise UserError(
                    f"the weights of {self.trained.name} fit no boards of {num_cells} cells; give another size"
                )
            sizes = replace(self._sizes, seq_len=num_cells, vocab_size=len(board.symbols))
            self._models[num_cells] = replace(self.trained, sizes=sizes).load_puzzle_model(self._world)
        return self._models[num_cells]

    def _board_of(self, num_cells: int) -> TextTask | None:
        """Return the boards with so many cells; None if the model reads no such boards."""
        own = self.board.rows * self.board.columns
        other = self.board if num_cells == own else self.board.of_other_size(num_cells)
        # A model whose weights don't fit may read smaller boards on the canvas of its own boards.
        on_canvas = self.arch.reads_boards_of_any_size and num_cells < own
        if isinstance(other, TextTask) and (num_cells == own or on_canvas or self._weights_fit(other)):
            return other
        return None

    def _weights_fit(self, board: BoardTask) -> bool:
        return not self._has_fixed_size and self.arch.weights_fit(
            same_vocabulary=len(board.symbols) == len(self.board.symbols)
        )
