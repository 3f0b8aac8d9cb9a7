"""Tell a web hook or a command what happens to a run (on_event)."""

import json
import queue
import subprocess
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

# A run without a row for so many times the usual gap is silent.
_SILENT_GAPS, _LEAST_SILENT_S = 10, 60.0
_PATIENCE_S = 10.0  # for one event
_MOST_WAITING = 100


class _Refused(Exception):
    """A command ended with another status than 0."""


class Events:
    """Sends each event as JSON: {"event", "run", "step", "time", "text"}, with a Unix time.

    The events are restarted, record, not_finite, silent, stopped, ended and failed. A thread sends
    them, so that no step waits. The first failure is said, and no further one.

    Args:
        where: a URL, to which JSON is posted, or a shell command, which gets it on its stdin.
    """

    def __init__(self, where: str, run: str, say: Callable[[str], None]) -> None:
        self._where, self._run, self._say = where, run, say
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(_MOST_WAITING)
        self._gaps, self._last_row, self._last_step = deque[float](maxlen=200), time.monotonic(), 0
        self._is_silent = self._has_failed = False
        self._thread = threading.Thread(target=self._send_all, name="events", daemon=True)
        self._thread.start()

    def tell(self, event: str, step: int, text: str) -> None:
        found = {"event": event, "run": self._run, "step": step, "time": time.time(), "text": text}
        try:
            self._waiting.put_nowait(found)
        except queue.Full:
            self._note("too many events wait")

    def row(self, step: int) -> None:
        """Note that the run is alive: it logs the row of a step."""
        now = time.monotonic()
        self._gaps.append(now - self._last_row)
        self._last_step, self._last_row, self._is_silent = step, now, False

    def close(self, at_most_s: float = _PATIENCE_S) -> None:
        """Wait for the events that were not sent yet."""
        try:
            self._waiting.put(None, timeout=at_most_s)
        except queue.Full:
            return
        self._thread.join(at_most_s)

    def _send_all(self) -> None:
        while True:
            try:
                event = self._waiting.get(timeout=1.0)
            except queue.Empty:
                self._look_for_silence()
                continue
            if event is None:
                return
            try:
                self._send(json.dumps(event).encode())
            except Exception as error:  # whatever a web hook or a command does must not end the run
                self._note(error if isinstance(error, _Refused) else type(error).__name__)  # others may quote a secret

    def _look_for_silence(self) -> None:
        silent_s = time.monotonic() - self._last_row
        if not self._gaps or self._is_silent:
            return
        # The longest gap was an evaluation.
        if silent_s > max(_LEAST_SILENT_S, _SILENT_GAPS * median(self._gaps), 2 * max(self._gaps)):
            self._is_silent = True
            self.tell("silent", self._last_step, f"no row for {silent_s:.0f} s")

    def _send(self, body: bytes) -> None:
        if self._where.startswith(("http://", "https://")):
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(self._where, data=body, headers=headers)
            with urllib.request.urlopen(request, timeout=_PATIENCE_S):
                return
        done = subprocess.run(self._where, shell=True, input=body, capture_output=True, timeout=_PATIENCE_S)
        if done.returncode:
            raise _Refused(f"status {done.returncode}")

    def _note(self, problem: object) -> None:
        if not self._has_failed:
            self._has_failed = True
            self._say(f"on_event does not take an event ({problem}); further failures are not said")
