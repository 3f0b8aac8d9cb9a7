"""A graceful stop: a signal is only noted, and the loop saves and ends on all ranks together."""

import signal
from types import FrameType

from utils.errors import UserError

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignal:
    """A context manager that notes SIGTERM, SIGINT and SIGUSR1 instead of ending the process.

    A second signal changes nothing, not even between the loop and the end of the process. Launchers
    may send a signal twice, and the terminal and torchrun may send one each. A signal after a fault
    changes nothing either. A launcher that saw one rank die sends SIGTERM to all others, which
    would end them before they have printed their reports.
    """

    def __init__(self) -> None:
        self.name: str | None = None

    def __enter__(self) -> "StopSignal":
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        if error is not None and not isinstance(error, UserError):
            return  # signals stay harmless until the process has printed its report and ended
        for number, handler in self._before.items():
            # After a stop signals are ignored, not noted: an exiting Python drops its own handlers
            # before the process ends.
            signal.signal(number, signal.SIG_IGN if self.requested() else handler)

    def requested(self) -> bool:
        return self.name is not None

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
