"""What models with a vector for each symbol in each cell share (SE-RRM, arXiv 2603.02193).

The symbols of a puzzle are an axis of the state, as its cells are. Networks that treat all symbols
alike give the same answer when the symbols are renamed.
"""

# B = slots, V = symbols (the vocabulary), S = cells (the tokens of a sequence), T = positions,
# D = hidden size, E = puzzle embedding size

import torch

from models.base import CommonConfig, RecursiveModel, SegmentOutput, State

NUM_SPECIAL = 2
"""How many of the first symbols have a meaning of their own: padding, and blank or end."""


class SymbolConfig(CommonConfig):
    """The options of every model of symbols; config/arch/_symbols.yaml explains each."""


class SymbolModel(RecursiveModel):
    """A model whose state has one vector for each symbol at each position: (V, T, D).

    The positions are the cells, and behind them the tokens that an architecture adds.
    """

    config: SymbolConfig

    def __init__(
        self,
        config: SymbolConfig,
        *,
        states: dict[str, str],
        puzzle_row_size: int,
        num_positions: int,
        seq_len: int,
        vocab_size: int,
        num_puzzle_identifiers: int,
    ) -> None:
        """Allocate what all models of puzzles have; the architecture adds everything else.

        Args:
            states, puzzle_row_size: as in the base class.
            num_positions: T.

        Raises:
            UserError: The positions don't suit the sequence.
        """
        self.num_positions = num_positions
        super().__init__(
            config,
            states=states,
            puzzle_row_size=puzzle_row_size,
            seq_len=seq_len,
            vocab_size=vocab_size,
            num_puzzle_identifiers=num_puzzle_identifiers,
        )

    @property
    def state_shape(self) -> tuple[int, ...]:
        return self.vocab_size, self.num_positions, self.config.hidden_size

    # The parts of a forward pass.

    def present(self, inputs_BS: torch.Tensor) -> torch.Tensor:
        """Return whether a cell of the question holds a symbol, bool (B, V, S)."""
        symbols_V = torch.arange(self.vocab_size, device=inputs_BS.device)
        return inputs_BS[:, None] == symbols_V[:, None]

    def with_confidence(self, logits_BSV: torch.Tensor, state: State) -> SegmentOutput:
        """Return the output of a segment of a model without a Q head, and the new state, detached.

        The confidence stands for the Q values.
        """
        q_halt_B = confidence_logit(logits_BSV)
        return {name: z.detach() for name, z in state.items()}, logits_BSV, q_halt_B, torch.zeros_like(q_halt_B)


@torch.no_grad()
def confidence_logit(logits_BSV: torch.Tensor) -> torch.Tensor:
    """Return the logit of the confidence in each answer, float32 (B,), without gradient.

    The confidence is the smallest over the cells of the largest softmax probability of a cell
    (the published code of SE-RRM). The logit of the largest probability p of a cell is its largest
    logit less the logsumexp of the others. That is finite also where p rounds to 1.
    """
    top = logits_BSV.float().max(-1, keepdim=True)
    others_BSV = logits_BSV.float().scatter(-1, top.indices, -torch.inf)
    return (top.values.squeeze(-1) - others_BSV.logsumexp(-1)).amin(-1)
