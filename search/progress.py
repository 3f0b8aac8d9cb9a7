"""Show how a sweep goes: a line for each trial, and a bar over all."""

import sys
import time
from contextlib import suppress
from typing import Any

from tqdm import tqdm

from search.report import Best


class Progress:
    """Prints a line for each trial that ends. On a terminal, a bar over all trials stands below.

    Errors of the output are ignored: a pipe without a reader must not end the sweep.
    """

    def __init__(self, num_trials: int, num_finished: int) -> None:
        self._total, self._num_before, self._began = num_trials, num_finished, time.monotonic()
        self._bar: tqdm[Any] | None = None
        if sys.stderr.isatty():
            tqdm.monitor_interval = 0  # its thread would live through the fork of each run
            self._bar = tqdm(
                total=num_trials,
                unit="trial",
                dynamic_ncols=True,
                bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt}{postfix}",
            )

    def show(self, num_finished: int, num_running: int, best: Best | None) -> None:
        """Move the bar to the number of trials that have ended, by any process."""
        if self._bar is None:
            return
        with suppress(OSError):
            self._bar.set_postfix_str(
                f"{num_running} running, best {best or 'none yet'}, {self._time_left(num_finished)}", refresh=False
            )
            self._bar.n = num_finished
            self._bar.refresh()

    def trial_ended(self, line: str, num_finished: int, best: Best | None) -> None:
        """Print the line of a trial."""
        if self._bar is None:
            line += f"  [{num_finished}/{self._total}, best {best or 'none yet'}, {self._time_left(num_finished)}]"
        self.say(line)

    def _time_left(self, num_finished: int) -> str:
        done = num_finished - self._num_before
        if done < 1:
            return "time left unknown"
        left = (time.monotonic() - self._began) / done * max(0, self._total - num_finished)
        return f"{tqdm.format_interval(round(left))} left"

    def say(self, text: str) -> None:
        with suppress(OSError):
            if self._bar is not None:
                self._bar.write(text, file=sys.stderr)
            else:
                print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()
