r"""Solve puzzles with a trained model and show how it reaches its answer. dataset/tasks/ has the
kinds. Models of text answer prompts (training/prompts.py).

python solve.py checkpoint=checkpoints/<project>/<run> \
    puzzle=53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79
python solve.py checkpoint=checkpoints/<project>/<run> prompt="In the beginning"

From Python, with any number of puzzles at once:

    from solve import Solver

    solver = Solver.from_checkpoint("checkpoints/<project>/<run>")
    puzzle = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
    (solution,) = solver.solve([puzzle])
    if solution.solved:
        print(solution.answer)         # "534678912..."
    else:
        print(solution.reason)         # "a digit stands twice in row 3"
    for step in solution.steps:        # the model's answer after each segment
        print(step.number, step.confidence, len(step.changed), step.answer)
"""
# N = puzzles, T = steps (segments), S = cells of a board

from utils import openmp  # isort: skip # noqa: F401 - before torch

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator

from dataset.arc import Task, read_tasks
from dataset.canvas import PADDING, Corner
from dataset.puzzle_input import Puzzle, PuzzleReader, PuzzleTable, read_stdin
from dataset.schema import open_split
from dataset.tasks import task_of_shape
from dataset.tasks.base import BoardTask, Plain, TextTask, Verdict, count
from dataset.tasks.tokens import TokensTask
from dataset.tta import Variations
from models.base import CommonConfig, RecursiveModel
from models.text.model import TextModel
from training.chat import STDIN, chat, write_answer
from training.config import require_keys_of
from training.more_compute import MoreCompute, trace_with_more
from training.prompts import PromptConfig, Writer, open_reader
from training.synonyms import aliases
from training.trained import Trained, TrainedConfig, open_trained
from utils.command_line import CommandLine, read_config, validate
from utils.composing import Origin
from utils.config import Int, page
from utils.errors import UserError
from utils.out_of_memory import advising, half
from utils.program import run
from utils.ranks.config import DeviceName
from utils.ranks.setup import connect_devices
from utils.ranks.world import World
from utils.terminal import leave, show, write

USAGE = """
solve.py: solve puzzles with a trained model, and show how it reaches its answer.

One puzzle:
  python solve.py checkpoint=checkpoints/<project>/<run> puzzle=53..7....6..195....98....6.8...6...34..8.3..17...
The puzzles of a file with a column question (or puzzle) and, if answers are known, a column answer (or solution):
  python solve.py checkpoint=<run> csv=puzzles.csv
The test inputs of an ARC task:
  python solve.py checkpoint=<run> task=0a1b2c3d.json
Eight passes with noise over each puzzle, of which the most confident one answers:
  python solve.py checkpoint=<run> csv=puzzles.csv trajectories=8 noise=0.5
The puzzles of a text, one on each line or in rows, or of a .sdk or .ss file; - is standard input:
  python solve.py checkpoint=<run> puzzle=sudokus.txt
  cat mazes.txt | python solve.py checkpoint=<run> puzzle=-
With a file or a folder that python -m sharing.export wrote, here or on the Hugging Face Hub:
  python solve.py checkpoint=model.safetensors puzzle=...
  python solve.py checkpoint=hf://owner/repo puzzle=...
A model of text continues a text or answers an instruction, whichever it was trained on:
  python solve.py checkpoint=<run> prompt="In the beginning" max_new_tokens=300 temperature=0.8 top_k=50 seed=1
A chat with it, line by line:
  python solve.py checkpoint=<run> prompt=-
With a published checkpoint:
  python solve.py checkpoint=hf://owner/repo/file arch=trm_mlp data_path=data/sudoku-extreme-1k-aug-1000 puzzle=...

--json prints a line with one JSON object for each puzzle. Its keys are name, task, question, answer, expected, valid,
solved, reason, settled_at, confidence, steps (step, answer, changed and confidence of each) and notes. Cells are
counted from 0, row by row. The keys of an answer to a prompt are prompt, form, answer, tokens and ended_by.

Exit status: 0 if all puzzles are solved (an ARC task without outputs only has to be answered), 1 if not all are solved,
2 after a mistake in the command or in a puzzle. If the reader of the output leaves early, as head does, it is 0.
"""

