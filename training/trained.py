"""Open a trained model, for every command that needs one."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import model_validator
from torch import Tensor

from dataset.text.schema import UNKNOWN
from models import ArchConfig, build_arch, build_on_meta
from models.base import CommonConfig, RecursiveModel
from models.model import Model
from models.parallel.layout import Layout
from records.checkpoint.format import read_state, step_folders, step_named
from records.checkpoint.reader import Checkpoint, open_checkpoint
from sharing.exported import ExportedText, ModelFile, open_model
from sharing.published import PuzzleTable, fit_one_by_one
from sharing.sources import Kind, kind_of, require_known
from sharing.stored_config import completed, how_arch_differs
from training.config import PretrainConfig
from training.data import AnySizes, AnySplit, Sizes
from training.kinds import kind_of_arch, require_keys_of_arch
from training.precision import with_forward_dtype
from training.run_config import read_beside_groups, without_options
from training.splits import open_own, sizes_from, sizes_of_data
from utils.command_line import differences, read_config, typed_changes, typed_keys_and_groups, validate, with_changes
from utils.composing import compose
from utils.config import Container, StrictModel
from utils.errors import UserError
from utils.files import file_errors
from utils.ranks.world import World
from utils.shapes import compare_shapes, shapes_of
from utils.terminal import tell


class TrainedConfig(StrictModel):
    """The keys that name a trained model: a run, or a file of weights."""

    checkpoint: str
    arch: ArchConfig | None
    puzzle_table: PuzzleTable | None
    data_path: str | None

    @property
    def source(self) -> Kind:
        return kind_of(self.checkpoint)

    @model_validator(mode="after")
    def _a_run_knows_its_own(self) -> "TrainedConfig":
        given = "arch" if self.arch else "puzzle_table" if self.puzzle_table else None
        if given and self.source == "run":
            raise ValueError(f"{given} is given, but {self.checkpoint} is a run, which knows its own; leave it out")
        return self

    def open_trained(self, world: World, checkpoint: str | None = None) -> "Trained":
        """Look at `checkpoint`, or at another one with the same options. Every rank."""
        return open_trained(checkpoint or self.checkpoint, world, self)


@dataclass(frozen=True)
class Trained:
    """The description of a trained model. `load_model` reads its weights."""

    name: str  # the step folder, or the file of weights
    arch: ArchConfig
    sizes: AnySizes
    config: PretrainConfig | None  # of the run; None for a file of weights
    checkpoint: Checkpoint | None  # of the run; None for a file of weights
    file: ModelFile | None = None  # None for a run
    puzzle_table: PuzzleTable | None = None
    data: str = "other data"  # its training data, as far as the run or the file names them
    target_only: bool = True  # of text: whether the loss of its training was that of responses alone

    def of_puzzles(self) -> tuple[CommonConfig, Sizes]:
        """Return the architecture and the sizes, or raise UserError for a model of text."""
        if not isinstance(self.arch, CommonConfig) or not isinstance(self.sizes, Sizes):
            raise UserError(
                f"{self.name} is a model of text (arch={self.arch.name}), but a model of puzzles is needed here; give "
                "another checkpoint"
            )
        return self.arch, self.sizes

    def on(self, split: AnySplit) -> "Trained":
        """Return the model for the data of a split, or raise UserError if it can't read them."""
        return replace(self, sizes=kind_of_arch(self.arch).sizes_on(self.arch, self.sizes, split, self.data))

    def with_test_split(self, data_path: str | None, world: World) -> "tuple[Trained, AnySplit]":
        """Open data, or the run's own test split, and return the model for them. Every rank."""
        of_run, kind = self.config, kind_of_arch(self.arch)
        own = of_run.train_paths if of_run is not None else []
        with world.shared_errors():
            if data_path is None:
                if of_run is None:
                    raise UserError(f"{self.name} was trained on {self.data} and holds no data; give data_path=...")
                split = open_own(of_run, "test")
            elif Path(data_path).resolve() in {Path(path).resolve() for path in own}:
                split = kind.open_all(self.arch, [data_path], "test", own)
            else:  # the user promises that other data have the same numbers of puzzles
                split = kind.open(data_path, "test")
            return self.on(split), split

    def load_puzzle_model(self, world: World) -> RecursiveModel:
        """As `load_model`, for a model of puzzles. Every rank."""
        model = self.load_model(world)
        assert isinstance(model, RecursiveModel)
        return model

    def load_model(self, world: World) -> Model:
        """Return the model with its trained weights on the world's device. Every rank."""
        if self.file is not None and self.file.is_program:
            return self._program(world)
        arch = with_forward_dtype(self.arch, world)
        with world.shared_errors():
            model = build_arch(arch, **self.sizes.of_model())
            own = model.state_dict()
            if self.checkpoint is not None:
                values = weights_of(self.checkpoint, self.checkpoint.trained_weights(), own, self.arch)
        if self.file is not None:
            values = weights_from(self.file, own, self.puzzle_table, world)
        Layout(model, world).load(values)
        return model.to(world.device)

    def _program(self, world: World) -> Model:
        from sharing.segment.model import load_onnx

        assert self.file is not None
        if world.device.type != "cpu":
            raise UserError(f"{self.name} runs on the CPU only; set device=cpu")
        _, sizes = self.of_puzzles()
        where = self.file.where
        return load_onnx(Path(where), where, seq_len=sizes.seq_len, vocab_size=sizes.vocab_size)


