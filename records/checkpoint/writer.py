"""Write checkpoints: one folder for each saved step, renamed to its name when it is whole.

Saving copies the tensors to host memory and returns. A thread writes while training goes on.
"""

import faulthandler
import math
import shutil
import uuid
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from records.checkpoint.format import REPLACED, Manifest, RunState, read_name, step_folders
from records.checkpoint.reader import Tensors
from records.checkpoint.weights import Plan, own_parts, plan_of, write_pieces, write_weights
from utils.errors import UserError
from utils.files import INCOMPLETE, file_errors, remove_replaced, sync_folder, write_synced
from utils.ranks.lost_ranks import is_lost_peer
from utils.ranks.world import Place, World, is_dtensor, local_part
from utils.terminal import tell


@dataclass(frozen=True)
class Snapshot:
    """The state of a run, ready to be saved. Of a DTensor a rank has its part."""

    weights: Tensors  # of the model, as far as this rank holds them, in the form that any strategy can load
    shared: Tensors  # equal on all ranks with the same part of the model
    slots: slice  # of this rank
    by_slot: Tensors  # the rows of the carry for these slots
    state: RunState  # only rank 0's is saved


class FailedSave(UserError):
    """A checkpoint that the disk refused. `latest` and `best` name what they named before."""

    def __init__(self, what: str, last_good: str) -> None:
        super().__init__(f"{what}; {last_good}; free the disk, then resume")
        self.what, self.last_good = what, last_good


