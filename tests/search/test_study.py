"""Processes share a study without taking a trial twice, and take over those of a dead process."""

import itertools
import json
import multiprocessing as mp
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import optuna
import pytest

from search.config import PrunerConfig
from search.space import Point
from search.study import RunningTrial, Study, build_pruner, dry_points, open_study
from search.sweep import Sweep
from tests.search.helpers import sweep_of
from utils.errors import UserError


def _claim(study: Study) -> RunningTrial:
    claim = study.claim()
    assert claim is not None
    return claim


def _silence(folder: Path, seconds: int) -> None:
    """Let the last heartbeats of all processes be so old."""
    with closing(sqlite3.connect(folder / "study.db")) as database, database:
        database.execute(f"UPDATE trial_heartbeats SET heartbeat = datetime('now', '-{seconds} seconds')")


def test_a_trial_is_taken_over_only_when_its_process_is_silent(data: Path, tmp_path: Path) -> None:
    sweep = sweep_of(data, tmp_path / "s", "lr=1e-3,1e-4,1e-5")
    with open_study(sweep, create=True) as first, open_study(sweep, create=True) as second:
        mine = [_claim(first), _claim(first)]
        mine[1].optuna.report(0.5, 7)
        mine[1].optuna.set_user_attr("seeds", {"0": 0.25})
        assert _claim(second).optuna.number == 2 and second.claim() is None
        _silence(tmp_path / "s", 90)
        assert second.claim() is None, "a process that saves a checkpoint may be silent for a minute"
        _silence(tmp_path / "s", 150)
        assert first.claim() is not None, "the third trial, whose process is silent, too"
        first.keep(mine[:1])
        taken = _claim(second)
        assert (taken.optuna.number, taken.point, taken.reported) == (1, mine[1].point, 7)
        assert taken.optuna.user_attrs["seeds"] == {"0": 0.25}
        assert second.claim() is None, "the first process goes on with its other trials"
        first.give_back(mine[0])
        assert _claim(second).optuna.number == 0, "a trial that was given back is taken at once"


def _claims(typed: list[str], folder: Path, place: int) -> None:
    numbers = []
    with open_study(Sweep.read(typed), create=True) as study:
        (folder / f"ready_{place}").touch()
        deadline = time.monotonic() + 60
        while not all((folder / f"ready_{other}").exists() for other in range(3)):
            assert time.monotonic() < deadline  # no sleep: all three begin in the same moment
        while (claim := study.claim()) is not None:
            study.optuna.tell(claim.optuna, 1.0)
            numbers.append(claim.optuna.number)
    (folder / f"claimed_{place}").write_text(json.dumps(numbers))


