"""How training scales: step time, efficiency, bytes and memory over ranks, for each strategy, against theory.

python -m benchmarks.scaling [--ranks 1 2 4] [--strategies ddp fsdp tp fsdp_tp] [--batch 16] [--steps 20]
                             [--json FILE] [OVERRIDE...]
python -m benchmarks.scaling --threads-against-processes [--batch 16] [--steps 20] [--json FILE] [OVERRIDE...]

Each line is a run of pretrain.py under torchrun, its first steps left out. weak: every further rank brings --batch
slots of its own; strong: --batch slots are shared out. Bytes are those of the loopback interface, over which nothing
else may talk meanwhile: on Linux, `unshare -rn sh -c 'ip link set lo up; python -m benchmarks.scaling'` makes sure.
On CUDA, where the ranks of a machine don't use it, they are theory alone. Theory knows the strategies as their YAML
has them: not compression, narrower dtypes, fewer gatherings or a sharded puzzle table.
"""
# B = slots of the global batch

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import psutil
import torch
from torch import Tensor, nn

from dataset.schema import open_datasets
from models import build_arch
from models.act import initial_carry, segment
from models.block import Block
from training.config import PretrainConfig
from training.data import Sizes
from utils.command_line import CommandLine
from utils.dist.config import Axes
from utils.dist.launch import Launch
from utils.run.lock import RunLock
from utils.run.resume import read_start

REPOSITORY = Path(__file__).resolve().parents[1]
_WARMUP = 5
# What two CPU cores can do in minutes.
RECIPE = ["arch.hidden_size=128", "arch.num_heads=4", "arch.forward_dtype=float32"]
SIZES = {
    "hidden 128": ["arch.hidden_size=128", "arch.num_heads=4"],
    "hidden 512": ["arch.hidden_size=512", "arch.num_heads=8"],
}
_ALWAYS = ["wandb.mode=disabled", "log_interval=1", "eval_interval=null", "eval_every_n_steps=null", "best_metric=null"]


@dataclass
class Measured:
    """One run. Bytes are what a rank sends in a step, on average."""

    kind: str
    strategy: str
    num_ranks: int
    num_threads: int
    global_batch_size: int
    step_ms: list[float]
    comm_share: float | None  # None of one rank
    imbalance: float | None
    memory_gb: list[float]  # of each rank, at its largest
    bytes_sent: float | None  # None where the loopback interface isn't what they use
    bytes_in_theory: float = 0.0
    efficiency: float = 1.0

    def row(self) -> str:
        def mb(value: float | None) -> str:
            return "-" if value is None else f"{value / 1e6:.2f}"

        spread = f"{median(self.step_ms):.0f} ({min(self.step_ms):.0f}-{max(self.step_ms):.0f})"
        share = "-" if self.comm_share is None else f"{self.comm_share:.0%}"
        imbalance = "-" if self.imbalance is None else f"{self.imbalance:.2f}"
        memory = f"{min(self.memory_gb):.2f}-{max(self.memory_gb):.2f}"
        cells = [self.kind, self.strategy, self.num_ranks, self.num_threads, self.global_batch_size, spread]
        cells += [f"{self.efficiency:.0%}", share, imbalance]
        return f"| {' | '.join(map(str, [*cells, mb(self.bytes_sent), mb(self.bytes_in_theory), memory]))} |"


HEAD = (
    "| kind | strategy | ranks | threads | batch | ms/step | efficiency | comm | imbalance | MB sent | in theory "
    f"| GB a rank |\n|{'---|' * 12}"
)


# ---- theory ----------------------------------------------------------------------------------------------


@dataclass
class Work:
    """What the parts of a step weigh, counted from a step of one slot. In bytes, those of blocks once for each call."""

    blocks: int = 0  # all weights of all blocks
    others: int = 0  # embeddings and heads
    called: int = 0  # weights of the blocks that were called, once for each call
    called_with_grad: int = 0
    passes: int = 0  # forwards of the model as a whole
    passes_with_grad: int = 0
    state: int = 0  # what one call of a block gives, of one slot
    activations: int = 0  # what all calls give
    activations_with_grad: int = 0
    puzzle_rows: int = 0  # their gradients and numbers, of one slot


