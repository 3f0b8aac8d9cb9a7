"""Say before the first trial how much work a sweep is: its trials, their models, and the time."""

import json
import math
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from optuna.trial import FrozenTrial

from search.check import config_at
from search.launchers import build_launcher, environment_of
from search.report import num_of
from search.study import FINISHED, dry_points
from search.sweep import Sweep
from training import step_time
from training.arch_of_recipe import note_on_arch, num_parameters
from training.config import PretrainConfig
from training.data import AnySizes, open_own, sizes_of
from training.plan import make_sampler
from utils.checkpoint.format import Progress
from utils.errors import UserError
from utils.processes import ending_with_parent
from utils.programs import ROOT
from utils.terminal import tell

_UNITS_S = {"days": 86400, "hours": 3600, "minutes": 60, "seconds": 1}
# So many drawn points speak for those that are not known yet, and so many sizes for the others.
_MOST_DRAWN, _MOST_TIMED = 10, 6
_TIMED_WITHIN_S = 45.0
# The keys of a run that decide how long its training takes.
_DECISIVE = {
    *("arch", "global_batch_size", "rows_per_step", "grad_accumulation", "freeze", "freeze_weights"),
    *("epochs", "max_steps", "data_path", "data_paths"),
}


def announce(sweep: Sweep, trials: Sequence[FrozenTrial] = ()) -> None:
    """Tell how much a sweep has left to do, and time some steps of its runs.

    Args:
        trials: those that have begun.
    """
    work = Workload.of(sweep, trials)
    if work.num_trials:
        for line in work.lines():
            tell(line)
        work.time_steps()
        tell(work.time())


@dataclass
class Size:
    """Trials whose runs are of the same size.

    Attributes:
        arch: as it was typed.
        num_steps: of a run.
        step_s: seconds of a step; None: not known.
        note: what the architecture changes in the recipe.
    """

    arch: str
    config: PretrainConfig
    sizes: AnySizes
    num_parameters: int
    num_steps: int
    note: list[str]
    num_trials: int = 0
    step_s: float | None = None

    @staticmethod
    def of(arch: str, config: PretrainConfig, overrides: list[str]) -> "Size":
        data = open_own(config, "train")
        sizes, last_step = sizes_of(data), make_sampler(config, data, Progress()).last_step
        num_steps = min(last_step, config.max_steps or last_step)
        note = note_on_arch(overrides, config, sizes)
        return Size(arch, config, sizes, num_parameters(config, sizes), num_steps, note)


@dataclass(frozen=True)
class Workload:
    """What a sweep has left to do.

    Attributes:
        num_trials: those that are not finished.
        sizes: of their runs. Of a search whose points are not known yet, those of the first points.
    """

    sweep: Sweep
    num_trials: int
    sizes: list[Size]

    @staticmethod
    def of(sweep: Sweep, trials: Sequence[FrozenTrial] = ()) -> "Workload":
        finished = [sweep.space.point_of(trial) for trial in trials if trial.state in FINISHED]
        num_left = max(0, sweep.num_trials - len(finished))
        if sweep.config.sampler.name == "grid":
            points = [point for _, point in sweep.space.grid() if point not in finished][:num_left]
        else:
            points = dry_points(sweep).known[: min(num_left, _MOST_DRAWN)]
        found: dict[str, Size] = {}
        for point in points:
            with suppress(UserError):  # the trial will say what is wrong
                config = config_at(sweep, point)
                arch = str(point.get("arch", config.arch.name))
                key = arch + config.model_dump_json(include=_DECISIVE)
                if key not in found:
                    found[key] = Size.of(arch, config, sweep.overrides(point, sweep.config.seeds[0]))
                found[key].num_trials += 1
        return Workload(sweep, num_left, [*found.values()])

    @property
    def num_runs(self) -> int:
        return self.num_trials * len(self.sweep.config.seeds)

    @property
    def at_once(self) -> int:
        return min(self.num_runs, build_launcher(self.sweep.config.launcher).at_once)

    def time_steps(self) -> None:
        """Note in the sizes how long a step of a run takes here, if that can be found out."""
        launcher = self.sweep.config.launcher
        timed = self.sizes[:: max(1, math.ceil(len(self.sizes) / _MOST_TIMED))]
        if launcher.name == "slurm":  # the runs start elsewhere
            return
        asked = [{"config": size.config.model_dump(mode="json"), "sizes": size.sizes.as_dict()} for size in timed]
        with suppress(OSError, subprocess.SubprocessError):
            # A process of its own leaves the device and the memory free for the runs.
            ended = subprocess.run(
                [sys.executable, "-c", f"from {step_time.__name__} import main; main()", str(launcher.ranks)],
                input=json.dumps(asked).encode(),
                capture_output=True,
                cwd=ROOT,
                env=environment_of(launcher, place=0),
                preexec_fn=ending_with_parent(signal.SIGKILL),
                timeout=_TIMED_WITHIN_S,
                check=True,
            )
            for size, step_s in zip(timed, json.loads(ended.stdout), strict=True):
                size.step_s = step_s

    def seconds(self) -> float | None:
        """Return how long all training steps take; None: not known.

        The sizes that were timed speak for the others. With sweep.hours, it is not more than that.
        """
        timed = [(size.num_trials, size.num_steps * size.step_s) for size in self.sizes if size.step_s is not None]
        if not timed:
            return None
        of_run = sum(number * seconds for number, seconds in timed) / sum(number for number, _ in timed)
        return min(of_run * self.num_runs / self.at_once, 3600 * (self.sweep.config.hours or math.inf))

    def lines(self) -> Iterator[str]:
        """Yield what is known without timing anything."""
        seeds = f" of {num_of(len(self.sweep.config.seeds), 'seed')}" if len(self.sweep.config.seeds) > 1 else ""
        runs = num_of(self.num_runs, "run")
        yield f"to do: {num_of(self.num_trials, 'trial')}{seeds}, {runs}, {self.at_once} at a time"
        for arch in dict.fromkeys(size.arch for size in self.sizes):
            same = [size for size in self.sizes if size.arch == arch]
            parameters = _range([f"{number:,}" for number in sorted(size.num_parameters for size in same)])
            steps = _range([f"{number:,}" for number in sorted(size.num_steps for size in same)])
            yield f"  arch={arch}: {parameters} parameters, {steps} steps"
            yield from (f"  {line}" for line in same[0].note)

    def time(self) -> str:
        """Return a line with the time of all training steps. It warns of more than a day."""
        config, seconds = self.sweep.config, self.seconds()
        if seconds is None:
            return "time: unknown, since no step could be timed here"
        steps = [f"{_rounded(size.step_s)} s with arch={size.arch}" for size in self.sizes if size.step_s is not None]
        at_most = "at most " if config.pruner.name != "none" or config.steps is not None else ""
        warning = "WARNING: this sweep takes more than a day; " if seconds > _UNITS_S["days"] else ""
        about = f"{at_most}about {_duration(seconds)} without evaluations"
        return f"{warning}time: {about}, by a step of {', '.join(steps)}"


def _range(ascending: list[str]) -> str:
    return ascending[0] if ascending[0] == ascending[-1] else f"{ascending[0]} to {ascending[-1]}"


def _duration(seconds: float) -> str:
    unit = next((unit for unit, length in _UNITS_S.items() if seconds >= 2 * length), "seconds")
    return f"{_rounded(seconds / _UNITS_S[unit])} {unit}"


def _rounded(number: float) -> str:
    return f"{number:.2g}" if number < 10 else f"{number:,.0f}"
