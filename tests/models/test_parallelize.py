"""Every strategy gives the gradients of one process, for any number of ranks (CPU, gloo). One spawn for each number of
ranks runs all of them.
"""

# B = slots, S = tokens, K = rows of the puzzle table, E = their size

import gc
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import yaml
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.act import Batch, Carry, draw_min_halt_steps, initial_carry
from models.base import RecursiveModel
from models.layout import Layout
from models.losses import Outputs, act_loss
from models.parallelize import ParallelConfig, _shard_table, parallelize
from optim.sparse_sign_sgd import sparse_sign_sgd_
from tests.models.helpers import NUM_PUZZLES, SEQ_LEN, VOCAB_SIZE, small_model
from tests.spawn import run_ranks
from utils.dist.config import Axes, DistConfig
from utils.dist.setup import use_device
from utils.dist.world import World
from utils.errors import UserError

CONFIGS = Path(__file__).resolve().parents[2] / "config" / "parallel"
BATCH, NUM_STEPS, LR, TABLE_LR = 8, 3, 0.05, 0.01
DIST = DistConfig(backend="auto", init_method="env", timeout_s=60.0, num_threads=None, rank_weights=[])


def config_of(name: str, **changes: Any) -> ParallelConfig:
    options = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    return TypeAdapter[ParallelConfig](ParallelConfig).validate_python({**options, **changes})


KEYS = {path.stem: yaml.safe_load(path.read_text()).keys() - {"name"} for path in CONFIGS.glob("*.yaml")}


def model_of(arch: str, **changes: Any) -> RecursiveModel:
    return small_model(arch, num_heads=4, **changes)


def _batch(step: int) -> Batch:
    generator = torch.Generator().manual_seed(100 + step)

    def integers(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    return {
        "inputs": integers(VOCAB_SIZE, BATCH, SEQ_LEN),
        "labels": integers(VOCAB_SIZE, BATCH, SEQ_LEN),
        "puzzle_identifiers": integers(NUM_PUZZLES, BATCH),
    }


@dataclass
class Found:
    """What the steps of a run gave, as one process would have it."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    sums: list[Tensor] = field(default_factory=list)
    carry: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)


def _whole(layout: Layout, name: str, tensor: Tensor) -> Tensor:
    portable = layout.to_portable(name, tensor)
    return (portable.full_tensor() if isinstance(portable, DTensor) else portable).detach().clone()


def start(model: RecursiveModel, world: World) -> Carry:
    mine = world.slice_of(BATCH)
    return initial_carry(model, {name: tensor[mine] for name, tensor in _batch(0).items()})


def train(
    layout: Layout, world: World, carry: Carry, steps: range, *, clip: float | None = None
) -> tuple[Carry, Found]:
    """Steps of plain SGD, with the carry going round."""
    model, mine, found = layout.model, world.slice_of(BATCH), Found()
    config = model.config

    def loss_of(outputs: Outputs, carry: Carry) -> tuple[Tensor, Tensor]:
        loss, sums = act_loss(
            outputs,
            carry.current["labels"],
            halted_B=carry.halted_B,
            steps_B=carry.steps_B,
            config=config.loss,
            ignore_label=0,
        )
        return loss / BATCH, sums

    for step in steps:
        carry, outputs, sums = layout.gradients(
            carry,
            {name: tensor[mine] for name, tensor in _batch(step).items()},
            depth=config.depth,
            min_halt_steps_B=draw_min_halt_steps(0, step, BATCH, 0.5, config.halt_max_steps)[mine],
            loss_of=loss_of,
        )
        found.norms.append(layout.grad_norm())
        if clip is not None:
            layout.clip_(clip, found.norms[-1])
        found.sums.append(world.sum_(sums))
        found.gradients.append(
            {name: _whole(layout, name, p.grad) for name, p in model.named_parameters() if p.grad is not None}
        )
        table = model.puzzle_embedding
        assert table is not None
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
    found.weights = layout.whole_weights()
    return carry, found


def _layout(world: World, name: str, arch: str = "hrm", num_parts: int = 1, **options: Any) -> tuple[Layout, World]:
    """Options of the architecture are those that the strategy doesn't know."""
    config = config_of(name, **{key: options.pop(key) for key in list(options) if key in KEYS[name]})
    world = use_device(world, "cpu", DIST, axes=config.axes(world.size))
    return parallelize(model_of(arch, **options), config, world, num_microbatches=num_parts), world


def _by_one_process(arch: str, **changes: Any) -> Found:
    world = World.single()
    layout = Layout(model_of(arch, **changes), world)
    return train(layout, world, start(layout.model, world), range(NUM_STEPS))[1]


def _close(found: Tensor, expected: Tensor, what: str, tolerance: float = 1e-4) -> None:
    error, scale = (found.double() - expected.double()).abs().max().item(), expected.double().abs().max().item()
    assert error <= tolerance * scale, f"{what} is off by {error:.2g} of {scale:.2g}"


def _same(found: Found, expected: Found, case: str, is_main: bool) -> None:
    for step, (gradients, norm, sums) in enumerate(zip(expected.gradients, expected.norms, expected.sums, strict=True)):
        assert found.gradients[step].keys() == gradients.keys(), case
        for name, gradient in gradients.items():
            tolerance = 1e-3 if step else 3e-5  # what rounding has done to the weights adds up
            _close(found.gradients[step][name], gradient, f"{case}: gradient of {name} in step {step}", tolerance)
        _close(found.norms[step], norm, f"{case}: norm in step {step}")
        _close(found.sums[step], sums, f"{case}: sums in step {step}")
    for name, tensor in expected.carry.items():
        _close(found.carry[name], tensor, f"{case}: {name} of the carry")
    if is_main:
        assert list(found.weights) == list(expected.weights), case
        for name, tensor in expected.weights.items():
            _close(found.weights[name], tensor, f"{case}: {name}")


CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("ddp", "hrm", 2, {}),
    ("fsdp", "trm", 1, {"puzzle_table": "sharded"}),
    ("hsdp", "trm", 1, {}),
    ("tp", "hrm", 1, {}),
    ("fsdp_tp", "hrm", 1, {"activation_checkpointing": "cycle"}),
]
MORE_CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("ddp", "trm", 1, {"puzzle_table": "sharded", "find_unused_parameters": True}),
    ("ddp", "hrm", 2, {"static_graph": True, "gradient_as_bucket_view": False, "activation_checkpointing": "block"}),
    ("fsdp", "trm", 2, {"activation_checkpointing": "cycle"}),
    ("fsdp", "hrm", 1, {"reshard_after_forward": False, "activation_checkpointing": "block"}),
    ("tp", "trm", 2, {"activation_checkpointing": "block"}),
    ("tp", "trm", 1, {"mlp_t": True}),
    ("fsdp_tp", "trm", 2, {"puzzle_table": "sharded"}),
]


