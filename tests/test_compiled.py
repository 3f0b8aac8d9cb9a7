"""A compiled run needs few graphs and makes none after its start.

The compilers here run a graph as it is, because a compiler for the CPU takes a minute.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from models.act import ActSettings, initial_carry
from models.base import CommonConfig, RecursiveModel
from models.carry import Carry
from models.inference import Slots
from models.parallel.layout import Compiled, Layout
from tests.models.helpers import WHY_NO_FP8, random_batch, small_model, small_symbol_model
from utils.batch import Batch
from utils.ranks.world import World

PuzzleLayout = Layout[Carry, Batch, ActSettings]

NUM_SLOTS = 8
LARGEST_TRAINING = 6  # graphs, one of the loss, with evaluations of as many slots
FOR_OTHER_SIZES = 2  # more graphs, for evaluations with any other number of slots
FOR_STARTS = 2  # more graphs, because a step runs all trajectories of the slots, and then those that won
FOR_FP8 = 2  # more graphs, because evaluations then have other calls without gradient than training

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "hrm with unequal levels": ("hrm", {"H_layers": 1, "L_layers": 2}),
    "trm, which keeps inputs of blocks, and whose backward pass grows": (
        "trm",
        {"activation_checkpointing": "block", "backprop_warmup_steps": 3},
    ),
    "trm_mlp, which keeps inputs of calls": ("trm_mlp", {"activation_checkpointing": "cycle"}),
    "urm": ("urm", {}),
    "transformer": ("transformer", {"recurrent": True, "halt_max_steps": 4}),
    "trm_mlp with three starts": ("trm_mlp", {"num_states": 3}),
    "se_rrm": ("se_rrm", {}),
    "se_mixer that is told the units": ("se_mixer", {"symbols": "side"}),
}
AT_EVERY_CHANGE = ("hrm with unequal levels", "trm_mlp with three starts", "se_mixer that is told the units")
if WHY_NO_FP8 is None:
    MODELS |= {f"{name} in FP8": (name, {"fp8_no_grad": True}) for name in ("hrm", "trm_mlp")}


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Return the list to which each graph that is compiled adds its inputs."""
    found: list[str] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> torch.fx.GraphModule:
        tensors = [each for each in inputs if isinstance(each, torch.Tensor) and each.ndim == 3]
        grad = "with" if torch.is_grad_enabled() else "without"
        shapes = ", ".join(f"{tuple(each.shape)}{' trained' * each.requires_grad}" for each in tensors)
        found.append(f"{grad} gradient: {shapes}")
        return graph

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiler))
    torch._dynamo.reset()  # graphs of other tests count toward the limit of one function
    yield found
    torch._dynamo.reset()


def _model(name: str) -> RecursiveModel:
    arch, changes = MODELS[name]
    return small_symbol_model(arch, **changes) if arch.startswith("se_") else small_model(arch, **changes)


def _layout(model: RecursiveModel, what: Compiled) -> PuzzleLayout:
    layout = PuzzleLayout(model, World.single())
    if what:
        layout.compile(what)
    return layout


def _step(layout: PuzzleLayout, carry: Carry, batch: Batch, step: int) -> tuple[Carry, torch.Tensor]:
    config = layout.model.config
    assert isinstance(config, CommonConfig)
    seeds_B = torch.arange(NUM_SLOTS) if config.is_random else None
    settings = ActSettings(config.depth_at(step, 10), NUM_SLOTS, seeds_B=seeds_B)
    carry, _, sums = layout.forward_backward(carry, batch, settings)
    layout.model.zero_grad()
    return carry, sums


def _evaluate(model: RecursiveModel, batch: Batch, sizes: list[int]) -> None:
    pieces = [(np.arange(size), {name: tensor[:size] for name, tensor in batch.items()}) for size in sizes]
    slots = Slots(model, iter(pieces), num_steps=3, adaptive=True)
    while slots.busy:
        slots.advance()


of_each_model = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in AT_EVERY_CHANGE else pytest.mark.slow) for name in MODELS]
)


@of_each_model
def test_a_compiled_run_needs_few_graphs_and_none_after_its_start(name: str, graphs: list[str]) -> None:
    model = _model(name)
    batch = random_batch(NUM_SLOTS, vocab_size=model.vocab_size)
    layout, carry = _layout(model, True), initial_carry(model, batch, training=True)
    for step in (1, 2, 3):
        carry, _ = _step(layout, carry, batch, step)
    config = model.config
    most = LARGEST_TRAINING + FOR_STARTS * (config.num_states > 1)
    assert 0 < len(graphs) <= most, "\n".join(graphs)
    most += FOR_FP8 * config.fp8_no_grad
    _evaluate(model, batch, [NUM_SLOTS, 3])
    assert len(graphs) <= most, "\n".join(graphs)
    _evaluate(model, batch, [NUM_SLOTS - 2, 3])
    assert len(graphs) <= most + FOR_OTHER_SIZES, "\n".join(graphs)
    after_start = len(graphs)
    for step in (4, 5):
        carry, _ = _step(layout, carry, batch, step)
        _evaluate(model, batch, [NUM_SLOTS - 3, 2])
    assert len(graphs) == after_start, "\n".join(graphs[after_start:])


@of_each_model
def test_a_segment_is_one_graph_and_computes_the_same(name: str, graphs: list[str]) -> None:
    found, config = [], _model(name).config
    for what in ("segment", False):
        model = _model(name)
        batch = random_batch(NUM_SLOTS, vocab_size=model.vocab_size)
        layout, carry = _layout(model, what), initial_carry(model, batch, training=True)
        for step in (4, 5):  # after the warm-up of the backward pass
            carry, sums = _step(layout, carry, batch, step)
        found.append(carry.tensors() | {"sums": sums})
    torch.testing.assert_close(*found, rtol=0, atol=0, equal_nan=True)
    assert len(graphs) == 2 + config.has_target_pass + (config.num_states > 1), "\n".join(graphs)


def test_more_graphs_than_the_limit_are_an_error(graphs: list[str]) -> None:
    """PyTorch would warn once and go on without compiling."""
    batch, layout = random_batch(NUM_SLOTS), _layout(small_model("hrm"), True)
    assert torch._dynamo.config.recompile_limit > LARGEST_TRAINING + FOR_OTHER_SIZES
    assert not torch._dynamo.config.optimize_ddp, "a level would become a graph for each of DDP's buckets"
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(FailOnRecompileLimitHit):
        _step(layout, layout.objective.fresh_carry(NUM_SLOTS, torch.device("cpu")), batch, 1)


def test_the_graphs_of_an_earlier_model_do_not_count(graphs: list[str]) -> None:
    """A run that rewinds builds its model anew in the same process."""
    batch = random_batch(NUM_SLOTS)
    models = [small_model("trm_mlp") for _ in range(2)]  # none is freed before the end
    for model in models:
        layout = _layout(model, True)
        with torch._dynamo.config.patch(recompile_limit=LARGEST_TRAINING):
            _step(layout, initial_carry(model, batch), batch, 1)
    assert len(graphs) > LARGEST_TRAINING
