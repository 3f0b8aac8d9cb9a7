"""Measure how the cost of a step grows with the work: nothing may grow faster than its formula.

python -m benchmarks.growth [--axis batch ...] [--values N ...] [--round-s 0.5] [--rounds 5]
                            [--json FILE] [--cpu-time] [OVERRIDE...]
e.g. OMP_NUM_THREADS=1 python -m benchmarks.growth --axis tokens puzzles device=cpu arch=trm

Each axis trains a small model on generated data with several values of one quantity, and everything
else fixed. The runs of an axis take turns in every round, warm, without waiting at each step. An
OVERRIDE of pretrain.py changes the model of all axes.

The formula of a step is the sum of its parts at the smallest value, each multiplied by the growth
of what it works on:

data                                        tokens of the batch
forward without gradient, forward, backward FLOPs of the part (training/flops.py)
puzzle table                                rows of the batch, not of the table
optimizer                                   bytes of the trained weights
average                                     bytes of the weights and the puzzle table
metrics                                     nothing: it is a fixed number of sums
reduction                                   bytes of the trained weights
rest                                        bytes of the trained weights and the slots

Where the time grows more than TOLERANCE times as much as the formula says, over the smallest value
or over the value before, the program says so. The formula of the memory is the bytes of the state
and of the activations that autograd keeps. Because every process needs some memory in any case,
what it needs more than the process of the smallest value is compared. What a step holds for a
moment only is not in this formula: MEMORY_TOLERANCE allows for it.

With --cpu-time, the time that the process used of the CPU is compared, for a machine that does
other work as well. The parts of a step are always times of the clock.

Ranks share the cores of this machine; each has the slots of one process. docs/scaling.md compares
what they send with its formula.
"""

import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import parser_of, spread, table, write
from benchmarks.on_request import Asked
from dataset.builder import SplitWriter
from models.puzzle_embedding import PUZZLE_TABLE
from utils.perf.recording import AVERAGE, BACKWARD, FORWARD, METRICS, NO_GRAD

TOLERANCE = 1.25
MEMORY_TOLERANCE = 3.0
# The time of a shorter part is mostly that of starting it.
_PART_COUNTS = 0.1
# Below this the caches of the memory allocator decide.
_MEMORY_COUNTS_MB = 100.0
_PART_STEPS = 7
_MOST_STEPS = 50
_EXAMPLES = 1024  # at least

MODEL = [
    *("arch=hrm", "arch.hidden_size=64", "arch.num_heads=2", "arch.H_layers=1", "arch.L_layers=1"),
    *("arch.forward_dtype=float32", "global_batch_size=4", "ema=true", "epochs=1000", "eval_interval=null"),
]

Point = dict[str, float]


