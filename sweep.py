"""Search over the keys of pretrain.py: run many trainings, and find the best.

python sweep.py sweep=lr_arch
"""

import sys
from importlib.util import find_spec

from search.config import USAGE
from utils.command_line import CommandLine, only_help

if find_spec("optuna") is None:
    sys.exit(only_help("sweep", USAGE, "sweep.py needs optuna; pip install -r requirements-sweep.txt"))

from dataset.tasks.base import count
from search import report
from search.check import check_sweep
from search.driver import Driver
from search.launchers import command_line
from search.plots import write_plots
from search.study import dry_points, open_study
from search.sweep import Sweep
from search.workload import announce
from utils.arguments import Parser, check_at_least, typed_path
from utils.shell import run_command
from utils.stop import StopSignal

NAMED = "its name in checkpoints/sweeps, or its folder"


def sweep(argv: list[str] | None = None) -> str | tuple[str, int]:
    """Run a sweep, or show one."""
    typed = sys.argv[1:] if argv is None else argv
    name = typed[0] if typed else ""
    if name in PAGES or name in WRITERS:
        return show_sweep(name, typed[1:])
    if name == "again":
        found, dry_run = read_again(typed[1:])
    else:
        command = CommandLine.parse(typed, "sweep", USAGE, flags=["--dry-run"])
        if command.page:
            return command.page
        found, dry_run = Sweep.read(command.overrides), bool(command.flags)
    check_sweep(found)
    if dry_run:
        announce(found)
        points, config = dry_points(found), found.config
        lines = [
            command_line(config.launcher, found.arguments(number, point, seed))
            for number, point in enumerate(points)
            for seed in config.seeds
        ]
        if num_unknown := found.num_trials - len(points):
            lines.append(f"# {count(num_unknown, 'more trial')} will depend on the results of these")
        return "\n".join(lines)
    with StopSignal() as stop, open_study(found, create=True) as study:
        found.write()
        announce(found, study.trials())
        done = Driver(study, stop).run()
        if report.best_first(found, study.trials()):
            return report.best_page(study)
        return f"no trial of {found.path} has a value; python sweep.py status {found.path}", int(done)


def read_again(argv: list[str]) -> tuple[Sweep, bool]:
    """Return a sweep over the best points of another, and whether it is a dry run.

    The new sweep has the overrides, the metric and the direction of the other one.
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
        points = [study.sweep.space.point_of(best.params) for best in report.require_best_first(study)[: settings.best]]
        keys = study.sweep.config.model_dump(include={"overrides", "metric", "direction"})
        again = {"name": f"{study.sweep.name}_again", "points": points, **keys}
        return Sweep.read(command.overrides, again=again), settings.dry_run


def show_sweep(page: str, argv: list[str]) -> str:
    """Return a page about a sweep that has begun, or write files and return their names."""
    parser = Parser(f"sweep.py {page}", "Show a sweep that has begun.", path_keys=("sweep",))
    parser.add_argument("sweep", help=NAMED)
    if page in WRITERS:
        parser.add_argument("-o", "--output", type=typed_path, metavar="PATH", help=WRITERS[page][1])
    settings = parser.parse_args(argv)
    with open_study(Sweep.open(settings.sweep), create=False) as study:
        return WRITERS[page][0](study, settings.output) if page in WRITERS else PAGES[page](study)


PAGES = {"status": report.status_page, "best": report.best_page}
WRITERS = {
    "plot": (write_plots, "folder of plots.html and the pictures (default: that of the sweep)"),
    "export": (report.write_experiment, "file to write (default: config/experiment/<name of the sweep>_best.yaml)"),
}


def main() -> int:
    return run_command(sweep, None, interrupted="interrupted; give the same command again")


if __name__ == "__main__":
    sys.exit(main())
