"""Counted memory is that which a step takes on a CPU, as autograd and torch's profiler tell it."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import pretrain
from dataset.build_text_dataset import main
from dataset.schema import IGNORE_LABEL
from dataset.text.schema import open_text_split
from models import build_on_meta
from models.model import Model
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
    BUFFERS,
    CARRY,
    GATHERED,
    GRADIENTS,
    LOGITS,
    MOMENTS,
    PARTS,
    TABLE,
    WEIGHTS,
    WORKING,
    Footprint,
    Footprints,
    _Held,
    axes_of,
    before_head,
)
from utils.command_line import read_config, validate
from utils.errors import UserError
from utils.perf.allocations import SavedTensors
from utils.ranks.setup import connect_devices
from utils.ranks.world import World

TINY = ["debug=tiny", "device=cpu", "arch.hidden_size=64", "eval_every_n_steps=null", "max_steps=1"]
SIZES = Sizes(seq_len=81, vocab_size=11, num_puzzle_identifiers=1001)

VARIANTS = {
    "hrm": ["arch.H_cycles=2", "arch.L_cycles=2"],
    "hrm_blocks_again": ["arch.activation_checkpointing=block", "ema=true"],
    "hrm_calls_again": ["arch.activation_checkpointing=cycle", "arch.backprop=all", "optim=adamw"],
    "hrm_in_four": ["grad_accumulation=4"],
    "trm": ["arch=trm", "optim=muon"],
    "trm_mlp": ["arch=trm_mlp", "arch.width_multiple=16"],
    "urm": ["arch=urm"],
    "se_rrm": ["arch=se_rrm", "arch.add_tokens=2", "arch.puzzle_emb_ndim=1", "arch.head_dim=16"],
    "se_rrm_dropping": ["arch=se_rrm", "arch.dropout=0.2", "arch.activation_checkpointing=block"],
    "se_mixer": ["arch=se_mixer"],
    "se_mixer_attention": ["arch=se_mixer", "arch.cells=attention", "arch.activation_checkpointing=block"],
    "se_mixer_mlp": ["arch=se_mixer", "arch.cells=mlp", "arch.activation_checkpointing=cycle", "optim=muon"],
    "transformer": ["arch=transformer", "freeze=blocks", "arch.pos_encodings=learned"],
}


TEXTS = {
    "hrm_text": ["arch=hrm_text"],
    "hrm_text_blocks_again": ["arch=hrm_text", "arch.activation_checkpointing=block", "ema=true"],
    "trm_text_in_two": ["arch=trm_text", "grad_accumulation=2"],
    "gpt": ["arch=gpt", "arch.num_kv_heads=1", "arch.mlp=gelu", "arch.tie_head=true", "optim=adamw"],
    "gpt_calls_again": ["arch=gpt", "arch.attention=prefixlm", "arch.activation_checkpointing=cycle"],
}


def _config(*overrides: str) -> PretrainConfig:
    return validate(PretrainConfig, read_config("pretrain", [*TINY, *overrides]))


def _counted(num_ranks: int, *overrides: str) -> Footprint:
    return Footprints(_config(*overrides), SIZES, num_ranks).of()


def _bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class Measured:
    """What a step takes: what autograd keeps, and the most that the profiler saw at a time."""

    def __init__(self, begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
        self._own_step = pretrain.train_step
        self.kept: dict[str, int] = {}
        self.peak = 0
        state = begun.state
        self.weights = _bytes({**dict(state.model.named_parameters()), **dict(state.model.named_buffers())}.values())
        self.table = 0 if state.model.puzzle_embedding is None else state.model.puzzle_embedding.weight.nbytes
        self.moments = _bytes(state.optimizers.export_state(state.model).values())
        self.average = 0 if state.ema is None else _bytes(state.ema.tensors().values())
        monkeypatch.setattr(pretrain, "train_step", self._step)

    def _step(self, state: Any, batch: Any, *arguments: Any) -> Any:
        model: Model = state.model
        given = list[Tensor]()
        if state.carry is None:
            batch.apply(lambda tensor: given.append(tensor))
        else:
            given = [*state.carry.tensors().values(), *batch.values()]
        self.carry = _bytes(given)
        saved = SavedTensors(ACTIVATIONS, [*model.parameters(), *model.buffers(), *given])
        at_head = before_head(model, lambda: saved.begin(LOGITS))
        with at_head, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler, saved.counting():
            result = self._own_step(state, batch, *arguments)
        self.kept = saved.bytes_of_parts
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
    measured, counted, config = _measured_and_counted([f"data_path={data}", *VARIANTS[variant]], tmp_path, monkeypatch)
    if config.grad_accumulation == 1:  # SavedTensors doesn't see where a microbatch begins
        assert {name: counted.parts[name] for name in measured.kept} == measured.kept


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
    measured, counted, config = _measured_and_counted([*rows, *TEXTS[variant]], tmp_path, monkeypatch)
    if config.grad_accumulation == 1:
        assert counted.parts[ACTIVATIONS] == measured.kept[ACTIVATIONS]


def _measured_and_counted(
    overrides: list[str], run: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Measured, Footprint, PretrainConfig]:
    """Take a step, and check that it needs what was counted."""
    arch = [each for each in overrides if each.startswith("arch=")]
    begun = begin([*arch, *TINY, *overrides, f"checkpoint_path={run}"])
    measured = Measured(begun, monkeypatch)
    counted = Footprints(begun.start.config, begun.data.sizes, 1, device="cpu").of()
    begun.fit()
    parts = counted.parts
    assert parts[WEIGHTS] == measured.weights - measured.table
    assert (parts[MOMENTS], parts[AVERAGE], parts[TABLE]) == (measured.moments, measured.average, measured.table)
    assert parts[CARRY] == measured.carry
    always = sum(parts[name] for name in (WEIGHTS, MOMENTS, AVERAGE, TABLE, CARRY))
    assert counted.peak - always == pytest.approx(measured.peak, rel=0.01)
    return measured, counted, begun.start.config


def test_a_rank_holds_what_its_strategy_leaves_it() -> None:
    alone = _counted(1, "ema=true").parts
    ddp = _counted(4, "ema=true").parts
    assert {ddp[name] / alone[name] for name in (WEIGHTS, GRADIENTS, MOMENTS, AVERAGE, TABLE)} == {1}
    assert ddp[CARRY] == alone[CARRY] / 4, "a rank has a quarter of the slots"

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
        _counted(4, "parallel=fsdp", f"parallel.reshard_after_forward={reshards}") for reshards in ("true", "false")
    )
    whole = _counted(1).parts
    assert again.parts[GATHERED] < kept.parts[GATHERED] == whole[WEIGHTS] - 4 * (2 * 64 + 2 * 82 * 32), (
        "all but buffers"
    )
    half = _counted(4, "parallel=fsdp", "parallel.param_dtype=forward_dtype", "arch.forward_dtype=bfloat16").parts
    assert half[GATHERED] < again.parts[GATHERED]
    # Before the last microbatch, gradients are not summed over the ranks, and stay whole.
    parts = _counted(4, "parallel=fsdp", "grad_accumulation=2").parts
    assert parts[GRADIENTS] > whole[GRADIENTS] > again.parts[GRADIENTS]


def test_offloaded_shards_and_their_update_are_on_the_host() -> None:
    fsdp = ["parallel=fsdp", "ema=true", "global_batch_size=64"]
    own = _counted(4, *fsdp)
    offloaded = _counted(4, *fsdp, "parallel.cpu_offload=true")
    assert own.on_host == 0 and offloaded.peak < own.peak and not offloaded.is_update
    assert offloaded.parts[WEIGHTS] == 4 * (2 * 64 + 2 * 82 * 32), "buffers stay"
    assert offloaded.parts[MOMENTS] == 0 and offloaded.parts[AVERAGE] == offloaded.parts[TABLE] == own.parts[TABLE]
    shards = own.parts[WEIGHTS] - offloaded.parts[WEIGHTS]
    average = own.parts[AVERAGE] - offloaded.parts[AVERAGE]
    assert offloaded.on_host == 2 * shards + own.parts[MOMENTS] + average, "weights, gradients, moments and average"
    # What is gathered and what is summed stay on the device, and the shards of a unit pass through.
    passing = offloaded.parts[GATHERED] - own.parts[GATHERED]
    assert 0 < passing < shards
    assert offloaded.parts[GRADIENTS] == own.parts[GRADIENTS] - shards + passing
    for name in (CARRY, ACTIVATIONS, LOGITS, WORKING):
        assert offloaded.parts[name] == own.parts[name], name


@pytest.mark.parametrize("strategy", ["fsdp", "tp"])
def test_muon_gathers_a_whole_matrix_on_every_rank(strategy: str) -> None:
    config = _config("arch=trm", "arch.hidden_size=512", "arch.num_heads=8", "optim=muon", f"parallel={strategy}")
    (rows, columns) = max(weight.shape for weight in build_on_meta(config.arch, **SIZES.of_model()).block_weights())
    whole, gram = 2 * rows * columns, 2 * columns**2  # bfloat16
    # The gathered matrix, two more of an iteration with two Gram matrices, and the rank's own part.
    assert _Held.of(config, SIZES, 8, "cuda").update_peak == pytest.approx(3 * whole + 2 * gram + whole / 8, rel=0.01)
    assert _Held.of(config, SIZES, 1, "cuda").update_peak > 3 * whole


def test_muon_of_all_matrices_gathers_embeddings_too() -> None:
    sizes = replace(SIZES, vocab_size=2**16)
    common = ("arch=trm", "arch.hidden_size=64", "parallel=fsdp", "optim=muon_urm")
    of_all, of_blocks = (
        _Held.of(_config(*common, f"optim.muon_matrices={matrices}"), sizes, 4, "cuda").update_peak
        for matrices in ("all", "blocks")
    )
    whole, gram = 2 * 2**16 * 64, 2 * 64**2  # bfloat16
    assert of_all == pytest.approx(3 * whole + 2 * gram + whole / 4, rel=0.01)
    assert of_blocks < of_all


def test_a_table_and_gradients_may_be_held_in_other_ways() -> None:
    table = _counted(1).parts[TABLE]
    assert _counted(4, "parallel.puzzle_table=sharded").parts[TABLE] == -(-1001 // 4) * 64 * 4 < table == 1001 * 64 * 4
    once = _counted(4).parts[GRADIENTS]
    assert _counted(4, "parallel.gradient_as_bucket_view=false").parts[GRADIENTS] == 2 * once


def test_the_rank_with_the_most_slots_counts() -> None:
    assert _counted(2, "dist.rank_weights=[3,1]").parts[CARRY] == _counted(1, "global_batch_size=12").parts[CARRY]


def test_a_large_model_is_counted_on_any_machine() -> None:
    """build_arch refuses a model that is larger than the memory of the machine."""
    options = ["arch.hidden_size=32768", "arch.num_heads=64", "arch.forward_dtype=bfloat16"]
    counted = _counted(64, *options, "parallel=fsdp", "global_batch_size=64")
    assert counted.parts[WEIGHTS] * 64 > 4e11
    assert set(counted.parts) == set(PARTS)


@pytest.mark.parametrize(
    ("num_ranks", "overrides", "message"),
    [
        (8, ["parallel=tp"], "8 ranks don't divide arch.num_heads 2"),
        (3, [], "global_batch_size=16 can't be split over 3 ranks"),
        (4, ["grad_accumulation=3"], "doesn't divide the 4 slots"),
        (8, ["parallel=hsdp", "parallel.replicate=3"], "doesn't make 8 ranks"),
        (2, ["parallel=pipeline"], "only arch=transformer"),
    ],
)
def test_what_cannot_run_is_refused_as_a_run_would(num_ranks: int, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _counted(num_ranks, *overrides)


def test_a_rank_of_a_pipeline_has_its_stages_and_the_microbatches_under_way() -> None:
    whole = ["arch=transformer", "arch.num_layers=8"]
    pipeline = [*whole, "parallel=pipeline"]
    alone, staged = _counted(1, *whole).parts, _counted(4, *pipeline).parts
    assert alone[WEIGHTS] / 4 < staged[WEIGHTS] < alone[WEIGHTS] / 3, "two of eight blocks, and embeddings or heads"
    # The first of 4 ranks has 4 of 8 microbatches under way; with gpipe it has all 8.
    assert staged[ACTIVATIONS] == pytest.approx(alone[ACTIVATIONS] / 4 / 2, rel=0.1)
    gpipe = _counted(4, *pipeline, "parallel.schedule=gpipe").parts
    assert gpipe[ACTIVATIONS] == pytest.approx(2 * staged[ACTIVATIONS], rel=0.1)
    interleaved = _counted(4, *pipeline, "parallel.schedule=interleaved").parts
    assert staged[ACTIVATIONS] < interleaved[ACTIVATIONS] < 2 * staged[ACTIVATIONS]
    sharded = _counted(8, *pipeline, "parallel.shard=2", "global_batch_size=32").parts
    assert sharded[MOMENTS] < staged[MOMENTS] and sharded[GATHERED] > 0


def test_a_rank_of_a_pipeline_of_text_has_its_stages_and_the_rows_under_way(texts: Path) -> None:
    sizes = TextSizes.of(open_text_split(texts, "train"))
    whole = ["arch=gpt", "arch.num_layers=8", "global_batch_size=1984", "rows_per_step=8"]

    def parts(num_ranks: int, *overrides: str) -> dict[str, int]:
        return Footprints(_config(*whole, *overrides), sizes, num_ranks).of().parts

    alone, staged = parts(1), parts(4, "parallel=pipeline")
    assert alone[WEIGHTS] / 4 < staged[WEIGHTS] < alone[WEIGHTS] / 3, "two of eight blocks, and embedding or head"
    assert staged[ACTIVATIONS] == pytest.approx(alone[ACTIVATIONS] / 4 / 2, rel=0.1), "4 of 8 rows are under way"
    assert parts(4, "parallel=pipeline", "parallel.schedule=gpipe")[ACTIVATIONS] == pytest.approx(
        2 * staged[ACTIVATIONS], rel=0.1
    )


_PIPELINE = ["arch=gpt", "arch.num_layers=8", "parallel=pipeline", "global_batch_size=7936", "rows_per_step=8"]
_TOKENS = 992  # of a row


def _pipeline_of_text(num_ranks: int, sizes: TextSizes, *overrides: str) -> Footprint:
    return Footprints(_config(*_PIPELINE, *overrides), sizes, num_ranks, device="cpu").of()


def test_what_a_stage_keeps_of_a_row_counts_for_each_row_under_way(texts: Path) -> None:
    sizes = TextSizes.of(open_text_split(texts, "train"))
    counted = _pipeline_of_text(4, sizes, "arch.activation_checkpointing=block")
    assert counted.stages == "stage 1 of 4"
    x_ND, table_NH = _TOKENS * 64 * 4, _TOKENS * 32 * 4
    # The inputs of two blocks, what goes to the next stage, and the cosines and sines of the row. 4
    # of 8 rows are under way.
    of_row = 3 * x_ND + 2 * table_NH
    assert counted.parts[ACTIVATIONS] == pytest.approx(4 * of_row, rel=0.02)
    assert counted.parts[BUFFERS] == 8 * x_ND, "for the gradients from the next stage"


def test_the_last_stage_has_logits_and_all_that_it_returned(texts: Path) -> None:
    sizes = replace(TextSizes.of(open_text_split(texts, "train")), vocab_size=65536)
    counted = _pipeline_of_text(4, sizes, "parallel.schedule=gpipe")
    assert counted.stages == "stage 4 of 4"
    alone = Footprints(_config(*_PIPELINE, "parallel=ddp", "grad_accumulation=8"), sizes, 1).of()
    assert counted.parts[LOGITS] == alone.parts[LOGITS] > _TOKENS * 65536
    assert counted.parts[BUFFERS] == 2 * 8 * _TOKENS * 64 * 4, "what 8 rows brought and what they gave"


def test_the_stages_of_a_rank_have_their_numbers() -> None:
    pipeline = ["arch=transformer", "arch.num_layers=8", "parallel=pipeline", "parallel.schedule=interleaved"]
    assert _counted(4, *pipeline).stages in ("stages 1 and 5 of 8", "stages 2 and 6 of 8", "stages 4 and 8 of 8")
    assert _counted(4, "arch=transformer").stages is None


def test_a_rank_of_a_pipeline_takes_what_was_counted(texts: Path) -> None:
    sizes = TextSizes.of(open_text_split(texts, "train"))
    counted = _pipeline_of_text(2, sizes)
    assert counted.stages is not None
    peak, left = run_ranks(_step_of_rank, 2, sizes)[int(counted.stages.split()[1]) - 1]
    assert left == pytest.approx(counted.parts[BUFFERS], abs=100)
    assert peak == pytest.approx(sum(counted.parts[name] for name in (ACTIVATIONS, LOGITS, WORKING)), rel=0.01)


def _step_of_rank(world: World, sizes: TextSizes) -> tuple[int, int]:
    """Return the most bytes that a second step takes, and those that the first leaves of itself."""
    config = _config(*_PIPELINE)
    world = connect_devices(world, "cpu", axes=axes_of(config.parallel, world.size))
    model = build_on_meta(config.arch, **sizes.of_model())
    layout = parallelize(model, config.parallel, world)
    for weight in model.parameters():
        torch.nn.init.constant_(weight, 0.01)
    zeros_N, kernel = torch.zeros(_TOKENS, dtype=torch.int32), config.text_arch.attention_kernel
    rows = [TextRow(zeros_N, zeros_N, zeros_N, Packing([(31, 31)] * 16, _TOKENS, kernel=kernel)) for _ in range(8)]
    batch, settings = TextBatch(rows, 100), TextSettings(CallCounts(H=1, L=0), IGNORE_LABEL)
    levels = []
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            layout.forward_backward(None, batch, settings)
        levels.append(list(_levels(profiler)))
    gradients = _bytes(weight.grad for weight in model.parameters() if weight.grad is not None)
    return max(levels[1]), levels[0][-1] - gradients
