"""Score a checkpoint on a test split, with any batch size, device and number of ranks.

python evaluate.py checkpoint=checkpoints/<project>/<run> [data_path=...]

The program prints a table. It writes results.json and other requested files beside the run's
checkpoints.
"""

from utils import openmp  # isort: skip # noqa: F401 - before torch

import json
import os
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from dataset.evaluators import NO_EVALUATORS, EvaluatorName, Evaluators, able_evaluators, build_evaluators
from dataset.schema import Split
from dataset.tta import Variations
from models.base import RecursiveModel
from records.checkpoint.reader import open_checkpoint
from sharing.sources import kind_of
from training.data import AnySplit
from training.evaluation import EvalOptions, evaluate
from training.kinds import kind_of_arch, require_keys_of
from training.laps import Interrupts
from training.more_compute import MoreCompute, costs, evaluate_more, has_state
from training.results import (
    compute_table,
    intervals,
    prepare_folder,
    reliability_bins,
    reliability_table,
    table,
)
from training.saved_outputs import SavedOutput
from training.synonyms import aliases
from training.trained import Trained, TrainedConfig
from utils.command_line import CommandLine, read_config, validate
from utils.compiled_code import keep_compiled_code, why_compiling_fails
from utils.composing import compose
from utils.config import Bool, Int, page
from utils.drawing import pyplot
from utils.errors import UserError
from utils.files import file_errors, write_atomically
from utils.out_of_memory import advising, half
from utils.program import run
from utils.ranks.config import DeviceName, DistConfig
from utils.ranks.setup import connect_devices
from utils.ranks.world import World
from utils.terminal import show, tell
from viewer.curve_pictures import draw_accuracy_over_steps, draw_reliability

USAGE = """
evaluate.py: score a checkpoint.

  python evaluate.py checkpoint=checkpoints/<project>/<run>            a run's newest checkpoint, on its own test data
  python evaluate.py checkpoint=<run>/best                             its best step
  python evaluate.py checkpoint=<run>/step_00001000 data_path=data/other
  torchrun --nproc-per-node 8 evaluate.py checkpoint=<run> batch_size=4096
  python evaluate.py checkpoint=<run> adaptive=false                   all steps of every example, as published
  python evaluate.py checkpoint=<run> num_steps=32 plot=true           draw accuracy over the number of steps
  python evaluate.py checkpoint=<run> tta=8                            eight symmetries of each puzzle vote
  python evaluate.py checkpoint=<run> trajectories=8 noise=0.5         of eight noisy passes the most confident answers
  python evaluate.py checkpoint=model.safetensors data_path=data/sudoku-6x6        what sharing.export wrote
  python evaluate.py checkpoint=hf://owner/repo/file arch=trm_mlp data_path=data/sudoku-extreme-1k-aug-1000
"""


@page("evaluate", bare="checkpoint", aliases=aliases(eval_batch_size="batch_size"))
class EvaluateConfig(TrainedConfig, MoreCompute):
    """config/evaluate.yaml says what each key means."""

    out: str | None = Field(min_length=1)
    evaluators: list[EvaluatorName] | None
    batch_size: Int | None = Field(gt=0)
    max_examples: Int | None = Field(gt=0)
    adaptive: Bool
    compile: Bool
    vote_with: list[str]
    plot: Bool
    save_outputs: list[SavedOutput]
    device: DeviceName
    dist: DistConfig

    @model_validator(mode="after")
    def _files_have_a_folder(self) -> "EvaluateConfig":
        if self.source == "weights" and self.out is None and (self.plot or self.save_outputs):
            raise ValueError(f"{self.checkpoint} has no run folder for plot and save_outputs to write to; give out=...")
        return self


# ---- the program -------------------------------------------------------------------------------


def main(world: World) -> None:
    """Run the program. Every rank."""
    config: EvaluateConfig | None = None
    with world.shared_errors():
        if world.is_main:
            command = CommandLine.parse(sys.argv[1:], "evaluate", USAGE)
            if command.page:
                show(command.page)
            else:
                typed = read_config("evaluate", command.overrides)
                config = validate(EvaluateConfig, typed, lambda: compose("evaluate", command.overrides))
    config = world.broadcast_object(config)
    if config is None:
        return
    world = connect_devices(world, config.device, config.dist)
    trained = config.open_trained(world)
    require_keys_of(trained.arch.kind, config.model_dump(), "evaluate", trained.name)
    score(config, *trained.with_test_split(config.data_path, world), world)


