"""Check before the first trial that the config takes a sweep's points, and runs log its metric."""

from search.space import Point, overrides_of
from search.sweep import Sweep
from training.config import PretrainConfig
from training.kinds import kind_of_arch
from training.splits import open_own
from utils.command_line import read_config, validate
from utils.composing import compose
from utils.errors import UserError
from utils.mistakes import nearest

# Of each run, whatever its number of ranks.
PERF = ("examples_per_second", "step_ms", "data_ms", "max_memory_gb", "eval_share", "model_tflops")


def check_sweep(sweep: Sweep) -> None:
    """Check every point of a grid. Of other sweeps, check each value and the ends of each range."""
    is_grid = sweep.config.sampler.name == "grid"
    points = [point for _, point in sweep.space.grid()] if is_grid else [*sweep.space.probes()]
    for point in points or [{}]:
        check_point(sweep, point)


def config_at(sweep: Sweep, point: Point) -> PretrainConfig:
    """Return the config of the first seed at a point. Raise UserError if the config refuses it."""
    overrides = sweep.overrides(point, sweep.config.seeds[0])
    try:
        return validate(PretrainConfig, read_config("pretrain", overrides), lambda: compose("pretrain", overrides))
    except UserError as error:
        typed = " ".join(overrides_of(point)) or "the sweep's overrides"
        raise UserError(f"the config refuses {typed}: {error}") from error


def check_point(sweep: Sweep, point: Point) -> str:
    """Return the metric of the runs at a point, with its set. Raise UserError if they lack it."""
    metric, config = sweep.config.metric, config_at(sweep, point)
    kind = kind_of_arch(config.arch)
    known = [f"train/{name}" for name in (*kind.sums.means, "grad_norm", "lr")]
    known += [f"perf/{name}" for name in PERF]
    name = metric
    if not metric.startswith(("train/", "perf/")):
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
        possible = " or ".join(nearest(name, known)) or f"one of {', '.join(known)}"
        raise UserError(f"sweep.metric={metric} is no metric of these runs; did you mean {possible}?")
    return name
