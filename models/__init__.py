"""The architectures, by name: a closed table, so that no config or checkpoint can name code to run."""

from models.act import RecursiveModel
from models.hrm import HRM, HRMConfig

# The second architecture makes this `Annotated[HRMConfig | TRMConfig, Field(discriminator="name")]`.
ArchConfig = HRMConfig

ARCHS = {"hrm": HRM}


def build_arch(config: ArchConfig, *, seq_len: int, vocab_size: int, num_puzzle_identifiers: int) -> RecursiveModel:
    """The model that `config.name` asks for, allocated but not initialised."""
    return ARCHS[config.name](
        config, seq_len=seq_len, vocab_size=vocab_size, num_puzzle_identifiers=num_puzzle_identifiers
    )
