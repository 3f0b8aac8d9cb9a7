"""Measure how training scales over ranks: step time, efficiency, bytes and memory by strategy.

python -m benchmarks.scaling [--ranks 1 2 4] [--batch 16] [--steps 20] [OPTION...] [OVERRIDE...]
python -m benchmarks.scaling --threads-against-processes [OPTION...] [OVERRIDE...]

Each line of the table is a run of pretrain.py under torchrun, without its first steps. weak: every
rank has --batch slots. strong: the ranks share --batch slots.

The bytes sent are counted at the loopback interface, which no other program may use meanwhile. On
Linux, `unshare -rn sh -c 'ip link set lo up; python -m benchmarks.scaling'` ensures that. On CUDA
the ranks of a machine don't use this interface, and the table has only the bytes in theory. The
theory assumes the defaults of the strategies: no compression, no narrower dtypes, no blocks that
stay gathered, and no sharded puzzle table.
"""
# B = slots of the global batch

import json
import os
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

from benchmarks.harness import REPOSITORY, build_sudoku, machine, parser_of, pretrain_command, spread, table, write
from dataset.schema import open_datasets
from models import build_arch
from models.act import ActSettings, empty_batch, initial_carry, segment
from models.base import RecursiveModel
from models.block import Block
from records.lock import RunLock
from training.config import PretrainConfig
from training.data import Sizes
from training.resume import read_start
from utils.command_line import CommandLine
from utils.ranks.config import Axes
from utils.ranks.launch import Launch

_WARMUP = 5
# A model that two CPU cores can train in minutes.
RECIPE = ["arch.hidden_size=128", "arch.num_heads=4", "arch.forward_dtype=float32"]
SIZES = {
    "hidden 128": ["arch.hidden_size=128", "arch.num_heads=4"],
    "hidden 512": ["arch.hidden_size=512", "arch.num_heads=8"],
}
_ALWAYS = ["wandb.mode=disabled", "log_interval=1", "eval_interval=null", "eval_every_n_steps=null", "best_metric=null"]


@dataclass
class Measured:
    """The figures of one run. Bytes are the average that a rank sends in a step."""

    kind: str
    strategy: str
    num_ranks: int
    num_threads: int
    global_batch_size: int
    step_ms: list[float]
    comm_share: float | None  # None for one rank
    imbalance: float | None
    memory_gb: list[float]  # the peak of each rank
    bytes_sent: float | None  # None if the ranks don't use the loopback interface
    bytes_in_theory: float = 0.0
    efficiency: float = 1.0

    def row(self) -> list[object]:
        def mb(value: float | None) -> str:
            return "-" if value is None else f"{value / 1e6:.2f}"

        share = "-" if self.comm_share is None else f"{self.comm_share:.0%}"
        imbalance = "-" if self.imbalance is None else f"{self.imbalance:.2f}"
        memory = f"{min(self.memory_gb):.2f}-{max(self.memory_gb):.2f}"
        cells = [self.kind, self.strategy, self.num_ranks, self.num_threads, self.global_batch_size]
        cells += [spread(self.step_ms, "{:.0f}".format), f"{self.efficiency:.0%}", share, imbalance]
        return [*cells, mb(self.bytes_sent), mb(self.bytes_in_theory), memory]


TITLES = ["kind", "strategy", "ranks", "threads", "batch", "ms/step", "efficiency", "comm", "imbalance"]
TITLES += ["MB sent", "in theory", "GB a rank"]


# ---- theory ------------------------------------------------------------------------------------


@dataclass
class Work:
    """Sizes of the parts of a training step with one slot, in bytes."""

    blocks: int = 0  # all weights of all blocks
    others: int = 0  # weights of embeddings and heads
    called: int = 0  # weights of the blocks that were called, counted once for each call
    called_with_grad: int = 0
    passes: int = 0  # number of forward passes of the whole model
    passes_with_grad: int = 0
    state: int = 0  # output of one call of a block
    activations: int = 0  # outputs of all calls
    activations_with_grad: int = 0
    puzzle_rows: int = 0  # gradient and number of the slot's puzzle row


