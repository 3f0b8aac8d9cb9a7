"""Run a campaign of faults. Each trial disturbs a small run with a fault and then resumes the run.

python -m benchmarks.faults [--trials 100] [--seed 0] [--kinds kill-all ...] [--only NUMBER]

A trial has one of three good endings. The run recovers by itself, it recovers when it is resumed,
or it is refused with an error that names the fault. In all three cases the finished run must meet
these conditions:

- It equals the quiet run bit for bit. The quiet run is undisturbed and has as many ranks.
- Every step that is due was logged once.
- `latest` never went back to an older step.
- No half-written files remain.

Any other ending is "lost": the program prints the whole trial and exits with 1. The kinds of fault
take turns. The seed and the trial's number decide everything else, so --only repeats a trial.
"""

import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM, SIGUSR1
from typing import Any, Literal, get_args

import psutil

from benchmarks.harness import machine, parser_of, table, write
from records.checkpoint.format import step_folders
from records.checkpoint.reader import Checkpoint
from tests import runs
from tests.runs import Running, Torchrun, with_arguments

Ending = Literal["by itself", "on resume", "refused", "lost"]

_ELASTIC = ["--max-restarts", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
_HANDLED = ["--standalone", "--max-restarts", "0", "--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"]
_SLOW_S = 0.6  # the total sleep of a run with runs.slowly, so that the run lasts at least this long
_NPY_HEADER = 128  # bytes


@dataclass
class Trial:
    """One run, and the record of what was done to it."""

    number: int
    kind: str
    ranks: int
    draw: random.Random
    folder: Path
    data: Path
    quiet: Path  # the undisturbed run
    story: list[str] = field(default_factory=list)
    newest: int = 0  # the newest step that `latest` has named so far
    processes: list[psutil.Process] = field(default_factory=list)
    ending: Ending = "lost"
    seconds: float = 0.0
    failure: str | None = None

    def result(self) -> dict[str, Any]:
        names = ("number", "kind", "ranks", "ending", "seconds", "failure")
        return {name: getattr(self, name) for name in names} | {"story": ", ".join(self.story)}

    def line(self) -> str:
        ranks, story = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}", ", ".join(self.story)
        return f"{self.number:4} {self.kind}, {ranks}: {story}: {self.ending}, {self.seconds:.1f} s"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    def start(self, *, hook: runs.Hook | None = None, ranks: int | None = None, **changes: object) -> Running:
        """Start the run, or resume it if it has a checkpoint."""
        settings = runs.settings(self.data, self.run, **{"resume": "auto", **changes})
        running = runs.start(settings, self._new_log(), ranks=ranks or self.ranks, hook=hook)
        self.processes += [psutil.Process(process.pid) for process in running.processes]
        return running

    def launch(self, options: list[str], hook: runs.Hook) -> Torchrun:
        """Start or resume the run under torchrun."""
        launched = Torchrun(options, hook, runs.settings(self.data, self.run), self._new_log(), self.folder)
        self.processes.append(psutil.Process(launched.process.pid))
        return launched

    def _new_log(self) -> Path:
        return self.folder / f"log_{len(self.processes)}"

    def workers_of(self, launched: Torchrun) -> list[psutil.Process]:
        workers = launched.workers()
        self.processes += workers
        return workers

    def until_training(self, running: Running | Torchrun, at_most_s: float = _SLOW_S) -> None:
        """Wait until training begins, and then for a random time."""
        runs.until(lambda: "steps of" in running.output, running, timeout_s=60)
        delay = self.draw.uniform(0, at_most_s)
        self.story.append(f"{delay:.2f} s after training began")
        time.sleep(delay)

    def ended(self, running: Running | Torchrun, timeout_s: float = 60) -> runs.Finished:
        done = running.wait(timeout_s)
        now = runs.latest(self.run)
        assert now >= self.newest, f"latest names step {now}, and named step {self.newest} before:\n{done.output}"
        self.newest = now
        return done

    def killed(self, running: Running, ranks: Iterable[int] | None = None) -> None:
        running.signal(SIGKILL, ranks=ranks)
        self.ended(running).killed()

    def killed_after(self, step: int) -> None:
        """Start the run, and kill it once a step is saved."""
        running = self.start(hook=runs.slowly)
        runs.until(lambda: runs.latest(self.run) >= step, running, timeout_s=60)
        self.killed(running)

    def resume(self, **changes: Any) -> Ending:
        self.ended(self.start(**changes)).ok()
        self.require_quiet_end()
        return "on resume"

    def refused(self, **changes: Any) -> str:
        """Try to resume the run, and return its error. The error must leave all files unchanged."""
        before = _contents(self.run)
        error = self.ended(self.start(**changes)).error()
        assert _contents(self.run) == before, f"the refused resume changed files: {error}"
        self.story.append(error)
        return error

    def require_quiet_end(self) -> None:
        runs.assert_same_run(self.run, self.quiet)
        leftovers = [path.name for path in self.run.iterdir() if path.name.startswith((".incomplete", "stopped"))]
        assert not leftovers, f"left behind: {leftovers}"
        for folder in step_folders(self.run):
            Checkpoint.open(folder)

    def kill_all(self) -> None:
        for process in filter(psutil.Process.is_running, self.processes):
            process.kill()


