"""The lines and the bar of a sweep."""

import io
from types import SimpleNamespace

import pytest
from optuna.trial import FrozenTrial, TrialState, create_trial

from search.progress import Progress
from search.report import Best

BEST = Best(3, 0.75, {0: 0.75}, {})


def _trials(num_finished: int, num_running: int = 0) -> list[FrozenTrial]:
    states = [TrialState.FAIL] * num_finished + [TrialState.RUNNING] * num_running
    return [create_trial(state=state) for state in states]


def test_the_time_left_counts_the_trials_of_this_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six of ten trials had ended before it. Then each takes 30 seconds."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("search.progress.time.monotonic", lambda: clock.now)
    progress = Progress(10, _trials(6))
    for num_finished, best in ((6, BEST), (7, BEST), (8, None)):
        progress.trial_ended("trial", _trials(num_finished), best)
        clock.now += 30
    progress.trial_ended("trial", _trials(12), BEST)
    assert capsys.readouterr().err.splitlines() == [
        "trial  [6/10, best 0.7500 (trial 3), time left unknown]",
        "trial  [7/10, best 0.7500 (trial 3), 01:30 left]",
        "trial  [8/10, best none yet, 01:00 left]",
        "trial  [12/10, best 0.7500 (trial 3), 00:00 left]",
    ]


def test_on_a_terminal_a_bar_stands_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", terminal)
    progress = Progress(10, _trials(6))
    progress.trial_ended("trial 6: done", _trials(7, num_running=2), BEST)
    progress.close()
    shown = terminal.getvalue()
    assert "7/10, 2 running, best 0.7500 (trial 3), 00:00 left" in shown and "trial 6: done\n" in shown
