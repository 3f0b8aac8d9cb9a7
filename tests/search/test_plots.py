"""The plots of a sweep: which trials enter which figure, and that every sweep gives a page."""

import builtins
import math
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optuna.trial import TrialState

from search.figures import Axis, figures_of, importances_of
from search.plots import _log_ticks, write_plots
from search.study import Study
from tests.search.finished import Ended, finished, read_sweep
from utils.errors import UserError

PARAMETERS: dict[str, Any] = {
    "lr": {"log_range": [1e-4, 1e-2]},
    "weight_decay": {"range": [0.0, 1.0]},
    "ema": [False, True],
    "ema_rate": {"values": [0.9, 0.99], "when": {"ema": True}},
}
PNGS = ["importance.png", "parallel.png", "slices.png", "curves.png"]


def _trial(number: int) -> Ended:
    """Return a trial whose value depends on lr alone. Each fourth is pruned."""
    lr, ema = 10 ** (-4 + 2 * ((number * 0.618) % 1)), number % 2 == 0
    params = {"lr": lr, "weight_decay": (number * 0.37) % 1, "ema": ema} | ({"ema_rate": 0.9} if ema else {})
    state = TrialState.PRUNED if number % 4 == 3 else TrialState.COMPLETE
    return Ended(params, (1.0 - abs(math.log10(lr) + 3),), state)


