"""Write an HTML page: the puzzles of a dataset, or the curves, reasoning and votes of a run.

The page needs no network. With --png, pictures are drawn too.

python view.py checkpoints/<project>/<run> -o view.html
"""

import sys
from pathlib import Path

from dataset.builder import SPLITS
from utils.arguments import Parser, check_at_least, typed_path
from utils.errors import UserError
from utils.shell import run_command
from viewer.dataset_page import page_of_dataset
from viewer.pages import Page, Settings, write_page
from viewer.pictures import draw_curves, draw_examples, draw_puzzle
from viewer.run_page import page_of_run

EXAMPLES = """
examples:
  # a dataset: browse its puzzles, their solutions and their augmentations
  python view.py data/sudoku-extreme-1k-aug-1000 -o sudoku.html

  # a run: first save the model's answer after every reasoning step, then write the page
  python evaluate.py checkpoint=checkpoints/my-project/my-run \\
      "save_outputs=[inputs,labels,predictions_at_step,q_halt_at_step]"
  python view.py checkpoints/my-project/my-run

  # draw curve.png and puzzle.png into the run's folder too (pip install -r requirements-demo.txt)
  python view.py checkpoints/my-project/my-run --png

  # results that evaluate.py saved in another folder (out=...), or for data other than the run's own
  python view.py checkpoints/my-project/my-run/eval_outputs/step_00001000_other

The page is one file, which any current browser opens without a network. Press `?` in it for a list of
keys. The page of a run without saved outputs shows the curves only. At most --max-examples examples
are shown of each set, spread evenly over it.
"""


def parse_settings(argv: list[str] | None = None) -> Settings:
    """Read the command line.

    Raises:
        UserError: an option is unknown or malformed.
    """
    parser = Parser(
        "view.py", "Write one HTML page of a dataset's puzzles, or of a run and what it predicted.", EXAMPLES
    )
    add = parser.add_argument
    add(
        "path",
        type=typed_path,
        metavar="RUN_OR_DATASET",
        help="folder of a run, of what evaluate.py saved, or of a dataset in the published format",
    )
    add("-o", "--output", type=Path, metavar="FILE", default=Path("view.html"), help="default: %(default)s")
    add("--max-examples", type=int, metavar="N", default=200, help="of each set, evenly spread (default: %(default)s)")
    add("--step", type=int, metavar="N", help="outputs saved at this training step (default: the newest)")
    add("--set", metavar="NAME", help="show this set only (default: all)")
    add("--png", action="store_true", help="draw pictures too: a run's into its folder, a dataset's beside the page")
    settings = Settings(**vars(parser.parse_args(argv)))
    check_at_least(settings, max_examples=1, step=0)
    return settings


def view(argv: list[str] | None = None) -> str:
    """Write the page, draw the pictures that were asked for, and return a summary.

    Raises:
        UserError: the folder is neither a run nor a dataset, or a file in it is damaged.
    """
    settings = parse_settings(argv)
    path = settings.path
    if not path.is_dir():
        raise UserError(f"there is no folder {path}; give the folder of a run or of a dataset")
    if any((path / split).is_dir() for split in SPLITS):
        if settings.step is not None:
            raise UserError(f"--step is for runs, and {path} is a dataset; leave it out")
        page = page_of_dataset(settings)
        drawn = pictures_of_dataset(page, settings) if settings.png else []
    elif any((path / name).exists() for name in ("metrics.jsonl", "eval_outputs", "results.json")):
        page = page_of_run(settings)
        drawn = pictures_of_run(page, settings) if settings.png else []
    else:
        raise UserError(
            f"{path} is neither a run (no metrics.jsonl, no eval_outputs), nor what evaluate.py saved (no "
            "results.json), nor a dataset (no train, no test); give the folder of one"
        )
    write_page(page, settings.output)
    megabytes = settings.output.stat().st_size / 1e6
    wrote = f"wrote {settings.output} ({megabytes:.1f} MB): {len(page['examples']):,} examples, {page['summary']}"
    return "\n".join([*drawn, wrote])


def pictures_of_dataset(page: Page, settings: Settings) -> list[str]:
    """Draw examples of a dataset, and return the lines that report the picture.

    The picture lies beside the page: a builder refuses to replace a dataset with foreign files in
        it.
    """
    path = settings.output.with_suffix(".png")
    draw_examples(page, path)
    return [f"drew {path}"]


def pictures_of_run(page: Page, settings: Settings) -> list[str]:
    """Draw curve.png and puzzle.png into the run's folder, and return lines that report them.

    Without saved outputs there is no puzzle to draw. The report names the command that saves them.
    """
    curve, puzzle = settings.path / "curve.png", settings.path / "puzzle.png"
    lines = [f"drew {curve}"] if draw_curves(page, curve) else []
    if page["examples"]:
        draw_puzzle(page, puzzle)
        return [*lines, f"drew {puzzle}"]
    return [*lines, f"{puzzle} needs saved outputs; run this, then view.py again: {page['command']}"]


if __name__ == "__main__":
    sys.exit(run_command(view, None))