def score(config: EvaluateConfig, trained: Trained, split: AnySplit, world: World) -> None:
    """Score a model, print tables, and write results, answers and pictures. Every rank."""
    of_run, model, kind = trained.config, trained.load_model(world), kind_of_arch(trained.arch)
    evaluators, out, keeps_results = NO_EVALUATORS, None, False
    with world.shared_errors():
        if config.compile:
            keep_compiled_code()
            if why := why_compiling_fails(world.device):
                raise UserError(f"PyTorch can't compile here: {why}; mend that, or leave compile out")
            model.compile_levels()
        if isinstance(model, RecursiveModel) and isinstance(split, Split):
            if config.evaluators is not None:
                evaluators = build_evaluators(config.evaluators, split)
            else:
                of_training = of_run.evaluators or [] if of_run is not None else []
                evaluators = able_evaluators(of_training, split, tell if world.is_main else None)
            if config.vote_with and evaluators.votes is None:
                raise UserError(f"vote_with={config.vote_with}, but only answers of ARC vote; leave it out")
            config.require_different_passes(model)
            if config.tta is not None:
                Variations.of(split, config.tta)
        if world.is_main:
            kind.check(split)
            # Find these mistakes now, and not after an hour of evaluation.
            if config.plot:
                pyplot()
            for other in config.vote_with:
                if kind_of(other) != "weights":
                    open_checkpoint(Path(other), tell)
            to, more = (config.out, trained, config.data_path), config.plot or bool(config.save_outputs)
            out, keeps_results = prepare_folder(*to, split, config.max_examples, writes_more=more)
    out, keeps_results = world.broadcast_object((out, keeps_results))
    usual_size = kind.batch_size if of_run is None else of_run.eval_batch_size or of_run.global_batch_size
    options = EvalOptions(
        config.batch_size or usual_size,
        config.max_examples,
        trained.target_only,
        num_steps=config.num_steps,
        adaptive=config.adaptive,
        keep_votes=bool(config.vote_with),
        save_outputs=config.save_outputs,
        save_to=out,
        # Results and answers in the run's folder may come from two calls. Both are of one step.
        keep_saved=config.out is None and not config.save_outputs,
        keep_results=keeps_results,
        calibration=True,
        loop_deltas=config.num_steps is not None and isinstance(model, RecursiveModel) and has_state(model),
    )
    most = max(split.num_examples(config.max_examples).values())
    with advising(partial(half, "batch_size", min(options.batch_size, most))):
        for other in config.vote_with:
            add_votes(config, other, split.path, options, evaluators, world)
        began = time.perf_counter()
        metrics = kind.evaluate(model, split, world, options, evaluators, Interrupts(), None)
        assert metrics is not None
        seconds = time.perf_counter() - began
        if isinstance(model, RecursiveModel) and isinstance(split, Split):
            if config.tta is not None and model.config.is_equivariant and world.is_main:
                tell(f"note: tta={config.tta} can't gain: this model answers all symmetries of a puzzle alike")
            metrics |= evaluate_more(config, model, split, world, options, evaluators)
    with world.shared_errors():
        if world.is_main:
            report(config, trained, split, metrics, evaluators, seconds, out, keeps_results=keeps_results)


def add_votes(
    config: EvaluateConfig, other: str, path: Path, options: EvalOptions, evaluators: Evaluators, world: World
) -> None:
    """Collect the votes of another checkpoint, on the data at `path`. Every rank."""
    voter, split = config.open_trained(world, other).with_test_split(config.data_path, world)
    with world.shared_errors():
        # In other data the same numbers mean other puzzles.
        if split.path.resolve() != path.resolve():
            raise UserError(
                f"vote_with={other} was trained on {split.path.parent}, but the votes are on {path.parent}; choose a "
                "checkpoint of these data, or give data_path=... if both datasets number their puzzles alike"
            )
    assert isinstance(split, Split)
    evaluate(voter.load_puzzle_model(world), split, world, replace(options, save_to=None), evaluators)


def report(
    config: EvaluateConfig,
    trained: Trained,
    split: AnySplit,
    metrics: dict[str, float],
    evaluators: Evaluators,
    seconds: float,
    out: Path | None,
    *,
    keeps_results: bool,
) -> None:
    """Print the tables, and write results.json and the pictures into a folder.

    Args:
        seconds: the time of the single pass, without trajectories, restarts and votes.
        out: the folder; None: write no files.
        keeps_results: leave its results.json as it is.
    """
    found, num_examples = intervals(metrics, evaluators), split.num_examples(config.max_examples)
    total = sum(num_examples.values())
    speed = f"{seconds:.1f} s ({total / seconds:,.1f} per second)"
    show(f"{trained.name} on {split.path}: {total:,} examples in {speed}, 95 % intervals")
    for line in table(metrics, found):
        show(line)
    bins = {name: of_set for name in num_examples if (of_set := reliability_bins(metrics, name))}
    compute, steps = list[dict[str, Any]](), trained.of_puzzles()[0].halt_max_steps if bins else 0
    for name, of_set in bins.items():
        for line in reliability_table(name, of_set, metrics[f"eval/{name}/calibration_error"]):
            show(line)
        if config.num_steps is not None or config.methods:
            rows = costs(config, metrics, name, steps)
            compute += rows
            for line in compute_table(name, rows, metrics[f"eval/{name}/num_examples"]):
                show(line)
    results = {
        "checkpoint": trained.name,
        # An absolute path, because the next evaluation may begin in another folder.
        "data": str(split.path) if config.data_path is None else os.path.abspath(split.path),
        "num_examples": num_examples,
        "settings": config.model_dump(mode="json"),
        "seconds": seconds,
        "metrics": {name: value for name, value in metrics.items() if name.split("/")[2] != "reliability"},
        "intervals": found,
        "reliability": bins,
        "compute": compute,
    }
    if out is not None:
        if not keeps_results:
            with file_errors():
                write_atomically(out / "results.json", json.dumps(results, indent=2) + "\n")
        if config.plot and bins:
            at_step = {name: f"eval/{name}/exact_accuracy_at_step/" for name in bins}
            over_steps = {name: [metrics[key] for key in metrics if key.startswith(at_step[name])] for name in bins}
            draw_accuracy_over_steps(over_steps, steps, out / "accuracy_over_steps.png")
            as_tuples = {name: [tuple(each.values()) for each in of_set] for name, of_set in bins.items()}
            draw_reliability(as_tuples, out / "reliability.png")
        elif config.plot:
            show("nothing is drawn: no example has a label")
        show(f"written to {out}")
    first = next(iter(num_examples))
    last = next((each for each in ("exact_accuracy", "loss") if f"eval/{first}/{each}" in metrics), "exact_accuracy")
    show(f"{last}={metrics.get(f'eval/{first}/{last}', float('nan')):.4f}")


if __name__ == "__main__":
    run(main)
