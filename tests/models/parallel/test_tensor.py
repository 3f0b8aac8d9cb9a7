"""Tensor parallelism refuses sizes and layers that it can't split, and names possible sizes."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from dataset.schema import IGNORE_LABEL
from models.parallel import parallelize
from models.parallel.layout import Layout
from models.text.config import GPTConfig, TextConfig
from models.text.model import TextModel
from models.text.objective import TextBatch, TextRow, TextSettings
from models.text.packing import Packing
from tests.models.parallel.helpers import DIST, close, config_of, model_of, whole
from tests.models.text.helpers import ARCHS as TEXT_ARCHS
from tests.models.text.helpers import NUM_TOKENS, SEQUENCES, make_config, make_model, make_row
from tests.spawn import run_ranks
from utils.errors import UserError
from utils.ranks.config import Axes
from utils.ranks.setup import connect_devices
from utils.ranks.world import World


def _world(num_ranks: int) -> World:
    """Return a world whose ranks all hold the same slots, for checks that call no other rank."""
    return World(size=num_ranks)


def test_degrees_must_multiply_to_the_number_of_ranks() -> None:
    assert config_of("tp").axes(3) == Axes(model=3)
    assert config_of("fsdp_tp", tensor=4).axes(8) == Axes(shard=2, model=4)
    with pytest.raises(ValueError, match=r"shard 2 x tensor 4 doesn't make 4 ranks"):
        config_of("fsdp_tp", shard=2, tensor=4).axes(4)


@pytest.mark.parametrize("name", ["tp", "fsdp_tp"])
def test_sizes_must_be_divisible_by_the_ranks(name: str) -> None:
    config_of(name).require_support(model_of("hrm"), _world(4))
    with pytest.raises(UserError) as caught:
        config_of(name).require_support(model_of("hrm"), _world(3))
    assert str(caught.value) == (
        "parallel: 3 ranks don't divide arch.num_heads 4 and the width of the MLP on 32 256; take one of 1, 2, 4 for "
        "tp (with fsdp_tp: parallel.tensor), or other sizes"
    )


@pytest.mark.parametrize("name", ["tp", "fsdp_tp"])
def test_an_mlp_that_mixes_the_components_of_its_width_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"conv_swiglu, which convolves its inner width, .* take arch.mlp=swiglu"):
        config_of(name).require_support(model_of("urm"), _world(2))
    with pytest.raises(UserError, match="normalized_swiglu, which normalises"):
        config_of(name).require_support(model_of("hrm", mlp="normalized_swiglu"), _world(2))
    config_of(name).require_support(model_of("urm"), _world(1))


@pytest.mark.parametrize("name", ["tp", "fsdp_tp"])
def test_fp8_is_refused(name: str) -> None:
    model = model_of("hrm", fp8_no_grad=True)
    with pytest.raises(UserError, match=r"arch.fp8_no_grad scales whole rows .* set it to false, or take fsdp"):
        config_of(name).require_support(model, _world(2))
    config_of(name).require_support(model, _world(1))


def test_a_sharded_table_is_refused_by_tp() -> None:
    with pytest.raises(ValidationError, match="set it to replicated, or take fsdp_tp"):
        config_of("tp", puzzle_table="sharded")


# ---- text --------------------------------------------------------------------------------------


def _text_model(config_class: type[TextConfig], **options: Any) -> TextModel:
    wide = {"hidden_size": 32, "num_heads": 4, **options}
    if config_class is GPTConfig:
        wide = {"num_kv_heads": 2, **wide}
    return make_model(make_config(config_class, **wide))


def _text_gradients(layout: Layout) -> dict[str, Tensor]:
    config = layout.model.config
    assert isinstance(config, TextConfig)
    row = TextRow(*make_row(), Packing(SEQUENCES, NUM_TOKENS))
    settings = TextSettings(config.num_calls, IGNORE_LABEL)
    layout.forward_backward(None, TextBatch([row], num_labels=7), settings)
    return {name: whole(layout, name, of.grad) for name, of in layout.model.named_parameters() if of.grad is not None}


def _check_text(world: World) -> None:
    """Compare every architecture, with grouped queries, gates, a GELU and a tied head."""
    variants: list[tuple[type[TextConfig], dict[str, Any]]] = [(each, {}) for each in TEXT_ARCHS]
    variants += [(GPTConfig, {"mlp": "gelu", "tie_head": True}), (GPTConfig, {"num_kv_heads": 4})]
    for config_class, options in variants:
        alone = _text_model(config_class, **options)
        expected = _text_gradients(Layout(alone, World.single()))
        for strategy in ("tp", "fsdp_tp") if world.size == 4 else ("tp", "fsdp"):
            config = config_of(strategy, tensor=2) if strategy == "fsdp_tp" else config_of(strategy)
            if config_class is GPTConfig and strategy == "tp" and world.size == 4 and options.get("num_kv_heads") != 4:
                with pytest.raises(UserError, match=r"4 ranks don't divide arch\.num_kv_heads 2; take one of 1, 2 "):
                    config.require_support(alone, World(size=4))
                continue
            its_world = connect_devices(world, "cpu", DIST, axes=config.axes(world.size))
            with torch.device("meta"):
                model = TextModel(alone.config, vocab_size=alone.vocab_size)
            layout = parallelize(model, config, its_world)
            layout.load(alone.state_dict().items())
            found, case = _text_gradients(layout), f"{config_class.__name__} {options} {strategy} x {world.size}"
            assert found.keys() == expected.keys(), case
            for name, gradient in expected.items():
                # Ranks with rows of their own would sum the gradients of the same row.
                close(found[name] / its_world.data_size, gradient, f"{case}: {name}", 3e-5)
            for name, tensor in layout.model.state_dict().items():
                assert torch.equal(whole(layout, name, tensor), alone.state_dict()[name]), f"{case}: {name}"


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.invariance)])
def test_models_of_text_have_the_gradients_of_one_process(num_ranks: int) -> None:
    run_ranks(_check_text, num_ranks)
