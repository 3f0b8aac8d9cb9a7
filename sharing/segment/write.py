"""Export the segment of a checkpoint: one file, and config.json beside it."""

from pathlib import Path

import torch

from models import build_arch
from models.base import RecursiveModel
from models.model import Model
from models.text.config import GPTConfig
from models.text.model import TextModel
from sharing.exported import Exported, ExportedPuzzles, ExportedText, Source
from sharing.segment.check import Comparison, compare, compare_texts
from sharing.segment.formats import WRITERS
from sharing.segment.function import Function, SegmentFunction, TextFunction, WeightDtype, store_weights_as
from sharing.segment.host import HostConfig, host_config, write_host_config
from utils.errors import UserError


def data_of(source: Source, typed: str | None) -> str:
    """Return the dataset on whose puzzles a file is compared with PyTorch."""
    if typed is None and not source.data_paths:
        raise UserError("the file is compared with PyTorch on real puzzles; give --data a dataset that the model reads")
    return typed or source.data_paths[0]


def write_segment(
    source: Source, format: str, weights: WeightDtype, data_path: str, folder: Path
) -> tuple[HostConfig, Comparison]:
    """Write the file and config.json into a folder, and compare the file with PyTorch.

    Raises:
        UserError: The format does not have such a model, or the file answers otherwise.
    """
    described = source.model
    assert described is not None
    name, write = WRITERS[format]
    model = _model(source, described, weights)
    function: Function
    if isinstance(model, TextModel):
        if not isinstance(described.arch, GPTConfig):
            raise UserError(f"of models of text only arch=gpt can be written as {format}, not {described.arch.name}")
        function = TextFunction(model)
        inputs: tuple[torch.Tensor, ...] = (torch.zeros(3, 5, dtype=torch.int64),)
    else:
        assert isinstance(model, RecursiveModel)
        function = SegmentFunction(model)
        # Not 0: that is padding. Not one board: exporters take 1 for a constant.
        inputs = function.example(torch.ones(3, model.seq_len, dtype=torch.int32))
    run = write(function, inputs, folder / name)
    host = host_config(function, described, weights, source.weights, folder / name)
    write_host_config(host, folder)
    if isinstance(model, TextModel):
        return host, compare_texts(host, run, model, data_path)

    def of_size(stored_as: WeightDtype, seq_len: int, vocab_size: int) -> RecursiveModel:
        assert isinstance(described, ExportedPuzzles)
        sized = described.model_copy(update={"seq_len": seq_len, "vocab_size": vocab_size})
        resized = _model(source, sized, stored_as)
        assert isinstance(resized, RecursiveModel)
        return resized

    return host, compare(
        host, run, lambda *size: of_size(weights, *size), lambda *size: of_size("float32", *size), data_path
    )


def _model(source: Source, described: Exported, stored_as: WeightDtype) -> Model:
    arch = described.arch.model_copy(update={"forward_dtype": "float32"})
    sizes = described.sizes
    if isinstance(described, ExportedText):
        sizes = {"vocab_size": described.vocab_size}
    model = build_arch(arch, **sizes)
    model.load_state_dict({name: tensor.float() for name, tensor in source.weights.items()})
    store_weights_as(model, stored_as)
    return model.eval().requires_grad_(False)
