"""A pipeline computes the same as one process with every schedule, or is refused (CPU, gloo)."""

# B = slots, S = tokens, V = vocabulary, P = rows of the puzzle table, E = puzzle embedding size

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from models.act import ActSettings, initial_carry, segment
from models.base import RecursiveModel
from models.carry import Carry
from models.inference import idle_segment
from models.losses import act_loss
from models.parallel.pipeline import PipelineConfig
from models.parallel.pipeline_puzzles import PuzzlePipelineLayout
from tests.models.helpers import ARCH_NAMES, RECURRENT, SEQ_LEN, VOCAB_SIZE, random_batch, small_config, small_model
from tests.models.parallel.helpers import config_of, whole, whole_weights
from tests.spawn import run_ranks
from tests.utils.ranks.helpers import dist_config
from utils.batch import Batch
from utils.errors import UserError
from utils.ranks.replicas import require_same_replicas
from utils.ranks.setup import connect_devices
from utils.ranks.world import World

BATCH, STEPS, LR, CLIP = 8, 30, 1e-3, 0.05
SCHEDULES = ("gpipe", "1f1b", "interleaved")
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "checkpointed blocks": {"activation_checkpointing": "block"},
    "mixer, whose activations are transposed": {"mlp_t": True},
    "no puzzles, other positions": {"puzzle_emb_ndim": 0, "num_registers": 2, "pos_encodings": "learned"},
}


def _config(**changes: Any) -> PipelineConfig:
    config = config_of("pipeline", **({"microbatches": 4, "schedule": "gpipe"} | changes))
    assert isinstance(config, PipelineConfig)
    return config


def _stack(**changes: Any) -> RecursiveModel:
    """Return a model of nine blocks. No number of stages in these tests divides nine."""
    return small_model("transformer", **({"num_layers": 9} | changes))


def _on_cpu(world: World, config: PipelineConfig, weights: list[float] | None = None) -> World:
    dist = dist_config(timeout_s=60.0, rank_weights=weights or [])
    return connect_devices(world, "cpu", dist, axes=config.axes(world.size))


def _layout(
    world: World, config: PipelineConfig, *, parts: int = 1, freeze: Any = "none", **changes: Any
) -> PuzzlePipelineLayout:
    model = _stack(**changes)
    model.freeze(freeze)
    return PuzzlePipelineLayout(model, config, world, num_microbatches=parts)


LOSS = small_config("transformer").loss


@dataclass
class _Step:
    """The results of one step."""

    carry: Carry
    sums: Tensor
    norm: Tensor
    gradients: dict[str, Tensor]
    rows_grad_BE: Tensor | None


def _plain_step(model: RecursiveModel, batch: Batch) -> _Step:
    """Compute a step on one process, without a layout."""
    carry, outputs = segment(model, initial_carry(model, batch), batch, training=True)
    loss, sums = act_loss(
        outputs,
        carry.current["labels"],
        halted_B=carry.halted_B,
        steps_B=carry.steps_B,
        config=LOSS,
        ignore_label=0,
    )
    (loss / BATCH).backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum().sqrt()
    rows_BE = outputs.puzzle_rows_BE
    return _Step(carry, sums, norm, gradients, None if rows_BE is None else rows_BE.grad)


def _share(world: World, batch: Batch) -> Batch:
    """Return the slots of this rank's pipeline."""
    return {name: tensor[world.slice_of(len(tensor))] for name, tensor in batch.items()}


def _pipeline_step(layout: PuzzlePipelineLayout, whole_batch: Batch, world: World) -> _Step:
    """Compute a step with one pipeline or several."""
    batch = _share(world, whole_batch)
    carry, outputs, sums = layout.forward_backward(
        initial_carry(layout.model, batch),
        batch,
        ActSettings(layout.model.config.depth, LOSS, ignore_label=0, global_batch_size=BATCH, min_halt_steps_B=None),
    )
    gradients = {name: whole(layout, name, p.grad) for name, p in layout.model.named_parameters() if p.grad is not None}
    parts = [part.puzzle_rows_BE.grad for part in outputs if part.puzzle_rows_BE is not None]
    rows = [grad_BE for grad_BE in parts if grad_BE is not None]
    return _Step(carry, world.sum_(sums), layout.grad_norm(), gradients, torch.cat(rows) if rows else None)


def _same(ours: Tensor, theirs: Tensor) -> None:
    """Assert that tensors agree up to a share of the largest component."""
    scale = float(theirs.abs().max()) if theirs.numel() else 0.0
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * scale + 1e-12)


def _compare(ours: _Step, theirs: _Step, world: World) -> None:
    mine = world.slice_of(BATCH)
    for name, tensor in theirs.carry.tensors().items():
        assert torch.equal(ours.carry.tensors()[name], tensor[mine]), name
    _same(ours.sums, theirs.sums)
    _same(ours.norm, theirs.norm)
    for name, gradient in ours.gradients.items():
        _same(gradient, theirs.gradients[name])
    assert (ours.rows_grad_BE is None) == (theirs.rows_grad_BE is None)
    if ours.rows_grad_BE is not None and theirs.rows_grad_BE is not None:
        _same(ours.rows_grad_BE, theirs.rows_grad_BE[mine])


