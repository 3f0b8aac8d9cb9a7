"""Translate names of weights to and from published checkpoints; fit weights to a model.

The programs of HRM, TRM, URM and SE-RRM save the model inside its loss, so that their names are
`model.inner.` and a path. torch.compile adds `_orig_mod.`, DDP `module.` and Lightning `model.`.
HRM-Text has two formats: the checkpoints of its training program, and the files for transformers.
Fused projections have the same layout here, so that only names differ.
"""

# K = puzzle identifiers, E = puzzle embedding size, W = width of an MLP

import re
from collections.abc import Iterable, Iterator, Mapping
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
_CONV_WEIGHT, _CONV_BIAS = "mlp.conv_weight_W12", "mlp.conv_bias_W"
_NUM_NAMED = 3  # most names that an error message lists


def _same(*names: str) -> dict[str, str]:
    return dict(zip(names, names, strict=True))


def _names(outside: dict[str, str], stacks: dict[str, str], parts: dict[str, str]) -> dict[str, str]:
    """Return {our name: published name}, with * for the number of a layer.

    Args:
        outside: the names of the weights outside of layers.
        stacks: the beginnings of the names of layers.
        parts: the ends of the names of layers.
    """
    inside = {
        f"{own}layers.*.{part}": f"{theirs}layers.*.{their_part}"
        for own, theirs in stacks.items()
        for part, their_part in parts.items()
    }
    return outside | inside


_ENDS = {PUZZLE_TABLE: "puzzle_emb.weights", **_same("lm_head.weight")}
_TOKENS = {_EMBEDDING: "embed_tokens.embedding_weight", **_ENDS, **_same("q_head.weight", "q_head.bias")}
_TWO_STATES = {**_TOKENS, "embed_pos.weight": "embed_pos.embedding_weight", **_same("H_init", "L_init")}
_SE_RRM = _same(
    *("Z_init", "pos_embedding", "embed_special_tokens", "embed_symbol_tokens", "embed_symbols"),
    *("add_tokens", "add_tokens_special"),
)
_MLP = _same("mlp.gate_up_proj.weight", "mlp.down_proj.weight")
_LAYER = _same("self_attn.qkv_proj.weight", "self_attn.o_proj.weight") | _MLP
_MLP_T = _same("mlp_t.gate_up_proj.weight", "mlp_t.down_proj.weight")
_CONV = {_CONV_WEIGHT: "mlp.dwconv.weight", _CONV_BIAS: "mlp.dwconv.bias"}
_LAYER_OF_SE_RRM = (
    _same(*(f"{mixer}.{part}_proj.weight" for mixer in ("attn", "attn_t") for part in ("qkv", "o"))) | _MLP
)
_LAYER_OF_TEXT = _same("attn.gqkv_proj.weight", "attn.o_proj.weight") | _MLP
_TEXT = {_EMBEDDING: "embed_tokens.embedding_weight", **_same("lm_head.weight")}
_TEXT_WITH_STATE = _TEXT | {"zL_init": "model.zL_init"}
_OF_TRANSFORMERS = {"zL_init": "model.z_L_init", _EMBEDDING: "model.embed_tokens.weight", **_same("lm_head.weight")}
_CORES = {f"{stack}.": f"model.{stack}.core." for stack in ("H_level", "L_level")}
_L_CORE = {"L_level.": "model.L_level.core."}

