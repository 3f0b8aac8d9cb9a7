"""The text models (arXiv 2605.20613): embedding, recursion and head."""

# N = tokens of the row, D = hidden size, V = vocabulary

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import record_function

from models.attention import Rotary
from models.block import recomputed
from models.layers import Embedding, InitialValues, Linear, modulo_normal
from models.model import DTYPES, Checkpointing, Model
from models.text.block import Attends, Stack, TextBlock
from models.text.config import (
    LONGEST_RUN,
    CallCounts,
    HRMTextConfig,
    RINSTextConfig,
    Role,
    TextConfig,
    TRMTextConfig,
    UTTextConfig,
)
from models.text.losses import chunked_cross_entropy
from models.text.packing import Packing
from utils.perf.recording import NO_GRAD


class TextModel(Model):
    """A language model whose forward pass is the loss of one packed row."""

    config: TextConfig
    block_class, level_class = TextBlock, Stack
    zL_init: Tensor
    forward_methods = ("next_logits",)

    def __init__(self, config: TextConfig, *, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        assert config.forward_dtype != "auto", "training/precision.py chooses before a model is built"
        self.dtype = DTYPES[config.forward_dtype]
        self.vocab_size = vocab_size
        self.embed_tokens = Embedding(vocab_size, config.hidden_size)
        for name, shape in config.stacks.items():
            self.add_module(name, Stack.of_shape(shape))
        self.has_state = config.num_calls.L > 0
        if self.has_state:
            # bfloat16 as in the published checkpoints. It is drawn once and never trained.
            self.register_buffer("zL_init", torch.empty(config.hidden_size, dtype=torch.bfloat16))
        self.lm_head = None if config.tied_head else Linear(config.hidden_size, vocab_size)

    def initial_values(self, generator: torch.Generator) -> InitialValues:
        stacks = self.stacks()
        for stack in stacks.values():
            yield from stack.initial_values(generator)
        outer_std = next(iter(stacks.values())).shape.stds.inner  # of the H stack, if there are two
        yield self.embed_tokens.weight, modulo_normal(self.embed_tokens.weight.shape, outer_std, generator)
        if self.lm_head is not None:
            yield self.lm_head.weight, modulo_normal(self.lm_head.weight.shape, outer_std, generator)
        if self.has_state:
            yield self.zL_init, modulo_normal(self.zL_init.shape, 1.0, generator)

    def stacks(self) -> dict[str, Stack]:
        return {name: module for name, module in self.named_children() if isinstance(module, Stack)}

    def may_lack_gradient(self) -> set[str]:
        """As in the base class: the embedding, whose gradient comes through the first calls."""
        reached = self.config.embedding_has_gradient(self.config.grad_calls_at(1, LONGEST_RUN))
        return set() if self.lm_head is None or reached else {"embed_tokens.weight"}

    def forward(
        self, inputs_N: Tensor, labels_N: Tensor, positions_N: Tensor, packing: Packing, *, grad_calls: CallCounts
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `chunked_cross_entropy` returns of a row.

        The loss needs the weights of the head, which a strategy may gather for the forward pass.

        Args:
            positions_N: counted from 0 in each sequence.
            grad_calls: how many of the last calls in each role carry gradient.
        """
        return self.losses(self.hidden(inputs_N, positions_N, packing, grad_calls), labels_N)

    def embed(self, inputs_N: Tensor) -> Tensor:
        return (self.config.embedding_scale * self.embed_tokens(inputs_N)).to(self.dtype)

    def losses(self, y_ND: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return chunked_cross_entropy(y_ND, labels_N, self.logits, vocab_size=self.vocab_size)

    def hidden(self, inputs_N: Tensor, positions_N: Tensor, tokens: Attends, grad_calls: CallCounts) -> Tensor:
        """Return what the head reads, (N, D). `tokens` are sequences of the row, or a cache."""
        return self._recurse(self.embed(inputs_N), _Calls(self, grad_calls, positions_N, tokens))

    def next_logits(self, inputs_N: Tensor, positions_N: Tensor, tokens: Attends, places_B: Tensor) -> Tensor:
        """Return the logits (B, V) after the tokens at these places. No call carries gradient."""
        return self.logits(self.hidden(inputs_N, positions_N, tokens, CallCounts(H=0, L=0))[places_B])

    def logits(self, y_ND: Tensor) -> Tensor:
        if self.lm_head is None:
            return F.linear(y_ND, self.embed_tokens.weight.to(y_ND.dtype))
        return self.lm_head(y_ND)

    def _recurse(self, x_ND: Tensor, call: "_Calls") -> Tensor:
        match self.config:
            case HRMTextConfig() | TRMTextConfig():
                z_H_ND, z_L_ND = x_ND, self._start(x_ND)
                for _ in range(self.config.H_cycles):
                    for _ in range(self.config.L_cycles):
                        z_L_ND = call("L", z_L_ND, z_H_ND)
                    z_H_ND = call("H", z_H_ND, z_L_ND)
                return z_H_ND
            case UTTextConfig():
                z_ND = self._start(x_ND)
                for _ in range(self.config.cycles):
                    z_ND = call("L", z_ND, x_ND)
                return z_ND
            case RINSTextConfig():
                z_ND = self._start(x_ND)
                for _ in range(self.config.L_cycles):
                    z_ND = call("L", z_ND, x_ND)
                return call("H", z_ND)
            case _:
                return call("H", x_ND)

    def _start(self, x_ND: Tensor) -> Tensor:
        return self.zL_init.to(x_ND.dtype).expand_as(x_ND)


class _Calls:
    """Calls the stacks of one forward pass. Only the last calls in each role carry gradient."""

    def __init__(self, model: TextModel, grad_calls: CallCounts, positions_N: Tensor, tokens: Attends) -> None:
        stacks, self._tokens = model.stacks(), tokens
        self._checkpointing: Checkpointing = model.config.activation_checkpointing
        num_calls = model.config.num_calls
        self._left: dict[Role, int] = {"H": num_calls.H, "L": num_calls.L}
        self._num_grad_calls: dict[Role, int] = {"H": grad_calls.H, "L": grad_calls.L}
        # A model with one stack uses it in both roles.
        self._stacks: dict[Role, Stack] = {
            "H": stacks.get("H_level") or next(iter(stacks.values())),
            "L": stacks.get("L_level") or next(iter(stacks.values())),
        }
        self._rotary = {stack: stack.rotary(positions_N) for stack in set(self._stacks.values())}

    def __call__(self, role: Role, *inputs_ND: Tensor) -> Tensor:
        self._left[role] -= 1
        assert self._left[role] >= 0, f"the recursion makes more calls of {role} than num_calls of its config says"
        stack = self._stacks[role]
        rotary = self._rotary[stack]
        if not torch.is_grad_enabled() or self._left[role] >= self._num_grad_calls[role]:
            with record_function(NO_GRAD), torch.no_grad():
                # The compiler makes another graph for inputs that require a gradient.
                y_ND: Tensor = stack(*(x_ND.detach() for x_ND in inputs_ND), rotary=rotary, tokens=self._tokens)
                return y_ND
        return call_stack(stack, *inputs_ND, rotary=rotary, tokens=self._tokens, keep=self._checkpointing)


def call_stack(stack: Stack, *inputs_ND: Tensor, rotary: Rotary | None, tokens: Attends, keep: Checkpointing) -> Tensor:
    """Return what the stack makes of the sum of the inputs, for a backward pass."""
    if keep == "cycle":
        return recomputed(stack, functools.reduce(torch.add, inputs_ND), rotary=rotary, tokens=tokens)
    y_ND: Tensor = stack(*inputs_ND, rotary=rotary, tokens=tokens, keep_inputs_only=keep == "block")
    return y_ND
