"""The folder that shares a model: its weights, the recipe of its training, and a card about it.

The card is a README.md in the form of the Hugging Face Hub: metadata in YAML, then text. It says
what is known, and nothing of the machine: no paths, no names of runs.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from models import shapes_of
from models.exported import Exported, ExportedText
from models.published import Weights
from models.se_mixer import SEMixerConfig
from utils.checkpoint.reader import Checkpoint
from utils.command_line import Container, read_config
from utils.config_files import CONFIG_DIR
from utils.errors import UserError
from utils.files import plain
from utils.hub import is_address
from utils.recipe import differences_from_groups, recipe_text
from utils.run.history import METRICS_FILE, History
from utils.run.launched import Launched
from utils.run.resume import completed
from utils.text import for_shell

RECIPE, CARD = "recipe.yaml", "README.md"

_LIBRARY = "hrm-trainer"
# Where a run was, what it showed, and on what machine: other people's differ.
_OF_ONE_RUN = (
    *("project_name", "run_name", "checkpoint_path", "resume", "allow_changed_data", "started_in"),
    *("wandb", "tensorboard", "profile", "perf_every_n_steps", "perf_max_share", "log_interval"),
    *("device", "compile", "dist", "parallel", "data_on"),
)
# Of the data, as models/__init__.py takes them.
_SIZES = ("seq_len", "vocab_size", "num_puzzle_identifiers")
_WEIGHTS_TO_START_FROM = ("init_from", "load_checkpoint")
# Metrics with an interval that say nothing about answers, or that the table of compute has.
_NOT_IN_TABLE = ("exact_accuracy_at_step/", "q_halt_accuracy")
# The keys of evaluate.py that decide how much compute an example gets. 0 and null mean none.
_COMPUTE = ("num_steps", "trajectories", "restarts", "noise", "tta")
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
        """Return the name of the dataset's folder."""
        return Path(self.data).parent.name or "data"

    @property
    def typed(self) -> str:
        """Return what was typed to spend another compute than the default."""
        return " ".join(f"{key}={self.settings[key]}" for key in _COMPUTE if self.settings.get(key))


@dataclass(frozen=True)
class Facts:
    """What is known of a model.

    Attributes:
        fingerprint: the SHA-256 of each split of the data.
        started_from: the names of the weights that training started from; empty: from random ones.
        seconds: of training; None if nobody noted them.
        logged: the metrics that training logged after this step.
    """

    model: Exported
    num_parameters: int
    num_in_table: int
    config: Container
    fingerprint: dict[str, str]
    started_from: str
    seconds: float | None
    machine: str
    results: Sequence[Results]
    logged: dict[str, float]

    @property
    def title(self) -> str:
        return " and ".join([f"{self.model.arch.name} on {self.model.data[0]}", *self.model.data[1:]])


def facts_of(checkpoint: Checkpoint, model: Exported, weights: Weights) -> Facts:
    """Collect what the folder of a run says about the model of one of its steps.

    Raises:
        UserError: A file of the run is damaged.
    """
    run, state = checkpoint.path.absolute().parent, checkpoint.state
    table = weights.get("puzzle_embedding.weight")
    num_in_table = 0 if table is None else table.numel()
    shapes = shapes_of(model.arch, **{name: model.sizes[name] for name in _SIZES if name in model.sizes})
    history = History(run / METRICS_FILE)
    history.refresh()
    rows = [row for row in history.rows if row["step"] <= state.step]
    launched = Launched.read(run)
    sources = (state.config.get(key) for key in _WEIGHTS_TO_START_FROM)
    return Facts(
        model=model,
        num_parameters=sum(parameter.numel() for parameter in shapes.parameters()),
        num_in_table=num_in_table,
        config=completed(state.config, "pretrain"),
        fingerprint=state.fingerprint,
        started_from=next((Path(source).name for source in sources if source), ""),
        seconds=next((row["time_s"] for row in reversed(rows) if isinstance(row.get("time_s"), float)), None),
        machine="" if launched is None else f"{launched.ranks} x {launched.device}",
        results=[read_results(file) for file in sorted(run.glob(f"eval_outputs/{checkpoint.path.name}*/results.json"))],
        logged={
            name: value
            for row in rows
            if row["step"] == state.step
            for name, value in row.items()
            if name.startswith("eval/") and isinstance(value, float)
        },
    )


