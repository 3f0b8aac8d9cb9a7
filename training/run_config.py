"""The keys that name a run, and the folder that they name."""

import re
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import coolname
from pydantic import AfterValidator, Field

from records.checkpoint.format import step_folders
from records.folder import CHECKPOINTS, located, require_folder_name
from utils.command_line import read_config, validate
from utils.config import Bool, Container, StrictModel
from utils.config_files import default_groups
from utils.errors import UserError
from utils.files import file_errors, write_atomically
from utils.overrides import typed_override
from utils.ranks.launch import Launch

_Name = Annotated[str, AfterValidator(partial(require_folder_name, key_of_path="checkpoint_path"))]


class RunConfig(StrictModel):
    """The keys that name a run, its data and the checkpoint that it resumes."""

    data_path: str
    data_paths: list[str]
    project_name: _Name | None
    run_name: _Name | None
    checkpoint_path: str | None
    resume: str | None
    allow_changed_data: Bool
    started_in: str | None
    # Not stored: an address may be a secret, and a stranger's config must not name a command.
    on_event: str | None = Field(default=None, min_length=1, exclude=True)

    @property
    def train_paths(self) -> list[str]:
        return [self.located(path) for path in self.data_paths or [self.data_path]]

    @property
    def run_path(self) -> Path:
        assert self.checkpoint_path is not None, "names are filled in before anything else looks at them"
        return Path(self.checkpoint_path)

    def located(self, path: str) -> str:
        """Return where a path of this config leads from the current directory."""
        return located(path, self.started_in)


def place_of_run(overrides: list[str]) -> RunConfig:
    """Return the keys that name a run, as the command line and the defaults set them."""
    values = read_beside_groups(overrides)
    return validate(RunConfig, {key: values[key] for key in RunConfig.model_fields})


def read_beside_groups(overrides: list[str]) -> Container:
    """Compose the config for the keys that are in no group, such as resume or init_from.

    An option such as arch.L_layers=1 may be wrong for the default architecture and right for that
    of the resumed run, which is not known yet. Such options are left out then, and read later.
    """
    try:
        return read_config("pretrain", overrides)
    except UserError:
        return read_config("pretrain", without_options(overrides))


def without_options(overrides: list[str]) -> list[str]:
    options = tuple(f"{group}." for group, _ in default_groups("pretrain"))
    return [typed for typed in overrides if not typed.lstrip("+").startswith(options)]


C = TypeVar("C", bound=RunConfig)


def with_names(config: C, launch: Launch) -> C:
    """Return the config with a name of the project, of the run, and the path of its folder."""
    project = config.project_name or Path(config.train_paths[0]).name
    if config.checkpoint_path:
        run_name = config.run_name or Path(config.checkpoint_path).name
    else:
        run_name = config.run_name or _draw_name(project, launch)
    path = config.checkpoint_path or str(CHECKPOINTS / project / run_name)
    return config.model_copy(update={"project_name": project, "run_name": run_name, "checkpoint_path": path})


@file_errors()
def _draw_name(project: str, launch: Launch) -> str:
    """Return two random words, or the name that an earlier attempt of this launch noted."""
    if launch.identity is not None:
        note = _note_of_launch(project, launch.identity)
        if not launch.is_later_attempt:
            # The note is from an earlier launch with the same identity, and names another run.
            note.unlink(missing_ok=True)
        elif note.is_file():
            return note.read_text(encoding="utf-8").strip()
    return coolname.generate_slug(2)


def note_name(config: RunConfig, launch: Launch) -> None:
    """Note the run's name for later attempts of the same launch, once its folder is there."""
    assert config.project_name is not None and config.run_name is not None
    if launch.identity is not None and config.run_path == CHECKPOINTS / config.project_name / config.run_name:
        note = _note_of_launch(config.project_name, launch.identity)
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(note, config.run_name + "\n")


def _note_of_launch(project: str, identity: str) -> Path:
    return CHECKPOINTS / project / ".launches" / re.sub(r"[^\w.-]", "_", identity)


@file_errors()
def claim_fresh(run: Path) -> None:
    """Raise UserError if the folder holds checkpoints, which a new run would overwrite."""
    if steps := step_folders(run):
        raise UserError(
            f"{run} already holds checkpoints (newest {steps[-1].name}); {typed_override('resume', str(run))} "
            "continues that run, another run_name or checkpoint_path starts a new one"
        )
