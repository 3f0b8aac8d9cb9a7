"""What strategies refuse: degrees, sizes, models, options, dtypes and weights that never train."""

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from models.parallel import parallelize
from models.parallel.pipeline import PipelineConfig
from models.text.config import GPTConfig, HRMTextConfig, RINSTextConfig
from tests.models.helpers import ARCH_NAMES, RECURRENT, small_symbol_model
from tests.models.parallel.helpers import DIST, NUM_STEPS, config_of, model_of, start, train
from tests.models.text.helpers import make_config, make_model
from tests.spawn import run_ranks
from utils.errors import UserError
from utils.ranks.config import Axes
from utils.ranks.setup import connect_devices
from utils.ranks.world import World

PIPELINE = {"microbatches": 4, "schedule": "gpipe"}


@pytest.mark.parametrize(
    ("name", "changes", "num_ranks", "axes"),
    [
        ("tp", {}, 3, Axes(model=3)),
        ("fsdp_tp", {"tensor": 4}, 8, Axes(shard=2, model=4)),
        ("hsdp", {}, 8, Axes(replicate=2, shard=4)),  # missing degrees are as equal as possible
        ("hsdp", {"shard": 8}, 8, Axes(replicate=1, shard=8)),
        ("hsdp", {}, 1, Axes(replicate=1, shard=1)),
        ("pipeline", PIPELINE, 8, Axes(model=8)),
        ("pipeline", PIPELINE | {"stages": 2}, 8, Axes(replicate=4, model=2)),
        ("pipeline", PIPELINE | {"stages": 2, "shard": 2}, 8, Axes(replicate=2, shard=2, model=2)),
        ("pipeline", PIPELINE | {"shard": 2}, 8, Axes(shard=2, model=4)),
    ],
)
def test_degrees_that_are_not_given_are_filled_in(
    name: str, changes: dict[str, Any], num_ranks: int, axes: Axes
) -> None:
    assert config_of(name, **changes).axes(num_ranks) == axes


@pytest.mark.parametrize(
    ("name", "changes", "advice"),
    [
        ("hsdp", {"shard": 3}, "replicate x shard can be 1 x 4, 2 x 2, 4 x 1"),
        ("fsdp_tp", {"shard": 2, "tensor": 4}, r"shard 2 x tensor 4 doesn't make 4 ranks"),
        ("pipeline", {"stages": 3}, "stages of 1, 2, 4 with shard 1, .* multiple of 3 ranks"),
        ("pipeline", {"stages": 4, "shard": 2}, "stages of 1, 2 with shard 2, .* multiple of 8 ranks"),
        ("pipeline", {"shard": 3}, "stages of 1, 2, 4 with shard 1, .* multiple of 3 ranks"),
        ("pipeline", {"schedule": "1f1b", "microbatches": 2}, "take 4 or more, or schedule gpipe"),
        ("pipeline", {"schedule": "interleaved", "microbatches": 9}, "take 8 or 12"),
        ("pipeline", {"stages_per_rank": 2}, "set schedule to interleaved"),
        ("pipeline", {"puzzle_table": "sharded"}, "set it to replicated"),
        ("tp", {"puzzle_table": "sharded"}, "set it to replicated, or take fsdp_tp"),
    ],
)
def test_options_that_contradict_four_ranks_or_each_other(name: str, changes: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        config_of(name, **(PIPELINE if name == "pipeline" else {}) | changes).axes(4)


@pytest.mark.parametrize(
    ("name", "fitting", "num_parts", "advice"),
    [("tp", 4, 3, "give 1 or 2 or 4"), ("pipeline", 2, 3, "take 12 slots of global_batch_size for each")],
)
def test_microbatches_must_divide_the_slots(name: str, fitting: int, num_parts: int, advice: str) -> None:
    config = config_of(name, **(PIPELINE if name == "pipeline" else {}))
    config.require_parts(8, fitting)
    with pytest.raises(ValueError, match=advice):
        config.require_parts(8, num_parts)


@pytest.mark.parametrize("name", ["tp", "fsdp_tp"])
@pytest.mark.parametrize(
    ("arch", "changes", "num_ranks", "advice"),
    [
        ("hrm", {}, 3, "arch.num_heads 4 .* take one of 1, 2, 4 for tp"),
        ("urm", {}, 2, "conv_swiglu, .* take arch.mlp=swiglu"),
        ("hrm", {"mlp": "normalized_swiglu"}, 2, "normalized_swiglu, which normalises"),
        ("hrm", {"fp8_no_grad": True}, 2, "arch.fp8_no_grad .* set it to false, or take fsdp"),
        ("se_rrm", {"dropout": 0.2}, 2, "arch.dropout drops"),
        ("se_rrm", {"num_heads_t": 1}, 2, "divide arch.num_heads_t 1; take one of 1 for"),
        ("trm_mlp", {"expansion": 0.28, "width_multiple": 1}, 4, "divide the width of the MLP on"),
        ("se_mixer", {}, 2, "nothing that tp splits"),
    ],
)
def test_a_model_whose_tensors_ranks_cannot_split_is_refused(
    name: str, arch: str, changes: dict[str, Any], num_ranks: int, advice: str
) -> None:
    config, model = config_of(name), (small_symbol_model if arch.startswith("se_") else model_of)(arch, **changes)
    config.require_support(model, World(size=1))
    with pytest.raises(UserError, match=advice):
        config.require_support(model, World(size=num_ranks))


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"num_heads": 4, "num_kv_heads": 2}, "divide arch.num_kv_heads 2; take one of 1, 2 for tp"),
        ({"mlp": "gelu", "expansion": 0.375}, "divide the width of the MLP on 16 6; take one of 1, 2 for tp"),
    ],
)
def test_text_that_ranks_cannot_split_is_refused(options: dict[str, Any], advice: str) -> None:
    sizes = {"num_heads": 4, "num_kv_heads": 4, "expansion": 0.75, "width_multiple": 1}
    with pytest.raises(UserError, match=advice):
        config_of("tp").require_support(make_model(make_config(GPTConfig, **(sizes | options))), World(size=4))


