"""Score a checkpoint on a test split, with any batch size, device and number of ranks.

python evaluate.py checkpoint=checkpoints/<project>/<run> [data_path=...]

The program prints a table. It writes results.json and other requested files beside the run's
checkpoints.
"""
# N = sequences, S = tokens of a puzzle

from utils import openmp  # isort: skip # noqa: F401 - before torch

import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError, model_validator

from dataset.evaluators import EvaluatorName, Evaluators, build_evaluators, fitting_evaluators
from dataset.schema import Split, check_contents, open_datasets, open_split
from dataset.text.schema import SET_NAME, TextSplit, check_text_contents, open_text_split
from dataset.tta import Variations
from models.base import RecursiveModel
from models.metric_sums import NUM_BINS
from models.text.model import TextModel
from sharing.sources import kind_of
from training.config import PretrainConfig, require_keys_of
from training.data import Sizes, TextSizes, open_own, require_own_tokens
from training.evaluation import EvalOptions, evaluate, evaluate_votes
from training.evaluation_text import TextEvalOptions, evaluate_text
from training.less_memory import smaller_evaluation
from training.more_compute import Cost, MoreCompute, costs, evaluate_trajectories, has_state
from training.synonyms import aliases
from training.trained import Trained, TrainedConfig, open_trained
from utils.checkpoint.reader import open_checkpoint
from utils.command_line import CommandLine, read_config, validate
from utils.composing import Origin
from utils.config import Bool, Int, page
from utils.drawing import pyplot
from utils.errors import UserError
from utils.files import file_errors, plain, refuse_links, write_atomically
from utils.out_of_memory import advising, half
from utils.program import run
from utils.ranks.config import DeviceName, DistConfig
from utils.ranks.setup import connect_devices
from utils.ranks.world import World
from utils.saved_outputs import SavedOutput, num_saved
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
        if self.kind == "weights" and self.out is None and (self.plot or self.save_outputs):
            raise ValueError(f"{self.checkpoint} has no run folder for plot and save_outputs to write to; give out=...")
        return self


@dataclass
class Loaded:
    """A model, and the data on which it is scored."""

    name: str
    model: RecursiveModel
    split: Split
    batch_size: int
    out: Path | None  # default folder for results
    evaluators: list[EvaluatorName]  # those of the run


def opened(config: EvaluateConfig, source: str, world: World) -> Trained:
    """Look at the checkpoint `source` with the options of `config`. Every rank."""
    return open_trained(source, world, arch=config.arch, data_path=config.data_path, puzzle_table=config.puzzle_table)


def load(config: EvaluateConfig, trained: Trained, world: World) -> Loaded:
    """Load a model of puzzles, and the data of `config`. Every rank.

    Raises:
        UserError: The checkpoint or the data can't be read, or don't fit each other.
    """
    source = trained.name
    with world.shared_errors():
        arch, _ = trained.of_puzzles()
    if trained.config is None or trained.checkpoint is None:  # a file of weights
        with world.shared_errors():
            if config.data_path is None:
                raise UserError(
                    f"{source} was trained on {trained.data} and holds no puzzles; say where they are: data_path=..."
                )
            split = open_split(config.data_path, "test")
            trained = trained.on(split)
        return Loaded(trained.name, trained.load_puzzle_model(world), split, batch_size=768, out=None, evaluators=[])
    of_run = trained.config
    step = trained.checkpoint.path
    out = step.parent / "eval_outputs" / step.name
    with world.shared_errors():
        same_folder = {Path(path).resolve(): path for path in of_run.train_paths}
        if config.data_path is None:
            own = open_own(of_run, "test")
            assert isinstance(own, Split)
            split = own
        elif trained_on := same_folder.get(Path(config.data_path).resolve()):
            any_size = arch.reads_boards_of_any_size
            split = open_datasets([trained_on], "test", numbered_by=of_run.train_paths, any_size=any_size)
        else:  # the user who names other data promises that its puzzles have the same numbers
            split = open_split(config.data_path, "test")
        if config.data_path is not None and not _is_own(config.data_path, of_run):
            out = folder_for_other_data(out, split)
        trained = trained.on(split)
    batch_size = of_run.eval_batch_size or of_run.global_batch_size
    return Loaded(trained.name, trained.load_puzzle_model(world), split, batch_size, out, of_run.evaluators or [])