class Checkpointer:
    """Writes a run's checkpoints in the background.

    It keeps the last `keep_last_k` (None: all) and the best one. A model larger than
    `most_file_bytes` gets several files.
    """

    def __init__(self, run: Path, world: World, keep_last_k: int | None, *, most_file_bytes: float = math.inf) -> None:
        assert world.size == 1 or world.thread_group is not None, "call connect_devices first: ranks need its groups"
        # Not at the first save: a library that changes during a run must not cost its checkpoints.
        from records.checkpoint.storage import save_tensors

        self._save_tensors = save_tensors
        self.run, self._world, self._keep_last_k = run, world, keep_last_k
        self._most_file_bytes = most_file_bytes
        self._writer_id = ""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint", initializer=world.enter_thread)
        self._saving: Future[None] | None = None
        self._staged: Tensors = {}
        self._copied: torch.cuda.Event | None = None  # follows the copies to self._staged on the device's stream
        self._write_staged: Callable[[], None] | None = None
        with file_errors():  # what an interrupted save has left
            for leftover in run.glob(f"{INCOMPLETE}*") if world.is_main else ():
                remove_replaced(leftover)

    @property
    def last_good(self) -> str:
        """A phrase for messages that names the checkpoint from which the run can resume."""
        name = read_name(self.run / "latest")
        return f"the last good checkpoint is {self.run / name}" if name else "there is no checkpoint yet"

    def save(
        self,
        snapshot: Snapshot,
        *,
        is_best: bool,
        first: Callable[[], None] | None = None,
        then: Callable[[Path], None] | None = None,
    ) -> None:
        """Begin to write a step. Every rank.

        When the step is whole, `latest` names it, and `best` as well if `is_best`. The snapshot's
        tensors may change as soon as this returns.

        Args:
            first: called in the thread of rank 0, before anything is written. An OSError is a
                failed save.
            then: called there with the step's folder when it is whole.

        Raises on every rank:
            UserError: A weight is not finite.
            FailedSave: The previous save failed.
        """
        self.wait()
        plan = plan_of(snapshot.weights, self._world)
        snapshot = replace(snapshot, weights=own_parts(plan, snapshot.weights, self._world.rank))
        with self._world.shared_errors():
            require_finite_weights(snapshot, self.last_good)
        if not self._writer_id:
            self._writer_id = self._world.broadcast_object(uuid.uuid4().hex[:8])
        self._staged = self._stage(_named(snapshot, self._world))
        in_thread = replace(self._world, host_group=self._world.thread_group)
        self._write_staged = partial(self._write, self._staged, plan, snapshot.state, is_best, first, then, in_thread)
        self.try_again()

    def try_again(self) -> None:
        """Begin to write the step of the last `save` once more, after it failed. Every rank."""
        assert self._saving is None and self._write_staged is not None
        self._saving = self._thread.submit(self._write_staged)

    def is_under_way(self) -> bool:
        """Return whether any rank still writes a step. Every rank."""
        if self._saving is None:
            return False
        _, _, busy, broken, _ = self._vote(self._saving)
        return busy and not broken

    def wait(self) -> None:
        """Wait until the last save has finished. Every rank, and every rank raises FailedSave."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        while True:
            # A slow disk takes as long as it needs. If a rank hangs, this collective times out.
            done, failed, busy, broken, late = self._vote(saving)
            if broken or not busy:
                break
            wait_for([saving], timeout=0.05)
        if broken and not failed:
            if not done and late:  # the others have waited for this rank's part until they gave up
                tell(f"rank {self._world.rank} ({Place.here()}) hangs while it saves")
                faulthandler.dump_traceback()
            raise RuntimeError("the checkpoint that was under way failed on another rank")
        saving.result()

    def _vote(self, saving: "Future[None]") -> tuple[bool, bool, bool, bool, bool]:
        """Return whether this rank is done and has failed; whether any is busy, failed, gave up."""
        done = saving.done()  # asked once, because a second question may get another answer
        failed = done and not isinstance(saving.exception(), UserError | None)
        gave_up = failed and "imed out" in str(saving.exception())
        busy, broken, late = self._world.any_of(not done, failed, gave_up)
        return done, failed, busy, broken, late

    def settle(self, error: Exception) -> None:
        """Give a running save a moment to finish after a fault, before the process ends."""
        if self._saving is not None:
            # A lost rank usually stops the save. Else the others must not take this rank for hung.
            patience_s = min(30.0, self._world.timeout.total_seconds() / 2)
            wait_for([self._saving], timeout=1 if is_lost_peer(error) else patience_s)

    @torch.no_grad()
    def _stage(self, tensors: Tensors) -> Tensors:
        """Copy the tensors to host memory and return the copies, on CUDA without waiting for them.

        Memory of the previous save is used again, because pinning takes longer than copying.
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
        if on_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record()
        return staged

    def _write(
        self,
        staged: Tensors,
        plan: Plan,
        state: RunState,
        is_best: bool,
        first: Callable[[], None] | None,
        then: Callable[[Path], None] | None,
        world: World,
    ) -> None:
        """Write a step and publish it, in the thread. Every rank."""
        folder = self.run / f"step_{state.step:08d}"
        # A rank from before a restart may live a moment longer than its rank 0, and still write.
        temporary = self.run / f"{INCOMPLETE}{folder.name}_{self._writer_id}"
        weights = {name.removeprefix("model."): of for name, of in staged.items() if name.startswith("model.")}
        rest = {name: tensor for name, tensor in staged.items() if not name.startswith("model.")}
        try:
            if self._copied is not None:
                self._copied.synchronize()  # and not with the device, which has got further work since
            with world.shared_errors(), file_errors():
                if world.is_main:
                    if first is not None:
                        first()
                    shutil.rmtree(temporary, ignore_errors=True)
                    temporary.mkdir()
            written = self._save_tensors(rest, temporary / "state", world)
            with world.shared_errors(), file_errors():
                written |= write_weights(plan, weights, temporary, self._most_file_bytes, world)
                if world.is_main:
                    file = temporary / "state.json"
                    written[file.name] = write_pieces(file, [state.model_dump_json(indent=1).encode()])
            files = {name: entry for part in world.gather_objects(written) for name, entry in part.items()}
            with world.shared_errors(), file_errors():
                if world.is_main:
                    manifest = Manifest(files=files).model_dump_json(indent=1).encode()
                    write_pieces(temporary / "manifest.json", [manifest])
                    self._publish(temporary, folder, is_best=is_best)
        except UserError as error:
            if world.is_main:
                shutil.rmtree(temporary, ignore_errors=True)
            what = f"the checkpoint of step {state.step} could not be written: {error}"
            raise FailedSave(what, self.last_good) from error
        if then is not None and world.is_main:
            then(folder)

    def _publish(self, temporary: Path, folder: Path, *, is_best: bool) -> None:
        """Give a whole step its name, and let `latest` and perhaps `best` name it, or undo all."""
        sync_folder(temporary / "state")
        sync_folder(temporary)
        # `best` comes first: a run that is killed before `latest` finds the best step again.
        pointers = [self.run / name for name in (("best", "latest") if is_best else ("latest",))]
        new, former = (
            {pointer: pointer.with_name(f"{INCOMPLETE}{prefix}{pointer.name}") for pointer in pointers}
            for prefix in ("", "former_")
        )
        names = {pointer: read_name(pointer) for pointer in pointers}
        aside = self.run / f"{REPLACED}{folder.name}"

        def restore(pointer: Path) -> None:
            if names[pointer]:
                former[pointer].replace(pointer)
            else:
                pointer.unlink(missing_ok=True)

        def remove_leftovers() -> None:
            for leftover in (*new.values(), *former.values()):
                leftover.unlink(missing_ok=True)

        with ExitStack() as undo:
            undo.callback(remove_leftovers)
            for pointer in pointers:  # a full disk refuses this while nothing has changed; later, files are renamed
                if names[pointer]:
                    write_synced(former[pointer], f"{names[pointer]}\n".encode())
                write_synced(new[pointer], f"{folder.name}\n".encode())
            if folder.exists():
                # The old folder may be the only checkpoint, until the new one has its name.
                self._remove(aside)
                folder.rename(aside)
                undo.callback(aside.rename, folder)
            temporary.rename(folder)
            undo.callback(folder.rename, temporary)
            for pointer in pointers:
                undo.callback(restore, pointer)
                new[pointer].replace(pointer)
                sync_folder(self.run)
            undo.pop_all()
        try:
            with file_errors():
                remove_leftovers()
                self._remove(aside)
                steps, kept_as_best = step_folders(self.run), read_name(self.run / "best")
                # Later steps don't count: they were damaged, and the run resumed from before them.
                older = steps[: steps.index(folder) + 1]
                for old in older[: -self._keep_last_k] if self._keep_last_k is not None else ():
                    if old.name != kept_as_best:
                        self._remove(old)
        except UserError as error:  # the step is saved all the same
            tell(f"WARNING: what {folder} replaces could not be removed: {error}")

    def _remove(self, folder: Path) -> None:
        """Remove a folder. It is renamed first, so that no step lacks files."""
        doomed = folder.with_name(f"{INCOMPLETE}removed_{uuid.uuid4().hex[:8]}")
        if folder.exists():
            folder.rename(doomed)
            remove_replaced(doomed)


