"""Score a checkpoint on a test split, with any batch size, device and number of ranks.

python evaluate.py checkpoint=checkpoints/<project>/<run> [data_path=...]

The program prints a table. It writes results.json and other requested files beside the run's
checkpoints.
"""

from utils import openmp  # isort: skip # noqa: F401 - before torch

import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, astuple, replace
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from dataset.evaluators import NO_EVALUATORS, EvaluatorName, Evaluators, able_evaluators, build_evaluators
from dataset.schema import Split, check_contents
from dataset.text.schema import SET_NAME, check_text_contents
from dataset.tta import Variations
from models.base import RecursiveModel
from sharing.sources import kind_of
from training.evaluation import EvalOptions, evaluate
from training.evaluation_text import TextEvalOptions, evaluate_text
from training.kinds import require_keys_of
from training.more_compute import MoreCompute, costs, evaluate_more, has_state
from training.results import (
    accuracy_over_steps,
    compute_table,
    intervals,
    prepare_folder,
    reliability_bins,
    reliability_table,
    table,
    write_results,
)
from training.synonyms import aliases
from training.target import Target
from training.trained import Trained, TrainedConfig, open_trained
from utils.checkpoint.reader import open_checkpoint
from utils.command_line import CommandLine, read_config, validate
from utils.composing import Origin
from utils.config import Bool, Int, page
from utils.drawing import pyplot
from utils.errors import UserError
from utils.out_of_memory import advising
from utils.program import run
from utils.ranks.config import DeviceName, DistConfig
from utils.ranks.setup import connect_devices
from utils.ranks.world import World
from utils.saved_outputs import SavedOutput
from utils.terminal import show, tell
from viewer.curve_pictures import draw_accuracy_over_steps, draw_reliability

