"""The study of a sweep: its trials in Optuna's database, which several processes may share."""

import fcntl
import uuid
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.pruners import BasePruner, MedianPruner, NopPruner, SuccessiveHalvingPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, Trial, TrialState
from sqlalchemy import make_url
from sqlalchemy.exc import SQLAlchemyError

from search.config import PrunerConfig, without_password
from search.launchers import SeedRun
from search.space import Point
from search.sweep import Sweep, differing
from utils.errors import UserError
from utils.files import file_errors, write_atomically
from utils.text import one_line

FINISHED = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
# A process says so often that its trials are in good hands. After so much silence, another process
# takes a trial over.
HEARTBEAT_S, SILENT_S = 15, 120
# A sampler that draws known points this often gets one of the others instead.
_MOST_REPEATS = 10
# SQLite lets one process write at a time; the others wait this long.
_BUSY_TIMEOUT_S = 60
_STARTUP_TRIALS = 10  # of tpe, which draws them at random

_RETRIED = "retried"  # an attribute of the study: the trials that were run again

# What a trial's attributes hold beside its parameters and its value.
HELD = "held"  # whether a process has taken the trial, and has not given it back
FAILURES = "failures"  # {seed: how often its run has failed}
ERROR = "error"  # why the trial failed in the end
SEEDS = "seeds"  # {seed: value} of the runs that have ended
STEPS = "steps"  # {seed: last logged step}
SECONDS = "seconds"  # {seed: seconds of training, over all its starts}
PRUNED_AT = "pruned_at"  # the training step after which the trial is not worth going on
REPEATS = "repeats"  # the number of the trial with the same point


@dataclass(eq=False)
class RunningTrial:
    """A trial that this process runs."""

    optuna: Trial
    point: Point
    reported: int = -1  # the last training step whose value the study has
    runs: list[SeedRun] = field(default_factory=list)
    pruned_at: int | None = None
    metric: str = ""  # with its set
    error: str | None = None  # why the trial ends without a value

    @property
    def is_ending(self) -> bool:
        return self.error is not None or self.pruned_at is not None

    @property
    def going(self) -> list[SeedRun]:
        return [run for run in self.runs if run.job is not None]

    def note(self, attribute: str, run: SeedRun, value: object) -> None:
        """Write a value of a run into the study."""
        self.optuna.set_user_attr(attribute, {**self.optuna.user_attrs.get(attribute, {}), str(run.seed): value})


