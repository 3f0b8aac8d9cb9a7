"""Checkpoints: one folder per saved step, written beside and renamed when whole, readable by any number of ranks under
any strategy, never executed.

<run>/latest, <run>/best            text files that name a step folder
<run>/step_00001000/
    model.safetensors               weights and puzzle table of the whole model, for use elsewhere too
    state/rank_0000.safetensors ... everything else, as torch.distributed.checkpoint shares it out: optimizer.*, ema.*,
                                    progress.*, slots.<first>_<end>.* (rows of the carry), rank_<r>_of_<n>.*
    state.json                      step, cursor, config, fingerprints, open metrics, W&B run, best
    manifest.json                   size and sha256 of each file; written last

Saving copies to host memory and returns; a thread writes while the training goes on.
"""

import hashlib
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from utils.dist import UserError, World, is_lost_peer, local_part
from utils.plain_files import plain, without_following

Tensors = dict[str, Tensor]

_STEP_FOLDER = re.compile(r"step_(\d{8,})")
_FILE_OF_A_STEP = re.compile(r"model\.safetensors|state\.json|state/rank_\d{4,}\.safetensors")
_SLOTS = re.compile(r"slots\.(\d+)_(\d+)\.(.+)")
_TEMPORARY = ".incomplete_"
_REPLACED = f"{_TEMPORARY}replaced_"

