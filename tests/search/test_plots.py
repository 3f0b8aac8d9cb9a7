"""The plots of a sweep: which trials enter which figure, and that every sweep gives a page."""

import builtins
import json
import math
import re
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from optuna.trial import TrialState

from search.config import Entry
from search.figures import Axis, Figures, figures_of, importances_of, round_ticks
from search.plots import write_plots
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


def _traces(study: Study, place: int) -> list[dict[str, Any]]:
    """Return the traces of one figure of the page."""
    text = Path(write_plots(study, None).splitlines()[0]).read_text()
    found = [json.JSONDecoder().raw_decode(text, each.end())[0] for each in re.finditer(_NEW_PLOT, text)]
    traces = found[place]
    assert isinstance(traces, list)
    return traces


_NEW_PLOT = r"Plotly\.newPlot\(\s*\"[^\"]*\",\s*(?=\[)"


def test_a_sweep_with_pruned_trials_and_a_condition(tmp_path: Path) -> None:
    study = finished(read_sweep(tmp_path, parameters=PARAMETERS), [_trial(number) for number in range(40)])
    text, pictures = _written(study)
    figures = figures_of(study)
    assert pictures == PNGS
    assert "among the best 5 of 40" in text and "30 trials are complete; 10 were pruned" in text
    assert (
        "30 complete trials; 10 more were pruned, failed or have not ended. Each line" in text and "“not set”" in text
    )
    assert "40 trials have logged eval/all/exact_accuracy" in text
    assert figures.importances is not None
    assert next(iter(figures.importances.shares)) == "lr" and figures.importances.shares["lr"] > 0.5
    assert [axis.key for axis in figures.axes] == ["lr", "weight_decay", "ema", "ema_rate"]
    lr, decay, _, rate = figures.axes
    assert [label for _, label in lr.ticks] == ["0.0001", "0.0003", "0.001", "0.003"]
    assert lr.ticks[0][0] == pytest.approx(-4) and not lr.is_list
    assert [label for _, label in decay.ticks] == ["0", "0.2", "0.4", "0.6", "0.8"] and not decay.is_list
    assert rate.ticks == [(0.0, "not set"), (1.0, "0.9")] and rate.is_list
    assert (rate.place_T == 0).sum() == sum(number % 2 == 1 and number % 4 != 3 for number in range(40))


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
    panel = figures_of(study).panels[0]
    curve = panel.series[-1]
    assert panel.metric == "eval/all/exact_accuracy"
    assert curve.label == "trial 0: weight_decay=0.1", "the best one lies in front"
    assert (curve.num_runs, curve.x_P.tolist()) == (3, [10])
    assert (curve.mean_P[0], curve.low_P[0], curve.high_P[0]) == pytest.approx((0.25, 0.1, 0.45))
    assert "the mean over the seeds that have logged (up to 3), as far as all of these have come" in text


def test_a_trial_with_a_seed_that_has_not_evaluated(tmp_path: Path) -> None:
    sweep = read_sweep(tmp_path, parameters={"weight_decay": [0.1, 0.2]}, seeds=[0, 1])
    study = finished(sweep, [Ended({"weight_decay": 0.1}, (0.2, 0.4))])
    (sweep.run_folder(0, 1) / "metrics.jsonl").write_text('{"step": 1, "train/lm_loss": NaN}\n')
    assert [curve.num_runs for curve in figures_of(study).panels[0].series] == [1]


def test_before_the_first_evaluation_no_trial_has_logged_the_metric(tmp_path: Path) -> None:
    sweep = read_sweep(tmp_path, parameters={"lr": [1e-3, 1e-2]}, metric="eval/all/exact_accuracy")
    study = finished(sweep, [Ended({"lr": 1e-3}, (0.5,), TrialState.RUNNING)])
    (sweep.run_folder(0, 0) / "metrics.jsonl").write_text('{"step": 1, "train/lm_loss": 2.0}\n')
    text, pictures = _written(study)
    assert pictures == ["curves.png"] and "0 trials have logged eval/all/exact_accuracy." in text


