"""Train for an hour with a fault every few seconds. Report goodput and what each fault costs.

python -m benchmarks.soak [--minutes 60] [--fault-every 15] [--ranks 2] [OPTION...] [OVERRIDE...]

torchrun trains a small TRM on 6x6 Sudoku, with evaluations, a moving average and
checkpoint_every_n_steps=auto. Steps have the length of those of a large model (--step-s), for which
they sleep. Faults of all kinds come in random order. Whatever has ended is started again at once
with resume=auto. Two hosts are network namespaces, and a full disk is a mount; both need root.

Then a quiet run takes as many steps. The exit status is 1 in each of these cases:

- Weights, optimizer, carry or a logged number differ from those of the quiet run in a bit.
- A logged step is missing or is there twice.
- A damaged checkpoint was not named.
- A process outlives the end, or a half-written or temporary file is left.

The folder gets run/, quiet/, log, events.jsonl (a line for each fault) and summary.json. Seconds
lost of a fault: those until the next fault, without the steps of this time that the run kept.
"""

import json
import os
import random
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults import can_mount, disk
from benchmarks.harness import REPOSITORY, build_sudoku, machine, parser_of, table, write
from records.checkpoint.format import step_folders
from records.checkpoint.reader import Checkpoint
from records.history import METRICS_FILE, History
from tests import runs, spawn
from tests.hosts import Host, two_hosts, why_no_two_hosts

RECIPE = [
    *("experiment=trm_sudoku_6x6", "global_batch_size=16", "arch.hidden_size=64", "arch.forward_dtype=float32"),
    *("ema=true", "eval_every_n_steps=200", "eval_max_examples=64", "eval_batch_size=null", "log_interval=1"),
    *("checkpoint_every_n_steps=auto", "keep_last_k=3", "on_save_error=continue", "max_failed_saves=1000"),
    *("perf_every_n_steps=null", "compile=false", "dist.timeout_s=5"),
    # The run ends only when it is stopped: the schedule is constant, and there are steps for days.
    *("lr=3e-4", "optim.muon_lr=0.01", "lr_min_ratio=1.0", "epochs=1000000", "max_steps=10000000"),
]
_DISK_BYTES = 2**30
_ENDS_S = 120  # a run that takes longer to stop hangs
Row = dict[str, Any]
Mend = Callable[[], object]


@dataclass
class Soak:
    """A run under torchrun, which is started again whenever it has ended."""

    folder: Path
    hosts: list[Host]
    head: list[str]  # of the command, before the program
    arguments: list[str]
    step_s: float
    draw: random.Random
    resize: Callable[[int], None] | None  # of the disk with the run
    agents: list[psutil.Popen] = field(default_factory=list)
    seen: dict[int, psutil.Process] = field(default_factory=dict)  # all processes that ever ran, by id
    events: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.run, self.temporary, self.data = (self.folder / name for name in ("disk/run", "tmp", "data"))
        self.slow, self.port = self.folder / "slow", spawn.free_port()
        for folder in (self.run.parent, self.temporary):
            folder.mkdir(exist_ok=True)
        self.history = History(self.run / METRICS_FILE)
        self.began = time.monotonic()
        self.agents = [self.launch(number) for number in range(len(self.hosts))]

    def launch(self, number: int) -> psutil.Popen:
        host, words = self.hosts[number], [sys.executable, *self.head, "--max-restarts", "100000"]
        if len(self.hosts) == 1:
            words += ["--standalone"]
        else:
            words += ["--nnodes", str(len(self.hosts)), "--rdzv-backend", "c10d", "--rdzv-id", "soak"]
            words += ["--rdzv-endpoint", f"{self.hosts[0].address}:{self.port}", "--local-addr", host.address]
            words += ["--rdzv-conf", f"is_host={int(number == 0)}"]
        enter = ["ip", "netns", "exec", host.namespace] if host.namespace else []
        own = {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary), "GLOO_SOCKET_IFNAME": host.cable}
        own |= {"SOAK_STEP_S": str(self.step_s), "SOAK_SLOW": str(self.slow), "PYTHONPATH": str(REPOSITORY)}
        with open(self.folder / "log", "a", encoding="utf-8") as log:
            return psutil.Popen(
                [*enter, *words, "benchmarks/soak_rank.py", *self.arguments, "resume=auto"],
                cwd=REPOSITORY,
                env={**os.environ, **own},
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that an interrupt from the terminal reaches only this program
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def workers(self) -> list[psutil.Process]:
        found = list[psutil.Process]()
        for agent in self.agents:
            with suppress(psutil.NoSuchProcess):
                found += agent.children()
        self.seen |= {process.pid: process for process in [*self.agents, *found]}
        return found

    def step(self) -> int:
        """Return the last step logged."""
        self.history.refresh()
        return int(self.history.rows[-1]["step"]) if self.history.rows else 0

    def note(self, kind: str) -> None:
        self.events.append({"s": self.seconds, "event": kind, "step": self.step()})
        with (self.folder / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(self.events[-1]) + "\n")

    def under_fire(self, seconds: float, fault_every_s: float, kinds: list[str]) -> None:
        """Strike, mend and start again, until the time is over."""
        mending = list[tuple[float, Mend]]()
        coming, next_fault = list[str](), 0.0
        while self.seconds < seconds:
            for due, mend in mending[:]:
                if self.seconds >= due:
                    mend()
                    mending.remove((due, mend))
            for number, agent in enumerate(self.agents):
                if agent.poll() is not None:
                    self.agents[number] = self.launch(number)
            self.workers()
            # The first faults wait for two checkpoints, of which one may be damaged.
            if self.seconds >= next_fault and (self.events or len(step_folders(self.run)) > 1):
                coming = coming or self.draw.sample(kinds, len(kinds))
                kind = coming.pop()
                self.note(kind)
                for_s, mend = FAULTS[kind](self) or (0.0, lambda: None)
                mending.append((self.seconds + for_s, mend))
                next_fault = self.seconds + fault_every_s * self.draw.uniform(0.5, 1.5)
            time.sleep(0.05)
        for _, mend in mending:
            mend()
        self.note("end")

    def end(self) -> None:
        """Let the run save a checkpoint and end."""
        while self.step() == self.events[-1]["step"]:  # it may just be starting
            time.sleep(0.1)
            for number, agent in enumerate(self.agents):
                if agent.poll() is not None:
                    self.agents[number] = self.launch(number)
        _sigterm(self)
        psutil.wait_procs(self.agents, timeout=_ENDS_S)


# ---- faults --------------------------------------------------------------------------------------
# A fault returns how many seconds it lasts, and what mends it; None if nothing has to be mended.


def _kill_rank(soak: Soak) -> None:
    if workers := soak.workers():
        with suppress(psutil.NoSuchProcess):
            soak.draw.choice(workers).kill()


def _kill_torchrun(soak: Soak) -> None:
    soak.draw.choice(soak.agents).kill()


def _kill_all(soak: Soak) -> None:
    processes = [*soak.agents, *soak.workers()]
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=30)


