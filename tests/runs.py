"""Run the programs in real processes, forked from a server that has imported PyTorch."""

import functools
import itertools
import json
import multiprocessing as mp
import os
import resource
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent import futures
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import psutil
import torch
from safetensors.torch import load_file
from torch.distributed import run as torchrun

from tests import spawn
from tests.forked_runs import fork_runs

REPOSITORY = Path(__file__).resolve().parents[1]
LAST_STEP = 12
Hook = Callable[[int], None]
Evaluate = Callable[..., list[str]]
Row = dict[str, float]

_CONTEXT = mp.get_context("forkserver")
# The whole session has one server. This list replaces the list of tests/spawn.py, so it must come
# after that import.
_CONTEXT.set_forkserver_preload(
    [
        *("torch", "torch._dynamo", "torch.distributed.pipelining", "torch.distributed.tensor.parallel"),
        *("pytest", "hypothesis", "psutil"),  # a fork imports the module of its test
        *("utils.program", "records.checkpoint.storage", "evaluate", "tests.warm"),
    ]
)
assert spawn  # the import sets the list that is replaced above


def build_data(path: Path) -> Path:
    """Build a dataset of 30 training and 20 test puzzles of 4x4."""
    # Only one cell of a test puzzle is scored. A model that knows nothing solves a quarter of such
    # puzzles, so that numbers of solved puzzles are not all 0.
    script = [sys.executable, str(REPOSITORY / "dataset/build_sudoku_dataset.py"), "--output-dir", str(path)]
    options = ["--generate", "30", "--generate-test", "20", "--box", "2x2", "--num-aug", "1"]
    subprocess.run([*script, *options], check=True, capture_output=True, timeout=60)
    labels = path / "test" / "all__labels.npy"
    array = np.load(labels)
    array[:, 1:] = 0
    np.save(labels, array)
    (path / "fingerprint.json").unlink()  # the fingerprint would report the changed labels
    return path


def settings(data: Path, run: Path | None, **changes: object) -> list[str]:
    """Return the overrides of a run of 12 steps that covers everything.

    Checkpoints fall between two logs. Evaluations fall on logged steps and between them. Sequences
    go on over several steps, and there is exploration.
    """
    every = {"log_interval": 5, "eval_every_n_steps": 5, "checkpoint_every_n_steps": 2}
    cycles = {"arch.H_cycles": 1, "arch.L_cycles": 2, "arch.H_layers": 1, "arch.L_layers": 1}
    halting = {"arch.halt_max_steps": 3, "arch.halt_exploration_prob": 0.5}
    values: dict[str, object] = {"data_path": data, "device": "cpu", "max_steps": LAST_STEP}
    values |= {**every, **cycles, **halting}
    if run is not None:
        values["checkpoint_path"] = run
    values |= {key.replace("__", "."): value for key, value in changes.items()}
    return ["debug=tiny", *(f"{key}={'null' if value is None else value}" for key, value in values.items())]


@dataclass
class Finished:
    """The exit status and the output of a run that has ended."""

    status: int
    output: str

    def error(self) -> str:
        """Return the error message. It must be one line, and the status must be 2."""
        lines = [line for line in self.output.splitlines() if line.startswith("error: ")]
        assert self.status == 2, f"the status is {self.status}, not 2:\n{self.output}"
        assert len(lines) == 1 and "Traceback" not in self.output, f"the error is not one line:\n{self.output}"
        return lines[0]

    def ok(self) -> str:
        """Return the output. The run must have ended well."""
        assert self.status == 0, f"the status is {self.status}, not 0:\n{self.output}"
        return self.output

    def killed(self) -> str:
        assert self.status == -signal.SIGKILL, f"the status is {self.status}, not of a kill:\n{self.output}"
        return self.output