def count_work(config: PretrainConfig) -> Work:
    """Run a step and count the calls of blocks in it, with gradient and without."""
    any_size = config.puzzle_arch.reads_boards_of_any_size
    split = open_datasets(config.train_paths, "train", numbered_by=config.train_paths, any_size=any_size)
    sizes = Sizes.of(split)
    model = build_arch(config.arch, **sizes.as_dict())
    assert isinstance(model, RecursiveModel)
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
    batch = empty_batch(1, sizes.seq_len, torch.device("cpu"))
    depth = config.puzzle_arch.depth_at(_WARMUP, config.max_steps or _WARMUP)
    least_B = torch.ones(1, dtype=torch.int32)
    segment(model, initial_carry(model, batch), batch, ActSettings(depth, 1, least_B))
    if model.puzzle_embedding is not None:
        work.puzzle_rows = model.puzzle_embedding.weight[0].nbytes + batch["puzzle_identifiers"].element_size()
    return work


def bytes_in_theory(settings: list[str], num_ranks: int) -> float:
    """Return the bytes that a rank sends in a step if collectives are rings.

    In a ring of n ranks, each rank sends (n-1)/n of what is gathered or scattered, and twice that
    for a sum. Gloo has no scatter and sums the whole tensor instead, which takes twice the bytes
    (measured with torch 2.13).
    """
    overrides = CommandLine.parse(settings, "pretrain", "").overrides
    config = read_start(overrides, RunLock(), Launch()).config
    work, axes = count_work(config), config.parallel.axes(num_ranks) or Axes()
    shares = axes.replicate * axes.shard

    def ring(num_ranks: int) -> float:
        return (num_ranks - 1) / num_ranks

    sent = ring(shares) * config.global_batch_size * work.puzzle_rows
    if config.parallel.name == "pipeline":
        # States cross a boundary, and their gradients come back. Equal stages gather the weights of
        # their blocks and scatter the gradients, and sum all other gradients.
        states = work.state * config.global_batch_size / shares
        blocks, others = work.blocks / axes.model, work.others / axes.model
        sent += 2 * ring(axes.model) * states + 2 * ring(axes.shard) * blocks
        return sent + 2 * ring(axes.replicate) * blocks / axes.shard + 2 * ring(shares) * others
    # Attention and MLP each end with a sum of activations, and so do their backward passes.
    activations = 2 * (work.activations + work.activations_with_grad) * config.global_batch_size / shares
    # The weights of a block are gathered for each call. A call with gradient gathers them again in
    # the backward pass, which ends with a scatter.
    gathered = (work.called + 2 * work.called_with_grad) / axes.model
    gathered += (work.passes + 2 * work.passes_with_grad) * work.others
    own_weights = (work.blocks / axes.model + work.others) / axes.shard
    sent += 2 * ring(axes.model) * activations + ring(axes.shard) * gathered
    return sent + 2 * ring(axes.replicate) * own_weights


# ---- runs --------------------------------------------------------------------------------------


