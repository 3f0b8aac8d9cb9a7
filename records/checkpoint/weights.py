"""Write the weights of a model into one file or several with the index of Hugging Face.

Rank 0 gathers one tensor at a time and writes it, so that no rank ever holds the whole model.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from records.checkpoint.format import File
from utils.ranks.world import World, is_dtensor, local_part
from utils.safetensors_files import DTYPES, FILE, INDEX


@dataclass(frozen=True)
class Part:
    """A box of a tensor that one rank holds, and writes for all ranks that hold the same."""

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def of(self, whole: Tensor) -> Tensor:
        return whole[tuple(slice(first, first + size) for first, size in zip(self.offsets, self.sizes, strict=True))]


@dataclass(frozen=True)
class Whole:
    """A tensor and the parts that make it up, each on one rank."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


Plan = dict[str, Whole]  # all tensors over all ranks, in the order of the files


def plan_of(weights: Mapping[str, Tensor], world: World) -> Plan:
    """Return who writes which part of the weights, of which each rank gives its own. Every rank."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    parts: dict[str, dict[tuple[int, ...], Part]] = {}
    for own in world.gather_objects({name: _described(tensor, world.rank) for name, tensor in weights.items()}):
        for name, (shape, dtype, part) in own.items():
            shapes[name] = shape, dtype
            if 0 not in part.sizes or 0 in shape:
                parts.setdefault(name, {}).setdefault(part.offsets, part)  # the first rank writes it
    plan = {name: Whole(*shapes[name], tuple(of.values())) for name, of in parts.items()}
    # Wide elements first, so that each tensor begins at a multiple of the size of its elements.
    return {name: plan[name] for name in sorted(plan, key=lambda name: (-plan[name].dtype.itemsize, name))}


def own_parts(plan: Plan, weights: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Return the parts that this rank writes, which share their memory with the weights."""
    own = {name for name, whole in plan.items() if any(part.rank == rank for part in whole.parts)}
    return {name: local_part(tensor) for name, tensor in weights.items() if name in own}


def write_weights(
    plan: Plan, own: Mapping[str, Tensor], folder: Path, most_bytes: float, world: World
) -> dict[str, File]:
    """Write all weights, and return the size and checksum of each file on rank 0. Every rank.

    Args:
        own: what `own_parts` returned, on the host.
        most_bytes: of the tensors of a file, unless a single tensor has more.
    """
    whole_tensors = gathered(plan, own, world)
    try:
        return _write_files(plan, whole_tensors, folder, most_bytes) if world.is_main else {}
    finally:  # if the disk refuses a file, the other ranks send their parts all the same
        for _ in whole_tensors:
            pass


def _described(tensor: Tensor, rank: int) -> tuple[tuple[int, ...], torch.dtype, Part]:
    shape = tuple(tensor.shape)
    if not is_dtensor(tensor):
        return shape, tensor.dtype, Part(rank, (0,) * len(shape), shape)
    (chunk,) = tensor.__create_chunk_list__()
    return shape, tensor.dtype, Part(rank, tuple(chunk.offsets), tuple(chunk.sizes))


def gathered(plan: Plan, own: Mapping[str, Tensor], world: World) -> Iterator[Tensor]:
    """Yield each tensor of the plan, with values on rank 0. Every rank."""
    for name, whole in plan.items():
        if world.is_main and [part.rank for part in whole.parts] == [0]:
            yield own[name]
            continue
        gathered = torch.empty(whole.shape, dtype=whole.dtype, device="cpu" if world.is_main else "meta")
        for part in whole.parts:
            if part.rank == 0 and world.is_main:
                part.of(gathered).copy_(own[name])
            elif world.is_main:
                received = torch.empty(part.sizes, dtype=whole.dtype)
                world.receive(received, part.rank)
                part.of(gathered).copy_(received)
            elif part.rank == world.rank:
                world.send(own[name], 0)
        yield gathered


def _write_files(plan: Plan, tensors: Iterator[Tensor], folder: Path, most_bytes: float) -> dict[str, File]:
    groups: list[list[str]] = []
    room = 0.0
    for name, whole in plan.items():
        if not groups or room < whole.num_bytes:
            groups.append([])
            room = most_bytes
        groups[-1].append(name)
        room -= whole.num_bytes
    written, file_of = dict[str, File](), dict[str, str]()
    for index, names in enumerate(groups or [[]]):
        file = f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors" if len(groups) > 1 else FILE
        written[file] = _write_file(folder / file, {name: plan[name] for name in names}, tensors, {"format": "pt"})
        file_of |= dict.fromkeys(names, file)
    if len(groups) > 1:
        total = sum(whole.num_bytes for whole in plan.values())
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(file_of.items()))}, indent=1)
        written[INDEX] = write_pieces(folder / INDEX, [text.encode()])
    return written


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> File:
    """Write a file of safetensors with tensors of the host."""
    names = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))
    plan = {name: Whole(tuple(tensors[name].shape), tensors[name].dtype, ()) for name in names}
    return _write_file(path, plan, (tensors[name] for name in names), metadata)


def _write_file(path: Path, plan: Plan, tensors: Iterator[Tensor], metadata: dict[str, str]) -> File:
    """Write a file of safetensors. The library's own function needs all tensors at once."""
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for name, whole in plan.items():
        first, end = end, end + whole.num_bytes
        header[name] = {
            "dtype": DTYPES[str(whole.dtype).removeprefix("torch.")],
            "shape": whole.shape,
            "data_offsets": (first, end),
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8

    def pieces() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for _ in plan:
            yield memoryview(next(tensors).contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]

    return write_pieces(path, pieces())


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> File:
    """Write a file, wait until it is on the disk, and return its size and checksum."""
    # Neither writing nor hashing holds Python's global lock, so that training goes on meanwhile.
    checksum, num_bytes = hashlib.sha256(), 0
    with open(path, "wb") as file:
        for piece in pieces:
            file.write(piece)
            checksum.update(piece)
            num_bytes += len(piece)
        file.flush()
        os.fsync(file.fileno())
    return File(bytes=num_bytes, sha256=checksum.hexdigest())
