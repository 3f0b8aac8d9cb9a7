"""Translate names of weights to and from published checkpoints; fit weights to a model.

The programs of HRM, TRM, URM and SE-RRM save the model inside its loss, so that their names are
`model.inner.` and a path. torch.compile adds `_orig_mod.`, DDP `module.` and Lightning `model.`.
Only names differ. published.yaml has them.
"""

# K = puzzle identifiers, E = puzzle embedding size, W = width of an MLP

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal, TypeVar

import torch
import yaml
from torch import Tensor

from dataset.tasks.base import some
from utils.errors import UserError
from utils.shapes import compare_shapes, shapes_of

Weights = dict[str, Tensor]
PuzzleTable = Literal["keep", "mean", "zero"]
Kind = Literal["puzzles", "training", "transformers"]
_T = TypeVar("_T")

PUZZLE_TABLE = "puzzle_embedding.weight"
# What torch.compile and DDP add to a name, wherever the wrapped part stands in the model.
_WRAPPERS = ("_orig_mod", "module")
# The beginning of a name that programs add which train a model as a part of another.
_AROUND = r"^((_orig_mod|module|model|inner)\.)*"
_CONV_WEIGHT, _CONV_BIAS = "mlp.conv_weight_W12", "mlp.conv_bias_W"
_NUMBER_OF_LAYER = r"(?<=layers\.)\d+"

FORMATS: dict[Kind, dict[str, dict[str, str]]] = yaml.safe_load(
    Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
)


def _translated(name: str, names: Mapping[str, str]) -> str | None:
    number = re.search(_NUMBER_OF_LAYER, name)
    found = names.get(re.sub(_NUMBER_OF_LAYER, "*", name))
    return found.replace("*", number[0]) if found is not None and number is not None else found


def unusual_beginnings(names: Iterable[str]) -> list[str]:
    """Return what `to_ours` drops from names of puzzles that the published programs don't write."""
    dropped = {name.removesuffix(re.sub(_AROUND, "", name)) for name in names}
    return sorted(dropped - {"", "model.inner.", "_orig_mod.model.inner."})


def to_ours(weights: Mapping[str, _T], arch_of_text: str | None = None) -> dict[str, _T]:
    """Return the weights of a published checkpoint, or what is known of each, under our names.

    Args:
        arch_of_text: such as hrm_text, whose names have to be known; None: a model of puzzles,
            whose unknown names, such as ours, stay as they are.

    Raises:
        UserError: A name of text is unknown, or two names mean the same weight.
    """
    kinds: tuple[Kind, ...] = ("puzzles",) if arch_of_text is None else ("training", "transformers")
    formats = [names for kind in kinds for arch, names in FORMATS[kind].items() if arch_of_text in (None, arch)]
    ours_of = {theirs: ours for names in formats for ours, theirs in names.items()}
    found: dict[str, str] = {}
    for name in weights:
        inner = name if arch_of_text is not None else re.sub(_AROUND, "", name)
        path = ".".join(part for part in inner.split(".") if part not in _WRAPPERS)
        if path == "model.zH_init":  # a state that earlier versions of HRM-Text's program never read
            continue
        ours = _translated(path, ours_of) or (path if arch_of_text is None else None)
        if ours is None:
            raise UserError(
                f"{name} is no weight of a published {arch_of_text}; take the architecture of the checkpoint"
            )
        if ours in found:
            raise UserError(f"{found[ours]} and {name} are both {ours}; remove one of them from the file")
        found[ours] = name
    return {ours: weights[name] for ours, name in found.items()}


def to_published(weights: Weights, kind: Kind, arch: str, *, compiled: bool = False) -> Weights:
    """Return the weights of our model under the names of a published checkpoint.

    URM's code needs its convolution in the dtype of the activations, that of `init_hidden`, and
    with a bias.

    Raises:
        UserError: The architecture or some weight has no published name.
    """
    if arch not in FORMATS[kind]:
        raise UserError(f"there are no published names ({kind}) of {arch}; take {' or '.join(FORMATS[kind])}")
    if arch == "urm":
        dtype = weights["z_init"].dtype if "z_init" in weights else torch.float32
        whole = weights | _missing_biases(weights)
        weights = {
            name: tensor.to(dtype) if name.endswith((_CONV_WEIGHT, _CONV_BIAS)) else tensor
            for name, tensor in whole.items()
        }
    names = {name: _translated(name, FORMATS[kind][arch]) for name in weights}
    if unknown := [name for name, published in names.items() if published is None]:
        raise UserError(
            f"the published {arch.upper().replace('_', '-')} has no {some(unknown)}; only a model without additions "
            "of this project's own can be exported"
        )
    start = ("_orig_mod." if compiled else "") + ("model.inner." if kind == "puzzles" else "")
    return {f"{start}{published}": weights[name] for name, published in names.items()}


