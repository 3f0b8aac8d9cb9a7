"""The plots of a sweep: which trials enter which figure, and that every sweep gives a page."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState

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


def _written(study: Study, folder: Path | None = None) -> tuple[str, list[str]]:
    """Return the text of the page without plotly.js, and the names of the pictures."""
    page, *pictures = map(Path, write_plots(study, folder).splitlines())
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    text = page.read_text()
    assert len(re.findall(r"plotly\.js v\d", text)) == bool(pictures)
    assert not re.search(r"<(?:script|link|img)[^>]*(?:src|href)=", text), "the page needs a network"
    return re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL), [picture.name for picture in pictures]


def test_a_sweep_with_pruned_trials_and_a_condition(tmp_path: Path) -> None:
    sweep = read_sweep(tmp_path, name="<i>mine", parameters=PARAMETERS, direction="minimize")
    study = finished(sweep, [_trial(number) for number in range(40)])
    text, pictures = _written(study, tmp_path / "deep" / "er")
    assert pictures == PNGS
    assert "Objective Value" not in (tmp_path / "deep/er/plots.html").read_text(), "an axis does not name the metric"
    value = min(trial.value or 0 for trial in study.trials() if trial.state == TrialState.COMPLETE)
    assert f"40 trials; the best of exact_accuracy: {value:.4f}" in text
    assert "<i>" not in text and "&lt;i&gt;mine" in text


def test_a_list_of_points_has_one_axis(tmp_path: Path) -> None:
    sweep = read_sweep(tmp_path, points=[{"lr": 1e-3}, {"ema": True}], sampler={"name": "grid"})
    trials = [Ended({"number of the point": number}, (number / 10,)) for number in range(2)]
    assert _written(finished(sweep, trials))[1] == PNGS[1:], "of two trials no key is more important than another"
    text, pictures = _written(finished(sweep, [Ended(trials[0].params, (), TrialState.FAIL)]))
    assert pictures == [] and text.count("nothing to draw") == len(PNGS)
    with pytest.raises(UserError, match="has begun yet"):
        write_plots(finished(sweep, []), None)