@pytest.mark.parametrize(
    ("num_layers", "schedule", "num_ranks", "advice"),
    [
        (3, "gpipe", 4, "take 4 layers or more, or parallel.stages=2"),
        (5, "interleaved", 4, "take 8 layers or more, or parallel.stages=2"),
        (1, "interleaved", 2, "take 4 layers or more, or another schedule"),
    ],
)
def test_too_few_blocks_for_a_pipeline_are_refused(num_layers: int, schedule: str, num_ranks: int, advice: str) -> None:
    config, model = config_of("pipeline", schedule=schedule), model_of("transformer", num_layers=num_layers)
    three_each = config_of("pipeline", schedule="interleaved", stages_per_rank=3)
    assert isinstance(three_each, PipelineConfig) and three_each.num_stages(num_ranks) == 3 * num_ranks
    with pytest.raises(UserError, match=f"arch.num_layers is {num_layers}, .*{advice}"):
        config.require_support(model, World(size=num_ranks))


def test_a_model_that_is_no_stack_is_refused_by_a_pipeline() -> None:
    recurrent = [model_of(name, L_cycles=2, **RECURRENT.get(name, {})) for name in ARCH_NAMES]
    of_text = [make_model(make_config(each)) for each in (HRMTextConfig, RINSTextConfig)]
    for model in (*recurrent, *of_text):
        with pytest.raises(UserError, match="needs a stack that is gone through once"):
            config_of("pipeline").require_support(model, World(size=2))
    with pytest.raises(UserError, match=r"arch.tie_head=true gives them the same weights; set it to false"):
        config_of("pipeline").require_support(make_model(make_config(GPTConfig, tie_head=True)), World(size=2))


@pytest.mark.parametrize("name", ["fsdp", "hsdp", "fsdp_tp"])
def test_options_that_the_device_or_the_backend_lacks_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="the device is cpu; set it to false"):
        config_of(name, cpu_offload=True).require_support(model_of("hrm"), World.single())
    config = config_of(name, reduce_dtype="bfloat16")
    config.require_support(model_of("hrm"), World.single())
    with _failing_sums("Invalid scalar type"), pytest.raises(UserError, match="set it to float32"):
        config.require_support(model_of("hrm"), World.single())
    # Another error of the backend is not taken for an answer.
    with _failing_sums("connection closed by peer"), pytest.raises(RuntimeError, match="connection closed"):
        config.require_support(model_of("hrm"), World.single())


def _failing_sums(said: str) -> AbstractContextManager[Any]:
    def sum_(_: World, tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(said)

    return patch.object(World, "sum_", sum_)


def test_the_debug_level_that_crashes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch 2.13 ends DDP on gloo with SIGSEGV."""
    monkeypatch.setattr("models.parallel.ddp.get_debug_level", lambda: SimpleNamespace(name="DETAIL"))
    for backend in ("gloo", "cpu:gloo,cuda:gloo"):  # the second is that of ranks that share a GPU
        with pytest.raises(UserError, match=r"TORCH_DISTRIBUTED_DEBUG=DETAIL .*; set it to INFO, or take"):
            config_of("ddp").require_support(model_of("hrm"), World(backend=backend))
    config_of("ddp").require_support(model_of("hrm"), World(backend="cpu:gloo,cuda:nccl"))


# ---- weights that are never trained ------------------------------------------------------------


def _check_spare(world: World) -> None:
    for strategy in ("ddp", "fsdp", "tp"):
        for is_frozen in (False, True):
            model, config = model_of("hrm"), config_of(strategy)
            model.spare = torch.nn.Linear(4, 4).requires_grad_(not is_frozen)
            its_world = connect_devices(world, "cpu", DIST, axes=config.axes(world.size))
            wrong = pytest.raises(UserError, match=r"no gradient reaches spare.weight \(2 such parameters\)")
            with nullcontext() if is_frozen else wrong:
                layout = parallelize(model, config, its_world)
                train(layout, its_world, start(model, its_world), range(NUM_STEPS))


@pytest.mark.invariance
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_network_without_a_gradient_is_an_error_of_one_line(num_ranks: int) -> None:
    """The message of torch's DDP names no parameter. It comes a step later, and not on one rank."""
    run_ranks(_check_spare, num_ranks)