def _contents(folder: Path) -> dict[Path, tuple[bytes, int]]:
    """Return the bytes and the modification time of each file but the lock."""
    return {path: (contents, path.stat().st_mtime_ns) for path, contents in runs.contents(folder).items()}


# ---- killed ------------------------------------------------------------------------------------


def kill_worker(trial: Trial) -> Ending:
    """Kill one rank with kill -9. The other ranks name it and end."""
    running = trial.start(hook=runs.slowly)
    trial.until_training(running)
    rank = trial.draw.randrange(trial.ranks)
    trial.story.append(f"rank {rank}")
    trial.killed(running, [rank])
    _require_named(running, rank)
    return trial.resume()


def _require_named(running: Running, rank: int) -> None:
    named = f"rank {rank} (process {running.processes[rank].pid} on "
    assert named in running.output, f"rank {rank} isn't named:\n{running.output}"


def kill_all(trial: Trial) -> Ending:
    """Kill all ranks at once, as a power cut does."""
    running = trial.start(hook=runs.slowly)
    trial.until_training(running)
    trial.killed(running)
    return trial.resume()


def kill_at_change(trial: Trial) -> Ending:
    """Kill rank 0 between two changes on disk, up to three times, and mostly during a save."""
    kept = {"keep_last_k": trial.draw.choice([1, None])}
    for _ in range(trial.draw.randint(1, 3)):
        change = trial.draw.randint(1, 60)
        trial.story.append(f"before change {change}")
        done = trial.ended(trial.start(hook=with_arguments(runs.killed_at_file_event, str(trial.run), change), **kept))
        if done.status == 0:  # the run made fewer changes than that and finished
            break
        done.killed()
    return trial.resume(**kept)


def kill_worker_elastic(trial: Trial) -> Ending:
    """Kill a rank under torchrun, which restarts all ranks. The run goes on."""
    if trial.draw.random() < 0.5:
        change = trial.draw.randint(1, 60)
        trial.story.append(f"before change {change}")
        killed = with_arguments(runs.killed_at_file_event, str(trial.run), change)
        launched = trial.launch(_ELASTIC, with_arguments(runs.on_first_attempt, killed))
    else:
        launched = trial.launch(_ELASTIC, runs.slowly)
        trial.until_training(launched)
        rank = trial.draw.randrange(trial.ranks)
        trial.story.append(f"rank {rank}")
        _rank_of(trial.workers_of(launched), rank).kill()
    trial.ended(launched).ok()
    trial.require_quiet_end()
    return "by itself"


def _rank_of(workers: list[psutil.Process], rank: int) -> psutil.Process:
    """Return the worker of a rank. Workers are started in the order of ranks."""
    return sorted(workers, key=lambda worker: worker.pid)[rank]


def kill_agent(trial: Trial) -> Ending:
    """Kill torchrun. Its workers end by themselves, and don't disturb a run that starts at once."""
    launched = trial.launch(_HANDLED, with_arguments(runs.each_step_takes, 1.0))
    trial.until_training(launched, at_most_s=2.5)
    workers = trial.workers_of(launched)
    launched.signal(SIGKILL)
    trial.ended(launched).killed()
    if trial.draw.random() < 0.5:
        trial.story.append("resumed at once")
        ending = trial.resume()
        assert not psutil.wait_procs(workers, timeout=1)[1], "the workers outlived their launcher"
        return ending
    _, alive = psutil.wait_procs(workers, timeout=5)
    assert not alive, f"{len(alive)} workers are alive 5 s after their launcher ended"
    assert "its launcher is gone" in launched.output, launched.output
    before = _contents(trial.run)
    time.sleep(0.2)
    assert _contents(trial.run) == before, "a process still writes into the run's folder"
    return trial.resume()