# Each rank reads what it needs, and one process alone writes: both are meant.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


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
    skipped_steps: list[int] = []  # of this run, so far
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
    """What is to be saved."""

    weights: Tensors  # the whole model on rank 0; not looked at elsewhere
    shared: Tensors  # the same on all ranks that hold the same part of the model; of a DTensor each rank has its part
    slots: slice
    by_slot: Tensors  # the rows `slots` of the carry
    by_rank: Tensors  # of no use to another number of ranks
    state: RunState  # rank 0's counts


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
            manifest = _Manifest.model_validate_json(plain(path / "manifest.json").read_text())
        except (OSError, ValidationError, UnicodeDecodeError) as error:
            raise ValueError(f"checkpoint {path} is damaged: manifest.json can't be read") from error
        if "optimizer.safetensors" in manifest.files:
            raise ValueError(
                f"checkpoint {path} was written by an older version; start another run with "
                f"init_from={path / 'model.safetensors'}"
            )
        for name, expected in manifest.files.items():
            file = path / name
            if not _FILE_OF_A_STEP.fullmatch(name) or not file.is_file():
                raise ValueError(f"checkpoint {path} is damaged: {name} is missing")
            if file.stat().st_size != expected.bytes:
                raise ValueError(
                    f"checkpoint {path} is damaged: {name} has {file.stat().st_size} bytes, not {expected.bytes}"
                )
            if _sha256_of_file(file) != expected.sha256:
                raise ValueError(f"checkpoint {path} is damaged: the contents of {name} were altered (sha256 differs)")
        if missing := {"model.safetensors", "state.json"} - manifest.files.keys():
            raise ValueError(f"checkpoint {path} is damaged: manifest.json lists no {missing.pop()}")
        for file in (path / "state").glob("*.safetensors"):
            if f"state/{file.name}" not in manifest.files:  # DCP would read it
                raise ValueError(f"checkpoint {path} is damaged: manifest.json doesn't list state/{file.name}")
        try:
            state = RunState.model_validate_json((path / "state.json").read_text())
        except (ValidationError, UnicodeDecodeError) as error:
            raise ValueError(f"checkpoint {path} is damaged: state.json isn't the state of a run") from error
        return Checkpoint(path, state, frozenset(manifest.files))

    def weights(self) -> Tensors:
        """The whole model, on the CPU."""
        with _reading(self.path / "model.safetensors") as file:
            return load_file(file)

    def trained_weights(self) -> Tensors:
        """The weights that the run evaluated at this step: where it kept a moving average, that of what it covers."""
        return self.weights() | (self.load("ema") if self.has("ema") else {})

    def sizes(self, prefix: str) -> dict[str, torch.Size]:
        """The whole shape of each tensor called <prefix>.<name>, by <name>. Reads headers only."""
        start = f"{prefix}."
        return {name.removeprefix(start): of.size for name, of in self._index().items() if name.startswith(start)}

    def has(self, prefix: str) -> bool:
        """Whether there is any <prefix>.<name>."""
        return bool(self.sizes(prefix))

    def load(self, prefix: str) -> Tensors:
        """The tensors called <prefix>.<name>, by <name>, whole and on the CPU. Raises ValueError where there are
        none.
        """
        found = {name: of for name, of in self._index().items() if name.startswith(f"{prefix}.")}
        if not found:
            raise ValueError(f"checkpoint {self.path} is damaged: its files hold no {prefix}")
        tensors = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in found.items()}
        self.load_into(tensors)
        return {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items()}

    def load_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite tensors, given by their full names, in place: of a DTensor the part that lies here, whatever parts
        were written. No collective: each rank reads for itself.

        Raises ValueError, with nothing overwritten, where a name is missing or a shape is another.
        """
        index = self._index()
        if missing := tensors.keys() - index.keys():
            raise ValueError(f"checkpoint {self.path} lacks {min(missing)} ({len(missing)} missing in all)")
        for name, tensor in tensors.items():
            if tensor.shape != index[name].size:
                raise ValueError(
                    f"checkpoint {self.path} holds {name} of {tuple(index[name].size)}, here it is "
                    f"{tuple(tensor.shape)}"
                )
        reader = HuggingFaceStorageReader(str(self.path / "state"))
        try:
            with torch.no_grad():
                state_dict_loader.load(dict(tensors), storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise ValueError(f"checkpoint {self.path} can't be read: {_first_failure(error)}") from error

    def load_slots(self, slots: slice) -> Tensors:
        """These slots of the carry, put together from what however many ranks wrote."""
        parts: dict[str, list[tuple[int, Tensor]]] = {}
        for name in sorted(self.files):
            if not name.startswith("state/"):
                continue
            with _reading(self.path / name) as file, safe_open(file, framework="pt") as tensors:
                for match in filter(None, map(_SLOTS.fullmatch, tensors.keys())):
                    first, end = int(match[1]), int(match[2])
                    overlap = slice(max(first, slots.start) - first, min(end, slots.stop) - first)
                    if overlap.start < overlap.stop:
                        parts.setdefault(match[3], []).append((first, tensors.get_slice(match[0])[overlap]))
        in_order = {name: sorted(rows, key=lambda part: part[0]) for name, rows in parts.items()}
        carry = {name: torch.cat([rows for _, rows in found]) for name, found in in_order.items()}
        if not carry or any(len(rows) != slots.stop - slots.start for rows in carry.values()):
            raise ValueError(
                f"checkpoint {self.path} is damaged: its files hold not all of slots {slots.start} to {slots.stop - 1}"
            )
        return carry

    def load_by_rank(self, rank: int, num_ranks: int) -> Tensors:
        """What this rank alone had; nothing where another number of ranks wrote."""
        own = _of_rank(rank, num_ranks)
        return self.load(own) if self.has(own) else {}

    def _index(self) -> dict[str, TensorStorageMetadata]:
        """Of every tensor in state/ its whole shape, dtype and the parts that were written."""
        folder = self.path / "state"
        if not any(name.startswith("state/") for name in self.files):
            return {}
        with _reading(folder):
            try:
                metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
            except (KeyError, TypeError, ValueError) as error:  # of a header that only a forger writes
                raise ValueError(f"{folder} can't be read as safetensors of this program: {error!r}") from error
        index = {name: of for name, of in metadata.items() if isinstance(of, TensorStorageMetadata)}
        for name, of in index.items():
            if sum(chunk.sizes.numel() for chunk in of.chunks) != of.size.numel():
                raise ValueError(f"checkpoint {self.path} is damaged: its files hold not all of {name}")
        return index


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


class _Writer(HuggingFaceStorageWriter):
    """Writes a file per rank. As torch writes it, everything would be copied once more, under the interpreter's lock:
    at the paper's size the training would stand still for a second.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._file = folder / f"rank_{rank:04d}.safetensors"
        self.written: dict[str, _File] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        tensors: Tensors = {}
        offsets, results = {}, []
        for item in plan.items:
            name, data = item.index.fqn, planner.resolve_data(item)
            assert isinstance(data, Tensor) and item.tensor_data is not None
            tensors[name] = data
            offsets[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
            results.append(WriteResult(item.index, data.nbytes, storage_data=None))
        if tensors:  # of this header the reader learns where each part belongs
            sharding = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
            self.written[f"state/{self._file.name}"] = _write_tensors(self._file, tensors, sharding)
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done


class Checkpointer:
    """Writes a run's checkpoints in the background, keeps the last `keep_last_k` of them (None: all) and the best
    one.
    """

    def __init__(self, run: Path, world: World, keep_last_k: int | None) -> None:
        assert world.size == 1 or world.thread_group is not None, "ranks save once use_device has made their groups"
        self.run, self._world, self._keep_last_k = run, world, keep_last_k
        self._attempt = ""
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None
        self._staged: Tensors = {}
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

    def settled_last_good(self) -> str:
        """The same once a save that is under way is through. Every rank."""
        self.wait()
        return self.last_good

    def save(self, snapshot: Snapshot, *, is_best: bool) -> None:
        """Begin to write a step, which `latest` (and `best`) will name when it is whole. Every rank.

        The snapshot's tensors may change as soon as this returns. Raises UserError on every rank when a weight is not
        finite, or for what `wait` says of the save before, which has to be through.
        """
        self.wait()
        with self._world.agree():
            if self._world.is_main:
                require_finite_weights(snapshot, self.last_good)
        if not self._attempt:
            self._attempt = self._world.broadcast_object(uuid.uuid4().hex[:8])
        self._staged = self._stage(_named(snapshot, self._world))
        in_thread = replace(self._world, host_group=self._world.thread_group)
        self._saving = self._thread.submit(self._write, self._staged, snapshot.state, is_best, in_thread)

    def wait(self) -> None:
        """Until the last save is through. Every rank.

        Raises UserError on every rank when the disk refused; `latest` then still names the step before.
        """
        saving, self._saving = self._saving, None
        if saving is None:
            return
        while True:
            # The disk may take as long as it likes; that a rank hangs shows in these collectives, within their timeout.
            done = saving.done()  # asked once: it may become so between two questions
            failed = done and not isinstance(saving.exception(), UserError | None)
            busy, broken = self._world.any_of(not done, failed)
            if broken or not busy:
                break
            wait_for([saving], timeout=0.05)
        if broken and not failed:
            raise RuntimeError("the checkpoint that was under way failed on another rank")
        saving.result()

    def settle(self, error: Exception) -> None:
        """For a fault, whose process ends without order: gives a save that is under way half a minute to be through, or
        less where the others would take this rank for one that hangs, or where a peer is lost, without whom most can't
        be, a moment. No collective of the main thread's; what becomes of the save doesn't matter any more.
        """
        if self._saving is not None:
            patience_s = min(30.0, self._world.timeout.total_seconds() / 2)
            wait_for([self._saving], timeout=1 if is_lost_peer(error) else patience_s)

    @torch.no_grad()
    def _stage(self, tensors: Tensors) -> Tensors:
        """Copies in host memory, where those of the save before lay: to pin memory takes longer than to copy. On CUDA
        the host doesn't wait for them; what comes later on the stream overwrites the originals after they were read.
        """
        on_cuda = self._world.device.type == "cuda"
        staged = {}
        for name, tensor in tensors.items():
            place = self._staged.get(name)
            if place is None or _kind(place) != _kind(tensor):
                place = torch.empty_like(
                    tensor, device="cpu", pin_memory=on_cuda, memory_format=torch.contiguous_format, requires_grad=False
                )
            local_part(place).copy_(local_part(tensor), non_blocking=on_cuda)
            staged[name] = place
        return staged

    def _write(self, staged: Tensors, state: RunState, is_best: bool, world: World) -> None:
        """In the thread. Every rank."""
        folder = self.run / f"step_{state.step:08d}"
        # Of this attempt's own: a rank of an earlier one may live for a moment after its rank 0, and write.
        temporary = self.run / f"{_TEMPORARY}{folder.name}_{self._attempt}"
        weights = {name.removeprefix("model."): of for name, of in staged.items() if name.startswith("model.")}
        rest = {name: tensor for name, tensor in staged.items() if not name.startswith("model.")}
        try:
            world.wait_for_device()  # for the copies
            with world.agree():
                if world.is_main:
                    shutil.rmtree(temporary, ignore_errors=True)
                    temporary.mkdir()
            writer = _Writer(temporary / "state", world.rank)
            try:
                group, alone = world.host_group, world.size == 1
                state_dict_saver.save(rest, storage_writer=writer, process_group=group, no_dist=alone)
            except CheckpointException as error:  # on every rank alike
                cause = _first_failure(error)
                if isinstance(cause, OSError):
                    raise UserError(" ".join(str(cause).split())) from error
                raise RuntimeError(repr(cause)) from error
            written = writer.written
            with world.agree():
                if world.is_main:
                    written["model.safetensors"] = _write_tensors(temporary / "model.safetensors", weights)
                    written["state.json"] = _write(temporary / "state.json", state.model_dump_json(indent=1).encode())
            files = {name: entry for part in world.gather_objects(written) for name, entry in part.items()}
            with world.agree():
                if world.is_main:
                    _write(temporary / "manifest.json", _Manifest(files=files).model_dump_json(indent=1).encode())
                    self._publish(temporary, folder, is_best=is_best)
        except UserError as error:
            if world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(
                f"the checkpoint of step {state.step} could not be written: {error}; {self.last_good}; "
                "free the disk, then resume"
            ) from error

    def _publish(self, temporary: Path, folder: Path, *, is_best: bool) -> None:
        _sync_folder(temporary / "state")
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
    """Raises ValueError: a checkpoint of NaN would take the place of one that is of use."""
    for name, tensor in snapshot.weights.items():
        if not tensor.isfinite().all():
            raise ValueError(f"{name} is not finite at step {snapshot.state.step}; {last_good}; go on with a lower lr")


def write_atomically(path: Path, text: str) -> None:
    """The file holds the old text or the new, whenever the process dies."""
    beside = path.with_name(f"{_TEMPORARY}{path.name}")
    _write(beside, text.encode())
    beside.replace(path)
    _sync_folder(path.parent)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside, one file of a run is written. Raises OSError that says which, and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{path} could not be written: {error.strerror or error}; free the disk, then resume") from error


def _write(path: Path, contents: bytes) -> _File:
    with open(path, "wb", opener=without_following) as file:
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


def _write_tensors(path: Path, tensors: Tensors, header: dict[str, str] | None = None) -> _File:
    """Straight from where the tensors lie, and hashed from the page cache: both without the interpreter's lock."""
    try:
        save_file(tensors, path, header)
    except SafetensorError as error:  # what else could be wrong with contiguous tensors on the host
        raise OSError(str(error)) from error
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return _File(bytes=path.stat().st_size, sha256=_sha256_of_file(path))


def _named(snapshot: Snapshot, world: World) -> Tensors:
    """What this rank is to write, under the names that it has in files ("model." goes before those of weights).

    Where several ranks hold the same tensor, they take turns, so that each of them copies and writes its part only.
    """
    plain = sorted(name for name, tensor in snapshot.shared.items() if not isinstance(tensor, DTensor))
    others = {name for index, name in enumerate(plain) if index % world.data_size != world.data_rank}
    rows = sorted(snapshot.by_slot)[world.rank % world.num_copies :: world.num_copies]
    slots = f"slots.{snapshot.slots.start:06d}_{snapshot.slots.stop:06d}"
    own = _of_rank(world.rank, world.size)
    return {
        **{f"model.{name}": tensor for name, tensor in (snapshot.weights.items() if world.is_main else ())},
        **{name: tensor for name, tensor in snapshot.shared.items() if name not in others},
        **{f"{slots}.{name}": snapshot.by_slot[name] for name in rows},
        **{f"{own}.{name}": tensor for name, tensor in snapshot.by_rank.items()},
    }


def _of_rank(rank: int, num_ranks: int) -> str:
    return f"rank_{rank:04d}_of_{num_ranks:04d}"


def _kind(tensor: Tensor) -> tuple[object, ...]:
    placed = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    return tensor.shape, tensor.dtype, *placed


def _first_failure(error: CheckpointException) -> BaseException:
    return error.failures[min(error.failures)][0]


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
