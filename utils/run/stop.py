"""A graceful stop: the signal is only noted, and the loop ends after saving, on all ranks together."""

import signal
from types import FrameType

from utils.errors import UserError

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StopSignal:
    """Notes SIGTERM, SIGINT and SIGUSR1 while it is entered.

    A launcher may send one twice, or the terminal and torchrun one each, so a second one changes nothing, not even
    between the loop and the end of the process. Nor does one that comes after a fault: a launcher that saw another rank
    die sends SIGTERM to all the others, and would cut short what they have to say of it.
    """

    def __init__(self) -> None:
        self.name: str | None = None

    def __enter__(self) -> "StopSignal":
        self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _where: object) -> None:
        if error is not None and not isinstance(error, UserError):
            return  # noted and no more, until the report is out and the process is gone
        for number, handler in self._before.items():
            # Ignored, not noted: Python gives up handlers of its own before it is through with leaving.
            signal.signal(number, signal.SIG_IGN if self.requested() else handler)

    def requested(self) -> bool:
        return self.name is not None

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.name = signal.Signals(number).name
