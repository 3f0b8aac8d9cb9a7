"""Say before the first trial how much work a sweep is: its trials, their models, and the time."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from optuna.trial import FrozenTrial
from tqdm import tqdm

from records.checkpoint.format import Progress
from search.check import config_at
from search.launchers import environment_of, runs_at_once
from search.report import num_of
from search.study import FINISHED, dry_points
from search.sweep import Sweep
from training import step_time
from training.config import PretrainConfig
from training.data import AnySizes, num_parameters
from training.kinds import kind_of_arch
from training.splits import open_own
from utils.errors import UserError
from utils.processes import ending_with_parent
from utils.programs import ROOT
from utils.terminal import tell

_DAY_S = 86400
# So many drawn points speak for those that are not known yet, and so many sizes for the others.
_MOST_DRAWN, _MOST_TIMED = 10, 6
_TIMED_WITHIN_S = 45.0
# The keys of a run that decide how long its training takes.
_DECISIVE = {
    *("arch", "global_batch_size", "rows_per_step", "grad_accumulation", "freeze", "freeze_weights"),
    *("epochs", "max_steps", "data_path", "data_paths"),
}


@dataclass
class Size:
    """Trials whose runs are of the same size.

    Attributes:
        arch: as it was typed.
        num_steps: of a run.
        overrides: of one of the runs.
        step_s: seconds of a step; None: not known.
    """

    arch: str
    config: PretrainConfig
    sizes: AnySizes
    num_steps: int
    num_trials: int = 0
    step_s: float | None = None


class Workload:
    """What a sweep has left to do.

    Attributes:
        num_trials: those that are not finished.
        sizes: of their runs. Of a search whose points are not known yet, those of the first points.
    """

    def __init__(self, sweep: Sweep, trials: Sequence[FrozenTrial] = ()) -> None:
        finished = [sweep.space.point_of(trial) for trial in trials if trial.state in FINISHED]
        is_grid = sweep.config.sampler.name == "grid"
        points = (point for _, point in sweep.space.grid()) if is_grid else dry_points(sweep)
        self.sweep, self.num_trials = sweep, max(0, sweep.num_trials - len(finished))
        self.num_runs = self.num_trials * len(sweep.config.seeds)
        self.at_once = min(self.num_runs, runs_at_once(sweep.config.launcher))
        found: dict[str, Size] = {}
        left = [point for point in points if point not in finished][: self.num_trials]
        for point in left if is_grid else left[:_MOST_DRAWN]:
            with suppress(UserError):  # the trial will say what is wrong
                config, overrides = config_at(sweep, point), sweep.overrides(point, sweep.config.seeds[0])
                arch = next((each[5:] for each in reversed(overrides) if each.startswith("arch=")), config.arch.name)
                key = arch + config.model_dump_json(include=_DECISIVE)
                if key not in found:
                    data, kind = open_own(config, "train"), kind_of_arch(config.arch)
                    last_step = kind.sampler(config, data, Progress()).last_step
                    num_steps = min(last_step, config.max_steps or last_step)
                    found[key] = Size(arch, config, kind.sizes.of(data), num_steps)
                found[key].num_trials += 1
        self.sizes = [*found.values()]

    def announce(self) -> None:
        """Tell how much is left to do, and time some steps of the runs."""
        if self.num_trials == 0:
            return
        seeds = self.sweep.config.seeds
        of_seeds = f" of {num_of(len(seeds), 'seed')}" if len(seeds) > 1 else ""
        runs = num_of(self.num_runs, "run")
        tell(f"to do: {num_of(self.num_trials, 'trial')}{of_seeds}, {runs}, {self.at_once} at a time")
        for arch, same in self._by_arch():
            parameters = _range([num_parameters(size.config, size.sizes) for size in same])
            tell(f"  arch={arch}: {parameters} parameters, {_range([size.num_steps for size in same])} steps")
        self.time_steps()
        tell(self.time())

    def time_steps(self) -> None:
        """Note in the sizes how long a step of a run takes here, as far as that can be found out.

        A process of its own times them. It leaves the device and the memory free for the runs.
        """
        launcher = self.sweep.config.launcher
        if launcher.name == "slurm":  # the runs start elsewhere
            return
        timed = self.sizes[:_MOST_TIMED]
        asked = [{"config": size.config.model_dump(mode="json"), "sizes": size.sizes.as_dict()} for size in timed]
        try:
            answers = subprocess.run(
                [sys.executable, "-c", f"from {step_time.__name__} import main; main()", str(launcher.ranks)],
                input=json.dumps(asked).encode(),
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                cwd=ROOT,
                env=environment_of(launcher, place=0),
                preexec_fn=ending_with_parent(signal.SIGKILL),
                timeout=_TIMED_WITHIN_S,
            ).stdout
        except subprocess.TimeoutExpired as late:
            answers = late.stdout or b""
        for size, line in zip(timed, answers.splitlines(), strict=False):
            size.step_s = json.loads(line)

    def time(self) -> str:
        """Return a line with the time of all training steps. It warns of more than a day."""
        config = self.sweep.config
        known = [(size.num_trials, size.num_steps * size.step_s) for size in self.sizes if size.step_s is not None]
        if not known:
            return "time: not known, since no step was timed here"
        of_run = sum(number * seconds for number, seconds in known) / sum(number for number, _ in known)
        seconds = of_run * self.num_runs / self.at_once  # the timed sizes speak for all
        steps = [
            f"{_range(times)} s with arch={arch}"
            for arch, same in self._by_arch()
            if (times := [size.step_s for size in same if size.step_s is not None])
        ]
        warning = "WARNING: this sweep takes more than a day; " if seconds > _DAY_S else ""
        at_most = "at most " if config.pruner.name != "none" or config.steps is not None else ""
        about = f"{at_most}about {tqdm.format_interval(round(seconds))} for the training steps alone"
        stop = f"; it stops after sweep.hours={config.hours:g}" if config.hours is not None else ""
        return f"{warning}time: {about}, by a step of {', '.join(steps)}{stop}"

    def _by_arch(self) -> Iterator[tuple[str, list[Size]]]:
        for arch in dict.fromkeys(size.arch for size in self.sizes):
            yield arch, [size for size in self.sizes if size.arch == arch]


def _range(numbers: Sequence[float]) -> str:
    first, last = (f"{number:.2g}" if number < 10 else f"{number:,.0f}" for number in (min(numbers), max(numbers)))
    return first if first == last else f"{first} to {last}"
