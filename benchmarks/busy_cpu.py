"""Time steps of a small TRM while other programs use the cores, for ways in which threads may wait.

python -m benchmarks.busy_cpu --data-path data/sudoku-6x6 [--busy 2] [--rounds 3] [ARM...]

An arm is a number of threads, and perhaps GOMP_SPINCOUNT behind a colon: 1 2 2:3000. `default` as
the count leaves the choice to OpenMP. The arms alternate. Busy loops stand still while a run
starts, and run from its tenth step on.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

from benchmarks.harness import machine, parser_of, spread, table
from utils.openmp import SPINS
from utils.run.history import METRICS_FILE, History

_WARMUP = 10
# Threads that spin on busy cores take seconds for a step.
_TIMEOUT_S = 600


def step_ms(arm: str, data_path: str, steps: int, busy: list[subprocess.Popen[bytes]]) -> float:
    """Return the mean time of the steps after the first ten, in ms."""
    threads, _, spin = arm.partition(":")
    # OpenMP takes 300,000 rounds where the variable is not set. utils/openmp.py leaves a set one
    # alone.
    environment = os.environ | {"OMP_NUM_THREADS": threads, "WANDB_MODE": "disabled"}
    if spin:
        environment["GOMP_SPINCOUNT"] = "300000" if spin == "default" else spin
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        overrides = ["experiment=trm_sudoku_6x6", f"data_path={data_path}", f"checkpoint_path={run}"]
        overrides += [f"max_steps={steps}", "eval_every_n_steps=null", "best_metric=null", "data_paths_test=[]"]
        command = [sys.executable, "pretrain.py", *overrides, "log_interval=5"]
        program = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
        history = History(run / METRICS_FILE)
        while program.poll() is None and not any(row["step"] >= _WARMUP for row in history.rows):
            time.sleep(0.02)
            history.refresh()
        for loop in busy:
            loop.send_signal(signal.SIGCONT)
        status = program.wait(_TIMEOUT_S)
        for loop in busy:
            loop.send_signal(signal.SIGSTOP)
        assert status == 0, f"{' '.join(command)} ended with status {status}"
        history.refresh()
        return mean(row["perf/step_ms"] for row in history.rows if row["step"] > _WARMUP + 5)


def main() -> None:
    parser = parser_of(__doc__, overrides=False)
    parser.add_argument("arms", nargs="*", metavar="ARM", default=["1", "2:default", f"2:{SPINS}"])
    parser.add_argument("--data-path", required=True)
    parser.add_argument("--busy", type=int, default=2, help="busy loops (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    machine()
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
    ms: dict[str, list[float]] = {arm: [] for arm in args.arms}
    try:
        for loop in busy:
            loop.send_signal(signal.SIGSTOP)
        for _ in range(args.rounds):
            for arm in args.arms:
                ms[arm].append(step_ms(arm, args.data_path, args.steps, busy))
    finally:
        for loop in busy:
            loop.kill()
    print(f"{args.busy} busy loops, {args.rounds} rounds of {args.steps} steps")
    print(table(["threads:spins", "ms of a step"], ((arm, spread(each, "{:.1f}".format)) for arm, each in ms.items())))


if __name__ == "__main__":
    main()