def open_trained(source: str | Path, world: World, typed: TrainedConfig | None = None) -> Trained:
    """Look at a trained model without reading its weights. Every rank.

    Args:
        source: the folder of a run or of one of its steps, <run>/best or <run>/latest; or a file of
            weights, also hf://owner/repo/path/in/repo.
        typed: has `arch` and `data_path` of a file that does not describe its model.
    """

    def look() -> Trained:
        opened = _opened(source)
        if not isinstance(opened, Checkpoint):
            return _of_file(opened, typed)
        config = validate(PretrainConfig, completed(opened.state.config))
        sizes = sizes_from(opened.state.task, config.arch, f"checkpoint {opened.path}")
        of_run: dict[str, Any] = {"data": " + ".join(config.train_paths), "target_only": config.target_only}
        return Trained(str(opened.path), config.arch, sizes, config, opened, **of_run)

    return world.from_main(look)  # a run that still trains may remove a step before other ranks look


def _opened(source: str | Path) -> Checkpoint | ModelFile:
    if require_known(source) == "weights":
        return open_model(str(source))
    return open_checkpoint(Path(source), tell)


def _of_file(file: ModelFile, typed: TrainedConfig | None) -> Trained:
    arch, data_path, puzzle_table = (typed.arch, typed.data_path, typed.puzzle_table) if typed else (None, None, None)
    described = file.described if arch and data_path else file.require_description()
    if described is not None and arch is not None and arch != described.arch:
        changed = differences(described.arch.model_dump(), arch.model_dump())
        raise UserError(
            f"{file.where} knows its architecture, and arch differs in {', '.join(changed)}; leave arch out"
        )
    if puzzle_table is not None and data_path is None:
        raise UserError(f"puzzle_table={puzzle_table} fits the puzzle rows to other data; give data_path=...")
    if described is None:
        assert arch is not None and data_path is not None
        return Trained(file.where, arch, sizes_of_data(data_path, arch), None, None, file, puzzle_table)
    if puzzle_table is not None and data_path is not None:
        sizes = sizes_of_data(data_path, described.arch)
    else:
        sizes = sizes_from(described.sizes, described.arch)
    data = " + ".join(described.data) or "other data"
    target_only = not isinstance(described, ExportedText) or described.target_only
    return Trained(file.where, described.arch, sizes, None, None, file, puzzle_table, data, target_only)


Values = Iterable[tuple[str, Tensor]]
"""The whole weights of a model by name, one after another, as `Layout.load` takes them."""


