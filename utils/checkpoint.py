"""Checkpoints: one folder per saved step, written beside and renamed when whole, readable by any number of ranks,
never executed.

<run>/latest, <run>/best            text files that name a step folder
<run>/step_00001000/
    model.safetensors               weights and puzzle table, for use elsewhere too
    optimizer.safetensors  progress.safetensors
    ema.safetensors                 where the run keeps a moving average: what it evaluates
    slots_<first>_<end>.safetensors one file per rank: its slots of the carry
    state.json                      step, cursor, config, fingerprints, open metrics, W&B run, best
    manifest.json                   size and sha256 of each file; written last
"""

import hashlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor

from utils.dist import UserError, World

Tensors = dict[str, Tensor]

_STEP_FOLDER = re.compile(r"step_(\d{8,})")
_SLOTS_FILE = re.compile(r"slots_(\d+)_(\d+)\.safetensors")
_TEMPORARY = ".incomplete_"
_REPLACED = f"{_TEMPORARY}replaced_"


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid")
    bytes: int
    sha256: str


class _Manifest(BaseModel):
    model_config = ConfigDict(extra="forbid")
    files: dict[str, _File]


class RunState(BaseModel):
    """What a checkpoint holds beside tensors: state.json."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    step: int
    draws: int  # examples taken from the stream
    open_steps: int
    open_slots: int
    best: float | None
    evaluations_since_best: int
    pending_row: dict[str, float] | None
    wandb_run_id: str
    fingerprint: dict[str, str]
    task: dict[str, int]
    config: dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """What is to be saved. `shared` and `state` count on rank 0; `by_slot` is each rank's rows `slots` of the carry."""

    shared: dict[str, Tensors]
    slots: slice
    by_slot: Tensors
    state: RunState


@dataclass(frozen=True)
class Checkpoint:
    """A step folder whose files were all found to be what was written."""

    path: Path
    state: RunState
    files: frozenset[str]  # that the manifest lists, and that alone are read

    @staticmethod
    def open(path: Path) -> "Checkpoint":
        """Raises ValueError that names the file where one is missing, truncated or altered."""
        try:
            manifest = _Manifest.model_validate_json((path / "manifest.json").read_text())
        except (OSError, ValidationError, UnicodeDecodeError) as error:
            raise ValueError(f"checkpoint {path} is damaged: manifest.json can't be read") from error
        for name, expected in manifest.files.items():
            file = path / name
            if file.name != name or not file.is_file():
                raise ValueError(f"checkpoint {path} is damaged: {name} is missing")
            if file.stat().st_size != expected.bytes:
                raise ValueError(
                    f"checkpoint {path} is damaged: {name} has {file.stat().st_size} bytes, not {expected.bytes}"
                )
            if _sha256_of_file(file) != expected.sha256:
                raise ValueError(f"checkpoint {path} is damaged: the contents of {name} were altered (sha256 differs)")
        if missing := {"model.safetensors", "state.json"} - manifest.files.keys():
            raise ValueError(f"checkpoint {path} is damaged: manifest.json lists no {missing.pop()}")
        try:
            state = RunState.model_validate_json((path / "state.json").read_text())
        except (ValidationError, UnicodeDecodeError) as error:
            raise ValueError(f"checkpoint {path} is damaged: state.json isn't the state of a run") from error
        return Checkpoint(path, state, frozenset(manifest.files))

    def has(self, name: str) -> bool:
        """Whether there is a <name>.safetensors."""
        return f"{name}.safetensors" in self.files

    def load(self, name: str) -> Tensors:
        """The tensors of <name>.safetensors, on the CPU."""
        if not self.has(name):
            raise ValueError(f"checkpoint {self.path} is damaged: manifest.json lists no {name}.safetensors")
        with _reading(self.path / f"{name}.safetensors") as file:
            return load_file(file)

    def trained_weights(self) -> Tensors:
        """The weights that the run evaluated at this step: where it kept a moving average, that of what it covers."""
        return self.load("model") | (self.load("ema") if self.has("ema") else {})

    def load_slots(self, slots: slice) -> Tensors:
        """These slots of the carry, put together from the files of however many ranks wrote it."""
        parts: dict[str, list[Tensor]] = {}
        for first, end, path in self._slot_files():
            overlap = slice(max(first, slots.start) - first, min(end, slots.stop) - first)
            if overlap.start >= overlap.stop:
                continue
            with _reading(path) as file, safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no dict)
                    parts.setdefault(name, []).append(tensors.get_slice(name)[overlap])
        carry = {name: torch.cat(rows) for name, rows in parts.items()}
        if not carry or any(len(rows) != slots.stop - slots.start for rows in carry.values()):
            raise ValueError(
                f"checkpoint {self.path} is damaged: its files hold not all of slots {slots.start} to {slots.stop - 1}"
            )
        return carry

    def _slot_files(self) -> list[tuple[int, int, Path]]:
        found = [match for name in self.files if (match := _SLOTS_FILE.fullmatch(name))]
        return sorted((int(match[1]), int(match[2]), self.path / match[0]) for match in found)