class Study:
    """The trials of a sweep, on which several processes may work.

    Each records Optuna's heartbeat for its trials. A trial whose process is gone is taken over as
    it is, and keeps its number, which names the folder in which its runs go on. (Optuna's
    RetryHeartbeatStaleTrialCallback would make a new trial.)
    """

    def __init__(self, sweep: Sweep, optuna_study: optuna.Study) -> None:
        self.sweep, self.optuna = sweep, optuna_study
        self._storage: Any = optuna_study._storage
        self._mine: set[int] = set()  # the trials of this process, which may have slept for longer than others wait

    def trials(self) -> list[FrozenTrial]:
        """Return the trials that have begun, without those that repeat a point or ran again."""
        retried = self.optuna.user_attrs.get(_RETRIED, [])
        return [
            trial
            for trial in self.optuna.get_trials(deepcopy=False)
            if trial.state != TrialState.WAITING and REPEATS not in trial.user_attrs and trial.number not in retried
        ]

    def claim(self) -> RunningTrial | None:
        """Return a trial whose process is gone, else a new one, or None if the budget is spent."""
        with _exclusive(self.sweep.path):
            claimed, limit = self._abandoned(), self.sweep.config.steps
            trials = self.trials()
            steps = sum(sum(trial.user_attrs.get(STEPS, {}).values()) for trial in trials)
            if claimed is None and len(trials) < self.sweep.num_trials and (limit is None or steps < limit):
                claimed = self.draw()
            if claimed is not None:
                self._mine.add(claimed.optuna.number)
                self.keep([claimed])
                claimed.optuna.set_user_attr(HELD, True)
            return claimed

    def _abandoned(self) -> RunningTrial | None:
        """Return a trial whose process is silent, has given it back, or ended while it drew."""
        silent = self._storage._get_stale_trial_ids(self.optuna._study_id)
        for begun in self.trials():
            is_free = begun._trial_id in silent or not begun.user_attrs.get(HELD)
            if begun.state == TrialState.RUNNING and begun.number not in self._mine and is_free:
                trial = Trial(self.optuna, begun._trial_id)
                point = self.sweep.space.suggest(trial)
                if not self._is_repeat(trial):
                    return RunningTrial(trial, point, max(begun.intermediate_values, default=-1))
        return None

    def draw(self) -> RunningTrial:
        """Put a new trial into the study, with a point that no other trial has."""
        config, space, repeats = self.sweep.config.sampler, self.sweep.space, 0
        while True:
            known = self.optuna.get_trials(deepcopy=False)
            is_waiting = any(trial.state == TrialState.WAITING for trial in known)  # as earlier versions left a grid
            is_listed = config.name == "grid" or (repeats >= _MOST_REPEATS and space.is_finite)
            if is_listed and not is_waiting:
                tried = [trial.params for trial in known]
                self.optuna.enqueue_trial(next(named for named, _ in space.grid() if named not in tried))
            # A sampler that a restarted process seeds again would repeat its first draws.
            seed = (config.seed * 1_000_003 + len(known)) % 2**32
            # group is experimental, and Study.optimize would have heartbeats.
            with warnings.catch_warnings(action="ignore"):
                if config.name == "tpe":
                    # group: conditional parameters are modelled together where they occur together.
                    startup = config.startup_trials or _STARTUP_TRIALS
                    self.optuna.sampler = TPESampler(seed=seed, n_startup_trials=startup, multivariate=True, group=True)
                else:
                    self.optuna.sampler = RandomSampler(seed)
                trial = self.optuna.ask()
            point = space.suggest(trial)
            if not self._is_repeat(trial):
                return RunningTrial(trial, point)
            repeats += 1

    def _is_repeat(self, trial: Trial) -> bool:
        """Return whether another trial has the same point. Then this one is put aside."""
        others = (each for each in self.trials() if each.number != trial.number)
        same = next((each for each in others if each.params == trial.params), None)
        if same is not None:
            trial.set_user_attr(REPEATS, same.number)
            self.optuna.tell(trial, state=TrialState.FAIL)
        return same is not None

    def keep(self, claimed: Iterable[RunningTrial]) -> None:
        """Tell other processes that these trials are in good hands."""
        for each in claimed:
            self._storage.record_heartbeat(each.optuna._trial_id)

    def give_back(self, claimed: RunningTrial) -> None:
        """Let any process go on with a trial at once."""
        claimed.optuna.set_user_attr(HELD, False)
        self._mine.discard(claimed.optuna.number)

    def retry_failed(self) -> None:
        """Put failed trials into the study again."""
        failed = [trial for trial in self.trials() if trial.state == TrialState.FAIL]
        for trial in failed:
            self.optuna.enqueue_trial(trial.params)
        retried = [*self.optuna.user_attrs.get(_RETRIED, []), *(trial.number for trial in failed)]
        self.optuna.set_user_attr(_RETRIED, retried)