def count_work(config: PretrainConfig) -> Work:
    """By watching which blocks are called in a step, with gradient and without."""
    sizes = Sizes.of(open_datasets(config.train_paths, "train", numbered_by=config.train_paths))
    model = build_arch(config.arch, **sizes.as_dict())
    model.init_weights(torch.Generator().manual_seed(0))
    work = Work()
    blocks = [module for module in model.modules() if isinstance(module, Block)]

    def weigh(module: nn.Module) -> int:
        return sum(parameter.nbytes for parameter in module.parameters())

    def saw_block(block: nn.Module, args: object, output: Tensor) -> None:
        work.called += weigh(block)
        work.state = output.nbytes
        work.activations += output.nbytes
        if torch.is_grad_enabled():
            work.called_with_grad += weigh(block)
            work.activations_with_grad += output.nbytes

    def saw_model(model: nn.Module, args: object, output: object) -> None:
        work.passes += 1
        work.passes_with_grad += torch.is_grad_enabled()

    for block in blocks:
        block.register_forward_hook(saw_block)
        work.blocks += weigh(block)
    model.register_forward_hook(saw_model)
    work.others = weigh(model) - work.blocks
    batch = {
        "inputs": torch.zeros(1, sizes.seq_len, dtype=torch.int32),
        "labels": torch.zeros(1, sizes.seq_len, dtype=torch.int32),
        "puzzle_identifiers": torch.zeros(1, dtype=torch.int32),
    }
    depth = config.arch.depth_at(_WARMUP, config.max_steps or _WARMUP)
    least_B = torch.ones(1, dtype=torch.int32)
    segment(model, initial_carry(model, batch), batch, training=True, depth=depth, min_halt_steps_B=least_B)
    if model.puzzle_embedding is not None:
        work.puzzle_rows = model.puzzle_embedding.weight[0].nbytes + batch["puzzle_identifiers"].element_size()
    return work


def bytes_in_theory(settings: list[str], num_ranks: int) -> float:
    """What a rank sends in a step, with rings: (n-1)/n of what is gathered or scattered, twice that for a sum.

    Gloo knows no scatter: it sums the whole, for twice the bytes (measured with torch 2.13).
    """
    overrides = CommandLine.parse(settings, "pretrain", "").overrides
    config = read_start(PretrainConfig, "pretrain", overrides, RunLock(), Launch()).config
    work, axes = count_work(config), config.parallel.axes(num_ranks) or Axes()
    shares = axes.replicate * axes.shard

    def ring(num_ranks: int) -> float:
        return (num_ranks - 1) / num_ranks

    sent = ring(shares) * config.global_batch_size * work.puzzle_rows
    if config.parallel.name == "pipeline":  # what passes a boundary, and its gradient back
        return sent + 2 * ring(axes.model) * work.state * config.global_batch_size
    # Attention and MLP each end in a sum of activations; so does the backward of each.
    activations = 2 * (work.activations + work.activations_with_grad) * config.global_batch_size / shares
    # A block's weights are gathered for each call, and for each call with gradient once more in the backward pass,
    # which ends in a scatter.
    gathered = (work.called + 2 * work.called_with_grad) / axes.model
    gathered += (work.passes + 2 * work.passes_with_grad) * work.others
    own_weights = (work.blocks / axes.model + work.others) / axes.shard
    sent += 2 * ring(axes.model) * activations + ring(axes.shard) * gathered
    return sent + 2 * ring(axes.replicate) * own_weights


# ---- runs ------------------------------------------------------------------------------------------------


def measure(
    kind: str, strategy: str, num_ranks: int, num_threads: int, batch: int, num_steps: int, overrides: list[str]
) -> Measured | str:
    """A run, or what pretrain.py finds wrong with it.

    The step after those that are timed is the sampled one, since a trace costs time.
    """
    timed = _WARMUP + num_steps
    settings = [f"parallel={strategy}", f"global_batch_size={batch}", f"max_steps={timed + 1}"]
    settings += [f"perf_every_n_steps={timed + 1}", f"dist.num_threads={num_threads}", *_ALWAYS, *overrides]
    with tempfile.TemporaryDirectory() as folder:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
        program = [*(torchrun if num_ranks > 1 else []), "pretrain.py"]
        command = [sys.executable, *program, *settings, f"checkpoint_path={folder}/run"]
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        idle = _idle_bytes_per_second()
        log, rows_path = Path(folder, "log"), Path(folder, "run", "metrics.jsonl")
        with log.open("w") as stderr:
            process = subprocess.Popen(command, cwd=REPOSITORY, stderr=stderr, env=environment)
            began_at, began = _when(rows_path, _WARMUP, process)
            ended_at, ended = _when(rows_path, timed, process)
            process.wait()
        if process.returncode:
            lines = log.read_text().strip().splitlines()
            return next((line for line in lines if line.startswith("error: ")), "\n".join(lines))
        rows = [json.loads(line) for line in rows_path.read_text().splitlines()]
    last = rows[-1]
    sent = (ended - began - idle * (ended_at - began_at)) / num_steps / num_ranks
    return Measured(
        kind=kind,
        strategy=strategy,
        num_ranks=num_ranks,
        num_threads=num_threads,
        global_batch_size=batch,
        step_ms=[row["perf/step_ms"] for row in rows[_WARMUP:timed]],
        comm_share=last.get("perf/comm_share"),
        imbalance=last.get("perf/imbalance"),
        memory_gb=[last.get(f"perf/memory_gb/rank_{rank}", last["perf/max_memory_gb"]) for rank in range(num_ranks)],
        bytes_sent=None if torch.cuda.is_available() else sent,
        bytes_in_theory=bytes_in_theory(settings, num_ranks),
    )