def read_results(file: Path) -> Results:
    """Read a results.json.

    Raises:
        UserError: It can't be read, or evaluate.py did not write it.
    """
    try:
        return Results.model_validate_json(plain(file).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        raise UserError(f"{file} holds no results of evaluate.py; evaluate again, or remove it") from error


def recipe_of(facts: Facts) -> str:
    """Return the text of recipe.yaml: what differs from the defaults, with data/<name> as the data.

    Weights to start from are left out unless they are on the Hub, because a path says nothing.
    """
    defaults = read_config("pretrain", [])
    config = facts.config | {key: defaults[key] for key in _OF_ONE_RUN}
    for key in _WEIGHTS_TO_START_FROM:
        if not is_address(str(config.get(key))):
            config[key] = None
    for key in ("data_paths", "data_paths_test"):
        config[key] = [_public(path) for path in config.get(key) or []]
    if not config["data_paths"]:
        config["data_path"] = _public(config["data_path"])
    groups, values = differences_from_groups(config)
    comment = [f"How the {facts.title} was trained.", "", "  python pretrain.py experiment=recipe.yaml"]
    return recipe_text(comment, groups, values)


def _public(path: str) -> str:
    return f"data/{Path(path).name}"


def card_of(facts: Facts, address: str) -> str:
    """Return the text of README.md.

    Args:
        address: of the folder, as `checkpoint=` takes it.

    Raises:
        UserError: huggingface_hub, which writes the metadata, is missing.
    """
    sections = [_heading(facts), _use(facts.model, address), _accuracy(facts), _training(facts)]
    body = "\n\n".join("\n".join(section) for section in sections)
    return f"---\n{_metadata(facts)}\n---\n\n{body}\n"


def _metadata(facts: Facts) -> str:
    try:
        from huggingface_hub import EvalResult, ModelCardData
    except ImportError:
        raise UserError("a card needs huggingface_hub, which is missing; pip install it, or give a file") from None
    measured = [
        EvalResult(
            task_type="text-generation" if isinstance(facts.model, ExportedText) else "reasoning",
            dataset_type=results.name,
            dataset_name=results.name,
            dataset_split="test",
            metric_type="exact_match",
            metric_name=name.removeprefix("eval/"),
            metric_value=round(results.metrics[name], 4),
        )
        for results in facts.results
        for name in results.intervals
        if name.endswith("/exact_accuracy")
    ]
    tasks = {task for task in _TASKS for name in facts.model.data if task in name.lower()}
    data = ModelCardData(
        library_name=_LIBRARY,
        tags=["recursive-reasoning", facts.model.arch.name, *sorted(tasks)],
        # The Hub's form of results needs a name of the model beside them.
        model_name=facts.title if measured else None,
        eval_results=measured or None,
    )
    return str(data.to_yaml())


def _heading(facts: Facts) -> Iterator[str]:
    arch = facts.model.arch
    yield f"# {facts.title}"
    yield ""
    yield _about(arch.name)
    table = f", and {facts.num_in_table:,} numbers in its puzzle table" if facts.num_in_table else ""
    yield ""
    yield f"The model has {facts.num_parameters:,} parameters{table}. {_LIBRARY} trained it."
    if isinstance(arch, SEMixerConfig) and arch.cells == "units":
        yield "It is told the rows, columns and boxes of a Sudoku (`arch.cells=units`)."


def _about(arch: str) -> str:
    """Return the first comment of the architecture's file in config/arch."""
    lines = (CONFIG_DIR / "arch" / f"{arch}.yaml").read_text(encoding="utf-8").splitlines()
    comment = lines[: next(number for number, line in enumerate(lines) if not line.startswith("#"))]
    return " ".join(line.lstrip("# ") for line in comment)


def _use(model: Exported, address: str) -> Iterator[str]:
    asked = "prompt=..." if isinstance(model, ExportedText) else "puzzle=..."
    yield from ("## Use it", "", "```bash")
    yield f"python solve.py {for_shell([f'checkpoint={address}'])} {asked}"
    yield f"python evaluate.py {for_shell([f'checkpoint={address}'])} data_path=..."
    yield f"python pretrain.py {for_shell([f'init_from={address}'])} data_path=..."
    yield "```"


def _accuracy(facts: Facts) -> Iterator[str]:
    yield from ("## Accuracy", "")
    if facts.results:
        yield "`evaluate.py` measured it, with the 95 % intervals of a sample of this size."
        yield ""
        yield from _table(["data", "examples", "typed", "metric", "value", "interval"], _rows(facts.results))
        if methods := [method for results in facts.results for method in _methods(results)]:
            yield ""
            yield "More compute for an example:"
            yield ""
            yield from _table(["data", "method", "segments of an example", "exact accuracy"], methods)
    elif facts.logged:
        yield "Training logged it after the last step. `evaluate.py` has not measured it."
        yield ""
        shown = [
            (name.removeprefix("eval/"), f"{value:.4f}") for name, value in facts.logged.items() if _is_shown(name)
        ]
        yield from _table(["metric", "value"], shown)
    else:
        yield "Nobody measured it."


def _rows(results: Sequence[Results]) -> Iterator[tuple[str, ...]]:
    for each in results:
        for name, (low, high) in each.intervals.items():
            if _is_shown(name):
                shown, of_set = name.removeprefix("eval/"), each.num_examples.get(name.split("/")[1])
                count = "" if of_set is None else f"{of_set:,}"
                yield (
                    each.name,
                    count,
                    each.typed,
                    shown,
                    f"{each.metrics.get(name, math.nan):.4f}",
                    f"{low:.4f} to {high:.4f}",
                )


def _methods(results: Results) -> Iterator[tuple[str, ...]]:
    if len(results.compute) > 1:
        for row in results.compute:
            yield results.name, row.method, f"{row.segments:.1f}", f"{row.exact_accuracy:.4f}"


def _is_shown(name: str) -> bool:
    return not any(part in name for part in _NOT_IN_TABLE)


def _training(facts: Facts) -> Iterator[str]:
    config, model = facts.config, facts.model
    unit = "tokens" if isinstance(model, ExportedText) else "sequences"
    yield from ("## Training", "")
    start = f"It started from {facts.started_from}. " if facts.started_from else ""
    yield f"{start}It took {model.step:,} steps of {config['global_batch_size']:,} {unit}, with seed {config['seed']}."
    if facts.seconds is not None:
        machine = f" on {facts.machine}" if facts.machine else ""
        yield f"They took {_duration(facts.seconds)}{machine}, with the evaluations between them."
    yield f"`{RECIPE}` has all options that differ from the defaults:"
    yield from ("", "```bash", f"python pretrain.py experiment={RECIPE}", "```", "")
    yield f"Data: {', '.join(model.data) or 'unknown'}."
    for split, sha256 in facts.fingerprint.items():
        yield f"- {split}: sha256 {sha256}"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    for row in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(row)} |"