def _missing_biases(weights: Weights) -> Weights:
    """Return zeros for the convolutions of URM that have no bias: these compute the same."""
    shapes = {
        name.replace(_CONV_WEIGHT, _CONV_BIAS): tensor.shape[:1]
        for name, tensor in weights.items()
        if _CONV_WEIGHT in name
    }
    return {name: torch.zeros(shape) for name, shape in shapes.items() if name not in weights}


def arch_of(weights: Weights) -> str:
    """Return the published architecture of puzzles whose networks have these names."""
    if "Z_init" in weights:
        return "se_rrm"
    if any(name.startswith("level.") and name.endswith(_CONV_WEIGHT) for name in weights):
        return "urm"
    return "hrm" if any(name.startswith("H_level.") for name in weights) else "trm"


def fit_one_by_one(
    weights: Weights,
    own: Mapping[str, Tensor],
    puzzle_table: PuzzleTable | None,
    source: str,
) -> Iterator[tuple[str, Tensor]]:
    """Return the weights in the dtypes of the model and with its puzzle table's size.

    All are checked at once. Each is cast when its turn comes.

    Args:
        weights: weights by our names (see `to_ours`).
        own: the model's state dict, for its names, shapes and dtypes.
        puzzle_table: how the table's rows are filled. keep: by number, with zeros for new rows.
            mean: each with the mean of the loaded rows, as in TRM. zero: with zeros, and the
            checkpoint needs no table. None: as loaded, which needs a table of the model's size.
        source: where the weights come from, for messages.

    Raises:
        UserError: Weights are missing, unexpected or of another shape, or puzzle_table is None and
            the tables' sizes differ.
    """
    # Files that this project wrote before the convolution had a bias lack it.
    weights = weights | {name: zeros for name, zeros in _missing_biases(weights).items() if name in own}

    table_KE, own_KE = weights.get(PUZZLE_TABLE), own.get(PUZZLE_TABLE)
    if own_KE is not None and puzzle_table == "zero":
        weights[PUZZLE_TABLE] = torch.zeros(own_KE.shape)
    elif own_KE is not None and table_KE is not None and table_KE.numel() and table_KE.shape[1:] == own_KE.shape[1:]:
        if puzzle_table == "mean":
            mean_1E = table_KE.float().mean(dim=0, keepdim=True)
            weights[PUZZLE_TABLE] = mean_1E.repeat(len(own_KE), 1)
        elif len(table_KE) != len(own_KE):
            resized_KE = torch.zeros(own_KE.shape, dtype=table_KE.dtype)
            num_shared = min(len(own_KE), len(table_KE))
            resized_KE[:num_shared] = table_KE[:num_shared]
            weights[PUZZLE_TABLE] = resized_KE

    if problems := _mismatches(weights, own):
        raise UserError(
            f"{source} doesn't fit the model: {'; '.join(problems)}; arch and data must be the checkpoint's"
        )
    # This check comes last, because a checkpoint that does not fit leaves no choice of rows.
    if puzzle_table is None and table_KE is not None and own_KE is not None and len(table_KE) != len(own_KE):
        raise UserError(
            f"{source} has puzzle rows for {len(table_KE)} identifiers, the model for {len(own_KE)}; choose what "
            "becomes of them: puzzle_table=keep (by number, zeros for new rows), mean (each row becomes the mean of "
            "all rows) or zero (all rows start anew)"
        )
    return ((name, weights[name].to(own[name].dtype)) for name in weights)


def _mismatches(weights: Weights, own: Mapping[str, Tensor]) -> list[str]:
    def shape(tensor: Tensor) -> str:
        return str(tuple(tensor.shape))

    found = compare_shapes(shapes_of(weights), shapes_of(own))
    # Without the last check, integers would be cast silently, and quantized weights be noise.
    kinds = [
        [f"missing {name} {shape(own[name])}" for name in found.missing],
        [f"unexpected {name} {shape(weights[name])}" for name in found.unexpected],
        [f"{name} is {shape(weights[name])} there and {shape(own[name])} in the model" for name in found.reshaped],
        [
            f"{name} is {theirs.dtype} there and {own[name].dtype} in the model"
            for name, theirs in weights.items()
            if name in own and theirs.is_floating_point() != own[name].is_floating_point()
        ],
    ]
    return [some(names) for names in kinds if names]
