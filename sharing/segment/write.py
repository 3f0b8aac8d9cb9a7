"""Export the segment of a checkpoint: one file, and config.json beside it."""

from pathlib import Path

from models import build_arch
from models.base import RecursiveModel
from models.model import Model
from models.text.config import GPTConfig
from models.text.model import TextModel
from sharing.exported import Exported, ExportedPuzzles, ExportedText, Source
from sharing.segment.check import Comparison, compare, compare_texts, real_puzzles, real_texts
from sharing.segment.formats import FILES, WRITERS
from sharing.segment.function import Function, SegmentFunction, TextFunction, WeightDtype, store_weights_as
from sharing.segment.host import HostConfig, host_config, write_host_config
from sharing.segment.web import write_web
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
    model = _model(source, described, weights)
    function = _function(model, format)
    try:  # before the work
        if isinstance(described, ExportedText):
            texts_NT = real_texts(data_path, described)
        else:
            assert isinstance(described, ExportedPuzzles)
            puzzles = real_puzzles(data_path, described, any_size=function.has_any_size)
    except UserError as error:
        raise UserError(
            f"the file is compared with PyTorch on real puzzles: {error}; --data names another dataset"
        ) from error
    host = host_config(function, described, weights, source.weights, FILES[format])
    file = folder / host.file
    if format == "web":
        run = write_web(host, function, puzzles[0], file)
    elif format == "mlx":
        from sharing.apple.model import run_of, write_mlx

        run = run_of(write_mlx(source, file))
        write_host_config(host, folder)
    else:
        # Not token 0: that is padding. Not one board: exporters take 1 for a constant.
        run = WRITERS[format](function, function.example(3), file)
        write_host_config(host, folder)
    if isinstance(function, TextFunction):
        return host, compare_texts(host, run, function, texts_NT)

    def of_size(stored_as: WeightDtype, seq_len: int, vocab_size: int) -> RecursiveModel:
        assert isinstance(described, ExportedPuzzles)
        sized = described.model_copy(update={"seq_len": seq_len, "vocab_size": vocab_size})
        resized = _model(source, sized, stored_as)
        assert isinstance(resized, RecursiveModel)
        return resized

    return host, compare(
        host, run, lambda *size: of_size(weights, *size), lambda *size: of_size("float32", *size), puzzles
    )


def _function(model: Model, format: str) -> Function:
    """Return the function of a model, or raise UserError if the format can't have it."""
    if isinstance(model, TextModel):
        if not isinstance(model.config, GPTConfig) or format == "web":
            raise UserError(f"--format {format} has no models of text like arch={model.config.name}; leave it out")
        return TextFunction(model)
    assert isinstance(model, RecursiveModel)
    return SegmentFunction(model)


def _model(source: Source, described: Exported, stored_as: WeightDtype) -> Model:
    arch = described.arch.model_copy(update={"forward_dtype": "float32"})
    sizes = described.sizes
    if isinstance(described, ExportedText):
        sizes = {"vocab_size": described.vocab_size}
    model = build_arch(arch, **sizes)
    model.load_state_dict({name: tensor.float() for name, tensor in source.weights.items()})
    store_weights_as(model, stored_as)
    return model.eval().requires_grad_(False)