def _check_gradients(world: World, config: PipelineConfig, **changes: Any) -> None:
    batch = random_batch(BATCH)
    reference = _plain_step(_stack(**changes), batch)
    layout = _layout(world, config, **changes)
    ours = _pipeline_step(layout, batch, world)
    _compare(ours, reference, world)
    shares = world.gather_objects(sorted(ours.gradients))
    assert sorted(name for share in shares for name in share) == sorted([*reference.gradients] * world.data_size), (
        "every weight must belong to exactly one rank of each pipeline"
    )
    assert all(shares), "a rank has no part of the model"
    layout.model.zero_grad()
    again = _pipeline_step(layout, batch, world)
    assert torch.equal(again.sums, ours.sums) and torch.equal(again.norm, ours.norm)
    assert all(torch.equal(again.gradients[name], gradient) for name, gradient in ours.gradients.items())


def _check_parts(world: World, config: PipelineConfig) -> None:
    """Splitting the batch into two parts must not change the gradient."""
    batch = random_batch(BATCH)
    _compare(_pipeline_step(_layout(world, config, parts=2), batch, world), _plain_step(_stack(), batch), world)


def _check_frozen(world: World, config: PipelineConfig) -> None:
    batch = random_batch(BATCH)
    for freeze in ("blocks", "puzzle_table", "weights"):
        reference = _stack()
        reference.freeze(freeze)
        theirs = _plain_step(reference, batch) if freeze != "weights" else None
        ours = _pipeline_step(_layout(world, config, freeze=freeze), batch, world)
        if theirs is not None:
            _compare(ours, theirs, world)
        else:
            assert ours.norm == 0 and not ours.gradients
            assert ours.rows_grad_BE is not None and ours.rows_grad_BE.abs().sum() > 0


def _check_evaluation(world: World, config: PipelineConfig, *, dtype: str = "float32", tolerance: float = 1e-5) -> None:
    """Evaluate batches of several sizes, with other weights or a training step after each batch.

    Of one slot, one of two pipelines has none, and computes an empty puzzle, as `evaluate` does.
    """
    plain, layout = _stack(forward_dtype=dtype), _layout(world, config, forward_dtype=dtype)
    weights = [*plain.parameters(), *layout.model.parameters()]  # FSDP puts others in their place while it gathers
    for num_slots in (BATCH, 7, 1, 5):
        batch = _share(world, random_batch(num_slots, seed=num_slots))
        digest = None
        if (num_mine := len(batch["inputs"])) > 0:
            with torch.no_grad():
                _, theirs = segment(plain, initial_carry(plain, batch), batch, training=False)
                _, ours = segment(layout.model, initial_carry(layout.model, batch), batch, training=False)
            assert ours.logits_BSV.shape == (num_mine, SEQ_LEN, VOCAB_SIZE)
            for name in ("logits_BSV", "q_halt_B", "q_continue_B"):
                torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=tolerance, atol=tolerance)
            digest = ours.logits_BSV.float().tolist(), ours.q_halt_B.tolist()
        elif layout.lockstep:
            with torch.no_grad():
                idle_segment(layout.model, SEQ_LEN, world.device)
        digests = world.gather_objects((world.data_rank, digest))
        assert all(theirs == digest for pipeline, theirs in digests if pipeline == world.data_rank), (
            "outputs differ between ranks of a pipeline, which would halt different slots"
        )
        with torch.no_grad():
            for weight in weights:
                weight.mul_(0.9)
        layout.values_changed()
        if num_slots < BATCH:
            _pipeline_step(layout, random_batch(BATCH), world)


Trained = tuple[list[float], dict[str, Tensor]]
"""The losses of some steps, and the weights after the last step."""


def _sign_step(model: RecursiveModel, ids_B: Tensor, grad_BE: Tensor) -> None:
    assert model.puzzle_embedding is not None
    table_PE = model.puzzle_embedding.weight
    for row in set(ids_B.tolist()):
        table_PE[row] -= LR * grad_BE[ids_B == row].sum(0).sign()


def _train_plainly() -> Trained:
    model = _stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        batch = random_batch(BATCH, seed=step)
        found = _plain_step(model, batch)
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, found.norm)
        assert found.norm > CLIP and found.rows_grad_BE is not None
        _sign_step(model, batch["puzzle_identifiers"], found.rows_grad_BE)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found.sums[-3]))
    return losses, model.state_dict()


