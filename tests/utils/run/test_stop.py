"""A stop is noted, not obeyed: the loop decides where it ends."""

import os
import signal

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


def test_signals_are_ignored_once_a_stop_was_asked_for() -> None:
    """A second signal must not end a process that is through with its loop and is leaving."""
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested()
    assert [signal.getsignal(number) for number in SIGNALS] == [signal.SIG_IGN] * 3


@pytest.mark.parametrize("number", SIGNALS)
def test_signal_is_noted(number: signal.Signals) -> None:
    with StopSignal() as stop:
        assert not stop.requested()
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert stop.requested() and stop.name == number.name
    os.kill(os.getpid(), number)  # one that comes while the process is leaving


def test_handlers_are_put_back_where_nobody_asked() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopSignal():
        assert [signal.getsignal(number) for number in SIGNALS] != before
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_signal_after_a_fault_does_not_cut_its_report_short() -> None:
    with pytest.raises(RuntimeError), StopSignal():
        raise RuntimeError("a peer died")
    os.kill(os.getpid(), signal.SIGTERM)


def test_handlers_are_put_back_after_a_mistake() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with pytest.raises(UserError), StopSignal():
        raise UserError("lr is -1")
    assert [signal.getsignal(number) for number in SIGNALS] == before