def test_three_processes_share_a_grid_without_gaps_or_repeats(data: Path, tmp_path: Path) -> None:
    typed = [f"data_path={data}", "debug=tiny", "device=cpu", f"sweep.path={tmp_path / 's'}", "lr=range(1,13)"]
    fork = mp.get_context("fork")  # they have imported Optuna
    processes = [fork.Process(target=_claims, args=(typed, tmp_path, place)) for place in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
        assert process.exitcode == 0
    numbers = [json.loads((tmp_path / f"claimed_{place}").read_text()) for place in range(3)]
    assert sorted(itertools.chain(*numbers)) == list(range(12))
    with open_study(Sweep.read(typed), create=False) as study:
        assert sorted(study.sweep.space.point_of(trial.params)["lr"] for trial in study.trials()) == list(range(1, 13))  # type: ignore[type-var]


def test_a_process_killed_while_it_draws_loses_no_point(data: Path, tmp_path: Path) -> None:
    """The taken-over trial draws the parameters that it lacks."""
    sweep = sweep_of(data, tmp_path / "s", "lr=interval(1e-4,1e-2)", "weight_decay=interval(0,1)")
    with open_study(sweep, create=True) as study:
        trial = study.optuna.ask()
        trial.set_user_attr("driver", "a process of an earlier version")  # which had no heartbeat
        drawn = trial.suggest_float("lr", 1e-4, 1e-2)
    with open_study(sweep, create=True) as study:
        claim = study.claim()
        assert claim is not None and claim.optuna.number == 0 and claim.point.keys() == {"lr", "weight_decay"}
        assert claim.point["lr"] == drawn


@pytest.mark.parametrize("name", ["random", "tpe"])
def test_a_restarted_process_and_a_neighbouring_seed_draw_other_points(data: Path, tmp_path: Path, name: str) -> None:
    typed = ["lr=interval(1e-4,1e-2)", f"sweep.sampler.name={name}", "sweep.trials=6"]
    sweep = sweep_of(data, tmp_path / "s", *typed, "sweep.sampler.seed=0")
    drawn = []
    for _ in range(6):
        with open_study(sweep, create=True) as study:
            claim = _claim(study)
            drawn.append(claim.point["lr"])
            study.optuna.tell(claim.optuna, 1.0)
    assert [point["lr"] for point in dry_points(sweep)] == drawn, "--dry-run shows the points that are drawn"
    with open_study(sweep, create=True) as study:
        assert study.claim() is None
    for seed in (1, 2):
        drawn += [point["lr"] for point in dry_points(sweep_of(data, tmp_path, *typed, f"sweep.sampler.seed={seed}"))]
    assert len(set(drawn)) == 18


def test_tpe_draws_at_random_until_it_has_its_first_trials(data: Path, tmp_path: Path) -> None:
    typed = ["lr=interval(1e-4,1e-2)", "sweep.trials=3", "sweep.sampler.name=tpe", "sweep.direction=minimize"]
    at_random, drawn = dry_points(sweep_of(data, tmp_path, *typed)), list[Point]()
    sweep = sweep_of(data, tmp_path / "s", *typed, "sweep.sampler.startup_trials=2")
    assert dry_points(sweep) == at_random[:2]
    with open_study(sweep, create=True) as study:
        for value in (1.0, 2.0, 3.0):
            claim = _claim(study)
            drawn.append(claim.point)
            study.optuna.tell(claim.optuna, value)
        assert study.optuna.best_trial.number == 0, "the least is the best"
    assert drawn[:2] == at_random[:2] and drawn[2] != at_random[2]


@pytest.mark.parametrize("name", ["random", "tpe"])
def test_a_finite_space_is_drawn_whole_and_no_point_twice(data: Path, tmp_path: Path, name: str) -> None:
    sweep = sweep_of(data, tmp_path / "s", "lr=1e-3,1e-4,1e-5", f"sweep.sampler.name={name}", "sweep.trials=50")
    with open_study(sweep, create=True) as study:
        assert study.sweep.num_trials == 3
        claims = []
        while (claim := study.claim()) is not None:
            claims.append(claim)
        rows = len(study.optuna.get_trials(deepcopy=False))
        assert study.claim() is None and len(study.optuna.get_trials(deepcopy=False)) == rows, "asking costs nothing"
        assert sorted(claim.point["lr"] for claim in claims) == [1e-5, 1e-4, 1e-3]  # type: ignore[type-var]
        assert dry_points(sweep) == [claim.point for claim in claims]
        assert len(study.trials()) == 3


def test_a_study_and_a_folder_that_do_not_belong_together_are_refused(data: Path, tmp_path: Path) -> None:
    """Otherwise the runs in the folder would be taken for those of other points."""

    def begin(folder: str, database: str) -> None:
        storage = f"sweep.storage='sqlite:///{tmp_path / database}'"
        sweep = sweep_of(data, tmp_path / folder, "lr=1e-3,1e-4", "sweep.name=x", storage)
        with open_study(sweep, create=True):
            pass

    begin("a", "1.db")
    begin("a", "1.db")
    (tmp_path / "a/trial_0000").mkdir()
    for folder, database in (("a", "2.db"), ("b", "1.db")):
        with pytest.raises(UserError, match="holds another sweep, with other folder; give another"):
            begin(folder, database)


def test_a_folder_with_another_sweep_is_refused(data: Path, tmp_path: Path) -> None:
    def num_trials(*typed: str, project: str = "x") -> int | None:
        typed = ("sweep.name=a", f"project_name={project}", *typed)
        with open_study(sweep_of(data, tmp_path / "s", *typed), create=True) as study:
            return study.sweep.config.trials

    num_trials("lr=1,2")
    for typed, key in (
        (["lr=1,3"], "parameters"),
        (["lr=1,2", "epochs=3"], "overrides"),
        (["lr=1,2", "seed=1"], "seeds"),
        (["lr=1,2", "sweep.metric=train/lm_loss"], "metric"),
        (["lr=1,2", "sweep.direction=minimize"], "direction"),
    ):
        with pytest.raises(UserError, match=rf"holds another sweep, with other {key}; give another sweep.name"):
            num_trials(*typed)
    again = num_trials("lr=1,2", "sweep.trials=1", "sweep.launcher.at_once=3", project="'x'")
    assert again == 1, "budget, launcher and needless quotes may change"


def test_a_database_that_is_not_there_is_one_line(data: Path, tmp_path: Path) -> None:
    for url, reason in (
        ("postgresql://me@localhost:1/db", r"pip install 'psycopg\[binary\]' for PostgreSQL"),
        (f"sqlite:///{tmp_path}/no/folder.db", "unable to open database file"),
    ):
        sweep = sweep_of(data, tmp_path / "s", "lr=1,2", f"sweep.storage='{url}'")
        with pytest.raises(UserError, match=rf"^[^\n]*{reason}[^\n]*$"), open_study(sweep, create=True):
            pass


def test_a_database_by_its_url_works_like_the_file(data: Path, tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'elsewhere.db'}?timeout=5"
    sweep = sweep_of(data, tmp_path / "s", "lr=1e-3,1e-4", f"sweep.storage='{url}'")
    with open_study(sweep, create=True) as study:
        sweep.write()
        assert study.claim() is not None
    assert not (tmp_path / "s/study.db").exists() and (tmp_path / "elsewhere.db").exists()
    with open_study(Sweep.open(str(tmp_path / "s")), create=False) as study:
        assert len(study.trials()) == 1


@pytest.mark.parametrize(("reduction_factor", "is_pruned"), [(2, False), (4, True), (None, True)])
def test_a_rung_of_successive_halving_keeps_the_best_share(reduction_factor: int | None, is_pruned: bool) -> None:
    """The last of four trials is the second best. The first rung is the warm-up."""
    options = {"warmup_steps": 4, "startup_trials": None, "reduction_factor": reduction_factor}
    config = PrunerConfig.model_validate({"name": "successive_halving", **options})
    study = optuna.create_study(direction="maximize", pruner=build_pruner(config))
    pruned = []
    for value in (4.0, 2.0, 1.0, 3.0):
        trial = study.ask()
        trial.report(value, 1)
        assert not trial.should_prune()
        trial.report(value, 4)
        pruned.append(trial.should_prune())
    assert pruned[-1] == is_pruned