@contextmanager
def open_study(sweep: Sweep, *, create: bool) -> Iterator[Study]:
    """Open the study of a sweep.

    Args:
        create: create the study if there is none, to work on it. Otherwise it is only read.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    url = sweep.config.storage or f"sqlite:///{(sweep.path / 'study.db').absolute()}"
    try:
        if create:
            with file_errors():
                sweep.path.mkdir(parents=True, exist_ok=True)
            with _exclusive(sweep.path):  # two processes may not create the tables together
                study = optuna.create_study(
                    study_name=sweep.name, storage=_storage(url), direction=sweep.config.direction, load_if_exists=True
                )
                _require_same_sweep(sweep, study, url)
                if sweep.config.retry_failed:
                    Study(sweep, study).retry_failed()
            study.pruner = build_pruner(sweep.config.pruner)
        else:
            file = make_url(url).database if url.startswith("sqlite") else None
            is_gone = file is not None and not Path(file).is_file()
            storage = None if is_gone else _storage(url)
            if storage is None or sweep.name not in optuna.get_all_study_names(storage):
                raise UserError(
                    f"{without_password(url)} holds no study {sweep.name!r}; start the sweep, or find its file"
                )
            study = optuna.load_study(study_name=sweep.name, storage=storage)
        yield Study(sweep, study)
    except (SQLAlchemyError, StorageInternalError) as error:
        cause = error.__cause__ if isinstance(error.__cause__, SQLAlchemyError) else error
        reason = one_line(cause).split(" (Background on this error")[0]
        raise UserError(
            f"the database {without_password(url)} can't be used ({reason[:300]}); check sweep.storage and that the "
            "database runs. What has been trained stays, and the same command goes on"
        ) from error


def _storage(url: str) -> RDBStorage:
    options: dict[str, Any] = {"connect_args": {"timeout": _BUSY_TIMEOUT_S}} if url.startswith("sqlite") else {}
    try:
        with warnings.catch_warnings(action="ignore", category=ExperimentalWarning):
            return RDBStorage(url, options, heartbeat_interval=HEARTBEAT_S, grace_period=SILENT_S)
    except ImportError as error:  # the driver of this kind of database
        raise UserError(
            f"sweep.storage={without_password(url)} needs the Python package of this kind of database; "
            "pip install 'psycopg[binary]' for PostgreSQL, pymysql for MySQL (mysql+pymysql://...)"
        ) from error


def _require_same_sweep(sweep: Sweep, study: optuna.Study, url: str) -> None:
    """Check that the study is of this sweep, and of its folder. Both have the same random mark.

    A study whose runs lie elsewhere would take this folder's runs for its own.
    """
    file, known = sweep.path / ".study", study.user_attrs
    if "sweep" not in known and not study.get_trials(deepcopy=False):
        study.set_user_attr("sweep", sweep.identity)
    with file_errors():
        if "folder" not in known and not any(sweep.path.glob("trial_*")):
            mark = uuid.uuid4().hex
            write_atomically(file, mark + "\n")
            study.set_user_attr("folder", mark)
        known = study.user_attrs
        different = differing(sweep.identity, known.get("sweep", {}))
        if not file.exists() or file.read_text(encoding="utf-8").strip() != known.get("folder"):
            different.append("folder")
    if different:
        raise UserError(
            f"{sweep.path} or the study {sweep.name!r} in {without_password(url)} holds another sweep, with other "
            f"{' and '.join(different)}; give another sweep.name, or what the sweep began with"
        )


def build_pruner(config: PrunerConfig) -> BasePruner:
    if config.name == "median":
        startup = 5 if config.startup_trials is None else config.startup_trials
        return MedianPruner(n_startup_trials=startup, n_warmup_steps=config.warmup_steps or 0)
    if config.name == "successive_halving":
        return SuccessiveHalvingPruner(config.warmup_steps or "auto", config.reduction_factor or 4)
    return NopPruner()


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Let one process of a sweep at a time inside. The system releases the lock of a killed one."""
    with ExitStack() as stack:
        with file_errors():
            file = stack.enter_context(open(folder / ".claims", "a", encoding="utf-8"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def dry_points(sweep: Sweep) -> list[Point]:
    """Return the points that a new study would draw before the first result, without a database."""
    config, num_known = sweep.config.sampler, sweep.num_trials
    if config.name == "grid":
        return [point for _, point in sweep.space.grid()][:num_known]
    if config.name == "tpe":
        num_known = min(num_known, config.startup_trials or _STARTUP_TRIALS)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = Study(sweep, optuna.create_study())
    return [study.draw().point for _ in range(num_known)]
