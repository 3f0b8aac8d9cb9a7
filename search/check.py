"""Check before the first trial that the config takes a sweep's points, and runs log its metric."""

import difflib

from search.space import Point, overrides_of
from search.sweep import Sweep
from training.config import PretrainConfig
from training.kinds import kind_of_arch
from training.splits import open_own
from utils.command_line import read_config, validate
from utils.composing import compose
from utils.errors import UserError

# Of each run, whatever its number of ranks.
PERF = ("examples_per_second", "step_ms", "data_ms", "max_memory_gb", "eval_share", "model_tflops")


def check_sweep(sweep: Sweep) -> None:
    """Check every point of a grid. Of other sweeps, check each value and the ends of each range.

    Raises:
        UserError: The config refuses a point, or no run logs the metric.
    """
    if sweep.config.sampler.name == "grid":
        points = [point for _, point in sweep.space.grid()]
    else:
        points = [*sweep.space.probes()]
    for point in points or [{}]:
        check_point(sweep, point)


def check_point(sweep: Sweep, point: Point) -> str:
    """Return the metric of the runs at a point, with its set.

    Raises:
        UserError: The config refuses the point, or runs there do not log the metric.
    """
    return full_metric(sweep.config.metric, config_at(sweep, point))


def config_at(sweep: Sweep, point: Point) -> PretrainConfig:
    """Return the config of the first seed at a point. Raise UserError if the config refuses it."""
    typed = " ".join(overrides_of(point)) or "the sweep's overrides"
    overrides = sweep.overrides(point, sweep.config.seeds[0])
    try:
        return validate(PretrainConfig, read_config("pretrain", overrides), lambda: compose("pretrain", overrides))
    except UserError as error:
        raise UserError(f"the config refuses {typed}: {error}") from error


def full_metric(metric: str, config: PretrainConfig) -> str:
    """Return the name under which a run logs a metric.

    Raises:
        UserError: The run does not log it, or its test data are missing.
    """
    kind = kind_of_arch(config.arch)
    known = [f"train/{name}" for name in (*kind.sums.means, "grad_norm", "lr")]
    known += [f"perf/{name}" for name in PERF]
    if metric.startswith(("train/", "perf/")):
        name = metric
    else:
        if not config.evaluates:
            raise UserError(
                f"sweep.metric={metric} is one of evaluation, but the runs never evaluate; give eval_every_n_steps=..."
            )
        split = open_own(config, "test")
        sets = list(split.num_examples(None))
        names, more = kind.eval_metrics(config, split, kind.evaluators(config, split))
        known += [f"eval/{each}/{name}" for each in sets for name in (*names, *more)]
        name = metric if "/" in metric else f"eval/{sets[0]}/{metric}"
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        possible = f"did you mean {' or '.join(close)}?" if close else f"take one of {', '.join(known)}"
        raise UserError(f"sweep.metric={metric} is no metric of these runs; {possible}")
    return name
