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

from search.check import config_at
from search.launchers import build_launcher, environment_of
from search.report import num_of
from search.study import FINISHED, dry_points
from search.sweep import Sweep
from training import step_time
from training.config import PretrainConfig
from training.data import AnySizes
from training.kinds import kind_of_arch
from training.meta_model import num_parameters
from training.splits import open_own
from utils.checkpoint.format import Progress
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
    """

    arch: str
    config: PretrainConfig
    sizes: AnySizes
    num_steps: int
    num_trials: int = 0
    step_s: float | None = None

    @staticmethod
    def of(arch: str, config: PretrainConfig) -> "Size":
        data, kind = open_own(config, "train"), kind_of_arch(config.arch)
        sizes, last_step = kind.sizes.of(data), kind.sampler(config, data, Progress()).last_step
        return Size(arch, config, sizes, min(last_step, config.max_steps or last_step))

    @property
    def num_parameters(self) -> int:
        return num_parameters(self.config, self.sizes)


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
        is_grid = sweep.config.sampler.name == "grid"
        points = (point for _, point in sweep.space.grid()) if is_grid else dry_points(sweep)
        left = [point for point in points if point not in finished][:num_left]
        found: dict[str, Size] = {}
        for point in left if is_grid else left[:_MOST_DRAWN]:
            with suppress(UserError):  # the trial will say what is wrong
                config, overrides = config_at(sweep, point), sweep.overrides(point, sweep.config.seeds[0])
                arch = next((each[5:] for each in reversed(overrides) if each.startswith("arch=")), config.arch.name)
                key = arch + config.model_dump_json(include=_DECISIVE)
                if key not in found:
                    found[key] = Size.of(arch, config)
                found[key].num_trials += 1
        return Workload(sweep, num_left, [*found.values()])

    @property
    def num_runs(self) -> int:
        return self.num_trials * len(self.sweep.config.seeds)

    @property
    def at_once(self) -> int:
        return min(self.num_runs, build_launcher(self.sweep.config.launcher).at_once)

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

    def seconds(self) -> float | None:
        """Return how long all training steps take; None: not known. Timed sizes speak for all."""
        known = [(size.num_trials, size.num_steps * size.step_s) for size in self.sizes if size.step_s is not None]
        if not known:
            return None
        of_run = sum(number * seconds for number, seconds in known) / sum(number for number, _ in known)
        return of_run * self.num_runs / self.at_once

    def lines(self) -> Iterator[str]:
        """Yield what is known without timing anything."""
        seeds = f" of {num_of(len(self.sweep.config.seeds), 'seed')}" if len(self.sweep.config.seeds) > 1 else ""
        runs = num_of(self.num_runs, "run")
        yield f"to do: {num_of(self.num_trials, 'trial')}{seeds}, {runs}, {self.at_once} at a time"
        for arch, same in self._by_arch().items():
            parameters = _range(sorted(size.num_parameters for size in same))
            yield f"  arch={arch}: {parameters} parameters, {_range(sorted(size.num_steps for size in same))} steps"

    def time(self) -> str:
        """Return a line with the time of all training steps. It warns of more than a day."""
        config, seconds = self.sweep.config, self.seconds()
        if seconds is None:
            return "time: not known, since no step was timed here"
        steps = [
            f"{_range(known)} s with arch={arch}"
            for arch, same in self._by_arch().items()
            if (known := sorted(size.step_s for size in same if size.step_s is not None))
        ]
        at_most = "at most " if config.pruner.name != "none" or config.steps is not None else ""
        warning = "WARNING: this sweep takes more than a day; " if seconds > _DAY_S else ""
        about = f"{at_most}about {tqdm.format_interval(round(seconds))} for the training steps alone"
        stop = f"; it stops after sweep.hours={config.hours:g}" if config.hours is not None else ""
        return f"{warning}time: {about}, by a step of {', '.join(steps)}{stop}"

    def _by_arch(self) -> dict[str, list[Size]]:
        return {arch: [size for size in self.sizes if size.arch == arch] for arch in [size.arch for size in self.sizes]}


def _range(ascending: Sequence[float]) -> str:
    first, last = _rounded(ascending[0]), _rounded(ascending[-1])
    return first if first == last else f"{first} to {last}"


def _rounded(number: float) -> str:
    return f"{number:.2g}" if number < 10 else f"{number:,.0f}"
