"""What status, best and the end of a sweep print."""

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from search.report import best_first, best_page, finished_page, require_best_first, status_page
from search.study import SECONDS, STEPS, Study
from search.sweep import Sweep
from tests.search.finished import Ended, finished, read_sweep

COMPLETE, PRUNED, FAIL, RUNNING = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING
LR = {"lr": 0.1}


def _study(folder: Path, ended: list[Ended], **keys: Any) -> Study:
    return finished(read_sweep(folder, **{"parameters": {"lr": [0.1]}, **keys}), ended)


def _rows(study: Study) -> list[str]:
    """Return the lines of the trials in the table, without those above and below."""
    lines = status_page(study).splitlines()
    begin = next(number for number, line in enumerate(lines) if line.split()[:2] == ["trial", "state"])
    return lines[begin + 1 : -2]


def _numbers(study: Study) -> list[int]:
    """Return the numbers of the trials as the table has them from top to bottom."""
    return [int(line.removeprefix("*").split()[0]) for line in _rows(study)]


# ---- the best ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("direction", "numbers"), [("maximize", [1, 2, 0]), ("minimize", [0, 1, 2])])
def test_the_best_comes_first_and_of_equals_the_earlier(tmp_path: Path, direction: str, numbers: list[int]) -> None:
    ended = [Ended(LR, (value,)) for value in (0.2, 0.9, 0.9)]
    others = [Ended(LR, (0.99,), state) for state in (PRUNED, FAIL, RUNNING)]
    study = _study(tmp_path, [*ended, *others], direction=direction)
    assert [best.number for best in best_first(study.sweep, study.trials())] == numbers
    assert [best.number for best in require_best_first(study)] == numbers


# ---- status ------------------------------------------------------------------------------------


def test_complete_trials_come_first_and_those_that_run_last(tmp_path: Path) -> None:
    states = {RUNNING: 0.95, FAIL: 0.97, PRUNED: 0.99}
    trials = [*(Ended(LR, (value,), state) for state, value in states.items()), Ended(LR, (0.1,)), Ended(LR, (0.9,))]
    study = _study(tmp_path, trials)
    assert _numbers(study) == [4, 3, 2, 1, 0]
    assert [line.startswith("*") for line in _rows(study)] == [True, False, False, False, False]
    assert [line[1:].split()[1] for line in _rows(study)] == ["complete", "complete", "pruned", "failed", "begun"]
    counts = "5 of 1 trial; 2 complete, 1 pruned, 1 failed, 1 begun; best 0.9000 (trial 4)"
    assert status_page(study).splitlines()[-1] == f"{study.sweep.path}: {counts}"


def test_a_pruned_trial_has_the_last_value_that_it_reported(tmp_path: Path) -> None:
    study = _study(tmp_path, [Ended(LR, (), PRUNED, reported={20: 0.3, 10: 0.9})])
    assert "0.3000" in _rows(study)[0] and "0.9000" not in _rows(study)[0]


def test_each_key_is_a_column(tmp_path: Path) -> None:
    """A trial that lacks a key has an empty cell, so that the next column stays where it is."""
    parameters = {
        "ema": [True, False],
        "ema_rate": {"values": [0.000123456], "when": {"ema": True}},
        "grad_clip": [None, 1.0],
        "project_name": ["a b", "c"],
    }
    first = {"ema": True, "ema_rate": 0.000123456, "grad_clip": None, "project_name": "a b"}
    second = {"ema": False, "grad_clip": 1.0, "project_name": "c"}
    noted = {STEPS: {"0": 10, "1": 30}, SECONDS: {"0": 60.4, "1": 60.2}}
    trials = [Ended(first, (0.5,), noted=noted), Ended(second, (), FAIL, "no data")]
    study = _study(tmp_path, trials, parameters=parameters)
    assert status_page(study).splitlines()[:4] == [
        "   trial  state     exact_accuracy  step  time   ema    ema_rate   grad_clip  project_name",
        "*  0      complete  0.5000          30    02:01  true   0.0001235  null       a b",
        "   1      failed                                 false             1          c             no data",
        "",
    ]


@pytest.mark.parametrize(
    ("files", "step"),
    [({0: '{"step": 7}\n', 1: '{"step": 9}\n'}, ["9"]), ({}, []), ({0: "no row\n", 1: '{"step": 4}\n'}, ["4"])],
    ids=["two seeds", "no folder", "a damaged row"],
)
def test_the_step_of_a_running_trial_is_that_of_its_files(
    tmp_path: Path, files: dict[int, str], step: list[str]
) -> None:
    study = _study(tmp_path, [Ended(LR, (), RUNNING)], seeds=[0, 1])
    for seed, text in files.items():
        folder = study.sweep.run_folder(0, seed)
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text(text)
    assert _rows(study)[0].split() == ["0", "begun", *step, "0.1"]


# ---- best --------------------------------------------------------------------------------------


def _best_page(folder: Path, **keys: Any) -> tuple[Sweep, list[str], list[str]]:
    """Return a sweep, the comments of its page, and the words of the command."""
    study = _study(folder, [Ended(LR, (0.5, 0.6))], overrides=["data_path='a b'"], seeds=[3, 4], **keys)
    *comments, command = best_page(study).splitlines()
    return study.sweep, comments, shlex.split(command)


def test_the_best_has_its_folders_and_its_command(tmp_path: Path) -> None:
    sweep, comments, words = _best_page(tmp_path)
    assert comments[0] == "# trial 0: exact_accuracy 0.5500 ± 0.0707 over 2 seeds (0.5000, 0.6000)"
    assert comments[1:] == [f"# {sweep.path}/trial_0000_seed_{seed}" for seed in (3, 4)]
    assert words == ["OMP_NUM_THREADS=1", "python", "pretrain.py", "data_path=a b", "lr=0.1", "seed=3"]


def test_in_another_folder_the_command_says_where_the_data_are(tmp_path: Path) -> None:
    _, _, words = _best_page(tmp_path)
    run = tmp_path / "sweep" / "trial_0000_seed_3"
    for started_in, told in (("/there", ["started_in=/there"]), (os.getcwd(), []), ("null", [])):
        (run / "config.yaml").write_text(f"started_in: {started_in}\n")
        assert _best_page(tmp_path)[2] == [*words, *told]


# ---- the end of a sweep ------------------------------------------------------------------------


def test_a_stopped_sweep_says_how_it_goes_on(tmp_path: Path) -> None:
    study = _study(tmp_path, [Ended(LR, (0.5,)), Ended(LR, (), RUNNING)])
    first, second, *_ = finished_page(study, done=False).splitlines()
    assert first == f"{study.sweep.path} is not done; the same command goes on with it"
    assert second == "# trial 0: exact_accuracy 0.5000"
