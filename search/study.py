"""The study of a sweep: its trials in Optuna's database, which several processes may share."""

import fcntl
import os
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from search.config import PrunerConfig, SamplerConfig, without_password
from search.space import Point
from search.sweep import Sweep, differing
from utils.errors import UserError
from utils.files import file_errors, remove_replaced, write_atomically
from utils.run.stop import StopSignal
from utils.text import one_line

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
# A sampler that draws known points this often gets one of the others instead.
_MOST_REPEATS = 10
# SQLite lets one process write at a time; the others wait this long.
_BUSY_TIMEOUT_S = 60
_LOCKED_AT_MOST_S = 120.0

# Files in the folder of a sweep: the lock for claims, and a folder with a lock for each process.
_CLAIMS, _DRIVERS = ".claims", "drivers"
# Attributes of the study: whether all points of a grid are in it, and which trials were run again.
_GRID, _RETRIED = "grid", "retried"

# What a trial's attributes hold beside its parameters and its value.
DRIVER = "driver"  # the process that works on the trial
FAILURES = "failures"  # {seed: how often its run has failed}
ERROR = "error"  # why the trial failed in the end
SEEDS = "seeds"  # {seed: value} of the runs that have ended
STEPS = "steps"  # {seed: last logged step}
SECONDS = "seconds"  # {seed: seconds of training, over all its starts}
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
        self._drivers = sweep.path / _DRIVERS

    # ---- reading ----

    def trials(self) -> list[FrozenTrial]:
        """Return the trials that have begun.

        Those that repeat another trial's point, or that were run again, are left out.
        """
        retried = self.optuna.user_attrs.get(_RETRIED, [])
        return [
            trial
            for trial in self.optuna.get_trials(deepcopy=False)
            if trial.state != TrialState.WAITING and REPEATS not in trial.user_attrs and trial.number not in retried
        ]

    # ---- the next trial ----

    def claim(self, stop: StopSignal | None = None) -> Claim | None:
        """Return a trial whose process is gone, else a new one.

        Returns:
            None if the budget is spent, or if the stop was requested meanwhile.
        """
        with _exclusive(self.sweep.path / _CLAIMS, stop) as is_mine:
            if not is_mine:
                return None
            for begun in self.trials():
                if begun.state == TrialState.RUNNING and not self._is_alive(begun.user_attrs.get(DRIVER)):
                    claim = self._taken(Trial(self.optuna, begun._trial_id), begun)
                    if not self._is_repeat(claim):
                        return claim
            repeats = 0
            while not self._is_spent():
                trials = self.optuna.get_trials(deepcopy=False)
                if repeats >= _MOST_REPEATS and self.sweep.space.is_finite:
                    self._enqueue_a_new_point(trials)
                self.optuna.sampler = build_sampler(self.sweep.config.sampler, draw=len(trials))
                claim = self._taken(self.optuna.ask(), None)
                if not self._is_repeat(claim):
                    return claim
                repeats += 1
        return None

    def _is_repeat(self, claim: Claim) -> bool:
        """Return whether another trial has the same point. Then this one is put aside."""
        same = next((t for t in self.trials() if t.number != claim.number and t.params == claim.trial.params), None)
        if same is None:
            return False
        claim.trial.set_user_attr(REPEATS, same.number)
        self.optuna.tell(claim.trial, state=TrialState.FAIL)
        return True

    def _enqueue_a_new_point(self, trials: list[FrozenTrial]) -> None:
        known = [trial.params for trial in trials]
        self.optuna.enqueue_trial(next(named for named, _ in self.sweep.space.grid() if named not in known))

    def _taken(self, trial: Trial, before: FrozenTrial | None) -> Claim:
        trial.set_user_attr(DRIVER, self._driver)
        point = self.sweep.space.suggest(trial)
        if before is None:
            return Claim(trial.number, trial, point, {}, -1)
        reported = max(before.intermediate_values, default=-1)
        return Claim(trial.number, trial, point, dict(before.user_attrs), reported)

    def _is_spent(self) -> bool:
        trials, limit = self.trials(), self.sweep.config.steps
        steps = sum(sum(trial.user_attrs.get(STEPS, {}).values()) for trial in trials)
        return len(trials) >= self.sweep.num_trials or (limit is not None and steps >= limit)

    def _is_alive(self, driver: str | None) -> bool:
        """Return whether a process works on the study. Its lock is free once it has ended."""
        file = self._drivers / str(driver)
        try:
            with open(file, encoding="utf-8") as opened:
                fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        remove_replaced(file)  # nobody holds it any more
        return False

    def begin(self) -> None:
        """Put the points of a grid into the study, and failed trials that are to run again."""
        with _exclusive(self.sweep.path / _CLAIMS):
            if self.sweep.config.sampler.name == "grid" and _GRID not in self.optuna.user_attrs:
                begun = bool(self.optuna.get_trials(deepcopy=False))  # a process was killed here
                for named, _ in self.sweep.space.grid():
                    self.optuna.enqueue_trial(named, skip_if_exists=begun)
                self.optuna.set_user_attr(_GRID, True)
            if self.sweep.config.retry_failed:
                failed = [trial for trial in self.trials() if trial.state == TrialState.FAIL]
                for trial in failed:
                    self.optuna.enqueue_trial(trial.params)
                numbers = [trial.number for trial in failed]
                self.optuna.set_user_attr(_RETRIED, [*self.optuna.user_attrs.get(_RETRIED, []), *numbers])