def _check_training(world: World, config: PipelineConfig, reference: Trained) -> None:
    layout = _layout(world, config)
    optimizer = torch.optim.AdamW(layout.model.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        batch = random_batch(BATCH, seed=step)
        found = _pipeline_step(layout, batch, world)
        layout.clip_(CLIP, found.norm)
        assert found.rows_grad_BE is not None
        _sign_step(layout.model, batch["puzzle_identifiers"], world.gather_rows(found.rows_grad_BE, BATCH))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(found.sums[-3]))
        require_same_replicas(layout.model.state_dict(), step, world)
    reference_losses, reference_weights = reference
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference_losses), rtol=1e-5, atol=0)
    weights = whole_weights(layout, world)
    if world.is_main:
        assert weights.keys() == reference_weights.keys()
        for name, tensor in reference_weights.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-4, msg=name)


def _check_whole_weights(world: World, config: PipelineConfig) -> None:
    layout, expected = _layout(world, config), _stack().state_dict()
    weights = whole_weights(layout, world)
    held = layout.model.state_dict()
    assert all(torch.equal(whole(layout, name, tensor), expected[name]) for name, tensor in held.items())
    sharded = {name for name, tensor in held.items() if isinstance(tensor, DTensor)}
    assert sharded == {name for name in held if ".layers." in name and config.shard > 1}
    if world.is_main:
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


def _check_rank(world: World, trained: Trained) -> None:
    """Check every schedule on any number of ranks, and variants of the model on two ranks only."""
    for schedule in SCHEDULES:
        config = _config(schedule=schedule)
        here = _on_cpu(world, config)
        assert here.data_size == 1 and here.slice_of(BATCH) == slice(0, BATCH)
        for changes in VARIANTS.values() if world.size == 2 and schedule == "1f1b" else [{}]:
            _check_gradients(here, config, **changes)
        _check_whole_weights(here, config)
        _check_evaluation(here, config)
        if world.size > 1:
            _check_training(here, config, trained)
    if world.size == 2:
        fewer = _config(microbatches=2)
        _check_parts(here, fewer)
        _check_frozen(here, fewer)
        _check_evaluation(here, fewer, dtype="bfloat16", tolerance=0.1)


def _check_rank_of_two_pipelines(world: World, trained: Trained, shard: int) -> None:
    for schedule in SCHEDULES:
        config = _config(schedule=schedule, stages=2, microbatches=2, shard=shard)
        here = _on_cpu(world, config)
        assert here.slice_of(BATCH) == (slice(0, 4) if world.rank < 2 else slice(4, 8))
        _check_gradients(here, config)
        _check_parts(here, config)
        _check_whole_weights(here, config)
        _check_evaluation(here, config)
        _check_training(here, config, trained)
    _check_frozen(here, config)
    with patch("models.parallel.pipeline._BUCKET_BYTES", 4096):  # less than most tensors have
        _check_gradients(here, config)
    _check_gradients(_on_cpu(world, config, weights=[1.0, 3.0]), config)


def _check_rank_of_four_pipelines(world: World) -> None:
    config = _config(stages=2, microbatches=2, shard=2)
    here = _on_cpu(world, config)
    _check_gradients(here, config)
    _check_whole_weights(here, config)


@pytest.fixture(scope="module")
def trained() -> Trained:
    return _train_plainly()


# The default suite has no 4 ranks here, because tests/test_parallel.py trains on 4 ranks.
@pytest.mark.parametrize("num_ranks", [pytest.param(n, marks=[pytest.mark.slow] * (n != 2)) for n in (1, 2, 4)])
def test_a_pipeline_computes_what_one_process_computes(num_ranks: int, trained: Trained) -> None:
    run_ranks(_check_rank, num_ranks, trained)


@pytest.mark.invariance
@pytest.mark.parametrize("shard", [1, 2])
def test_two_pipelines_compute_what_one_process_computes(trained: Trained, shard: int) -> None:
    run_ranks(_check_rank_of_two_pipelines, 4, trained, shard, timeout_s=300)


@pytest.mark.invariance
def test_pipelines_shard_blocks_in_pairs_and_sum_over_the_pairs() -> None:
    run_ranks(_check_rank_of_four_pipelines, 8)


@pytest.mark.parametrize("name", ARCH_NAMES)
def test_a_recurrent_model_is_refused_with_the_reason(name: str) -> None:
    model = small_model(name, L_cycles=2, **RECURRENT.get(name, {}))
    with pytest.raises(UserError, match="needs a stack that is gone through once"):
        _config().require_support(model, World(size=2))


@pytest.mark.parametrize(
    ("num_layers", "schedule", "num_ranks", "advice"),
    [
        (3, "gpipe", 4, "take 4 layers or more, or parallel.stages=2"),
        (5, "interleaved", 4, "take 8 layers or more, or parallel.stages=2"),
        (1, "interleaved", 2, "take 4 layers or more, or another schedule"),
    ],
)
def test_too_few_blocks_are_refused(num_layers: int, schedule: str, num_ranks: int, advice: str) -> None:
    with pytest.raises(ValueError, match=f"arch.num_layers is {num_layers}, .*{advice}"):
        _config(schedule=schedule).require_support(_stack(num_layers=num_layers), World(size=num_ranks))
