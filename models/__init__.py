"""The closed table of architectures: no config or checkpoint can name code to run."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from models.base import CommonConfig, RecursiveModel
from models.hrm import HRM, HRMConfig
from models.transformer import Transformer, TransformerConfig
from models.trm import TRM, TRMConfig
from models.urm import URM, URMConfig
from utils.config import union_of
from utils.errors import UserError

ARCHS: dict[type[CommonConfig], Callable[..., RecursiveModel]] = {
    HRMConfig: HRM,
    TRMConfig: TRM,
    TransformerConfig: Transformer,
    URMConfig: URM,
}
"""Every architecture: its options, whose `name` names a file in config/arch/, and its model."""

if TYPE_CHECKING:
    ArchConfig = CommonConfig
else:  # a type checker can't follow the table
    ArchConfig = union_of(ARCHS)


def build_arch(config: ArchConfig, *, seq_len: int, vocab_size: int, num_puzzle_identifiers: int) -> RecursiveModel:
    """Return the model that `config.name` asks for, allocated on the host but not initialised.

    The arguments are those of `build_on_meta`.
    """
    sizes = {"seq_len": seq_len, "vocab_size": vocab_size, "num_puzzle_identifiers": num_puzzle_identifiers}
    build_on_meta(config, **sizes)  # which refuses what the machine has no memory for
    return ARCHS[type(config)](config, **sizes)


def build_on_meta(
    config: ArchConfig, *, seq_len: int, vocab_size: int, num_puzzle_identifiers: int, num_parts: int = 1
) -> RecursiveModel:
    """Return the model that `config.name` asks for, on the meta device: shapes without memory.

    Args:
        seq_len: tokens of a sequence.
        vocab_size: kinds of tokens.
        num_puzzle_identifiers: rows of the puzzle table.
        num_parts: how many ranks divide the model among them.

    Raises:
        UserError: The positions don't suit the sequence, or the model is larger than the machine's
            memory. The sizes may come from a dataset that somebody else made.
    """
    with torch.device("meta"):
        model = ARCHS[type(config)](
            config, seq_len=seq_len, vocab_size=vocab_size, num_puzzle_identifiers=num_puzzle_identifiers
        )
    num_bytes = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers())) // num_parts
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if num_bytes > room:
        raise UserError(
            f"a model for {seq_len} tokens of {vocab_size} kinds and {num_puzzle_identifiers} puzzle identifiers, with "
            f"hidden_size {config.hidden_size}, takes {num_bytes / 2**30:,.0f} GB, but this machine has "
            f"{room / 2**30:,.0f}; correct dataset.json or make the model smaller"
        )
    return model