@contextmanager
def open_study(sweep: Sweep, *, create: bool) -> Iterator[Study]:
    """Open the study of a sweep, and hold the lock of this process inside.

    Args:
        create: create the study if there is none, to work on it. Otherwise it is only read.

    Raises:
        UserError: The database can't be used, or the folder or the database holds another sweep.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    url = sweep.config.storage or f"sqlite:///{(sweep.path / 'study.db').absolute()}"
    with database_errors(url):
        if not create:
            file = make_url(url).database if url.startswith("sqlite") else None
            if file is not None and not Path(file).is_file():
                raise UserError(f"{file} is not there; the sweep has not begun, or the file is gone")
            try:
                study = optuna.load_study(study_name=sweep.name, storage=_storage(url))
            except KeyError as error:
                raise UserError(f"{without_password(url)} holds no study {sweep.name!r}") from error
            yield Study(sweep, study, "")
            return
        with file_errors():
            (sweep.path / _DRIVERS).mkdir(parents=True, exist_ok=True)
        with _exclusive(sweep.path / _CLAIMS):  # two processes may not create the tables together
            study = optuna.create_study(
                study_name=sweep.name, storage=_storage(url), direction=sweep.config.direction, load_if_exists=True
            )
            _require_same_sweep(sweep, study)
            _require_own_folder(sweep, study, url)
        study.pruner = build_pruner(sweep.config.pruner)
        name = f"{os.getpid()}_{uuid.uuid4().hex[:8]}"
        with _exclusive(sweep.path / _DRIVERS / name):
            try:
                yield Study(sweep, study, name)
            finally:
                remove_replaced(sweep.path / _DRIVERS / name)


def _storage(url: str) -> RDBStorage:
    options: dict[str, Any] = {"connect_args": {"timeout": _BUSY_TIMEOUT_S}} if url.startswith("sqlite") else {}
    try:
        return RDBStorage(url, engine_kwargs=options)
    except ImportError as error:  # the driver of this kind of database
        raise UserError(
            f"sweep.storage={without_password(url)} needs the Python package of this kind of database; "
            "pip install 'psycopg[binary]' for PostgreSQL, pymysql for MySQL (mysql+pymysql://...)"
        ) from error


def _require_same_sweep(sweep: Sweep, study: optuna.Study) -> None:
    stored = study.user_attrs.get("sweep")
    if stored is None:
        if study.get_trials(deepcopy=False):
            raise UserError(f"the database holds a study {sweep.name!r} of another program; give another sweep.name")
        study.set_user_attr("sweep", sweep.identity)
    elif different := differing(sweep.identity, stored):
        raise UserError(
            f"{sweep.path} holds another sweep, with other {' and '.join(different)}; give another sweep.name, "
            "or remove the folder if nobody needs it"
        )


def _require_own_folder(sweep: Sweep, study: optuna.Study, url: str) -> None:
    """Check that the study and the folder belong together. Both have the same random mark.

    A study whose runs lie elsewhere would take this folder's runs for its own, and processes in two
    folders would not see each other's locks.
    """
    mark, file = study.user_attrs.get("folder"), sweep.path / ".study"
    with file_errors():
        if mark is None and not file.exists():
            mark = uuid.uuid4().hex
            study.set_user_attr("folder", mark)
        has_runs = any(sweep.path.glob("trial_*")) or study.get_trials(deepcopy=False)
        if mark is not None and not file.exists() and not has_runs:
            write_atomically(file, mark + "\n")
        if mark is None or not file.exists() or file.read_text(encoding="utf-8").strip() != mark:
            raise UserError(
                f"{sweep.path} and the study {sweep.name!r} in {without_password(url)} do not belong together; give "
                "another sweep.name, or the sweep.path and sweep.storage with which the sweep began"
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
def _exclusive(file: Path, stop: StopSignal | None = None) -> Iterator[bool]:
    """Let one process at a time inside. The system releases the lock of a killed process.

    Yields:
        False if the stop was requested before the lock was free.

    Raises:
        UserError: The file system has no locks, or another process holds the lock for minutes.
    """
    with file_errors():
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    end = time.monotonic() + _LOCKED_AT_MOST_S
    try:
        while stop is None or not stop.requested():
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > end:
                    raise UserError(f"{file} is locked by another process, which seems to hang; end it") from None
                time.sleep(0.02)
            except OSError as error:
                raise UserError(
                    f"{file} can't be locked ({error.strerror}); put sweep.path on a file system with locks"
                ) from error
            else:
                yield True
                return
        yield False
    finally:
        os.close(descriptor)


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
    num_trials = sweep.num_trials
    num_known = num_trials if config.sampler.name == "random" else min(num_trials, config.sampler.startup_trials or 10)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study, points, repeats = optuna.create_study(), list[Point](), 0
    for draw in count():  # as `Study.claim`
        if len(points) >= num_known:
            break
        if repeats >= _MOST_REPEATS and sweep.space.is_finite:
            study.enqueue_trial(next(named for named, point in sweep.space.grid() if point not in points))
        study.sampler = build_sampler(config.sampler, draw)
        point = sweep.space.suggest(study.ask())
        repeats = repeats + 1 if point in points else 0
        if not repeats:
            points.append(point)
    return DryPoints(points, num_trials - len(points))