def _is_own(data_path: str, of_run: PretrainConfig) -> bool:
    """Return whether the run's own test split is that of this dataset alone."""
    return {Path(path).resolve() for path in of_run.test_paths} == {Path(data_path).resolve()}


# ---- results -----------------------------------------------------------------------------------


_IN_OTHER_TABLES = ("/reliability/", "/running/", "exact_accuracy_of/", "segments_of/")
_BESIDE_THE_SINGLE_PASS = ("tta/", "trajectories/", "restarts/")


def intervals(metrics: dict[str, float], evaluators: Evaluators) -> dict[str, tuple[float, float]]:
    """Return 95 % confidence intervals of the metrics that are shares of examples or ARC tasks."""
    of_examples = {"exact_accuracy", "any_exact_accuracy", "q_halt_accuracy", *evaluators.checks}
    found = {}
    for name, value in metrics.items():
        _, set_name, metric = name.split("/", 2)
        *_, of_method = metric.rsplit("/", 1) if metric.startswith(_BESIDE_THE_SINGLE_PASS) else (metric,)
        if of_method in of_examples or metric.startswith("exact_accuracy_at_step/"):
            found[name] = wilson_interval(value, metrics[f"eval/{set_name}/num_examples"])
        elif metric.startswith("pass@"):
            found[name] = wilson_interval(value, evaluators.num_tasks)
    return found


def wilson_interval(share: float, num: float) -> tuple[float, float]:
    """Return the 95 % score interval of a share of `num` independent trials (Wilson, 1927).

    It lies within [0, 1], also for shares of 0 and 1.
    """
    z = 1.959964
    middle = (share + z * z / (2 * num)) / (1 + z * z / num)
    half = z / (1 + z * z / num) * math.sqrt(share * (1 - share) / num + z * z / (4 * num * num))
    return max(0.0, middle - half), min(1.0, middle + half)


def accuracy_over_steps(metrics: dict[str, float], set_name: str) -> list[float]:
    prefix = f"eval/{set_name}/exact_accuracy_at_step/"
    return [value for name, value in metrics.items() if name.startswith(prefix)]


def table(metrics: dict[str, float], found: dict[str, tuple[float, float]]) -> Iterator[str]:
    for name, value in metrics.items():
        if any(part in name for part in _IN_OTHER_TABLES):
            continue
        if name.split("/")[2] in ("num_examples", "num_answers"):
            yield f"  {name:<44}{value:>10,.0f}"
        else:
            low_high = f"   {found[name][0]:.4f} .. {found[name][1]:.4f}" if name in found else ""
            yield f"  {name:<44}{value:>10.4f}{low_high}"


@dataclass(frozen=True)
class Bin:
    """The answers whose confidence lies between two numbers."""

    low: float
    high: float
    count: int
    confidence: float  # mean
    accuracy: float


def reliability_bins(metrics: dict[str, float], set_name: str) -> list[Bin]:
    """Return the bins of confidence that have answers."""
    found = []
    for n in range(1, NUM_BINS + 1):
        prefix = f"eval/{set_name}/reliability/{n}/"
        if prefix + "count" in metrics:
            confidence, accuracy = metrics[prefix + "confidence"], metrics[prefix + "accuracy"]
            found.append(Bin((n - 1) / NUM_BINS, n / NUM_BINS, round(metrics[prefix + "count"]), confidence, accuracy))
    return found


