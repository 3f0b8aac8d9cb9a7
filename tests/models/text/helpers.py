"""Small text models for tests, and the whole model written out plainly for comparison."""

# N = tokens of the row, D = hidden size, A = heads, H = head size

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.text.block import PackedAttention, Stack
from models.text.config import (
    CallCounts,
    GPTConfig,
    HRMTextConfig,
    RINSTextConfig,
    TextConfig,
    TransformerTextConfig,
    TRMTextConfig,
    UTTextConfig,
)
from models.text.generation import Decoder
from models.text.model import TextModel
from models.text.stack_config import Sequences
from utils.batch import IGNORE_LABEL
from utils.command_line import read_config
from utils.config import name_of

VOCAB_SIZE = 11
SEQUENCES = [(4, 3), (1, 6), (2, 0), (1, 0), (5, 1)]
NUM_TOKENS = 25  # two places of padding

# What a small model changes in config/arch/<name>.yaml.
_SMALL: dict[str, Any] = {
    **{"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "expansion": 2.0, "width_multiple": 8},
    **{"attention": "prefixlm", "rope_theta": 100.0, "init_type": "lecun_normal", "init_std": None},
    **{"forward_dtype": "float32", "bp_warmup_ratio": 0.0},
}
_OWN: dict[type[TextConfig], dict[str, Any]] = {
    HRMTextConfig: {},
    TRMTextConfig: {"half_layers": True, "L_cycles": 2, "L_bp_steps": 2},
    UTTextConfig: {},
    RINSTextConfig: {"L_cycles": 3, "L_bp_cycles": 2},
    TransformerTextConfig: {},
    GPTConfig: {},
}
ARCHS = tuple(_OWN)


def make_config(config_class: type[TextConfig], **options: Any) -> TextConfig:
    values = _published(name_of(config_class))
    small = {key: value for key, value in _SMALL.items() if key in values}
    return config_class(**(values | small | _OWN[config_class] | options))


@cache
def _published(name: str) -> dict[str, Any]:
    return dict(read_config("pretrain", [f"arch={name}"])["arch"])


def make_model(config: TextConfig, seed: int = 0) -> TextModel:
    model = TextModel(config, vocab_size=VOCAB_SIZE)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def make_row(sequences: Sequences = SEQUENCES, num_tokens: int = NUM_TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    """Return random inputs, labels and the positions of a row. Only responses are labelled."""
    generator = torch.Generator().manual_seed(1)
    inputs_N, labels_N = torch.randint(VOCAB_SIZE, (2, num_tokens), generator=generator)
    positions_N, start = torch.zeros(num_tokens, dtype=torch.int64), 0
    inputs_N[sum(map(sum, sequences)) :] = 0
    for prefix, response in sequences:
        positions_N[start : start + prefix + response] = torch.arange(prefix + response)
        labels_N[start : start + prefix - 1] = IGNORE_LABEL
        start += prefix + response
    labels_N[start:] = IGNORE_LABEL
    return inputs_N, labels_N, positions_N


def sees(sequences: Sequences, num_tokens: int, mask: str) -> Tensor:
    """Return which token (row) sees which (column), bool (N, N), pair by pair."""
    visible_NN, start = torch.zeros(num_tokens, num_tokens, dtype=torch.bool), 0
    for prefix, response in sequences:
        for i in range(prefix + response):
            for j in range(prefix + response):
                visible_NN[start + i, start + j] = j <= i or (mask == "prefixlm" and j < prefix)
        start += prefix + response
    return visible_NN


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ends_q: Tensor,
    ends_k: Tensor,
    longest_q: int,
    longest_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> Tensor:
    """Compute what torch.nn.attention.varlen.varlen_attn computes on CUDA, sequence by sequence."""
    assert ends_q.dtype == ends_k.dtype == torch.int32 and window_size in ((-1, 0), (-1, -1))
    assert longest_q == int(ends_q.diff().max()) and longest_k == int(ends_k.diff().max())
    rows = []
    for (start_q, end_q), (start_k, end_k) in zip(
        ends_q.unfold(0, 2, 1).tolist(), ends_k.unfold(0, 2, 1).tolist(), strict=True
    ):
        visible = torch.ones(end_q - start_q, end_k - start_k, dtype=torch.bool)
        if window_size == (-1, 0):
            visible = visible.tril((end_k - start_k) - (end_q - start_q))
        one_q, one_k, one_v = (
            each.transpose(0, 1)[None] for each in (q[start_q:end_q], k[start_k:end_k], v[start_k:end_k])
        )
        y = F.scaled_dot_product_attention(one_q, one_k, one_v, attn_mask=visible, enable_gqa=enable_gqa)
        rows.append(y[0].transpose(0, 1))
    assert len(q) == int(ends_q[-1]) and len(k) == len(v) == int(ends_k[-1])
    return torch.cat(rows)


def _rotated(u_NH: Tensor, positions_N: Tensor, theta: float | None) -> Tensor:
    if theta is None:
        return u_NH
    half = u_NH.shape[1] // 2
    angles_NJ = positions_N.double().unsqueeze(1) * theta ** (-torch.arange(half).double() / half)
    turned_NJ = torch.complex(*u_NH.split(half, 1)) * torch.polar(torch.ones_like(angles_NJ), angles_NJ)
    return torch.cat([turned_NJ.real, turned_NJ.imag], 1)


def _attention(layer: PackedAttention, x_ND: Tensor, stack: Stack, positions_N: Tensor, visible_NN: Tensor) -> Tensor:
    shape = stack.shape
    head_dim, heads = shape.head_dim, shape.num_heads
    rows_N = list((x_ND @ layer.in_proj.weight.double().T).split(head_dim, dim=1))
    gates = [rows_N.pop(0) for _ in range(heads)] if shape.is_gated else None
    queries, rows_N = rows_N[:heads], rows_N[heads:]
    keys, values = rows_N[: shape.num_kv_heads], rows_N[shape.num_kv_heads :]
    outputs = []
    for head in range(heads):
        shared = head * shape.num_kv_heads // heads
        q_NH = _rotated(queries[head], positions_N, shape.rope_theta)
        k_NH = _rotated(keys[shared], positions_N, shape.rope_theta)
        scores_NN = (q_NH @ k_NH.T / math.sqrt(head_dim)).masked_fill(~visible_NN, -math.inf)
        weights_NN = scores_NN.softmax(-1).nan_to_num(0.0)  # padding sees nothing
        y_NH = weights_NN @ values[shared]
        outputs.append(y_NH if gates is None else gates[head].sigmoid() * y_NH)
    return torch.cat(outputs, 1) @ layer.o_proj.weight.double().T


def _mlp(layer: Any, x_ND: Tensor, kind: str) -> Tensor:
    if kind == "gelu":
        u = x_ND @ layer.up_proj.weight.double().T
        u = 0.5 * u * (1 + torch.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
    else:
        gate, up = (x_ND @ layer.gate_up_proj.weight.double().T).chunk(2, dim=-1)
        u = gate * gate.sigmoid() * up
    result: Tensor = u @ layer.down_proj.weight.double().T
    return result


def _norm(norm: Any, x_ND: Tensor, eps: float) -> Tensor:
    y_ND = x_ND / (x_ND.square().mean(-1, keepdim=True) + eps).sqrt()
    return y_ND if norm.weight is None else y_ND * norm.weight.double()


def plain_stack(stack: Stack, x_ND: Tensor, positions_N: Tensor, sequences: Sequences) -> Tensor:
    """Return the stack's output in float64, as section 2 of arXiv 2605.20613 says it."""
    shape = stack.shape
    visible_NN = sees(sequences, len(x_ND), shape.mask)
    for layer in stack.layers:
        block: Any = layer
        if shape.norm == "pre":
            normed = _norm(block.attn_norm, x_ND, shape.norm_eps)
            x_ND = x_ND + _attention(block.attn, normed, stack, positions_N, visible_NN)
            x_ND = x_ND + _mlp(block.mlp, _norm(block.mlp_norm, x_ND, shape.norm_eps), shape.mlp)
        else:
            mixed_ND = _attention(block.attn, x_ND, stack, positions_N, visible_NN)
            x_ND = _norm(block.attn_norm, x_ND + mixed_ND, shape.norm_eps)
            x_ND = _norm(block.mlp_norm, x_ND + _mlp(block.mlp, x_ND, shape.mlp), shape.norm_eps)
    return x_ND if stack.norm is None else _norm(stack.norm, x_ND, shape.norm_eps)


def plain_logits(
    model: TextModel, inputs_N: Tensor, positions_N: Tensor, sequences: Sequences, grad: CallCounts
) -> Tensor:
    """Return the logits in float64; each call keeps or drops its gradient by its own number."""
    config, stacks = model.config, model.stacks()
    H, L = stacks.get("H_level"), stacks.get("L_level")
    x_ND = config.embedding_scale * model.embed_tokens.weight.double()[inputs_N]

    def run(stack: Stack | None, keeps_gradient: bool, *inputs: Tensor) -> Tensor:
        assert stack is not None
        y_ND = plain_stack(stack, sum(inputs[1:], inputs[0]), positions_N, sequences)
        return y_ND if keeps_gradient else y_ND.detach()

    start_ND = model.zL_init.double().expand_as(x_ND) if model.has_state else x_ND
    match config:
        case HRMTextConfig() | TRMTextConfig():
            z_H, z_L = x_ND, start_ND
            for i in range(config.H_cycles):
                for k in range(i * config.L_cycles, (i + 1) * config.L_cycles):
                    z_L = run(L, k >= config.H_cycles * config.L_cycles - grad.L, z_L, z_H)
                z_H = run(H or L, i >= config.H_cycles - grad.H, z_H, z_L)
            y_ND = z_H
        case UTTextConfig():
            y_ND = start_ND
            for k in range(config.cycles):
                y_ND = run(L, k >= config.cycles - grad.L, y_ND, x_ND)
        case RINSTextConfig():
            z = start_ND
            for k in range(config.L_cycles):
                z = run(L, k >= config.L_cycles - grad.L, z, x_ND)
            y_ND = run(H, True, z)
        case _:
            y_ND = run(stacks["level"], True, x_ND)
    head = model.embed_tokens if model.lm_head is None else model.lm_head
    return y_ND @ head.weight.double().T


def greedy(model: TextModel, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the most likely next tokens (B, num_tokens), and the logits (B, num_tokens, V)."""
    decoder = Decoder(model, prompts, most_new_tokens=num_tokens)
    logits, tokens = [decoder.read_prompts()], list[Tensor]()
    while True:
        tokens.append(logits[-1].argmax(-1))
        if len(tokens) == num_tokens:
            return torch.stack(tokens, 1), torch.stack(logits, 1)
        logits.append(decoder.next_logits(tokens[-1]))
