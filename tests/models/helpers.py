"""Build small models for tests, and write their layers out plainly with loops for comparison."""

# B = batch, S = tokens, T = positions (prefix and tokens), D = hidden size, H = head size,
# W = width of an MLP

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from pydantic import TypeAdapter
from torch import Tensor
from torch.overrides import TorchFunctionMode

from models import ARCHS, ArchConfig, build_arch
from models.act import ActSettings
from models.attention import Attention
from models.base import RecursiveModel
from models.block import Block, Level
from models.carry import SegmentOutput, State
from models.depth import Depth
from models.hrm import HRM
from models.layers import BoardConv, ConvSwiGLU, NormalizedSwiGLU, SwiGLU
from models.symbols import NUM_SPECIAL
from models.tokens import TokenConfig, TokenModel
from training.kernels import why_fp8_fails
from utils.batch import Batch
from utils.command_line import read_config
from utils.config import name_of
from utils.config_files import CONFIG_DIR

SEQ_LEN, VOCAB_SIZE, NUM_PUZZLES = 9, 7, 5  # SEQ_LEN is a square, because rope_2d needs a grid

PUZZLE_ARCHS = tuple(arch for arch in ARCHS if arch.kind == "puzzles")
# Those with one vector per token. test_se_rrm.py and test_se_mixer.py are about the others.
ARCH_NAMES = tuple(name_of(arch) for arch in PUZZLE_ARCHS if issubclass(arch, TokenConfig))

WHY_NO_FP8 = why_fp8_fails(torch.device("cpu"), torch.float32)
needs_fp8 = pytest.mark.skipif(WHY_NO_FP8 is not None, reason=f"no FP8 on this CPU: {WHY_NO_FP8}")

# What a small model changes in config/arch/<name>.yaml. Each number is the largest for its option.
_LARGEST = {
    "hidden_size": 32,
    "num_heads": 2,
    "puzzle_emb_ndim": 32,
    "puzzle_emb_len": 3,
    "H_cycles": 2,
    "L_cycles": 2,
    "halt_max_steps": 4,
    **{name: 1 for arch in PUZZLE_ARCHS for name in arch.model_fields if name.endswith("_layers")},
}
_FIXED = {"forward_dtype": "float32", "halt_exploration_prob": 0.0}

# What makes an architecture repeat its networks, where its YAML file does not.
RECURRENT: dict[str, dict[str, Any]] = {"transformer": {"recurrent": True, "halt_max_steps": 4}}


def arch_files(kind: str) -> list[str]:
    """Return the names of the files in config/arch that are of a kind of architecture."""

    def name_in(file: str) -> str:
        values = yaml.safe_load((CONFIG_DIR / f"arch/{file}.yaml").read_text())
        return str(values["name"]) if "name" in values else name_in(values["defaults"][0])

    names = {name_of(arch) for arch in ARCHS if arch.kind == kind}
    files = sorted(path.stem for path in (CONFIG_DIR / "arch").glob("[!_]*.yaml"))
    return [file for file in files if name_in(file) in names]


def small_options(name: str = "hrm", **changes: Any) -> dict[str, Any]:
    """Return the options of the architecture's YAML file, with sizes that take no time."""
    options = read_config("pretrain", [f"arch={name}"])["arch"]
    small = {key: min(options[key], largest) for key, largest in _LARGEST.items() if key in options}
    return options | small | _FIXED | changes


def small_config(name: str = "hrm", **changes: Any) -> TokenConfig:
    config = TypeAdapter[ArchConfig](ArchConfig).validate_python(small_options(name, **changes))
    assert isinstance(config, TokenConfig)
    return config


def build_puzzle_arch(config: ArchConfig, **sizes: int) -> RecursiveModel:
    """As `build_arch`, for code that knows that the architecture is one of puzzles."""
    model = build_arch(config, **sizes)
    assert isinstance(model, RecursiveModel)
    return model


def blank_model(name: str = "hrm", *, seq_len: int = SEQ_LEN, **changes: Any) -> TokenModel:
    config = small_config(name, **changes)
    model = build_puzzle_arch(config, seq_len=seq_len, vocab_size=VOCAB_SIZE, num_puzzle_identifiers=NUM_PUZZLES)
    assert isinstance(model, TokenModel)
    return model


