"""Compare the architectures on generated Sudoku: one recipe, equal training time, several seeds.

python -m benchmarks.family [--boxes 2x2 2x3] [--arms hrm trm mixer transformer urm] [--seeds 0 1 2]
                            [--seconds 120] [--json FILE] [OVERRIDE...]

The speed of each architecture is measured first. Each then gets as many steps as fit into the time,
so that its learning rate schedule ends with the time. The time of evaluations does not count.
OMP_NUM_THREADS sets the number of threads of a run.
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.recipes import FIRST_DEMO

REPOSITORY = Path(__file__).resolve().parents[1]
_TIMED_STEPS = 20
_QUARTERS = 4  # evaluations in a run

# All architectures use one recipe, so that only recursion and token mixing differ.
RECIPE = [*FIRST_DEMO, "checkpoint_every_eval=false", "best_metric=null"]
ATTENTION = ["arch.mlp_t=false", "arch.pos_encodings=rope_2d"]
MIXING = ["arch.mlp_t=true", "arch.pos_encodings=none"]
_ONE_STACK = ["arch.num_layers=1"]
_ONCE = ["arch.num_layers=4", "arch.H_cycles=1", "arch.L_cycles=1", "arch.halt_max_steps=1"]
ARMS = {
    "hrm": ["arch=hrm", "arch.H_layers=1", *ATTENTION],
    "hrm_mixer": ["arch=hrm", "arch.H_layers=1", *MIXING],
    "trm": ["arch=trm", *ATTENTION],
    "mixer": ["arch=trm_mlp", *MIXING],
    "transformer": ["arch=transformer", *_ONCE, *ATTENTION],
    "universal": ["arch=transformer", "arch.recurrent=true", *_ONE_STACK, *ATTENTION],
    "urm": ["arch=urm", "arch.mlp=conv_swiglu", *_ONE_STACK, *ATTENTION],
}


@dataclass
class Arm:
    """The results of one architecture on one board size, by seed."""

    box: str
    name: str
    num_parameters: int
    step_ms: float
    num_steps: int
    exact_accuracy_by_quarter: list[list[float]]  # a list for each seed

    def row(self) -> str:
        quarters = zip(*self.exact_accuracy_by_quarter, strict=True)
        cells = [f"{statistics.mean(values):.3f} ({min(values):.3f}-{max(values):.3f})" for values in quarters]
        numbers = f"{self.num_parameters:,} | {self.step_ms:.0f} | {self.num_steps}"
        return f"| {self.box} | {self.name} | {numbers} | {' | '.join(cells)} |"


def build_puzzles(folder: Path, box: str) -> Path:
    """Build 1,000 Sudokus and 500 for tests, such as 6x6 for the box 2x3. Return their folder."""
    builder = ["dataset/build_sudoku_dataset.py", "--output-dir", str(folder / box), "--box", box]
    builder += ["--generate", "1000", "--generate-test", "500"]
    subprocess.run([sys.executable, *builder], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    return folder / box


def fastest_step_ms(name: str, data: Path, overrides: list[str]) -> tuple[float, int]:
    """Return the time of the fastest step and the number of parameters.

    The fastest step is the one that other programs on the machine disturbed least.
    """
    timed = [f"max_steps={_TIMED_STEPS}", "log_interval=1", "eval_every_n_steps=null"]
    rows, head = _train([*RECIPE, *ARMS[name], f"data_path={data}", *timed, *overrides])
    return min(row["perf/step_ms"] for row in rows), int(head.split(" parameters")[0].split()[-1].replace(",", ""))


def exact_by_quarter(name: str, data: Path, seed: int, num_steps: int, overrides: list[str]) -> list[float]:
    """Train an architecture and return its accuracy after each quarter of the steps."""
    steps = [f"max_steps={num_steps}", f"eval_every_n_steps={num_steps // _QUARTERS}", f"seed={seed}"]
    rows, _ = _train([*RECIPE, *ARMS[name], f"data_path={data}", *steps, *overrides])
    return [row["eval/all/exact_accuracy"] for row in rows if "eval/all/exact_accuracy" in row]


def _train(overrides: list[str]) -> tuple[list[dict[str, float]], str]:
    """Train, and return the rows of metrics.jsonl and the log line that describes the model."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "pretrain.py", *overrides, f"checkpoint_path={folder}/run"]
        process = subprocess.run(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
        if process.returncode:
            sys.exit(process.stderr.strip())
        head = next(line for line in process.stderr.splitlines() if " parameters" in line)
        return [
            json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ], head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    parser.add_argument("--boxes", nargs="+", default=["2x2", "2x3"])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=120, help="training time of a run, without evaluations")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    args = parser.parse_intermixed_args()

    print(f"{platform.processor() or platform.machine()}; torch {torch.__version__}; {torch.get_num_threads()} threads")
    times = " | ".join(f"at {args.seconds * quarter / _QUARTERS:g} s" for quarter in range(1, _QUARTERS + 1))
    print(f"| box | arm | parameters | ms/step | steps | {times} |\n|{'---|' * (5 + _QUARTERS)}")
    arms = []
    with tempfile.TemporaryDirectory() as folder:
        for box in args.boxes:
            data = build_puzzles(Path(folder), box)
            # Time each architecture twice, in two rounds, so that a busy minute doesn't slow only
            # one.
            timings = [{name: fastest_step_ms(name, data, args.overrides) for name in args.arms} for _ in range(2)]
            for name in args.arms:
                step_ms, num_parameters = min(timing[name] for timing in timings)
                num_steps = _QUARTERS * max(1, round(1e3 * args.seconds / step_ms / _QUARTERS))
                exact = [exact_by_quarter(name, data, seed, num_steps, args.overrides) for seed in args.seeds]
                arms.append(Arm(box, name, num_parameters, step_ms, num_steps, exact))
                print(arms[-1].row(), flush=True)
                if args.json is not None:
                    args.json.write_text(json.dumps([asdict(arm) for arm in arms], indent=1) + "\n")


if __name__ == "__main__":
    main()