def measure(
    kind: str, strategy: str, num_ranks: int, num_threads: int, batch: int, num_steps: int, overrides: list[str]
) -> Measured | str:
    """Run pretrain.py and return its figures, or its error message.

    Communication is traced in the step after the timed steps, because tracing takes time.
    """
    timed = _WARMUP + num_steps
    settings = [f"parallel={strategy}", f"global_batch_size={batch}", f"max_steps={timed + 1}"]
    settings += [f"perf_every_n_steps={timed + 1}", f"dist.num_threads={num_threads}", *_ALWAYS, *overrides]
    with tempfile.TemporaryDirectory() as folder:
        command = pretrain_command(num_ranks, *settings, f"checkpoint_path={folder}/run")
        environment = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
        idle = _idle_bytes_per_second()
        log, rows_path = Path(folder, "log"), Path(folder, "run", "metrics.jsonl")
        with log.open("w", encoding="utf-8") as stderr:
            process = subprocess.Popen(command, cwd=REPOSITORY, stderr=stderr, env=environment)
            began_at, began = _when(rows_path, _WARMUP, process)
            ended_at, ended = _when(rows_path, timed, process)
            process.wait()
        if process.returncode:
            lines = log.read_text(encoding="utf-8").strip().splitlines()
            return next((line for line in lines if line.startswith("error: ")), "\n".join(lines))
        rows = [json.loads(line) for line in rows_path.read_text(encoding="utf-8").splitlines()]
    last = rows[-1]
    sent = (ended - began - idle * (ended_at - began_at)) / num_steps / num_ranks
    return Measured(
        *(kind, strategy, num_ranks, num_threads, batch),
        step_ms=[row["perf/step_ms"] for row in rows[_WARMUP:timed]],
        comm_share=last.get("perf/comm_share"),
        imbalance=last.get("perf/imbalance"),
        memory_gb=[last.get(f"perf/memory_gb/rank_{rank}", last["perf/max_memory_gb"]) for rank in range(num_ranks)],
        bytes_sent=None if torch.cuda.is_available() else sent,
        bytes_in_theory=bytes_in_theory(settings, num_ranks),
    )


def _when(rows_path: Path, num_rows: int, process: "subprocess.Popen[bytes]") -> tuple[float, int]:
    """Wait until the run has logged some steps. Return the time and the bytes sent by then."""
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


# ---- tables ------------------------------------------------------------------------------------


def scaling(
    ranks: list[int], strategies: list[str], batch: int, num_steps: int, overrides: list[str]
) -> Iterator[Measured | str]:
    """Yield the runs. The first run has one rank, and all other runs are compared with it.

    If the first run fails, there are no others.
    """
    single = measure("both", "ddp", 1, 1, batch, num_steps, overrides)
    yield single
    if isinstance(single, str):
        return
    for kind in ("weak", "strong"):
        for strategy in strategies:
            # With fewer than 4 ranks, hsdp and fsdp_tp are the same as one of the strategies they
            # combine.
            for num_ranks in (n for n in ranks if n >= (4 if strategy in ("hsdp", "fsdp_tp") else 2)):
                total = batch * num_ranks if kind == "weak" else batch
                found = measure(kind, strategy, num_ranks, 1, total, num_steps, overrides)
                if isinstance(found, str):
                    found = f"{kind} {strategy} x {num_ranks}: {found}"
                else:
                    done = total / batch / num_ranks  # share of the work of this many single ranks in one step
                    found.efficiency = done * median(single.step_ms) / median(found.step_ms)
                yield found


def threads_against_processes(batch: int, num_steps: int, overrides: list[str]) -> Iterator[Measured | str]:
    """Yield runs that use all cores as threads of one process, and as one process for each core.

    The batch is the same, and the model has two sizes.
    """
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
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp", "tp", "fsdp_tp"])
    parser.add_argument("--batch", type=int, default=16, help="slots of each rank (weak) or of all ranks (strong)")
    parser.add_argument("--steps", type=int, default=20, help="number of timed steps")
    parser.add_argument("--threads-against-processes", action="store_true")
    args = parser.parse_intermixed_args()

    machine()
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        overrides = [*RECIPE, *args.overrides]
        if not any(word.startswith("data_path") for word in overrides):
            data = build_sudoku(Path(folder, "sudoku"), "--generate", "64", "--generate-test", "4")
            overrides.append(f"data_path={data}")
        if args.threads_against_processes:
            runs = threads_against_processes(args.batch, args.steps, overrides)
        else:
            runs = scaling(args.ranks, args.strategies, args.batch, args.steps, overrides)
        for each in runs:
            if isinstance(each, str):
                print(each, flush=True)
                continue
            found.append(each)
            write(args.json, [asdict(run) for run in found])
    print(table(TITLES, (each.row() for each in found)))


if __name__ == "__main__":
    main()
