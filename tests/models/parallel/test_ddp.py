"""DDP resumes bit for bit, compresses the gradients that it sends, and refuses what it can't do."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.parallel import parallelize
from tests.models.parallel.helpers import (
    Found,
    by_one_process,
    close,
    config_of,
    layout_of,
    model_of,
    start,
    train,
    without_bf16_sums,
)
from tests.spawn import run_ranks
from utils.errors import UserError
from utils.ranks.world import World


def _equal(found: Found, expected: Found, steps: slice) -> None:
    """Assert that two runs are equal in every bit."""
    for one, other in zip(found.gradients, expected.gradients[steps], strict=True):
        assert one.keys() == other.keys()
        assert not [name for name in one if not torch.equal(one[name], other[name])]
    assert all(torch.equal(one, other) for one, other in zip(found.norms, expected.norms[steps], strict=True))
    assert all(torch.equal(found.weights[name], weight) for name, weight in expected.weights.items())


def _resume_in_a_fresh_layout(world: World, options: dict[str, Any]) -> int:
    """Train five steps in one layout, and the last two steps again in a second layout.

    The second layout starts from the weights after three steps. Both must end with the same bits.
    """
    options = {"bucket_cap_mb": 0.05, **options}  # small enough for several buckets
    layout, world = layout_of(world, "ddp", **options)
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
    assert _resume_in_a_fresh_layout(world, {}) == 0
    assert _resume_in_a_fresh_layout(world, {"compression": "powersgd", "powersgd_start_step": 2}) > 5


def test_a_fresh_layout_resumes_bit_for_bit() -> None:
    """A fresh layout continues a run with the same bits.

    This is not obvious, because DDP rebuilds its buckets after the first backward pass. With 4
    ranks the order of summation depends on the buckets.
    """
    run_ranks(_check_resume, 4)


def _check_compression(world: World) -> None:
    exact = by_one_process("hrm").gradients
    name = "H_level.layers.0.mlp.down_proj.weight"
    for kind in ("fp16", "bf16"):
        layout, its_world = layout_of(world, "ddp", compression=kind)
        rounded = train(layout, its_world, start(layout.model, its_world), range(1))[1].gradients[0][name]
        close(rounded, exact[0][name], kind, 2e-2)
        assert (rounded - exact[0][name]).abs().max() > 1e-5 * exact[0][name].abs().max(), f"{kind} changed no gradient"

    options: dict[str, Any] = {"compression": "powersgd", "powersgd_start_step": 2, "powersgd_rank": 2}
    layout, its_world = layout_of(world, "ddp", **options)
    _, run = train(layout, its_world, start(layout.model, its_world), range(3))
    found = [gradients[name] for gradients in run.gradients]
    close(found[1], exact[1][name], "gradient before PowerSGD starts", 1e-3)
    ranks = [int(torch.linalg.matrix_rank(gradient, rtol=1e-4)) for gradient in found]
    assert ranks[1] > 2 and ranks[2] == 2
    assert all(torch.equal(found[2], other) for other in its_world.gather_objects(found[2]))

    fresh, _ = layout_of(world, "ddp", **{**options, "powersgd_rank": 1})
    with pytest.raises(ValueError, match=r"powersgd_rank and frozen weights that it was saved with, or with another"):
        fresh.load_compression_state(layout.compression_state())
    plain, _ = layout_of(world, "ddp")
    plain.load_compression_state(layout.compression_state())  # a run may go on without compression


def test_compression_rounds_the_gradients() -> None:
    run_ranks(_check_compression, 2)


def test_static_graph_is_refused_for_a_graph_that_changes() -> None:
    config = config_of("ddp", static_graph=True)
    config.require_support(model_of("hrm"), World.single())
    curriculum = [{"until": 0.5, "H_cycles": 1, "L_cycles": 1}]
    for changes in ({"depth_curriculum": curriculum}, {"backprop_warmup_steps": 3}):
        with pytest.raises(UserError, match="set static_graph to false"):
            config.require_support(model_of("hrm", **changes), World.single())


def test_compression_that_the_backend_cannot_sum_is_refused() -> None:
    config = config_of("ddp", compression="bf16")
    with without_bf16_sums(), pytest.raises(UserError) as caught:
        config.require_support(model_of("hrm"), World.single())
    assert str(caught.value).endswith("can't sum; take one of none, fp16, powersgd, or set dist.backend to another")


def test_powersgd_is_refused_with_a_loss_scale() -> None:
    """A scaled loss and PowerSGD are refused together.

    PowerSGD remembers earlier errors of its compression. After a change of the scale they would
    have the wrong unit, and an overflow would stay in the memory for ever.
    """
    with pytest.raises(UserError, match=r"take parallel.compression=fp16 or none, or arch.forward_dtype=bfloat16"):
        layout_of(World.single(), "ddp", compression="powersgd", forward_dtype="float16")


def test_the_debug_level_that_crashes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch 2.13 ends DDP on gloo with SIGSEGV."""
    monkeypatch.setattr("models.parallel.ddp.get_debug_level", lambda: SimpleNamespace(name="DETAIL"))
    with pytest.raises(UserError, match=r"TORCH_DISTRIBUTED_DEBUG=DETAIL makes .* crash .*; set it to INFO, or take"):
        config_of("ddp").require_support(model_of("hrm"), World(backend="gloo"))
    with pytest.raises(UserError, match="TORCH_DISTRIBUTED_DEBUG"):  # ranks that share a GPU
        config_of("ddp").require_support(model_of("hrm"), World(backend="cpu:gloo,cuda:gloo"))
    config_of("ddp").require_support(model_of("hrm"), World(backend="cpu:gloo,cuda:nccl"))
