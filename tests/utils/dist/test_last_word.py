"""The line of a mistake stands below torchrun's report, and only once for all attempts."""

import socket
import time
from dataclasses import replace

import pytest

from utils.dist.last_word import repeat_after_torchrun
from utils.dist.launch import Launch

LINE = "error: 'x' is $HOME `no` %s override\\n"


def _elastic(port: int) -> Launch:
    return Launch(launcher="torchrun", size=2, host="127.0.0.1", port=port, is_elastic=True)


def test_the_line_is_printed_when_torchrun_closes_its_store(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        repeat_after_torchrun(LINE, _elastic(store.getsockname()[1]))
        connection, _ = store.accept()
        time.sleep(0.2)
        assert capfd.readouterr().err == ""
        connection.close()
    end, printed = time.monotonic() + 20, ""
    while not printed and time.monotonic() < end:
        time.sleep(0.02)
        printed = capfd.readouterr().err
    assert printed == f"{LINE}\n"


def test_nothing_is_left_behind_where_nothing_follows_the_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as store:
        store.settimeout(0.2)
        launch = _elastic(store.getsockname()[1])
        for other in (replace(launch, is_elastic=False), replace(launch, max_restarts=1), replace(launch, host=None)):
            repeat_after_torchrun(LINE, other)
            with pytest.raises(TimeoutError):
                store.accept()
    repeat_after_torchrun(LINE, launch)  # the store is gone
