"""Events reach a web hook or a command, and no failure there reaches the run."""

import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from records.metrics import events
from records.metrics.events import Events


class Hook:
    """A local web hook, which may be slow or broken."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.status, self.takes_s = 200, 0.0
        hook = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                hook.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                time.sleep(hook.takes_s)
                self.send_response(hook.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}/hook"


@pytest.fixture
def hook() -> Iterator[Hook]:
    found = Hook()
    yield found
    found.server.shutdown()
    found.server.server_close()


@pytest.fixture
def said() -> list[str]:
    return []


def test_a_web_hook_gets_every_event_in_order(hook: Hook, said: list[str]) -> None:
    sent = Events(hook.address, "checkpoints/p/r", said.append)
    sent.tell("restarted", 4, "after a fault")
    sent.row(5)
    sent.tell("record", 5, "0.5")
    sent.close()
    assert [(body["event"], body["run"], body["step"], body["text"]) for body in hook.bodies] == [
        ("restarted", "checkpoints/p/r", 4, "after a fault"),
        ("record", "checkpoints/p/r", 5, "0.5"),
    ]
    assert abs(hook.bodies[0]["time"] - time.time()) < 60 and said == []


def test_a_command_gets_an_event_on_its_stdin(tmp_path: Path, said: list[str]) -> None:
    sent = Events(f"cat >> {tmp_path}/got", "r", said.append)
    sent.tell("ended", 9, "done")
    sent.close()
    assert json.loads((tmp_path / "got").read_text())["text"] == "done" and said == []


@pytest.mark.parametrize("broken", ["status", "absent", "command"])
def test_a_failure_is_said_once(hook: Hook, said: list[str], broken: str) -> None:
    hook.status = 500
    where = {"status": hook.address, "absent": "http://127.0.0.1:9/", "command": "exit 3"}[broken]
    sent = Events(where, "r", said.append)
    for _ in range(3):
        sent.tell("record", 1, "")
    sent.close()
    assert len(said) == 1, said
    assert len(hook.bodies) == (3 if broken == "status" else 0)


def test_a_slow_hook_holds_nobody_up(hook: Hook, said: list[str]) -> None:
    hook.takes_s = 2.0
    sent, began = Events(hook.address, "r", said.append), time.monotonic()
    for step in range(200):
        sent.row(step)
        sent.tell("record", 1, "")
    sent.close(at_most_s=0.1)
    assert time.monotonic() - began < 1.5
    assert len(said) == 1, "an event that finds no place is lost, and this is said"


def test_a_silent_run_is_told_once(hook: Hook, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "_LEAST_SILENT_S", 0.0)
    sent = Events(hook.address, "r", said.append)
    for step in range(5):
        time.sleep(0.05)
        sent.row(step)
    end = time.monotonic() + 10
    while not hook.bodies and time.monotonic() < end:
        time.sleep(0.05)
    time.sleep(1.5)
    sent.close()
    assert [(body["event"], body["step"]) for body in hook.bodies] == [("silent", 4)]