class Running:
    """The processes of a run, one for each rank."""

    def __init__(self, processes: list[Any], log: Path) -> None:
        self.processes, self._log = processes, log

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def alive(self) -> bool:
        return any(process.is_alive() for process in self.processes)

    def signal(self, number: signal.Signals, ranks: Iterable[int] | None = None) -> None:
        for rank in ranks if ranks is not None else range(len(self.processes)):
            if self.processes[rank].is_alive():
                with suppress(ProcessLookupError):  # the process has ended since
                    os.kill(self.processes[rank].pid, number)

    def wait(self, timeout_s: float = 180) -> Finished:
        """Wait for the end. The status of a killed rank counts first, then that of a failed one."""
        until = time.monotonic() + timeout_s
        for process in self.processes:
            process.join(max(0.0, until - time.monotonic()))
        stuck = [rank for rank, process in enumerate(self.processes) if process.is_alive()]
        self.signal(signal.SIGKILL)
        assert not stuck, f"ranks {stuck} are still alive after {timeout_s} s:\n{self.output}"
        return Finished(min(p.exitcode for p in self.processes) or max(p.exitcode for p in self.processes), self.output)


def start(
    arguments: list[str], log: Path, *, ranks: int = 1, program: str = "pretrain", hook: Hook | None = None
) -> Running:
    """Start a program on some ranks. `hook(rank)` runs in each process before the program."""
    log.unlink(missing_ok=True)
    port = spawn.free_port()
    environments = [spawn.environment_of(rank, ranks, port) for rank in range(ranks)]
    return Running([fork(_child, program, arguments, str(log), names, hook) for names in environments], log)


def fork(function: Callable[..., None], *arguments: object) -> Any:
    process = _CONTEXT.Process(target=function, args=arguments, daemon=True)
    process.start()
    return process


def train(
    arguments: list[str], log: Path, *, ranks: int = 1, program: str = "pretrain", hook: Hook | None = None
) -> Finished:
    return start(arguments, log, ranks=ranks, program=program, hook=hook).wait()


def resume(data: Path, run: Path, log: Path, **changes: object) -> Finished:
    return train(settings(data, run, resume="auto", **changes), log)


def _child(program: str, arguments: list[str], log: str, environment: dict[str, str], hook: Hook | None) -> None:
    _redirect(log, log)
    torch.set_num_threads(1)
    os.environ.update(environment)
    sys.argv = [f"{program}.py", *arguments]
    module = __import__(program)
    if hook is not None:
        hook(int(environment["RANK"]))
    sys.exit(module.main()) if program == "sweep" else module.run(module.main)


@dataclass
class Ended:
    """The exit status and the output of a command that has ended."""

    status: int
    stdout: str
    stderr: str


def command(line: str, cwd: Path, timeout_s: float = 180) -> Ended:
    """Run a command line that begins with `python` or `torchrun --nproc-per-node N`."""
    words = shlex.split(line)
    environment = dict(word.split("=", 1) for word in itertools.takewhile(lambda word: "=" in word, words))
    launcher, *words = words[len(environment) :]
    environments = [environment]
    if launcher == "torchrun":
        option, number, *words = words
        assert option == "--nproc-per-node", f"{line}: only --nproc-per-node is supported"
        port, size = spawn.free_port(), int(number)
        environments = [environment | spawn.environment_of(rank, size, port) for rank in range(size)]
    else:
        assert launcher == "python", f"{line}: only python and torchrun are supported"
    with tempfile.TemporaryDirectory() as folder:
        stdout, stderr = (Path(folder) / name for name in ("stdout", "stderr"))
        streams = [str(stdout), str(stderr)]
        running = Running([fork(_script, words, str(cwd), streams, names) for names in environments], stderr)
        finished = running.wait(timeout_s)
        return Ended(finished.status, stdout.read_text(), finished.output)


def _script(words: list[str], cwd: str, streams: list[str], environment: dict[str, str]) -> None:
    _redirect(*streams)
    torch.set_num_threads(1)
    os.environ.update(environment)
    os.chdir(cwd)
    if words[0] == "-m":  # run the file: the imported package may come from another folder
        words = [words[1].replace(".", "/") + ".py", *words[2:]]
    if Path(words[0]).name == "sweep.py":
        fork_runs()
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def _redirect(stdout: str, stderr: str) -> None:
    for number, path in enumerate((stdout, stderr), start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)


