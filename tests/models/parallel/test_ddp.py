"""DDP resumes bit for bit, and refuses a debug level with which PyTorch would crash."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.parallel import parallelize
from tests.models.parallel.helpers import (
    Found,
    config_of,
    layout_of,
    model_of,
    start,
    train,
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


def _check_resume(world: World) -> None:
    """Train five steps in one layout, and the last two steps again in a second layout."""
    options: dict[str, Any] = {"bucket_cap_mb": 0.05}  # small enough for several buckets
    layout, world = layout_of(world, "ddp", **options)
    carry, _ = train(layout, world, start(layout.model, world), range(3))
    weights = {name: tensor.clone() for name, tensor in layout.model.state_dict().items()}
    _, unbroken = train(layout, world, carry, range(3, 5))

    model = model_of("hrm")
    model.load_state_dict(weights)
    _, resumed = train(parallelize(model, config_of("ddp", **options), world), world, carry, range(3, 5))
    _equal(resumed, unbroken, slice(None))


def test_a_fresh_layout_resumes_bit_for_bit() -> None:
    """A fresh layout continues a run with the same bits."""
    run_ranks(_check_resume, 4)


def test_the_debug_level_that_crashes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch 2.13 ends DDP on gloo with SIGSEGV."""
    monkeypatch.setattr("models.parallel.ddp.get_debug_level", lambda: SimpleNamespace(name="DETAIL"))
    with pytest.raises(UserError, match=r"TORCH_DISTRIBUTED_DEBUG=DETAIL makes .* crash .*; set it to INFO, or take"):
        config_of("ddp").require_support(model_of("hrm"), World(backend="gloo"))
    with pytest.raises(UserError, match="TORCH_DISTRIBUTED_DEBUG"):  # ranks that share a GPU
        config_of("ddp").require_support(model_of("hrm"), World(backend="cpu:gloo,cuda:gloo"))
    config_of("ddp").require_support(model_of("hrm"), World(backend="cpu:gloo,cuda:nccl"))
