"""The study of a sweep: its trials in Optuna's database, which several processes may share."""

import fcntl
import os
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from search.config import PrunerConfig, SamplerConfig
from search.space import Point
from search.sweep import Sweep, without_password
from utils.errors import UserError
from utils.files import file_errors
from utils.text import one_line

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
# A sampler that draws known points this often has no new ones to offer.
_MOST_REPEATS = 100
DEFAULT_TRIALS = 50
# SQLite lets one process write at a time; the others wait this long.
_BUSY_TIMEOUT_S = 60

# What a trial's attributes hold beside its parameters and its value.
DRIVER = "driver"  # the process that works on the trial
FAILURES = "failures"  # how often a run of the trial has failed
ERROR = "error"  # why the trial failed in the end
SEEDS = "seeds"  # {seed: value} of the runs that have ended
STEPS = "steps"  # {seed: last logged step}
SECONDS = "seconds"  # from the first start of the trial to its end
PRUNED_AT = "pruned_at"  # the training step after which the trial is not worth going on
REPEATS = "repeats"  # the number of the trial with the same point


@contextmanager
def database_errors(url: str) -> Iterator[None]:
    """Turn an error of the database inside into a UserError."""
    try:
        yield
    except (SQLAlchemyError, StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, SQLAlchemyError) else error
        reason = one_line(cause).split(" (Background on this error")[0]
        raise UserError(
            f"the database {without_password(url)} can't be used ({reason[:300]}); check sweep.storage and that the "
            "database runs. What has been trained stays, and the same command goes on"
        ) from error


@dataclass(frozen=True)
class Claim:
    """A trial that this process has to run."""

    number: int
    trial: Trial
    point: Point
    attributes: dict[str, Any]  # what an earlier process has noted
    reported: int  # the last training step whose value the study has; -1: none


class Study:
    """The trials of a sweep.

    Several processes may work on the same study. Each holds a lock of its own while it lives, and
    writes its name into its trials. A trial whose process is gone is taken over by another.
    """

    def __init__(self, sweep: Sweep, optuna_study: optuna.Study, driver: str) -> None:
        self.sweep, self._driver = sweep, driver
        self.optuna = optuna_study
        self._drivers = sweep.path / "drivers"

    # ---- reading ----

    def trials(self) -> list[FrozenTrial]:
        """Return the trials that have begun, without those that repeat another trial's point."""
        return [
            trial
            for trial in self.optuna.get_trials(deepcopy=False)
            if trial.state != TrialState.WAITING and REPEATS not in trial.user_attrs
        ]

    @property
    def num_trials(self) -> int:
        """The number of trials after which the sweep is done."""
        config = self.sweep.config
        points = self.optuna.user_attrs.get("grid_points")
        limits = [limit for limit in (config.trials, points) if limit is not None]
        return min(limits, default=DEFAULT_TRIALS)

    # ---- the next trial ----

    def claim(self) -> Claim | None:
        """Return a trial whose process is gone, else a new one; None if the budget is spent."""
        with _exclusive(self.sweep.path / ".claims"):
            for begun in self.trials():
                if begun.state == TrialState.RUNNING and not self._is_alive(begun.user_attrs.get(DRIVER)):
                    return self._taken(Trial(self.optuna, begun._trial_id), begun)
            repeats = 0
            while repeats < _MOST_REPEATS and not self._is_spent():
                config = self.sweep.config.sampler
                all_trials = self.optuna.get_trials(deepcopy=False)
                self.optuna.sampler = build_sampler(config, draw=len(all_trials))
                if config.name == "grid" and not any(trial.state == TrialState.WAITING for trial in all_trials):
                    return None
                trial = self.optuna.ask()
                claim = self._taken(trial, None)
                if (same := self._same_as(claim, all_trials)) is None:
                    return claim
                trial.set_user_attr(REPEATS, same.number)
                complete = same.state == TrialState.COMPLETE
                self.optuna.tell(trial, same.value if complete else None, None if complete else TrialState.FAIL)
                repeats += 1
        return None

    def _taken(self, trial: Trial, before: FrozenTrial | None) -> Claim:
        trial.set_user_attr(DRIVER, self._driver)
        point = self.sweep.space.suggest(trial)
        if before is None:
            return Claim(trial.number, trial, point, {}, -1)
        reported = max(before.intermediate_values, default=-1)
        return Claim(trial.number, trial, point, dict(before.user_attrs), reported)

    def _same_as(self, claim: Claim, trials: list[FrozenTrial]) -> FrozenTrial | None:
        names = claim.trial.params
        others = (t for t in trials if t.number != claim.number and REPEATS not in t.user_attrs)
        return next((t for t in others if t.state != TrialState.WAITING and t.params == names), None)

    def _is_spent(self) -> bool:
        trials, limit = self.trials(), self.sweep.config.steps
        steps = sum(sum(trial.user_attrs.get(STEPS, {}).values()) for trial in trials)
        return len(trials) >= self.num_trials or (limit is not None and steps >= limit)

    def _is_alive(self, driver: str | None) -> bool:
        """Return whether a process works on the study. Its lock is free once it has ended."""
        file = self._drivers / str(driver)
        if driver is None or not file.is_file():
            return False
        with open(file) as opened:
            try:
                fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def enqueue_grid(self) -> None:
        """Put all points of a grid into the study, once."""
        with _exclusive(self.sweep.path / ".claims"):
            if self.sweep.config.sampler.name != "grid" or "grid_points" in self.optuna.user_attrs:
                return
            begun = bool(self.optuna.get_trials(deepcopy=False))  # a process was killed here
            number = 0
            for named, _ in self.sweep.space.grid():
                self.optuna.enqueue_trial(named, skip_if_exists=begun)
                number += 1
            self.optuna.set_user_attr("grid_points", number)


