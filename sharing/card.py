"""The texts of a folder that shares a model: the recipe of its training, and a card about it.

The card is a README.md in the form of the Hugging Face Hub: metadata in YAML, then text. It says
what is known, and nothing of the machine: no paths, no names of runs.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from models import shapes_of
from records.history import logged_rows
from sharing.exported import Source
from sharing.published import PUZZLE_TABLE
from sharing.recipe import differences_from_groups, recipe_text
from sharing.stored_config import completed
from utils.command_line import read_config
from utils.config import Container
from utils.errors import UserError
from utils.files import plain
from utils.hub import is_address
from utils.overrides import typed_override

RECIPE, CARD = "recipe.yaml", "README.md"

# Where a run was, what it showed, and on what machine: other people's differ.
_OF_ONE_RUN = (
    *("project_name", "run_name", "checkpoint_path", "resume", "allow_changed_data", "started_in"),
    *("wandb", "tensorboard", "profile", "perf_every_n_steps", "perf_max_share", "log_interval"),
    *("device", "compile", "swiglu_kernel", "dist", "parallel", "data_on"),
)
# Of the data, as models/__init__.py takes them.
_SIZES = ("seq_len", "vocab_size", "num_puzzle_identifiers")
_WEIGHTS_TO_START_FROM = ("init_from", "load_checkpoint")
# Without weights to start from, the first is refused, and the others would freeze random weights.
_NEED_WEIGHTS = ("puzzle_table", "freeze", "freeze_weights")
# The keys of evaluate.py that decide how much compute a pass over an example gets, and which models
# answer. Then those of further passes, whose metrics have the key's name in theirs.
_OF_EACH_PASS = ("num_steps", "adaptive", "vote_with")
_FURTHER_PASSES = {"trajectories": ("trajectories", "noise"), "restarts": ("restarts", "noise"), "tta": ("tta",)}
# Parts of names of metrics that say nothing about answers.
_NOT_IN_TABLE = ("_at_step/", "q_halt_accuracy", "/reliability/", "/loop_deltas/", "_of/", "/num_")
_TASKS = ("sudoku", "maze", "arc")  # in names of datasets; others have no tag


class Results(BaseModel):
    """What counts of a results.json of evaluate.py. The other keys are ignored."""

    data: str
    num_examples: dict[str, int]
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    settings: dict[str, Any] = {}

    @property
    def name(self) -> str:
        """Return the names of the datasets' folders."""
        return ", ".join(Path(path).parent.name or "data" for path in self.data.split(" + "))

    def typed(self, metric: str) -> str:
        """Return the options that change what examples are answered with in a metric."""
        defaults = read_config("evaluate", ["checkpoint=_"])
        of_metric = next((keys for part, keys in _FURTHER_PASSES.items() if f"/{part}/" in metric), ())
        settings = {key: self.settings.get(key, defaults[key]) for key in (*_OF_EACH_PASS, *of_metric)}
        if settings["vote_with"]:
            settings["vote_with"] = f"{len(settings['vote_with'])} other checkpoints"
        return " ".join(f"{key}={value}" for key, value in settings.items() if value != defaults[key])

    def rows(self, kind: str) -> Iterator[tuple[str, ...]]:
        """Return the rows of the table: of puzzles only shares, of text the loss as well."""
        for name, value in _shown(self.metrics).items():
            interval = self.intervals.get(f"eval/{name}")
            if interval is None and kind == "puzzles":
                continue
            # Scores of ARC are shares of tasks, and those of text of the samples with answers.
            is_of_examples = kind == "puzzles" and "pass@" not in name
            num = self.num_examples.get(name.split("/")[0]) if is_of_examples else None
            count = f"{num:,}" if num else ""
            bounds = f"{interval[0]:.4f} to {interval[1]:.4f}" if interval else ""
            yield self.name, count, self.typed(name), name, f"{value:.4f}", bounds


