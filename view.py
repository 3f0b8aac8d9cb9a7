"""Write an HTML page: a dataset; curves, answers and votes of a run; runs compared.

The page needs no network. With --png, pictures are drawn too.

python view.py checkpoints/<project>/<run> -o view.html
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

from dataset.builder import SPLITS
from dataset.pictures import Board, draw_answers, draw_boards, names_of_tokens, whole_board
from dataset.text.schema import kind_of_data
from records.checkpoint.format import step_named
from sharing.sources import no_checkpoint
from utils.arguments import Parser, check_at_least, typed_path
from utils.drawing import pyplot
from utils.errors import UserError
from utils.shell import run_command
from utils.terminal import tell
from viewer.curve_pictures import draw_png
from viewer.curves import Panel, Series
from viewer.dataset_page import page_of_dataset
from viewer.live import find_runs
from viewer.outputs import SAVING, save_missing_answers
from viewer.pages import Page, Settings, label_of, spread, write_page
from viewer.run_page import page_of_run, page_of_runs

_MOST_GROUPS = 4  # in the picture of a dataset
EXAMPLES = """
examples:
  # a dataset: its puzzles, their solutions and their augmentations, or its texts by token
  python view.py data/sudoku-extreme-1k-aug-1000 -o sudoku.html

  # a run: its curves, and the model's answer to test puzzles after every reasoning step
  # --png: draw curve.png and puzzle.png into the run's folder too (pip install -r requirements-demo.txt)
  python view.py checkpoints/my-project/my-run --png

  # compare runs: configs, curves, numbers, and which of them solves a puzzle
  python view.py checkpoints/my-project/my-run checkpoints/my-project/other-run

  # answers to other data than the run's own, which evaluate.py has saved
  python view.py checkpoints/my-project/my-run/eval_outputs/step_00001000_other

Press `?` in the page for a list of keys. The answers of a run are those of its newest checkpoint. If
those of a run that you name are not saved, evaluate.py first lets its model answer --max-examples puzzles
of each test set.
"""


def parse_settings(argv: list[str] | None = None) -> Settings:
    """Read the command line."""
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
    """Write the page, draw the pictures that were asked for, and return a summary."""
    settings = at_named_step(parse_settings(argv))
    output, path = settings.output, settings.paths[0]
    # What can't be written or drawn is found out now, and not after a model has answered puzzles.
    if not output.parent.is_dir() or not os.access(output.parent, os.W_OK):
        raise UserError(f"cannot write {output}: {output.parent} is no folder that can be written; choose another one")
    if settings.png:
        pyplot()
    for each in settings.paths:
        if not each.is_dir():
            raise UserError(
                f"there is no folder {each}; give the folder of a run or of a dataset; of weights, give the DIR of "
                f"python evaluate.py checkpoint=... out=DIR '{SAVING}'"
            )
        if len(settings.paths) > 1 and not find_runs([each]):
            raise UserError(f"{each} is no run, and only runs are compared; give it alone")
    is_data = kind_of_data(path) is not None or any((path / split).is_dir() for split in SPLITS)
    runs = [] if is_data else find_runs(settings.paths)
    if settings.png and (len(runs) > 1 or (is_data and kind_of_data(path) == "text")):
        raise UserError("--png draws one run or puzzles; leave it out (watch.py --plot curves.png draws several runs)")
    if settings.step is not None and is_data:
        raise UserError(f"--step is for runs, and {path} is a dataset; leave it out")
    # A folder may hold many runs, whose answers would take long.
    asked = [run for run in runs if len(runs) == 1 or run in settings.paths]
    lines = [line for run in asked for line in save_missing_answers(run, settings)]
    if len(runs) > 1:
        page = page_of_runs(runs, settings)
    elif is_data:
        page = page_of_dataset(path, settings)
    else:
        path = runs[0] if runs else path
        if not any((path / name).exists() for name in ("metrics.jsonl", "eval_outputs", "results.json")):
            raise UserError(f"{no_checkpoint(path)}; datasets and what evaluate.py saved have pages too")
        page = page_of_run(path, settings)
    write_page(page, output)
    if settings.png:
        try:
            # Beside the page: a builder refuses to replace a dataset with foreign files.
            lines += draw_examples(page, output.with_suffix(".png")) if is_data else draw_run(path, page)
        except UserError as error:
            raise UserError(f"wrote {output}, but not all pictures: {error}") from error
    num, megabytes = len(page["examples"]) + len(page.get("texts", [])), output.stat().st_size / 1e6
    return "\n".join([*lines, f"wrote {output} ({megabytes:.1f} MB): {num:,} examples, {page['summary']}"])


def at_named_step(settings: Settings) -> Settings:
    """Return the settings with runs and --step for the names of steps, such as <run>/best.

    If the names are of different steps, the page shows each run's newest checkpoint.
    """
    # Saved outputs have such names too.
    named = [None if (path / "results.json").exists() else step_named(path) for path in settings.paths]
    steps = {None if step is None else int(step.name[5:]) for step in named}
    if steps == {None}:
        return settings
    if settings.step is not None:
        raise UserError(f"--step={settings.step} and a path such as {settings.paths[0]} name a step; give one of them")
    if len(steps) > 1:
        tell("the paths name different steps, and a page compares one: it shows each run's newest checkpoint")
    paths = [path if step is None else step.parent for path, step in zip(settings.paths, named, strict=True)]
    return replace(settings, paths=paths, step=steps.pop() if len(steps) == 1 else None)


# ---- pictures ------------------------------------------------------------------------------------


def draw_run(run: Path, page: Page) -> list[str]:
    """Draw curve.png and puzzle.png into the run's folder, and return lines that report them.

    The puzzle is the one that the page opens with, and the answer after each step that changed it.
    """
    curve, puzzle, lines = run / "curve.png", run / "puzzle.png", []
    curves = [each for each in page["curves"] if each["metric"] in ("lm_loss", "loss", "exact_accuracy")]
    if curves:
        series = [[Series(**one) for one in each["over"]["step"]] for each in curves]
        draw_png([Panel(each["metric"], "step", of) for each, of in zip(curves, series, strict=True)], curve)
        lines.append(f"drew {curve}")
    if "texts" in page:
        return lines
    if not page["examples"]:
        return [*lines, f"{puzzle} needs saved outputs; run this, then view.py again: {page['command']}"]
    example = page["examples"][page["opens"]]
    named = f", {example['name']}" if "name" in example else ""
    draw_answers(
        page.get("boards", {}).get(example["set"], page["board"]),
        example["input"],
        label_of(example),
        example["answers"],
        f"{page['title']}: row {example['row']} of {example['set']}{named}",
        puzzle,
        confidence_T=example.get("confidence"),
    )
    return [*lines, f"drew {puzzle}"]


def draw_examples(page: Page, path: Path) -> list[str]:
    """Draw the first example of a few groups of a dataset, each question beside its solution."""
    shape = page["board"]
    firsts: dict[tuple[str, int], Page] = {}
    for example in page["examples"]:
        firsts.setdefault((example["set"], example["group"]), example)
    groups = list(firsts.values())
    boards: list[Board] = []
    for place in spread(len(groups), _MOST_GROUPS):
        example = groups[place]
        question_S = example["input"]
        boards.append(whole_board(shape, f"{example['set']}, row {example['row']}", question_S, question_S))
        boards.append(whole_board(shape, "solution", label_of(example), question_S))
    draw_boards(shape, boards, page["title"], names_of_tokens(shape), path, in_pairs=True)
    return [f"drew {path}"]


if __name__ == "__main__":
    sys.exit(run_command(view, None))
