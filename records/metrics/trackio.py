"""Log a run with Trackio, which keeps curves on this machine: an optional package."""

import threading
from typing import Any

from records.metrics.sink import Row, Sink
from utils.errors import UserError
from utils.text import one_line


class Trackio(Sink):
    """Logs metrics. A resumed run goes on under its name, with repeated steps shown twice.

    Args:
        named: the name, project and config of the run.
    """

    name = "Trackio"

    def __init__(self, named: dict[str, Any]) -> None:
        try:
            import trackio
        except ImportError as error:
            raise UserError(
                "trackio=true, but Trackio isn't installed; pip install -r requirements-trackio.txt, or trackio=false"
            ) from error
        own = {key: named[key] for key in ("project", "name", "config")}
        try:
            self._run = trackio.init(**own, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)
        except Exception as error:  # whatever its settings and its files cause
            raise UserError(f"trackio=true failed: {one_line(error)}; correct it, or trackio=false") from error

    def write(self, step: int, row: Row) -> None:
        self._run.log(dict(row), step=step)

    def close(self, *, failed: bool, at_most_s: float | None) -> None:
        thread = threading.Thread(target=self._run.finish, daemon=True)
        thread.start()
        thread.join(at_most_s)
