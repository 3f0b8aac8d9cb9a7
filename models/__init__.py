"""The architectures, by name: a closed table, so that no config or checkpoint can name code to run."""

from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from models.base import RecursiveModel
from models.hrm import HRM, HRMConfig
from models.transformer import Transformer, TransformerConfig
from models.trm import TRM, TRMConfig
from models.urm import URM, URMConfig

ArchConfig = Annotated[HRMConfig | TRMConfig | TransformerConfig | URMConfig, Field(discriminator="name")]

ARCHS: dict[str, Callable[..., RecursiveModel]] = {"hrm": HRM, "trm": TRM, "transformer": Transformer, "urm": URM}


def build_arch(config: ArchConfig, *, seq_len: int, vocab_size: int, num_puzzle_identifiers: int) -> RecursiveModel:
    """The model that `config.name` asks for, allocated but not initialised. Raises ValueError: see RecursiveModel."""
    return ARCHS[config.name](
        config, seq_len=seq_len, vocab_size=vocab_size, num_puzzle_identifiers=num_puzzle_identifiers
    )
