"""Train for an hour with a fault every few minutes, and report what grows and what is lost.

python -m benchmarks.soak [--minutes 60] [--fault-every 3] [--folder DIR] [OPTION...] [OVERRIDE...]

torchrun with two ranks and elastic restarts trains on 6x6 Sudoku, with evaluations, checkpoints
(the last three and the best) and a moving average. The faults come in random order: kill -9 of a
worker (torchrun restarts both), of torchrun, or of all processes; SIGTERM; and kill -9 of all
processes with one byte of the newest checkpoint changed. If torchrun has ended, it is started again
at once with resume=auto.

The folder gets run/, log, samples.jsonl (a line every 5 s and for each fault) and summary.json.

The exit status is 1 in each of these cases:

- A logged step is missing or is there twice.
- A remaining checkpoint is damaged, or a damaged checkpoint was used.
- A process outlives the end.
- A half-written or temporary file is left.
- Memory, disk space, descriptors or threads grew.
"""

import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness import REPOSITORY, build_sudoku, machine, parser_of, table, write
from records.checkpoint.format import step_folders
from records.checkpoint.reader import Checkpoint
from records.history import METRICS_FILE, History
from tests import runs

LOG_INTERVAL = 10
SAMPLE_EVERY_S = 5.0
RECIPE = [
    *("experiment=trm_sudoku_6x6", "global_batch_size=64", "weight_decay=0.1", "ema=true", "ema_rate=0.999"),
    *("arch.L_cycles=3", "arch.expansion=4", "arch.width_multiple=256", "arch.forward_dtype=float32"),
    *("arch.hidden_size=128", "keep_last_k=3", f"log_interval={LOG_INTERVAL}"),
    *("eval_every_n_steps=200", "checkpoint_every_n_steps=50", "eval_batch_size=null"),
    # The run ends only when it is stopped: the schedule is constant, and there are steps for days.
    *("lr=3e-4", "optim.muon_lr=0.01", "lr_min_ratio=1.0", "epochs=1000000", "max_steps=10000000"),
]
_TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "20"]
_TORCHRUN += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
_PER_PROCESS, _OF_RUN = ("rss_mb", "fds", "threads"), ("disk_mb", "tmp", "shm")
_STARTING_S = 30  # a process always grows in its first seconds
# Tolerated growth from the first minutes to the last. The first save and the first evaluation open
# descriptors and threads, and the pools of allocators reach their size within minutes.
_TOLERATED = {"fds": 8, "threads": 8, "rss_mb": 100}
# Tolerated growth of one process per hour. No process lives long enough for a lower limit.
_TOLERATED_PER_HOUR = {"rss_mb": 1500}
Row = dict[str, Any]


# ---- the training and its faults ---------------------------------------------------------------


