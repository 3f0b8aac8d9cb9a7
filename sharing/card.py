"""The texts of a folder that shares a model: the recipe of its training, and a card about it.

The card is a README.md in the form of the Hugging Face Hub: metadata in YAML, then text. It says
what is known, and nothing of the machine: no paths, no names of runs.
"""

import functools
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from models import shapes_of
from records.checkpoint.reader import Checkpoint
from records.history import METRICS_FILE, History
from sharing.exported import Exported
from sharing.hub import is_address
from sharing.published import PUZZLE_TABLE, Weights
from sharing.recipe import differences_from_groups, recipe_text
from sharing.stored_config import completed
from utils.command_line import read_config
from utils.config import Container
from utils.errors import UserError
from utils.files import plain
from utils.overrides import typed_override

RECIPE, CARD = "recipe.yaml", "README.md"

# Where a run was, what it showed, and on what machine: other people's differ.
_OF_ONE_RUN = (
    *("project_name", "run_name", "checkpoint_path", "resume", "allow_changed_data", "started_in"),
    *("wandb", "tensorboard", "profile", "perf_every_n_steps", "perf_max_share", "log_interval"),
    *("device", "compile", "dist", "parallel", "data_on"),
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
# Parts of names of metrics that say nothing about answers, or that the table of compute has.
_NOT_IN_TABLE = ("_at_step/", "q_halt_accuracy", "/reliability/", "/loop_deltas/", "_of/", "/num_")
_TASKS = ("sudoku", "maze", "arc")  # in names of datasets; others have no tag


class Method(BaseModel):
    """A row of an evaluation's table of accuracy against compute."""

    set_name: str
    method: str
    segments: float
    exact_accuracy: float


class Results(BaseModel):
    """What counts of a results.json of evaluate.py. The other keys are ignored."""

    data: str
    num_examples: dict[str, int]
    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    settings: dict[str, Any] = {}
    compute: list[Method] = []

    @property
    def name(self) -> str:
        """Return the names of the datasets' folders."""
        return ", ".join(Path(path).parent.name or "data" for path in self.data.split(" + "))

    def typed(self, metric: str) -> str:
        """Return the options that change what examples are answered with in a metric."""
        defaults = _defaults_of_evaluate()
        of_metric = next((keys for part, keys in _FURTHER_PASSES.items() if f"/{part}/" in metric), ())
        settings = {key: self.settings.get(key, defaults[key]) for key in (*_OF_EACH_PASS, *of_metric)}
        if settings["vote_with"]:
            settings["vote_with"] = f"{len(settings['vote_with'])} other checkpoints"
        return " ".join(f"{key}={value}" for key, value in settings.items() if value != defaults[key])

    def rows(self, unit: str) -> Iterator[tuple[str, ...]]:
        """Return the rows of the table of metrics.

        Of puzzles, they are shares alone. The loss of text (tokens) says more than that of puzzles.
        """
        for name, value in self.metrics.items():
            if _is_shown(name) and (unit == "tokens" or name in self.intervals):
                set_name, found = name.split("/")[1], self.intervals.get(name)
                # Scores of ARC are shares of tasks, and those of text of the samples with answers.
                is_of_examples = unit == "sequences" and "pass@" not in name
                count = f"{self.num_examples.get(set_name, 0):,}" if is_of_examples else ""
                interval = "" if found is None else f"{found[0]:.4f} to {found[1]:.4f}"
                yield self.name, count, self.typed(name), name.removeprefix("eval/"), f"{value:.4f}", interval


@functools.cache
def _defaults_of_evaluate() -> Container:
    return read_config("evaluate", ["checkpoint=_"])


def _is_shown(name: str) -> bool:
    return not any(part in name for part in _NOT_IN_TABLE)


@dataclass(frozen=True)
class Shared:
    """A model that is shared.

    Attributes:
        address: of the folder, as `checkpoint=` takes it.
    """

    checkpoint: Checkpoint
    model: Exported
    weights: Weights
    address: str

    @property
    def title(self) -> str:
        return f"{self.model.arch.name} on {self.data}"

    @property
    def data(self) -> str:
        return " and ".join(self.model.data) or "unknown data"

    @property
    def started_from(self) -> str:
        """The weights that training started from: an address of the Hub, or "other weights"."""
        sources = (str(self.checkpoint.state.config.get(key) or "") for key in _WEIGHTS_TO_START_FROM)
        source = next(filter(None, sources), "")
        return source if not source or is_address(source) else "other weights"

    @property
    def experiment(self) -> str:
        """The override that takes the recipe. One on the Hub has to be downloaded before."""
        return typed_override("experiment", RECIPE if is_address(self.address) else f"{self.address}/{RECIPE}")

    def recipe(self) -> str:
        """Return the text of recipe.yaml: what differs from the defaults, with data/<name> as data.

        Weights to start from are left out unless they are on the Hub, because a path says nothing.
        """

        def public(path: str) -> str:
            return f"data/{os.path.basename(os.path.abspath(path))}"

        defaults = read_config("pretrain", [])
        config = completed(self.checkpoint.state.config) | {key: defaults[key] for key in _OF_ONE_RUN}
        comment = [f"How the {self.title} was trained.", "", f"  python pretrain.py {self.experiment}"]
        if self.started_from and not is_address(self.started_from):
            config |= {key: defaults[key] for key in (*_WEIGHTS_TO_START_FROM, *_NEED_WEIGHTS)}
            comment[0] += f" The run started from {self.started_from}, which this recipe does not name."
        for key in ("data_paths", "data_paths_test"):
            config[key] = [public(path) for path in config[key]]
        config["data_path"] = defaults["data_path"] if config["data_paths"] else public(config["data_path"])
        return recipe_text(comment, *differences_from_groups(config))

    def card(self) -> str:
        """Return the text of README.md.

        Raises:
            UserError: huggingface_hub, which writes the card, is missing; or a file of the run is
                damaged.
        """
        try:
            from huggingface_hub import EvalResult, ModelCard, ModelCardData
        except ImportError:
            raise UserError(
                "a card needs huggingface_hub, which is missing; pip install it, or give -o NAME.safetensors"
            ) from None
        run, state, model = self.checkpoint.path.absolute().parent, self.checkpoint.state, self.model
        history = History(run / METRICS_FILE)
        history.refresh()
        past = [row for row in history.rows if row["step"] <= state.step]
        files = sorted(run.glob(f"eval_outputs/{self.checkpoint.path.name}*/results.json"))
        all_results = [read_results(file) for file in files]
        measured = [
            EvalResult(
                task_type=model.task_type,
                dataset_type=results.name,
                dataset_name=results.name,
                dataset_split="test",
                metric_type="exact_match",
                metric_name=f"{name.removeprefix('eval/')} {results.typed(name)}".rstrip(),
                metric_value=round(results.metrics[name], 4),
            )
            for results in all_results
            for name in results.intervals
            if name.endswith("/exact_accuracy")
        ]
        words = {word for name in model.data for word in re.split(r"[^a-z]+", name.lower())}
        data = ModelCardData(
            library_name="hrm-trainer",
            tags=["recursive-reasoning", model.arch.name, *sorted(words.intersection(_TASKS))],
            # The Hub's form of results needs a name of the model beside them.
            model_name=self.title if measured else None,
            eval_results=measured or None,
        )
        sizes = {name: model.sizes[name] for name in _SIZES if name in model.sizes}
        card = ModelCard.from_template(
            data,
            str(Path(__file__).with_name("card.jinja")),
            title=self.title,
            model=model,
            arch=model.arch,
            config=completed(state.config),
            num_parameters=sum(parameter.numel() for parameter in shapes_of(model.arch, **sizes).parameters()),
            num_in_table=self.weights[PUZZLE_TABLE].numel() if PUZZLE_TABLE in self.weights else 0,
            checkpoint=typed_override("checkpoint", self.address),
            init_from=typed_override("init_from", self.address),
            rows=[row for results in all_results for row in results.rows(model.unit)],
            methods=[(each.name, row) for each in all_results if len(each.compute) > 1 for row in each.compute],
            logged={
                name.removeprefix("eval/"): value
                for row in past
                if row["step"] == state.step
                for name, value in row.items()
                if name.startswith("eval/") and isinstance(value, float) and _is_shown(name)
            },
            started_from=self.started_from,
            seconds=next((row["time_s"] for row in reversed(past) if isinstance(row.get("time_s"), float)), None),
            experiment=self.experiment,
            data=self.data,
            fingerprint=state.fingerprint,
        )
        return f"{card.content.rstrip()}\n"


def read_results(file: Path) -> Results:
    """Read a results.json. Raise UserError if evaluate.py did not write it."""
    try:
        return Results.model_validate_json(plain(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise UserError(f"{file} holds no results of evaluate.py; evaluate again, or remove it") from error