@dataclass(frozen=True)
class Axis:
    """A quantity, its values, and the keys of pretrain.py that give it a value.

    A value may also change the number of tokens, puzzles or ranks, which are no keys.
    """

    name: str
    values: list[int]
    keys: Callable[[int], list[str]] = lambda _: []

    def command(self, value: int, overrides: list[str], data: Path) -> list[str]:
        """Return the command that trains with this value."""
        ranks = value if self.name == "ranks" else 1
        launcher = ["torch.distributed.run", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else []
        given = [*MODEL, *self.keys(value), f"data_path={data}", *overrides]
        return [sys.executable, "-m", *launcher, "benchmarks.our_steps", *given]

    def tokens_and_puzzles(self, value: int) -> tuple[int, int]:
        return (value if self.name == "tokens" else 81, value if self.name == "puzzles" else _EXAMPLES)


AXES = [
    Axis("batch", [4, 16, 64, 256], lambda n: [f"global_batch_size={n}"]),
    Axis("width", [64, 128, 256, 512], lambda n: [f"arch.hidden_size={n}", f"arch.num_heads={n // 32}"]),
    Axis("layers", [1, 2, 4, 8], lambda n: [f"arch.H_layers={n}", f"arch.L_layers={n}"]),
    Axis("cycles", [1, 2, 4], lambda n: [f"arch.H_cycles={n}", f"arch.L_cycles={n}"]),
    Axis("tokens", [81, 256, 900, 2500], lambda _: ["global_batch_size=1"]),
    Axis("puzzles", [1, 1000, 100_000, 1_000_000]),
    Axis("ranks", [1, 2, 4], lambda n: [f"global_batch_size={4 * n}"]),
]


def _medians(rows: list[Point]) -> Point:
    """Return the median of each part, so that a step that other work interrupted does not count."""
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def write_data(folder: Path, num_tokens: int, num_puzzles: int) -> Path:
    """Write a training split of random tokens, each puzzle a group of its own."""
    num_examples = max(_EXAMPLES, num_puzzles)
    rng, examples = np.random.default_rng(0), np.arange(num_examples)
    ends = (np.arange(num_puzzles) + 1) * num_examples // num_puzzles
    folder.mkdir()
    with SplitWriter(
        folder / "train", seq_len=num_tokens, vocab_size=11, num_puzzle_identifiers=num_puzzles + 1
    ) as writer:
        tokens_NS = rng.integers(1, 11, (len(examples), num_tokens), dtype=np.uint8)
        writer.add(tokens_NS, tokens_NS, np.diff(ends, prepend=0), np.arange(num_puzzles) + 1)
        writer.end_groups(np.ones(num_puzzles, np.int64))
    return folder


def measure(axis: Axis, overrides: list[str], round_s: float, num_rounds: int) -> list[dict[str, Any]]:
    """Return for each value of an axis the rounds, the parts of a step, and the sizes."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        kinds = set(map(axis.tokens_and_puzzles, axis.values))
        data = {kind: write_data(folder / "-".join(map(str, kind)), *kind) for kind in kinds}
        programs = [
            stack.enter_context(Asked(axis.command(value, overrides, data[axis.tokens_and_puzzles(value)])))
            for value in axis.values
        ]
        first = [program.ask("steps 1")["step_ms"] for program in programs]
        num_steps = [min(_MOST_STEPS, max(1, round(1e3 * round_s / step_ms))) for step_ms in first]
        rounds: list[list[Point]] = [[] for _ in programs]
        for _ in range(num_rounds):
            for program, rows, number in zip(programs, rounds, num_steps, strict=True):
                rows.append(program.ask(f"steps {number}"))
        # The parts and sizes come last: the one slows down what follows it, the other takes memory.
        return [
            {
                "value": value,
                "rounds": rows,
                "parts": _medians([program.ask("parts 1") for _ in range(_PART_STEPS)]),
                "sizes": program.ask("sizes"),
            }
            for value, rows, program in zip(axis.values, rounds, programs, strict=True)
        ]


# ---- the formula -------------------------------------------------------------------------------


def work_of_parts(result: dict[str, Any], cores: int, ranks: int) -> Point:
    """Return for each part of a step what it works on, in units that only it uses."""
    sizes = result["sizes"]
    at_once = ranks / min(ranks, cores)  # ranks that share a core take turns
    work = {name: sizes[f"flops {name}"] / ranks for name in (NO_GRAD, FORWARD, BACKWARD)}
    work |= {"data": sizes["batch_bytes"], PUZZLE_TABLE: sizes["row_bytes"], "optimizer": sizes["trained_bytes"]}
    work |= {AVERAGE: sizes["averaged_bytes"], METRICS: 1.0, "reduction": sizes["trained_bytes"]}
    work["rest"] = sizes["trained_bytes"] + sizes["slot_bytes"]
    return {name: at_once * amount for name, amount in work.items()}


def formula(parts: Point, before: Point, after: Point) -> float:
    """Return how many times as long a step takes if each of its parts grows as its work does.

    Args:
        parts: the ms of each part with the smaller value.
        before, after: the work of each part with the smaller and the larger value.
    """
    ms = {name: each for name, each in parts.items() if name != "step"}
    return sum(each * growth(before[name], after[name]) for name, each in ms.items()) / sum(ms.values())


def growth(before: float, after: float) -> float:
    return after / before if before else 1.0


def compare(axis: Axis, results: list[dict[str, Any]], cores: int, clock: str = "step_ms") -> dict[str, Any]:
    """Return the rows of an axis, and what grows faster than its formula.

    Args:
        clock: the figure of a round to compare, step_ms or cpu_ms.
    """
    ranks = [result["value"] if axis.name == "ranks" else 1 for result in results]
    work = [work_of_parts(result, cores, number) for result, number in zip(results, ranks, strict=True)]
    rows: list[dict[str, Any]] = []
    flags: list[str] = []
    for number, result in enumerate(results):
        where = f"{axis.name} {result['value']}"
        row: dict[str, Any] = {"value": result["value"], "step_ms": [each[clock] for each in result["rounds"]]}
        for key, other in (("", 0), ("_before", max(0, number - 1))):
            row[f"growth{key}"] = _growth(results[other], result, clock)
            row[f"formula{key}"] = formula(results[other]["parts"], work[other], work[number])
            row[f"quotient{key}"] = row[f"growth{key}"] / row[f"formula{key}"]
            if row[f"quotient{key}"] > TOLERANCE:
                over = f"{axis.name} {results[other]['value']}"
                flags.append(
                    f"{where}: a step grows {row[f'quotient{key}']:.2f} times as much as its formula over {over}"
                )
        row["memory_gb"] = _memory_gb(result)
        row["more_mb"] = 1e3 * (row["memory_gb"] - _memory_gb(results[0]))
        row["formula_mb"] = (_needed(result) - _needed(results[0])) / 1e6
        if row["more_mb"] > _MEMORY_COUNTS_MB and row["more_mb"] > MEMORY_TOLERANCE * row["formula_mb"]:
            flags.append(f"{where}: {row['more_mb']:.0f} MB more memory than the formula's {row['formula_mb']:.0f}")
        rows.append(row)
        if max(row["quotient"], row["quotient_before"]) <= TOLERANCE:
            continue
        for part, ms in result["parts"].items():  # which of them it is
            first_ms = results[0]["parts"][part]
            counts = part != "step" and first_ms and ms >= _PART_COUNTS * result["parts"]["step"]
            if counts and (faster := ms / first_ms / growth(work[0][part], work[number][part])) > TOLERANCE:
                flags.append(f"{where}: {part} grows {faster:.2f} times as much as its formula")
    return {"axis": axis.name, "rows": rows, "work": work, "results": results, "flags": flags}


def _growth(first: dict[str, Any], other: dict[str, Any], clock: str) -> float:
    """Return how many times as long a step takes. The rounds are compared one by one."""
    pairs = zip(first["rounds"], other["rounds"], strict=True)
    return statistics.median(after[clock] / before[clock] for before, after in pairs)


def _memory_gb(result: dict[str, Any]) -> float:
    return float(max(row["max_memory_gb"] for row in result["rounds"]))


def _needed(result: dict[str, Any]) -> float:
    return float(result["sizes"]["state_bytes"] + result["sizes"]["kept_bytes"])


def tables(compared: dict[str, Any]) -> str:
    """Return the rows of an axis, the parts of a step, and the flags, as Markdown."""
    axis, results = compared["axis"], compared["results"]
    figures = ("growth", "formula", "quotient", "quotient_before", "memory_gb", "more_mb", "formula_mb")
    steps = [
        [row["value"], spread(row["step_ms"], "{:.4g}".format), *(f"{row[key]:.3g}" for key in figures)]
        for row in compared["rows"]
    ]
    parts = [[part, *(f"{each['parts'][part]:.3g}" for each in results)] for part in results[0]["parts"]]
    return "\n\n".join(
        [
            table([axis, "step, ms", *figures], steps),
            table([f"ms of a step with {axis}", *(each["value"] for each in results)], parts),
            "\n".join(compared["flags"] or ["nothing grows faster than its formula"]),
        ]
    )


def main() -> None:
    parser = parser_of(__doc__)
    names = [axis.name for axis in AXES]
    parser.add_argument("--axis", nargs="+", choices=names, default=names, help="(default: all)")
    parser.add_argument("--values", nargs="+", type=int, help="values instead of those of the axis")
    parser.add_argument("--round-s", type=float, default=0.5, help="seconds of a round (default: 0.5)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu-time", action="store_true", help="compare the time of the CPU")
    args = parser.parse_intermixed_args()

    found = []
    for axis in (replace(axis, values=args.values or axis.values) for axis in AXES if axis.name in args.axis):
        results = measure(axis, args.overrides, args.round_s, args.rounds)
        # The CPU's clock stands still while a rank waits for a core, as if each had one of its own.
        cores, clock = (sys.maxsize, "cpu_ms") if args.cpu_time else (len(os.sched_getaffinity(0)), "step_ms")
        found.append(compare(axis, results, cores, clock))
        print(tables(found[-1]), end="\n\n", flush=True)
    write(args.json, found)


if __name__ == "__main__":
    main()
