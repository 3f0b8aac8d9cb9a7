"""Show the progress of a run: a bar on a terminal, or a readable log."""

import sys
import time
from contextlib import suppress
from typing import Any, TextIO

from tqdm import tqdm

from records.metrics.sink import Row

_LINE_EVERY_S = 10.0  # in a redirected log
_TRAINING = (
    ("loss", "train/lm_loss", ".4f"),
    ("loss", "train/loss", ".4f"),
    ("acc", "train/accuracy", ".3f"),
    ("exact", "train/exact_accuracy", ".3f"),
    ("ex/s", "perf/examples_per_second", ".0f"),
    ("tok/s", "perf/tokens_per_second", ".0f"),
)
# What evaluations find besides: it would make the line too long.
_NOT_SHOWN = {"q_halt_accuracy", "steps", "halt_step", "lm_loss", "q_halt_loss", "num_examples", "num_answers"}


class Progress:
    """Shows a bar on a terminal, and else plain lines. Errors of the output must not end rank 0."""

    def __init__(self, first_step: int, last_step: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._first_step, self._last_step = first_step, last_step
        self._started, self._last_line = time.monotonic(), float("-inf")
        self._bar: tqdm[Any] = tqdm(
            total=last_step, initial=first_step, unit="step", file=self._stream, dynamic_ncols=True, disable=None
        )  # only on a terminal

    def advance(self, step: int) -> None:
        with suppress(OSError):
            self._bar.update(step - self._bar.n)

    def write(self, step: int, row: Row) -> None:
        text = "  ".join(f"{label} {row[name]:{form}}" for label, name, form in _TRAINING if name in row)
        if any(name.startswith("eval/") for name in row):
            self.say(f"step {step}/{self._last_step}  {_evaluation(row)}")
        if not text:
            return
        now = time.monotonic()
        if not self._bar.disable:
            self._bar.set_postfix_str(text, refresh=False)
        elif now - self._last_line >= _LINE_EVERY_S or step == self._last_step:
            self._last_line = now
            done = max(1, step - self._first_step)
            left = (now - self._started) / done * (self._last_step - step)
            self.say(f"step {step}/{self._last_step}  {text}  ETA {tqdm.format_interval(left)}")

    def say(self, text: str) -> None:
        """Show text with the time of day, above the bar if there is one."""
        text = f"{time.strftime('%H:%M:%S')}  {text}".replace("\n", "\n" + " " * len("00:00:00  "))
        with suppress(OSError):
            if not self._bar.disable:
                self._bar.write(text, file=self._stream)
            else:
                print(text, file=self._stream, flush=True)

    def close(self) -> None:
        with suppress(OSError):
            self._bar.close()


def _evaluation(row: Row) -> str:
    """Return the accuracies of the test sets in a row, and what evaluators found, as text."""
    parts = {name: name.split("/") for name in row if name.startswith("eval/")}
    shown = [name for name, of in parts.items() if len(of) == 3 and of[2] not in _NOT_SHOWN]
    first = ("exact_accuracy", "accuracy")
    order = sorted(shown, key=lambda name: (parts[name][1], *(parts[name][2] != each for each in first)))
    return "  ".join(f"{name} {row[name]:.4f}" for name in order)
