"""A stop is noted, not obeyed: the loop decides where it ends."""

import os
import signal

import pytest

from utils.stop import StopSignal

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


@pytest.fixture(autouse=True)
def _handlers_of_before() -> object:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


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
