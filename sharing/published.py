"""Translate names of weights to and from published checkpoints; fit weights to a model.

The table FORMATS has the names of each published program. The programs of HRM, TRM, URM and SE-RRM
save the model inside its loss, so that their names are `model.inner.` and a path. torch.compile
adds `_orig_mod.`, DDP `module.` and Lightning `model.`, all of which are dropped. HRM-Text has two
formats: the checkpoints of its training program, and the files for the transformers library. Fused
projections have the same layout here, so that only names differ.
"""

# K = puzzle identifiers, E = puzzle embedding size, W = width of an MLP

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
from torch import Tensor

from utils.errors import UserError
from utils.shapes import compare_shapes, shapes_of

Weights = dict[str, Tensor]
PuzzleTable = Literal["keep", "mean", "zero"]
Kind = Literal["puzzles", "training", "transformers"]
_T = TypeVar("_T")

PREFIX = "model.inner."
PUZZLE_TABLE = "puzzle_embedding.weight"
_WRAPPERS = ("_orig_mod", "module")
"""What torch.compile and DDP add to a name, wherever the wrapped part stands in the model."""
COMPILED = f"{_WRAPPERS[0]}."
_EMBEDDING = "embed_tokens.weight"
_CONV_WEIGHT, _CONV_BIAS = ".mlp.conv_weight_W12", ".mlp.conv_bias_W"
_NUM_NAMED = 3  # most names that an error message lists


@dataclass(frozen=True)
class Format:
    """The names that a published program gives the weights of an architecture.

    Attributes:
        outside: our names of the weights outside of layers, and the published ones.
        stacks: the beginnings of the names of layers, ours and the published ones.
        layer: what a name in a layer may be, after the number of the layer.
        renamed: ends of names in a layer that differ, ours and the published ones.
    """

    outside: dict[str, str]
    stacks: dict[str, str]
    layer: str
    renamed: dict[str, str] = field(default_factory=dict)

    def published(self, ours: str) -> str | None:
        """Return the published name of one of our weights; None if it has none."""
        for own, theirs in self.stacks.items():
            inside = ours.removeprefix(own)
            if inside != ours and re.fullmatch(rf"layers\.\d+\.({self.layer})", inside):
                return theirs + _with_end(inside, self.renamed)
        return self.outside.get(ours)

    def ours(self, published: str) -> str | None:
        """Return our name of a published weight; None if the program has no such weight."""
        for own, theirs in self.stacks.items():
            inside = _with_end(published.removeprefix(theirs), {there: here for here, there in self.renamed.items()})
            if published.startswith(theirs) and re.fullmatch(rf"layers\.\d+\.({self.layer})", inside):
                return own + inside
        return next((own for own, theirs in self.outside.items() if theirs == published), None)


def _with_end(name: str, ends: Mapping[str, str]) -> str:
    return next((name.removesuffix(old) + new for old, new in ends.items() if name.endswith(old)), name)


def _same(*names: str) -> dict[str, str]:
    return dict(zip(names, names, strict=True))


_ENDS = {PUZZLE_TABLE: "puzzle_emb.weights", **_same("lm_head.weight")}
_TOKENS = {_EMBEDDING: "embed_tokens.embedding_weight", **_ENDS, **_same("q_head.weight", "q_head.bias")}
_TWO_STATES = {**_TOKENS, "embed_pos.weight": "embed_pos.embedding_weight", **_same("H_init", "L_init")}
_SE_RRM = _same(
    *("Z_init", "pos_embedding", "embed_special_tokens", "embed_symbol_tokens", "embed_symbols"),
    *("add_tokens", "add_tokens_special"),
)
_MLP = r"mlp\.(gate_up_proj|down_proj)\.weight"
_LAYER = rf"self_attn\.(qkv_proj|o_proj)\.weight|{_MLP}"
_CONV = r"mlp\.conv_(weight_W12|bias_W)"
_LAYER_OF_TEXT = rf"attn\.(gqkv_proj|o_proj)\.weight|{_MLP}"
_TEXT = {_EMBEDDING: "embed_tokens.embedding_weight", **_same("lm_head.weight")}
_TEXT_WITH_STATE = _TEXT | {"zL_init": "model.zL_init"}
_OF_TRANSFORMERS = {"zL_init": "model.z_L_init", _EMBEDDING: "model.embed_tokens.weight", **_same("lm_head.weight")}

