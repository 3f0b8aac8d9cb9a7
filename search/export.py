"""Write the best trial of a sweep as a file of config/experiment."""

import re
from pathlib import Path

from search.launchers import build_launcher
from search.report import Best, measured, num_of, require_best_first
from search.study import Study
from search.sweep import Sweep
from sharing.recipe import differences_from_groups, recipe_text
from utils.command_line import read_config, with_changes
from utils.config import flatten
from utils.config_files import CONFIG_DIR
from utils.errors import UserError
from utils.files import file_errors, write_atomically
from utils.overrides import as_override
from utils.programs import PACKAGE

EXPERIMENTS = CONFIG_DIR / "experiment"
# Where a run is, and what belongs to one start of it. The seed is left at its default: the values
# were chosen for any seed.
_LEFT_OUT = ("seed", "run_name", "checkpoint_path", "resume", "allow_changed_data", "wandb.group")


def write_experiment(study: Study, file: Path | None) -> str:
    """Write the best trial as an experiment.

    Args:
        file: None: config/experiment/<name of the sweep>_best.yaml.

    Returns:
        The path of the file, and the command that trains it.

    Raises:
        UserError: No trial has a value yet, or the file exists or can't be written.
    """
    sweep, best = study.sweep, require_best_first(study)[0]
    folder = Path("config/experiment") if PACKAGE else EXPERIMENTS  # a package must not write into itself
    file = file or folder / f"{re.sub(r'[^A-Za-z0-9-]+', '_', sweep.name).strip('_')}_best.yaml"
    if file.suffix not in (".yaml", ".yml") or file.name.startswith("_"):
        raise UserError(f"{file} can't be chosen as experiment=...; give a name like my_best.yaml")
    # Hydra finds a name only with .yaml, and a path with either.
    named = file.stem if file.absolute().parent == EXPERIMENTS and file.suffix == ".yaml" else str(file)
    text = experiment_text(sweep, best, len(study.trials()), named)
    with file_errors():
        if file.exists() or file.is_symlink():
            raise UserError(f"{file} exists; remove it, or name another file with -o")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
    return f"{file}\n{build_launcher(sweep.config.launcher).shown([f'experiment={as_override(named)}'])}"


def experiment_text(sweep: Sweep, best: Best, num_trials: int, named: str) -> str:
    """Return the file of a trial.

    Args:
        named: what follows experiment= on a command line.
    """
    config = read_config("pretrain", sweep.overrides(best.point, sweep.config.seeds[0]))
    defaults = dict(flatten(read_config("pretrain", [])))
    groups, values = differences_from_groups(with_changes(config, {key: defaults[key] for key in _LEFT_OUT}))
    paths = ", ".join(config["data_paths"] or [config["data_path"]])
    keys = ", ".join(sweep.keys) or "the seed"
    extreme = "highest" if sweep.config.direction == "maximize" else "lowest"
    comment = [
        f"The best of {num_of(num_trials, 'trial')} of the sweep {sweep.name}, which searched {keys}.",
        "",
        f"Expected: about the value below. It is the {extreme} of many, so a new run tends to be a little worse.",
        f"Measured here: {measured(sweep, best)}.",
        "",
        f"The data are {paths}. Add the command that builds them, python dataset/build_...",
        "",
        f"  {build_launcher(sweep.config.launcher).shown([f'experiment={as_override(named)}'])}",
    ]
    return recipe_text(comment, groups, values)