# The values of these keys don't go through Hydra. It would read 0030.. as a number, # as the start
# of a comment and commas as a choice, and would refuse blanks and braces.
_VERBATIM = ("puzzle", "csv", "task", "prompt")
# The boards of all steps of this many puzzles fill some pages.
_MOST_IN_STEPS = 4
# The keys that one kind of model reads alone, without those that say what to solve.
_KEYS_OF_KIND: dict[str, tuple[str, ...]] = {
    "puzzles": (
        *("num_steps", "trajectories", "restarts", "noise", "tta", "batch_size", "show", "color", "puzzle_table"),
    ),
    "text": ("prompt_form", "max_new_tokens", "temperature", "top_k", "top_p", "stop", "stop_tokens"),
}
# Answers up to this length are printed on the puzzle's line.
_SHORT = 81


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
        given = {"trajectories": self.trajectories > 1, "restarts": self.restarts > 0, "tta": self.tta is not None}
        if sum(given.values()) > 1:
            first, second, *_ = (f"{key}={getattr(self, key)}" for key, is_given in given.items() if is_given)
            raise ValueError(f"{first} and {second} each choose one answer; give one of them")
        return self


# ---- puzzles and solutions ---------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Step:
    """The answer of a model after one segment."""

    number: int  # from 1
    # A text with a character for each cell. For ARC: the rows of the grid, none if it is not a
    # grid.
    answer: Plain
    tokens_S: np.ndarray
    # The cells that differ from the step before (at the first step: from the puzzle), counted from
    # 0, row by row.
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
    # The step after which the model wants to halt and has repeated its answer, so that adaptive
    # evaluation would stop. If there is no such step: the last step.
    settled_at: int
    verdict: Verdict

    def __repr__(self) -> str:
        answer = f", {self.answer!r}" if isinstance(self.answer, str) and len(self.answer) <= _SHORT else ""
        return (
            f"Solution({self.puzzle.name!r}, {_outcome(self)}: {self.reason}{answer}, would stop at step "
            f"{self.settled_at} of {len(self.steps)}, confidence {self.steps[-1].confidence:.2f})"
        )

    @property
    def answer(self) -> Plain:
        """Return the last answer: a character for each cell, or for ARC the rows of the grid."""
        return self.steps[-1].answer

    @property
    def valid(self) -> bool:
        """Return whether the answer has the right form.

        The right form is a complete Sudoku that keeps its clues, one path through the maze, or a
        grid.
        """
        return self.verdict.valid

    @property
    def solved(self) -> bool | None:
        """Return whether the answer is right; None if the output of an ARC task is not known.

        A Sudoku must be valid, a path must be valid and shortest, and a grid must be the task's
        output.
        """
        return self.verdict.solved

    @property
    def reason(self) -> str:
        """Return the reason of the verdict in words."""
        return self.verdict.reason

    @property
    def counts_as_solved(self) -> bool:
        """Return whether the exit status counts the puzzle as solved.

        If the right answer is not known, an answer in the right form counts.
        """
        return self.valid if self.solved is None else self.solved

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

    A puzzle is a text, row by row, with or without line ends. A Sudoku has digits (letters above
    9), and . or 0 for a blank. Puzzles may differ in size if the model reads boards of any size. A
    maze has the characters # (wall), blank, S and G. An ARC task is given as JSON, or as a
    `dataset.arc.Task` (`dataset.arc.read_tasks` reads files). It has one solution for each of its
    test inputs.
    """

    def __init__(self, source: "Source", model: RecursiveModel, world: World) -> None:
        source.config.require_different_passes(model)
        self.source, self.board = source, source.board
        self._world = world
        # Models with the same weights, by the number of cells of the boards for which they are
        # built.
        self._models = {source.board.rows * source.board.columns: model}

    def __repr__(self) -> str:
        trained = self.source.trained
        return f"Solver({trained.name!r}, {self.board.title}, {trained.arch.name}, {self._world.device.type})"

    @classmethod
    def from_checkpoint(
        cls, checkpoint: str | Path, overrides: Sequence[str] = (), *, device: DeviceName = "auto"
    ) -> "Solver":
        """Load a model for solving.

        Args:
            checkpoint: a run folder (its newest checkpoint), <run>/best, a step folder, a weights
                file, or hf://owner/repo[/path].
            overrides: overrides as on the command line of solve.py. A weights file that
                `python -m sharing.export` did not write needs its architecture and the dataset of
                its training, such as ["arch=trm_mlp", "data_path=data/sudoku-extreme-1k-aug-1000"].
            device: "cuda", "mps" or "cpu"; "auto" takes the first of these that the machine has.

        Raises:
            UserError: The checkpoint is missing or damaged, or there is no such device. The message
                has one line.
        """
        # Hydra needs quotes around paths with special characters, so it gets a placeholder instead.
        typed = read_config("solve", ["checkpoint=_", *overrides]) | {"checkpoint": str(checkpoint), "device": device}
        world = connect_devices(World.single(), device)
        source = Source.look_at(validate(SolveConfig, typed), world)
        return cls(source, source.trained.load_puzzle_model(world), world)

    def solve(self, puzzles: Sequence[str | Task]) -> list[Solution]:
        """Solve any number of puzzles, `batch_size` at a time.

        Raises:
            UserError: A puzzle is not of the model's kind. The message has one line and names the
                first such puzzle. No puzzle has been solved then.
        """
        if isinstance(puzzles, str):
            raise UserError("solve() takes a list of puzzles, and this is one text; give [puzzle]")
        parsed: list[Puzzle] = []
        for number, puzzle in enumerate(puzzles, start=1):
            if isinstance(puzzle, Task):
                parsed += self.source.reader.of_tasks([puzzle], f"puzzle {number}")
            elif not isinstance(puzzle, str):
                raise UserError(
                    f"puzzle {number} is of the type {type(puzzle).__name__}; give a text with a character for each "
                    "cell, or for ARC a task as JSON"
                )
            else:
                parsed += self.source.reader.of_text(puzzle, f"puzzle {number}")
        return list(self.solutions(parsed))

    def solutions(self, puzzles: Sequence[Puzzle]) -> Iterator[Solution]:
        """Solve puzzles that have been read, and yield their solutions one after another."""
        config = self.source.config
        batch_size = max(1, config.batch_size // config.num_passes)
        for start in range(0, len(puzzles), batch_size):
            chunk = puzzles[start : start + batch_size]
            by_size: dict[int, list[int]] = {}
            for n, puzzle in enumerate(chunk):
                by_size.setdefault(len(puzzle.question_S), []).append(n)
            solved: dict[int, Solution] = {}
            with advising(partial(half, "batch_size", len(chunk) * config.num_passes)):
                for same in by_size.values():
                    rows_N = np.array(same) + start
                    solved |= zip(same, self._solve_batch([chunk[n] for n in same], rows_N), strict=True)
            yield from (solved[n] for n in range(len(chunk)))

    def _solve_batch(self, puzzles: Sequence[Puzzle], rows_N: np.ndarray) -> list[Solution]:
        """Solve puzzles of one size, all at once.

        Args:
            rows_N: the numbers of the puzzles, on which noise and symmetries depend.
        """
        questions_NS = np.stack([puzzle.question_S for puzzle in puzzles]).astype(np.int32)
        board = self.source.board_of(questions_NS.shape[1])
        model, corner = self._model_for(board)
        inputs_NS = torch.from_numpy(questions_NS)
        if corner is not None:
            inputs_NS = corner.place(inputs_NS, PADDING)
        identifiers_N = torch.tensor([puzzle.identifier for puzzle in puzzles], dtype=torch.int32)
        batch = {
            "inputs": self._world.to_device(inputs_NS),
            "labels": self._world.to_device(torch.zeros_like(inputs_NS)),  # not used
            "puzzle_identifiers": self._world.to_device(identifiers_N),
        }
        config = self.source.config
        variations = None if config.tta is None else Variations(board, config.tta, corner)
        seen = trace_with_more(model, batch, rows_N, config, variations)
        predictions_TNS = seen.predictions_TNS
        if corner is not None and variations is None:  # votes are cropped when they are turned back
            predictions_TNS = corner.crop_answers(predictions_TNS)
        answers_TNS = predictions_TNS.cpu().numpy().astype(board.dtype)
        confidence_TN, settled_at_N = seen.confidence_TN.float().cpu().numpy(), seen.settled_at_N.cpu().numpy()
        return [
            _solution(board, puzzle, answers_TNS[:, n], confidence_TN[:, n], int(settled_at_N[n]))
            for n, puzzle in enumerate(puzzles)
        ]

    def _model_for(self, board: BoardTask) -> tuple[RecursiveModel, Corner | None]:
        """Return the model that reads a board, and the board's place on a canvas.

        The place is None if the model is built for boards of this size.
        """
        own, num_cells = self.board.rows * self.board.columns, board.rows * board.columns
        if num_cells != own and not self.source.weights_fit(board):
            return self._models[own], Corner(board.rows, self.board.rows)
        if num_cells not in self._models:
            trained = self.source.trained
            sizes = replace(trained.of_puzzles()[1], seq_len=num_cells, vocab_size=len(board.symbols))
            self._models[num_cells] = replace(trained, sizes=sizes).load_puzzle_model(self._world)
        return self._models[num_cells], None


def _solution(
    board: BoardTask, puzzle: Puzzle, answers_TS: np.ndarray, confidence_T: np.ndarray, settled_at: int
) -> Solution:
    """Return the solution of a puzzle from the model's answers after each step."""
    steps = []
    before_S = puzzle.question_S
    for index, answer_S in enumerate(answers_TS):
        changed = np.flatnonzero(answer_S != before_S).tolist()
        steps.append(Step(index + 1, board.plain(answer_S), answer_S, changed, float(confidence_T[index])))
        before_S = answer_S
    verdict = board.verdict(puzzle.question_S, answers_TS[-1], puzzle.solution_S)
    return Solution(board, puzzle, steps, settled_at, verdict)