def _sigterm(soak: Soak) -> None:
    for agent in soak.agents:
        with suppress(psutil.NoSuchProcess):
            agent.terminate()


def _freeze(soak: Soak) -> None:
    if workers := soak.workers():
        with suppress(psutil.NoSuchProcess):
            soak.draw.choice(workers).suspend()


def _damage(soak: Soak) -> None:
    """Kill all processes, and change one byte of the newest checkpoint's tensors."""
    _kill_all(soak)
    newest = soak.run / (soak.run / "latest").read_text(encoding="utf-8").strip()
    file = soak.draw.choice(sorted(newest.rglob("*.safetensors")))
    contents = bytearray(file.read_bytes())
    contents[soak.draw.randrange(len(contents))] ^= soak.draw.randrange(1, 256)
    file.write_bytes(contents)


def _fill_disk(soak: Soak) -> tuple[float, Mend]:
    assert soak.resize is not None
    usage = shutil.disk_usage(soak.run)
    soak.resize(usage.used + 4096)
    return soak.draw.uniform(1, 4), partial(soak.resize, _DISK_BYTES)


def _slow_disk(soak: Soak) -> tuple[float, Mend]:
    soak.slow.touch()
    return soak.draw.uniform(1, 4), partial(soak.slow.unlink, missing_ok=True)


def _vanish(soak: Soak) -> tuple[float, Mend]:
    away = soak.data.rename(soak.folder / "away")
    return soak.draw.uniform(1, 4), partial(away.rename, soak.data)


def _cut(soak: Soak) -> tuple[float, Mend]:
    """Pull the cable, for less or for more than the timeout."""
    host = soak.draw.choice(soak.hosts)
    host.set_cable("down")
    return soak.draw.uniform(1, 9), partial(host.set_cable, "up")


FAULTS: dict[str, Callable[[Soak], tuple[float, Mend] | None]] = {
    "kill-rank": _kill_rank,
    "kill-torchrun": _kill_torchrun,
    "kill-all": _kill_all,
    "sigterm": _sigterm,
    "freeze": _freeze,
    "damage": _damage,
    "disk-full": _fill_disk,
    "disk-slow": _slow_disk,
    "data-gone": _vanish,
    "network": _cut,
}


# ---- checks at the end -------------------------------------------------------------------------