# ---- stopped -----------------------------------------------------------------------------------


def signal_rank(trial: Trial) -> Ending:
    """Send SIGTERM or SIGUSR1 to some ranks. The run saves, marks the stop and exits with 0."""
    number = trial.draw.choice([SIGTERM, SIGUSR1])
    ranks = trial.draw.choice([[trial.draw.randrange(trial.ranks)], list(range(trial.ranks))])
    running = trial.start(hook=runs.slowly)
    trial.until_training(running)
    trial.story.append(f"{number.name} to ranks {ranks}")
    running.signal(number, ranks)
    done = trial.ended(running)
    assert "resume=auto goes on from here\n" in done.ok() and (trial.run / "stopped").exists(), done.output
    return trial.resume()


def signal_torchrun(trial: Trial) -> Ending:
    """Send SIGTERM or SIGUSR1 to torchrun. Its exit status is 1, whatever its workers return."""
    number = trial.draw.choice([SIGTERM, SIGUSR1])
    launched = trial.launch(_HANDLED, runs.slowly)
    trial.until_training(launched)
    workers = trial.workers_of(launched)
    trial.story.append(number.name)
    launched.signal(number)
    done = trial.ended(launched)
    assert (trial.run / "stopped").exists(), done.output
    assert not psutil.wait_procs(workers, timeout=10)[1], "workers outlived torchrun"
    return trial.resume()


# ---- a disk that is full -----------------------------------------------------------------------


def file_limit(trial: Trial) -> Ending:
    """Limit the size of files that one rank or all ranks can write, from a random step on."""
    step, size = trial.draw.randint(1, runs.LAST_STEP - 1), trial.draw.randint(10_000, 180_000)
    ranks = trial.draw.choice([[trial.draw.randrange(trial.ranks)], list(range(trial.ranks))])
    trial.story.append(f"{size:,} bytes for ranks {ranks} from step {step}")
    error = trial.ended(trial.start(hook=with_arguments(runs.small_disk_later, step, size, ranks))).error()
    assert "could not be written" in error and "free the disk, then resume" in error, error
    assert not list(trial.run.glob(".incomplete*")), "an incomplete checkpoint takes up the remaining space"
    return trial.resume()


def disk_full(trial: Trial) -> Ending:
    """Put the run's folder on a disk of random size, and enlarge the disk before the resume."""
    size = 4096 * trial.draw.randint(1, 1000)  # the whole run takes some 1,350 pages
    trial.story.append(f"{size:,} bytes")
    with disk(trial.run, size) as resize:
        error = trial.ended(trial.start()).error()
        assert "No space left on device" in error, error
        advice = ("could not be written: ", "; free the disk, then resume"), ("can't write to ", "; free it, or give")
        assert any(first in error and last in error for first, last in advice), error
        resize(64 * 2**20)
        return trial.resume()


@contextmanager
def disk(folder: Path, num_bytes: int) -> Iterator[Callable[[int], None]]:
    """Mount a file system of a given size at the folder. Yields a function that resizes it."""
    folder.mkdir()

    def mount(options: str) -> None:
        subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True, capture_output=True)

    mount(f"size={num_bytes}")
    try:
        yield lambda size: mount(f"remount,size={size}")
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def can_mount() -> bool:
    """Return whether disk_full can run. It needs root, and most containers don't allow it."""
    try:
        with tempfile.TemporaryDirectory() as folder, disk(Path(folder, "disk"), 4096):
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


# ---- damaged -----------------------------------------------------------------------------------


def truncate(trial: Trial) -> Ending:
    """Cut off the end of a file of the newest step."""
    file = _file_of_newest(trial)
    whole = file.read_bytes()
    length = trial.draw.randrange(len(whole))
    trial.story.append(f"{file.relative_to(trial.run)} cut from {len(whole):,} to {length:,} bytes")
    return _resume_damaged(trial, file, whole, whole[:length])