def _check_all(world: World, cases: list[tuple[str, str, int, dict[str, Any]]]) -> list[str]:
    wrong, expected = [], {}
    for name, arch, num_parts, options in cases:
        case = f"{name} {options} of {arch} in {num_parts} parts on {world.size} ranks"
        mlp_t = options.get("mlp_t", False)
        if (arch, mlp_t) not in expected:
            expected[arch, mlp_t] = _by_one_process(arch, mlp_t=mlp_t)
        layout, its_world = _layout(world, name, arch, num_parts, **options)
        _, found = train(layout, its_world, start(layout.model, its_world), range(NUM_STEPS))
        try:
            _same(found, expected[arch, mlp_t], case, world.is_main)
        except AssertionError as error:
            wrong.append(str(error))
    return wrong


# On 4 ranks tests/test_parallel.py trains the whole program.
@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [(1, CASES), (2, [*CASES, *MORE_CASES]), pytest.param(4, CASES, marks=pytest.mark.slow)],
)
def test_every_strategy_has_the_gradients_of_one_process(
    num_ranks: int, cases: list[tuple[str, str, int, dict[str, Any]]]
) -> None:
    assert run_ranks(_check_all, num_ranks, cases) == [[]] * num_ranks


# ---- ddp -------------------------------------------------------------------------------------------------


def _equal(found: Found, expected: Found, steps: slice) -> None:
    """To the last bit."""
    for one, other in zip(found.gradients, expected.gradients[steps], strict=True):
        assert one.keys() == other.keys()
        assert not [name for name in one if not torch.equal(one[name], other[name])]
    assert all(torch.equal(one, other) for one, other in zip(found.norms, expected.norms[steps], strict=True))
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())


def _go_on_in_a_fresh_layout(world: World, options: dict[str, Any]) -> int:
    """[5 steps] against [3 steps, then 2 of another layout on what they left]."""
    options = {"bucket_cap_mb": 0.05, **options}  # several buckets
    layout, world = _layout(world, "ddp", **options)
    carry, _ = train(layout, world, start(layout.model, world), range(3))
    weights = {name: tensor.clone() for name, tensor in layout.model.state_dict().items()}
    saved = {name: tensor.clone() for name, tensor in layout.compression_state().items()}
    _, unbroken = train(layout, world, carry, range(3, 5))

    model = model_of("hrm")
    model.load_state_dict(weights)
    fresh = parallelize(model, config_of("ddp", **options), world)
    fresh.load_compression_state(saved)
    _, resumed = train(fresh, world, carry, range(3, 5))
    _equal(resumed, unbroken, slice(None))
    return len(saved)