FORMATS: dict[Kind, dict[str, Format]] = {
    "puzzles": {
        "hrm": Format(_TWO_STATES, _same("H_level.", "L_level."), _LAYER),
        # TRM introduced token mixing; the published HRM has only attention.
        "trm": Format(_TWO_STATES, _same("L_level."), rf"{_LAYER}|{_MLP.replace('mlp', 'mlp_t', 1)}"),
        "urm": Format(
            {**_TOKENS, "z_init": "init_hidden"},
            {"level.": ""},
            rf"{_LAYER}|{_CONV}",
            {_CONV_WEIGHT: ".mlp.dwconv.weight", _CONV_BIAS: ".mlp.dwconv.bias"},
        ),
        "se_rrm": Format(_ENDS | _SE_RRM, _same("L_level."), rf"attn(_t)?\.(qkv_proj|o_proj)\.weight|{_MLP}"),
    },
    "training": {
        "hrm_text": Format(
            _TEXT_WITH_STATE, {f"{stack}.": f"model.{stack}.core." for stack in ("H_level", "L_level")}, _LAYER_OF_TEXT
        ),
        "trm_text": Format(_TEXT_WITH_STATE, {"L_level.": "model.L_level.core."}, _LAYER_OF_TEXT),
        "ut_text": Format(_TEXT_WITH_STATE, {"L_level.": "model.L_level.core."}, _LAYER_OF_TEXT),
        "rins_text": Format(
            _TEXT_WITH_STATE, {"H_level.": "model.H_level.", "L_level.": "model.L_level."}, _LAYER_OF_TEXT
        ),
        "transformer_text": Format(_TEXT, {"level.": "model."}, _LAYER_OF_TEXT),
    },
    "transformers": {
        "hrm_text": Format(
            _OF_TRANSFORMERS, {"H_level.": "model.H_module.", "L_level.": "model.L_module."}, _LAYER_OF_TEXT
        ),
    },
}
# Earlier versions of HRM-Text's program saved a state that it never reads.
_UNUSED = {"model.zH_init"}


def prefix_of(name: str) -> str:
    """Return the beginning of a name that programs add which train a model as a part of another."""
    match = re.match(rf"(({'|'.join([*_WRAPPERS, 'model', 'inner'])})\.)*", name)
    assert match is not None
    return match[0]


