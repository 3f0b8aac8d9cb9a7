"""Write an HTML page: a dataset; curves, answers and votes of a run; runs compared.

The page needs no network. With --png, pictures are drawn too.

python view.py checkpoints/<project>/<run> -o view.html
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from dataset.builder import SPLITS
from dataset.text.schema import kind_of_data
from sharing.sources import kind_of, no_checkpoint
from utils.arguments import Parser, check_at_least, typed_path
from utils.checkpoint.names import step_named
from utils.drawing import pyplot
from utils.errors import UserError
from utils.overrides import typed_override
from utils.run.status import find_runs
from utils.shell import run_command
from utils.terminal import tell
from utils.text import for_shell
from viewer.answers import save_missing_answers
from viewer.dataset_page import page_of_dataset
from viewer.pages import Page, Settings, write_page
from viewer.pictures import draw_curves, draw_examples, draw_puzzle
from viewer.run_page import SAVE_OUTPUTS, older_answers, page_of_run
from viewer.runs_page import page_of_runs
from viewer.text_page import page_of_text

EXAMPLES = """
examples:
  # a dataset: browse its puzzles, their solutions and their augmentations
  python view.py data/sudoku-extreme-1k-aug-1000 -o sudoku.html

  # a dataset of text: its samples by token, and how long they are
  python view.py data/book -o book.html

  # a run: its curves, and the model's answer to test puzzles after every reasoning step
  python view.py checkpoints/my-project/my-run

  # draw curve.png and puzzle.png into the run's folder too (pip install -r requirements-demo.txt)
  python view.py checkpoints/my-project/my-run --png

  # compare runs: configs, curves, numbers, and which of them solves a puzzle
  python view.py checkpoints/my-project/my-run checkpoints/my-project/other-run
  python view.py checkpoints/my-project

  # answers to every test puzzle, or to other data than the run's own: evaluate.py saves them
  python evaluate.py checkpoint=checkpoints/my-project/my-run \\
      "save_outputs=[inputs,labels,puzzle_identifiers,predictions_at_step,q_halt_at_step]"
  python view.py checkpoints/my-project/my-run/eval_outputs/step_00001000_other

