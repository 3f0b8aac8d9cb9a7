"""A Hugging Face Hub for tests: a server on this machine that keeps what is uploaded.

It answers what huggingface_hub asks in order to make a repository, to commit small files to it, and
to download one. It is no model of the rest.
"""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

TOKEN = "hf_of_the_tests"
_COMMIT = "0" * 40


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)  # of the commits


@dataclass
class Hub:
    """The server. An owner other than `me` refuses the token."""

    address: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        """The variables that lead huggingface_hub here."""
        return {"HF_ENDPOINT": self.address, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_TELEMETRY": "1"}


@contextmanager
def hub() -> Iterator[Hub]:
    """Give a running server, and stop it at the end."""
    served = Hub()
    handler = type("Handler", (_Handler,), {"hub": served})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        served.address = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: Any) -> None:  # otherwise each request is a line on stderr
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._answer(401, {"error": "Invalid username or password."})
        elif self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif self.path.endswith("/preupload/main"):
            files = [file | {"uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            self._answer(200, {"files": files})
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", self.path):
            self._commit(found[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._answer(404, {"error": f"no such path: {self.path}"})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if (name := self.path.removeprefix("/api/models/")) in self.hub.repositories:
            self._answer(200, {"id": name, "private": self.hub.repositories[name].private})
            return
        found = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.path)
        repository = self.hub.repositories.get(found[1]) if found else None
        if found is None or repository is None or found[2] not in repository.files:
            self._answer(404, {"error": "Entry not found"}, **{"X-Error-Code": "EntryNotFound"})
            return
        self._answer(200, repository.files[found[2]], **{"ETag": '"1"', "X-Repo-Commit": _COMMIT})

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked.get('organization', 'me')}/{asked['name']}"
        if not name.startswith("me/"):
            self._answer(403, {"error": "You don't have the rights to create a model under this namespace"})
            return
        is_new = name not in self.hub.repositories
        private = asked.get("visibility") == "private" or asked.get("private", False)
        self.hub.repositories.setdefault(name, Repository(private))
        self._answer(200 if is_new else 409, {"url": f"{self.hub.address}/{name}", "error": "" if is_new else "exists"})

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        repository = self.hub.repositories[name]
        for line in lines:
            if line["key"] == "header":
                repository.messages.append(line["value"]["summary"])
            else:
                repository.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        url = f"{self.hub.address}/{name}/commit/{_COMMIT}"
        self._answer(200, {"commitUrl": url, "commitOid": _COMMIT, "success": True})

    def _answer(self, status: int, contents: dict[str, Any] | bytes, **headers: str) -> None:
        body = contents if isinstance(contents, bytes) else json.dumps(contents).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(contents, bytes) else "application/json"
        for name, value in (headers | {"Content-Type": kind, "Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