def _check_resume(world: World) -> None:
    assert _go_on_in_a_fresh_layout(world, {}) == 0
    assert _go_on_in_a_fresh_layout(world, {"compression": "powersgd", "powersgd_start_step": 2}) > 5


def test_a_fresh_layout_goes_on_to_the_last_bit() -> None:
    """With 4 ranks the order of sums depends on DDP's buckets, which it makes anew after the first backward pass."""
    run_ranks(_check_resume, 4)


def _check_compression(world: World) -> None:
    exact = _by_one_process("hrm").gradients
    name = "H_level.layers.0.mlp.down_proj.weight"
    for kind in ("fp16", "bf16"):
        layout, its_world = _layout(world, "ddp", compression=kind)
        rounded = train(layout, its_world, start(layout.model, its_world), range(1))[1].gradients[0][name]
        _close(rounded, exact[0][name], kind, 2e-2)
        assert (rounded - exact[0][name]).abs().max() > 1e-5 * exact[0][name].abs().max(), f"{kind} rounds nothing"

    in_bf16 = _by_one_process("trm", forward_dtype="bfloat16").gradients[0]["L_level.layers.0.mlp.down_proj.weight"]
    layout, its_world = _layout(world, "fsdp", "trm", forward_dtype="bfloat16", param_dtype="forward_dtype")
    _, run = train(layout, its_world, start(layout.model, its_world), range(1))
    gathered = run.gradients[0]["L_level.layers.0.mlp.down_proj.weight"]
    assert gathered.dtype == torch.float32
    _close(gathered, in_bf16, "fsdp in bfloat16", 2e-2)

    options: dict[str, Any] = {"compression": "powersgd", "powersgd_start_step": 2, "powersgd_rank": 2}
    layout, its_world = _layout(world, "ddp", **options)
    _, run = train(layout, its_world, start(layout.model, its_world), range(3))
    found = [gradients[name] for gradients in run.gradients]
    _close(found[1], exact[1][name], "before it starts", 1e-3)
    ranks = [int(torch.linalg.matrix_rank(gradient, rtol=1e-4)) for gradient in found]
    assert ranks[1] > 2 and ranks[2] == 2
    assert all(torch.equal(found[2], other) for other in its_world.gather_objects(found[2]))

    fresh, _ = _layout(world, "ddp", **{**options, "powersgd_rank": 1})
    with pytest.raises(ValueError, match=r"powersgd_rank and frozen weights that it was saved with, or with another"):
        fresh.load_compression_state(layout.compression_state())
    plain, _ = _layout(world, "ddp")
    plain.load_compression_state(layout.compression_state())  # compression has ended


def test_compression_rounds_what_travels() -> None:
    run_ranks(_check_compression, 2)


# ---- weights and what is placed like them ----------------------------------------------------------------


