"""Translate names of weights to and from published HRM-Text checkpoints.

There are two kinds: the checkpoints of its training program, and the files that it exports for the
transformers library, of HRM-Text alone. Only names differ, so no bit of a weight changes.
"""

import re
from collections.abc import Mapping
from typing import Literal, TypeVar

from torch import Tensor

from sharing.published import unwrapped
from utils.errors import UserError

Weights = dict[str, Tensor]
Kind = Literal["training", "transformers"]
_T = TypeVar("_T")

_OUTSIDE = {
    "training": {
        "embed_tokens.weight": "embed_tokens.embedding_weight",
        "lm_head.weight": "lm_head.weight",
        "zL_init": "model.zL_init",
    },
    "transformers": {
        "embed_tokens.weight": "model.embed_tokens.weight",
        "lm_head.weight": "lm_head.weight",
        "zL_init": "model.z_L_init",
    },
}
# The prefixes of the layers of each stack, by architecture.
_STACKS: dict[Kind, dict[str, dict[str, str]]] = {
    "training": {
        "hrm_text": {"H_level.": "model.H_level.core.", "L_level.": "model.L_level.core."},
        "trm_text": {"L_level.": "model.L_level.core."},
        "ut_text": {"L_level.": "model.L_level.core."},
        "rins_text": {"H_level.": "model.H_level.", "L_level.": "model.L_level."},
        "transformer_text": {"level.": "model."},
    },
    "transformers": {"hrm_text": {"H_level.": "model.H_module.", "L_level.": "model.L_module."}},
}
_LAYER = r"layers\.\d+\.(attn\.(gqkv_proj|o_proj)|mlp\.(gate_up_proj|down_proj))\.weight"
# Earlier versions of the published program saved a state that it never reads.
_UNUSED = {"model.zH_init"}


def to_ours(weights: Mapping[str, _T], arch: str) -> dict[str, _T]:
    """Return the weights of a published checkpoint of either kind under our names.

    Args:
        weights: by their published names; or anything else that is known of each.
        arch: the name of the architecture, such as hrm_text.

    Raises:
        UserError: A name is unknown for the architecture, or two names mean the same weight.
    """
    found: dict[str, str] = {}
    for name in weights:
        plain = unwrapped(name)
        if plain in _UNUSED:
            continue
        ours = next(filter(None, (_our_name(plain, kind, arch) for kind in _STACKS if arch in _STACKS[kind])), None)
        if ours is None:
            raise UserError(f"{name} is no weight of a published {arch}; take the architecture of the checkpoint")
        if ours in found:
            raise UserError(f"{found[ours]} and {name} are both {ours}; remove one of them from the file")
        found[ours] = name
    return {ours: weights[name] for ours, name in found.items()}


def to_published(weights: Weights, arch: str, kind: Kind) -> Weights:
    """Return the weights of our model under the names of a published checkpoint.

    Raises:
        UserError: The architecture or some weight has no published name.
    """
    if arch not in _STACKS[kind]:
        raise UserError(f"there are no published names ({kind}) of {arch}; take {' or '.join(_STACKS[kind])}")
    names = {name: _published_name(name, kind, arch) for name in weights}
    if unknown := [name for name, published in names.items() if published is None]:
        raise UserError(f"a published {arch} has no {unknown[0]} ({len(unknown)} such in all)")
    return {published: weights[name] for name, published in names.items() if published is not None}


def _published_name(ours: str, kind: Kind, arch: str) -> str | None:
    if ours in _OUTSIDE[kind]:
        return _OUTSIDE[kind][ours]
    for own, published in _STACKS[kind][arch].items():
        if ours.startswith(own) and re.fullmatch(_LAYER, ours.removeprefix(own)):
            return published + ours.removeprefix(own)
    return None


def _our_name(published: str, kind: Kind, arch: str) -> str | None:
    for ours, theirs in _OUTSIDE[kind].items():
        if published == theirs:
            return ours
    for own, prefix in _STACKS[kind][arch].items():
        if published.startswith(prefix) and re.fullmatch(_LAYER, published.removeprefix(prefix)):
            return own + published.removeprefix(prefix)
    return None
