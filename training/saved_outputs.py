"""Write an evaluation's outputs piece by piece, so that memory does not grow with the dataset."""

import re
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import save
from torch import Tensor

from utils.errors import UserError
from utils.files import file_errors, without_following
from utils.ranks.world import World

SavedOutput = Literal[
    "inputs",
    "labels",
    "puzzle_identifiers",
    "logits",
    "predictions",
    "q_halt",
    "q_continue",
    "steps",
    "predictions_at_step",
    "q_halt_at_step",
]

_BYTES_PER_FILE = 64 << 20


class OutputWriter:
    """Writes this rank's outputs for one set into files <set>_rank<rank>_<number>.safetensors.

    If several ranks have the same examples (tensor parallelism, pipelines), only the first writes.
    """

    def __init__(self, folder: Path, set_name: str, world: World) -> None:
        self._writes = world.is_first_of_share
        self._folder, self._prefix = folder, f"{set_name}_rank{world.rank}"
        self._pending: list[dict[str, Tensor]] = []
        self._num_bytes = 0
        self._num_files = 0
        self._failure: UserError | None = None

    @staticmethod
    def clear(folder: Path, set_names: list[str], world: World) -> None:
        """Remove the outputs of an earlier evaluation of these sets. Every rank.

        Readers would otherwise count their rows twice.
        """
        ours = re.compile(rf"({'|'.join(map(re.escape, set_names))})_rank\d+_\d{{4,}}\.safetensors")
        with world.shared_errors(), file_errors():
            for file in list(folder.iterdir()) if world.is_main and folder.is_dir() else ():
                if ours.fullmatch(file.name):
                    file.unlink()

    def add(self, outputs: dict[str, Tensor]) -> None:
        """Add tensors by name, all of the same examples."""
        if not self._writes:
            return
        self._pending.append({name: tensor.cpu() for name, tensor in outputs.items()})
        self._num_bytes += sum(tensor.nbytes for tensor in self._pending[-1].values())
        if self._num_bytes >= _BYTES_PER_FILE:
            self._write()

    def _write(self) -> None:
        whole = {name: torch.cat([piece[name] for piece in self._pending]) for name in self._pending[0]}
        self._pending, self._num_bytes = [], 0
        if self._failure is None:
            contents = save(whole)
            try:
                with file_errors():
                    self._folder.mkdir(parents=True, exist_ok=True)
                    place = self._folder / f"{self._prefix}_{self._num_files:04d}.safetensors"
                    with open(place, "wb", opener=without_following) as file:
                        file.write(contents)
                self._num_files += 1
            except UserError as error:  # close() raises it on all ranks, which are not together here
                self._failure = error

    def close(self, world: World) -> None:
        """Write the rest of the outputs, or raise UserError for a file that failed. Every rank."""
        with world.shared_errors():
            if self._pending:
                self._write()
            if self._failure is not None:
                raise self._failure