def _shown(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of evaluations that a card shows, without eval/ in their names."""
    return {
        name.removeprefix("eval/"): value
        for name, value in metrics.items()
        if name.startswith("eval/") and isinstance(value, float) and not any(part in name for part in _NOT_IN_TABLE)
    }


def recipe_and_card(source: Source, address: str) -> dict[str, str]:
    """Return {file: text} for the model of a run, in a folder that has this address."""
    assert source.checkpoint is not None
    config = completed(source.checkpoint.state.config)
    started_from = next((str(config[key]) for key in _WEIGHTS_TO_START_FROM if config[key]), "")
    if started_from and not is_address(started_from):
        started_from = "other weights"
    # A recipe on the Hub has to be downloaded before.
    experiment = typed_override("experiment", RECIPE if is_address(address) else f"{address}/{RECIPE}")
    return {
        RECIPE: _recipe(source, config, started_from, experiment),
        CARD: _card(source, config, started_from, experiment, address),
    }


def _recipe(source: Source, config: Container, started_from: str, experiment: str) -> str:
    """Return what differs from the defaults, with data/<name> as data.

    Weights to start from are left out unless they are on the Hub, because a path says nothing.
    """

    def public(path: str) -> str:
        return f"data/{os.path.basename(os.path.abspath(path))}"

    assert source.model is not None
    defaults = read_config("pretrain", [])
    config = config | {key: defaults[key] for key in _OF_ONE_RUN}
    comment = [f"How the {source.model.title} was trained.", "", f"  python pretrain.py {experiment}"]
    if started_from and not is_address(started_from):
        config |= {key: defaults[key] for key in (*_WEIGHTS_TO_START_FROM, *_NEED_WEIGHTS)}
        comment[0] += f" The run started from {started_from}, which this recipe does not name."
    for key in ("data_paths", "data_paths_test"):
        config[key] = [public(path) for path in config[key]]
    config["data_path"] = defaults["data_path"] if config["data_paths"] else public(config["data_path"])
    return recipe_text(comment, *differences_from_groups(config))


def _card(source: Source, config: Container, started_from: str, experiment: str, address: str) -> str:
    from huggingface_hub import EvalResult, ModelCard, ModelCardData  # here, because few programs need it

    assert source.model is not None and source.checkpoint is not None
    checkpoint, model, weights = source.checkpoint, source.model, source.weights
    run = checkpoint.path.absolute().parent
    past = [row for row in logged_rows(run) if row["step"] <= model.step]
    results = [_read_results(file) for file in sorted(run.glob(f"eval_outputs/{checkpoint.path.name}*/results.json"))]
    kind = model.arch.kind
    measured = [
        EvalResult(
            task_type="reasoning" if kind == "puzzles" else "text-generation",
            dataset_type=each.name,
            dataset_name=each.name,
            dataset_split="test",
            metric_type="exact_match",
            metric_name=f"{name} {each.typed(name)}".rstrip(),
            metric_value=round(value, 4),
        )
        for each in results
        for name, value in _shown(each.metrics).items()
        if name.endswith("/exact_accuracy") and f"eval/{name}" in each.intervals
    ]
    words = {word for name in model.data for word in re.split(r"[^a-z]+", name.lower())}
    data = ModelCardData(
        library_name="hrm-trainer",
        tags=["recursive-reasoning", model.arch.name, *sorted(words.intersection(_TASKS))],
        model_name=model.title if measured else None,  # the Hub wants it beside results alone
        eval_results=measured or None,
    )
    sizes = {name: model.sizes[name] for name in _SIZES if name in model.sizes}
    card = ModelCard.from_template(
        data,
        str(Path(__file__).with_name("card.jinja")),
        model=model,
        config=config,
        num_parameters=sum(parameter.numel() for parameter in shapes_of(model.arch, **sizes).parameters()),
        num_in_table=weights[PUZZLE_TABLE].numel() if PUZZLE_TABLE in weights else 0,
        checkpoint=typed_override("checkpoint", address),
        init_from=typed_override("init_from", address),
        rows=[row for each in results for row in each.rows(kind)],
        logged=_shown(past[-1]) if past and past[-1]["step"] == model.step else {},
        started_from=started_from,
        seconds=next((row["time_s"] for row in reversed(past) if isinstance(row.get("time_s"), float)), None),
        experiment=experiment,
        fingerprint=checkpoint.state.fingerprint,
    )
    return f"{card.content.rstrip()}\n"


def _read_results(file: Path) -> Results:
    try:
        return Results.model_validate_json(plain(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise UserError(f"{file} holds no results of evaluate.py; evaluate again, or remove it") from error
