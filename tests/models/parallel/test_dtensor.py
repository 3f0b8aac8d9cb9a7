"""Weights that are sharded over ranks have one portable form, whatever the strategy."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.models.parallel.helpers import layout_of, model_of, whole, whole_weights
from tests.spawn import run_ranks
from utils.ranks.world import World


def _check_portable(world: World) -> None:
    """Convert weights, and tensors of the same shape, to the portable form and back."""
    expected = model_of("trm").state_dict()
    other = {name: torch.randn(tensor.shape) for name, tensor in model_of("trm").state_dict().items()}
    world.broadcast_(other.values())
    for strategy, table in [("ddp", "sharded"), ("hsdp", "replicated"), ("tp", "replicated"), ("fsdp_tp", "sharded")]:
        layout, its_world = layout_of(world, strategy, "trm", puzzle_table=table)
        for wanted in (expected, other):
            live = layout.model.state_dict()
            assert list(live) == list(wanted)
            for name, tensor in wanted.items():
                if wanted is other:
                    layout.from_portable(name, tensor, live[name])
                moment = torch.zeros_like(live[name])
                layout.from_portable(name, layout.to_portable(name, live[name]), moment)
                portable = layout.to_portable(name, live[name])
                assert isinstance(portable, DTensor) == isinstance(live[name], DTensor), f"{name}: a whole is kept"
                for placed in (live[name], moment):
                    assert torch.equal(whole(layout, name, placed), tensor), f"{name} of {strategy}"
            layout.values_changed()
            weights = whole_weights(layout, its_world)
            if its_world.is_main:
                assert all(torch.equal(weights[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_weights_have_one_portable_form(num_ranks: int) -> None:
    run_ranks(_check_portable, num_ranks)
