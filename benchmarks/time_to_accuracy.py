"""Measure how long a recipe trains until it solves a share of 500 unseen 6x6 Sudokus.

python -m benchmarks.time_to_accuracy [--target 0.83] [--seeds 0 1 2] [--arms demo published]
                                      [--json FILE] [OVERRIDE...]

The recipes take turns, seed after seed, so that a busy minute doesn't slow only one of them. A run
ends when an evaluation reaches the target. The time of evaluations does not count, and neither does
that of starting. OMP_NUM_THREADS sets the number of threads of a run.
"""

import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import FIRST_DEMO, REPOSITORY, build_sudoku, machine, parser_of, spread, table, write
from utils.run.history import METRICS_FILE, History

_EXACT = "eval/all/exact_accuracy"
ARMS = {
    "demo": ["experiment=demo", "eval_every_n_steps=25"],
    "trm_sudoku_6x6": ["experiment=trm_sudoku_6x6", "eval_every_n_steps=50"],
    "first demo": [*FIRST_DEMO, "eval_every_n_steps=25"],
    # HRM's model, loss, gradients, optimizer and constant rate. What depends on the size of the
    # task is chosen in its favour: width, layers, segments, batch, and the best of three rates
    # (docs/lab/log.md).
    "published": [
        *("arch=hrm", "arch.mlp_t=true", "arch.pos_encodings=none", "arch.hidden_size=64", "arch.num_heads=4"),
        *("arch.H_layers=1", "arch.L_layers=1", "arch.puzzle_emb_ndim=0", "arch.halt_max_steps=8"),
        *("arch.forward_dtype=auto", "optim=adam_atan2", "lr=1e-3", "lr_warmup_steps=50", "global_batch_size=64"),
        *("augment=online", "eval_every_n_steps=100", "eval_batch_size=500", "max_steps=4000"),
    ],
}
SHARED = [
    *("log_interval=5", "epochs=1000000", "eval_interval=null", "wandb.mode=disabled"),
    *("checkpoint_every_eval=false", "best_metric=null"),
]


@dataclass
class Reached:
    """When a run reached the target. The values are None if it never did."""

    arm: str
    seed: int
    step: int | None
    seconds: float | None  # of training alone


def train_until(target: float, arm: str, seed: int, data: Path, overrides: list[str]) -> Reached:
    """Train until an evaluation reaches the target, or to the end of the recipe."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "pretrain.py", *ARMS[arm], *SHARED, f"data_path={data}", f"seed={seed}"]
        command += [*overrides, f"checkpoint_path={run}"]
        process = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
        history, reached, has_ended = History(run / METRICS_FILE), None, False
        while reached is None and not has_ended:
            time.sleep(1.0)
            has_ended = process.poll() is not None  # before the rows are read, so that none is missed
            history.refresh()
            reached = next((row["step"] for row in history.rows if row.get(_EXACT, -1.0) >= target), None)
        process.send_signal(signal.SIGINT)
        message = process.communicate()[1]
        if process.returncode:
            sys.exit(message.strip())
    if reached is None:
        return Reached(arm, seed, None, None)
    return Reached(arm, seed, reached, seconds_of(history.rows, reached))


def seconds_of(rows: list[dict[str, Any]], last_step: int) -> float:
    """Return the seconds that the steps up to the last one took.

    A row's step_ms is the mean over the steps since the row before that has one. The row of the
    last step must have one.
    """
    timed = [row for row in rows if row["step"] <= last_step and "perf/step_ms" in row]
    assert timed[-1]["step"] == last_step, "evaluate at steps that are logged anyway"
    before = [0, *(row["step"] for row in timed)]
    return 1e-3 * sum((row["step"] - step) * row["perf/step_ms"] for step, row in zip(before, timed, strict=False))


def shown(results: list[Reached], target: float) -> str:
    """Return a row for each arm: the median and the ends over its seeds."""
    rows = []
    for arm in dict.fromkeys(result.arm for result in results):
        own = [result for result in results if result.arm == arm]
        steps = ", ".join("never" if result.step is None else str(result.step) for result in own)
        seconds = [result.seconds for result in own if result.seconds is not None]
        cell = spread(seconds, "{:.1f}".format) if seconds else "never"
        if 0 < len(seconds) < len(own):  # the median leaves out the slowest seeds
            cell += f", {len(seconds)} of {len(own)} seeds"
        rows.append([arm, steps, cell])
    return table(["recipe", f"steps to {target:g}", "seconds of training, median (lowest to highest)"], rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--target", type=float, default=0.83, help="share of test puzzles (default: %(default)s)")
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    args = parser.parse_intermixed_args()

    machine()
    results: list[Reached] = []
    with tempfile.TemporaryDirectory() as folder:
        data = build_sudoku(Path(folder) / "data", "--box", "2x3", "--generate", "1000", "--generate-test", "500")
        for seed in args.seeds:
            for arm in args.arms:
                results.append(train_until(args.target, arm, seed, data, args.overrides))
                print(results[-1], flush=True)
                write(args.json, [asdict(result) for result in results])
    print(shown(results, args.target))


if __name__ == "__main__":
    main()
