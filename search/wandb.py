"""Render a sweep as a sweep of Weights & Biases, whose agents then start the runs."""

import math
import shlex
from typing import Any

import yaml

from search.check import check_point
from search.config import Entry, Value
from search.launchers import build_launcher
from search.space import Point
from search.sweep import Sweep
from training.config import PretrainConfig
from utils.command_line import read_config, validate
from utils.config_files import Container
from utils.errors import UserError
from utils.overrides import as_override
from utils.ranks.launch import Launch
from utils.run.folder import with_names

_METHODS = {"grid": "grid", "random": "random", "tpe": "bayes"}
_REDUCTION_FACTOR = 4  # as search.study.build_pruner
_START = (
    "# Write these lines into a file, and start as many agents as you like:",
    "#",
    "#   wandb sweep FILE.yaml",
    "#   wandb agent ENTITY/PROJECT/ID    (wandb sweep prints this line)",
    "#",
)


def wandb_page(sweep: Sweep) -> str:
    """Return the YAML that `wandb sweep` takes, with a comment on what W&B does in another way.

    Raises:
        UserError: The sweep has conditional parameters or a list of points, which W&B does not
            know, or runs never log the metric.
    """
    _require_no_conditions(sweep)
    point: Point = next(iter(sweep.space.probes()), {})
    metric = check_point(sweep, point)
    config = validate(PretrainConfig, read_config("pretrain", sweep.overrides(point, sweep.config.seeds[0])))
    project = with_names(config.model_copy(update={"run_name": "any"}), Launch()).project_name
    is_grid = sweep.config.sampler.name == "grid"
    page: Container = {
        "name": sweep.name,
        "project": project,
        "program": "pretrain.py",
        "method": _METHODS[sweep.config.sampler.name],
        "metric": {"name": metric, "goal": sweep.config.direction},
        "parameters": {p.key: _parameter(p.entry, listed=is_grid) for p in sweep.space.parameters},
    }
    if len(sweep.config.seeds) > 1:
        page["parameters"]["seed"] = {"values": sweep.config.seeds}
    if sweep.config.pruner.name == "successive_halving":
        page["early_terminate"] = _hyperband(sweep, metric, config)
    if not is_grid or sweep.config.trials is not None:
        page["run_cap"] = sweep.num_trials * len(sweep.config.seeds)
    page["command"] = ["${env}", *shlex.split(_command(sweep)), "${args}"]
    return "\n".join(
        [*_START, *(f"# {note}" for note in _notes(sweep)), yaml.safe_dump(page, sort_keys=False)]
    ).rstrip()


def _require_no_conditions(sweep: Sweep) -> None:
    if sweep.config.points:
        raise UserError("sweep.points is a list of points, and W&B has none; give sweep.parameters")
    for parameter in sweep.space.parameters:
        if parameter.entry.when:
            raise UserError(
                f"sweep.parameters.{parameter.key} has a condition (when), and W&B has none; fix a value "
                f"({parameter.key}=...) or those it depends on, or search with sweep.py itself"
            )


def _command(sweep: Sweep) -> str:
    """Return the command line of a run without what W&B gives it. Its metrics have to reach W&B."""
    fixed = [each for each in sweep.config.overrides if not each.lstrip("+").startswith("wandb.mode=")]
    if len(sweep.config.seeds) == 1:
        fixed.append(f"seed={sweep.config.seeds[0]}")
    return build_launcher(sweep.config.launcher).shown([*fixed, "wandb.mode=online"])


def _parameter(entry: Entry, *, listed: bool) -> Container:
    """Return the values of a parameter, in W&B's words.

    Its distributions with steps count from 0 instead of from the lower end, so that such a range is
    a list here.
    """
    if entry.int_range is not None and entry.step is None and not listed:
        low, high = entry.int_range
        return {"distribution": "int_uniform", "min": low, "max": high}
    values = entry.listed()
    if values is not None:
        return {"values": [_as_argument(value) for value in values]}
    ends = entry.range or entry.log_range
    assert ends is not None
    kind = "uniform" if entry.range is not None else "log_uniform_values"
    return {"distribution": kind, "min": ends[0], "max": ends[1]}


def _as_argument(value: Value) -> Any:
    """Return a value of which an agent's --key=value is an override."""
    return as_override(value) if isinstance(value, str) or value is None else value


def _hyperband(sweep: Sweep, metric: str, config: PretrainConfig) -> Container:
    """Return W&B's early termination. It counts how often the metric was logged, not steps."""
    every = config.eval_every_n_steps if metric.startswith("eval/") else config.log_interval
    first = sweep.config.pruner.warmup_steps
    if first is not None and every is None:
        raise UserError(
            f"sweep.pruner.warmup_steps={first} counts steps and W&B counts evaluations; give eval_every_n_steps=..."
        )
    rung = 1 if first is None or every is None else max(1, math.ceil(first / every))
    return {"type": "hyperband", "min_iter": rung, "eta": sweep.config.pruner.reduction_factor or _REDUCTION_FACTOR}


def _notes(sweep: Sweep) -> list[str]:
    """Return what W&B does in another way."""
    config, notes = sweep.config, []
    if len(config.seeds) > 1:
        notes.append("W&B takes the seed as one more parameter, and does not average over it.")
    if config.pruner.name == "median":
        notes.append("W&B has no median pruner: every run trains to its end.")
    if config.pruner.name == "successive_halving":
        notes.append("min_iter counts how often a run has logged the metric.")
    limits = [f"sweep.{name}" for name in ("hours", "steps") if getattr(config, name) is not None]
    if limits:
        notes.append(f"W&B has no limit like {' and '.join(limits)}: stop the agent yourself.")
    return notes
