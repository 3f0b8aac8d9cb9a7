"""A signal to stop is only recorded. The training loop decides where the run ends."""

import os
import signal
from contextlib import suppress

import pytest

from utils.errors import UserError
from utils.run.stop import StopSignal

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


@pytest.fixture(autouse=True)
def _handlers_of_before() -> object:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_after_a_requested_stop_signals_are_ignored() -> None:
    """A second signal must not end a process that has left its loop and is closing down."""
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested()
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_IGN] * 3


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_recorded(number: signal.Signals) -> None:
    with StopSignal() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert stop.requested() and stop.name == number.name
    os.kill(os.getpid(), number)  # a signal during the close-down


def test_without_a_stop_the_handlers_are_restored() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with suppress(UserError), StopSignal():
        assert [signal.getsignal(number) for number in SIGNALS] != before
        raise UserError("lr is -1")
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_signal_after_a_fault_does_not_interrupt_its_report() -> None:
    with pytest.raises(RuntimeError), StopSignal():
        raise RuntimeError("a peer died")
    os.kill(os.getpid(), signal.SIGTERM)