def small_symbol_model(name: str, *, seed: int = 0, **changes: Any) -> RecursiveModel:
    """Return a se_rrm or a se_mixer, initialised. A board has as many symbols as its side."""
    config = TypeAdapter[ArchConfig](ArchConfig).validate_python(small_options(name, **changes))
    vocab_size = math.isqrt(SEQ_LEN) + NUM_SPECIAL
    model = build_puzzle_arch(config, seq_len=SEQ_LEN, vocab_size=vocab_size, num_puzzle_identifiers=NUM_PUZZLES)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def small_model(name: str = "hrm", *, seed: int = 0, **changes: Any) -> TokenModel:
    """Return an initialised model. Its Q head and puzzle rows are not zero, so that they matter."""
    model = blank_model(name, **changes)
    generator = torch.Generator().manual_seed(seed)
    model.init_weights(generator)
    with torch.no_grad():
        model.q_head.weight.normal_(generator=generator)
        assert model.q_head.bias is not None
        model.q_head.bias.zero_()
        if model.puzzle_embedding is not None:
            model.puzzle_embedding.weight.normal_(generator=generator)
    return model


def small_hrm(*, seed: int = 0, **changes: Any) -> HRM:
    model = small_model("hrm", seed=seed, **changes)
    assert isinstance(model, HRM)
    return model


# Other processors, and other batches, change logits and losses of the small models by about 1e-6.
MARGIN = 1e-4


class Margins(TorchFunctionMode):
    """Note as `least` how narrowly decisions inside fall: argmax, argmin and a > b."""

    _ORDERS = (Tensor.__gt__, Tensor.__ge__, Tensor.__lt__, Tensor.__le__)

    def __init__(self) -> None:
        super().__init__()
        self.least = math.inf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = args[0] if args else None
        if isinstance(values, Tensor) and values.is_floating_point() and values.numel():
            if func in (Tensor.argmax, Tensor.argmin) and values.shape[args[1]] > 1:
                best, second = values.detach().topk(2, args[1], largest=func is Tensor.argmax).values.unbind(args[1])
                self._note(best - second)
            elif func in self._ORDERS:
                self._note(values.detach() - args[1])
        return func(*args, **(kwargs or {}))

    def _note(self, distances: Tensor) -> None:
        self.least = min([self.least, *distances[distances != 0].abs().flatten().tolist()])


def seed_with(condition: Callable[[int], bool], what: str) -> int:
    """Return the first seed that meets a condition by decisions that rounding can't change.

    Versions of PyTorch draw other numbers from the same seed, and processors round differently. So
    all decisions that the condition computes must have a `MARGIN`.
    """
    for seed in range(200):
        with Margins() as margins:
            met = condition(seed)
        if met and margins.least >= MARGIN:
            return seed
    raise AssertionError(f"of 200 seeds none gives {what} by a margin of {MARGIN}, so the test would prove nothing")


def in_training(model: RecursiveModel, **options: Any) -> ActSettings:
    """Return the settings of a training step, of the whole depth unless the options say else."""
    return ActSettings(**{"depth": model.config.depth, "global_batch_size": 1, **options})


def random_batch(batch_size: int, *, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    shape = (2, batch_size, SEQ_LEN)
    inputs_BS, labels_BS = torch.randint(vocab_size, shape, generator=generator, dtype=torch.int32)
    ids_B = torch.randint(NUM_PUZZLES, (batch_size,), generator=generator, dtype=torch.int32)
    return {"inputs": inputs_BS, "labels": labels_BS, "puzzle_identifiers": ids_B}


def fresh_state(model: RecursiveModel, batch_size: int) -> State:
    state = model.initial_state(batch_size, torch.device("cpu"))
    return model.reset(state, torch.ones(batch_size, dtype=torch.bool))


def _rows(model: RecursiveModel, batch: Batch) -> Tensor | None:
    table = model.puzzle_embedding
    return None if table is None else table.rows(batch["puzzle_identifiers"])


def embedded(model: TokenModel, batch: Batch) -> Tensor:
    return model.embed(batch["inputs"], _rows(model, batch))


def run(
    model: RecursiveModel, batch: Batch, *, state: State | None = None, depth: Depth | None = None
) -> SegmentOutput:
    """Run one segment. The default is a fresh state and the full depth."""
    state = fresh_state(model, len(batch["inputs"])) if state is None else state
    return model(state, batch["inputs"], _rows(model, batch), depth or model.config.depth)


def gradients_of(model: RecursiveModel, output: SegmentOutput) -> dict[str, Tensor]:
    """Return the gradients of a loss that uses every output, by parameter name."""
    _, logits_BSV, q_halt_B, q_continue_B = output
    model.zero_grad()
    (logits_BSV.float().square().sum() + (q_halt_B - 2 * q_continue_B).sum()).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def naive_rms(x: Tensor) -> Tensor:
    x = x.double()
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


def naive_mlp(layer: SwiGLU, x_TD: Tensor) -> Tensor:
    gate_up, down = layer.gate_up_proj.weight.double(), layer.down_proj.weight.double()
    width = down.shape[1]
    previous_W = torch.zeros(width, dtype=torch.float64)
    rows = []
    for x_D in x_TD.double():
        gate_W, up_W = gate_up[:width] @ x_D, gate_up[width:] @ x_D
        if isinstance(layer, NormalizedSwiGLU):
            inner_W = naive_rms(gate_W * up_W) / (1 + torch.exp(-gate_W))
        elif isinstance(layer, ConvSwiGLU):
            here_W = F.silu(gate_W) * up_W
            weight_W12 = layer.conv_weight_W12.double()
            bias_W = 0 if layer.conv_bias_W is None else layer.conv_bias_W.double()
            inner_W = F.silu(weight_W12[:, 0, 0] * previous_W + weight_W12[:, 0, 1] * here_W + bias_W)
            previous_W = here_W
        else:
            inner_W = F.silu(gate_W) * up_W
        rows.append(down @ inner_W)
    return torch.stack(rows)


def naive_rotate(x_H: Tensor, position: int, theta: float) -> Tensor:
    """Rotate one vector.

    Multiply the complex numbers x[i] + 1j x[i + H/2] by exp(1j position theta^(-2i/H)).
    """
    x_H, half = x_H.detach(), len(x_H) // 2
    out = x_H.double().clone()
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x_H))
        turned = complex(x_H[i], x_H[i + half]) * complex(math.cos(angle), math.sin(angle))
        out[i], out[i + half] = turned.real, turned.imag
    return out


