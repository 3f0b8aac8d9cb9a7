"""Decide how a run begins: its config, and the checkpoint that it resumes, if any. For rank 0."""

import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from records.checkpoint.format import nearest_run, read_state, refuse_folder_of_runs, run_folder_of, step_folders
from records.checkpoint.reader import Checkpoint, find_checkpoint, open_checkpoint, put_back
from records.folder import CHECKPOINTS, Launched, same_folder
from records.lock import RunLock
from sharing.sources import kind_of, step_around
from sharing.stored_config import GONE, completed, name_in
from training.config import PretrainConfig
from training.run_config import RunConfig, claim_fresh, note_name, place_of_run, with_names
from training.trained import read_config_of_new_run
from utils.command_line import differences, typed_changes, typed_keys_and_groups, validate, with_changes
from utils.composing import Composed, compose
from utils.config import Container, flatten
from utils.config_files import default_groups, read_config_file
from utils.errors import UserError
from utils.files import file_errors, refuse_links, write_atomically
from utils.overrides import typed_override
from utils.ranks.config import MeetingConfig
from utils.ranks.launch import Launch
from utils.terminal import tell

_NAMES = ("project_name", "run_name")
# Keys that belong to one start, not to the run: where the run is, and what a user allowed once.
_OF_THIS_START = {"resume", "checkpoint_path", "allow_changed_data", "started_in", "on_event"}
# Keys of stored paths. The path of the run itself is not among them: each start knows its own.
_PATHS = {"data_path", "data_paths", "data_paths_test", "init_from", "load_checkpoint", "resume"}


@dataclass
class Start:
    """How a run begins: its config, the checkpoint that it resumes, and notes for the user."""

    config: PretrainConfig
    checkpoint: Checkpoint | None = None
    notes: list[str] = field(default_factory=list)
    goes_back: bool = False  # this process has trained already, and a step went wrong

    @property
    def branches_off(self) -> bool:
        """Whether the checkpoint belongs to another run."""
        return self.checkpoint is not None and not same_folder(self.checkpoint.path.parent, self.config.run_path)


def read_start(overrides: list[str], lock: RunLock, launch: Launch) -> Start:
    """Compose the config, name the run, lock its folder and find its checkpoint. For rank 0.

    A resumed run has the stored config, and only the overrides change it.
    """
    notes: list[str] = []
    checkpoint: Checkpoint | None
    where = place_of_run(overrides)
    if where.on_event and not any(re.match(r"\+*on_event=", each) for each in overrides):
        raise UserError("on_event stands in a file, and would run what the file says; type it on the command line")
    if where.resume not in (None, "auto"):
        where = place_of_resumed(where, overrides)
        checkpoint = _named_checkpoint(where, launch, lock, notes)
    else:
        if where.resume == "auto" and not (where.checkpoint_path or where.run_name or launch.identity):
            raise UserError(
                "resume=auto finds a run by its folder; give checkpoint_path=checkpoints/<project>/<run> as well"
            )
        where = with_names(where, launch)
        if where.resume == "auto":
            refuse_folder_of_runs(where.run_path)
        _take(where.run_path, lock, notes)
        if where.resume is None and not Launched.began(where.run_path, launch):
            start = _new_run(overrides, where, notes)
            claim_fresh(where.run_path)
            return start
        checkpoint = find_checkpoint(where.run_path, notes.append)

    run_path = where.run_path
    stored = _config_of(run_path) if checkpoint is None else checkpoint.state.config
    if stored is not None:
        return _resumed(stored, checkpoint, overrides, where, notes)
    if where.resume == "auto" and not run_path.exists():
        similar = f" (did you mean {nearest}?)" if (nearest := nearest_run(run_path)) else ""
        # Told at once: the defaults may fail on missing data, which would hide the reason.
        tell(
            f"warning: resume=auto finds no folder {run_path}{similar}, so a new run is starting afresh there. To go "
            "on with an older run, check checkpoint_path, project_name and run_name"
        )
    else:
        notes.append(f"resume=auto: no checkpoint in {run_path}, starting afresh")
    return _new_run(overrides, where, notes)


def _new_run(overrides: list[str], where: RunConfig, notes: list[str]) -> Start:
    values = read_config_of_new_run(overrides)
    asked = validate(PretrainConfig, values, lambda: compose("pretrain", overrides))
    typed = typed_keys_and_groups("pretrain", overrides)
    if {"arch", "experiment"} <= typed:
        recipe = compose("pretrain", [each for each in overrides if not re.match(r"\+*arch[.=]", each)]).values
        before, now = dict(flatten({"arch": recipe["arch"]})), dict(flatten({"arch": values["arch"]}))
        both = [key for key in before if key in now and key not in typed and before[key] != now[key]]
        if changed := ", ".join(f"{key} {before[key]} -> {now[key]}" for key in both):
            notes.append(f"the typed arch replaces that of the recipe, and with it these keys: {changed}")
    named = {key: getattr(where, key) for key in (*_NAMES, "checkpoint_path")}
    return Start(asked.model_copy(update=named | {"started_in": asked.started_in or os.getcwd()}), notes=notes)


