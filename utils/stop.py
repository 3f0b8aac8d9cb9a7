"""A graceful stop: a signal is only noted, and the loop saves and ends on all ranks together."""

import os
import signal
import time
from threading import Thread
from types import FrameType

from utils.errors import UserError
from utils.terminal import tell

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_ONE_REQUEST_S = 1.0


class StopSignal:
    """A context manager that notes SIGTERM, SIGINT and SIGUSR1 instead of ending the process.

    A second signal changes nothing, because launchers may send a signal twice. A signal after a
    fault changes nothing either, because a launcher that saw one rank die sends SIGTERM to all
    others, which have to print their reports.

    Args:
        answer: the line that answers the first signal at once; empty: this rank says nothing.
        may_end: whether nothing would be lost, so that Ctrl-C a second later ends the process.
    """

    def __init__(self, answer: str = "", *, may_end: bool = False) -> None:
        self.name: str | None = None
        self.answer, self.may_end = answer, may_end

    def __enter__(self) -> "StopSignal":
        # Python calls a handler between two instructions of the main thread, which come minutes
        # apart while that compiles. It writes the signal's number into this pipe at once.
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        Thread(target=self._answer_signals, args=(reading,), name="signals", daemon=True).start()
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        if error is not None and not isinstance(error, UserError):
            return  # signals stay harmless until the process has printed its report and ended
        for number, handler in self._before.items():
            # After a stop signals are ignored, not noted: an exiting Python drops its own handlers
            # before the process ends.
            signal.signal(number, signal.SIG_IGN if self.requested() else handler)
        signal.set_wakeup_fd(-1)  # not what was set before: a forked process has no such descriptor
        os.close(self._writing)  # which ends the thread

    def requested(self) -> bool:
        return self.name is not None

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name

    def _answer_signals(self, reading: int) -> None:
        first_at: float | None = None
        with open(reading, "rb", buffering=0) as numbers:
            while number := numbers.read(1):
                if number[0] not in _SIGNALS:  # of a handler that somebody else has set
                    continue
                may_end, now = self.may_end and number[0] == signal.SIGINT, time.monotonic()
                if first_at is None:
                    first_at = now
                    if self.answer:
                        name = signal.Signals(number[0]).name
                        tell(f"{name}: {self.answer}{'; again to end now' if may_end else ''}")
                elif may_end and now - first_at > _ONE_REQUEST_S:
                    os._exit(128 + signal.SIGINT)