FORMATS: dict[Kind, dict[str, dict[str, str]]] = {
    "puzzles": {
        "hrm": _names(_TWO_STATES, _same("H_level.", "L_level."), _LAYER),
        # TRM introduced token mixing; the published HRM has only attention.
        "trm": _names(_TWO_STATES, _same("L_level."), _LAYER | _MLP_T),
        "urm": _names({**_TOKENS, "z_init": "init_hidden"}, {"level.": ""}, _LAYER | _CONV),
        "se_rrm": _names(_ENDS | _SE_RRM, _same("L_level."), _LAYER_OF_SE_RRM),
    },
    "training": {
        "hrm_text": _names(_TEXT_WITH_STATE, _CORES, _LAYER_OF_TEXT),
        "trm_text": _names(_TEXT_WITH_STATE, _L_CORE, _LAYER_OF_TEXT),
        "ut_text": _names(_TEXT_WITH_STATE, _L_CORE, _LAYER_OF_TEXT),
        "rins_text": _names(
            _TEXT_WITH_STATE, {"H_level.": "model.H_level.", "L_level.": "model.L_level."}, _LAYER_OF_TEXT
        ),
        "transformer_text": _names(_TEXT, {"level.": "model."}, _LAYER_OF_TEXT),
    },
    "transformers": {
        "hrm_text": _names(
            _OF_TRANSFORMERS, {"H_level.": "model.H_module.", "L_level.": "model.L_module."}, _LAYER_OF_TEXT
        ),
    },
}
"""{our name: published name} of each architecture, with * for the number of a layer."""

# Earlier versions of HRM-Text's program saved a state that it never reads.
_UNUSED = {"model.zH_init"}


def _translated(name: str, names: Mapping[str, str]) -> str | None:
    number = re.search(r"(?<=layers\.)\d+", name)
    found = names.get(re.sub(r"(?<=layers\.)\d+", "*", name))
    return found.replace("*", number[0]) if found is not None and number is not None else found


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
    if arch_of_text is None:
        formats = [*FORMATS["puzzles"].values()]
    else:
        kinds: tuple[Kind, ...] = ("training", "transformers")
        formats = [FORMATS[kind][arch_of_text] for kind in kinds if arch_of_text in FORMATS[kind]]
    published = [{theirs: ours for ours, theirs in names.items()} for names in formats]
    found: dict[str, str] = {}
    for name in weights:
        start = prefix_of(name) if arch_of_text is None else ""
        path = ".".join(part for part in name.removeprefix(start).split(".") if part not in _WRAPPERS)
        if arch_of_text is not None and path in _UNUSED:
            continue
        ours = next(filter(None, (_translated(path, names) for names in published)), None if arch_of_text else path)
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
        dtype, given = weights["z_init"].dtype if "z_init" in weights else torch.float32, weights
        weights = {}
        for name, tensor in given.items():
            weights[name] = tensor.to(dtype) if name.endswith((_CONV_WEIGHT, _CONV_BIAS)) else tensor
            bias = name.removesuffix(_CONV_WEIGHT) + _CONV_BIAS
            if name.endswith(_CONV_WEIGHT) and bias not in given:
                weights[bias] = torch.zeros(len(tensor), dtype=dtype)
    names = {name: _translated(name, FORMATS[kind][arch]) for name in weights}
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
        puzzle_table: how the table's rows are filled. keep: by number, with zeros for rows that
            the loaded table lacks. mean: every row becomes the mean of the loaded rows, as in TRM.
            zero: all rows are zero, and the checkpoint needs no table. None: as loaded, which
            needs a table of the model's size.
        source: where the weights come from, for messages.

    Raises:
        UserError: Weights are missing, unexpected or of another shape, or puzzle_table is None and
            the tables' sizes differ.
    """
    weights = dict(weights)
    # Files that this project wrote before the convolution had a bias computed as with zeros.
    for name in own.keys() - weights.keys():
        if name.endswith(_CONV_BIAS) and name.removesuffix(_CONV_BIAS) + _CONV_WEIGHT in weights:
            weights[name] = torch.zeros(own[name].shape)

    table_KE, own_KE = weights.get(PUZZLE_TABLE), own.get(PUZZLE_TABLE)
    if own_KE is not None and puzzle_table == "zero":
        weights[PUZZLE_TABLE] = torch.zeros(own_KE.shape)
    elif own_KE is not None and table_KE is not None and len(table_KE) and table_KE.shape[1:] == own_KE.shape[1:]:
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
    return [_some(names) for names in kinds if names]


def _some(names: Iterable[str]) -> str:
    first, others = [*names][:_NUM_NAMED], len([*names]) - _NUM_NAMED
    return ", ".join(first) + (f" and {others} more" if others > 0 else "")
