"""Read checkpoints, with any number of ranks under any strategy. No file can run code."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from records.checkpoint.format import (
    FILE_OF_A_STEP,
    REPLACED,
    SLOTS,
    Manifest,
    RunState,
    newest_first,
    no_run,
    read_state,
    sha256_of_file,
    step_named,
)
from utils.errors import UserError
from utils.files import file_errors, plain
from utils.safetensors_files import FILE, INDEX, joined, read_index
from utils.shapes import compare_shapes, shapes_of

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A step folder whose files have the sizes and checksums of its manifest."""

    path: Path
    state: RunState
    files: frozenset[str]  # the files in the manifest; no others are read

    @staticmethod
    def open(path: Path) -> "Checkpoint":
        """Open a step folder and check all its files; UserError names a damaged file."""
        try:
            manifest = Manifest.model_validate_json(plain(path / "manifest.json").read_text(encoding="utf-8"))
        except PermissionError:  # somebody else may read the checkpoint, which is whole
            raise
        except (OSError, ValidationError, UnicodeDecodeError) as error:
            raise _damaged(path, "manifest.json can't be read") from error
        for name, expected in manifest.files.items():
            file = path / name
            if not FILE_OF_A_STEP.fullmatch(name) or not file.is_file():
                raise _damaged(path, f"{name} is missing")
            if file.stat().st_size != expected.bytes:
                raise _damaged(path, f"{name} has {file.stat().st_size} bytes, not {expected.bytes}")
            if sha256_of_file(file) != expected.sha256:
                raise _damaged(path, f"the contents of {name} were altered (sha256 differs)")
        weights = read_index(path / INDEX).values() if INDEX in manifest.files else [FILE]
        if missing := {"state.json", *weights} - manifest.files.keys():
            raise _damaged(path, f"manifest.json lists no {min(missing)}")
        for file in (path / "state").glob("*.safetensors"):  # torch would read all of them
            if f"state/{file.name}" not in manifest.files:
                raise _damaged(path, f"manifest.json doesn't list state/{file.name}")
        return Checkpoint(path, read_state(path), frozenset(manifest.files))

    def weights(self) -> Tensors:
        """Return the weights of the whole model, which lie in the files."""
        with _reading(self.path):
            if INDEX not in self.files:
                return load_file(self.path / FILE)
            index = self.path / INDEX
            return joined(str(index), read_index(index), lambda file: load_file(self.path / file))

    def trained_weights(self) -> Tensors:
        """Return the weights that the run evaluated: the averages if it keeps some."""
        return self.weights() | (self.load("ema") if self.sizes("ema") else {})

    def sizes(self, prefix: str) -> dict[str, torch.Size]:
        """Return the whole shape of each tensor <prefix>.<name>, by <name>. Reads headers only."""
        start = f"{prefix}."
        return {name.removeprefix(start): of.size for name, of in self._index().items() if name.startswith(start)}

    def load(self, prefix: str) -> Tensors:
        """Return the tensors <prefix>.<name>, by <name>, whole and on the CPU."""
        found = {name: of for name, of in self._index().items() if name.startswith(f"{prefix}.")}
        if not found:
            raise _damaged(self.path, f"its files hold no {prefix}")
        tensors = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in found.items()}
        self.load_into(tensors)
        return {name.removeprefix(f"{prefix}."): tensor for name, tensor in tensors.items()}

    def load_into(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite tensors in place by their full names, such as "optimizer.step".

        Each rank reads alone, without collectives. Of a DTensor it reads the part that it holds,
        however the tensor was divided when it was written. UserError: a name is missing or a shape
        differs; no tensor was overwritten then.
        """
        index = self._index()
        found = compare_shapes({name: of.size for name, of in index.items()}, shapes_of(tensors))
        if found.missing:
            raise UserError(f"checkpoint {self.path} lacks {min(found.missing)} ({len(found.missing)} missing in all)")
        for name in found.reshaped:
            raise UserError(
                f"checkpoint {self.path} holds {name} of {tuple(index[name].size)}, here it is "
                f"{tuple(tensors[name].shape)}"
            )
        from records.checkpoint.storage import load_tensors

        load_tensors(tensors, self.path / "state")

    def load_slots(self, slots: slice) -> Tensors:
        """Return these slots of the carry, however many ranks wrote them."""
        parts: dict[str, list[tuple[int, Tensor]]] = {}
        for name in self._shards:
            with _reading(self.path / name) as file, safe_open(file, framework="pt") as tensors:
                for match in filter(None, map(SLOTS.fullmatch, tensors.keys())):
                    first, end = int(match[1]), int(match[2])
                    overlap = slice(max(first, slots.start) - first, min(end, slots.stop) - first)
                    if overlap.start < overlap.stop:
                        parts.setdefault(match[3], []).append((first, tensors.get_slice(match[0])[overlap]))
        in_order = {name: sorted(rows, key=lambda part: part[0]) for name, rows in parts.items()}
        carry = {name: torch.cat([rows for _, rows in found]) for name, found in in_order.items()}
        if not carry or any(len(rows) != slots.stop - slots.start for rows in carry.values()):
            raise _damaged(self.path, f"its files hold not all of slots {slots.start} to {slots.stop - 1}")
        return carry

    @property
    def _shards(self) -> list[str]:
        return sorted(name for name in self.files if name.startswith("state/"))

    def _index(self) -> "dict[str, TensorStorageMetadata]":
        """Return for each tensor in state/ its whole shape, its dtype and the written parts."""
        folder = self.path / "state"
        if not self._shards:
            return {}
        from records.checkpoint.storage import read_index

        with _reading(folder):
            index = read_index(folder)
        for name, of in index.items():
            if sum(chunk.sizes.numel() for chunk in of.chunks) != of.size.numel():
                raise _damaged(self.path, f"its files hold not all of {name}")
        return index


@file_errors()
def find_checkpoint(run: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """Open the checkpoint that `latest` names, or the newest whole one if that is damaged.

    Each damaged one gives a warning. None: the folder holds no steps. If there are steps and none
    is whole, this raises UserError, because a fresh start would hide the loss.
    """
    steps = newest_first(run)
    if not steps:
        return None
    problems = []
    for candidate in steps:
        try:
            checkpoint = Checkpoint.open(candidate)
        except UserError as error:
            problems.append(str(error))
            continue
        for problem in problems:
            warn(f"{problem}; going back to {candidate.name}")
        return checkpoint
    raise UserError(
        f"none of the {len(steps)} checkpoints in {run} is whole ({problems[0]}); restore one or start another run"
    )


@file_errors()
def open_checkpoint(path: Path, warn: Callable[[str], None]) -> Checkpoint:
    """Open the checkpoint that a path names: a step, or of a run as `find_checkpoint`."""
    step = step_named(path)
    checkpoint = find_checkpoint(path, warn) if step is None else Checkpoint.open(step)
    if checkpoint is None:
        raise UserError(no_run(path))
    return checkpoint


def put_back(run: Path) -> None:
    """Undo the first half of replacing a step, if the writer was killed. For the lock's holder."""
    for aside in run.glob(f"{REPLACED}*"):
        if not (folder := run / aside.name.removeprefix(REPLACED)).exists():
            aside.rename(folder)


@contextmanager
def _reading(path: Path) -> Iterator[Path]:
    try:
        yield path
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} can't be read as safetensors: {error}") from error


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"checkpoint {path} is damaged: {what}")
