"""The closed table of architectures: no config or checkpoint can name code to run."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from models.base import CommonConfig
from models.hrm import HRM, HRMConfig
from models.model import ArchBase, Model
from models.se_mixer import SEMixer, SEMixerConfig
from models.se_rrm import SERRM, SERRMConfig
from models.text.config import (
    GPTConfig,
    HRMTextConfig,
    RINSTextConfig,
    TextConfig,
    TransformerTextConfig,
    TRMTextConfig,
    UTTextConfig,
)
from models.text.model import TextModel
from models.transformer import Transformer, TransformerConfig
from models.trm import TRM, TRMConfig
from models.urm import URM, URMConfig
from utils.config import union_of
from utils.errors import UserError

ARCHS: dict[type[ArchBase], Callable[..., Model]] = {
    HRMConfig: HRM,
    TRMConfig: TRM,
    TransformerConfig: Transformer,
    SERRMConfig: SERRM,
    SEMixerConfig: SEMixer,
    URMConfig: URM,
    GPTConfig: TextModel,
    HRMTextConfig: TextModel,
    RINSTextConfig: TextModel,
    TransformerTextConfig: TextModel,
    TRMTextConfig: TextModel,
    UTTextConfig: TextModel,
}
"""Every architecture: its options, whose `name` names a file in config/arch/, and its model."""

if TYPE_CHECKING:
    ArchConfig = CommonConfig | TextConfig
else:  # a type checker can't follow the table
    ArchConfig = union_of(ARCHS)


def build_arch(config: ArchConfig, **sizes: int) -> Model:
    """Return the model on the host, with its constants but without values of the weights."""
    model = build_on_meta(config, **sizes)  # which refuses what the machine has no memory for
    model.allocate(torch.device("cpu"))
    return model


def build_on_meta(config: ArchConfig, *, num_parts: int = 1, **sizes: int) -> Model:
    """Return the model that `config.name` asks for, on the meta device: shapes without memory.

    Raises:
        UserError: The data don't suit the model, or the model is larger than the machine's memory.
    """
    model = shapes_of(config, **sizes)
    num_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) // num_parts
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > room:
        named = " and ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(
            f"a model for {named}, with hidden_size {config.hidden_size}, takes {num_bytes / 2**30:,.0f} GB, but this "
            f"machine has {room / 2**30:,.0f}; correct dataset.json or make the model smaller"
        )
    return model


def shapes_of(config: ArchConfig, **sizes: int) -> Model:
    """As `build_on_meta`, but a model may be larger than the memory of any machine."""
    with torch.device("meta"):
        return ARCHS[type(config)](config, **sizes)
