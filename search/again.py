"""Run the best points of a sweep again, for instance with several seeds."""

from search.report import best_first, require_best
from search.study import Study
from search.sweep import Sweep


def sweep_again(study: Study, num_best: int, typed: list[str]) -> Sweep:
    """Return a sweep over the best points of a study.

    It has the overrides, the metric and the direction of the other sweep. What is typed replaces
    them, as in a new sweep.

    Raises:
        UserError: No trial has a value yet, or what was typed is wrong.
    """
    sweep = study.sweep
    require_best(study)
    return Sweep.read(
        typed,
        again={
            "name": f"{sweep.name}_again",
            "overrides": sweep.config.overrides,
            "points": [best.point for best in best_first(sweep, study.trials())[:num_best]],
            "metric": sweep.config.metric,
            "direction": sweep.config.direction,
        },
    )
