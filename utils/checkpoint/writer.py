"""Write checkpoints: one folder for each saved step, written beside and renamed when it is whole.

Saving copies to host memory and returns. A thread writes while the training goes on.
"""

import hashlib
import json
import os
import shutil
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from utils.checkpoint.format import (
    REPLACED,
    File,
    Manifest,
    RunState,
    Tensors,
    first_failure,
    of_rank,
    read_name,
    sha256_of_file,
    step_folders,
)
from utils.dist.lost_ranks import is_lost_peer
from utils.dist.world import World, local_part
from utils.errors import UserError
from utils.files import INCOMPLETE, file_errors, sync_folder, write_atomically, write_synced


@dataclass(frozen=True)
class Snapshot:
    """What is to be saved."""

    weights: Tensors  # the whole model on rank 0; not looked at elsewhere
    shared: Tensors  # the same on all ranks that hold the same part of the model; of a DTensor each rank has its part
    slots: slice
    by_slot: Tensors  # the rows `slots` of the carry
    by_rank: Tensors  # of no use to another number of ranks
    state: RunState  # rank 0's counts


class _StorageWriter(HuggingFaceStorageWriter):
    """Writes a file per rank. As torch writes it, everything would be copied once more, under the interpreter's lock:
    at the paper's size the training would stand still for a second.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._file = folder / f"rank_{rank:04d}.safetensors"
        self.written: dict[str, File] = {}

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
            for leftover in run.glob(f"{INCOMPLETE}*"):
                if leftover.is_dir():
                    shutil.rmtree(leftover)
                else:
                    leftover.unlink()  # of write_atomically

    @property
    def last_good(self) -> str:
        """For messages: where the run can be taken up again."""
        name = read_name(self.run / "latest")
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
        temporary = self.run / f"{INCOMPLETE}{folder.name}_{self._attempt}"
        weights = {name.removeprefix("model."): of for name, of in staged.items() if name.startswith("model.")}
        rest = {name: tensor for name, tensor in staged.items() if not name.startswith("model.")}
        try:
            world.wait_for_device()  # for the copies
            with world.agree(), file_errors():
                if world.is_main:
                    shutil.rmtree(temporary, ignore_errors=True)
                    temporary.mkdir()
            writer = _StorageWriter(temporary / "state", world.rank)
            try:
                group, alone = world.host_group, world.size == 1
                state_dict_saver.save(rest, storage_writer=writer, process_group=group, no_dist=alone)
            except CheckpointException as error:  # on every rank alike
                cause = first_failure(error)
                if isinstance(cause, OSError):
                    raise UserError(" ".join(str(cause).split())) from error
                raise RuntimeError(repr(cause)) from error
            written = writer.written
            with world.agree(), file_errors():
                if world.is_main:
                    written["model.safetensors"] = _write_tensors(temporary / "model.safetensors", weights)
                    written["state.json"] = _write_bytes(
                        temporary / "state.json", state.model_dump_json(indent=1).encode()
                    )
            files = {name: entry for part in world.gather_objects(written) for name, entry in part.items()}
            with world.agree(), file_errors():
                if world.is_main:
                    _write_bytes(temporary / "manifest.json", Manifest(files=files).model_dump_json(indent=1).encode())
                    self._publish(temporary, folder, is_best=is_best)
        except UserError as error:
            if world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            raise UserError(
                f"the checkpoint of step {state.step} could not be written: {error}; {self.last_good}; "
                "free the disk, then resume"
            ) from error

    def _publish(self, temporary: Path, folder: Path, *, is_best: bool) -> None:
        sync_folder(temporary / "state")
        sync_folder(temporary)
        aside = self.run / f"{REPLACED}{folder.name}"
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
            kept_as_best = read_name(self.run / "best")
            steps = step_folders(self.run)
            # Later ones are of a run that was lost (damaged, hence resumed from before them): they don't count.
            for old in steps[: steps.index(folder) + 1][: -self._keep_last_k]:
                if old.name != kept_as_best:
                    self._remove(old)

    def _remove(self, folder: Path) -> None:
        """Renamed first, so that a kill while files are being deleted leaves no step folder with half of them."""
        doomed = folder.with_name(f"{INCOMPLETE}removed_{folder.name}")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed)


def require_finite_weights(snapshot: Snapshot, last_good: str) -> None:
    """Raises UserError: a checkpoint of NaN would take the place of one that is of use."""
    for name, tensor in snapshot.weights.items():
        if not tensor.isfinite().all():
            raise UserError(f"{name} is not finite at step {snapshot.state.step}; {last_good}; go on with a lower lr")


def _write_bytes(path: Path, contents: bytes) -> File:
    write_synced(path, contents)
    return File(bytes=len(contents), sha256=hashlib.sha256(contents).hexdigest())


def _write_tensors(path: Path, tensors: Tensors, header: dict[str, str] | None = None) -> File:
    """Straight from where the tensors lie, and hashed from the page cache: both without the interpreter's lock."""
    try:
        save_file(tensors, path, header)
    except SafetensorError as error:  # what else could be wrong with contiguous tensors on the host
        raise OSError(str(error)) from error
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return File(bytes=path.stat().st_size, sha256=sha256_of_file(path))


def _named(snapshot: Snapshot, world: World) -> Tensors:
    """What this rank is to write, under the names that it has in files ("model." goes before those of weights).

    Where several ranks hold the same tensor, they take turns, so that each of them copies and writes its part only.
    """
    plain = sorted(name for name, tensor in snapshot.shared.items() if not isinstance(tensor, DTensor))
    others = {name for index, name in enumerate(plain) if index % world.data_size != world.data_rank}
    rows = sorted(snapshot.by_slot)[world.rank % world.num_copies :: world.num_copies]
    slots = f"slots.{snapshot.slots.start:06d}_{snapshot.slots.stop:06d}"
    own = of_rank(world.rank, world.size)
    return {
        **{f"model.{name}": tensor for name, tensor in (snapshot.weights.items() if world.is_main else ())},
        **{name: tensor for name, tensor in snapshot.shared.items() if name not in others},
        **{f"{slots}.{name}": snapshot.by_slot[name] for name in rows},
        **{f"{own}.{name}": tensor for name, tensor in snapshot.by_rank.items()},
    }


def _kind(tensor: Tensor) -> tuple[object, ...]:
    placed = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else ()
    return tensor.shape, tensor.dtype, *placed
