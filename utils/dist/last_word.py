"""Say a mistake of the user once more after torchrun's report, so that it is the last line."""

import socket
import subprocess
from contextlib import suppress

from utils.dist.launch import Launch

_CONNECT_S = 1.0


def repeat_after_torchrun(line: str, launch: Launch) -> None:
    """Leave a process behind that prints a line on stderr when torchrun has printed its report.

    torchrun reports in some forty lines that ranks have ended, and not why. It keeps the store in
    which the ranks meet until it has printed the report, and closes it before it ends. So the
    process waits for the end of a connection to the store. Without torchrun, before a restart, and
    where the store can't be reached, nothing is left behind: the line was printed before.
    """
    if not launch.is_elastic or launch.restarts < launch.max_restarts or launch.host is None:
        return
    with suppress(OSError), socket.create_connection((launch.host, launch.port or 0), timeout=_CONNECT_S) as store:
        store.setblocking(True)
        subprocess.Popen(
            ["sh", "-c", 'cat > /dev/null; printf "%s\\n" "$1" >&2', "sh", line],
            stdin=store.fileno(),
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # torchrun ends the session of a rank
        )
