"""Translate names of weights to and from published checkpoints; fit weights to a model.

The published programs of HRM, TRM, URM and SE-RRM save the model inside its loss. So their names
are `model.inner.` and a path, with `_orig_mod.` in front or in between if the model was compiled.
DDP adds `module.`, and Lightning the name of its attribute, `model.`. All of these are dropped.
The only network of TRM and SE-RRM is `L_level`, and URM's layers stand in the model itself. Fused
projections have the same layout here, so that only names differ.
"""

# K = puzzle identifiers, E = puzzle embedding size, W = width of an MLP

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from utils.checkpoint.names import folder_around
from utils.errors import UserError
from utils.shapes import compare_shapes, shapes_of

Weights = dict[str, Tensor]
PuzzleTable = Literal["keep", "mean", "zero"]
PublishedArch = Literal["hrm", "trm", "urm", "se_rrm"]

PREFIX = "model.inner."
COMPILED = "_orig_mod."
_WRAPPERS = ("_orig_mod", "module")
"""What torch.compile and DDP add to a name, wherever the wrapped part stands in the model."""
PUZZLE_TABLE = "puzzle_embedding.weight"
_OUR_NAMES = {
    "embed_tokens.embedding_weight": "embed_tokens.weight",
    "embed_pos.embedding_weight": "embed_pos.weight",
    "puzzle_emb.weights": PUZZLE_TABLE,
}
_PUBLISHED_NAMES = {ours: published for published, ours in _OUR_NAMES.items()}
# The names that only URM has. `level` is its only network here.
_LAYER, _OUR_LAYER = "layers.", "level.layers."
_CONVOLUTION = {
    "mlp.dwconv.weight": "mlp.conv_weight_W12",
    "mlp.dwconv.bias": "mlp.conv_bias_W",
}
_START, _OUR_START = "init_hidden", "z_init"
_OUTSIDE_LEVELS = r"[HL]_init|(embed_tokens|embed_pos|puzzle_embedding|lm_head)\.weight|q_head\.(weight|bias)"
_ATTENTION = r"self_attn\.(qkv_proj|o_proj)"
_AXIAL = r"attn(_t)?\.(qkv_proj|o_proj)"
_MLP = r"mlp\.(gate_up_proj|down_proj)"
_MLP_T = r"mlp_t\.(gate_up_proj|down_proj)"
# TRM introduced token mixing; the published HRM has only attention.
_KNOWN = {
    "hrm": re.compile(rf"{_OUTSIDE_LEVELS}|[HL]_level\.layers\.\d+\.({_ATTENTION}|{_MLP})\.weight"),
    "trm": re.compile(rf"{_OUTSIDE_LEVELS}|L_level\.layers\.\d+\.({_ATTENTION}|{_MLP}|{_MLP_T})\.weight"),
    "se_rrm": re.compile(
        r"Z_init|pos_embedding|embed_(special_tokens|symbol_tokens|symbols)|add_tokens(_special)?"
        rf"|(puzzle_embedding|lm_head)\.weight|L_level\.layers\.\d+\.({_AXIAL}|{_MLP})\.weight"
    ),
    "urm": re.compile(
        r"z_init|(embed_tokens|puzzle_embedding|lm_head)\.weight|q_head\.(weight|bias)"
        rf"|level\.layers\.\d+\.(({_ATTENTION}|{_MLP})\.weight|mlp\.conv_(weight_W12|bias_W))"
    ),
}
_EMBEDDING = "embed_tokens.weight"
_CONV_WEIGHT, _CONV_BIAS = ".mlp.conv_weight_W12", ".mlp.conv_bias_W"
_NUM_NAMED = 3  # most names that an error message lists


