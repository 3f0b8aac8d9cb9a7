"""Say before the first trial how much work a sweep is: its trials, their models, and the time."""

import math
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from optuna.trial import FrozenTrial
from tqdm import tqdm

from dataset.tasks.base import count
from records.checkpoint.format import Progress
from search.check import config_at
from search.launchers import ProcessLauncher, SeedRun, runs_at_once
from search.study import FINISHED, dry_points
from search.sweep import Sweep, merged
from training.data import num_parameters
from training.kinds import kind_of_arch
from training.splits import open_own
from utils.errors import UserError
from utils.overrides import as_override
from utils.terminal import tell

_DAY_S = 86400
# So many drawn points speak for those that are not known yet, and so many sizes for the others.
_MOST_DRAWN, _MOST_TIMED = 10, 6
_TIMED_WITHIN_S, _TIMED_STEPS = 45.0, 4
# The keys of a run that decide how long its training takes.
_DECISIVE = {
    *("arch", "global_batch_size", "rows_per_step", "grad_accumulation", "freeze", "freeze_weights"),
    *("epochs", "max_steps", "data_path", "data_paths"),
}


@dataclass
class Size:
    """Trials whose runs are of the same size."""

    arch: str  # as it was typed
    overrides: list[str]  # of one of the runs
    num_parameters: int
    num_steps: int  # of a run
    num_trials: int = 0
    step_s: float | None = None  # seconds of a step; None: not known


def announce(sweep: Sweep, trials: Sequence[FrozenTrial] = ()) -> None:
    """Tell how much of a sweep is left to do, and time some steps of its runs.

    Of a search whose points are not known yet, the first points speak for the others.
    """
    finished = [sweep.space.point_of(trial.params) for trial in trials if trial.state in FINISHED]
    num_trials, seeds = sweep.num_trials - len(finished), sweep.config.seeds
    if num_trials <= 0:
        return
    is_grid = sweep.config.sampler.name == "grid"
    left = [point for point in dry_points(sweep) if point not in finished][: num_trials if is_grid else _MOST_DRAWN]
    found: dict[str, Size] = {}
    for point in left:
        with suppress(UserError):  # the trial will say what is wrong
            config, overrides = config_at(sweep, point), sweep.overrides(point, seeds[0])
            arch = next((each[5:] for each in reversed(overrides) if each.startswith("arch=")), config.arch.name)
            key = arch + config.model_dump_json(include=_DECISIVE)
            if key not in found:
                data, kind = open_own(config, "train"), kind_of_arch(config.arch)
                last_step = kind.sampler(config, data, Progress()).last_step
                num_steps = min(last_step, config.max_steps or last_step)
                found[key] = Size(arch, overrides, num_parameters(config, kind.sizes.of(data)), num_steps)
            found[key].num_trials += 1
    sizes, num_runs = [*found.values()], num_trials * len(seeds)
    at_once = min(num_runs, runs_at_once(sweep.config.launcher))
    of_seeds = f" of {count(len(seeds), 'seed')}" if len(seeds) > 1 else ""
    tell(f"to do: {count(num_trials, 'trial')}{of_seeds}, {count(num_runs, 'run')}, {at_once} at a time")
    for arch in dict.fromkeys(size.arch for size in sizes):
        same = [size for size in sizes if size.arch == arch]
        parameters, steps = (_range([getattr(size, name) for size in same]) for name in ("num_parameters", "num_steps"))
        tell(f"  arch={arch}: {parameters} parameters, {steps} steps")
    if num_runs > 1 and sweep.config.launcher.name != "slurm":  # whose runs start elsewhere
        time_steps(sweep, sizes[:_MOST_TIMED])
    tell(time_line(sweep, sizes, num_runs / at_once))


def time_steps(sweep: Sweep, sizes: list[Size]) -> None:
    """Note in the sizes how long a step of their runs takes here.

    The command line of a run is started in another folder, and ended after some steps.
    """
    launcher, end = ProcessLauncher(sweep.config.launcher), time.monotonic() + _TIMED_WITHIN_S
    with TemporaryDirectory(ignore_cleanup_errors=True) as made:
        for number, size in enumerate(sizes):
            if time.monotonic() >= end:
                break
            folder = Path(made) / str(number)
            own = [f"checkpoint_path={as_override(str(folder))}", "log_interval=1", "wandb.mode=disabled"]
            run = SeedRun(merged(size.overrides, own), folder, Path(made) / f"{number}.log")
            launcher.start([run])
            assert isinstance(run.job, subprocess.Popen)
            try:
                while run.job.poll() is None and len(run.history.rows) < _TIMED_STEPS and time.monotonic() < end:
                    time.sleep(0.05)
                    run.history.refresh()
            finally:
                run.job.kill()
                run.job.wait()
            times = [row["perf/step_ms"] / 1000 for row in run.history.rows if "perf/step_ms" in row]
            size.step_s = min(times, default=None)


def time_line(sweep: Sweep, sizes: list[Size], num_in_turn: float) -> str:
    """Return a line with the time of so many runs in turn. It warns of more than a day."""
    timed = [(size, size.step_s) for size in sizes if size.step_s is not None]
    if not timed:
        return "time: not known, since no step was timed here"
    of_runs = sum(size.num_trials * size.num_steps * step_s for size, step_s in timed)
    seconds = num_in_turn * of_runs / sum(size.num_trials for size, _ in timed)  # the timed sizes speak for all
    config, hours = sweep.config, sweep.config.hours
    warning = "WARNING: this sweep takes more than a day; " if min(seconds, 3600 * (hours or math.inf)) > _DAY_S else ""
    at_most = "at most " if config.pruner.name != "none" or config.steps is not None else ""
    steps = [
        f"{_range([step_s for size, step_s in timed if size.arch == arch])} s with arch={arch}"
        for arch in dict.fromkeys(size.arch for size, _ in timed)
    ]
    about = f"{at_most}about {tqdm.format_interval(round(seconds))} for the training steps alone"
    stop = f"; it stops after sweep.hours={hours:g}" if hours is not None else ""
    return f"{warning}time: {about}, by a step of {', '.join(steps)}{stop}"


def _range(numbers: Sequence[float]) -> str:
    first, last = (f"{number:.2g}" if number < 10 else f"{number:,.0f}" for number in (min(numbers), max(numbers)))
    return first if first == last else f"{first} to {last}"