def find_checkpoint(run: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """What `latest` names, or the newest whole step where that is damaged; None where the folder holds no steps.

    Raises ValueError where there are steps and none is whole: starting afresh would hide the loss.
    """
    steps = step_folders(run)
    if not steps:
        return None
    named = run / _read_name(run / "latest")
    candidates = [named] if named in steps else []
    candidates += [step for step in reversed(steps) if step not in candidates]
    problems = []
    for candidate in candidates:
        try:
            checkpoint = Checkpoint.open(candidate)
        except ValueError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            warn(f"{problem}; going back to {candidate.name}")
        return checkpoint
    raise ValueError(
        f"none of the {len(steps)} checkpoints in {run} is whole ({problems[0]}); restore one or start another run"
    )


def put_back(run: Path) -> None:
    """Undo the first half of replacing a step, after which its writer was killed. Only for the next writer."""
    for aside in run.glob(f"{_REPLACED}*"):
        if not (folder := run / aside.name.removeprefix(_REPLACED)).exists():
            aside.rename(folder)


def step_folders(run: Path) -> list[Path]:
    """A run's step folders, oldest first."""
    if not run.is_dir():
        return []
    return sorted(
        (path for path in run.iterdir() if _STEP_FOLDER.fullmatch(path.name)), key=lambda path: int(path.name[5:])
    )


class Checkpointer:
    """Writes a run's checkpoints, keeps the last `keep_last_k` of them (None: all) and the best one."""

    def __init__(self, run: Path, world: World, keep_last_k: int | None) -> None:
        self.run, self._world, self._keep_last_k = run, world, keep_last_k
        if world.is_main:
            for leftover in run.glob(f"{_TEMPORARY}*"):
                if leftover.is_dir():
                    shutil.rmtree(leftover)
                else:
                    leftover.unlink()  # of write_atomically

    @property
    def last_good(self) -> str:
        """For messages: where the run can be taken up again."""
        name = _read_name(self.run / "latest")
        return f"the last good checkpoint is {self.run / name}" if name else "there is no checkpoint yet"

    def save(self, snapshot: Snapshot, *, is_best: bool) -> None:
        """Write a step, and let `latest` (and `best`) name it. Every rank.

        Raises UserError on every rank when a weight is not finite or the disk refuses; `latest` then still names the
        step before.
        """
        require_finite_weights(snapshot, self.last_good)
        step, slots = snapshot.state.step, snapshot.slots
        folder = self.run / f"step_{step:08d}"
        temporary = self.run / f"{_TEMPORARY}{folder.name}"
        try:
            with self._world.agree():
                if self._world.is_main:
                    shutil.rmtree(temporary, ignore_errors=True)
                    temporary.mkdir()
            written: dict[str, _File] = {}
            with self._world.agree():
                slots_file = f"slots_{slots.start:06d}_{slots.stop:06d}.safetensors"
                written[slots_file] = _write(temporary / slots_file, save(_on_host(snapshot.by_slot)))
                if self._world.is_main:
                    for name, tensors in snapshot.shared.items():
                        file = f"{name}.safetensors"
                        written[file] = _write(temporary / file, save(_on_host(tensors)))
                    written["state.json"] = _write(
                        temporary / "state.json", snapshot.state.model_dump_json(indent=1).encode()
                    )
            files = {name: entry for part in self._world.gather_objects(written) for name, entry in part.items()}
            with self._world.agree():
                if self._world.is_main:
                    _write(temporary / "manifest.json", _Manifest(files=files).model_dump_json(indent=1).encode())
                    self._publish(temporary, folder, is_best=is_best)
        except UserError as error:
            if self._world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(
                f"the checkpoint of step {step} could not be written: {error}; {self.last_good}; "
                "free the disk, then resume"
            ) from error

    def _publish(self, temporary: Path, folder: Path, *, is_best: bool) -> None:
        _sync_folder(temporary)
        aside = self.run / f"{_REPLACED}{folder.name}"
        if folder.exists():
            # Killed between the rename and `latest`, or resumed from an earlier step: the new one replaces it. Set
            # aside and not removed before the new one stands in its place: it may be the only one there is.
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        temporary.rename(folder)
        # `best` first: a run killed in between goes on from before this step, and finds again that it is the best.
        if is_best:
            write_atomically(self.run / "best", folder.name + "\n")
        write_atomically(self.run / "latest", folder.name + "\n")
        if aside.exists():
            shutil.rmtree(aside)
        if self._keep_last_k is not None:
            kept_as_best = _read_name(self.run / "best")
            steps = step_folders(self.run)
            # Later ones are of a run that was lost (damaged, hence resumed from before them): they don't count.
            for old in steps[: steps.index(folder) + 1][: -self._keep_last_k]:
                if old.name != kept_as_best:
                    self._remove(old)

    def _remove(self, folder: Path) -> None:
        """Renamed first, so that a kill while files are being deleted leaves no step folder with half of them."""
        doomed = folder.with_name(f"{_TEMPORARY}removed_{folder.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def require_finite_weights(snapshot: Snapshot, last_good: str) -> None:
    """Raises UserError, on every rank alike: a checkpoint of NaN would take the place of one that is of use."""
    for name, tensor in snapshot.shared["model"].items():
        if not tensor.isfinite().all():
            raise UserError(
                f"{name} is not finite at step {snapshot.state.step}; {last_good}; resume from it with a lower lr"
            )


def write_atomically(path: Path, text: str) -> None:
    """The file holds the old text or the new, whenever the process dies."""
    beside = path.with_name(f"{_TEMPORARY}{path.name}")
    _write(beside, text.encode())
    beside.replace(path)
    _sync_folder(path.parent)


def _write(path: Path, contents: bytes) -> _File:
    with open(path, "wb") as file:
        file.write(contents)
        file.flush()
        os.fsync(file.fileno())
    return _File(bytes=len(contents), sha256=hashlib.sha256(contents).hexdigest())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256_of_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _on_host(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().contiguous().cpu() for name, tensor in tensors.items()}


def _read_name(path: Path) -> str:
    """The step folder that `latest` or `best` names; empty where there is no such file or it names nothing of ours."""
    name = path.read_text(errors="replace").strip() if path.is_file() else ""
    return name if _STEP_FOLDER.fullmatch(name) else ""


@contextmanager
def _reading(path: Path) -> Iterator[Path]:
    try:
        yield path
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"{path} can't be read as safetensors: {error}") from error
