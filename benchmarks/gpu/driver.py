"""Run the parts, each as a process with a time limit, and keep on disk what they found.

A part that fails, hangs or is killed ends alone. The driver itself may be killed at any moment: the
next call goes on with the part at which it was.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.gpu.origin import REPOSITORY, Origin, is_other_machine
from benchmarks.gpu.parts import ACCURACY, LOG, RESULT, Part
from utils.files import write_atomically
from utils.processes import ending_with_parent

STATE = "state.json"
# What a part gets between SIGTERM and SIGKILL. A run saves a checkpoint in this time.
_GRACE_S = 20.0
# Measurements take at most this share of the time, and training to an accuracy takes the rest.
MEASURING = 0.6
_MOST_DEATHS = 2
_SPLITS = (2, 4, 8)
OUT_OF_MEMORY = re.compile("out of memory", re.IGNORECASE)
_ERROR = re.compile(r"(E\s+)?(error: |fault on rank |\w+(\.\w+)*(Error|Exception)\b)")

DONE, FAILED, TOO_LONG, CUT_OFF, RUNNING = "done", "failed", "took too long", "cut off", "running"
WITHOUT_DATA, NO_TIME = "has no data", "no time left"
_UNFINISHED = (TOO_LONG, CUT_OFF)


@dataclass
class Record:
    """What became of a part.

    Attributes:
        seconds: how long it took. While it is not over, that is its longest attempt, because each
            begins anew. A run that trains to an accuracy goes on: its attempts are summed.
        note: why it failed, or what had to be changed.
        deaths: how often the driver was killed meanwhile. A part that brings a machine down is not
            tried for ever.
        commit, machine: what it was measured of; empty if it was not begun.
    """

    status: str
    seconds: float = 0.0
    note: str = ""
    deaths: int = 0
    commit: str = ""
    machine: str = ""


class Stopped(Exception):
    """Somebody asked the driver to stop."""


def read_records(output: Path) -> dict[str, Record] | None:
    """Return what became of the parts in earlier calls; None if that can't be read."""
    try:
        stored = json.loads((output / STATE).read_text(encoding="utf-8"))
        return {key: Record(**record) for key, record in stored.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError):  # half a file, or other keys than ours
        return None


def set_aside(output: Path, origin: Origin) -> Path | None:
    """Move the results of another machine to a folder beside theirs, and return that folder.

    The figures of two cards, or of two versions of PyTorch, make no common report.
    """
    records = (read_records(output) or {}).values()
    machines = {record.machine for record in records if record.machine or record.seconds}
    others = {machine for machine in machines if is_other_machine(machine, origin.machine)}
    if not others:
        return None
    name = f"{output.name}-{re.sub('[^a-zA-Z0-9.]+', '-', min(others) or 'unknown')}"
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    aside = next(output.with_name(each) for each in names if not output.with_name(each).exists())
    output.rename(aside)
    return aside


