"""Write sweeps that look as if their trials had run, without training."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
import yaml
from optuna.trial import TrialState, create_trial

from search import study as attributes
from search.study import Study
from search.sweep import Sweep


@dataclass(frozen=True)
class Ended:
    """A trial: its parameters by their names, and the value of each seed.

    Attributes:
        reported: what the pruner was told, by the step; None: the value of the first seed at step
            10.
        noted: attributes in the study beside the values of the seeds and the error.
    """

    params: Mapping[str, Any]
    values: tuple[float, ...] = ()
    state: TrialState = TrialState.COMPLETE
    error: str | None = None
    reported: Mapping[int, float] | None = None
    noted: Mapping[str, Any] = field(default_factory=dict)


def read_sweep(folder: Path, **keys: Any) -> Sweep:
    """Return the sweep of a file with these keys, whose folder is <folder>/sweep."""
    file = folder / "mine.yaml"
    file.write_text(yaml.safe_dump(keys, sort_keys=False))
    return Sweep.read([f"sweep={file}", f"sweep.path={folder / 'sweep'}"])


def finished(sweep: Sweep, trials: list[Ended]) -> Study:
    """Return a study of a sweep, in memory, with these trials. Their runs have logged metrics."""
    study = optuna.create_study(study_name=sweep.name, direction=sweep.config.direction)
    add_trials(study, sweep, trials)
    for number, trial in enumerate(trials):
        for seed, value in zip(sweep.config.seeds, trial.values, strict=False):
            run = sweep.run_folder(number, seed)
            run.mkdir(parents=True, exist_ok=True)
            rows = [
                {"step": step, "train/lm_loss": 1 + 1 / step, "eval/all/exact_accuracy": value * step / 20}
                for step in ((10, 20) if trial.state == TrialState.COMPLETE else (10,))
            ]
            (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Study(sweep, study)


def add_trials(study: optuna.Study, sweep: Sweep, trials: list[Ended]) -> None:
    distributions = {parameter.name: parameter.distribution() for parameter in sweep.space.parameters}
    for trial in trials:
        is_complete = trial.state == TrialState.COMPLETE
        seeds = dict(zip(map(str, sweep.config.seeds), trial.values, strict=False))
        error = {} if trial.error is None else {attributes.ERROR: trial.error}
        first = {10: trial.values[0]} if trial.values else {}
        study.add_trial(
            create_trial(
                state=trial.state,
                value=sum(trial.values) / len(trial.values) if is_complete else None,
                params=dict(trial.params),
                distributions={name: distributions[name] for name in trial.params},
                user_attrs={attributes.SEEDS: seeds, **error, **trial.noted},
                intermediate_values=dict(trial.reported if trial.reported is not None else first),
            )
        )
