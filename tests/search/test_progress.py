"""The lines and the bar of a sweep."""

import io
from types import SimpleNamespace

import pytest

from search.progress import Progress
from search.report import Best

BEST = Best(3, 0.75, {0: 0.75}, {})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return a clock that stands still; `now` is its time."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr("search.progress.time.monotonic", lambda: clock.now)
    return clock


def test_the_time_left_counts_the_trials_of_this_start(
    clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """Six of ten trials had ended before it. Then each takes 30 seconds."""
    progress = Progress(10, 6)
    clock.now += 30
    progress.trial_ended("trial 6: done", 7, BEST)
    clock.now += 30
    progress.trial_ended("trial 7: done", 8, None)
    assert capsys.readouterr().err.splitlines() == [
        "trial 6: done  [7/10, best 0.7500 (trial 3), 01:30 left]",
        "trial 7: done  [8/10, best none yet, 01:00 left]",
    ]


def test_without_an_ended_trial_no_time_is_known(clock: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(10, 6)
    clock.now += 30
    progress.trial_ended("trial 6: failed", 6, BEST)
    progress.trial_ended("trial 7: done", 12, BEST)
    first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("time left unknown]") and second.endswith("00:00 left]"), "more trials than were asked for"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_bar_stands_below_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = Progress(10, 6)
    progress.show(7, 2, BEST)
    progress.trial_ended("trial 6: done", 7, BEST)
    progress.close()
    shown = terminal.getvalue()
    assert "7/10, 2 running, best 0.7500 (trial 3), 00:00 left" in shown and "trial 6: done\n" in shown


def test_a_closed_pipe_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(_Terminal):
        broken = False

        def write(self, text: str) -> int:
            if self.broken:
                raise BrokenPipeError
            return super().write(text)

    terminal = Closed()
    monkeypatch.setattr("sys.stderr", terminal)
    progress = Progress(10, 0)
    terminal.broken = True
    progress.show(1, 1, None)
    progress.say("a line")
    progress.close()