USAGE = """
evaluate.py: score a checkpoint.

The newest checkpoint of a run, on the data on which it was trained:
  python evaluate.py checkpoint=checkpoints/<project>/<run>
One step of a run, on other data:
  python evaluate.py checkpoint=<run>/step_00001000 data_path=data/other
The best step of a run:
  python evaluate.py checkpoint=<run>/best
On eight devices:
  torchrun --nproc-per-node 8 evaluate.py checkpoint=... batch_size=4096
Run all steps of every example, as published:
  python evaluate.py checkpoint=<run> adaptive=false
Draw accuracy over the number of steps:
  python evaluate.py checkpoint=<run> num_steps=32 plot=true
Let eight symmetries of each puzzle vote:
  python evaluate.py checkpoint=<run> tta=8
Run eight passes with noise over each puzzle, and take the answer with the highest q_halt:
  python evaluate.py checkpoint=<run> trajectories=8 noise=0.5
A file or a folder that python -m sharing.export wrote:
  python evaluate.py checkpoint=model.safetensors data_path=data/sudoku-6x6
A model of text, on its own test split or on another of the same tokenizer:
  python evaluate.py checkpoint=<run> data_path=data/book
A published checkpoint:
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
                config = validate(EvaluateConfig, typed, Origin("evaluate", command.overrides))
    config = world.broadcast_object(config)
    if config is None:
        return
    world = connect_devices(world, config.device, config.dist)
    trained = opened(config, config.checkpoint, world)
    with world.shared_errors():
        require_keys_of(trained.arch.kind, config.model_dump(), "evaluate", trained.name)
    score = {"puzzles": score_puzzles, "text": score_text}[trained.arch.kind]
    score(config, Target.of(trained, config.data_path, world), world)


def opened(config: EvaluateConfig, source: str, world: World) -> Trained:
    """Look at the checkpoint `source` with the options of `config`. Every rank."""
    return open_trained(source, world, arch=config.arch, data_path=config.data_path, puzzle_table=config.puzzle_table)


def folder_of(config: EvaluateConfig, target: Target) -> tuple[Path | None, bool]:
    """Return the folder for results, None for no files, and whether it keeps those that it has."""
    out = target.out if config.out is None else Path(config.out)
    if out is None:
        return None, False
    return prepare_folder(
        out,
        target.split,
        config.max_examples,
        is_named=config.out is not None,
        saves_answers=bool(config.save_outputs),
        draws=config.plot,
    )


def report(
    config: EvaluateConfig,
    target: Target,
    metrics: dict[str, float],
    evaluators: Evaluators,
    seconds: float,
    results: Path | None,
    tables: Iterable[str] = (),
    rows: dict[str, Any] | None = None,
) -> None:
    """Print the tables, and write results.json.

    Args:
        seconds: the time of the single pass, without trajectories, restarts and votes.
        results: the folder of results.json; None: write none.
        tables: lines of further tables.
        rows: these tables in results.json.
    """
    name, split, found = target.trained.name, target.split, intervals(metrics, evaluators)
    num_examples = split.num_examples(config.max_examples)
    total = sum(num_examples.values())
    show(
        f"{name} on {split.path}: {total:,} examples in {seconds:.1f} s ({total / seconds:,.1f} per second), "
        "95 % intervals"
    )
    for line in chain(table(metrics, found), tables):
        show(line)
    if results is not None:
        entries = {
            "checkpoint": name,
            # A typed path is stored as an absolute one, because the next evaluation may begin in
            # another folder.
            "data": str(split.path) if config.data_path is None else os.path.abspath(split.path),
            "num_examples": num_examples,
            "settings": config.model_dump(mode="json"),
            "seconds": seconds,
        }
        write_results(results, entries, metrics, found, rows or {})


# ---- text --------------------------------------------------------------------------------------


def score_text(config: EvaluateConfig, target: Target, world: World) -> None:
    """Score a model of text, print the table and write results.json. Every rank."""
    out: Path | None = None
    with world.shared_errors():
        if world.is_main:
            check_text_contents(target.split)
            out, _ = folder_of(config, target)
    model = target.trained.load_text_model(world)
    batch_size = config.batch_size or target.batch_size
    options = TextEvalOptions(batch_size, target.trained.target_only, config.max_examples)
    began = time.perf_counter()
    with advising(lambda: target.less_memory(batch_size, config.max_examples)):
        metrics = evaluate_text(model, target.split, world, options)
    assert metrics is not None
    seconds = time.perf_counter() - began
    with world.shared_errors():
        if world.is_main:
            report(config, target, metrics, NO_EVALUATORS, seconds, out)
            if out is not None:
                show(f"written to {out}")
            last = "exact_accuracy" if f"eval/{SET_NAME}/exact_accuracy" in metrics else "loss"
            show(f"{last}={metrics[f'eval/{SET_NAME}/{last}']:.4f}")


# ---- puzzles -----------------------------------------------------------------------------------


def score_puzzles(config: EvaluateConfig, target: Target, world: World) -> None:
    """Score a model of puzzles, print tables, and write results, answers and pictures. Every rank.

    Raises:
        UserError: An option does not suit the model or the data.
    """
    split, model = target.split, target.trained.load_puzzle_model(world)
    out, keeps_results = None, False
    with world.shared_errors():
        if config.evaluators is not None:
            evaluators = build_evaluators(config.evaluators, split)
        else:
            evaluators = able_evaluators(target.evaluators, split, tell if world.is_main else None)
        if config.vote_with and not evaluators.let_vote:
            raise UserError(f"vote_with={config.vote_with}, but only answers of ARC vote; leave it out")
        config.require_noise_for_seed()
        config.require_different_passes(model)
        variations = Variations.of(split, config.tta) if config.tta is not None else None
        if world.is_main:
            check_contents(split)
            # Find these mistakes now, and not after an hour of evaluation.
            if config.plot:
                pyplot()
            for other in config.vote_with:
                if kind_of(other) != "weights":
                    open_checkpoint(Path(other), tell)
            out, keeps_results = folder_of(config, target)
    out, keeps_results = world.broadcast_object((out, keeps_results))
    options = EvalOptions(
        config.batch_size or target.batch_size,
        num_steps=config.num_steps,
        adaptive=config.adaptive,
        max_examples=config.max_examples,
        keep_votes=bool(config.vote_with),
    )
    saving = replace(
        options,
        save_outputs=config.save_outputs,
        save_to=out,
        # Results and answers in the run's folder may come from two calls. Both are of one step.
        keep_saved=config.out is None and not config.save_outputs,
        keep_results=keeps_results,
        calibration=True,
        loop_deltas=config.num_steps is not None and has_state(model),
    )
    with advising(lambda: target.less_memory(options.batch_size, config.max_examples)):
        for other in config.vote_with:
            add_votes(config, other, split, options, evaluators, world)
        began = time.perf_counter()
        metrics = evaluate(model, split, world, saving, evaluators=evaluators)
        assert metrics is not None
        seconds = time.perf_counter() - began
        if variations is not None and model.config.is_equivariant and world.is_main:
            tell(f"note: tta={config.tta} can't gain: this model answers all symmetries of a puzzle alike")
        metrics |= evaluate_more(config, model, split, world, options, evaluators, variations)
    with world.shared_errors():
        if world.is_main:
            report_puzzles(config, target, model, metrics, evaluators, seconds, out, keeps_results=keeps_results)


def add_votes(
    config: EvaluateConfig, other: str, split: Split, options: EvalOptions, evaluators: Evaluators, world: World
) -> None:
    """Collect the votes of another checkpoint. Every rank.

    Raises:
        UserError: It was trained on other data.
    """
    voter = Target.of(opened(config, other, world), config.data_path, world)
    with world.shared_errors():
        # In other data the same numbers mean other puzzles.
        if voter.split.path.resolve() != split.path.resolve():
            raise UserError(
                f"vote_with={other} was trained on {voter.split.path.parent}, but the votes are on "
                f"{split.path.parent}; choose a checkpoint of these data, or give data_path=... if both datasets "
                "number their puzzles alike"
            )
    evaluate(voter.trained.load_puzzle_model(world), voter.split, world, options, evaluators=evaluators)


def report_puzzles(
    config: EvaluateConfig,
    target: Target,
    model: RecursiveModel,
    metrics: dict[str, float],
    evaluators: Evaluators,
    seconds: float,
    out: Path | None,
    *,
    keeps_results: bool,
) -> None:
    """Print the tables, and write results.json and the pictures into a folder.

    Args:
        out: the folder; None: write no files.
        keeps_results: leave its results.json as it is.
    """
    sets, trained_steps = list(target.split.num_examples(None)), model.config.halt_max_steps
    bins = {name: of_set for name in sets if (of_set := reliability_bins(metrics, name))}
    more = config.num_steps is not None or config.chooses_among_passes
    compute = {name: costs(config, metrics, name, trained_steps) for name in bins} if more else {}
    tables: list[str] = []
    for name in bins:
        tables += reliability_table(name, bins[name], metrics[f"eval/{name}/calibration_error"])
        tables += compute_table(compute[name], metrics[f"eval/{name}/num_examples"]) if name in compute else []
    rows = {
        "reliability": {name: [asdict(each) for each in of_set] for name, of_set in bins.items()},
        "compute": [asdict(row) for of_set in compute.values() for row in of_set],
    }
    report(config, target, metrics, evaluators, seconds, None if keeps_results else out, tables, rows)
    if out is not None:
        over_steps = {name: values for name in sets if (values := accuracy_over_steps(metrics, name))}
        if config.plot and over_steps:
            draw_accuracy_over_steps(over_steps, trained_steps, out / "accuracy_over_steps.png")
            draw_reliability(
                {name: [astuple(each) for each in of_set] for name, of_set in bins.items()}, out / "reliability.png"
            )
        elif config.plot:
            show("nothing is drawn: no example has a label")
        show(f"written to {out}")
    show(f"exact_accuracy={metrics.get(f'eval/{sets[0]}/exact_accuracy', float('nan')):.4f}")


if __name__ == "__main__":
    run(main)