def test_a_damaged_row_leaves_its_run_out_alone(tmp_path: Path) -> None:
    sweep = read_sweep(tmp_path, parameters={"lr": [1e-3, 1e-2]})
    study = finished(sweep, [Ended({"lr": 1e-3}, (0.5,)), Ended({"lr": 1e-2}, (0.6,))])
    with open(sweep.run_folder(1, 0) / "metrics.jsonl", "a") as file:
        file.write("no row\n")
    text, pictures = _written(study)
    assert pictures == PNGS[1:] and "1 trial has logged eval/all/exact_accuracy." in text


def test_the_legend_of_the_page_has_every_kind_of_curve(tmp_path: Path) -> None:
    """The pruned trials have logged a loss, but no accuracy yet."""
    sweep = read_sweep(tmp_path, parameters={"lr": [1e-3, 1e-2, 1e-1]})
    states = (TrialState.COMPLETE, TrialState.COMPLETE, TrialState.PRUNED, TrialState.PRUNED)
    study = finished(sweep, [Ended({"lr": 1e-3}, (0.5 + number,), state) for number, state in enumerate(states)])
    for number in (2, 3):
        (sweep.run_folder(number, 0) / "metrics.jsonl").write_text('{"step": 1, "train/lm_loss": 2.0}\n')
    lines = sorted((line for line in _traces(study, -1) if line["showlegend"]), key=lambda line: line["legendrank"])
    assert [line["name"] for line in lines] == [
        "trial 1: lr=0.001, the best",
        "trial 0: lr=0.001",
        "2 pruned, failed or not ended",
    ]


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


def test_labels_of_parallel_coordinates_are_no_html(tmp_path: Path) -> None:
    """Plotly shows them as they are, while the labels of other axes are HTML."""
    study = finished(read_sweep(tmp_path, parameters={"arch": ["a&b", "c"]}), [Ended({"arch": "a&b"}, (0.5,))])
    (parallel,) = _traces(study, 0)
    assert parallel["dimensions"][0]["ticktext"] == ["'a&b'"]
    assert "&amp;b&#x27;" in (study.sweep.path / "plots.html").read_text()


def test_a_label_is_no_formula(tmp_path: Path) -> None:
    """Matplotlib would refuse this one."""
    sweep = read_sweep(tmp_path, parameters={"arch": [r"$\frac$", "b"]})
    _, pictures = _written(finished(sweep, [Ended({"arch": r"$\frac$"}, (0.5,))]))
    assert "slices.png" in pictures


def test_a_sweep_over_seeds_alone_has_no_parameters(tmp_path: Path) -> None:
    study = finished(read_sweep(tmp_path, seeds=[0, 1, 2], sampler={"name": "grid"}), [Ended({}, (0.1, 0.2, 0.3))])
    text, pictures = _written(study)
    assert pictures == ["curves.png"] and text.count("The sweep has no parameters.") == 2
    assert "1 trial, 1 of them complete" in text and "No trial has a value" not in text


# ---- axes --------------------------------------------------------------------------------------


def _axis(folder: Path, entries: Any, values: list[Any]) -> Axis:
    """Return the axis of weight_decay in a sweep that gave it these values. None: not set.

    The trials have falling values, so that they keep their order.
    """
    sweep = read_sweep(folder, parameters={"optim": ["adamw", "muon"], "weight_decay": entries})
    trials = []
    for number, value in enumerate(values):
        params: dict[str, Any] = {"optim": "muon" if value else "adamw"}
        if value is not None:
            params[f"weight_decay (optim={params['optim']})" if isinstance(entries, list) else "weight_decay"] = value
        trials.append(Ended(params, (1.0 - number / 100,)))
    study = finished(sweep, trials)
    _written(study)
    return figures_of(study).axes[1]