class Torchrun:
    """torchrun's real agent with pretrain.py on 2 ranks, which it forks, in its own session."""

    def __init__(self, options: list[str], hook: Hook, arguments: list[str], log: Path, cwd: Path) -> None:
        self._log = log
        log.unlink(missing_ok=True)
        words = ["--nproc-per-node", "2", *options, "pretrain.py", *arguments]
        self.process = _CONTEXT.Process(target=_agent, args=(words, hook, str(log), str(cwd)))
        self.process.start()

    @property
    def output(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def signal(self, number: signal.Signals) -> None:
        psutil.Process(self.process.pid).send_signal(number)

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def wait(self, timeout_s: float = 180) -> Finished:
        self.process.join(timeout_s)
        if self.alive:
            self.kill()
            raise AssertionError(f"torchrun is still alive after {timeout_s} s:\n{self.output}")
        assert self.process.exitcode is not None
        return Finished(self.process.exitcode, self.output)

    def kill(self) -> None:
        """Kill torchrun and its workers, each by its own id."""
        for process in [*self.workers(), psutil.Process(self.process.pid)] if self.alive else []:
            process.kill()
        self.process.join()


def _agent(words: list[str], hook: Hook, log: str, cwd: str) -> None:
    os.setsid()
    _redirect(log, log)
    os.chdir(cwd)
    config_from_args = torchrun.config_from_args

    def with_forked_workers(args: Any) -> Any:
        config, *_ = config_from_args(args)
        config.start_method = "fork"
        return config, _worker, [hook, [args.training_script, *args.training_script_args]]

    torchrun.config_from_args = with_forked_workers
    torchrun.main(words)


def _worker(hook: Hook, words: list[str]) -> None:
    # torch lets forks of the agent receive SIGINT when the agent is killed. Workers of the real
    # torchrun do not receive it, so this line switches it off.
    torch.multiprocessing._prctl_pr_set_pdeathsig(0)  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    sys.argv = words
    hook(int(os.environ["RANK"]))
    from pretrain import main
    from utils import program

    # After status 0 this function must return, because the agent waits for its result.
    program.leave = lambda status, **_: sys.exit(status)  # type: ignore[attr-defined]
    handler = signal.getsignal(signal.SIGTERM)
    try:
        program.run(main)
    except SystemExit as ended:
        if ended.code:
            raise
    if signal.getsignal(signal.SIGTERM) is not handler:  # after a stop the agent stops too, and waits for no result
        os._exit(0)


class Program(Protocol):
    """A program that has been started."""

    @property
    def output(self) -> str: ...

    @property
    def alive(self) -> bool: ...


def until(condition: Callable[[], bool], running: Program, *, timeout_s: float = 180) -> None:
    """Wait until a running program has made a condition true."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert running.alive, f"the run ended before the condition became true:\n{running.output}"
        assert time.monotonic() < end, f"the condition did not become true in {timeout_s} s:\n{running.output}"
        time.sleep(0.003)


# ---- what a run left behind --------------------------------------------------------------------


def rows(run: Path) -> list[Row]:
    """Return the rows of metrics.jsonl without time_s and perf/, which differ from run to run."""
    parsed = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: row[name] for name in row if name != "time_s" and not name.startswith("perf/")} for row in parsed]


def contents(run: Path) -> dict[Path, bytes]:
    """Return the contents of every file except the lock, which names the processes that held it."""
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}


def latest(run: Path) -> int:
    """Return the step that `latest` names, or 0 if there is none."""
    return int((run / "latest").read_text().strip()[5:]) if (run / "latest").exists() else 0


def tensors(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Return all tensors of a step folder by <file>:<name>."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted((run / f"step_{step:08d}").rglob("*.safetensors")):
        found |= {f"{path.name}:{name}": tensor for name, tensor in load_file(path).items()}
    return found


def assert_same_run(run: Path, quiet: Path, *, metrics: bool = True) -> None:
    """Assert that a run ended exactly like the undisturbed run, bit for bit."""
    if metrics:
        assert [row["step"] for row in rows(run)] == [row["step"] for row in rows(quiet)], "other steps are logged"
        for row, expected in zip(rows(run), rows(quiet), strict=True):
            assert row == expected, f"step {expected['step']} is logged otherwise"
        assert (run / "best").read_text() == (quiet / "best").read_text(), "best names another step"
    assert latest(run) == latest(quiet)
    mine, theirs = tensors(run, latest(run)), tensors(quiet, latest(quiet))
    assert mine.keys() == theirs.keys() and mine, "the checkpoints hold other tensors"
    different = [name for name in mine if not torch.equal(mine[name], theirs[name])]
    assert not different, f"these tensors differ: {different}"


def rewind(run: Path, step: int) -> Path:
    """Take a run's folder back to a step before its first evaluation, as after a kill."""
    for folder in run.glob("step_*"):
        if int(folder.name[5:]) > step:
            shutil.rmtree(folder)
    (run / "latest").write_text(f"step_{step:08d}\n")
    (run / "best").unlink(missing_ok=True)
    return run


# ---- hooks, which disturb a run from inside ----------------------------------------------------


def before_step(action: Callable[[int], None]) -> None:
    """Call `action(number of the step in this process)` before each training step."""
    import pretrain

    step, counted = pretrain.train_step, iter(range(1, 10**6))

    def slowed(*args: Any, **kwargs: Any) -> Any:
        action(next(counted))
        return step(*args, **kwargs)

    pretrain.train_step = slowed


def each_step_takes(seconds: float, rank: int) -> None:
    """Make each step take at least this long."""
    before_step(lambda _: time.sleep(seconds))


def slowly(rank: int) -> None:
    """Make each step long enough for a test to disturb it."""
    each_step_takes(0.05, rank)


def on_first_attempt(hook: Hook, rank: int) -> None:
    """Call the hook only before torchrun's first restart."""
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        hook(rank)


def raises(at_step: int, on_rank: int, rank: int) -> None:
    """Raise an error on one rank. It is not a UserError."""

    def fail(step: int) -> None:
        if step == at_step and rank == on_rank:
            raise RuntimeError("the ceiling fell down")

    before_step(fail)


def killed_at_file_event(run: str, number: int, rank: int) -> None:
    """Kill rank 0 just before its n-th write, rename or removal in the run's folder."""
    left = iter(range(number - 1))

    def audit(event: str, args: tuple[Any, ...]) -> None:
        is_change = event in ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
        is_change |= event == "open" and bool(args[2] & (os.O_WRONLY | os.O_RDWR))
        # Inside rmtree, paths are relative to a descriptor.
        if is_change and (run in str(args[0]) or event in ("os.remove", "os.rmdir")) and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    if rank == 0:
        sys.addaudithook(audit)


def stopped_in_evaluation(number: int, on_rank: int, rank: int) -> None:
    """Send SIGTERM to one rank during the second batch of the n-th evaluation."""
    from dataset.loader import EvalLoader

    batches, counted = EvalLoader.batches, iter(range(1, 10**6))

    def interrupted(*args: Any) -> Any:
        evaluation = next(counted)
        for index, batch in enumerate(batches(*args)):
            if evaluation == number and index == 1 and rank == on_rank:
                os.kill(os.getpid(), signal.SIGTERM)
            yield batch

    EvalLoader.batches = interrupted  # type: ignore[method-assign,assignment]


def stopped_after(num_steps: int, rank: int) -> None:
    """Send SIGTERM to rank 0 in its n-th step, which becomes the last step."""

    def stop(step: int) -> None:
        if step == num_steps and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)

    before_step(stop)


