"""Counted memory is that which a step takes on a CPU, as torch's profiler tells it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import pretrain
from dataset.build_text_dataset import main
from tests.in_process import Begun, begin, pretrain_config
from training.data import Sizes
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
    Bytes,
    Footprints,
)
from utils.errors import UserError

TINY = ["debug=tiny", "device=cpu", "arch.hidden_size=64", "eval_every_n_steps=null", "max_steps=1"]
SIZES = Sizes(seq_len=81, vocab_size=11, num_puzzle_identifiers=1001)

VARIANTS = {
    "hrm_blocks_again": ["arch.activation_checkpointing=block", "ema=true"],
    "hrm_calls_again": ["arch.activation_checkpointing=cycle", "arch.backprop=all", "optim=adamw"],
    "trm_mlp": ["arch=trm_mlp", "arch.width_multiple=16", "optim=muon"],
    "se_rrm_dropping": ["arch=se_rrm", "arch.head_dim=16", "arch.dropout=0.2", "arch.activation_checkpointing=block"],
    "transformer": ["arch=transformer", "freeze=blocks", "arch.pos_encodings=learned"],
    "hrm_text_blocks_again": ["arch=hrm_text", "arch.activation_checkpointing=block", "ema=true"],
    "trm_text_in_two": ["arch=trm_text", "grad_accumulation=2"],
    "gpt": ["arch=gpt", "arch.num_kv_heads=1", "arch.mlp=gelu", "arch.tie_head=true", "optim=adamw"],
}


def _counted(num_ranks: int, *overrides: str) -> Bytes:
    return Footprints(SIZES, num_ranks).of(pretrain_config(*TINY, *overrides))


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


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Samples that all have 62 tokens, so that a row of 248 tokens holds four of them."""
    folder = tmp_path_factory.mktemp("texts")
    lines = [json.dumps({"instruction": f"{i:030}", "response": f"{7 * i:030}"}) for i in range(200)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    main(["--output-dir", str(folder / "data"), "--source", str(folder / "texts.jsonl")])
    return folder / "data"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_takes_what_was_counted(
    variant: str, data: Path, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All gradients are counted, which in a first step come while activations go."""
    overrides = VARIANTS[variant]
    if "text" in variant or "gpt" in variant:
        rows = [f"data_path={texts}", "global_batch_size=1984", "rows_per_step=8", "arch.num_layers=4"]
    else:
        rows = [f"data_path={data}"]
    arch = [each for each in overrides if each.startswith("arch=")]
    begun = begin([*arch, *TINY, *rows, *overrides, f"checkpoint_path={tmp_path}"])
    measured = Measured(begun, monkeypatch)
    counted = Footprints(begun.data.sizes, 1).of(begun.start.config)
    begun.fit()
    assert {name: counted[name] for name in measured.parts} == measured.parts
    most = counted[GRADIENTS] + counted[ACTIVATIONS] + counted[UPDATE]
    assert 0.98 * (most - counted[GRADIENTS]) <= measured.peak <= 1.02 * most


def test_a_rank_holds_what_its_strategy_leaves_it() -> None:
    alone = _counted(1, "ema=true")
    ddp = _counted(4, "ema=true")
    assert {ddp[name] / alone[name] for name in (WEIGHTS, GRADIENTS, MOMENTS, AVERAGE, TABLE)} == {1}
    assert ddp[CARRY] == alone[CARRY] / 4, "a rank has a quarter of the slots"
    assert _counted(2, "dist.rank_weights=[3,1]")[CARRY] == _counted(1, "global_batch_size=12")[CARRY]
    assert _counted(4, "parallel.puzzle_table=sharded")[TABLE] == -(-alone[TABLE] // 4)

    assert _counted(4, "parallel.gradient_as_bucket_view=false")[GRADIENTS] == 2 * ddp[GRADIENTS]

    fsdp = _counted(4, "ema=true", "parallel=fsdp")
    for name in (WEIGHTS, MOMENTS):
        assert fsdp[name] == pytest.approx(alone[name] / 4, rel=0.05), name
    assert fsdp[AVERAGE] == pytest.approx((alone[AVERAGE] - alone[TABLE]) / 4 + alone[TABLE], rel=0.05)
    assert fsdp[TABLE] == alone[TABLE] and fsdp[ACTIVATIONS] == ddp[ACTIVATIONS]
    assert not any(_counted(4, "parallel=fsdp", "parallel.cpu_offload=true")[name] for name in (MOMENTS, UPDATE))
    kept = _counted(4, "parallel=fsdp", "parallel.reshard_after_forward=false")
    cast = _counted(4, "parallel=fsdp", "parallel.param_dtype=forward_dtype", "arch.forward_dtype=bfloat16")
    assert kept[GATHERED] > fsdp[GATHERED] > cast[GATHERED], "all blocks, two blocks, two of half the size"
    assert _counted(4, "parallel=fsdp", "grad_accumulation=2")[GRADIENTS] > fsdp[GRADIENTS]
    hsdp = _counted(4, "parallel=hsdp")  # 2 x 2
    assert hsdp[WEIGHTS] == pytest.approx(alone[WEIGHTS] / 2, rel=0.05)

    tp, variants = _counted(2, "parallel=tp"), Footprints(SIZES, 2)
    in_two = ["parallel=tp", "grad_accumulation=2"]  # as many slots at a time as ddp
    variants.of(pretrain_config(*TINY))
    assert variants.of(pretrain_config(*TINY, *in_two)) == _counted(2, *in_two)
    assert tp[WEIGHTS] == pytest.approx(alone[WEIGHTS] / 2, rel=0.1)
    assert tp[CARRY] == alone[CARRY] and alone[ACTIVATIONS] / 2 < tp[ACTIVATIONS] < alone[ACTIVATIONS]


def test_what_cannot_run_is_refused_as_a_run_would() -> None:
    for num_ranks, overrides, message in (
        (8, ["parallel=tp"], "8 ranks"),
        (3, [], "global_batch_size=16"),
        (4, ["grad_accumulation=3"], "the 4 slots"),
        (2, ["parallel=pipeline"], "arch=transformer"),
    ):
        with pytest.raises(UserError, match=message):
            _counted(num_ranks, *overrides)


def test_a_rank_of_a_pipeline_has_its_blocks_and_the_microbatches_under_way() -> None:
    whole = ["arch=transformer", "arch.num_layers=8"]
    pipeline = [*whole, "parallel=pipeline"]
    alone, staged = _counted(1, *whole), _counted(4, *pipeline)
    assert alone[WEIGHTS] / 4 < staged[WEIGHTS] < alone[WEIGHTS] / 3, "two of eight blocks, and the ends"
    # The first of 4 ranks has 4 of 8 microbatches under way; with gpipe it has all 8.
    assert staged[ACTIVATIONS] == pytest.approx(alone[ACTIVATIONS] / 4 / 2, rel=0.1)
    gpipe = _counted(4, *pipeline, "parallel.schedule=gpipe")
    assert gpipe[ACTIVATIONS] == pytest.approx(2 * staged[ACTIVATIONS], rel=0.1)
    interleaved = _counted(4, *pipeline, "parallel.schedule=interleaved")
    assert staged[ACTIVATIONS] < interleaved[ACTIVATIONS] <= gpipe[ACTIVATIONS]
    sharded = _counted(8, *pipeline, "parallel.shard=2", "global_batch_size=32")
    assert sharded[MOMENTS] < staged[MOMENTS] and sharded[GATHERED] > 0
