"""Run the best points of a sweep again, for instance with several seeds."""

from search.report import require_best_first
from search.study import Study
from search.sweep import Sweep


def sweep_again(study: Study, num_best: int, typed: list[str]) -> Sweep:
    """Return a sweep over the best points of a study.

    It has the overrides, the metric and the direction of the other sweep, but neither its launcher
    nor its pruner. What is typed replaces them, as in a new sweep.

    Raises:
        UserError: No trial has a value yet, or what was typed is wrong.
    """
    sweep, found = study.sweep, require_best_first(study)
    return Sweep.read(
        typed,
        again={
            "name": f"{sweep.name}_again",
            "overrides": sweep.config.overrides,
            "points": [best.point for best in found[:num_best]],
            "metric": sweep.config.metric,
            "direction": sweep.config.direction,
        },
    )