def naive_attention(layer: Attention, x_TD: Tensor, theta: float | None) -> Tensor:
    num_positions, hidden_size = x_TD.shape
    head_dim = hidden_size // layer.num_heads
    projected = x_TD.double() @ layer.qkv_proj.weight.double().T
    heads = []
    for head in range(layer.num_heads):
        columns = slice(head * head_dim, (head + 1) * head_dim)
        q, k, v = (projected[:, part * hidden_size : (part + 1) * hidden_size][:, columns] for part in range(3))
        if theta is not None:
            q = torch.stack([naive_rotate(q[t], t, theta) for t in range(num_positions)])
            k = torch.stack([naive_rotate(k[t], t, theta) for t in range(num_positions)])
        scores = (q @ k.T) / math.sqrt(head_dim)
        heads.append((scores.exp() / scores.exp().sum(-1, keepdim=True)) @ v)
    return torch.cat(heads, dim=-1) @ layer.o_proj.weight.double().T


def naive_board_conv(layer: BoardConv, x_TD: Tensor) -> Tensor:
    """Return the sum over the neighbours of each cell. Positions before the board get the mean."""
    prefix, side = layer.prefix_len, math.isqrt(len(x_TD) - layer.prefix_len)
    board = x_TD[prefix:].double().view(side, side, -1)
    out = torch.zeros_like(board)
    for row, column in itertools.product(range(side), repeat=2):
        for down, right in itertools.product((-1, 0, 1), repeat=2):
            if 0 <= row + down < side and 0 <= column + right < side:
                weight_D = layer.weight_D33[:, down + 1, right + 1].double()
                out[row, column] += weight_D * board[row + down, column + right]
    return torch.cat([board.mean((0, 1)).expand(prefix, -1), out.flatten(0, 1)])


def naive_block(block: Block, x_TD: Tensor, theta: float | None) -> Tensor:
    if block.conv_2d is not None:
        mixed_TD = naive_rms(x_TD.double() + naive_board_conv(block.conv_2d, x_TD))
    elif block.mlp_t is not None:
        mixed_TD = naive_rms(x_TD.T.double() + naive_mlp(block.mlp_t, x_TD.T)).T
    else:
        assert block.self_attn is not None
        mixed_TD = naive_rms(x_TD.double() + naive_attention(block.self_attn, x_TD, theta))
    return naive_rms(mixed_TD + naive_mlp(block.mlp, mixed_TD))


def naive_level(level: Level, theta: float | None) -> Callable[[Tensor], Tensor]:
    """Return the stack of blocks as a function of z_TD, in float64 and without gradient."""

    @torch.no_grad()
    def apply(z_TD: Tensor) -> Tensor:
        for block in level.layers:
            assert isinstance(block, Block)
            z_TD = naive_block(block, z_TD, theta)
        return z_TD

    return apply


def naive_read_out(model: TokenModel, z_TD: Tensor) -> tuple[Tensor, Tensor]:
    assert model.q_head.bias is not None
    logits_SV = z_TD[model.prefix_len :] @ model.lm_head.weight.double().T
    return logits_SV, model.q_head.weight.double() @ z_TD[0] + model.q_head.bias.double()
