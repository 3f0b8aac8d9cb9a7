"""Measure how much time adaptive evaluation saves, compared with running every step.

python -m benchmarks.evaluation checkpoints/<project>/<run> [--num-runs 3] [--max-examples N]
                                [--num-steps T ...]

In adaptive evaluation, examples leave the batch when they are settled. Both kinds of evaluation run
in turn, so that other work of the machine disturbs both equally. The program prints a table and,
with --json, writes it.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch

from dataset.schema import open_datasets
from training.evaluation import EvalOptions, evaluate
from training.trained import open_trained
from utils.dist.setup import connect_devices
from utils.dist.world import World


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--num-runs", type=int, default=3)
    parser.add_argument(
        "--num-steps", type=int, nargs="+", help="most segments of an example (default: as in training)"
    )
    parser.add_argument("--max-examples", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "mps", "cpu"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    world = connect_devices(World.single(), options.device)
    trained = open_trained(options.run, world)
    config, checkpoint, model = trained.config, trained.checkpoint, trained.load_model(world)
    assert config is not None and checkpoint is not None
    split = open_datasets(config.test_paths, "test", numbered_by=config.train_paths)
    first_set = next(iter(split.sets))
    rows = []
    for num_steps in options.num_steps or [config.arch.halt_max_steps]:
        seconds: dict[bool, list[float]] = {False: [], True: []}
        metrics: dict[bool, dict[str, float]] = {}
        for _ in range(options.num_runs):
            for adaptive in (False, True):
                world.wait_for_device()
                began = time.perf_counter()
                found = evaluate(
                    model,
                    split,
                    world,
                    EvalOptions(
                        options.batch_size or config.eval_batch_size or config.global_batch_size,
                        num_steps=num_steps,
                        adaptive=adaptive,
                        max_examples=options.max_examples,
                    ),
                )
                assert found is not None
                seconds[adaptive].append(time.perf_counter() - began)
                metrics[adaptive] = found
        for adaptive in (False, True):
            count = metrics[adaptive][f"eval/{first_set}/num_examples"]
            speeds = [count / one for one in seconds[adaptive]]
            rows.append(
                {
                    "num_steps": num_steps,
                    "adaptive": adaptive,
                    "exact_accuracy": metrics[adaptive][f"eval/{first_set}/exact_accuracy"],
                    "steps": metrics[adaptive][f"eval/{first_set}/steps"],
                    "num_examples": count,
                    "examples_per_second": statistics.median(speeds),
                    "lowest": min(speeds),
                    "highest": max(speeds),
                }
            )
    about = {
        "checkpoint": str(checkpoint.path),
        "machine": platform.processor() or platform.machine(),
        "device": str(world.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "num_runs": options.num_runs,
    }
    print("  ".join(f"{name} {value}" for name, value in about.items()), file=sys.stderr)
    print("| steps at most | | exact accuracy | steps taken | examples/s, median (lowest, highest) |")
    print("|---|---|---|---|---|")
    for row in rows:
        kind = "settled ones leave" if row["adaptive"] else "every step"
        speed = f"{row['examples_per_second']:.1f} ({row['lowest']:.1f}, {row['highest']:.1f})"
        print(f"| {row['num_steps']} | {kind} | {row['exact_accuracy']:.4f} | {row['steps']:.2f} | {speed} |")
    if options.json:
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
