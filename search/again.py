"""Run the best points of a sweep again, for instance with several seeds."""

from optuna.trial import TrialState

from search.study import Study
from search.sweep import Sweep
from utils.errors import UserError


def sweep_again(study: Study, num_best: int, typed: list[str]) -> Sweep:
    """Return a sweep over the best points of a study.

    It has the overrides, the metric and the direction of the other sweep. What is typed replaces
    them, as in a new sweep.

    Raises:
        UserError: No trial has a value yet, or what was typed is wrong.
    """
    sweep = study.sweep
    ended = [trial for trial in study.trials() if trial.state == TrialState.COMPLETE and trial.value is not None]
    if not ended:
        raise UserError(f"no trial of {sweep.path} has ended with a value yet; status shows them")
    sign = -1 if sweep.config.direction == "maximize" else 1
    best = sorted(ended, key=lambda trial: (sign * (trial.value or 0.0), trial.number))[:num_best]
    return Sweep.read(
        typed,
        again={
            "name": f"{sweep.name}_again",
            "overrides": sweep.config.overrides,
            "points": [sweep.space.point_of(trial) for trial in best],
            "metric": sweep.config.metric,
            "direction": sweep.config.direction,
        },
    )