def reliability_table(set_name: str, bins: list[Bin], error: float) -> Iterator[str]:
    yield f"confidence against accuracy of the set {set_name}: expected calibration error {error:.4f}"
    yield f"  {'confidence':<12}{'examples':>12}{'mean confidence':>18}{'accuracy':>12}"
    for each in bins:
        between = f"{each.low:.1f} .. {each.high:.1f}"
        yield f"  {between:<12}{each.count:>12,}{each.confidence:>18.4f}{each.accuracy:>12.4f}"


def compute_table(rows: list[Cost], num_examples: float) -> Iterator[str]:
    yield f"accuracy of the set {rows[0].set_name} against compute, 95 % intervals"
    yield f"  {'':<34}{'segments of an example':>24}{'exact_accuracy':>18}"
    for row in rows:
        low, high = wilson_interval(row.exact_accuracy, num_examples)
        yield f"  {row.method:<34}{row.segments:>24.2f}{row.exact_accuracy:>18.4f}   {low:.4f} .. {high:.4f}"


# ---- the program -------------------------------------------------------------------------------


def evaluators_of(config: EvaluateConfig, loaded: Loaded, world: World) -> Evaluators:
    """Return the evaluators of the config or, by default, those of the run and those that fit.

    Raises:
        UserError: An evaluator of the config can't score these data.
    """
    split = loaded.split
    if config.evaluators is not None:
        return build_evaluators(config.evaluators, split)
    able: list[EvaluatorName] = []
    for name in dict.fromkeys([*loaded.evaluators, *fitting_evaluators(split)]):
        try:
            build_evaluators([name], split)
        except UserError as error:  # datasets of other programs may lack what votes need
            if world.is_main:
                tell(f"without the evaluator {name}: {error}")
        else:
            able.append(name)
    return build_evaluators(able, split)


class FormerResults(BaseModel):
    """What counts of the results.json of an earlier evaluation."""

    num_examples: dict[str, int]
    data: str = ""

    @staticmethod
    def of(folder: Path) -> "FormerResults":
        """Return the results in a folder. Damaged results count as those of no examples."""
        try:
            text = plain(folder / "results.json").read_text(encoding="utf-8")
            return FormerResults.model_validate_json(text)
        except (OSError, UnicodeDecodeError, ValidationError):
            return FormerResults(num_examples={})

    @property
    def total(self) -> int:
        return sum(self.num_examples.values())


def folder_for_other_data(own: Path, split: Split | TextSplit) -> Path:
    """Return the folder for results on other data than the run's own.

    Its name ends with the name of the data, and also with a number if that folder holds results on
    data of the same name in another place.

    Args:
        own: the folder for results on the run's own data.
    """
    first = own.with_name(f"{own.name}_{split.path.parent.resolve().name}")
    folder, number = first, 1
    while (former := FormerResults.of(folder).data) and os.path.abspath(former) != os.path.abspath(split.path):
        number += 1
        folder = first.with_name(f"{first.name}_{number}")
    return folder


def prepare_folder(out: Path, split: Split | TextSplit, config: EvaluateConfig) -> tuple[Path | None, bool]:
    """As prepare_own_folder. A folder that the user named is made, and loses its results.

    Raises:
        UserError: The folder can't be written.
    """
    if os.path.isfile(out):
        raise UserError(f"out={out} is a file; give a folder")
    if config.out is None:
        return prepare_own_folder(out, split, config)
    _require_writable(out)
    return out, False


