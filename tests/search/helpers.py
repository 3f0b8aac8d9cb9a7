"""Sweeps without training: a launcher whose runs write their metrics at once, step by step."""

import json
import math
from collections.abc import Callable
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser

from records.folder import Launched
from search.launchers import ProcessLauncher, SeedRun
from search.sweep import Sweep

# What a run logs at a step; None: it fails there.
Curve = Callable[[dict[str, object], int], float | None]


def sweep_of(data: Path, folder: Path, *typed: str) -> Sweep:
    """Return a sweep over tiny runs, in a folder of its own."""
    tiny = [f"data_path={data}", "debug=tiny", "device=cpu", f"sweep.path={folder}"]
    at_once = [] if any("launcher" in each for each in typed) else ["sweep.launcher.at_once=1"]
    return Sweep.read([*tiny, *at_once, *typed])


class FakeJob:
    """A run that writes one row whenever it is polled."""

    def __init__(self, launcher: "FakeLauncher", arguments: list[str], log: Path) -> None:
        parsed = OverridesParser.create().parse_overrides(arguments)
        self.keys: dict[str, object] = {each.key_or_group: each.value() for each in parsed}
        self.folder = Path(str(self.keys["checkpoint_path"]))
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "stopped").unlink(missing_ok=True)
        Launched(last_step=launcher.last_step, ranks=1, device="cpu", host="here").write(self.folder)
        self._launcher, self._log = launcher, log
        self._status: int | None = None
        self._file = self.folder / "metrics.jsonl"
        self._file.touch()
        self._step = len(self._file.read_text().splitlines())

    def poll(self) -> int | None:
        if self._status is None:
            self._advance()
        return self._status

    def _advance(self) -> None:
        launcher = self._launcher
        if self._step == launcher.last_step:
            self._end(0)
            return
        self._step += 1
        launcher.ticks += 1
        value = launcher.curve(self.keys, self._step)
        if value is None:
            with open(self._log, "a") as log:
                log.write(launcher.last_words)
            self._end(1)
            return
        with open(self._file, "a") as file:
            file.write(json.dumps({"step": self._step, "time_s": 10.0 * self._step, launcher.metric: value}) + "\n")

    def terminate(self) -> None:
        if self._status is None:
            (self.folder / "stopped").write_text("SIGTERM\n")
            self._end(0)

    def kill(self) -> None:
        self._end(-9)

    def _end(self, status: int) -> None:
        self._status = status
        self._launcher.running.pop(self.folder, None)


class FakeLauncher(ProcessLauncher):
    """Starts fake runs, and notes what was started."""

    def __init__(self, curve: Curve, *, last_step: int = 4) -> None:
        self.curve, self.last_step = curve, last_step
        self.metric = "eval/all/exact_accuracy"
        self.last_words = "error: the ceiling fell down\n"  # of a run that fails
        self.started: list[str] = []
        self.running: dict[Path, int] = {}  # the place of each run
        self.most_running = self.ticks = 0

    def start(self, runs: list[SeedRun]) -> None:
        for run in runs:
            run.log.touch()
            run.job = job = FakeJob(self, run.arguments, run.log)
            self.started.append(job.folder.name)
            assert run.place not in self.running.values(), "two runs have one place, and so one device"
            self.running[job.folder] = run.place
            self.most_running = max(self.most_running, len(self.running))


def rising(keys: dict[str, object], step: int) -> float:
    """Return a value that is best at lr=1e-3 and rises with the steps and the seed."""
    distance = abs(math.log10(float(str(keys.get("lr", 1e-3)))) + 3)
    return step / 10 - distance / 100 + int(str(keys.get("seed", 0))) / 1000
