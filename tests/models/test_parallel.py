"""Every strategy gives the gradients of one process, for any number of ranks (CPU, gloo).

One spawn for each number of ranks runs all strategies.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from models.base import RecursiveModel
from models.parallel.layout import Layout
from tests.models.helpers import WHY_NO_FP8, run
from tests.models.parallel.helpers import (
    BATCH,
    KEYS,
    NUM_STEPS,
    Found,
    batch_at,
    by_one_process,
    close,
    layout_of,
    model_of,
    start,
    train,
)
from tests.spawn import run_ranks
from utils.ranks.world import World

pytestmark = pytest.mark.invariance

Case = tuple[str, str, int, dict[str, Any]]


def _same(found: Found, expected: Found, case: str, is_main: bool, *, only_first_step: bool) -> None:
    for step, (gradients, norm, sums) in enumerate(zip(expected.gradients, expected.norms, expected.sums, strict=True)):
        for name, gradient in found.gradients[step].items():
            tolerance = 1e-3 if step else 3e-5  # from the second step on, the weights differ by rounding
            close(gradient, gradients[name], f"{case}: gradient of {name} in step {step}", tolerance)
        close(found.norms[step], norm, f"{case}: norm in step {step}")
        close(found.sums[step], sums, f"{case}: sums in step {step}")
        if only_first_step:
            return
    for name, tensor in expected.carry.items():
        close(found.carry[name], tensor, f"{case}: {name} of the carry")
    if is_main:
        assert found.weights.keys() == expected.weights.keys(), case
        for name, tensor in expected.weights.items():
            close(found.weights[name], tensor, f"{case}: {name}")


CASES: list[Case] = [
    ("ddp", "hrm", 2, {}),
    ("fsdp", "trm", 1, {"puzzle_table": "sharded"}),
    ("hsdp", "trm", 1, {}),
    ("tp", "hrm", 1, {}),
    ("fsdp_tp", "hrm", 1, {"activation_checkpointing": "cycle"}),
]
MORE_CASES: list[Case] = [
    ("ddp", "trm", 1, {"puzzle_table": "sharded"}),
    ("ddp", "hrm", 2, {"gradient_as_bucket_view": False, "activation_checkpointing": "block"}),
    ("ddp", "hrm", 1, {"freeze": "weights"}),
    ("fsdp", "hrm", 1, {"freeze": "puzzle_table", "puzzle_table": "sharded"}),
    ("fsdp", "trm", 2, {"activation_checkpointing": "cycle"}),
    ("fsdp", "hrm", 1, {"reshard_after_forward": False, "activation_checkpointing": "block"}),
    ("tp", "trm", 2, {"activation_checkpointing": "block"}),
    ("tp", "trm", 1, {"mlp_t": True}),
    ("tp", "trm_conv", 1, {}),
    ("fsdp", "trm_conv", 1, {}),
    ("fsdp_tp", "trm", 2, {"puzzle_table": "sharded"}),
    ("fsdp", "hrm", 1, {"clip": 1e6}),  # no norm is as large
]
if WHY_NO_FP8 is None:
    MORE_CASES += [(name, "hrm", 1 + (name == "ddp"), {"fp8_no_grad": True}) for name in ("ddp", "fsdp", "hsdp")]


def _pipeline(schedule: str, num_parts: int = 1, **options: Any) -> Case:
    # No number of stages divides nine blocks.
    fixed = {"schedule": schedule, "microbatches": 4 // num_parts, "num_layers": 9}
    return "pipeline", "transformer", num_parts, fixed | options


SCHEDULES = ("gpipe", "1f1b", "interleaved")
PIPELINES = [
    *(_pipeline(schedule) for schedule in SCHEDULES),
    _pipeline("1f1b", 2, activation_checkpointing="block", clip=0.05),
    _pipeline("interleaved", 2, mlp_t=True, num_layers=5),  # whose activations are transposed
    _pipeline("1f1b", puzzle_emb_ndim=0, num_registers=2, pos_encodings="learned"),
    *(_pipeline("gpipe", 2, freeze=freeze) for freeze in ("blocks", "puzzle_table", "weights")),
]
# Two pipelines, whose blocks are whole or sharded.
PIPELINES_OF_FOUR = [
    _pipeline(schedule, 2, stages=2, shard=shard, microbatches=2) for schedule in SCHEDULES for shard in (1, 2)
]


# Buckets of a few weights: with DDP's own splitting, each bucket would be a graph.
COMPILED: list[Case] = [
    *(("ddp", "hrm", 1, {"compile": what, "L_layers": 2, "bucket_cap_mb": 0.01}) for what in (True, "segment")),
    *((name, "hrm", 1, {"compile": True, "L_layers": 2}) for name in ("fsdp", "tp")),
]


@contextmanager
def _few_graphs() -> Iterator[None]:
    """Compile levels with a backend that runs operators as they are, and require few graphs."""
    graphs = list[torch.fx.GraphModule]()

    def compiler(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    torch._dynamo.reset()
    with patch.object(torch, "compile", partial(torch.compile, backend=compiler)):
        yield
    assert 0 < len(graphs) <= 6, f"{len(graphs)} graphs"


def _check_all(world: World, cases: list[Case]) -> list[str]:
    wrong, expected = [], {}
    for name, arch, num_parts, options in cases:
        case = f"{name} {options} of {arch} in {num_parts} parts on {world.size} ranks"
        changes = {key: options[key] for key in options.keys() - KEYS[name] - {"activation_checkpointing", "compile"}}
        if (key := f"{arch} {sorted(changes.items())}") not in expected:
            expected[key] = by_one_process(arch, **changes)
        given = {key: value for key, value in options.items() if key != "clip"}
        # Pieces of gradients that are less than most tensors have.
        small: AbstractContextManager[Any]
        small = patch("models.parallel.pipeline._BUCKET_BYTES", 4096) if "shard" in options else nullcontext()
        with small, _few_graphs() if "compile" in options else nullcontext():
            layout, its_world = layout_of(world, name, arch, num_parts, **given)
            is_collective = world.size > 1 and (name != "ddp" or options.get("puzzle_table") == "sharded")
            if is_collective and not layout.lockstep:
                wrong.append(f"{case}: ranks with fewer batches would leave the others waiting")
            first = start(layout.model, its_world)
            _, found = train(layout, its_world, first, range(NUM_STEPS), clip=options.get("clip"), loss_scale=4.0)
        shares = world.gather_objects(sorted(found.gradients[0]))
        copies = its_world.data_size if name == "pipeline" else world.size
        try:
            names = sorted(name for share in shares for name in share)
            assert names == sorted([*expected[key].gradients[0]] * copies), f"{case}: its weights"
            # Where the last bit of a weight differs, FP8 may round to the next number, which is an
            # eighth away. Which weights differ depends on the processor.
            _same(found, expected[key], case, world.is_main, only_first_step="fp8_no_grad" in options)
        except AssertionError as error:
            wrong.append(str(error))
    return wrong


@pytest.mark.parametrize(
    ("num_ranks", "cases"),
    # In place of the slow cases, tests/test_parallel.py trains on 4 ranks at every change, and
    # tests/test_compiled.py compiles.
    [
        (1, [*CASES, _pipeline("interleaved")]),
        (2, CASES),
        (2, [*MORE_CASES, *PIPELINES]),
        pytest.param(8, [_pipeline("1f1b", stages=2, shard=2, microbatches=2)], marks=pytest.mark.slow),
        pytest.param(2, COMPILED, marks=pytest.mark.slow),
        pytest.param(4, [*CASES, _pipeline("1f1b"), *PIPELINES_OF_FOUR], marks=pytest.mark.slow),
    ],
)
def test_every_strategy_has_the_gradients_of_one_process(num_ranks: int, cases: list[Case]) -> None:
    assert run_ranks(_check_all, num_ranks, cases) == [[]] * num_ranks


@torch.no_grad()
def _outputs(layout: Layout, num_slots: int) -> tuple[Tensor, ...]:
    assert isinstance(layout.model, RecursiveModel)
    return run(layout.model, {name: tensor[:num_slots] for name, tensor in batch_at(9).items()})[1:]


def _check_evaluation(world: World, cases: list[Case]) -> None:
    """Evaluate, change the weights in place, and evaluate again, with other numbers of slots."""
    for strategy, arch, _, options in cases:
        layout, its_world = layout_of(world, strategy, arch, **options)
        changes = {key: options[key] for key in options.keys() - KEYS[strategy]}
        plain: Layout = Layout(model_of(arch, **changes), World.single())
        # FSDP puts others in the place of the model's parameters while it gathers.
        tensors = [*layout.model.trained_tensors().values(), *plain.model.trained_tensors().values()]
        tolerance = 0.1 if "forward_dtype" in options else 1e-4
        for num_slots in (its_world.data_rank + 1, BATCH, 7):
            found = _outputs(layout, num_slots)
            for ours, theirs in zip(found, _outputs(plain, num_slots), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
            digests = world.gather_objects((its_world.data_rank, [of.float().tolist() for of in found]))
            of_slots = [digest for data_rank, digest in digests if data_rank == its_world.data_rank]
            assert all(digest == of_slots[0] for digest in of_slots), "ranks would halt different slots"
            with torch.no_grad():
                for tensor in tensors:
                    tensor.mul_(0.5)
            layout.values_changed()


OF_TWO: list[Case] = [
    ("fsdp", "hrm", 1, {"reshard_after_forward": False, "puzzle_table": "sharded"}),
    ("tp", "hrm", 1, {}),
    ("fsdp", "trm", 1, {"forward_dtype": "bfloat16", "param_dtype": "forward_dtype"}),
    *(_pipeline(schedule) for schedule in SCHEDULES),
    _pipeline("gpipe", forward_dtype="bfloat16"),
]


@pytest.mark.parametrize(
    ("num_ranks", "cases"), [(2, OF_TWO), pytest.param(4, PIPELINES_OF_FOUR, marks=pytest.mark.slow)]
)
def test_evaluation_sees_weights_that_were_changed_in_place(num_ranks: int, cases: list[Case]) -> None:
    run_ranks(_check_evaluation, num_ranks, cases)


def _compiled_blocks(world: World) -> tuple[list[int], bool]:
    with patch("models.parallel.pipeline.compile_each") as compile_each:
        layout, _ = layout_of(world, "pipeline", "transformer", compile=True, num_layers=3, microbatches=4)
    return [len(level.layers) for level in compile_each.call_args.args[0]], layout.model.is_compiled


def test_each_rank_of_a_pipeline_compiles_its_own_blocks() -> None:
    assert run_ranks(_compiled_blocks, 2) == [([2], True), ([1], True)]


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
