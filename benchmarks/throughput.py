"""Measure the step time of pretrain.py, run in its own process, without the first steps.

python -m benchmarks.throughput [--steps N] [--nproc-per-node N] OVERRIDE...
e.g. python -m benchmarks.throughput --steps 30 experiment=sudoku_extreme_1k_single_gpu
"""

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

REPOSITORY = Path(__file__).resolve().parents[1]
_WARMUP = 5
_FIGURES = ("perf/step_ms", "perf/data_ms", "perf/examples_per_second", "perf/max_memory_gb")


def measure(overrides: list[str], num_steps: int, nproc_per_node: int) -> dict[str, list[float]]:
    """Return each figure of each step after the warm-up.

    Every step is logged, so that every step waits for the device.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = ["torch.distributed.run", "--nproc-per-node", str(nproc_per_node), "pretrain.py"]
        command = [sys.executable, *(["-m", *program] if nproc_per_node > 1 else program[-1:]), *overrides]
        command += [f"max_steps={_WARMUP + num_steps}", "log_interval=1", f"checkpoint_path={folder}/run"]
        command += ["eval_interval=null", "eval_every_n_steps=null", "wandb.mode=disabled"]
        process = subprocess.run(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
        if process.returncode:
            sys.exit(process.stderr.strip())
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return {name: [row[name] for row in rows[_WARMUP:]] for name in _FIGURES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    args = parser.parse_intermixed_args()

    figures = measure(args.overrides, args.steps, args.nproc_per_node)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    print(
        f"{' '.join(args.overrides)}; {args.nproc_per_node} x {device}; torch {torch.__version__}; {args.steps} steps"
    )
    print(f"{'':<28}{'median':>12}{'min':>12}{'max':>12}")
    for name, values in figures.items():
        print(f"{name:<28}{statistics.median(values):>12.3f}{min(values):>12.3f}{max(values):>12.3f}")
    share = statistics.median(figures["perf/data_ms"]) / statistics.median(figures["perf/step_ms"])
    print(f"loader's share of a step: {share:.2%}")
    if args.json is not None:
        args.json.write_text(json.dumps({"overrides": args.overrides, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