def require_finite_weights(snapshot: Snapshot, last_good: str) -> None:
    """Raise UserError if a weight is not finite: its checkpoint would replace a useful one."""
    weights = {name: tensor for name, tensor in snapshot.weights.items() if tensor.numel()}
    if not weights:
        return
    # The least and the largest value need a tenth of the time of a mask of all values.
    extremes = [torch.stack((tensor.amin(), tensor.amax())) for tensor in weights.values()]
    are_finite = torch.stack([pair.isfinite().all().to(extremes[0].device) for pair in extremes]).tolist()
    for name, is_finite in zip(weights, are_finite, strict=True):
        if not is_finite:
            raise UserError(f"{name} is not finite at step {snapshot.state.step}; {last_good}; go on with a lower lr")


def _named(snapshot: Snapshot, world: World) -> Tensors:
    """Return the tensors that this rank writes, by their names in files ("model.*" for weights)."""
    plain = sorted(name for name, tensor in snapshot.shared.items() if not is_dtensor(tensor))
    others = {name for index, name in enumerate(plain) if index % world.data_size != world.data_rank}
    rows = sorted(snapshot.by_slot)[world.rank % world.ranks_per_share :: world.ranks_per_share]
    slots = f"slots.{snapshot.slots.start:06d}_{snapshot.slots.stop:06d}"
    return {
        **{f"model.{name}": tensor for name, tensor in snapshot.weights.items()},
        **{name: tensor for name, tensor in snapshot.shared.items() if name not in others},
        **{f"{slots}.{name}": snapshot.by_slot[name] for name in rows},
    }


def _kind(tensor: Tensor) -> tuple[object, ...]:
    placed = (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else ()
    return tensor.shape, tensor.dtype, *placed