def test_a_logarithmic_range_beside_a_zero_is_a_line_of_numbers(tmp_path: Path) -> None:
    zero = {"values": [0.0], "when": {"optim": "adamw"}}
    entries = [zero, {"log_range": [1e-4, 1e-1], "when": {"optim": "muon"}}]
    axis = _axis(tmp_path, entries, [0.0, *(10 ** (-4 + number / 4) for number in range(12))])
    assert not axis.is_list and np.diff(axis.place_T[1:]) == pytest.approx(0.25)
    assert axis.ticks[0] == (axis.place_T[0], "0") and axis.place_T[0] < -4, "0 has no logarithm"
    only_zero = _axis(tmp_path, entries, [0.0, 0.0])
    assert only_zero.ticks == [(0.0, "0")]


def test_a_logarithmic_list_of_many_values_stays_logarithmic(tmp_path: Path) -> None:
    entry = {"log_range": [1e-4, 1.0], "num": 9}
    axis = _axis(tmp_path, entry, Entry.model_validate(entry).listed() or [])
    assert np.diff(axis.place_T) == pytest.approx(0.5) and not axis.is_list


def test_a_few_trials_of_a_range_stand_at_their_numbers(tmp_path: Path) -> None:
    axis = _axis(tmp_path, {"range": [0.0, 1.0]}, [0.1, 0.9, 0.2])
    assert not axis.is_list and axis.place_T.tolist() == [0.1, 0.9, 0.2]
    axis = _axis(tmp_path, {"log_range": [1e-4, 1.0]}, [1e-2, 1e-3, 1e-4])
    assert not axis.is_list and axis.place_T == pytest.approx([-2, -3, -4])


def test_a_trial_that_lacks_a_number_stands_below_the_numbers(tmp_path: Path) -> None:
    entry = {"range": [0.0, 1.0], "when": {"optim": "muon"}}
    axis = _axis(tmp_path, entry, [0.2, None, 0.4])
    assert axis.place_T == pytest.approx([0.2, 0.17, 0.4]) and axis.ticks[0] == (pytest.approx(0.17), "not set")
    assert axis.ends == (pytest.approx(0.17), 0.4)
    assert "“not set”" in (tmp_path / "sweep" / "plots.html").read_text()


def test_many_points_over_powers_of_ten_are_logarithmic(tmp_path: Path) -> None:
    """sweep.py again makes points, which do not tell from which range they come."""
    points = [{"lr": 10 ** (-5 + number / 2)} for number in range(9)]
    sweep = read_sweep(tmp_path, points=points, sampler={"name": "grid"})
    study = finished(sweep, [Ended({"number of the point": number}, (0.5,)) for number in range(9)])
    (axis,) = figures_of(study).axes
    assert np.diff(axis.place_T) == pytest.approx(0.5)


def test_the_axes_have_the_order_of_the_file(tmp_path: Path) -> None:
    """The first trial lacks the parameter that stands between its others."""
    parameters = {"ema": [False, True], "ema_rate": {"values": [0.9], "when": {"ema": True}}, "lr": [1e-3]}
    trials = [Ended({"ema": False, "lr": 1e-3}, (0.9,)), Ended({"ema": True, "ema_rate": 0.9, "lr": 1e-3}, (0.5,))]
    study = finished(read_sweep(tmp_path, parameters=parameters), trials)
    assert [axis.key for axis in figures_of(study).axes] == ["ema", "ema_rate", "lr"]