def _resumed(
    stored: Container, checkpoint: Checkpoint | None, overrides: list[str], where: RunConfig, notes: list[str]
) -> Start:
    """Return the start of a run that has a stored config."""
    run_path, whole = where.run_path, completed(stored)
    before, now = dict(flatten(stored)), dict(flatten(whole))
    meeting = {f"dist.{key}" for key in MeetingConfig.model_fields}  # of each start
    newer = sorted(now.keys() - before.keys() - _OF_THIS_START - meeting)
    if newer := [key for key in newer if key.partition(".")[0] not in before]:  # profile: false became a group
        notes.append(f"not known when the run began: {', '.join(f'{key}={now[key]}' for key in newer)}")
    if gone := [f"{key}={value}" for key, value in flatten(stored) if key in GONE]:
        notes.append(f"stored keys that no longer exist are dropped: {', '.join(gone)}")
    merged, changes, places = _merged(whole, overrides)
    changes |= {"resume": where.resume, "checkpoint_path": str(run_path)}
    changes |= {"allow_changed_data": where.allow_changed_data, "on_event": where.on_event}
    if where.resume not in (None, "auto"):  # a typed group, such as debug=tiny, gives no new names
        changes |= {key: getattr(where, key) or merged.get(key) for key in _NAMES}
    if changes.get("started_in", merged.get("started_in")) not in (None, os.getcwd()):
        # Stored paths are relative to where the run was started, and typed ones to the current
        # directory.
        changes |= {key: _absolute(changes[key]) for key in changes.keys() & _PATHS}
    file = run_path / "config.yaml" if checkpoint is None else checkpoint.path / "state.json"
    not_stored = changes.keys() | {key for key in merged if merged[key] != whole[key]}

    def origin() -> Composed:
        def is_stored(key: str) -> bool:
            return not any(f"{key}.".startswith(f"{each}.") for each in not_stored)

        above = "config." if file.name == "state.json" else ""
        of_file = {key.removeprefix(above): place for key, place in read_config_file(file, "", "").places.items()}
        of_file = {key: place for key, place in of_file.items() if is_stored(key)}
        return Composed(places=of_file | {key: place for key, place in places.items() if not is_stored(key)})

    config = with_names(validate(PretrainConfig, with_changes(merged, changes), origin), Launch())
    config = config.model_copy(update={"started_in": config.started_in or os.getcwd()})
    if checkpoint is None:
        if merged.get("resume") not in (None, "auto"):
            source = config.located(str(merged["resume"]))
            raise UserError(
                f"{run_path} was to go on from {source} and has no checkpoint of its own yet; "
                f"give {typed_override('resume', source)} {typed_override('checkpoint_path', str(run_path))} again"
            )
        notes.append(f"resume=auto: no checkpoint in {run_path} yet, starting afresh with its config.yaml")
    elif same_folder(run_path, checkpoint.path.parent):
        notes.append(f"resuming {checkpoint.path} at step {checkpoint.state.step}")
    else:
        notes.append(f"branches off {checkpoint.path.parent} at step {checkpoint.state.step} into {run_path}")
    if config.started_in != os.getcwd():
        notes.append(f"the run was started in {config.started_in}, to which its relative paths refer")
    notes += [f"changed on the command line: {line}" for line in _changes(whole, config.model_dump())]
    return Start(config, checkpoint, notes)


def _absolute(path: Any) -> Any:
    if isinstance(path, list):
        return [_absolute(each) for each in path]
    is_path = isinstance(path, str) and path != "auto" and "://" not in path
    return os.path.join(os.getcwd(), path) if is_path else path


def place_of_resumed(where: RunConfig, overrides: list[str]) -> RunConfig:
    """Return the folder of a run that goes on with resume=PATH, and its names if they are new.

    A typed checkpoint_path, or another project_name or run_name than that of the run at PATH, means
    a new run, which branches off into a folder of its own.
    """
    assert where.resume is not None
    if kind_of(where.resume) == "weights":
        start = f"{typed_override('init_from', where.resume)} starts another run with them"
        raise UserError(step_around(where.resume) or f"resume={where.resume} are weights alone, and no run; {start}")
    source = run_folder_of(Path(where.resume))
    # A name that stands in a typed group, such as debug=tiny, does not mean another run.
    typed = typed_keys_and_groups("pretrain", overrides)
    names = {key: value for key in _NAMES if key in typed and (value := getattr(where, key))}
    path = source
    if where.checkpoint_path is not None:
        path = Path(where.checkpoint_path)
        if not same_folder(path, source):
            names = {"run_name": path.name} | names
    elif names:
        stored = _config_of(source)
        if stored is None:  # only steps were copied, or nothing is there
            steps = step_folders(source)
            stored = read_state(steps[-1]).config if steps else {}
        of_folder = {"project_name": source.resolve().parent.name, "run_name": source.resolve().name}
        own = {key: stored.get(key) or name for key, name in of_folder.items()}
        if own | names != own:
            names = own | names
            validate(RunConfig, where.model_dump() | names)
            path = CHECKPOINTS / names["project_name"] / names["run_name"]
    path = source if same_folder(path, source) else path
    return where.model_copy(update=dict.fromkeys(_NAMES) | names | {"checkpoint_path": str(path)})


