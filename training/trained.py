"""Open a trained model, for every command that needs one."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import model_validator
from torch import Tensor

from dataset.schema import Split
from dataset.text.schema import UNKNOWN, TextSplit
from models import ArchConfig, build_arch, build_on_meta
from models.base import CommonConfig, RecursiveModel
from models.model import Model
from models.parallel.layout import Layout
from models.text.model import TextModel
from sharing.exported import ExportedText, read_exported, read_foreign, why_not_described
from sharing.published import PuzzleTable, fit_one_by_one
from sharing.weights_file import holds_characters
from training.config import PretrainConfig
from training.data import AnySizes, Sizes
from training.kinds import kind_of_arch, require_keys_of_arch
from training.precision import with_forward_dtype
from training.splits import sizes_from, sizes_of_checkpoint, sizes_of_data
from utils.checkpoint.format import RunState, read_state, step_folders
from utils.checkpoint.names import Kind, kind_of, no_checkpoint, step_named
from utils.checkpoint.reader import Checkpoint, InParts, open_checkpoint
from utils.command_line import differences, read_config, typed_changes, typed_keys_and_groups, validate, with_changes
from utils.composing import compose
from utils.config import StrictModel
from utils.config_files import Container
from utils.errors import UserError
from utils.files import file_errors
from utils.ranks.world import World
from utils.run.resume import completed, read_beside_groups, without_options
from utils.shapes import compare_shapes, shapes_of
from utils.terminal import tell


class TrainedConfig(StrictModel):
    """The keys that name a trained model: a run, or a file of weights.

    A file that does not describe its model needs the architecture and the data.
    """

    checkpoint: str
    arch: ArchConfig | None
    puzzle_table: PuzzleTable | None
    data_path: str | None

    @property
    def kind(self) -> Kind:
        return kind_of(self.checkpoint)

    @model_validator(mode="after")
    def _a_run_knows_its_own(self) -> "TrainedConfig":
        given = "arch" if self.arch else "puzzle_table" if self.puzzle_table else None
        if given and self.kind in ("run", "step"):
            raise ValueError(f"{given} is given, but {self.checkpoint} is a run, which knows its own; leave it out")
        return self


@dataclass(frozen=True)
class Trained:
    """The description of a trained model. `load_model` reads its weights."""

    name: str  # the step folder, or the file of weights
    arch: ArchConfig
    sizes: AnySizes
    config: PretrainConfig | None  # of the run; None for a file of weights
    checkpoint: Checkpoint | None  # of the run; None for a file of weights
    puzzle_table: PuzzleTable | None = None
    data: str = "other data"  # its training data, as far as the run or the file names them
    target_only: bool = True  # of text: whether the loss of its training was that of responses alone

    def of_puzzles(self) -> tuple[CommonConfig, Sizes]:
        """Return the architecture and the sizes of a model of puzzles.

        Raises:
            UserError: It is a model of text.
        """
        if not isinstance(self.arch, CommonConfig) or not isinstance(self.sizes, Sizes):
            raise UserError(
                f"{self.name} is a model of text (arch={self.arch.name}), but a model of puzzles is needed here; give "
                "another checkpoint"
            )
        return self.arch, self.sizes

    def on(self, split: Split | TextSplit) -> "Trained":
        """Return the model for the data of a split, which may differ from those of its training.

        Raises:
            UserError: The model can't read the split.
        """
        return replace(self, sizes=kind_of_arch(self.arch).sizes_on(self.arch, self.sizes, split, self.data))

    def load_puzzle_model(self, world: World) -> RecursiveModel:
        """As `load_model`, for a model of puzzles. Every rank."""
        model = self.load_model(world)
        assert isinstance(model, RecursiveModel)
        return model

    def load_text_model(self, world: World) -> TextModel:
        """As `load_model`, for a model of text. Every rank."""
        model = self.load_model(world)
        assert isinstance(model, TextModel)
        return model

    def load_model(self, world: World) -> Model:
        """Return the model with its trained weights on the world's device. Every rank.

        Raises:
            UserError: The weights are missing, damaged or of another architecture.
        """
        arch = with_forward_dtype(self.arch, world)
        with world.shared_errors():
            model = build_arch(arch, **self.sizes.of_model())
            own = model.state_dict()
            if self.checkpoint is not None:
                values = weights_of(self.checkpoint, self.checkpoint.trained_weights(), own, self.arch)
        if self.checkpoint is None:
            values = weights_from(self.name, own, self.puzzle_table, world)
        Layout(model, world).load(values)
        return model.to(world.device)


def open_trained(
    source: str | Path,
    world: World,
    *,
    arch: ArchConfig | None = None,
    data_path: str | None = None,
    puzzle_table: PuzzleTable | None = None,
) -> Trained:
    """Look at a trained model without reading its weights. Every rank.

    Args:
        source: the folder of a run, which means its newest checkpoint, or of one of its steps,
            <run>/best or <run>/latest; or a file of weights, also hf://owner/repo/path/in/repo.
        arch: of a file that does not describe its model, which needs `data_path` as well.
        puzzle_table: what becomes of the puzzle rows of a file (sharing.published.fit_weights).

    Raises:
        UserError: There is no whole checkpoint, or no dataset at `data_path`, or a file needs
            `arch`.
    """
    trained: Trained | None = None
    with world.shared_errors():
        # Only rank 0 looks at files: a run that still trains may remove a step meanwhile.
        if world.is_main:
            if kind_of(source) == "weights":
                trained = _of_file(str(source), arch, data_path, puzzle_table)
            else:
                trained = _of_run(Path(source))
    trained = world.broadcast_object(trained)
    assert trained is not None
    return trained


def _of_run(source: Path) -> Trained:
    checkpoint = open_checkpoint(source, tell)
    config = validate(PretrainConfig, completed(checkpoint.state.config, "pretrain"))
    data = " + ".join(config.train_paths)
    sizes = sizes_of_checkpoint(checkpoint, config.arch)
    return Trained(
        str(checkpoint.path), config.arch, sizes, config, checkpoint, data=data, target_only=config.target_only
    )


def _of_file(source: str, arch: ArchConfig | None, data_path: str | None, puzzle_table: PuzzleTable | None) -> Trained:
    described = read_exported(source)
    if described is not None and arch is not None and arch != described.arch:
        changed = differences(described.arch.model_dump(), arch.model_dump())
        raise UserError(f"{source} knows its architecture, and arch differs in {', '.join(changed)}; leave arch out")
    if described is None and not (arch and data_path):
        raise UserError(why_not_described(source))
    if puzzle_table is not None and data_path is None:
        raise UserError(f"puzzle_table={puzzle_table} fits the puzzle rows to other data; give data_path=...")
    if described is not None and puzzle_table is None:
        sizes = sizes_from(described.sizes, described.arch)
    else:
        known = arch if described is None else described.arch
        assert data_path is not None and known is not None
        sizes = sizes_of_data(data_path, known)
    if described is None:
        assert arch is not None
        return Trained(source, arch, sizes, None, None, puzzle_table)
    data = " + ".join(described.data) or "other data"
    target_only = not isinstance(described, ExportedText) or described.target_only
    return Trained(source, described.arch, sizes, None, None, puzzle_table, data, target_only)


Values = Iterable[tuple[str, Tensor]]
"""The whole weights of a model by name, one after another, as `Layout.load` takes them."""


def initial_weights(arch: ArchConfig, sizes: AnySizes, seed: int, world: World) -> Values:
    """Return the initial weights of rank 0, which draws one tensor after another.

    Every rank must take all values.
    """

    def drawn() -> Values:
        whole = build_on_meta(arch, **sizes.of_model(), num_parts=world.size)
        names = {tensor: name for name, tensor in whole.state_dict(keep_vars=True).items()}
        for tensor, value in whole.initial_values(torch.Generator().manual_seed(seed)):
            yield names[tensor], value.to(tensor.dtype)

    return world.one_by_one(drawn())


def weights_of(
    checkpoint: Checkpoint, weights: Mapping[str, Tensor], own: Mapping[str, Tensor], arch: ArchConfig
) -> Values:
    """Return the weights of a checkpoint, which lie in its files.

    Args:
        weights: those of the checkpoint, or their averages.
        own: the state dict of the whole model, of which only shapes are read.

    Raises:
        UserError: The architecture is another; the message names the tensor and the option.
    """
    there, here = shapes_of(weights), shapes_of(own)
    if (name := compare_shapes(there, here).first) is not None:
        changed = differences(checkpoint.state.config["arch"], arch.model_dump())
        hint = f"arch differs in {', '.join(changed)}" if changed else "its dataset has other sizes"
        raise UserError(
            f"{checkpoint.path} doesn't fit this model: {name} is {there.get(name, 'absent')} there and "
            f"{here.get(name, 'absent')} here; {hint}"
        )
    return weights.items()


def weights_from(source: str, own: Mapping[str, Tensor], puzzle_table: PuzzleTable | None, world: World) -> Values:
    """Return weights that were trained elsewhere: published, of another run, or on other puzzles.
    Every rank.

    Every rank must take all values, because rank 0 alone reads them, one after another.

    Args:
        own: the state dict of the whole model, of which only shapes and dtypes are read.

    Raises:
        UserError: The weights do not fit the model; the message names what does not.
    """
    fitting: Values = ()
    averages: dict[str, InParts] = {}
    with world.shared_errors():
        if world.is_main:  # one download, one reading
            if kind_of(source) != "weights":
                checkpoint = open_checkpoint(Path(source), tell)
                weights, averages = checkpoint.weights(), checkpoint.averages()
                weights |= {name: average.outline for name, average in averages.items()}
            elif holds_characters(source):
                raise UserError(why_not_described(source))
            else:
                weights = read_foreign(source)
            fitting = fit_one_by_one(weights, own, puzzle_table, source, lambda name: averages[name].whole())
    return world.one_by_one(fitting)


def require_tokens_of(source: str, sizes: AnySizes, world: World) -> None:
    """Raise UserError if a token of the data means something else to weights. Every rank.

    Weights that don't say which tokenizer made their tokens pass.

    Args:
        source: as for `weights_from`.
        sizes: of the data on which the weights are trained further.
    """
    with world.shared_errors():
        own = sizes.as_dict().get("tokenizer")  # puzzles have none
        if not world.is_main or own is None:
            return
        theirs: Any = None
        if kind_of(source) != "weights":
            state = _newest_state(Path(source))
            theirs = None if state is None else state.task.get("tokenizer")
        elif (described := read_exported(source)) is not None:
            theirs = described.sizes.get("tokenizer")
        if theirs not in (None, UNKNOWN, own):
            raise UserError(
                f"{source} reads tokens of {str(theirs)[:12]}, but those of the data are of {own[:12]}; "
                "build the dataset with the tokenizer of the weights"
            )


def read_config_of_new_run(config_name: str, overrides: list[str]) -> Container:
    """Compose the config of a new run. For rank 0.

    A run that starts from trained weights has the architecture of their run, or of their file if
    that describes its model. Typed options change it. A typed architecture, or that of a typed
    experiment, replaces it.

    Raises:
        UserError: The config is wrong, or the weights or their description can't be read.
    """
    values = read_beside_groups(config_name, overrides)
    source = values["init_from"] or values["load_checkpoint"]
    if source and kind_of(source) == "other":
        raise UserError(no_checkpoint(Path(source)))
    chosen = compose(config_name, without_options(config_name, overrides)).chosen
    chosen = chosen | typed_keys_and_groups(overrides)
    arch = None if not source or "arch" in chosen else _arch_of_weights(str(source))
    if arch is None:
        return _of_one_kind(read_config(config_name, overrides))
    name = [f"arch={arch['name']}"]
    changes = typed_changes(config_name, overrides, name)
    of_arch = {key: value for key, value in changes.items() if key.startswith("arch.")}
    return _of_one_kind(with_changes(read_config(config_name, [*name, *overrides]) | {"arch": arch}, of_arch))


def _of_one_kind(values: Container) -> Container:
    require_keys_of_arch(values)
    return values


@file_errors()
def _arch_of_weights(source: str) -> Container | None:
    """Return the architecture of a run, or of a file that describes its model; None if unknown."""
    if kind_of(source) == "weights":
        described = read_exported(source)
        return None if described is None else described.arch.model_dump()
    state = _newest_state(Path(source))
    return None if state is None else validate(PretrainConfig, completed(state.config, "pretrain")).arch.model_dump()


def _newest_state(run: Path) -> RunState | None:
    """Return the state of a step, or of the newest step of a run whose state can be read.

    The weights are read later. Then a damaged step is refused, or an older one is taken.
    """
    step = step_named(run)
    for folder in [step] if step is not None else reversed(step_folders(run)):
        with suppress(UserError):
            return read_state(folder)
    return None