@pytest.mark.parametrize(("low", "high"), [(0.0215, 0.149), (1.1e-5, 4.9e-5), (2e-9, 3.0)])
def test_labels_of_ticks_do_not_collide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, low: float, high: float
) -> None:
    """A learning rate stands beside a list of long names."""
    drawn: dict[str, Any] = {}
    monkeypatch.setattr("search.plots.save_figure", lambda figure, file: drawn.update({file.stem: figure}))
    names = [f"a/rather/long/name_{number}" for number in range(4)]
    sweep = read_sweep(tmp_path, parameters={"lr": {"log_range": [low, high]}, "arch": names})
    trials = [Ended({"lr": lr, "arch": name}, (0.5,)) for lr, name in zip((low, high, low, high), names, strict=True)]
    write_plots(finished(sweep, trials), None)
    drawn["slices"].draw_without_rendering()
    for panel in drawn["slices"].axes:
        labels = panel.get_xticklabels()
        boxes = [label.get_window_extent() for label in labels]
        is_turned = labels[0].get_rotation() > 0
        assert len(labels) > 1 and (is_turned or all(a.x1 < b.x0 for a, b in pairwise(boxes))), labels


@pytest.mark.parametrize(
    ("low", "high", "is_log", "ticks"),
    [
        (9e-4, 1.1, True, [1e-3, 1e-2, 0.1, 1.0]),
        (0.09, 2.8, True, [0.1, 0.3, 1.0]),
        (0.0006, 0.0098, True, [0.001, 0.002, 0.005]),
        (0.0215, 0.149, True, [0.03, 0.05, 0.07, 0.1]),
        (0.0010, 0.0013, True, [0.001, 0.0011, 0.0012, 0.0013]),
        (0.13, 0.13, True, [0.13]),
        (0.2, 0.6, False, [0.2, 0.3, 0.4, 0.5, 0.6]),
        (-3.0, 40.0, False, [0.0, 10.0, 20.0, 30.0, 40.0]),
        (1999.0, 2001.0, False, [1999.0, 2000.0, 2001.0]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, is_log: bool, ticks: list[float]) -> None:
    assert round_ticks(low, high, is_log=is_log) == ticks


# ---- importance --------------------------------------------------------------------------------


def _importances(folder: Path, values: list[float]) -> Figures:
    params = [
        {"lr": 10 ** (-4 + 2 * ((number * 0.618) % 1)), "weight_decay": (number * 0.37) % 1} for number in range(40)
    ]
    sweep = read_sweep(folder, parameters={key: PARAMETERS[key] for key in ("lr", "weight_decay")})
    return figures_of(finished(sweep, [Ended(each, (value,)) for each, value in zip(params, values, strict=False)]))


def test_ties_count_among_the_best(tmp_path: Path) -> None:
    """Optuna takes all trials that are as good as the fifth."""
    found = _importances(tmp_path, [0.0] * 10 + [1.0] * 12).importances
    assert found is not None and found.num_best == 12


def test_equal_values_have_no_importance(tmp_path: Path) -> None:
    assert _importances(tmp_path, [0.0] * 20).importances is None


def test_many_pruned_trials_are_never_among_the_best(tmp_path: Path) -> None:
    """A tenth of all trials would be more than the complete ones."""
    sweep = read_sweep(tmp_path, parameters={key: PARAMETERS[key] for key in ("lr", "weight_decay")})
    params = [{"lr": 1e-4 * (number + 1) ** 0.5, "weight_decay": number / 200} for number in range(160)]
    states = [TrialState.COMPLETE] * 10 + [TrialState.PRUNED] * 150
    trials = [
        Ended(each, (number / 10,), state) for number, (each, state) in enumerate(zip(params, states, strict=True))
    ]
    found = importances_of(sweep, finished(sweep, trials).trials())
    assert found is not None and (found.num_best, found.num_complete) == (5, 10)


def test_optunas_warnings_stay_inside(tmp_path: Path) -> None:
    """One trial alone has a rate."""
    trials = [_trial(1) for _ in range(3)] + [
        Ended(_trial(4 * number + 1).params, (number / 10,)) for number in range(12)
    ]
    study = finished(read_sweep(tmp_path, parameters=PARAMETERS), [*trials, Ended(_trial(0).params, (0.4,))])
    assert _written(study)[1] == PNGS