def _check_portable(world: World) -> None:
    """Under every strategy the weights, and anything of their shape, have one portable form, and come back from it."""
    expected = model_of("trm").state_dict()
    other = {name: torch.randn(tensor.shape) for name, tensor in model_of("trm").state_dict().items()}
    world.broadcast_(other.values())
    for strategy, table in [("ddp", "sharded"), ("hsdp", "replicated"), ("tp", "replicated"), ("fsdp_tp", "sharded")]:
        layout, its_world = _layout(world, strategy, "trm", puzzle_table=table)
        for wanted in (expected, other):
            live = layout.model.state_dict()
            assert list(live) == list(wanted)
            for name, tensor in wanted.items():
                if wanted is other:
                    layout.from_portable(name, tensor, live[name])
                moment = torch.zeros_like(live[name])
                layout.from_portable(name, layout.to_portable(name, live[name]), moment)
                for placed in (live[name], moment):
                    assert torch.equal(_whole(layout, name, placed), tensor), f"{name} of {strategy}"
            layout.values_changed()
            weights = layout.whole_weights()
            if its_world.is_main:
                assert all(torch.equal(weights[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_weights_have_one_portable_form(num_ranks: int) -> None:
    run_ranks(_check_portable, num_ranks)


@torch.no_grad()
def _logits(layout: Layout, num_slots: int) -> Tensor:
    model, batch = layout.model, {name: tensor[:num_slots] for name, tensor in _batch(9).items()}
    state = model.reset(model.initial_state(num_slots, torch.device("cpu")), torch.ones(num_slots, dtype=torch.bool))
    assert model.puzzle_embedding is not None
    rows_BE = model.puzzle_embedding.rows(batch["puzzle_identifiers"])
    logits_BSV: Tensor = model(state, batch["inputs"], rows_BE, model.config.depth)[1]
    return logits_BSV


def _check_evaluation(world: World) -> None:
    """Weights that are overwritten in place are those of the next forward; ranks may differ in their slots."""
    cases: list[tuple[str, dict[str, Any]]] = [
        ("fsdp", {"reshard_after_forward": False, "puzzle_table": "sharded"}),
        ("tp", {}),
    ]
    for strategy, options in cases:
        layout, its_world = _layout(world, strategy, **options)
        num_slots = its_world.data_rank + 1
        plain = Layout(model_of("hrm"), World.single())
        tensors = [*layout.model.trained_tensors().values(), *plain.model.trained_tensors().values()]
        for _ in range(2):
            torch.testing.assert_close(_logits(layout, num_slots), _logits(plain, num_slots), rtol=1e-4, atol=1e-4)
            with torch.no_grad():
                for tensor in tensors:
                    tensor.mul_(0.5)
            layout.values_changed()


def test_evaluation_has_the_weights_as_they_are() -> None:
    run_ranks(_check_evaluation, 2)


def _check_clip(world: World) -> None:
    expected = Layout(model_of("hrm"), World.single())
    _, clipped = train(expected, World.single(), start(expected.model, World.single()), range(1), clip=0.1)
    assert clipped.norms[0] > 0.2
    for strategy in ("ddp", "fsdp", "tp", "fsdp_tp"):
        layout, its_world = _layout(world, strategy)
        _, found = train(layout, its_world, start(layout.model, its_world), range(1), clip=0.1)
        for name, gradient in clipped.gradients[0].items():
            _close(found.gradients[0][name], gradient, f"{strategy}: {name}")
    frozen = model_of("hrm")
    frozen.freeze("weights")
    layout = parallelize(frozen, config_of("ddp"), world)
    train(layout, world, start(frozen, world), range(1), clip=0.1)
    assert float(layout.grad_norm()) == 0


def test_gradients_are_clipped_wherever_they_lie() -> None:
    run_ranks(_check_clip, 2)


# ---- the sharded table -----------------------------------------------------------------------------------


def _check_table(world: World) -> None:
    world = use_device(
        world, "cpu", DistConfig.model_validate({**DIST.model_dump(), "rank_weights": [3.0, 1.0, 2.0, 2.0]})
    )
    for num_rows in (2, 5, 8):  # 2: more ranks than rows
        generator = torch.Generator().manual_seed(num_rows)
        model = model_of("trm")
        assert model.puzzle_embedding is not None
        model.puzzle_embedding.weight = torch.randn(num_rows, 3, generator=generator)
        whole_KE = model.puzzle_embedding.weight.clone()
        _shard_table(model, world)
        table = model.puzzle_embedding
        assert isinstance(table.weight, DTensor) and len(table.weight.to_local()) <= -(-num_rows // world.size)
        mine = world.slice_of(BATCH)
        for _ in range(4):
            ids_B = torch.randint(num_rows, (BATCH,), generator=generator, dtype=torch.int32)
            grad_BE = torch.randint(-2, 3, (BATCH, 3), generator=generator).float()
            rows_BE = table.rows(ids_B[mine])
            assert rows_BE.requires_grad and rows_BE.is_leaf
            assert torch.equal(rows_BE.detach(), whole_KE[ids_B[mine]])
            with torch.no_grad():
                number = 3 * world.rank  # none on rank 0
                assert torch.equal(table.rows(ids_B[:number]), whole_KE[ids_B[:number]])
            options: dict[str, Any] = {"lr": 0.5, "weight_decay": 0.25, "num_slots": BATCH}
            sparse_sign_sgd_(table.weight, ids_B[mine], grad_BE[mine], world=world, **options)
            sparse_sign_sgd_(whole_KE, ids_B, grad_BE, world=World.single(), **options)
            assert torch.equal(table.weight.full_tensor(), whole_KE)


def test_a_sharded_table_is_the_table() -> None:
    run_ranks(_check_table, 4)


# ---- mistakes --------------------------------------------------------------------------------------------


def test_degrees_have_to_make_the_number_of_ranks() -> None:
    assert config_of("hsdp").axes(8) == Axes(replicate=2, shard=4)
    assert config_of("hsdp", shard=8).axes(8) == Axes(replicate=1, shard=8)
    assert config_of("fsdp_tp", tensor=4).axes(8) == Axes(shard=2, model=4)
    assert config_of("tp").axes(3) == Axes(model=3)
    with pytest.raises(ValueError, match=r"shard 3 doesn't make 4 ranks; replicate x shard can be 1 x 4, 2 x 2, 4 x 1"):
        config_of("hsdp", shard=3).axes(4)
    with pytest.raises(ValueError, match=r"shard 2 x tensor 4 doesn't make 4 ranks"):
        config_of("fsdp_tp", shard=2, tensor=4).axes(4)


def _errors(world: World) -> list[str]:
    def refused(name: str, arch: str = "hrm", **options: Any) -> str:
        with pytest.raises(ValueError) as caught:
            _layout(world, name, arch, **options)
        return str(caught.value)

    curriculum = [{"until": 0.5, "H_cycles": 1, "L_cycles": 1}]
    return [
        refused("tp", "urm"),
        refused("tp", mlp="normalized_swiglu"),
        refused("fsdp", cpu_offload=True),
        refused("ddp", static_graph=True, depth_curriculum=curriculum),
        refused("ddp", static_graph=True, backprop_warmup_steps=3),
        refused("pipeline"),
    ]


def test_what_a_strategy_cannot_do_is_refused() -> None:
    conv, normalized, offload, curriculum, warmup, pipeline = run_ranks(_errors, 2)[0]
    assert "conv_swiglu, which convolves its inner width" in conv and "take arch.mlp=swiglu" in conv
    assert "normalized_swiglu, which normalises" in normalized
    assert "the device is cpu; set it to false" in offload
    assert curriculum == warmup and "set static_graph to false" in warmup
    assert "HRM is recurrent" in pipeline
    with pytest.raises(ValidationError, match="set it to replicated, or take fsdp_tp"):
        config_of("tp", puzzle_table="sharded")


def _undivided(world: World) -> str:
    world = use_device(world, "cpu", DIST, axes=Axes(model=3))
    with pytest.raises(ValueError) as caught:
        parallelize(model_of("hrm"), config_of("tp"), world)
    return str(caught.value)


def test_sizes_that_tp_does_not_divide_are_named() -> None:
    assert run_ranks(_undivided, 3)[0] == (
        "parallel: 3 ranks don't divide arch.num_heads 4 and the width of the MLP on 32 256; take one of 1, 2, 4 for "
        "tp, or other sizes"
    )


def _backend_without_bf16(world: World) -> tuple[str, str]:
    def sum_(tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.bfloat16:
            raise RuntimeError("Invalid scalar type")
        return tensor

    with patch.object(World, "sum_", lambda _, tensor: sum_(tensor)):
        with pytest.raises(ValueError) as of_ddp:
            _layout(world, "ddp", compression="bf16")
        with pytest.raises(ValueError) as of_fsdp:
            _layout(world, "fsdp", reduce_dtype="bfloat16")
    return str(of_ddp.value), str(of_fsdp.value)


def test_what_a_backend_cannot_sum_is_refused() -> None:
    of_ddp, of_fsdp = _backend_without_bf16(World.single())
    assert of_ddp.endswith("can't sum; take one of none, fp16, powersgd, or set dist.backend to another")
    assert "set it to float32" in of_fsdp


def test_microbatches_have_to_divide_the_slots() -> None:
    config = config_of("tp")
    with pytest.raises(ValueError, match=r"grad_accumulation=3 doesn't divide the 8 slots of a rank; give 1 or 2 or 4"):
        config.require_parts(8, 3)
    config.require_parts(8, 4)


def test_powersgd_is_refused_with_a_loss_that_is_scaled() -> None:
    """Its memory of what it left out would be in units of another scale, and an overflow would stay in it for ever."""
    with pytest.raises(UserError, match=r"take parallel.compression=fp16 or none, or arch.forward_dtype=bfloat16"):
        _layout(World.single(), "ddp", compression="powersgd", forward_dtype="float16")


def _is_given_back(world: World, names: list[str]) -> list[str]:
    kept = []
    for name in names:
        layout, _ = _layout(world, name)
        model = weakref.ref(layout.model)
        del layout
        gc.collect()
        if model() is not None:
            kept.append(name)
    return kept


def test_a_layout_that_is_dropped_gives_its_memory_back() -> None:
    """A run that goes back to a checkpoint builds another beside it."""
    for rank, kept in enumerate(run_ranks(_is_given_back, 2, ["ddp", "fsdp", "tp"])):
        assert not kept, f"rank {rank} keeps {kept}"
