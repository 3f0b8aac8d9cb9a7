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

from utils import openmp  # isort: skip # noqa: F401 - before torch

import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dataset.arc import read_tasks
from dataset.puzzle_input import STDIN, Puzzle
from dataset.tasks.base import count
from training.chat import chat, write_answer
from training.kinds import require_keys_of
from training.prompts import Writer, open_reader
from training.solver import SHORT, Solution, SolveConfig, Solver, Step, find_model
from training.trained import Trained
from utils.command_line import CommandLine, read_config, validate
from utils.composing import compose
from utils.errors import UserError
from utils.program import run
from utils.ranks.setup import connect_devices
from utils.ranks.world import World
from utils.terminal import leave, show, write

__all__ = ["Solver", "main"]

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


# ---- the program -------------------------------------------------------------------------------


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
        require_keys_of(trained.arch.kind, config.model_dump(), "solve", trained.name)
    answer = {"puzzles": solve_puzzles, "text": answer_prompts}[trained.arch.kind]
    try:
        all_solved = answer(config, trained, world, as_json=typed.as_json)
    except BrokenPipeError:  # the reader of the answers has left
        leave(0)
    if not all_solved:
        sys.exit(1)


def solve_puzzles(config: SolveConfig, trained: Trained, world: World, *, as_json: bool) -> bool:
    """Solve the puzzles of the command line, and return whether all are solved."""
    with world.shared_errors():  # a mistake in a puzzle is found before the weights are loaded
        solver = Solver(config, trained)
        puzzles = puzzles_of(config, solver)
    solver.load(connect_devices(world, config.device))
    return report(solver, puzzles, as_json=as_json) == len(puzzles)


def puzzles_of(config: SolveConfig, solver: Solver) -> list[Puzzle]:
    """Return the puzzles that the command line names.

    Raises:
        UserError: A puzzle can't be read. The message says where the first such puzzle is.
    """
    reader = solver.reader
    if config.task is not None:
        return reader.of_tasks(read_tasks(Path(config.task)), config.task)
    if config.csv is not None:
        return reader.of_csv(Path(config.csv))
    if config.puzzle is None:
        raise UserError(f"prompt= is for models of text, but {reader.is_for}; give puzzle=, csv= or task=")
    return reader.of_typed(config.puzzle)


def answer_prompts(config: SolveConfig, trained: Trained, world: World, *, as_json: bool) -> bool:
    """Let a model of text answer the prompt of the command line, or chat."""
    with world.shared_errors():
        if config.prompt is None:
            raise UserError(f"{config.checkpoint} is a model of text; give prompt=<text>, or prompt=- for a chat")
        reader = open_reader(trained, config, config.data_path)
        tokens = None if config.prompt == STDIN else reader.read(config.prompt, "prompt")
    writer = Writer(trained.load_text_model(connect_devices(world, config.device)), reader)
    if tokens is None:
        chat(writer, as_json=as_json)
    else:
        write_answer(writer, config.prompt, tokens, as_json=as_json)
    return True


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
        SolveConfig, read_config("solve", command.overrides) | verbatim, lambda: compose("solve", command.overrides)
    )
    if len(verbatim) > 1:
        raise UserError(f"{' and '.join(f'{key}=' for key in verbatim)} exclude each other; give one of them")
    if not verbatim:
        raise UserError(f"there is nothing to solve; give one of {', '.join(f'{key}=...' for key in _VERBATIM)}")
    return Typed(config, None, as_json="--json" in command.flags)


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
    yield f"\n{solution.outcome}: {solution.reason}"
    yield f"the model would stop after step {solution.settled_at} of {len(steps)}"


def describe_in_a_line(solution: Solution) -> str:
    """Return a line with the outcome, the answer if it is short, and the reason if it is wrong."""
    answer, steps = solution.answer, solution.steps
    parts = [f"{solution.puzzle.name:<20} {solution.outcome:<10}"]
    parts += [answer] if isinstance(answer, str) and len(answer) <= SHORT else []
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


def report(solver: Solver, puzzles: Sequence[Puzzle], *, as_json: bool) -> int:
    """Solve and print the puzzles one after another, and return how many count as solved."""
    config, board = solver.config, solver.board
    color = config.color == "always" or (config.color == "auto" and sys.stdout.isatty())
    in_steps = config.show == "steps" or (config.show == "auto" and len(puzzles) <= _MOST_IN_STEPS)
    if in_steps and not as_json:
        write(f"{solver.trained.name}\n{board.legend(color=color)}\n")
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