@dataclass(frozen=True)
class Source:
    """A model before its weights are loaded, so that a mistake in a puzzle is reported at once."""

    config: SolveConfig
    trained: Trained
    board: BoardTask
    data_paths: list[str]  # the data on which the model was trained

    @staticmethod
    def look_at(config: SolveConfig, world: World) -> "Source":
        """Find the model and its kind of board.

        Raises:
            UserError: There is no such model.
        """
        return Source.of(config, find_model(config, world), world)

    @staticmethod
    def of(config: SolveConfig, trained: Trained, world: World) -> "Source":
        """Find the kind of board of a model.

        Raises:
            UserError: The data are not those of the model's task, or an option does not suit it.
        """
        with world.shared_errors():
            if config.data_path:
                trained = trained.on(open_split(config.data_path, "test"))
            _, sizes = trained.of_puzzles()
            shape = sizes.seq_len, sizes.vocab_size
            board = task_of_shape(*shape) or TokensTask(*shape)
            config.require_noise_for_seed()
        if config.data_path:
            data_paths = [config.data_path]
        else:  # a file names no folders of this machine
            data_paths = trained.config.train_paths if trained.config is not None else []
        source = Source(config, trained, board, data_paths)
        with world.shared_errors():
            source.require_symmetries()
        return source

    def require_symmetries(self) -> None:
        """Raise UserError if the boards have no symmetries that vote, or fewer than are to vote."""
        if self.config.tta is not None:
            _, sizes = self.trained.of_puzzles()
            Variations.of_boards(sizes.seq_len, sizes.vocab_size, self.config.checkpoint, self.config.tta)

    @property
    def checkpoint(self) -> str:
        """Return the step folder, or the file of weights."""
        return self.trained.name

    @property
    def arch(self) -> CommonConfig:
        return self.trained.of_puzzles()[0]

    def board_of(self, num_cells: int) -> BoardTask:
        """Return the boards with so many cells, or the training's if the model reads none."""
        return self._other_board(num_cells) or self.board

    def _other_board(self, num_cells: int) -> TextTask | None:
        """Return the boards with so many cells; None if the model reads no such boards."""
        if not isinstance(self.board, TextTask):
            return None
        own = self.board.rows * self.board.columns
        if num_cells == own:
            return self.board
        other = self.board.of_other_size(num_cells)
        if not isinstance(other, TextTask):
            return None
        # A model whose weights don't fit may read smaller boards on the canvas of its own boards.
        on_canvas = self.arch.reads_boards_of_any_size and num_cells < own
        return other if on_canvas or self.weights_fit(other) else None

    def weights_fit(self, board: BoardTask) -> bool:
        """Return whether the trained weights fit a model for boards of another size."""
        return self.arch.weights_fit(same_vocabulary=len(board.symbols) == len(self.board.symbols))

    @cached_property
    def reader(self) -> PuzzleReader:
        """Return what reads puzzles for this model."""
        board, sizes = self.board, self.trained.of_puzzles()[1]
        return PuzzleReader(
            board,
            self._other_board,
            mixes_sizes=bool(board.symbols) and (self.arch.is_free_of_seq_len or self.arch.reads_boards_of_any_size),
            is_for=f"{self.config.checkpoint} was trained on {board.name}",
            table=PuzzleTable(
                self.data_paths, self.trained.data, sizes.num_puzzle_identifiers if self.arch.puzzle_emb_ndim > 0 else 0
            ),
        )

    def puzzles(self) -> list[Puzzle]:
        """Return the puzzles that the command line names.

        Raises:
            UserError: A puzzle can't be read. The message says where the first such puzzle is.
        """
        config, reader = self.config, self.reader
        if config.prompt is not None:
            raise UserError(f"prompt= is for models of text, but {reader.is_for}; give puzzle=, csv= or task=")
        if config.task is not None:
            return reader.of_tasks(read_tasks(Path(config.task)), config.task)
        if config.csv is not None:
            return reader.of_csv(Path(config.csv))
        assert config.puzzle is not None
        if config.puzzle == STDIN:
            return reader.of_lines(read_stdin(), "stdin")
        if os.path.isfile(file := os.path.expanduser(config.puzzle)):
            return reader.of_file(Path(file))
        if re.search(r"\.(sdk|ss|sdm|txt|csv|tsv|json|jsonl)(\.gz)?$", file, re.IGNORECASE):
            raise UserError(f"there is no file {file}; correct puzzle=...")
        return reader.of_text(config.puzzle, "puzzle")