def unwrapped(name: str) -> str:
    """Return the name that a weight has in a model that is neither compiled nor in DDP."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def prefix_of(name: str) -> str:
    """Return the beginning of a name that programs add which train a model as a part of another."""
    match = re.match(rf"(({'|'.join([*_WRAPPERS, 'model', 'inner'])})\.)*", name)
    assert match is not None
    return match[0]


def our_name(published: str) -> str:
    """Return our name of a weight, whatever wrapped its model. Our names stay as they are."""
    path = unwrapped(published.removeprefix(prefix_of(published)))
    if path == _START:
        return _OUR_START
    if path.startswith(_LAYER):
        for published_end, our_end in _CONVOLUTION.items():
            if path.endswith(published_end):
                path = path.removesuffix(published_end) + our_end
        return _OUR_LAYER + path.removeprefix(_LAYER)
    return _OUR_NAMES.get(path, path)


def published_name(ours: str) -> str:
    """Return the published name of one of our weights, as in a model that was not compiled.

    The names of a stack `level` and of its state `z_init` are those of URM.
    """
    if ours == _OUR_START:
        return PREFIX + _START
    if ours.startswith(_OUR_LAYER):
        path = _LAYER + ours.removeprefix(_OUR_LAYER)
        for published_end, our_end in _CONVOLUTION.items():
            if path.endswith(our_end):
                path = path.removesuffix(our_end) + published_end
        return PREFIX + path
    return PREFIX + _PUBLISHED_NAMES.get(ours, ours)


def to_ours(weights: Weights) -> Weights:
    """Return the weights under our names.

    Raises:
        UserError: Two names mean the same weight.
    """
    found: dict[str, str] = {}
    for name in weights:
        ours = our_name(name)
        if ours in found:
            raise UserError(f"{found[ours]} and {name} are both {ours}; remove one of them from the file")
        found[ours] = name
    return {ours: weights[name] for ours, name in found.items()}


def to_published(weights: Weights, *, compiled: bool) -> Weights:
    """Return the weights of our HRM, TRM, URM or SE-RRM as the published code has them.

    URM's code loads a convolution in the dtype of the file, and needs that of the activations. So
    the convolution gets the dtype of `init_hidden`, which is forward_dtype. A convolution without a
    bias gets one of zeros.

    Raises:
        UserError: Some weights have no published name.
    """
    arch = arch_of(weights)
    if arch == "urm":
        weights = _as_in_urm(weights)
    if unknown := [name for name in weights if not _KNOWN[arch].fullmatch(name)]:
        raise UserError(
            f"the published {arch.upper().replace('_', '-')} has no {_some(unknown)}; only a model without additions "
            "of this project's own can be exported"
        )
    return {(COMPILED if compiled else "") + published_name(name): tensor for name, tensor in weights.items()}


def arch_of(weights: Weights) -> PublishedArch:
    """Return the published architecture whose networks have these names."""
    if "Z_init" in weights:
        return "se_rrm"
    if any(name.startswith(_OUR_LAYER) and name.endswith(_CONV_WEIGHT) for name in weights):
        return "urm"
    return "hrm" if any(name.startswith("H_level.") for name in weights) else "trm"


def _as_in_urm(weights: Weights) -> Weights:
    dtype = weights[_OUR_START].dtype if _OUR_START in weights else torch.float32
    found: Weights = {}
    for name, tensor in weights.items():
        found[name] = tensor.to(dtype) if name.endswith((_CONV_WEIGHT, _CONV_BIAS)) else tensor
        bias = name.removesuffix(_CONV_WEIGHT) + _CONV_BIAS
        if name.endswith(_CONV_WEIGHT) and bias not in weights:
            found[bias] = torch.zeros(len(tensor), dtype=dtype)
    return found


def fit_weights(weights: Weights, own: Mapping[str, Tensor], puzzle_table: PuzzleTable | None, source: str) -> Weights:
    """As `fit_one_by_one`, for weights that are all in memory."""
    return dict(fit_one_by_one(weights, own, puzzle_table, source, weights.__getitem__))


def fit_one_by_one(
    weights: Weights,
    own: Mapping[str, Tensor],
    puzzle_table: PuzzleTable | None,
    source: str,
    read: Callable[[str], Tensor],
) -> Iterator[tuple[str, Tensor]]:
    """Return the weights in the dtypes of the model and with its puzzle table's size.

    All are checked at once. Each is read and cast when its turn comes, so that memory need not hold
    them all. A convolution that comes with weights but without a bias gets a bias of zeros.

    Args:
        weights: weights by our names (see `to_ours`). On the meta device, which has only shapes and
            dtypes, are those that `read` gives.
        own: the model's state dict, for its names, shapes and dtypes.
        puzzle_table: how the table's rows are filled. keep: by number, with zeros for rows that
            the loaded table lacks. mean: every row becomes the mean of the loaded rows, as in TRM.
            zero: all rows are zero, and the checkpoint needs no table. None: as loaded, which
            needs a table of the model's size.
        source: where the weights come from, for messages.
        read: returns a weight that is on the meta device in `weights`, by name.

    Raises:
        UserError: Weights are missing, unexpected or of another shape, or puzzle_table is None and
            the tables' sizes differ.
    """
    weights = dict(weights)
    # Files that this project wrote before the convolution had a bias computed as with zeros.
    of_old = {name for name in own if name.endswith(_CONV_BIAS) and name not in weights}
    weights |= {name: torch.zeros(own[name].shape) for name in of_old if _weight_of(name) in weights}

    def whole(name: str) -> Tensor:
        return read(name) if weights[name].is_meta else weights[name]

    table_KE, own_KE = weights.get(PUZZLE_TABLE), own.get(PUZZLE_TABLE)
    if own_KE is not None:
        if puzzle_table == "zero":
            weights[PUZZLE_TABLE] = torch.zeros(own_KE.shape)
        elif table_KE is not None and _gets_other_rows(table_KE, own_KE, puzzle_table):
            weights[PUZZLE_TABLE] = _resized(whole(PUZZLE_TABLE), len(own_KE), puzzle_table or "keep")

    theirs_VD, own_VD = weights.get(_EMBEDDING), own.get(_EMBEDDING)
    if (
        theirs_VD is not None
        and own_VD is not None
        and theirs_VD.shape[1:] == own_VD.shape[1:]
        and len(theirs_VD) != len(own_VD)
    ):
        raise UserError(
            f"{source} was trained with a vocabulary of {len(theirs_VD)}, and the data have one of {len(own_VD)}; "
            "take data of the same task"
        )
    if problems := _mismatches(weights, own):
        fix = folder_around(source) or "arch and data must be the checkpoint's"
        raise UserError(f"{source} doesn't fit the model: {'; '.join(problems)}; {fix}")
    # This check comes last, because a checkpoint that does not fit leaves no choice of rows.
    if puzzle_table is None and table_KE is not None and own_KE is not None and len(table_KE) != len(own_KE):
        raise UserError(
            f"{source} has puzzle rows for {len(table_KE)} identifiers, the model for {len(own_KE)}; choose what "
            "becomes of them: puzzle_table=keep (by number, zeros for new rows), mean (each row becomes the mean of "
            "all rows) or zero (all rows start anew)"
        )
    return ((name, whole(name).to(own[name].dtype)) for name in weights)


def _weight_of(conv_bias: str) -> str:
    """Return the name of a convolution's weight."""
    return conv_bias.removesuffix(_CONV_BIAS) + _CONV_WEIGHT