The page is one file, which any current browser opens without a network. Press `?` in it for a list of
keys. The answers of a run are those of its newest checkpoint. If those of a run that you name are not
saved, evaluate.py first lets its model answer --max-examples puzzles of each test set. At most
--max-examples examples are shown of each set, spread evenly over it.
"""


def parse_settings(argv: list[str] | None = None) -> Settings:
    """Read the command line.

    Raises:
        UserError: an option is unknown or malformed.
    """
    parser = Parser(
        "view.py",
        "Write one HTML page of a dataset's puzzles, of a run and its answers, or of several runs.",
        EXAMPLES,
        path_keys=("checkpoint", "data_path", "run"),
    )
    add = parser.add_argument
    add(
        "paths",
        type=typed_path,
        nargs="+",
        metavar="RUN_OR_DATASET",
        help="folder of a run, of a step (also <run>/best), of several runs, of what evaluate.py saved, or of a "
        "dataset",
    )
    add("-o", "--output", type=typed_path, metavar="FILE", default=Path("view.html"), help="default: %(default)s")
    add("--max-examples", type=int, metavar="N", default=200, help="of each set, evenly spread (default: %(default)s)")
    add("--step", type=int, metavar="N", help="answers at this step (default: the newest checkpoint)")
    add("--set", metavar="NAME", help="show this set only (default: all)")
    add("--png", action="store_true", help="draw pictures too: a run's into its folder, a dataset's beside the page")
    settings = Settings(**vars(parser.parse_args(argv)))
    check_at_least(settings, max_examples=1, step=0)
    return settings


def view(argv: list[str] | None = None) -> str:
    """Write the page, draw the pictures that were asked for, and return a summary.

    Raises:
        UserError: a folder is neither a run nor a dataset, or a file in it is damaged.
    """
    settings = at_named_step(parse_settings(argv))
    check_output(settings.output)
    if settings.png:
        pyplot()  # find out now, and not after a model has answered puzzles, that it is missing
    runs = runs_named(settings.paths)
    path = runs[0] if runs else settings.paths[0]
    if settings.png and not runs and kind_of_data(path) == "text":
        raise UserError("--png draws puzzles, and a dataset of text has none; leave it out")
    page, lines = compared(runs, settings) if len(runs) > 1 else shown(path, settings)
    write_page(page, settings.output)
    if settings.png:
        try:
            if is_dataset(path):  # beside the page: a builder refuses to replace a dataset with foreign files
                draw_examples(page, settings.output.with_suffix(".png"))
                lines.append(f"drew {settings.output.with_suffix('.png')}")
            else:
                lines += pictures_of_run(path, page)
        except UserError as error:
            raise UserError(f"wrote {settings.output}, but not all pictures: {error}") from error
    num = len(page["examples"]) + len(page.get("texts", []))
    megabytes = settings.output.stat().st_size / 1e6
    wrote = f"wrote {settings.output} ({megabytes:.1f} MB): {num:,} examples, {page['summary']}"
    return "\n".join([*lines, wrote])


def check_output(output: Path) -> None:
    """Refuse a page that can't be written, before a model answers puzzles for it.

    Raises:
        UserError: its folder is missing or read-only.
    """
    folder = output.parent
    if not folder.is_dir():
        raise UserError(f"cannot write {output}: there is no folder {folder}; create it or choose another --output")
    if not os.access(folder, os.W_OK):
        raise UserError(f"cannot write {output}: {folder} is read-only; choose another --output")


def at_named_step(settings: Settings) -> Settings:
    """Return the settings with runs and --step for the names of steps, such as <run>/best.

    A page shows the same step of all runs. If the names are of different steps, it shows the
    answers of each run's newest checkpoint, and a line says so.

    Raises:
        UserError: there is no such step, or --step is given too.
    """
    named = [_step_in(path) for path in settings.paths]
    paths = [path if step is None else step.parent for path, step in zip(settings.paths, named, strict=True)]
    steps = {None if step is None else int(step.name[5:]) for step in named}
    if steps == {None}:
        return settings
    if settings.step is not None:
        raise UserError(f"--step={settings.step} and a path such as {settings.paths[0]} name a step; give one of them")
    if len(steps) > 1:
        tell("the paths name different steps, and a page compares one: it shows each run's newest checkpoint")
        return replace(settings, paths=paths)
    return replace(settings, paths=paths, step=steps.pop())


def _step_in(path: Path) -> Path | None:
    """Return the step folder of a run that a path names; None for any other path."""
    step = step_named(path)
    return None if step is None or (step / "results.json").exists() else step  # saved outputs have such names too


def runs_named(paths: list[Path]) -> list[Path]:
    """Return the runs that the paths name: themselves, or those in their folders.

    Returns:
        An empty list if the only path is a dataset, or a folder of saved outputs.

    Raises:
        UserError: a path is no folder, or one of several paths holds no run.
    """
    for path in paths:
        if kind_of(path) == "weights":
            saving = for_shell([f"save_outputs={SAVE_OUTPUTS}"])
            raise UserError(
                f"{path} is weights, without curves and answers; python evaluate.py "
                f"{typed_override('checkpoint', str(path))} out=DIR {saving} saves answers, which view.py DIR shows"
            )
        if not path.is_dir():
            raise UserError(f"there is no folder {path}; give the folder of a run or of a dataset")
        if len(paths) > 1 and not find_runs([path]):
            raise UserError(f"{path} is no run, and only runs are compared; give it alone")
    return [] if len(paths) == 1 and is_dataset(paths[0]) else find_runs(paths)


def is_dataset(path: Path) -> bool:
    return any((path / split).is_dir() for split in SPLITS) or kind_of_data(path) is not None


def compared(runs: list[Path], settings: Settings) -> tuple[Page, list[str]]:
    """Return the page of several runs, and lines about what was done for it.

    Raises:
        UserError: an option is for one run, or a file of a run is damaged.
    """
    if settings.png:
        raise UserError("--png draws one run or dataset; watch.py ... --plot curves.png draws the curves of several")
    # A folder may hold many runs, whose answers would take long.
    lines = [line for run in runs if run in settings.paths for line in save_missing_answers(run, settings)]
    page = page_of_runs(runs, settings)
    silent = [runs[number] for number in page["unanswered"] if runs[number] not in settings.paths]
    if silent:
        have = "1 run has" if len(silent) == 1 else f"{len(silent)} runs have"
        lines.append(f"{have} no saved answers; this makes them: {page['command']}")
    others = [run for run in runs if run not in settings.paths] if settings.step is None else []
    if older := list(filter(None, map(older_answers, others))):
        lines += [*older, f"this makes the answers of the newest checkpoints: {page['command']}"]
    return page, lines


def shown(path: Path, settings: Settings) -> tuple[Page, list[str]]:
    """Return the page of one run or dataset, and lines about what was done for it.

    Raises:
        UserError: the folder is neither a run nor a dataset, or a file in it is damaged.
    """
    if is_dataset(path):
        if settings.step is not None:
            raise UserError(f"--step is for runs, and {path} is a dataset; leave it out")
        page_of = page_of_text if kind_of_data(path) == "text" else page_of_dataset
        return page_of(path, settings), []
    if not any((path / name).exists() for name in ("metrics.jsonl", "eval_outputs", "results.json")):
        raise UserError(f"{no_checkpoint(path)}; datasets and what evaluate.py saved have pages too")
    lines = save_missing_answers(path, settings)
    return page_of_run(path, settings), lines


def pictures_of_run(run: Path, page: Page) -> list[str]:
    """Draw curve.png and puzzle.png into the run's folder, and return lines that report them.

    Without saved outputs there is no puzzle to draw. The report names the command that saves them.
    """
    curve, puzzle = run / "curve.png", run / "puzzle.png"
    lines = [f"drew {curve}"] if draw_curves(run, curve) else []
    if page["examples"]:
        draw_puzzle(page, puzzle)
        return [*lines, f"drew {puzzle}"]
    if "texts" in page:
        return lines
    return [*lines, f"{puzzle} needs saved outputs; run this, then view.py again: {page['command']}"]


if __name__ == "__main__":
    sys.exit(run_command(view, None))