@contextmanager
def open_study(sweep: Sweep, *, create: bool) -> Iterator[Study]:
    """Open the study of a sweep, and hold the lock of this process inside.

    Raises:
        UserError: The database can't be used, or the folder or the database holds another sweep.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    url = sweep.config.storage or f"sqlite:///{(sweep.path / 'study.db').absolute()}"
    with file_errors():
        if create:
            (sweep.path / "drivers").mkdir(parents=True, exist_ok=True)
        elif sweep.config.storage is None and not (sweep.path / "study.db").is_file():
            raise UserError(f"{sweep.path} has no study.db; the sweep has not begun, or the file is gone")
    options: dict[str, Any] = {"connect_args": {"timeout": _BUSY_TIMEOUT_S}} if url.startswith("sqlite") else {}
    with database_errors(url):
        with _exclusive(sweep.path / ".claims"):
            try:
                storage = RDBStorage(url, engine_kwargs=options)
            except ImportError as error:  # the driver of this kind of database
                raise UserError(
                    f"sweep.storage={without_password(url)} needs a Python package for this kind of database; "
                    "pip install psycopg2-binary for PostgreSQL, pymysql for MySQL (mysql+pymysql://...)"
                ) from error
            if create:
                study = optuna.create_study(
                    study_name=sweep.name, storage=storage, direction=sweep.config.direction, load_if_exists=True
                )
                _require_same_sweep(sweep, study)
            else:
                try:
                    study = optuna.load_study(study_name=sweep.name, storage=storage)
                except KeyError as error:
                    raise UserError(
                        f"{without_password(url)} holds no study {sweep.name!r}; check sweep.name"
                    ) from error
            study.pruner = build_pruner(sweep.config.pruner)
        with _driver_lock(sweep.path / "drivers", held=create) as driver:
            yield Study(sweep, study, driver)


def _require_same_sweep(sweep: Sweep, study: optuna.Study) -> None:
    stored = study.user_attrs.get("sweep")
    if stored is None:
        if study.get_trials(deepcopy=False):
            raise UserError(f"the database holds a study {sweep.name!r} of another program; give another sweep.name")
        study.set_user_attr("sweep", sweep.identity)
    elif different := [key for key, value in sweep.identity.items() if stored.get(key) != value]:
        raise UserError(
            f"{sweep.path} holds another sweep, with other {' and '.join(different)}; give another sweep.name, "
            "or remove the folder if nobody needs it"
        )


def build_sampler(config: SamplerConfig, draw: int) -> BaseSampler:
    """Return the sampler for a draw.

    Each draw has a seed of its own. A sampler that a restarted process seeds again would repeat its
    first draws.
    """
    seed = (config.seed * 1_000_003 + draw) % 2**32
    if config.name != "tpe":
        return RandomSampler(seed)
    with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
        # group: conditional parameters are modelled together where they occur together.
        return TPESampler(seed=seed, n_startup_trials=config.startup_trials or 10, multivariate=True, group=True)


def build_pruner(config: PrunerConfig) -> BasePruner:
    if config.name == "median":
        startup = 5 if config.startup_trials is None else config.startup_trials
        return MedianPruner(n_startup_trials=startup, n_warmup_steps=config.warmup_steps or 0)
    if config.name == "successive_halving":
        return SuccessiveHalvingPruner(config.warmup_steps or "auto", config.reduction_factor or 4)
    return NopPruner()


@contextmanager
def _exclusive(file: Path) -> Iterator[None]:
    """Let one process at a time inside. The system releases the lock of a killed process."""
    with file_errors():
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def _driver_lock(folder: Path, *, held: bool) -> Iterator[str]:
    """Yield the name of this process, and hold its lock inside."""
    name = f"{os.getpid()}_{uuid.uuid4().hex[:8]}"
    if not held:
        yield name
        return
    with _exclusive(folder / name):
        try:
            yield name
        finally:
            (folder / name).unlink(missing_ok=True)


@dataclass(frozen=True)
class DryPoints:
    """The points of a sweep that are known before the first trial has run."""

    known: list[Point]
    num_unknown: int


def dry_points(sweep: Sweep) -> DryPoints:
    """Return the points that a new study would draw first, without a database."""
    config = sweep.config
    if config.sampler.name == "grid":
        return DryPoints([point for _, point in sweep.space.grid()][: config.trials], 0)
    num_trials = config.trials or DEFAULT_TRIALS
    startup = num_trials if config.sampler.name == "random" else config.sampler.startup_trials or 10
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study, points = optuna.create_study(), []
    for draw in range(min(num_trials, startup)):
        study.sampler = build_sampler(config.sampler, draw)
        points.append(sweep.space.suggest(study.ask()))
    return DryPoints(points, num_trials - len(points))
