"""What training asks of every model, of puzzles and of text, and the options that all have."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar, Literal

import torch
from torch import nn

from models.layers import InitialValues, fill
from models.puzzle_embedding import PuzzleEmbedding
from utils.config import StrictModel

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

Checkpointing = Literal["none", "block", "cycle"]
"""What a call with gradient keeps for the backward pass.

none: everything. block: the input of each block. cycle: the input of the call.
"""

# A run needs at most five graphs for training and for evaluations with as many slots: with and
# without gradient, for two or three inputs of which some require one. Other numbers of slots need
# two or three more, and so do fp8_no_grad and num_states (tests/test_compiled.py counts them).
_MOST_GRAPHS = 16


class ArchBase(StrictModel):
    kind: ClassVar[Literal["puzzles", "text"]]
    """What the architecture reads."""

    name: str  # a Literal in each architecture
    forward_dtype: Literal["auto", "bfloat16", "float16", "float32"]
    activation_checkpointing: Checkpointing

    @property
    def is_gone_through_once(self) -> bool:
        """Whether each block computes a slot once, as a pipeline needs."""
        return False

    @property
    def tied_head(self) -> bool:
        """Whether the head uses the embedding's weights."""
        return False


class Model(nn.Module, ABC):
    """A model that training, strategies and checkpoints can use.

    Parameters are float32, activations `dtype`. It is a few stacks of blocks, embeddings and heads.
    """

    config: ArchBase
    dtype: torch.dtype
    vocab_size: int
    block_class: ClassVar[type[nn.Module]]
    """The class of a block, which FSDP gathers as a whole."""

    level_class: ClassVar[type[nn.Module]]
    """The class of a stack of blocks, which is compiled as a whole."""

    forward_methods: ClassVar[tuple[str, ...]] = ()
    """Methods that use the weights beside `forward`, and may be called instead of it."""

    positions_per_slot = 1
    """How many vectors of the hidden size a block computes for each unit of the batch."""

    is_compiled = False
    """Whether `compile_levels` was called. Each new shape of a batch then costs a compilation."""

    def __init__(self) -> None:
        super().__init__()
        # Not in the class, where it would hide the modules of that name.
        self.puzzle_embedding: PuzzleEmbedding | None = None

    @abstractmethod
    def initial_values(self, generator: torch.Generator) -> InitialValues:
        """Yield every parameter and buffer with a value from the generator, in a fixed order.

        Only their shapes are read, so the model may lie on the meta device.
        """

    def init_weights(self, generator: torch.Generator) -> None:
        fill(self.initial_values(generator))
        self.fill_constants()

    @torch.no_grad()
    def fill_constants(self) -> None:
        """Give the tensors their values that have the same ones at the start of every run."""
        if self.puzzle_embedding is not None:
            self.puzzle_embedding.init_weights()

    def allocate(self, device: torch.device, *, parameters_on: torch.device | None = None) -> None:
        """Move the model to a device, in place. From the meta device only constants get values."""
        was_on_meta = any(tensor.is_meta for tensor in self.parameters())

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            place = parameters_on or device if isinstance(tensor, nn.Parameter) else device
            return torch.empty_like(tensor, device=place) if tensor.is_meta else tensor.to(place)

        self._apply(moved)
        if was_on_meta:
            saved = self.state_dict().keys()
            computed = {name: buffer for name, buffer in self.named_buffers() if name not in saved}
            for buffer in computed.values():
                buffer.fill_(torch.nan)
            self.fill_constants()
            empty = [name for name, buffer in computed.items() if buffer.isnan().any()]
            assert not empty, f"{empty} are not in checkpoints, so that fill_constants has to fill them"

    def blocks(self) -> list[nn.Module]:
        return [module for module in self.modules() if isinstance(module, self.block_class)]

    def levels(self) -> list[nn.Module]:
        return [module for module in self.modules() if isinstance(module, self.level_class)]

    def block_weights(self) -> list[nn.Parameter]:
        return [weight for block in self.blocks() for weight in block.parameters()]

    def trained_tensors(self) -> dict[str, torch.Tensor]:
        """Return what training changes, by state dict name: all parameters and the puzzle table."""
        tensors: dict[str, torch.Tensor] = dict(self.named_parameters())
        if self.puzzle_embedding is not None:
            tensors["puzzle_embedding.weight"] = self.puzzle_embedding.weight
        return tensors

    def may_lack_gradient(self) -> set[str]:
        """Return the names of the trained parameters that some steps leave without a gradient."""
        return set()

    def compile_levels(self) -> None:
        """Compile each stack. The whole model would be compiled anew for every depth."""
        self.is_compiled = True
        compile_each(self.levels())

    def freeze(self, what: Literal["none", "blocks", "puzzle_table", "weights"]) -> None:
        """Let no gradient reach the blocks, the puzzle table, or all weights but the table."""
        for weight in {"blocks": self.block_weights(), "weights": list(self.parameters())}.get(what, []):
            weight.requires_grad_(False)
        if what == "puzzle_table" and self.puzzle_embedding is not None:
            self.puzzle_embedding.trainable = False


def compile_each(levels: Iterable[nn.Module]) -> None:
    """Compile levels with torch.compile, for all training steps of this process.

    Beyond a number of graphs, PyTorch would go on without compiling, with no more than a warning.
    Here that is an error.
    """
    from torch._dynamo import config, reset

    reset()  # graphs of a model that a rewind has replaced would count as well
    config.recompile_limit = max(config.recompile_limit, _MOST_GRAPHS)
    config.fail_on_recompile_limit_hit = True
    # That option splits a graph at each of DDP's buckets of 25 MB. A level of 54 MB would become
    # three graphs. DDP still sums the gradients of a level while others are computed.
    config.optimize_ddp = False
    for level in levels:
        level.compile()