def prepare_own_folder(out: Path, split: Split | TextSplit, config: EvaluateConfig) -> tuple[Path | None, bool]:
    """Make the folder for results in the folder of a run.

    A quick look must not cost the results of hours. They stay, and a line says so. Another line
    says so if the answers that the user asked for by save_outputs replace those to more examples.

    Returns:
        The folder, or None if there is nothing to write; and whether it keeps its results, because
        they are of more examples.

    Raises:
        UserError: The folder can't be written.
    """
    with file_errors():
        refuse_links([out.parent, out, *out.rglob("*")])  # the run may come from somebody else
    num_examples = split.num_examples(config.max_examples)
    num = sum(num_examples.values())
    former = FormerResults.of(out).total
    keeps_results = former > num
    if keeps_results:
        tell(f"{out} keeps its results of {former:,} examples; give out=<another folder> to store those of {num:,}")
        if not config.save_outputs and not config.plot:
            return None, True
    if config.save_outputs and (former := num_saved(out, list(num_examples))) > num:
        tell(f"the answers to {num:,} examples replace those to {former:,} in {out}; out=<another folder> keeps both")
    _require_writable(out)
    return out, keeps_results


def _require_writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise UserError(f"{out} can't be written ({error.strerror}); give another folder with out=...") from error


def main(world: World) -> None:
    """Run the program. Every rank."""
    config: EvaluateConfig | None = None
    with world.shared_errors():
        if world.is_main:
            command = CommandLine.parse(sys.argv[1:], "evaluate", USAGE)
            if command.page:
                show(command.page)
            else:
                config = validate(
                    EvaluateConfig,
                    read_config("evaluate", command.overrides),
                    Origin("evaluate", command.overrides),
                )
    config = world.broadcast_object(config)
    if config is None:
        return
    world = connect_devices(world, config.device, config.dist)
    trained = opened(config, config.checkpoint, world)
    if trained.arch.kind == "text":
        score_text(config, trained, world)
        return
    loaded = load(config, trained, world)
    split, model = loaded.split, loaded.model
    out, keeps_results = Path(config.out) if config.out is not None else loaded.out, False
    with world.shared_errors():
        evaluators = evaluators_of(config, loaded, world)
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
            if out is not None:
                out, keeps_results = prepare_folder(out, split, config)
    out, keeps_results = world.broadcast_object((out, keeps_results))
    options = EvalOptions(
        config.batch_size or loaded.batch_size,
        num_steps=config.num_steps,
        adaptive=config.adaptive,
        max_examples=config.max_examples,
        keep_votes=bool(config.vote_with),
    )
    # In the run's folder, results and answers may come from two calls: both are of the same step.
    keep_saved = config.out is None and not config.save_outputs
    saving = replace(
        options,
        save_outputs=config.save_outputs,
        save_to=out,
        keep_saved=keep_saved,
        keep_results=keeps_results,
        calibration=True,
        loop_deltas=config.num_steps is not None and has_state(model),
    )
    with advising(lambda: less_memory(loaded, options, world)):
        add_votes(config, loaded, options, evaluators, world)
        began = time.perf_counter()
        metrics = evaluate(model, split, world, saving, evaluators=evaluators)
        assert metrics is not None
        seconds = time.perf_counter() - began
        metrics |= evaluate_more(config, loaded, options, evaluators, variations, world)
    with world.shared_errors():
        if world.is_main:
            report(config, loaded, metrics, evaluators, seconds, out, keeps_results=keeps_results)


def add_votes(
    config: EvaluateConfig, loaded: Loaded, options: EvalOptions, evaluators: Evaluators, world: World
) -> None:
    """Collect the votes of the other checkpoints. Every rank.

    Raises:
        UserError: A checkpoint was trained on other data.
    """
    split = loaded.split
    for other in config.vote_with:
        voter = load(config, opened(config, other, world), world)
        with world.shared_errors():
            # In other data the same numbers mean other puzzles.
            if voter.split.path.resolve() != split.path.resolve():
                raise UserError(
                    f"vote_with={other} was trained on {voter.split.path.parent}, but the votes are on "
                    f"{split.path.parent}; choose a checkpoint of these data, or give data_path=... if both datasets "
                    "number their puzzles alike"
                )
        evaluate(voter.model, split, world, options, evaluators=evaluators)


