"""Search over the keys of pretrain.py: run many trainings, and find the best.

python sweep.py sweep=lr_arch
"""

import sys
from importlib.util import find_spec

from search.config import USAGE
from utils.command_line import CommandLine, only_help

if find_spec("optuna") is None:
    sys.exit(only_help("sweep", USAGE, "sweep.py needs optuna; pip install -r requirements-sweep.txt"))

from search.check import check_sweep
from search.driver import Driver
from search.export import write_experiment
from search.launchers import build_launcher
from search.plots import write_plots
from search.report import best_of, best_page, finished_page, num_of, require_best_first, status_page
from search.study import dry_points, open_study
from search.sweep import Sweep
from search.workload import announce
from utils.arguments import Parser, check_at_least, typed_path
from utils.run.stop import StopSignal
from utils.shell import run_command

NAMED = "its name in checkpoints/sweeps, or its folder"


def sweep(argv: list[str] | None = None) -> str | tuple[str, int]:
    """Run a sweep, or show one."""
    typed = sys.argv[1:] if argv is None else argv
    if typed and (typed[0] in PAGES or typed[0] in WRITERS):
        return show_sweep(typed[0], typed[1:])
    found, dry_run = read_again(typed[1:]) if typed[:1] == ["again"] else read_new(typed)
    if isinstance(found, str):
        return found
    check_sweep(found)
    if dry_run:
        announce(found)
        return command_lines(found)
    return run_sweep(found)


def read_new(typed: list[str]) -> tuple[Sweep | str, bool]:
    """Return a sweep, or the page that the command line asks for; and whether it is a dry run."""
    command = CommandLine.parse(typed, "sweep", USAGE, flags=["--dry-run"])
    return command.page or Sweep.read(command.overrides), bool(command.flags)


def read_again(argv: list[str]) -> tuple[Sweep, bool]:
    """Return a sweep over the best points of another, and whether it is a dry run.

    The new sweep has the overrides, the metric and the direction of the other one, but neither its
    launcher nor its pruner. What is typed replaces them.

    Raises:
        UserError: No trial has a value yet, or what was typed is wrong.
    """
    parser = Parser("sweep.py again", "Run the best points of a sweep again. Overrides are those of a new sweep.")
    parser.add_argument("sweep", help=NAMED)
    parser.add_argument("--best", type=int, metavar="N", default=5, help="number of points (default: %(default)s)")
    parser.add_argument("overrides", nargs="*", help="such as seed=0,1,2 or max_steps=1000")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder like config/, for the files that are typed")
    parser.add_argument("--dry-run", action="store_true", help="print the commands of the trials, and run none")
    settings = parser.parse_intermixed_args(argv)
    check_at_least(settings, best=1)
    folder = [] if settings.config_dir is None else [f"--config-dir={settings.config_dir}"]
    command = CommandLine.parse([*settings.overrides, *folder], "sweep", USAGE)
    with open_study(Sweep.open(settings.sweep), create=False) as study:
        points = [best.point for best in require_best_first(study)[: settings.best]]
        keys = study.sweep.config.model_dump(include={"overrides", "metric", "direction"})
        again = {"name": f"{study.sweep.name}_again", "points": points, **keys}
        return Sweep.read(command.overrides, again), settings.dry_run


def command_lines(found: Sweep) -> str:
    """Return the command lines of the trials that are known before the first has run."""
    launcher, points = build_launcher(found.config.launcher), dry_points(found)
    lines = [
        launcher.shown(found.arguments(number, point, seed))
        for number, point in enumerate(points)
        for seed in found.config.seeds
    ]
    if num_unknown := found.num_trials - len(points):
        lines.append(f"# {num_of(num_unknown, 'more trial')} will depend on the results of these")
    return "\n".join(lines)


def run_sweep(found: Sweep) -> tuple[str, int]:
    """Run trials until the budget is spent or a signal comes, and return what was found."""
    with StopSignal() as stop, open_study(found, create=True) as study:
        found.write()
        study.begin()
        announce(found, study.trials())
        done = Driver(found, study, build_launcher(found.config.launcher), stop).run()
        has_value = best_of(found, study.trials()) is not None
        return finished_page(study, done=done), 0 if has_value or not done else 1


def show_sweep(page: str, argv: list[str]) -> str:
    """Return a page about a sweep that has begun, or write files and return their names."""
    parser = Parser(f"sweep.py {page}", "Show a sweep that has begun.", path_keys=("sweep",))
    parser.add_argument("sweep", help=NAMED)
    if page in WRITERS:
        parser.add_argument("-o", "--output", type=typed_path, metavar="PATH", help=WRITERS[page][1])
    settings = parser.parse_args(argv)
    with open_study(Sweep.open(settings.sweep), create=False) as study:
        return WRITERS[page][0](study, settings.output) if page in WRITERS else PAGES[page](study)


PAGES = {"status": status_page, "best": best_page}
WRITERS = {
    "plot": (write_plots, "folder of plots.html and the pictures (default: that of the sweep)"),
    "export": (write_experiment, "file to write (default: config/experiment/<name of the sweep>_best.yaml)"),
}


def main() -> int:
    return run_command(sweep, None, interrupted="interrupted; give the same command again")


if __name__ == "__main__":
    sys.exit(main())