def initial_weights(arch: ArchConfig, sizes: AnySizes, seed: int, world: World) -> Values:
    """Return the initial weights, which rank 0 draws. Every rank must take all values."""
    whole = build_on_meta(arch, **sizes.of_model(), num_parts=world.size)
    names = {tensor: name for name, tensor in whole.state_dict(keep_vars=True).items()}
    values = whole.initial_values(torch.Generator().manual_seed(seed))
    return world.one_by_one((names[tensor], value.to(tensor.dtype)) for tensor, value in values)


def weights_of(
    checkpoint: Checkpoint, weights: Mapping[str, Tensor], own: Mapping[str, Tensor], arch: ArchConfig
) -> Values:
    """Return the weights of a checkpoint, or its averages, if they have the shapes of `own`."""
    there, here = shapes_of(weights), shapes_of(own)
    if (name := compare_shapes(there, here).first) is not None:
        hint = how_arch_differs(checkpoint.state.config, arch.model_dump()) or "its dataset has other sizes"
        raise UserError(
            f"{checkpoint.path} doesn't fit this model: {name} is {there.get(name, 'absent')} there and "
            f"{here.get(name, 'absent')} here; {hint}"
        )
    return weights.items()


def weights_from(
    source: str | ModelFile,
    own: Mapping[str, Tensor],
    puzzle_table: PuzzleTable | None,
    world: World,
    tokenizer: str | None = None,
) -> Values:
    """Return weights from elsewhere that fit a model. Every rank, which must take all values.

    Args:
        own: the state dict of the whole model, of which only shapes and dtypes are read.
        tokenizer: that of the data. Weights that don't say which made their tokens pass.
    """
    fitting: Values = ()
    with world.shared_errors():
        if world.is_main:  # one download, one reading
            opened = source if isinstance(source, ModelFile) else _opened(source)
            if isinstance(opened, Checkpoint):
                where, sizes, read = source, opened.state.task, opened.trained_weights
            else:
                where, read = opened.where, opened.read_weights
                sizes = opened.described.sizes if opened.described is not None else {}
            theirs = sizes.get("tokenizer")
            if tokenizer is not None and theirs not in (None, UNKNOWN, tokenizer):
                raise UserError(
                    f"{where} reads tokens of {str(theirs)[:12]}, but those of the data are of {tokenizer[:12]}; "
                    "build the dataset with the tokenizer of the weights"
                )
            fitting = fit_one_by_one(read(), own, puzzle_table, str(where))
    return world.one_by_one(fitting)


def read_config_of_new_run(overrides: list[str]) -> Container:
    """Compose the config of a new run. For rank 0.

    A run that starts from trained weights has their architecture, if they describe it. Typed
    options change it. A typed architecture, or that of a typed experiment, replaces it.
    """
    values = read_beside_groups(overrides)
    source = values["init_from"] or values["load_checkpoint"]
    if source:
        require_known(source)
    chosen = compose("pretrain", without_options(overrides)).chosen | typed_keys_and_groups("pretrain", overrides)
    arch = _arch_of(source) if source and "arch" not in chosen else None
    if arch is None:
        config = read_config("pretrain", overrides)
    else:
        name = [f"arch={arch['name']}"]
        changes = typed_changes("pretrain", overrides, name)
        of_arch = {key: value for key, value in changes.items() if key.startswith("arch.")}
        config = with_changes(read_config("pretrain", [*name, *overrides]) | {"arch": arch}, of_arch)
    require_keys_of_arch(config)
    return config


@file_errors()
def _arch_of(source: str) -> Container | None:
    """Return the architecture of weights; None if they don't say it."""
    if kind_of(source) == "weights":
        described = open_model(source).described
        return None if described is None else described.arch.model_dump()
    step = step_named(Path(source))
    for folder in [step] if step is not None else reversed(step_folders(Path(source))):
        with suppress(UserError):  # the weights are read later: then a damaged step is refused, or an older one taken
            state = read_state(folder)
            break
    else:
        return None
    return validate(PretrainConfig, completed(state.config)).arch.model_dump()
