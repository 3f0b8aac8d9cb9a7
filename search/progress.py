"""Show how a sweep goes: a line for each trial, and a bar over all."""

import sys
import time
from collections.abc import Sequence
from typing import Any

from optuna.trial import FrozenTrial, TrialState
from tqdm import tqdm

from search.report import Best
from search.study import FINISHED
from utils.terminal import tell


class Progress:
    """Prints a line for each trial that ends. On a terminal, a bar over all trials stands below."""

    def __init__(self, num_trials: int, trials: Sequence[FrozenTrial]) -> None:
        self._total, self._num_before, self._began = num_trials, _num_finished(trials), time.monotonic()
        self._bar: tqdm[Any] | None = None
        if sys.stderr.isatty():
            tqdm.monitor_interval = 0  # its thread would live through the fork of each run
            bar = "{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}"
            self._bar = tqdm(total=num_trials, unit="trial", dynamic_ncols=True, bar_format=bar)

    def show(self, trials: Sequence[FrozenTrial], best: Best | None) -> None:
        """Move the bar to the number of trials that have ended, in any process."""
        if self._bar is not None:
            running = sum(trial.state == TrialState.RUNNING for trial in trials)
            self._bar.set_postfix_str(f"{running} running, {self._outlook(trials, best)}", refresh=False)
            self._bar.n = _num_finished(trials)
            self._bar.refresh()

    def trial_ended(self, line: str, trials: Sequence[FrozenTrial], best: Best | None) -> None:
        """Print the line of a trial."""
        if self._bar is None:
            line += f"  [{_num_finished(trials)}/{self._total}, {self._outlook(trials, best)}]"
        self.say(line)
        self.show(trials, best)

    def _outlook(self, trials: Sequence[FrozenTrial], best: Best | None) -> str:
        num_finished, left = _num_finished(trials), "time left unknown"
        if num_finished > self._num_before:
            of_trial = (time.monotonic() - self._began) / (num_finished - self._num_before)
            left = f"{tqdm.format_interval(round(of_trial * max(0, self._total - num_finished)))} left"
        return f"best {best or 'none yet'}, {left}"

    def say(self, text: str) -> None:
        """Print a line."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            tell(text)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def _num_finished(trials: Sequence[FrozenTrial]) -> int:
    return sum(trial.state in FINISHED for trial in trials)
