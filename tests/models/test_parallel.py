"""Every strategy gives the gradients of one process, for any number of ranks (CPU, gloo).

One spawn for each number of ranks runs all strategies.
"""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from models.base import RecursiveModel
from models.parallel import parallelize
from models.parallel.layout import Layout
from tests.models.helpers import WHY_NO_FP8
from tests.models.parallel.helpers import (
    NUM_STEPS,
    Found,
    batch_at,
    by_one_process,
    close,
    config_of,
    layout_of,
    model_of,
    start,
    train,
)
from tests.spawn import run_ranks
from utils.ranks.world import World


def _same(found: Found, expected: Found, case: str, is_main: bool, *, only_first_step: bool) -> None:
    for step, (gradients, norm, sums) in enumerate(zip(expected.gradients, expected.norms, expected.sums, strict=True)):
        assert found.gradients[step].keys() == gradients.keys(), case
        for name, gradient in gradients.items():
            tolerance = 1e-3 if step else 3e-5  # from the second step on, the weights differ by rounding
            close(found.gradients[step][name], gradient, f"{case}: gradient of {name} in step {step}", tolerance)
        close(found.norms[step], norm, f"{case}: norm in step {step}")
        close(found.sums[step], sums, f"{case}: sums in step {step}")
        if only_first_step:
            return
    for name, tensor in expected.carry.items():
        close(found.carry[name], tensor, f"{case}: {name} of the carry")
    if is_main:
        assert list(found.weights) == list(expected.weights), case
        for name, tensor in expected.weights.items():
            close(found.weights[name], tensor, f"{case}: {name}")


CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("ddp", "hrm", 2, {}),
    ("fsdp", "trm", 1, {"puzzle_table": "sharded"}),
    ("hsdp", "trm", 1, {}),
    ("tp", "hrm", 1, {}),
    ("fsdp_tp", "hrm", 1, {"activation_checkpointing": "cycle"}),
]
MORE_CASES: list[tuple[str, str, int, dict[str, Any]]] = [
    ("ddp", "trm", 1, {"puzzle_table": "sharded"}),
    ("ddp", "hrm", 2, {"gradient_as_bucket_view": False, "activation_checkpointing": "block"}),
    ("fsdp", "trm", 2, {"activation_checkpointing": "cycle"}),
    ("fsdp", "hrm", 1, {"reshard_after_forward": False, "activation_checkpointing": "block"}),
    ("tp", "trm", 2, {"activation_checkpointing": "block"}),
    ("tp", "trm", 1, {"mlp_t": True}),
    ("tp", "trm_conv", 1, {}),
    ("fsdp", "trm_conv", 1, {}),
    ("fsdp_tp", "trm", 2, {"puzzle_table": "sharded"}),
]
if WHY_NO_FP8 is None:
    MORE_CASES += [(name, "hrm", 1 + (name == "ddp"), {"fp8_no_grad": True}) for name in ("ddp", "fsdp", "hsdp")]


def _check_all(world: World, cases: list[tuple[str, str, int, dict[str, Any]]]) -> list[str]:
    wrong, expected = [], {}
    for name, arch, num_parts, options in cases:
        case = f"{name} {options} of {arch} in {num_parts} parts on {world.size} ranks"
        changes = {key: options.get(key, False) for key in ("mlp_t", "fp8_no_grad")}
        if (key := (arch, *changes.values())) not in expected:
            expected[key] = by_one_process(arch, **changes)
        layout, its_world = layout_of(world, name, arch, num_parts, **options)
        _, found = train(layout, its_world, start(layout.model, its_world), range(NUM_STEPS))
        try:
            # Where the last bit of a weight differs, FP8 may round to the next number, which is an
            # eighth away. Which weights differ depends on the processor.
            _same(found, expected[key], case, world.is_main, only_first_step=changes["fp8_no_grad"])
        except AssertionError as error:
            wrong.append(str(error))
    return wrong


# The default suite has no 4 ranks here, because tests/test_parallel.py trains on 4 ranks.
@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    [(1, CASES), (2, [*CASES, *MORE_CASES]), pytest.param(4, CASES, marks=pytest.mark.slow)],
)
def test_every_strategy_has_the_gradients_of_one_process(
    num_ranks: int, cases: list[tuple[str, str, int, dict[str, Any]]]
) -> None:
    assert run_ranks(_check_all, num_ranks, cases) == [[]] * num_ranks


@torch.no_grad()
def _logits(layout: Layout, num_slots: int) -> Tensor:
    model, batch = layout.model, {name: tensor[:num_slots] for name, tensor in batch_at(9).items()}
    assert isinstance(model, RecursiveModel)
    state = model.reset(model.initial_state(num_slots, torch.device("cpu")), torch.ones(num_slots, dtype=torch.bool))
    assert model.puzzle_embedding is not None
    rows_BE = model.puzzle_embedding.rows(batch["puzzle_identifiers"])
    logits_BSV: Tensor = model(state, batch["inputs"], rows_BE, model.config.depth)[1]
    return logits_BSV


def _check_evaluation(world: World) -> None:
    """Evaluate, change the weights in place, and evaluate again.

    The ranks have different numbers of slots.
    """
    cases: list[tuple[str, dict[str, Any]]] = [
        ("fsdp", {"reshard_after_forward": False, "puzzle_table": "sharded"}),
        ("tp", {}),
    ]
    for strategy, options in cases:
        layout, its_world = layout_of(world, strategy, **options)
        num_slots = its_world.data_rank + 1
        plain: Layout = Layout(model_of("hrm"), World.single())
        tensors = [*layout.model.trained_tensors().values(), *plain.model.trained_tensors().values()]
        for _ in range(2):
            torch.testing.assert_close(_logits(layout, num_slots), _logits(plain, num_slots), rtol=1e-4, atol=1e-4)
            with torch.no_grad():
                for tensor in tensors:
                    tensor.mul_(0.5)
            layout.values_changed()


def test_evaluation_sees_weights_that_were_changed_in_place() -> None:
    run_ranks(_check_evaluation, 2)


def _check_clip(world: World) -> None:
    expected: Layout = Layout(model_of("hrm"), World.single())
    _, clipped = train(expected, World.single(), start(expected.model, World.single()), range(1), clip=0.1)
    assert clipped.norms[0] > 0.2
    for strategy in ("ddp", "fsdp", "tp", "fsdp_tp"):
        layout, its_world = layout_of(world, strategy)
        _, found = train(layout, its_world, start(layout.model, its_world), range(1), clip=0.1)
        for name, gradient in clipped.gradients[0].items():
            close(found.gradients[0][name], gradient, f"{strategy}: {name}")
    frozen = model_of("hrm")
    frozen.freeze("weights")
    layout = parallelize(frozen, config_of("ddp"), world)
    train(layout, world, start(frozen, world), range(1), clip=0.1)
    assert float(layout.grad_norm()) == 0


def test_gradients_are_clipped_under_every_strategy() -> None:
    run_ranks(_check_clip, 2)


def _memory_that_is_kept(world: World, names: list[str]) -> list[str]:
    kept = []
    for name in names:
        layout, _ = layout_of(world, name)
        model = weakref.ref(layout.model)
        del layout
        gc.collect()
        if model() is not None:
            kept.append(name)
    return kept


def test_a_dropped_layout_frees_its_memory() -> None:
    """A run that goes back to a checkpoint drops its layout and builds another."""
    for rank, kept in enumerate(run_ranks(_memory_that_is_kept, 2, ["ddp", "fsdp", "tp"])):
        assert not kept, f"rank {rank} keeps the memory of {kept}"
