"""Measure how fast evaluation is, at what accuracy, also against the published code.

python -m benchmarks.evaluation checkpoints/<project>/<run> [--published REPOSITORY] [OPTION...]

REPOSITORY is a clone of the published HRM or TRM code. It loads the run's weights, exported in the
published format, and evaluates them with its own loop, which runs every step for every example.
Here, examples leave the batch when they are settled. All kinds of evaluation run in turn, so that
other work of the machine disturbs them equally. The program prints a table and, with --json, writes
it.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.harness import machine, parser_of, spread, table, write
from benchmarks.on_request import Asked
from dataset.loader import EvalLoader
from dataset.schema import Split, open_datasets
from sharing import export
from training.evaluation import EvalOptions, evaluate
from training.trained import Trained, open_trained
from utils.ranks.setup import connect_devices
from utils.ranks.world import World

_METRICS = ("exact_accuracy", "steps", "num_examples")
Result = dict[str, float]
"""The seconds of an evaluation and its metrics, by the names of _METRICS."""


def main() -> None:
    options = _options()
    world = connect_devices(World.single(), options.device)
    trained = open_trained(options.run, world)
    config = trained.config
    assert config is not None
    if options.dtype is not None:
        trained = replace(trained, arch=trained.arch.model_copy(update={"forward_dtype": options.dtype}))
    any_size = config.puzzle_arch.reads_boards_of_any_size
    split = open_datasets(config.test_paths, "test", numbered_by=config.train_paths, any_size=any_size)
    split = replace(split, sets=dict(list(split.sets.items())[:1]))
    batch_size = options.batch_size or config.eval_batch_size or config.global_batch_size
    rows = []
    with ExitStack() as stack:
        for num_steps in options.num_steps or [config.puzzle_arch.halt_max_steps]:
            eval_options = EvalOptions(batch_size, num_steps=num_steps, max_examples=options.max_examples)
            kinds = _ours(trained, split, world, eval_options, compile=options.compile)
            if options.published is not None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
                _write_for_published(folder, options, trained, split, world, eval_options)
                command = [sys.executable, "-m", "benchmarks.published_evaluation", str(options.published), str(folder)]
                program = stack.enter_context(Asked(command))
                kinds = {"published loop": partial(program.ask, "evaluate"), **kinds}
            rows += measure(kinds, num_steps, options.num_runs)
    about = {
        "run": trained.name,
        "dtype": trained.load_puzzle_model(world).config.forward_dtype,
        "compile": options.compile,
        "batch_size": batch_size,
        "device": str(world.device),
        "num_runs": options.num_runs,
        **machine(),
    }
    print(shown(rows))
    write(options.json, {**about, "rows": rows})


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, overrides=False)
    parser.add_argument("run", type=Path)
    parser.add_argument("--published", type=Path, metavar="REPOSITORY", help="a clone of the published code")
    parser.add_argument("--compile", action="store_true", help="torch.compile every model, before the first run")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: as in training")
    parser.add_argument("--num-runs", type=int, default=3)
    parser.add_argument("--num-steps", type=int, nargs="+", help="most segments (default: as in training)")
    parser.add_argument("--max-examples", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "mps", "cpu"])
    return parser.parse_args()


def _ours(
    trained: Trained, split: Split, world: World, options: EvalOptions, *, compile: bool
) -> dict[str, Callable[[], Result]]:
    """Return the kinds of our evaluation by name, warm."""
    model = trained.load_puzzle_model(world)
    if compile:
        model.compile_levels()

    def run(options: EvalOptions) -> Result:
        world.wait_for_device()
        began = time.perf_counter()
        found = evaluate(model, split, world, options)
        assert found is not None
        seconds = time.perf_counter() - began  # the metrics are on the host, so the device is done
        (set_name,) = split.sets
        return {"seconds": seconds} | {name: found[f"eval/{set_name}/{name}"] for name in _METRICS}

    run(replace(options, max_examples=min(options.batch_size, options.max_examples or options.batch_size)))
    return {
        "every step": lambda: run(replace(options, adaptive=False)),
        "settled ones leave": lambda: run(replace(options, adaptive=True)),
    }


def _write_for_published(
    folder: Path, args: argparse.Namespace, trained: Trained, split: Split, world: World, options: EvalOptions
) -> None:
    """Write what benchmarks.published_evaluation reads: the model and the examples."""
    export.export(export.parse_settings(["--format", "hrm", str(args.run), "-o", str(folder / "model.safetensors")]))
    (set_name,) = split.sets
    loader = EvalLoader(split, set_name, options.batch_size, options.max_examples)
    batches = [batch for _, batch in loader.batches(world)]
    for name in batches[0]:
        np.save(folder / f"{name}.npy", torch.cat([batch[name] for batch in batches]).cpu().numpy())
    arch = trained.load_puzzle_model(world).config
    config: dict[str, Any] = arch.model_dump(mode="json") | trained.sizes.as_dict()
    config |= {"batch_size": options.batch_size, "halt_max_steps": options.num_steps, "causal": False}
    about = {"arch": arch.name, "config": config, "compile": args.compile, "device": str(world.device)}
    (folder / "model.json").write_text(json.dumps(about))


def measure(kinds: dict[str, Callable[[], Result]], num_steps: int, num_runs: int) -> list[dict[str, Any]]:
    """Run each kind in turn, and return a row for each."""
    results: dict[str, list[Result]] = {name: [] for name in kinds}
    for _ in range(num_runs):
        for name, run in kinds.items():
            results[name].append(run())
    speeds = {name: [each["num_examples"] / each["seconds"] for each in of] for name, of in results.items()}
    first = next(iter(kinds))  # what the others are compared with, round by round
    return [
        {
            "num_steps": num_steps,
            "kind": name,
            **{metric: results[name][-1][metric] for metric in _METRICS},
            "examples_per_second": speeds[name],
            "times_the_first": [mine / other for mine, other in zip(speeds[name], speeds[first], strict=True)],
        }
        for name in kinds
    ]


def shown(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown, with medians, and the lowest and the highest values."""
    cells = []
    for row in rows:
        speeds = spread(row["examples_per_second"], "{:.1f}".format), spread(row["times_the_first"], "{:.2f}".format)
        cells.append([row["num_steps"], row["kind"], f"{row['exact_accuracy']:.4f}", f"{row['steps']:.2f}", *speeds])
    return table(["steps at most", "", "exact accuracy", "steps taken", "examples/s", "times the first row"], cells)


if __name__ == "__main__":
    main()