def _merged(stored: Container, overrides: list[str]) -> tuple[Container, Container, dict[str, str]]:
    """Return the stored config, the typed changes to it as {dotted key: value}, and their places.

    The overrides are read with the run's own architecture, optimizer and so on. If they choose
    another one, its options replace all stored options of that group.
    """
    typed = typed_keys_and_groups("pretrain", overrides)
    names = {group: name_in(stored.get(group), group) for group, _ in default_groups("pretrain")}
    given = [f"{group}={name}" for group, name in names.items() if name and not typed & {group, "experiment"}]
    composed = compose("pretrain", [*given, *overrides])
    asked, changes = composed.values, typed_changes("pretrain", overrides, given)
    if "data_path" in typed and "data_paths" not in typed:
        changes["data_paths"] = []  # the typed data_path replaces it
    others = {
        group: asked[group] for group, name in names.items() if name and changes.get(f"{group}.name", name) != name
    }
    return stored | others, changes, composed.places


def _changes(stored: Container, now: Container) -> list[str]:
    """Return a line for each key, and each choice in a group, that a resumed run has otherwise."""
    chosen = {
        group: f"{group}: {before} -> {after}"
        for group, _ in default_groups("pretrain")
        if (before := name_in(stored.get(group), group)) != (after := name_in(now.get(group), group))
    }
    # A typed forward_dtype=auto keeps the dtype that the run began with.
    same = _OF_THIS_START | ({"arch.forward_dtype"} if now["arch"]["forward_dtype"] == "auto" else set())
    lines = [line for line in differences(stored, now) if line.split(":")[0] not in same]
    return [*chosen.values(), *(line for line in lines if line.split(".")[0] not in chosen)]


@file_errors()
def _config_of(run_path: Path) -> Container | None:
    """Return the stored config of a run without checkpoints; None if no run began there."""
    file = run_path / "config.yaml"
    return read_config_file(file, "", "pretrain").values if file.is_file() else None


def _named_checkpoint(where: RunConfig, launch: Launch, lock: RunLock, notes: list[str]) -> Checkpoint:
    """Lock the folder that the run of resume=PATH writes into, and return its checkpoint."""
    assert where.resume is not None
    asked, run_path = Path(where.resume), where.run_path
    source = run_folder_of(asked)
    refuse_folder_of_runs(source)
    _take(run_path, lock, notes)
    if Launched.began(run_path, launch) and (own := find_checkpoint(run_path, notes.append)):
        return own  # an earlier attempt of this launch has already gone on from PATH
    checkpoint = open_checkpoint(asked, notes.append)
    if not same_folder(run_path, source):
        claim_fresh(run_path)
    elif source != asked and (newest := step_folders(run_path)[-1]).name != checkpoint.path.name:
        raise UserError(
            f"resume={asked}, but the run went on to {newest.name}; "
            f"{typed_override('resume', str(run_path))} continues it there, "
            "and another run_name or checkpoint_path branches off here"
        )
    return checkpoint


@file_errors()
def _take(run: Path, lock: RunLock, notes: list[str]) -> None:
    """Lock the run's folder, if it exists, before anything in it is read or put in order."""
    if run.is_dir():
        # A link could lead the writes of a run from elsewhere anywhere.
        written = [run / name for name in ("eval_outputs", "tensorboard", "profile")]
        refuse_links([*run.iterdir(), *(file for folder in written for file in folder.rglob("*"))])
        lock.take(run, notes.append)
        put_back(run)


def prepare(start: Start, lock: RunLock, launch: Launch) -> None:
    """Create and lock the run's folder, with config.yaml and the metrics that it branches off."""
    run = start.config.run_path
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock.take(run, start.notes.append)
        if start.checkpoint is None or start.branches_off:
            # Another run may have used the folder while this one read its data.
            claim_fresh(run)
        write_atomically(run / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(start.config.model_dump())))
        (run / "stopped").unlink(missing_ok=True)
        note_name(start.config, launch)
        if start.checkpoint is not None and start.branches_off:
            history = start.checkpoint.path.parent / "metrics.jsonl"
            if history.is_file():
                shutil.copyfile(history, run / "metrics.jsonl")
    except OSError as error:
        raise UserError(f"can't write to {run}: {error.strerror}; free it, or give another checkpoint_path") from error