def _written(study: Study) -> tuple[str, list[str]]:
    """Return the text of the page without plotly.js, and the names of the pictures."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page, *pictures = map(Path, write_plots(study, None).splitlines())
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    text = re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL)
    return text, [picture.name for picture in pictures]


def test_a_sweep_with_pruned_trials_and_a_condition(tmp_path: Path) -> None:
    study = finished(read_sweep(tmp_path, parameters=PARAMETERS), [_trial(number) for number in range(40)])
    text, pictures = _written(study)
    figures = figures_of(study)
    assert pictures == PNGS
    assert "among the best 5 of 40" in text and "30 trials are complete; 10 were pruned" in text
    assert "The 30 complete trials; the other 10 were pruned" in text and "“not set”" in text
    assert "40 trials that have logged eval/all/exact_accuracy" in text
    assert figures.importances is not None
    assert next(iter(figures.importances.shares)) == "lr" and figures.importances.shares["lr"] > 0.5
    assert [axis.key for axis in figures.axes] == ["lr", "weight_decay", "ema", "ema_rate"]
    lr, decay, _, rate = figures.axes
    assert lr.is_log and not decay.is_log and rate.ticks == ("0.9",)
    assert np.isnan(rate.place_T).sum() == sum(number % 2 == 1 and number % 4 != 3 for number in range(40))


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    study = finished(read_sweep(tmp_path, parameters=PARAMETERS), [_trial(number) for number in range(12)])
    page = Path(write_plots(study, tmp_path / "deep" / "er").splitlines()[0])
    assert page.parent == tmp_path / "deep" / "er"
    text = page.read_text()
    assert len(re.findall(r"plotly\.js v\d", text)) == 1
    assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)=", text)


def test_a_pruned_trial_counts_as_not_among_the_best(tmp_path: Path) -> None:
    """All complete trials have weight_decay below 0.5, and only with the pruned ones it decides."""
    sweep = read_sweep(tmp_path, parameters={key: PARAMETERS[key] for key in ("lr", "weight_decay")})
    trials = []
    for number in range(30):
        is_pruned = number % 3 > 0
        params = {"lr": 10 ** (-4 + 2 * ((number * 0.618) % 1)), "weight_decay": 0.5 * is_pruned + 0.4 * (number / 30)}
        state = TrialState.PRUNED if is_pruned else TrialState.COMPLETE
        trials.append(Ended(params, (0.5 + 0.001 * ((number * 7) % 10),), state))
    study = finished(sweep, trials)
    found = importances_of(sweep, study.trials())
    assert found is not None and (found.num_complete, found.num_pruned) == (10, 20)
    assert found.shares["weight_decay"] > found.shares["lr"]


@pytest.mark.parametrize("num_trials", [1, 2])
def test_few_trials(tmp_path: Path, num_trials: int) -> None:
    trials = [Ended({"lr": 1e-3, "weight_decay": 0.1, "ema": False}, (0.5,))] * num_trials
    study = finished(read_sweep(tmp_path, parameters=PARAMETERS), trials)
    text, pictures = _written(study)
    assert pictures == PNGS[1:]
    assert "This needs 10 complete trials" in text


@pytest.mark.parametrize("values", [[0.25], [0.25, 0.75]])
def test_one_parameter(tmp_path: Path, values: list[float]) -> None:
    trials = [Ended({"weight_decay": value}, (0.5,)) for value in values * 10]
    study = finished(read_sweep(tmp_path, parameters={"weight_decay": values}), trials)
    _, pictures = _written(study)
    assert pictures == PNGS[1:]


def test_minimization_turns_the_importance_and_the_best_round(tmp_path: Path) -> None:
    trials = [Ended(_trial(number).params, (float(number),)) for number in range(20)]
    study = finished(read_sweep(tmp_path, parameters=PARAMETERS, direction="minimize"), trials)
    text, pictures = _written(study)
    assert pictures == PNGS and "The best is trial 0 with exact_accuracy 0.0000, the lowest" in text


def test_a_curve_of_seeds_is_their_mean_and_range(tmp_path: Path) -> None:
    trials = [Ended({"weight_decay": 0.1}, (0.2, 0.4, 0.9)), Ended({"weight_decay": 0.2}, (0.1, 0.1, 0.1))]
    sweep = read_sweep(tmp_path, parameters={"weight_decay": [0.1, 0.2]}, seeds=[0, 1, 2])
    study = finished(sweep, trials)
    # The third seed of the first trial is still running.
    rows = (sweep.run_folder(0, 2) / "metrics.jsonl").read_text().splitlines()
    (sweep.run_folder(0, 2) / "metrics.jsonl").write_text(rows[0] + "\n")
    text, _ = _written(study)
    curve = figures_of(study).curves["eval/all/exact_accuracy"][-1]
    assert (curve.kind, curve.num_seeds, curve.step_P.tolist()) == ("best", 3, [10])
    assert (curve.mean_P[0], curve.low_P[0], curve.high_P[0]) == pytest.approx((0.25, 0.1, 0.45))
    assert "Lines are means over 3 seeds" in text


def test_a_trial_with_a_seed_that_has_not_evaluated(tmp_path: Path) -> None:
    sweep = read_sweep(tmp_path, parameters={"weight_decay": [0.1, 0.2]}, seeds=[0, 1])
    study = finished(sweep, [Ended({"weight_decay": 0.1}, (0.2, 0.4))])
    (sweep.run_folder(0, 1) / "metrics.jsonl").write_text('{"step": 1, "train/lm_loss": NaN}\n')
    curves = figures_of(study).curves
    assert [curve.num_seeds for curve in curves["eval/all/exact_accuracy"]] == [1]


@pytest.mark.parametrize("state", [TrialState.PRUNED, TrialState.FAIL, TrialState.RUNNING])
def test_without_a_complete_trial(tmp_path: Path, state: TrialState) -> None:
    trials = [Ended({"lr": 1e-3, "weight_decay": 0.1, "ema": False}, (0.5,), state)] * 3
    study = finished(read_sweep(tmp_path, parameters=PARAMETERS), trials)
    text, pictures = _written(study)
    assert pictures == ["curves.png"]
    assert "3 trials, none of them with a value yet" in text and "No trial has a value yet" in text


def test_without_the_folders_of_the_runs(tmp_path: Path) -> None:
    trials = [Ended({"lr": 1e-3, "weight_decay": 0.1, "ema": False}, state=TrialState.FAIL, error="no")]
    study = finished(read_sweep(tmp_path, parameters=PARAMETERS), trials)
    text, pictures = _written(study)
    assert pictures == [] and "the folders of the runs are gone" in text


def test_without_a_trial(tmp_path: Path) -> None:
    study = finished(read_sweep(tmp_path, parameters=PARAMETERS), [])
    with pytest.raises(UserError, match="has begun yet; start the sweep"):
        write_plots(study, None)


@pytest.mark.parametrize(("package", "file"), [("matplotlib", "demo"), ("plotly", "plot")])
def test_a_missing_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, file: str) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name == package:
            raise ImportError(name)
        return real(name, *rest)

    study = finished(read_sweep(tmp_path, parameters=PARAMETERS), [_trial(0)])
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UserError, match=f"pip install -r requirements-{file}.txt"):
        write_plots(study, None)


def test_names_are_text_and_no_markup(tmp_path: Path) -> None:
    """They look like HTML, and like a formula of matplotlib."""
    trials = [Ended({"arch": value}, (0.5,)) for value in ("<b>$x_1$</b>", "a/very/long/path/to/a/file.yaml")]
    sweep = read_sweep(tmp_path, name="<i>mine", parameters={"arch": [each.params["arch"] for each in trials]})
    study = finished(sweep, trials)
    text, _ = _written(study)
    assert "<b>$x_1$" not in Path(write_plots(study, None).splitlines()[0]).read_text()
    assert "<i>" not in text and "&lt;i&gt;mine" in text


def test_an_axis_goes_from_0_to_1() -> None:
    places = np.array([1e-4, math.nan, 1e-2, 1e-3])
    assert Axis("lr", places, None, True).unit_T.tolist() == pytest.approx([0.0, math.nan, 1.0, 0.5], nan_ok=True)
    assert Axis("lr", places, None, True).unit_ticks()[2] == (0.5, "0.001")
    same = Axis("lr", np.array([2.0, 2.0]), None, False)
    assert same.unit_T.tolist() == [0.5, 0.5] and same.unit_ticks() == [(0.5, "2")]


def test_a_logarithmic_axis_has_at_least_three_ticks() -> None:
    assert _log_ticks(np.array([9e-4, 1.1, math.nan])) == [1e-3, 1e-2, 0.1, 1.0]
    assert _log_ticks(np.array([0.09, 2.8])) == [0.1, 0.3, 1.0]
    assert _log_ticks(np.array([0.0006, 0.0098])) == [0.001, 0.002, 0.005]
    assert _log_ticks(np.array([0.13, 0.13])) == [0.13]