@dataclass
class Soak:
    """A run under torchrun, which is started again whenever it has ended."""

    folder: Path
    arguments: list[str]
    draw: random.Random
    seen: dict[int, psutil.Process] = field(default_factory=dict)  # all processes that ever ran, by id
    lines: list[Row] = field(default_factory=list)  # samples and events

    def __post_init__(self) -> None:
        self.run, self.temporary = self.folder / "run", self.folder / "tmp"
        self.began, self._next_faults = time.monotonic(), list[str]()
        self.history = History(self.run / METRICS_FILE)
        self.temporary.mkdir(parents=True)
        self.launch()

    def launch(self) -> None:
        environment = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        with open(self.folder / "log", "a", encoding="utf-8") as log:
            self.agent = psutil.Popen(
                [sys.executable, *_TORCHRUN, "pretrain.py", *self.arguments, "resume=auto"],
                cwd=REPOSITORY,
                env={**os.environ, **environment},
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that an interrupt from the terminal reaches only this program
            )
        self.note({"event": "launch"})

    def note(self, row: Row) -> None:
        self.lines.append({"minutes": self.minutes, **row})
        with (self.folder / "samples.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.lines[-1]) + "\n")

    @property
    def minutes(self) -> float:
        return (time.monotonic() - self.began) / 60

    def workers(self) -> list[psutil.Process]:
        """Return the workers in the order of ranks, in which they were started."""
        try:
            return sorted(self.agent.children(), key=lambda worker: worker.pid)
        except psutil.NoSuchProcess:
            return []

    def step(self) -> int:
        """Return the last step logged."""
        self.history.refresh()
        return int(self.history.rows[-1]["step"]) if self.history.rows else 0

    def sample(self) -> None:
        processes: dict[str, Row] = {}
        for name, process in zip(("agent", "rank 0", "rank 1"), [self.agent, *self.workers()], strict=False):
            with suppress(psutil.Error):  # the process has ended meanwhile
                processes[name] = {
                    "pid": process.pid,
                    "age_s": time.time() - process.create_time(),
                    "rss_mb": process.memory_info().rss / 1e6,
                    "fds": process.num_fds(),
                    "threads": process.num_threads(),
                }
                self.seen[process.pid] = process
        of_run = {
            "disk_mb": _mb_in(self.run),
            "shm": len(os.listdir("/dev/shm")),
            "tmp": len(os.listdir(self.temporary)),
        }
        self.note({"step": self.step(), "processes": processes, **of_run})

    def strike(self) -> None:
        """Cause the next fault. The order is random, and each of FAULTS comes equally often."""
        self.sample()
        if not self._next_faults:
            self._next_faults = self.draw.sample(list(FAULTS), len(FAULTS))
        name = self._next_faults.pop()
        self.note({"event": name, "step": self.step()})
        FAULTS[name](self)

    def end(self) -> None:
        """Send SIGTERM to torchrun, which passes it on. The run saves a checkpoint and ends."""
        with suppress(psutil.NoSuchProcess):
            self.agent.send_signal(signal.SIGTERM)
        self.agent.wait(120)


def _mb_in(folder: Path) -> float:
    """Return the size of all files below a folder, without those that are gone meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total / 1e6


def _kill_worker(soak: Soak) -> None:
    if workers := soak.workers():
        soak.draw.choice(workers).kill()


def _kill_torchrun(soak: Soak) -> None:
    soak.agent.kill()
    soak.agent.wait(30)


def _kill_all(soak: Soak) -> None:
    workers = soak.workers()
    for process in [soak.agent, *workers]:
        process.kill()
    soak.agent.wait(30)
    psutil.wait_procs(workers, timeout=30)


def _damage(soak: Soak) -> None:
    """Kill all processes, and change one byte of the newest checkpoint's tensors."""
    _kill_all(soak)
    newest = soak.run / (soak.run / "latest").read_text(encoding="utf-8").strip()
    file = soak.draw.choice(sorted(newest.rglob("*.safetensors")))
    contents = bytearray(file.read_bytes())
    contents[soak.draw.randrange(len(contents))] ^= soak.draw.randrange(1, 256)
    file.write_bytes(contents)


FAULTS: dict[str, Callable[[Soak], None]] = {
    "kill-worker": _kill_worker,
    "kill-torchrun": _kill_torchrun,
    "kill-all": _kill_all,
    "sigterm": Soak.end,
    "damage": _damage,
}


def carry_on(soak: Soak, num_minutes: float, fault_every: float) -> None:
    """Sample, cause faults and start again, until the time is over or torchrun has given up."""

    def drawn() -> float:
        return soak.minutes + fault_every * soak.draw.uniform(0.5, 1.5)

    next_fault, next_sample, step_then = drawn(), 0.0, 0
    struck = False
    while soak.minutes < num_minutes:
        if not soak.agent.is_running() or soak.agent.status() == psutil.STATUS_ZOMBIE:
            if not struck:
                soak.note({"event": "unasked end", "status": soak.agent.wait(5)})
                return
            soak.launch()
        struck = False
        if time.monotonic() >= next_sample:
            soak.sample()
            next_sample = time.monotonic() + SAMPLE_EVERY_S
        # Wait until the run has advanced since the last fault, and has an older checkpoint to go
        # back to if the newest is damaged.
        if soak.minutes >= next_fault and len(step_folders(soak.run)) > 1 and soak.step() > step_then:
            step_then, struck = soak.step(), True
            soak.strike()
            next_fault = drawn()
        time.sleep(0 if struck else 0.5)


# ---- checks at the end -------------------------------------------------------------------------


def problems(soak: Soak) -> Iterator[str]:
    """Yield everything that is wrong after torchrun has ended."""
    lines = soak.lines
    num_damaged, launches = len(_events(lines, "damage")), len(_events(lines, "launch"))
    yield from (f"torchrun ended unasked with {line['status']}" for line in _events(lines, "unasked end"))
    _, alive = psutil.wait_procs(list(soak.seen.values()), timeout=15)
    yield from (f"process {process.pid} is still alive" for process in alive)
    last, pending = runs.latest(soak.run), None
    for folder in step_folders(soak.run):
        try:
            state = Checkpoint.open(folder).state
            pending = state.pending_row if state.step == last else pending
        except ValueError as error:
            yield str(error)
    soak.step()
    logged = [row["step"] for row in soak.history.rows]
    if logged != [1, *range(LOG_INTERVAL, last + (pending is None), LOG_INTERVAL)]:
        yield f"metrics.jsonl has not each step to be logged up to {last} once and in order: {logged}"
    told = (soak.folder / "log").read_bytes().count(b"is damaged: ")
    if told < num_damaged:
        yield f"{num_damaged} checkpoints were damaged, and the log reports {told}"
    kept = len(step_folders(soak.run))
    # The last three, the best, and checkpoints that are newer than one to which a run went back.
    if not 1 <= kept <= 4 + num_damaged:
        yield f"{kept} checkpoints are left"
    yield from (f"{path.name} is left over" for path in soak.run.glob(".incomplete*"))
    pids = tuple(f"_{pid}_" for pid in soak.seen)
    in_memory = [name for name in os.listdir("/dev/shm") if any(pid in name for pid in pids)]
    yield from (f"{name} is left over in shared memory" for name in in_memory)
    # torch leaves a cache, and torchrun leaves a folder for each launch.
    temporary = [name for name in os.listdir(soak.temporary) if not name.startswith("torchinductor_")]
    if len(temporary) > launches or any(not name.startswith("torchelastic_") for name in temporary):
        yield f"after {launches} launches temporary files are left over: {', '.join(temporary)}"
    newest = max(step_folders(soak.run), default=soak.run)
    yield from problems_of_growth(lines, checkpoint_mb=_mb_in(newest))


def problems_of_growth(lines: list[Row], checkpoint_mb: float) -> Iterator[str]:
    """Yield the quantities that grew more than tolerated between the first and the last samples.

    The disk may grow by the best checkpoint beside the last three, by damaged checkpoints that are
    kept for a while, and by metrics.
    """
    tolerated = {**_TOLERATED, "disk_mb": checkpoint_mb * (2 + len(_events(lines, "damage")))}
    for row in summary(lines):
        grown = row["last"] - row["first"]
        if grown > tolerated.get(row["quantity"], float("inf")):
            yield f"{row['of']}: {row['quantity']} grew by {grown:g}"
        if row["per_hour"] > _TOLERATED_PER_HOUR.get(row["quantity"], float("inf")):
            yield f"{row['of']}: {row['quantity']} of a process grew by {row['per_hour']:g} per hour"


def _events(lines: list[Row], name: str) -> list[Row]:
    return [line for line in lines if line.get("event") == name]


# ---- summary -----------------------------------------------------------------------------------


def summary(lines: list[Row]) -> list[Row]:
    """Return each quantity's medians of the first and last ten minutes, and its growth per hour.

    A soak of less than thirty minutes has thirds instead of ten minutes. The growth per hour is
    that of a process while it lives.
    """
    samples = [line for line in lines if "processes" in line]
    points: dict[tuple[str, str], list[tuple[float, float, int]]] = {}
    for line in samples:
        for of, values in line["processes"].items():
            for quantity in _PER_PROCESS if values["age_s"] >= _STARTING_S else ():
                points.setdefault((of, quantity), []).append((line["minutes"], values[quantity], values["pid"]))
        for quantity in _OF_RUN:
            points.setdefault(("run", quantity), []).append((line["minutes"], line[quantity], 0))
    end = samples[-1]["minutes"] if samples else 0.0
    window = min(10.0, end / 3)
    rows = []
    for (of, quantity), found in points.items():
        first = [value for minutes, value, _ in found if minutes <= window]
        last = [value for minutes, value, _ in found if minutes >= end - window]
        if first and last:
            figures = {"first": statistics.median(first), "last": statistics.median(last), "per_hour": _slope(found)}
            rows.append({"of": of, "quantity": quantity, **figures, "most": max(value for _, value, _ in found)})
    return rows


def _slope(points: list[tuple[float, float, int]]) -> float:
    """Return the least-squares slope per hour, where each process has its own level."""
    above = below = 0.0
    for process in {process for _, _, process in points}:
        of_one = [(minutes / 60, value) for minutes, value, owner in points if owner == process]
        mean_h, mean = (statistics.fmean(values) for values in zip(*of_one, strict=True))
        above += sum((hours - mean_h) * (value - mean) for hours, value in of_one)
        below += sum((hours - mean_h) ** 2 for hours, _ in of_one)
    return above / below if below else 0.0


def shown(rows: list[Row]) -> str:
    """Return the summary as Markdown."""
    figures = ("first", "last", "most", "per_hour")
    titles = ["of", "quantity", "first minutes", "last minutes", "at most", "per hour of a process"]
    return table(titles, ([row["of"], row["quantity"], *(f"{row[key]:.1f}" for key in figures)] for row in rows))


# ---- the program -------------------------------------------------------------------------------


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--fault-every", type=float, default=3, metavar="MINUTES", help="average time between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-path", type=Path, help="default: 6x6 Sudoku that is generated")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/soak"))
    options = parser.parse_intermixed_args()
    folder = options.folder.resolve()
    if folder.exists():
        parser.error(f"{folder} exists; give another --folder, or remove it")
    for number in (signal.SIGTERM, signal.SIGINT):  # background jobs of a shell would ignore SIGINT
        signal.signal(number, signal.default_int_handler)
    folder.mkdir(parents=True)
    data = (options.data_path or folder / "data").resolve()
    if options.data_path is None:
        build_sudoku(data, "--box", "2x3", "--generate", "1000", "--generate-test", "500")

    arguments = [*RECIPE, f"data_path={data}", *options.overrides, f"checkpoint_path={folder / 'run'}"]
    soak = Soak(folder, arguments, random.Random(options.seed))
    try:
        carry_on(soak, options.minutes, options.fault_every)
    except KeyboardInterrupt:
        print(f"interrupted after {soak.minutes:.1f} minutes", file=sys.stderr)
    finally:
        soak.sample()
        soak.end()
    found, rows = list(problems(soak)), summary(soak.lines)
    faults = {name: len(_events(soak.lines, name)) for name in FAULTS}
    about = {"minutes": soak.minutes, "steps": runs.latest(soak.run), "faults": faults, **machine()}
    write(folder / "summary.json", {**about, "problems": found, "rows": rows})
    print(about, shown(rows), sep="\n")
    if found:
        sys.exit("\n".join(found))
    print(f"nothing lost in {sum(faults.values())} faults")


if __name__ == "__main__":
    main()