def _when(rows_path: Path, num_rows: int, process: "subprocess.Popen[bytes]") -> tuple[float, int]:
    """When the run has logged so many steps, and what has been sent by then."""
    while process.poll() is None:
        if rows_path.exists() and rows_path.read_bytes().count(b"\n") >= num_rows:
            break
        time.sleep(0.003)
    return time.perf_counter(), _bytes_sent()


def _bytes_sent() -> int:
    interfaces = psutil.net_io_counters(pernic=True)
    return sum(interfaces[name].bytes_sent for name in ("lo", "lo0") if name in interfaces)


def _idle_bytes_per_second() -> float:
    before = _bytes_sent()
    time.sleep(1.0)
    return float(_bytes_sent() - before)


# ---- tables ----------------------------------------------------------------------------------------------


def scaling(
    ranks: list[int], strategies: list[str], batch: int, num_steps: int, overrides: list[str]
) -> Iterator[Measured | str]:
    """One rank first, with which all others are compared: they can't be, if it fails."""
    single = measure("both", "ddp", 1, 1, batch, num_steps, overrides)
    yield single
    if isinstance(single, str):
        return
    for kind in ("weak", "strong"):
        for strategy in strategies:
            # With fewer it is one of its halves.
            for num_ranks in (n for n in ranks if n >= (4 if strategy in ("hsdp", "fsdp_tp") else 2)):
                total = batch * num_ranks if kind == "weak" else batch
                found = measure(kind, strategy, num_ranks, 1, total, num_steps, overrides)
                if isinstance(found, str):
                    found = f"{kind} {strategy} x {num_ranks}: {found}"
                else:
                    done = total / batch / num_ranks  # of what as many single ranks do in the time of one step
                    found.efficiency = done * median(single.step_ms) / median(found.step_ms)
                yield found


def threads_against_processes(batch: int, num_steps: int, overrides: list[str]) -> Iterator[Measured | str]:
    """All cores in one process with threads, or in a process each: the same batch, at two sizes of the model."""
    num_cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    for kind, size in SIZES.items():
        single: float | None = None
        for num_ranks, num_threads in ((1, 1), (1, num_cores), (num_cores, 1)):
            found = measure(kind, "ddp", num_ranks, num_threads, batch, num_steps, [*overrides, *size])
            if isinstance(found, Measured):
                single = single or median(found.step_ms)
                found.efficiency = single / median(found.step_ms) / max(num_ranks, num_threads)
            yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help=f"default: {' '.join(RECIPE)}")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp", "tp", "fsdp_tp"])
    parser.add_argument("--batch", type=int, default=16, help="slots of a rank (weak) or of all (strong)")
    parser.add_argument("--steps", type=int, default=20, help="timed ones")
    parser.add_argument("--threads-against-processes", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_intermixed_args()

    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    print(f"{os.cpu_count()} cores of {machine}; torch {torch.__version__}; {args.steps} steps")
    print(HEAD)
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*RECIPE, *args.overrides]
        if not any(word.startswith("data_path") for word in overrides):
            overrides.append(f"data_path={folder}/sudoku")
            builder = ["dataset/build_sudoku_dataset.py", "--output-dir", f"{folder}/sudoku", "--generate", "64"]
            builder += ["--generate-test", "4"]
            subprocess.run([sys.executable, *builder], cwd=REPOSITORY, check=True, capture_output=True)
        if args.threads_against_processes:
            runs = threads_against_processes(args.batch, args.steps, overrides)
        else:
            runs = scaling(args.ranks, args.strategies, args.batch, args.steps, overrides)
        for each in runs:
            print(each if isinstance(each, str) else each.row(), flush=True)
            if isinstance(each, Measured):
                found.append(each)
            if args.json is not None:
                args.json.write_text(json.dumps([asdict(run) for run in found], indent=1) + "\n")


if __name__ == "__main__":
    main()