def less_memory(loaded: Loaded, options: EvalOptions, world: World) -> str:
    """Return the batch size with which the evaluation fits."""
    model = loaded.model
    num_held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    batch_size = min(options.batch_size, max(loaded.split.num_examples(options.max_examples).values()))
    return smaller_evaluation("batch_size", batch_size, model.config, Sizes.of(loaded.split), num_held, world)


def evaluate_more(
    config: EvaluateConfig,
    loaded: Loaded,
    options: EvalOptions,
    evaluators: Evaluators,
    variations: Variations | None,
    world: World,
) -> dict[str, float]:
    """Return the metrics of trajectories, restarts and votes, as far as asked. Every rank."""
    given = loaded.model, loaded.split, world, options
    metrics: dict[str, float] = {}
    for trajectories, one_by_one in ((config.side_by_side, False), (config.one_by_one, True)):
        if trajectories is not None:
            metrics |= evaluate_trajectories(
                *given, evaluators=evaluators, trajectories=trajectories, one_by_one=one_by_one
            )
    if variations is not None:
        if loaded.model.config.is_equivariant and world.is_main:
            tell(f"note: tta={variations.count} can't gain: this model answers all symmetries of a puzzle alike")
        metrics |= evaluate_votes(*given, evaluators=evaluators, variations=variations)
    return metrics


def show_table(
    config: EvaluateConfig,
    name: str,
    split: Split | TextSplit,
    metrics: dict[str, float],
    found: dict[str, tuple[float, float]],
    seconds: float,
) -> None:
    total = sum(split.num_examples(config.max_examples).values())
    show(
        f"{name} on {split.path}: {total:,} examples in {seconds:.1f} s ({total / seconds:,.1f} per second), "
        "95 % intervals"
    )
    for line in table(metrics, found):
        show(line)


def write_results(
    config: EvaluateConfig,
    name: str,
    split: Split | TextSplit,
    metrics: dict[str, float],
    found: dict[str, tuple[float, float]],
    seconds: float,
    out: Path,
    tables: dict[str, Any],
) -> None:
    """Write results.json.

    Args:
        tables: further entries of the file.
    """
    results = {
        "checkpoint": name,
        # A typed path is stored as an absolute one, because the next evaluation may begin in
        # another folder.
        "data": str(split.path) if config.data_path is None else os.path.abspath(split.path),
        "num_examples": split.num_examples(config.max_examples),
        "settings": config.model_dump(mode="json"),
        "seconds": seconds,
        "metrics": {name: value for name, value in metrics.items() if name.split("/")[2] != "reliability"},
        "intervals": found,
        **tables,
    }
    with file_errors():
        write_atomically(out / "results.json", json.dumps(results, indent=2) + "\n")


