"""Commands in another folder than the one where a run was started, with relative paths."""

import json
import os
import shutil
from pathlib import Path

import pytest

from records.checkpoint.reader import Checkpoint
from solve import Solver
from tests.in_process import begin, mistake, train_here
from tests.runs import Evaluate, settings
from training.config import PretrainConfig
from utils.command_line import validate
from view import view

TINY = {"max_steps": 2, "eval_every_n_steps": 2, "arch": "trm"}


@pytest.fixture
def there(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Train a run in a folder, and return the folder. The current directory is another one."""
    there = tmp_path / "there"
    shutil.copytree(data, there / "data" / "four")
    monkeypatch.chdir(there)
    train_here(settings(Path("data/four"), Path("run"), **TINY))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return there


def _stored(run: Path, step: int) -> PretrainConfig:
    return validate(PretrainConfig, Checkpoint.open(run / f"step_{step:08d}").state.config)


def test_all_commands_find_the_data_where_the_run_was_started(
    there: Path, monkeypatch: pytest.MonkeyPatch, evaluate_here: Evaluate
) -> None:
    run, data = there / "run", str(there / "data" / "four")
    evaluate_here(f"checkpoint={run}", "save_outputs=[inputs,labels,predictions_at_step,q_halt_at_step]")
    assert Solver.from_checkpoint(run, device="cpu").reader.table.data_paths == [data]
    assert "20 examples" in view([str(run)])
    begun = begin([f"resume={run}", "max_steps=3"])
    assert begun.start.config.train_paths == [data]
    assert f"the run was started in {there}, to which its relative paths refer" in begun.start.notes
    begun.fit()
    stored = _stored(run, 3)
    assert (stored.data_path, stored.started_in) == ("data/four", str(there)), "the place of the first start stays"
    # A typed path is relative to the current directory, and the run remembers which one that was.
    shutil.copytree(data, "own")
    train_here([f"resume={run}", "data_path=own", "data_paths_test=[own]", "max_steps=4"])
    monkeypatch.chdir("/")
    stored = _stored(run, 4)
    assert stored.train_paths == stored.test_paths == [str(there.parent / "here" / "own")]
    train_here([f"resume={run}", "max_steps=5"])


def test_a_run_that_was_moved_finds_the_data_beside_it(there: Path, evaluate_here: Evaluate) -> None:
    shutil.move(there / "run", "run")
    shutil.move(there / "data", "data")
    evaluate_here("checkpoint=run")
    begun = begin(["resume=run", "max_steps=3"])
    assert begun.start.config.train_paths == ["data/four"]
    begun.fit()
    train_here(["resume=run", "max_steps=4"])


def test_data_that_are_gone_are_looked_for_where_the_run_was_started(
    there: Path, monkeypatch: pytest.MonkeyPatch, evaluate_here: Evaluate
) -> None:
    shutil.move(there / "data", there / "elsewhere")
    expected = (
        f"no dataset at data/four: the run was started in {there}, and it is neither there nor here in {os.getcwd()}; "
        "give data_path=<folder of the dataset>"
    )
    assert mistake([f"resume={there}/run", "max_steps=3"]) == expected
    with pytest.raises(ValueError) as caught:
        evaluate_here(f"checkpoint={there}/run")
    assert str(caught.value) == expected
    monkeypatch.chdir(there)
    evaluate_here("checkpoint=run", "data_path=elsewhere/four", "out=out")
    assert json.loads(Path("out/results.json").read_text())["data"] == str(there / "elsewhere/four/test")