# ---- text for people ---------------------------------------------------------------------------


def describe_steps(solution: Solution, *, color: bool) -> Iterator[str]:
    """Yield text: the puzzle, the board after each step that changed it, and the verdict."""
    board, puzzle, steps = solution.board, solution.puzzle, solution.steps
    yield f"{puzzle.name} ({board.name})"
    yield from (f"note: {note}" for note in puzzle.notes)
    yield board.show(puzzle.question_S, color=color)
    solution_S = puzzle.solution_S if board.has_one_solution else None
    for first, last in _runs(steps):
        confidence = f"halting confidence {last.confidence:.2f}"
        if not last.changed:
            which = f"step {last.number}" if first is last else f"steps {first.number} to {last.number}"
            yield f"\n{which}: nothing changed, {confidence}"
            continue
        yield f"\nstep {last.number}: {count(len(last.changed), 'cell')} changed, {confidence}"
        # At the first step every filled cell is new, so marks would say nothing.
        previous_S = None if last.number == 1 else steps[last.number - 2].tokens_S
        yield board.show(
            last.tokens_S, question_S=puzzle.question_S, previous_S=previous_S, solution_S=solution_S, color=color
        )
    yield f"\n{_outcome(solution)}: {solution.reason}"
    yield f"the model would stop after step {solution.settled_at} of {len(steps)}"


