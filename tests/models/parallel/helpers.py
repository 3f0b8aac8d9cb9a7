"""Train small models for some steps under any strategy, and collect the results."""

# B = slots, S = tokens

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from pydantic import TypeAdapter
from torch import Tensor
from torch.distributed.tensor import DTensor

from models import build_on_meta
from models.act import ActSettings, draw_min_halt_steps, initial_carry
from models.base import RecursiveModel
from models.carry import Carry
from models.model import Model
from models.parallel import ParallelConfig, parallelize
from models.parallel.layout import Compiled, Layout
from optim.sparse_sign_sgd import sparse_sign_sgd_
from records.checkpoint.weights import gathered, own_parts, plan_of
from tests.models.helpers import NUM_PUZZLES, SEQ_LEN, VOCAB_SIZE, random_batch, small_model
from tests.utils.ranks.helpers import dist_config
from utils.batch import IGNORE_LABEL, Batch
from utils.ranks.setup import connect_devices
from utils.ranks.world import World

CONFIGS = Path(__file__).resolve().parents[3] / "config" / "parallel"
BATCH, NUM_STEPS, LR, TABLE_LR = 8, 3, 0.05, 0.01
DIST = dist_config(timeout_s=60.0)


def config_of(name: str, **changes: Any) -> ParallelConfig:
    options = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    return TypeAdapter[ParallelConfig](ParallelConfig).validate_python({**options, **changes})


KEYS = {path.stem: yaml.safe_load(path.read_text()).keys() - {"name"} for path in CONFIGS.glob("*.yaml")}


def model_of(arch: str, **changes: Any) -> RecursiveModel:
    return small_model(arch, num_heads=4, **changes)


def batch_at(step: int) -> Batch:
    batch = random_batch(BATCH, seed=100 + step)
    batch["labels"].masked_fill_(batch["labels"] == 0, IGNORE_LABEL)
    return batch


@dataclass
class Found:
    """The results of the steps of a run, gathered into the form that one process would have."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)
    carry: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def whole(layout: Layout, name: str, tensor: Tensor) -> Tensor:
    portable = layout.to_portable(name, tensor)
    return (portable.full_tensor() if isinstance(portable, DTensor) else portable).detach().clone()


def whole_weights(layout: Layout, world: World) -> dict[str, Tensor]:
    """Return the state dict that one process would have; {} on other ranks than 0. Every rank."""
    weights = layout.portable_weights()
    plan = plan_of(weights, world)
    own = {name: tensor.detach().clone() for name, tensor in own_parts(plan, weights, world.rank).items()}
    found = dict(zip(plan, gathered(plan, own, world), strict=True))
    return found if world.is_main else {}


def start(model: Model, world: World) -> Carry:
    assert isinstance(model, RecursiveModel)
    mine = world.slice_of(BATCH)
    return initial_carry(model, {name: tensor[mine] for name, tensor in batch_at(0).items()})


def train(
    layout: Layout,
    world: World,
    carry: Carry,
    steps: range,
    *,
    clip: float | None = None,
    loss_scale: float = 1.0,
) -> tuple[Carry, Found]:
    """Train some steps by plain SGD as pretrain.py does. Return the last carry and the results."""
    model, mine, found = layout.model, world.slice_of(BATCH), Found()
    assert isinstance(model, RecursiveModel)
    config = model.config
    for step in steps:
        minimum_B = draw_min_halt_steps(0, step, BATCH, 0.5, config.halt_max_steps)[mine]
        new_carry, outputs, sums = layout.forward_backward(
            carry,
            {name: tensor[mine] for name, tensor in batch_at(step).items()},
            ActSettings(config.depth, BATCH, minimum_B),
            loss_scale=loss_scale,
        )
        assert new_carry is not None
        carry = new_carry
        layout.require_gradients()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= loss_scale
        found.norms.append(layout.grad_norm())
        if clip is not None:
            layout.clip_(clip, found.norms[-1])
        found.sums.append(world.sum_(sums))
        found.gradients.append(
            {name: whole(layout, name, p.grad) for name, p in model.named_parameters() if p.grad is not None}
        )
        table = model.puzzle_embedding
        if table is not None and table.trainable:
            sparse_sign_sgd_(
                table.weight,
                carry.current["puzzle_identifiers"],
                torch.cat([part.puzzle_rows_BE.grad for part in outputs]),  # type: ignore[union-attr, misc]
                lr=TABLE_LR,
                weight_decay=0.1,
                num_slots=BATCH,
                world=world,
            )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(LR * parameter.grad)
        model.zero_grad()
    found.carry = {
        name: world.gather_rows(tensor.int() if tensor.dtype == torch.bool else tensor, BATCH)
        for name, tensor in carry.tensors().items()
    }
    found.weights = whole_weights(layout, world)
    return carry, found


def layout_of(
    world: World,
    name: str,
    arch: str = "hrm",
    num_parts: int = 1,
    *,
    freeze: Any = "none",
    compile: Compiled = False,
    **options: Any,
) -> tuple[Layout, World]:
    config = config_of(name, **{key: options.pop(key) for key in list(options) if key in KEYS[name]})
    world = connect_devices(world, "cpu", DIST, axes=config.axes(world.size))
    whole = model_of(arch, **options)
    sizes = {"seq_len": SEQ_LEN, "vocab_size": VOCAB_SIZE, "num_puzzle_identifiers": NUM_PUZZLES}
    model = build_on_meta(whole.config, **sizes)
    assert isinstance(model, RecursiveModel)
    model.freeze(freeze)
    layout = parallelize(model, config, world, num_microbatches=num_parts, compile=compile)
    layout.load(whole.state_dict().items())
    return layout, world


def by_one_process(arch: str, *, freeze: Any = "none", clip: float | None = None, **changes: Any) -> Found:
    world, model = World.single(), model_of(arch, **changes)
    model.freeze(freeze)
    layout: Layout = Layout(model, world)
    return train(layout, world, start(model, world), range(NUM_STEPS), clip=clip)[1]


def close(found: Tensor, expected: Tensor, what: str, tolerance: float = 1e-4) -> None:
    error, scale = (found.double() - expected.double()).abs().max().item(), expected.double().abs().max().item()
    assert error <= tolerance * scale, f"{what} differs by {error:.2g}, its largest component is {scale:.2g}"