def report(
    config: EvaluateConfig,
    loaded: Loaded,
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
    split = loaded.split
    found = intervals(metrics, evaluators)
    show_table(config, loaded.name, split, metrics, found, seconds)
    bins = {name: of_set for name in split.sets if (of_set := reliability_bins(metrics, name))}
    trained_steps = loaded.model.config.halt_max_steps
    more = config.num_steps is not None or config.chooses_among_passes
    compute = {name: costs(config, metrics, name, trained_steps) for name in bins} if more else {}
    for name in bins:
        tables = [reliability_table(name, bins[name], metrics[f"eval/{name}/calibration_error"])]
        tables += [compute_table(compute[name], metrics[f"eval/{name}/num_examples"])] if name in compute else []
        for line in chain(*tables):
            show(line)
    if out is not None:
        if not keeps_results:
            rows = {
                "reliability": {name: [asdict(each) for each in of_set] for name, of_set in bins.items()},
                "compute": [asdict(row) for of_set in compute.values() for row in of_set],
            }
            write_results(config, loaded.name, split, metrics, found, seconds, out, rows)
        over_steps = {name: accuracy_over_steps(metrics, name) for name in split.sets}
        with_labels = {name: values for name, values in over_steps.items() if values}
        if config.plot and with_labels:
            draw_accuracy_over_steps(with_labels, trained_steps, out / "accuracy_over_steps.png")
            draw_reliability(
                {name: [astuple(each) for each in of_set] for name, of_set in bins.items()}, out / "reliability.png"
            )
        elif config.plot:
            show("nothing is drawn: no example has a label")
        show(f"written to {out}")
    first_set = next(iter(split.sets))
    show(f"exact_accuracy={metrics.get(f'eval/{first_set}/exact_accuracy', float('nan')):.4f}")


# ---- text --------------------------------------------------------------------------------------

_KEYS_OF_KIND: dict[str, tuple[str, ...]] = {
    "puzzles": (
        *("evaluators", "num_steps", "trajectories", "restarts", "noise", "seed", "tta", "adaptive", "vote_with"),
        *("plot", "save_outputs", "puzzle_table"),
    )
}
_TOKENS = 16384  # in a batch, for a file of weights


def score_text(config: EvaluateConfig, trained: Trained, world: World) -> None:
    """Score a model of text, print the table and write results.json. Every rank.

    Raises:
        UserError: The data can't be read, or have other tokens, or a key is for puzzles.
    """
    of_run, out, keeps_results = trained.config, None, False
    with world.shared_errors():
        require_keys_of("text", config.model_dump(), _KEYS_OF_KIND, "evaluate", trained.name)
        split = text_split(config, trained)
        if world.is_main:
            check_text_contents(split)
            if (folder := Path(config.out) if config.out else _text_folder(config, trained, split)) is not None:
                out, keeps_results = prepare_folder(folder, split, config)
    model = trained.load_model(world)
    assert isinstance(model, TextModel)
    batch_size = (of_run.eval_batch_size or of_run.global_batch_size) if of_run else _TOKENS
    options = TextEvalOptions(
        config.batch_size or batch_size,
        target_only=trained.target_only,
        max_examples=config.max_examples,
    )
    began = time.perf_counter()
    with advising(partial(half, "batch_size", options.batch_size)):
        metrics = evaluate_text(model, split, world, options)
    assert metrics is not None
    seconds = time.perf_counter() - began
    with world.shared_errors():
        if world.is_main:
            found = {
                name: wilson_interval(value, metrics[name.replace("exact_accuracy", "num_answers", 1)])
                for name, value in metrics.items()
                if name.startswith(f"eval/{SET_NAME}/exact_accuracy")
            }
            show_table(config, trained.name, split, metrics, found, seconds)
            if out is not None and not keeps_results:
                write_results(config, trained.name, split, metrics, found, seconds, out, {})
                show(f"written to {out}")
            last = "exact_accuracy" if found else "loss"
            show(f"{last}={metrics[f'eval/{SET_NAME}/{last}']:.4f}")


def text_split(config: EvaluateConfig, trained: Trained) -> TextSplit:
    """Return the test split of the config, or that of the run.

    Raises:
        UserError: It can't be read, or has other tokens than the model.
    """
    if config.data_path is not None:
        split: Split | TextSplit = open_text_split(config.data_path, "test")
    elif trained.config is None:
        raise UserError(f"{trained.name} holds no texts; say where they are: data_path=...")
    else:
        split = open_own(trained.config, "test")
    assert isinstance(split, TextSplit) and isinstance(trained.sizes, TextSizes)
    require_own_tokens(trained.sizes, split, trained.data)
    return split


def _text_folder(config: EvaluateConfig, trained: Trained, split: TextSplit) -> Path | None:
    """Return the folder in the run for results on a split; None for a file of weights."""
    if trained.config is None or trained.checkpoint is None:
        return None
    step = trained.checkpoint.path
    own = step.parent / "eval_outputs" / step.name
    is_own = config.data_path is None or _is_own(config.data_path, trained.config)
    return own if is_own else folder_for_other_data(own, split)


if __name__ == "__main__":
    run(main)