class Driver:
    """Runs parts, and remembers in a file what became of each.

    Args:
        origin: what is measured. A part that another commit has measured is not measured again, but
            one that failed is tried again. The report names the commits.
        tell: shows a line of progress.
        report: is called after each part.
    """

    def __init__(
        self,
        parts: list[Part],
        output: Path,
        origin: Origin,
        tell: Callable[[str], None],
        report: Callable[["Driver"], None],
    ) -> None:
        self.parts, self.output, self._origin, self._tell, self._report = parts, output, origin, tell, report
        records = read_records(output)
        if records is None:
            tell(f"{STATE} in {os.path.relpath(output)} can't be read, so every part is measured anew")
        self.records = records or {}
        for record in self.records.values():
            if record.status == RUNNING:  # the driver was killed
                record.status, record.deaths = CUT_OFF, record.deaths + 1
        self.grace_s = _GRACE_S

    def run(self, seconds: float, first: str | None = None) -> None:
        """Run the parts that are not over, in this time.

        Args:
            first: begin with this part. It and those behind it are measured again, except a run
                that trains to an accuracy, which goes on.

        Raises:
            Stopped: Somebody asked for it. The part at which the driver was is cut off.
        """
        ends = time.monotonic() + seconds
        has_run = any(part.share is None for part in self.parts)
        measuring_s = seconds * (MEASURING if has_run else 1)
        measuring_ends = ends - seconds + measuring_s
        keys = [part.key for part in self.parts]
        begun = self.parts[keys.index(first) if first is not None else 0 :]
        needed = {part.needs for part in begun}
        before = [part for part in self.parts if part.key in needed and part not in begun]  # data, if not done yet
        if first is not None:
            for part in begun:
                if part.key != ACCURACY:
                    self.records.pop(part.key, None)
                    for name in (RESULT, LOG):
                        (self.output / part.key / name).unlink(missing_ok=True)
        own_s = {
            part.key: max(part.share * measuring_s, part.least_s)
            for part in (*before, *begun)
            if part.share is not None
        }
        # What was not over in its own time gets twice the time of its longest attempt, but takes
        # none from what was not tried yet.
        slow = {key for key, seconds in own_s.items() if self._had_its_time(key, seconds)}
        late = [part for part in begun if part.key in slow - needed]
        runs = [part for part in begun if part.share is None]
        for part in (*before, *(part for part in begun if part not in late + runs), *late, *runs):
            self._tell(f"[{1 + keys.index(part.key)}/{len(keys)}] {part.title}")
            if part.share is None:
                self._run_part(part, ends - time.monotonic() - self.grace_s, None)
            else:
                doubled_s = 2 * self.records[part.key].seconds if part.key in slow else 0.0
                self._run_part(part, measuring_ends - time.monotonic(), max(own_s[part.key], doubled_s))

    def _had_its_time(self, key: str, own_s: float) -> bool:
        """Say whether a part is not over although it had its own time."""
        record = self.records.get(key, Record(NO_TIME))
        return record.status == TOO_LONG or (record.status == CUT_OFF and record.seconds >= own_s)

    def _run_part(self, part: Part, left_s: float, own_s: float | None) -> None:
        """Run a part unless it is over, and write down what became of it.

        Args:
            left_s: the time that is left for it and for those behind it.
            own_s: what it may take of that.
        """
        before, commit = self.records.get(part.key, Record(NO_TIME)), self._origin.commit
        if before.commit != commit and before.status in (FAILED, TOO_LONG):
            before = replace(before, status=NO_TIME, note="", deaths=0)  # the change may have mended it
        limit_s, goes_on = min(left_s, own_s or left_s), part.share is None
        if before.status in (DONE, FAILED):
            return self._tell(f"    {before.status} before{f', with {before.commit}' * (before.commit != commit)}")
        earlier_s = 0.0
        if before.status in _UNFINISHED and (goes_on or before.commit == commit):
            earlier_s = before.seconds
        if not goes_on and earlier_s and limit_s <= earlier_s:  # it would lose what the longer attempt has found
            left = f"{max(limit_s, 0):.0f} s are left"
            return self._tell(f"    {before.status} before, after {earlier_s:.0f} s; {left}: give more --minutes")
        if before.deaths >= _MOST_DEATHS and part.key != ACCURACY:
            before.status, before.note = FAILED, f"this program was killed {before.deaths} times during it"
            return self._end(part, before)
        needed = DONE if part.needs is None else self._status(part.needs)
        if needed in (FAILED, TOO_LONG):
            return self._end(part, Record(WITHOUT_DATA, note=f"needs the part {part.needs}"))
        if needed != DONE or left_s < part.least_s:
            return self._end(part, Record(NO_TIME) if before.status == WITHOUT_DATA else before)
        if part.key == ACCURACY and before.commit:  # the run goes on
            commit = before.commit if before.commit.endswith(commit) else f"{before.commit}, then {commit}"
        record = Record(RUNNING, earlier_s, "", before.deaths, commit, self._origin.machine)
        self.records[part.key] = record
        self._write()
        began = time.monotonic()
        try:
            record.status, record.note = self._attempts(part, limit_s, own_s)
        except BaseException:
            record.status = CUT_OFF
            raise
        finally:
            took_s = time.monotonic() - began
            if goes_on:
                record.seconds = earlier_s + took_s
            else:
                record.seconds = max(earlier_s, took_s) if record.status in _UNFINISHED else took_s
            self._end(part, record)

    def _attempts(self, part: Part, limit_s: float, own_s: float | None) -> tuple[str, str]:
        """Run a part, in smaller pieces if memory runs out. Return its status and a note."""
        ends, note = time.monotonic() + limit_s, ""
        for split in (1, *(_SPLITS if part.may_split else ())):
            command = part.command if split == 1 else [*part.command, f"grad_accumulation={split}"]
            said = "" if split == 1 else f"memory ran out until grad_accumulation={split}"
            left_s = ends - time.monotonic()
            status = run_process(command, self.output / part.key, left_s, part.environment, self.grace_s)
            if status == 0:
                return DONE, said
            if status is None:  # its own limit was over, or that of all parts
                return (TOO_LONG if own_s is not None and limit_s >= own_s else CUT_OFF), said
            log = (self.output / part.key / LOG).read_text(errors="replace")
            note = "; ".join(filter(None, [said, _reason(log, status)]))
            if not OUT_OF_MEMORY.search(log) or ends - time.monotonic() < part.least_s:
                break
        return FAILED, note

    def _status(self, key: str) -> str:
        return self.records[key].status if key in self.records else NO_TIME

    def _end(self, part: Part, record: Record) -> None:
        self.records[part.key] = record
        self._write()
        seconds = f" after {record.seconds:.0f} s" if record.seconds else ""
        self._tell(f"    {record.status}{seconds}{': ' * bool(record.note)}{record.note}")
        try:
            self._report(self)
        except Exception:  # time on a card is dear: a fault of the report costs no measurement
            self._tell(traceback.format_exc())

    def _write(self) -> None:
        self.output.mkdir(parents=True, exist_ok=True)
        records = {key: asdict(record) for key, record in self.records.items()}
        write_atomically(self.output / STATE, json.dumps(records, indent=1) + "\n")


def run_process(
    command: list[str], folder: Path, limit_s: float, environment: dict[str, str], grace_s: float
) -> int | None:
    """Run a command in a session of its own, with its output in the folder's log.

    Returns:
        Its exit status; None if it was still running after the limit and had to be ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULT).unlink(missing_ok=True)  # an earlier one is no result of this command
    with open(folder / LOG, "w", encoding="utf-8") as log:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=ending_with_parent(signal.SIGTERM),
        )
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_session(process, grace_s)


def _end_session(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """End what is left of a session: ask first, and kill what does not listen."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also what the process has left behind
    with suppress(subprocess.TimeoutExpired):  # a driver of a card that hangs may hold a process
        process.wait(grace_s)


def _reason(log: str, status: int) -> str:
    """Return the line of the log that says most about a failure."""
    ended = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    said = last_error(log) or (lines or ["it printed nothing"])[-1]
    return f"{ended}: {said[:300]}"


def last_error(log: str) -> str:
    """Return the last line of a log that tells an error; empty if none does."""
    lines = (line.strip() for line in reversed(log.splitlines()))
    return next((line.removeprefix("E ").strip() for line in lines if _ERROR.match(line)), "")
