r"""Solve puzzles with a trained model and show how it reaches its answer. dataset/tasks/ has the
kinds. Models of text answer prompts (training/prompts.py).

python solve.py checkpoint=checkpoints/<project>/<run> \
    puzzle=53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79
python solve.py checkpoint=checkpoints/<project>/<run> prompt="In the beginning"

From Python: `from solve import Solver` (training/solver.py, docs/solving.md).
"""

from utils import openmp  # isort: skip # noqa: F401 - before torch

import json
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from dataset.arc import read_tasks
from dataset.puzzle_input import STDIN
from dataset.tasks.base import count
from models.text.model import TextModel
from training.chat import chat, write_answer
from training.kinds import require_keys_of
from training.prompts import Writer, open_reader
from training.solver import Solution, SolveConfig, Solver
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

  python solve.py checkpoint=checkpoints/<project>/<run> puzzle=53..7....6..195....98....6.8...6...34..8.3..17...
  python solve.py checkpoint=<run> csv=puzzles.csv            with a column question, and perhaps a column answer
  python solve.py checkpoint=<run> puzzle=sudokus.txt         one on each line or in rows, .sdk or .ss; - is stdin
  python solve.py checkpoint=<run> task=0a1b2c3d.json         the test inputs of an ARC task
  python solve.py checkpoint=<run> csv=puzzles.csv trajectories=8 noise=0.5     the most confident of eight passes
  python solve.py checkpoint=model.safetensors puzzle=...     what sharing.export wrote; hf://owner/repo is on the Hub
  python solve.py checkpoint=hf://owner/repo/file arch=trm_mlp data_path=data/sudoku-extreme-1k-aug-1000 puzzle=...
  python solve.py checkpoint=<run> prompt="In the beginning" max_new_tokens=300 temperature=0.8 top_k=50 seed=1
  python solve.py checkpoint=<run> prompt=-                   a chat with a model of text, line by line

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
_LONGEST_ANSWER = 81  # on the line of its puzzle


# ---- the program -------------------------------------------------------------------------------


def main(world: World) -> None:
    """Run the program."""
    with world.shared_errors():
        if world.size > 1:
            raise UserError(f"solve.py is one process, not {world.size}; start it without torchrun")
        typed = read_command_line(sys.argv[1:])
    if isinstance(typed, str):
        show(typed)
        return
    config, as_json = typed
    trained = config.open_trained(world)
    require_keys_of(trained.arch.kind, config.model_dump(), "solve", trained.name)
    answer = {"puzzles": solve_puzzles, "text": answer_prompts}[trained.arch.kind]
    try:
        all_solved = answer(config, trained, world, as_json=as_json)
    except BrokenPipeError:  # the reader of the answers has left
        leave(0)
    if not all_solved:
        sys.exit(1)


def read_command_line(argv: Sequence[str]) -> tuple[SolveConfig, bool] | str:
    """Return the config and whether --json was given; or the page that was asked for, as --help."""
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
        return command.page
    values = read_config("solve", command.overrides) | verbatim
    config = validate(SolveConfig, values, lambda: compose("solve", command.overrides))
    if len(verbatim) > 1:
        raise UserError(f"{' and '.join(f'{key}=' for key in verbatim)} exclude each other; give one of them")
    if not verbatim:
        raise UserError(f"there is nothing to solve; give one of {', '.join(f'{key}=...' for key in _VERBATIM)}")
    return config, "--json" in command.flags