def to_ours(weights: Mapping[str, _T], arch_of_text: str | None = None) -> dict[str, _T]:
    """Return the weights of a published checkpoint under our names.

    Args:
        weights: by their published names; or anything else that is known of each.
        arch_of_text: such as hrm_text, whose names have to be known; None: a model of puzzles,
            whose unknown names, such as ours, stay as they are.

    Raises:
        UserError: A name of text is unknown, or two names mean the same weight.
    """
    found: dict[str, str] = {}
    for name in weights:
        kinds: tuple[Kind, ...] = ("puzzles",) if arch_of_text is None else ("training", "transformers")
        start = prefix_of(name) if arch_of_text is None else ""
        path = ".".join(part for part in name.removeprefix(start).split(".") if part not in _WRAPPERS)
        if arch_of_text is not None and path in _UNUSED:
            continue
        formats = (
            each
            for kind in kinds
            for arch, each in FORMATS[kind].items()
            if arch_of_text is None or arch == arch_of_text
        )
        ours = next(filter(None, (each.ours(path) for each in formats)), None if arch_of_text else path)
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

    URM's code loads a convolution in the dtype of the file, and needs that of the activations. So
    the convolution gets the dtype of `init_hidden`, which is forward_dtype. A convolution without a
    bias gets one of zeros.

    Raises:
        UserError: The architecture or some weight has no published name.
    """
    if arch not in FORMATS[kind]:
        raise UserError(f"there are no published names ({kind}) of {arch}; take {' or '.join(FORMATS[kind])}")
    if arch == "urm":
        weights = _as_in_urm(weights)
    names = {name: FORMATS[kind][arch].published(name) for name in weights}
    if unknown := [name for name, published in names.items() if published is None]:
        raise UserError(
            f"the published {arch.upper().replace('_', '-')} has no {_some(unknown)}; only a model without additions "
            "of this project's own can be exported"
        )
    start = (COMPILED if compiled else "") + (PREFIX if kind == "puzzles" else "")
    return {f"{start}{published}": weights[name] for name, published in names.items()}


def arch_of(weights: Weights) -> str:
    """Return the published architecture of puzzles whose networks have these names."""
    if "Z_init" in weights:
        return "se_rrm"
    if any(name.startswith("level.") and name.endswith(_CONV_WEIGHT) for name in weights):
        return "urm"
    return "hrm" if any(name.startswith("H_level.") for name in weights) else "trm"


def _as_in_urm(weights: Weights) -> Weights:
    dtype = weights["z_init"].dtype if "z_init" in weights else torch.float32
    found: Weights = {}
    for name, tensor in weights.items():
        found[name] = tensor.to(dtype) if name.endswith((_CONV_WEIGHT, _CONV_BIAS)) else tensor
        bias = name.removesuffix(_CONV_WEIGHT) + _CONV_BIAS
        if name.endswith(_CONV_WEIGHT) and bias not in weights:
            found[bias] = torch.zeros(len(tensor), dtype=dtype)
    return found


def fit_one_by_one(
    weights: Weights,
    own: Mapping[str, Tensor],
    puzzle_table: PuzzleTable | None,
    source: str,
    read: Callable[[str], Tensor] | None = None,
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
    for name in own.keys() - weights.keys():
        if name.endswith(_CONV_BIAS) and name.removesuffix(_CONV_BIAS) + _CONV_WEIGHT in weights:
            weights[name] = torch.zeros(own[name].shape)

    def whole(name: str) -> Tensor:
        return read(name) if read is not None and weights[name].is_meta else weights[name]

    table_KE, own_KE = weights.get(PUZZLE_TABLE), own.get(PUZZLE_TABLE)
    if own_KE is not None and puzzle_table == "zero":
        weights[PUZZLE_TABLE] = torch.zeros(own_KE.shape)
    elif own_KE is not None and table_KE is not None and len(table_KE) and table_KE.shape[1:] == own_KE.shape[1:]:
        if puzzle_table == "mean":
            mean_1E = whole(PUZZLE_TABLE).float().mean(dim=0, keepdim=True)
            weights[PUZZLE_TABLE] = mean_1E.repeat(len(own_KE), 1)
        elif len(table_KE) != len(own_KE):
            resized_KE = torch.zeros(own_KE.shape, dtype=table_KE.dtype)
            num_shared = min(len(own_KE), len(table_KE))
            resized_KE[:num_shared] = whole(PUZZLE_TABLE)[:num_shared]
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
    return ((name, whole(name).to(own[name].dtype)) for name in weights)


def _mismatches(weights: Weights, own: Mapping[str, Tensor]) -> list[str]:
    def shape(tensor: Tensor) -> str:
        return str(tuple(tensor.shape))

    found = compare_shapes(shapes_of(weights), shapes_of(own))
    # Without the last check, integers would be cast silently, and quantized weights be noise.
    kinds = {
        "missing ": [f"{name} {shape(own[name])}" for name in found.missing],
        "unexpected ": [f"{name} {shape(weights[name])}" for name in found.unexpected],
        "": [f"{name} is {shape(weights[name])} there and {shape(own[name])} in the model" for name in found.reshaped],
        " ": [
            f"{name} is {theirs.dtype} there and {own[name].dtype} in the model"
            for name, theirs in weights.items()
            if name in own and theirs.is_floating_point() != own[name].is_floating_point()
        ],
    }
    return [(prefix + _some(names)).lstrip() for prefix, names in kinds.items() if names]


def _some(names: Iterable[str]) -> str:
    first, others = [*names][:_NUM_NAMED], len([*names]) - _NUM_NAMED
    return ", ".join(first) + (f" and {others} more" if others > 0 else "")