def flip_bit(trial: Trial) -> Ending:
    """Flip a bit of the newest step or of `latest`."""
    file = trial.draw.choice([_file_of_newest(trial), trial.run / "latest"])
    whole = file.read_bytes()
    return _resume_damaged(trial, file, whole, _with_another_bit(trial, file, whole))


def _file_of_newest(trial: Trial) -> Path:
    """Kill a run some time after a random step, and return a random file of its newest step."""
    trial.killed_after(trial.draw.randrange(2, runs.LAST_STEP, 2))
    newest = trial.run / (trial.run / "latest").read_text(encoding="utf-8").strip()
    return trial.draw.choice(sorted(path for path in newest.rglob("*") if path.is_file()))


def _with_another_bit(trial: Trial, file: Path, whole: bytes, first: int = 0) -> bytes:
    place, change = trial.draw.randrange(first, len(whole)), 1 << trial.draw.randrange(8)
    trial.story.append(f"{file.name}, byte {place} from {whole[place]:#x} to {whole[place] ^ change:#x}")
    return whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :]


def _resume_damaged(trial: Trial, file: Path, whole: bytes, damaged: bytes) -> Ending:
    """Damage a file and resume.

    The run goes on from another intact step if there is one. Otherwise it is refused until the file
    is restored.
    """
    is_of_step = file.parent != trial.run
    file.write_bytes(damaged)
    trial.newest = 0  # after this damage, `latest` may name an older step
    if is_of_step and len(step_folders(trial.run)) == 1:
        error = trial.refused()
        assert "none of the 1 checkpoints" in error and "is whole" in error, error
        file.write_bytes(whole)
        trial.resume()
        return "refused"
    said = trial.ended(trial.start()).ok()
    assert not is_of_step or ("is damaged: " in said and "; going back to " in said), said
    trial.require_quiet_end()
    return "on resume"


def flip_data(trial: Trial) -> Ending:
    """Flip a bit of the dataset before the resume. The run is refused until the bit is restored."""
    trial.killed_after(2)
    file = trial.draw.choice(sorted(trial.data.rglob("*.npy")))
    whole = file.read_bytes()
    file.write_bytes(_with_another_bit(trial, file, whole, first=_NPY_HEADER))
    try:
        error = trial.refused()
    finally:
        file.write_bytes(whole)
    assert "was trained on other data" in error or str(trial.data) in error, error
    trial.resume()
    return "refused"


# ---- silent ranks, and two runs at once --------------------------------------------------------


def pause(trial: Trial) -> Ending:
    """Stop one rank or all ranks for a while that is shorter than dist.timeout_s."""
    running = trial.start(hook=runs.slowly, **{"dist.timeout_s": 10})
    trial.until_training(running)
    ranks = trial.draw.choice([[trial.draw.randrange(trial.ranks)], list(range(trial.ranks))])
    seconds = trial.draw.uniform(0.1, 2)
    trial.story.append(f"ranks {ranks} for {seconds:.2f} s")
    running.signal(SIGSTOP, ranks)
    time.sleep(seconds)
    running.signal(SIGCONT, ranks)
    trial.ended(running).ok()
    trial.require_quiet_end()
    return "by itself"


def hang(trial: Trial) -> Ending:
    """Stop a rank for good. The other ranks name it and end."""
    timeout_s = 2
    running = trial.start(hook=runs.slowly, **{"dist.timeout_s": timeout_s})
    trial.until_training(running)
    rank = trial.draw.randrange(trial.ranks)
    stopped = running.processes[rank]
    trial.story.append(f"rank {rank}")
    running.signal(SIGSTOP, [rank])
    others = [process for process in running.processes if process is not stopped]
    end = time.monotonic() + timeout_s + 15
    for process in others:
        process.join(end - time.monotonic())
    ended = [process.exitcode for process in others]
    trial.killed(running)
    assert ended == [1] * len(others), f"the other ranks ended with {ended}, not 1:\n{running.output}"
    _require_named(running, rank)
    return trial.resume(**{"dist.timeout_s": 600})