def solve_puzzles(config: SolveConfig, trained: Trained, world: World, *, as_json: bool) -> bool:
    """Solve the puzzles of the command line, and return whether all are solved."""
    with world.shared_errors():  # a mistake in a puzzle is found before the weights are loaded
        solver = Solver(config, trained)
        reader = solver.reader
        if config.task is not None:
            puzzles = reader.of_tasks(read_tasks(Path(config.task)), config.task)
        elif config.csv is not None:
            puzzles = reader.of_csv(Path(config.csv))
        elif config.puzzle is not None:
            puzzles = reader.of_typed(config.puzzle)
        else:
            raise UserError(f"prompt= is for models of text, but {reader.is_for}; give puzzle=, csv= or task=")
    solver.load(connect_devices(world, config.device))
    board, num_solved = solver.board, 0
    color = config.color == "always" or (config.color == "auto" and sys.stdout.isatty())
    in_steps = config.show == "steps" or (config.show == "auto" and len(puzzles) <= _MOST_IN_STEPS)
    if in_steps and not as_json:
        write(f"{trained.name}\n{board.legend(color=color)}\n")
    for solution in solver.solutions(puzzles):
        num_solved += solution.valid if solution.solved is None else solution.solved
        if as_json:
            write(json.dumps(solution.as_json()))
        elif in_steps:
            write("\n".join(describe_steps(solution, color=color)), end="\n\n")
        else:
            write(describe_in_a_line(solution))
    if len(puzzles) > 1 and not as_json:
        write(f"{num_solved} of {len(puzzles)} solved")
    return num_solved == len(puzzles)


def answer_prompts(config: SolveConfig, trained: Trained, world: World, *, as_json: bool) -> bool:
    """Let a model of text answer the prompt of the command line, or chat."""
    with world.shared_errors():
        if config.prompt is None:
            raise UserError(f"{config.checkpoint} is a model of text; give prompt=<text>, or prompt=- for a chat")
        reader = open_reader(trained, config, config.data_path)
        tokens = None if config.prompt == STDIN else reader.read(config.prompt, "prompt")
    model = trained.load_model(connect_devices(world, config.device))
    assert isinstance(model, TextModel)
    writer = Writer(model, reader)
    if tokens is None:
        chat(writer, as_json=as_json)
    else:
        write_answer(writer, config.prompt, writer.write(tokens), as_json=as_json)
    return True


# ---- text for people ---------------------------------------------------------------------------


def describe_steps(solution: Solution, *, color: bool) -> Iterator[str]:
    """Yield text: the puzzle, the board after each step that changed it, and the verdict."""
    board, puzzle, steps = solution.board, solution.puzzle, solution.steps
    yield f"{puzzle.name} ({board.name})"
    yield from (f"note: {note}" for note in puzzle.notes)
    yield board.show(puzzle.question_S, color=color)
    solution_S = puzzle.solution_S if board.has_one_solution else None
    for has_changed, group in groupby(steps, lambda step: bool(step.changed)):
        of_group = list(group)
        first, last = of_group[0], of_group[-1]
        if not has_changed:
            which = f"step {last.number}" if first is last else f"steps {first.number} to {last.number}"
            yield f"\n{which}: nothing changed, halting confidence {last.confidence:.2f}"
            continue
        for step in of_group:
            changed = f"{count(len(step.changed), 'cell')} changed, halting confidence {step.confidence:.2f}"
            yield f"\nstep {step.number}: {changed}"
            # At the first step every filled cell is new, so marks would say nothing.
            previous_S = None if step.number == 1 else steps[step.number - 2].tokens_S
            yield board.show(
                step.tokens_S, question_S=puzzle.question_S, previous_S=previous_S, solution_S=solution_S, color=color
            )
    yield f"\n{solution.outcome}: {solution.reason}"
    yield f"the model would stop after step {solution.settled_at} of {len(steps)}"


def describe_in_a_line(solution: Solution) -> str:
    """Return a line with the outcome, the answer if it is short, and the reason if it is wrong."""
    answer, steps = solution.answer, solution.steps
    parts = [f"{solution.puzzle.name:<20} {solution.outcome:<10}"]
    parts += [answer] if isinstance(answer, str) and len(answer) <= _LONGEST_ANSWER else []
    parts += [f"would stop at step {solution.settled_at} of {len(steps)}, confidence {steps[-1].confidence:.2f}"]
    parts += [] if solution.solved else [solution.reason]
    return "  ".join(parts)


if __name__ == "__main__":
    run(main)