def stopped_at_once(rank: int) -> None:
    """Send SIGTERM while the dataset is opened, before the training loop."""
    import pretrain

    open_data = pretrain.open_data  # type: ignore[attr-defined]

    def interrupted(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return open_data(*args)

    pretrain.open_data = interrupted  # type: ignore[attr-defined,assignment]


def small_disk(num_bytes: int, rank: int) -> None:
    """Limit the size of files. Writing more fails with "File too large"."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))


def full_disk(first_step: int, end_step: int, on_ranks: list[int], rank: int, *, num_bytes: int = 20_000) -> None:
    """Let some ranks write no file beyond a size. The run waits for each save."""
    from records.checkpoint.writer import Checkpointer

    try_again = Checkpointer.try_again

    def and_wait(self: Any) -> None:
        try_again(self)
        futures.wait([self._saving])

    Checkpointer.try_again = and_wait  # type: ignore[method-assign]
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits = {first_step: num_bytes, end_step: most}

    def limit(step: int) -> None:
        if step in limits and rank in on_ranks:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limits[step], most))

    before_step(limit)


def small_disk_later(at_step: int, num_bytes: int, on_ranks: list[int], rank: int) -> None:
    """Limit the size of files from a step on and only on some ranks."""
    before_step(lambda step: small_disk(num_bytes, rank) if step == at_step and rank in on_ranks else None)


def with_arguments(hook: Callable[..., None], *arguments: object) -> Hook:
    """Return a hook with all arguments but the rank. It can be pickled."""
    return functools.partial(hook, *arguments)
