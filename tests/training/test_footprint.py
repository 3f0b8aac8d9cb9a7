"""Counted memory is that which a step takes on a CPU, as torch's profiler tells it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import pretrain
from dataset.build_text_dataset import main
from dataset.schema import IGNORE_LABEL
from dataset.text.schema import open_text_split
from models import build_on_meta
from models.parallel import parallelize
from models.text.config import CallCounts
from models.text.objective import TextBatch, TextRow, TextSettings
from models.text.packing import Packing
from tests.in_process import Begun, begin
from tests.spawn import run_ranks
from training.config import PretrainConfig
from training.data import Sizes, TextSizes
from training.footprint import (
    ACTIVATIONS,
    AVERAGE,
    CARRY,
    GATHERED,
    GRADIENTS,
    MOMENTS,
    TABLE,
    UPDATE,
    WEIGHTS,
    Allocations,
    Footprint,
    Footprints,
)
from utils.command_line import read_config, validate
from utils.errors import UserError
from utils.ranks.setup import connect_devices
from utils.ranks.world import World

TINY = ["debug=tiny", "device=cpu", "arch.hidden_size=64", "eval_every_n_steps=null", "max_steps=1"]
SIZES = Sizes(seq_len=81, vocab_size=11, num_puzzle_identifiers=1001)

VARIANTS = {
    "hrm_blocks_again": ["arch.activation_checkpointing=block", "ema=true"],
    "hrm_calls_again": ["arch.activation_checkpointing=cycle", "arch.backprop=all", "optim=adamw"],
    "hrm_in_four": ["grad_accumulation=4"],
    "trm_mlp": ["arch=trm_mlp", "arch.width_multiple=16", "optim=muon"],
    "se_rrm_dropping": ["arch=se_rrm", "arch.head_dim=16", "arch.dropout=0.2", "arch.activation_checkpointing=block"],
    "transformer": ["arch=transformer", "freeze=blocks", "arch.pos_encodings=learned"],
}
TEXTS = {
    "hrm_text_blocks_again": ["arch=hrm_text", "arch.activation_checkpointing=block", "ema=true"],
    "trm_text_in_two": ["arch=trm_text", "grad_accumulation=2"],
    "gpt": ["arch=gpt", "arch.num_kv_heads=1", "arch.mlp=gelu", "arch.tie_head=true", "optim=adamw"],
    "gpt_calls_again": ["arch=gpt", "arch.attention=prefixlm", "arch.activation_checkpointing=cycle"],
}


def _config(*overrides: str) -> PretrainConfig:
    return validate(PretrainConfig, read_config("pretrain", [*TINY, *overrides]))


def _counted(num_ranks: int, *overrides: str) -> Footprint:
    return Footprints(SIZES, num_ranks).of(_config(*overrides))


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class Measured:
    """What a step takes: what is there before it, and the most that the profiler saw at a time."""

    def __init__(self, begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
        self._own_step = pretrain.train_step
        self.peak = 0
        state = begun.state
        table = 0 if state.model.puzzle_embedding is None else state.model.puzzle_embedding.weight.nbytes
        own = {**dict(state.model.named_parameters()), **dict(state.model.named_buffers())}
        self.parts = {
            WEIGHTS: _bytes(own.values()) - table,
            MOMENTS: _bytes(state.optimizers.export_state(state.model).values()),
            AVERAGE: 0 if state.ema is None else _bytes(state.ema.tensors().values()),
            TABLE: table,
        }
        monkeypatch.setattr(pretrain, "train_step", self._step)

    def _step(self, state: Any, batch: Any, *arguments: Any) -> Any:
        given = list[Tensor]()
        if state.carry is None:
            batch.apply(lambda tensor: given.append(tensor))
        else:
            given = [*state.carry.tensors().values(), *batch.values()]
        self.parts[CARRY] = _bytes(given)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = self._own_step(state, batch, *arguments)
        self.peak = max(_levels(profiler))
        return result


def _levels(profiler: Any) -> Iterator[int]:
    """Yield how many bytes more are allocated than at the start, after each allocation."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    level = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        level += event.nbytes()
        yield level


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_takes_what_was_counted(
    variant: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _check_step([f"data_path={data}", *VARIANTS[variant]], tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples that all have 62 tokens, so that a row of 248 tokens holds four of them."""
    folder = tmp_path_factory.mktemp("texts")
    lines = [json.dumps({"instruction": f"{i:030}", "response": f"{7 * i:030}"}) for i in range(200)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    main(["--output-dir", str(folder / "data"), "--source", str(folder / "texts.jsonl")])
    return folder / "data"


@pytest.mark.parametrize("variant", TEXTS)
def test_a_step_of_text_takes_what_was_counted(
    variant: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [f"data_path={texts}", "global_batch_size=1984", "rows_per_step=8", "arch.num_layers=4"]
    _check_step([*rows, *TEXTS[variant]], tmp_path, monkeypatch)


def _check_step(overrides: list[str], run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a step, and check that it needs what was counted.

    The count has all gradients before the backward pass. In a first step they come while
    activations go.
    """
    arch = [each for each in overrides if each.startswith("arch=")]
    begun = begin([*arch, *TINY, *overrides, f"checkpoint_path={run}"])
    measured = Measured(begun, monkeypatch)
    counted = Footprints(begun.data.sizes, 1).of(begun.start.config).parts
    begun.fit()
    assert {name: counted[name] for name in measured.parts} == measured.parts
    most = counted[GRADIENTS] + counted[ACTIVATIONS] + counted[UPDATE]
    assert 0.98 * (most - counted[GRADIENTS]) <= measured.peak <= 1.02 * most


def test_a_rank_holds_what_its_strategy_leaves_it() -> None:
    alone = _counted(1, "ema=true").parts
    ddp = _counted(4, "ema=true").parts
    assert {ddp[name] / alone[name] for name in (WEIGHTS, GRADIENTS, MOMENTS, AVERAGE, TABLE)} == {1}
    assert ddp[CARRY] == alone[CARRY] / 4, "a rank has a quarter of the slots"
    assert _counted(2, "dist.rank_weights=[3,1]").parts[CARRY] == _counted(1, "global_batch_size=12").parts[CARRY]
    assert _counted(4, "parallel.puzzle_table=sharded").parts[TABLE] == -(-alone[TABLE] // 4)

    assert _counted(4, "parallel.gradient_as_bucket_view=false").parts[GRADIENTS] == 2 * ddp[GRADIENTS]

    fsdp = _counted(4, "ema=true", "parallel=fsdp").parts
    for name in (WEIGHTS, MOMENTS):
        assert fsdp[name] == pytest.approx(alone[name] / 4, rel=0.05), name
    assert fsdp[AVERAGE] == pytest.approx((alone[AVERAGE] - alone[TABLE]) / 4 + alone[TABLE], rel=0.05)
    assert fsdp[TABLE] == alone[TABLE] and fsdp[ACTIVATIONS] == ddp[ACTIVATIONS]
    hsdp = _counted(4, "parallel=hsdp").parts  # 2 x 2
    assert hsdp[WEIGHTS] == pytest.approx(alone[WEIGHTS] / 2, rel=0.05)

    tp = _counted(2, "parallel=tp").parts
    assert tp[WEIGHTS] == pytest.approx(alone[WEIGHTS] / 2, rel=0.1)
    assert tp[CARRY] == alone[CARRY] and alone[ACTIVATIONS] / 2 < tp[ACTIVATIONS] < alone[ACTIVATIONS]


def test_sharded_weights_are_gathered_for_a_call() -> None:
    again, kept = (
        _counted(4, "parallel=fsdp", f"parallel.reshard_after_forward={reshards}").parts
        for reshards in ("true", "false")
    )
    whole = _counted(1).parts
    assert again[GATHERED] < kept[GATHERED] == whole[WEIGHTS] - 4 * (2 * 64 + 2 * 82 * 32), "all but buffers"
    half = _counted(4, "parallel=fsdp", "parallel.param_dtype=forward_dtype", "arch.forward_dtype=bfloat16").parts
    assert half[GATHERED] < again[GATHERED]
    # Before the last microbatch, gradients are not summed over the ranks, and stay whole.
    parts = _counted(4, "parallel=fsdp", "grad_accumulation=2").parts
    assert parts[GRADIENTS] > whole[GRADIENTS] > again[GRADIENTS]


def test_offloaded_shards_and_their_update_are_on_the_host() -> None:
    fsdp = ["parallel=fsdp", "ema=true", "global_batch_size=64"]
    own = _counted(4, *fsdp)
    offloaded = _counted(4, *fsdp, "parallel.cpu_offload=true")
    assert own.on_host == 0 and offloaded.peak < own.peak
    assert offloaded.parts[WEIGHTS] == 4 * (2 * 64 + 2 * 82 * 32), "buffers stay"
    assert offloaded.parts[MOMENTS] == 0 and offloaded.parts[AVERAGE] == offloaded.parts[TABLE] == own.parts[TABLE]
    shards = own.parts[WEIGHTS] - offloaded.parts[WEIGHTS]
    average = own.parts[AVERAGE] - offloaded.parts[AVERAGE]
    assert offloaded.on_host == 2 * shards + own.parts[MOMENTS] + average, "weights, gradients, moments and average"
    assert offloaded.parts[GRADIENTS] == own.parts[GRADIENTS] - shards
    for name in (GATHERED, CARRY, ACTIVATIONS):
        assert offloaded.parts[name] == own.parts[name], name


@pytest.mark.parametrize(
    ("num_ranks", "overrides", "message"),
    [
        (8, ["parallel=tp"], "8 ranks"),
        (3, [], "global_batch_size=16"),
        (4, ["grad_accumulation=3"], "the 4 slots"),
        (2, ["parallel=pipeline"], "arch=transformer"),
    ],
)
def test_what_cannot_run_is_refused_as_a_run_would(num_ranks: int, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _counted(num_ranks, *overrides)


def test_a_rank_of_a_pipeline_has_its_blocks_and_the_microbatches_under_way() -> None:
    whole = ["arch=transformer", "arch.num_layers=8"]
    pipeline = [*whole, "parallel=pipeline"]
    alone, staged = _counted(1, *whole).parts, _counted(4, *pipeline).parts
    assert alone[WEIGHTS] / 4 < staged[WEIGHTS] < alone[WEIGHTS] / 3, "two of eight blocks, and the ends"
    # The first of 4 ranks has 4 of 8 microbatches under way; with gpipe it has all 8.
    assert staged[ACTIVATIONS] == pytest.approx(alone[ACTIVATIONS] / 4 / 2, rel=0.1)
    gpipe = _counted(4, *pipeline, "parallel.schedule=gpipe").parts
    assert gpipe[ACTIVATIONS] == pytest.approx(2 * staged[ACTIVATIONS], rel=0.1)
    interleaved = _counted(4, *pipeline, "parallel.schedule=interleaved").parts
    assert staged[ACTIVATIONS] < interleaved[ACTIVATIONS] < 2 * staged[ACTIVATIONS]
    sharded = _counted(8, *pipeline, "parallel.shard=2", "global_batch_size=32").parts
    assert sharded[MOMENTS] < staged[MOMENTS] and sharded[GATHERED] > 0


_PIPELINE = ["arch=gpt", "arch.num_layers=8", "parallel=pipeline", "global_batch_size=7936", "rows_per_step=8"]
_TOKENS = 992  # of a row


@pytest.mark.invariance
def test_the_ranks_of_a_pipeline_take_about_what_was_counted(texts: Path) -> None:
    sizes = TextSizes.of(open_text_split(texts, "train"))
    counted = Footprints(sizes, 2).of(_config(*_PIPELINE))
    peaks = run_ranks(_step_of_rank, 2, sizes)
    assert max(peaks) == pytest.approx(counted.parts[ACTIVATIONS], rel=0.3)


def _step_of_rank(world: World, sizes: TextSizes) -> int:
    """Return the most bytes that a second step takes."""
    config = _config(*_PIPELINE)
    world = connect_devices(world, "cpu", axes=config.parallel.axes(world.size))
    model = build_on_meta(config.arch, **sizes.of_model())
    layout = parallelize(model, config.parallel, world)
    for weight in model.parameters():
        torch.nn.init.constant_(weight, 0.01)
    zeros_N, kernel = torch.zeros(_TOKENS, dtype=torch.int32), config.text_arch.attention_kernel
    rows = [TextRow(zeros_N, zeros_N, zeros_N, Packing([(31, 31)] * 16, _TOKENS, kernel=kernel)) for _ in range(8)]
    batch, settings = TextBatch(rows, 100), TextSettings(CallCounts(H=1, L=0), IGNORE_LABEL)
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            layout.forward_backward(None, batch, settings)
    return max(_levels(profiler))


def test_each_microbatch_leaves_its_carry() -> None:
    one = _counted(1, "global_batch_size=12").parts
    four = _counted(1, "global_batch_size=48", "grad_accumulation=4").parts
    assert four[CARRY] == 4 * one[CARRY]
    assert four[ACTIVATIONS] - one[ACTIVATIONS] >= 3 * one[CARRY], "the next carries of three microbatches wait"


# ---- tensors without memory ----------------------------------------------------------------------


def test_tensors_count_as_long_as_they_live() -> None:
    given = torch.empty(100, device="meta")
    with (allocations := Allocations([given])).counting():
        first = given + 1
        second = first * 2
        view = first[:10]
        del first
        assert allocations.live == 800, "the view takes no memory, and keeps its storage"
        del view
        given.add_(1)
        assert allocations.live == 400, "a tensor that was there does not count"
    assert allocations.peak == 800 and len(second) == 100


def test_attention_on_the_meta_device_keeps_no_scores() -> None:
    own = F.scaled_dot_product_attention
    q = torch.empty(2, 4, 256, 8, device="meta", requires_grad=True)
    k = torch.empty(2, 2, 256, 8, device="meta", requires_grad=True)
    mask = torch.ones(2, 1, 256, 256, device="meta", dtype=torch.bool)
    scores = 2 * 4 * 256 * 256 * 4
    for options, of_mask in (({"is_causal": True}, 0), ({"attn_mask": mask}, scores // 4)):
        allocations = Allocations([q, k, mask])
        with allocations.counting():
            attended = F.scaled_dot_product_attention(q, k, k, enable_gqa=True, **options)
            assert 0 < allocations.live - of_mask < scores / 4, options
            attended.sum().backward()
        assert k.grad is not None and k.grad.shape == k.shape
    assert F.scaled_dot_product_attention is own