def second_run(trial: Trial) -> Ending:
    """Start another run in the same folder. It is refused, and the first run goes on unharmed."""
    first = trial.start(hook=with_arguments(runs.each_step_takes, 1.0))
    trial.until_training(first)
    owner, ranks = first.processes[0].pid, trial.draw.choice([1, 2])
    trial.story.append(f"a second run of {ranks} ranks")
    error = trial.ended(trial.start(ranks=ranks)).error()
    assert f"{trial.run} is in use by process {owner} " in error, error
    trial.ended(first).ok()
    trial.require_quiet_end()
    return "refused"


# ---- the campaign ------------------------------------------------------------------------------


@dataclass
class Kind:
    strike: Callable[[Trial], Ending]
    ranks: tuple[int, ...] = (1, 2)  # each trial draws one of these numbers of ranks


KINDS = {
    "kill-worker": Kind(kill_worker, ranks=(2,)),
    "kill-worker-elastic": Kind(kill_worker_elastic, ranks=(2,)),
    "kill-agent": Kind(kill_agent, ranks=(2,)),
    "kill-all": Kind(kill_all),
    "kill-at-change": Kind(kill_at_change),
    "signal-rank": Kind(signal_rank),
    "signal-torchrun": Kind(signal_torchrun, ranks=(2,)),
    "file-limit": Kind(file_limit),
    "disk-full": Kind(disk_full),
    "truncate": Kind(truncate),
    "flip-bit": Kind(flip_bit),
    "flip-data": Kind(flip_data),
    "pause": Kind(pause),
    "hang": Kind(hang, ranks=(2,)),
    "second-run": Kind(second_run),
}


def kind_of(number: int) -> str:
    return list(KINDS)[number % len(KINDS)]


def run_trial(number: int, seed: int, folder: Path, data: Path, quiet: Mapping[int, Path]) -> Trial:
    """Run one trial in a folder of its own. The trial then also holds whatever went wrong.

    Args:
        quiet: the undisturbed run for each number of ranks.
    """
    draw, kind = random.Random(f"{seed}/{number}"), kind_of(number)
    ranks = draw.choice(KINDS[kind].ranks)
    trial = Trial(number, kind, ranks, draw, folder, data, quiet[ranks])
    began = time.monotonic()
    try:
        trial.ending = KINDS[kind].strike(trial)
    except Exception:  # an error of one trial doesn't end the campaign
        trial.failure = traceback.format_exc()
    finally:
        trial.kill_all()
    trial.seconds = time.monotonic() - began
    return trial


def counted(results: list[Trial]) -> str:
    """Return how the trials of each kind ended, as Markdown."""
    rows = []
    for kind in [*KINDS, "all"]:
        of_kind = [result for result in results if kind in (result.kind, "all")]
        if of_kind:
            endings = [result.ending for result in of_kind]
            seconds = statistics.median(result.seconds for result in of_kind)
            rows.append([kind, len(of_kind), *map(endings.count, get_args(Ending)), f"{seconds:.1f}"])
    return table(["fault", "trials", *get_args(Ending), "median s"], rows)


def main() -> None:
    parser = parser_of(__doc__, overrides=False)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--only", type=int, metavar="NUMBER", help="number of the trial to repeat")
    options = parser.parse_args()
    kinds = set(options.kinds)
    if "disk-full" in kinds and not can_mount():
        print("disk-full is left out: it needs root, and a system that allows mounts", file=sys.stderr)
        kinds.remove("disk-full")
    of_kinds = (number for number in range(options.trials * len(KINDS)) if kind_of(number) in kinds)
    numbers = [options.only] if options.only is not None else [*islice(of_kinds, options.trials)]

    about, results = machine(), []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        data, quiet = runs.build_data(root / "data"), {ranks: root / f"quiet_{ranks}" for ranks in (1, 2)}
        for ranks, run in quiet.items():
            runs.train(runs.settings(data, run), root / "log", ranks=ranks).ok()
        for number in numbers:
            with tempfile.TemporaryDirectory(dir=root) as folder:
                results.append(run_trial(number, options.seed, Path(folder), data, quiet))
            print(results[-1].line(), file=sys.stderr, flush=True)
            if results[-1].failure:
                print(results[-1].failure, file=sys.stderr, flush=True)
            write(options.json, {**about, "trials": [result.result() for result in results]})
    print(counted(results))
    if lost := [str(result.number) for result in results if result.ending == "lost"]:
        sys.exit(f"lost: trials {', '.join(lost)}")


if __name__ == "__main__":
    main()