def _gets_other_rows(table_KE: Tensor, own_KE: Tensor, puzzle_table: PuzzleTable | None) -> bool:
    if table_KE.dim() != 2 or len(table_KE) == 0 or table_KE.shape[1] != own_KE.shape[1]:
        return False
    return puzzle_table == "mean" or len(table_KE) != len(own_KE)


def _resized(table_KE: Tensor, num_rows: int, puzzle_table: Literal["keep", "mean"]) -> Tensor:
    if puzzle_table == "mean":
        return table_KE.float().mean(dim=0, keepdim=True).repeat(num_rows, 1)
    resized_KE = table_KE.new_zeros(num_rows, table_KE.shape[1])
    num_shared = min(num_rows, len(table_KE))
    resized_KE[:num_shared] = table_KE[:num_shared]
    return resized_KE


def _mismatches(weights: Weights, own: Mapping[str, Tensor]) -> list[str]:
    def shape(tensor: Tensor) -> str:
        return str(tuple(tensor.shape))

    found = compare_shapes(shapes_of(weights), shapes_of(own))
    missing = [f"{name} {shape(own[name])}" for name in found.missing]
    unexpected = [f"{name} {shape(weights[name])}" for name in found.unexpected]
    reshaped = [
        f"{name} is {shape(weights[name])} there and {shape(own[name])} in the model" for name in found.reshaped
    ]
    # Without this check, integers would be cast silently, and quantized weights loaded as noise.
    recast = [
        f"{name} is {theirs.dtype} there and {ours.dtype} in the model"
        for name, theirs in weights.items()
        if (ours := own.get(name)) is not None and theirs.is_floating_point() != ours.is_floating_point()
    ]
    kinds = (("missing ", missing), ("unexpected ", unexpected), ("", reshaped), ("", recast))
    return [prefix + _some(names) for prefix, names in kinds if names]


def _some(names: list[str]) -> str:
    others = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {others} more" if others > 0 else "")