def describe_in_a_line(solution: Solution) -> str:
    """Return a line with the outcome, the answer if it is short, and the reason if it is wrong."""
    answer, steps = solution.answer, solution.steps
    parts = [f"{solution.puzzle.name:<20} {_outcome(solution):<10}"]
    parts += [answer] if isinstance(answer, str) and len(answer) <= _SHORT else []
    parts += [f"would stop at step {solution.settled_at} of {len(steps)}, confidence {steps[-1].confidence:.2f}"]
    parts += [] if solution.solved else [solution.reason]
    return "  ".join(parts)


def _runs(steps: Sequence[Step]) -> Iterator[tuple[Step, Step]]:
    """Yield the first and last step of each run of steps that changed nothing.

    A step that changed the answer is yielded as both.
    """
    first = steps[0]
    for step, after in zip(steps, [*steps[1:], None], strict=True):
        if step.changed or after is None or after.changed:
            yield first, step
            first = after or step


def _outcome(solution: Solution) -> str:
    return {True: "solved", False: "not solved", None: "answered"}[solution.solved]


# ---- the program -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Typed:
    """The command line. `config` is None if the user asked only for a page, such as --help."""

    config: SolveConfig | None
    page: str | None
    as_json: bool


def read_command_line(argv: Sequence[str]) -> Typed:
    """Read the command line.

    Raises:
        UserError: The command line has a mistake.
    """
    verbatim: dict[str, str] = {}
    rest = []
    for typed in argv:
        key, _, value = typed.lstrip("+-").partition("=")  # --puzzle=... is read as --device=... is
        if key not in _VERBATIM:
            rest.append(typed)
            continue
        if key in verbatim:
            many = "many with prompt=-" if key == "prompt" else "many puzzles with csv= or puzzle=-"
            raise UserError(f"{key} is given twice; give it once, or {many}")
        if not value:
            raise UserError(f"{key} is given, but empty; give {key}=...")
        verbatim[key] = value if key in ("puzzle", "prompt") else os.path.expanduser(value)
    command = CommandLine.parse(rest, "solve", USAGE, flags=["--json"])
    if command.page:
        return Typed(None, command.page, as_json=False)
    config = validate(
        SolveConfig, read_config("solve", command.overrides) | verbatim, Origin("solve", command.overrides)
    )
    if len(verbatim) > 1:
        raise UserError(f"{' and '.join(f'{key}=' for key in verbatim)} exclude each other; give one of them")
    if not verbatim:
        raise UserError(f"there is nothing to solve; give one of {', '.join(f'{key}=...' for key in _VERBATIM)}")
    return Typed(config, None, as_json="--json" in command.flags)


