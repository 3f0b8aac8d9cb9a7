"""A signal to stop is only recorded. The training loop decides where the run ends."""

import os
import signal
from contextlib import suppress

import pytest

from utils.errors import UserError
from utils.stop import StopSignal

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


@pytest.fixture(autouse=True)
def _handlers_of_before() -> object:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_recorded(number: signal.Signals) -> None:
    """A second signal must not end a process that has left its loop and is closing down."""
    with StopSignal() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert stop.requested() and stop.name == number.name
    assert [signal.getsignal(each) for each in SIGNALS] == [signal.SIG_IGN] * 3


def test_without_a_stop_the_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with suppress(UserError), StopSignal():
        assert [signal.getsignal(number) for number in SIGNALS] != before
        raise UserError("lr is -1")
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1, "later signals are written into a file that was closed"
    with suppress(RuntimeError), StopSignal():
        raise RuntimeError("a peer died")
    os.kill(os.getpid(), signal.SIGTERM)  # does not interrupt the report of a fault
