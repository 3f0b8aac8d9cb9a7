"""What status, best and the end of a sweep print."""

import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

from search.report import best_first, best_page, status_page
from search.study import SECONDS, STEPS, Study
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


@pytest.mark.parametrize(("direction", "numbers"), [("maximize", [1, 2, 0]), ("minimize", [0, 1, 2])])
def test_the_best_comes_first_and_of_equals_the_earlier(tmp_path: Path, direction: str, numbers: list[int]) -> None:
    ended = [Ended(LR, (value,)) for value in (0.2, 0.9, 0.9)]
    others = [Ended(LR, (0.99,), state) for state in (PRUNED, FAIL, RUNNING)]
    study = _study(tmp_path, [*ended, *others], direction=direction)
    assert [best.number for best in best_first(study.sweep, study.trials())] == numbers
    assert [int(line.strip("* ").split()[0]) for line in _rows(study)][:3] == numbers


def test_complete_trials_come_first_and_those_that_run_last(tmp_path: Path) -> None:
    """A pruned trial has the last value that it reported."""
    pruned = Ended(LR, (), PRUNED, reported={20: 0.3, 10: 0.99})
    trials = [Ended(LR, (0.95,), RUNNING), Ended(LR, (0.97,), FAIL), pruned, Ended(LR, (0.1,)), Ended(LR, (0.9,))]
    study = _study(tmp_path, trials)
    assert [line.split()[:-1] for line in _rows(study)][:3] == [
        ["*", "4", "complete", "0.9000", "10"],
        ["3", "complete", "0.1000", "10"],
        ["2", "pruned", "0.3000", "20"],
    ]
    assert [line.split()[:2] for line in _rows(study)[3:]] == [["1", "failed"], ["0", "begun"]]
    counts = "5 of 1 trial; 2 complete, 1 pruned, 1 failed, 1 begun; best 0.9000 (trial 4)"
    assert status_page(study).splitlines()[-1] == f"{study.sweep.path}: {counts}"


def test_each_key_is_a_column(tmp_path: Path) -> None:
    """A trial that lacks a key has an empty cell, so that the next column stays where it is."""
    parameters = {
        "ema": [True, False],
        "ema_rate": {"values": [0.000123456], "when": {"ema": True}},
        "project_name": ["a b", "c"],
    }
    first = {"ema": True, "ema_rate": 0.000123456, "project_name": "a b"}
    noted = {STEPS: {"0": 10, "1": 30}, SECONDS: {"0": 60.4, "1": 60.2}}
    trials = [Ended(first, (0.5,), noted=noted), Ended({"ema": False, "project_name": "c"}, (), FAIL, "no data")]
    study = _study(tmp_path, trials, parameters=parameters)
    assert status_page(study).splitlines()[:3] == [
        "   trial  state     exact_accuracy  step  time   ema    ema_rate   project_name",
        "*  0      complete  0.5000          30    02:01  true   0.0001235  a b",
        "   1      failed                                 false             c             no data",
    ]


def test_the_step_of_a_running_trial_is_that_of_its_files(tmp_path: Path) -> None:
    study = _study(tmp_path, [Ended(LR, (), RUNNING)], seeds=[0, 1])
    assert _rows(study)[0].split() == ["0", "begun", "0.1"]
    for seed in (0, 1):
        study.sweep.run_folder(0, seed).mkdir(parents=True)
    for first, step in (('{"step": 7}\n', "9"), ("no row\n", "9")):
        for seed, text in ((0, first), (1, '{"step": 8}\n{"step": 9}\n')):
            (study.sweep.run_folder(0, seed) / "metrics.jsonl").write_text(text)
        assert _rows(study)[0].split() == ["0", "begun", step, "0.1"]


def test_the_best_has_its_folders_and_its_command(tmp_path: Path) -> None:
    """In another folder the command says where the run was started, and so where its data are."""
    study = _study(tmp_path, [Ended(LR, (0.5, 0.6))], overrides=["data_path='a b'"], seeds=[3, 4])
    folders = [study.sweep.path / f"trial_0000_seed_{seed}" for seed in (3, 4)]
    words = ["OMP_NUM_THREADS=1", "python", "pretrain.py", "data_path=a b", "lr=0.1", "seed=3"]
    for started_in, told in (("/there", ["started_in=/there"]), (os.getcwd(), []), ("null", [])):
        (folders[0] / "config.yaml").write_text(f"started_in: {started_in}\n")
        first, *named, command = best_page(study).splitlines()
        assert first == "# trial 0: exact_accuracy 0.5500 ± 0.0707 over 2 seeds (0.5000, 0.6000)"
        assert named == [f"# {folder}" for folder in folders]
        assert shlex.split(command) == [*words, *told]