def find_model(config: SolveConfig, world: World) -> Trained:
    """Find the model without reading its weights.

    Raises:
        UserError: There is no such model.
    """
    return open_trained(
        config.checkpoint, world, arch=config.arch, data_path=config.data_path, puzzle_table=config.puzzle_table
    )


def main(world: World) -> None:
    """Run the program."""
    with world.shared_errors():
        if world.size > 1:
            raise UserError(f"solve.py is one process, not {world.size}; start it without torchrun")
        typed = read_command_line(sys.argv[1:])
    if typed.config is None:
        assert typed.page is not None
        show(typed.page)
        return
    config = typed.config
    trained = find_model(config, world)
    with world.shared_errors():
        require_keys_of(trained.arch.kind, config.model_dump(), _KEYS_OF_KIND, "solve", trained.name)
    if trained.arch.kind == "text":
        answer_prompts(config, trained, world, as_json=typed.as_json)
        return
    source = Source.of(config, trained, world)
    with world.shared_errors():
        puzzles = source.puzzles()
    world = connect_devices(world, config.device)
    solver = Solver(source, source.trained.load_puzzle_model(world), world)

    try:
        num_solved = report(solver, puzzles, as_json=typed.as_json)
    except BrokenPipeError:  # the reader of the solutions has left
        leave(0)
    if num_solved < len(puzzles):
        sys.exit(1)


def answer_prompts(config: SolveConfig, trained: Trained, world: World, *, as_json: bool) -> None:
    """Let a model of text answer the prompt of the command line, or chat."""
    with world.shared_errors():
        if config.prompt is None:
            raise UserError(f"{config.checkpoint} is a model of text; give prompt=<text>, or prompt=- for a chat")
        reader = open_reader(trained, config, config.data_path)
        tokens = None if config.prompt == STDIN else reader.read(config.prompt, "prompt")
    world = connect_devices(world, config.device)
    model = trained.load_model(world)
    assert isinstance(model, TextModel)
    writer = Writer(model, reader)
    try:
        if tokens is None:
            chat(writer, as_json=as_json)
        else:
            write_answer(writer, config.prompt, tokens, as_json=as_json)
    except BrokenPipeError:  # the reader of the answers has left
        leave(0)


def report(solver: Solver, puzzles: Sequence[Puzzle], *, as_json: bool) -> int:
    """Solve and print the puzzles one after another, and return how many count as solved."""
    config, board = solver.source.config, solver.board
    color = config.color == "always" or (config.color == "auto" and sys.stdout.isatty())
    in_steps = config.show == "steps" or (config.show == "auto" and len(puzzles) <= _MOST_IN_STEPS)
    if in_steps and not as_json:
        write(f"{solver.source.checkpoint}\n{board.legend(color=color)}\n")
    num_solved = 0
    for solution in solver.solutions(puzzles):
        num_solved += solution.counts_as_solved
        if as_json:
            write(json.dumps(solution.as_json()))
        elif in_steps:
            write("\n".join(describe_steps(solution, color=color)), end="\n\n")
        else:
            write(describe_in_a_line(solution))
    if len(puzzles) > 1 and not as_json:
        write(f"{num_solved} of {len(puzzles)} solved")
    return num_solved


if __name__ == "__main__":
    run(main)
