"""Save and load the tensors in state/ with torch.distributed.checkpoint.

Imported where tensors are read or written: this takes half as long as to import torch.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from records.checkpoint.format import File
from records.checkpoint.weights import write_tensors
from utils.errors import UserError
from utils.ranks.world import World

# Each rank reads on its own, without collectives, so that this warning does not apply.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class _StorageWriter(HuggingFaceStorageWriter):
    """Writes one file per rank. Torch's own writer copies tensors, which would stop training."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(str(folder), save_distributed=True)
        self._file = folder / f"rank_{rank:04d}.safetensors"
        self.written: dict[str, File] = {}

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        tensors: dict[str, Tensor] = {}
        offsets, results = {}, []
        for item in plan.items:
            name, data = item.index.fqn, planner.resolve_data(item)
            assert isinstance(data, Tensor) and item.tensor_data is not None
            tensors[name] = data
            offsets[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
            results.append(WriteResult(item.index, data.nbytes, storage_data=None))
        if tensors:  # the reader finds in this header where each part belongs
            sharding = {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}
            self.written[f"state/{self._file.name}"] = write_tensors(self._file, tensors, sharding)
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result(results)
        return done


def save_tensors(tensors: Mapping[str, Tensor], folder: Path, world: World) -> dict[str, File]:
    """Write the tensors of each rank, and return the files of this rank. Every rank."""
    writer = _StorageWriter(folder, world.rank)
    try:
        state_dict_saver.save(
            dict(tensors), storage_writer=writer, process_group=world.host_group, no_dist=world.size == 1
        )
    except CheckpointException as error:  # raised on every rank
        cause = _first_failure(error)
        if isinstance(cause, OSError):
            raise UserError(" ".join(str(cause).split())) from error
        raise RuntimeError(repr(cause)) from error
    return writer.written


def load_tensors(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Overwrite the tensors in place with those of a folder, or raise UserError."""
    try:
        with torch.no_grad():
            reader = HuggingFaceStorageReader(str(folder))
            state_dict_loader.load(dict(tensors), storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise UserError(f"checkpoint {folder.parent} can't be read: {_first_failure(error)}") from error


def read_index(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Return for each tensor in a folder its whole shape, its dtype and the written parts."""
    try:
        metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    except (KeyError, TypeError, ValueError) as error:  # from a header that was tampered with
        raise UserError(f"{folder} can't be read as safetensors of this program: {error!r}") from error
    return {name: of for name, of in metadata.items() if isinstance(of, TensorStorageMetadata)}


def _first_failure(error: CheckpointException) -> BaseException:
    return error.failures[min(error.failures)][0]