def problems(soak: Soak, quiet: Path) -> Iterator[str]:
    """Yield everything that is wrong after the run has ended."""
    _, alive = psutil.wait_procs(list(soak.seen.values()), timeout=45)
    yield from (f"process {process.pid} is still alive" for process in alive)
    last = runs.latest(soak.run)
    try:
        Checkpoint.open(soak.run / f"step_{last:08d}")
    except ValueError as error:
        yield str(error)
    mine, theirs = runs.tensors(soak.run, last), runs.tensors(quiet, last)
    if mine.keys() != theirs.keys():
        yield "the checkpoints hold other tensors"
    yield from (f"{name} differs" for name in mine.keys() & theirs.keys() if not mine[name].equal(theirs[name]))
    # The last step was evaluated in the quiet run alone, and no save failed there.
    logged, expected = ([_comparable(row) for row in runs.rows(run)][: last - 1] for run in (soak.run, quiet))
    if [row["step"] for row in logged] != [*range(1, last)]:
        yield f"metrics.jsonl has not each step up to {last} once and in order"
    yield from (
        f"step {row['step']} is logged otherwise" for row, other in zip(logged, expected, strict=False) if row != other
    )
    told = (soak.folder / "log").read_bytes().count(b"is damaged: ")
    if told < sum(line["event"] == "damage" for line in soak.events):
        yield f"the log reports {told} damaged checkpoints"
    yield from (f"{path.name} is left over" for path in soak.run.glob(".incomplete*"))
    pids = tuple(f"_{pid}_" for pid in soak.seen)
    in_memory = [name for name in os.listdir("/dev/shm") if any(pid in name for pid in pids)]
    yield from (f"{name} is left over in shared memory" for name in in_memory)


def _comparable(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != "train/failed_saves"}


# ---- the program -------------------------------------------------------------------------------


def losses(events: list[Row], step_s: float) -> dict[str, list[float]]:
    """Return the seconds that each fault lost, by kind."""
    found = dict[str, list[float]]()
    for fault, following in pairwise(events):
        kept_s = (following["step"] - fault["step"]) * step_s
        found.setdefault(fault["event"], []).append(following["s"] - fault["s"] - kept_s)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--fault-every", type=float, default=15, metavar="SECONDS", help="average time between faults")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=1, choices=[1, 2])
    parser.add_argument("--fork", action="store_true", help="use python -m launch.torchrun --start-method=fork")
    parser.add_argument("--step-s", type=float, default=1.0, metavar="SECONDS", help="what a step sleeps")
    parser.add_argument("--kinds", nargs="+", choices=FAULTS, default=[*FAULTS])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/soak"))
    options = parser.parse_intermixed_args()
    folder, kinds = options.folder.resolve(), list(options.kinds)
    if folder.exists():
        parser.error(f"{folder} exists; give another --folder, or remove it")
    if options.hosts == 2 and (reason := why_no_two_hosts()) is not None:
        parser.error(f"--hosts 2: {reason}")
    for kind, is_possible in (("network", options.hosts == 2), ("disk-full", can_mount())):
        if kind in kinds and not is_possible:
            kinds.remove(kind)
            print(f"{kind} is left out: it needs --hosts 2, or root", file=sys.stderr)
    for number in (signal.SIGTERM, signal.SIGINT):  # background jobs of a shell would ignore SIGINT
        signal.signal(number, signal.default_int_handler)
    folder.mkdir(parents=True)
    build_sudoku(folder / "data", "--box", "2x3", "--generate", "1000", "--generate-test", "500")
    head = ["-m", "launch.torchrun", "--start-method", "fork"] if options.fork else ["-m", "torch.distributed.run"]
    head += ["--nproc-per-node", str(options.ranks // options.hosts)]
    arguments = [*RECIPE, f"data_path={folder / 'data'}", *options.overrides]
    with ExitStack() as opened:
        resize = opened.enter_context(disk(folder / "disk", _DISK_BYTES)) if "disk-full" in kinds else None
        hosts = opened.enter_context(two_hosts()) if options.hosts == 2 else [Host()]
        typed = [*arguments, f"checkpoint_path={folder / 'disk/run'}"]
        soak = Soak(folder, hosts, head, typed, options.step_s, random.Random(options.seed), resize)
        try:
            soak.under_fire(60 * options.minutes, options.fault_every, kinds)
        except KeyboardInterrupt:
            soak.note("end")
            print(f"interrupted after {soak.seconds:.0f} s", file=sys.stderr)
        soak.end()
        last, quiet = runs.latest(soak.run), folder / "quiet"
        typed = [*arguments, f"checkpoint_path={quiet}", "resume=null", f"max_steps={last}"]
        runs.start(typed, folder / "quiet.log", ranks=options.ranks).wait(7200).ok()
        found = list(problems(soak, quiet))
        row = soak.history.rows[-1]
    step_s = statistics.median(row["perf/step_ms"] for row in soak.history.rows) / 1e3
    lost = losses(soak.events, step_s)
    spent = {name.removeprefix("perf/spent_s/"): value for name, value in row.items() if "spent_s" in name}
    about = {**machine(), "seed": options.seed, "ranks": options.ranks, "hosts": options.hosts, "steps": last}
    about |= {"step_s": step_s, "fault_every_s": options.fault_every, "goodput": row["perf/goodput"], "spent_s": spent}
    write(folder / "summary.json", {**about, "problems": found, "lost_s": lost})
    print(about)
    print(
        table(
            ["fault", "tries", "s lost, median", "least", "most"],
            (
                [kind, len(each), *(f"{of(each):.1f}" for of in (statistics.median, min, max))]
                for kind, each in sorted(lost.items())
            ),
        )
    )
    if found:
        sys.exit("\n".join(found))
    print(f"nothing lost in {sum(map(len, lost.values()))} faults; goodput {row['perf/goodput']:.1%}")


if __name__ == "__main__":
    main()
