"""Options of text models: how many calls carry gradient, and what does not fit together."""

from typing import Any

import pytest
from pydantic import ValidationError

from models.text.config import (
    CallCounts,
    GPTConfig,
    HRMTextConfig,
    RINSTextConfig,
    TextConfig,
    TRMTextConfig,
    UTTextConfig,
)
from tests.models.text.helpers import make_config


@pytest.mark.parametrize(
    ("arch", "options", "expected"),
    [
        (HRMTextConfig, {"bp_min_steps": 2, "bp_max_steps": 2}, (1, 1)),
        (HRMTextConfig, {"bp_min_steps": 3, "bp_max_steps": 3}, (2, 1)),
        (HRMTextConfig, {}, (2, 3)),
        (HRMTextConfig, {"bp_max_steps": 20}, (2, 18)),
        (HRMTextConfig, {"H_cycles": 4, "bp_max_steps": 4}, (3, 1)),
        (TRMTextConfig, {}, (1, 2)),
        (UTTextConfig, {}, (0, 2)),
        (RINSTextConfig, {}, (1, 2)),
        (GPTConfig, {}, (1, 0)),
    ],
)
def test_the_last_calls_of_each_role_carry_gradient(
    arch: type[TextConfig], options: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert make_config(arch, **options).grad_calls_at(1, 100) == CallCounts(*expected)


def test_the_calls_with_gradient_grow_over_the_warm_up() -> None:
    config = make_config(HRMTextConfig, bp_warmup_ratio=0.8)
    assert isinstance(config, HRMTextConfig)
    # 12 steps, so the warm-up has 9.6: 2 + floor(step / 9.6 * 3)
    assert [config.bp_steps_at(step, 12) for step in range(1, 13)] == [2, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 5]
    assert config.grad_calls_at(1, 12) == CallCounts(H=1, L=1)


def test_a_gelu_is_as_wide_as_its_expansion_says_and_a_gpt_scales_no_embedding() -> None:
    config = make_config(GPTConfig, mlp="gelu", expansion=4.0, hidden_size=16)
    (shape,) = config.stacks.values()
    assert (shape.width, shape.stds.mlp_output, config.embedding_scale) == (64, 1 / 8, 1.0)


@pytest.mark.parametrize(
    ("arch", "options", "message"),
    [
        (HRMTextConfig, {"num_heads": 3}, "not divisible by num_heads 3"),
        (HRMTextConfig, {"hidden_size": 6, "num_heads": 2}, "rope positions turn pairs"),
        (HRMTextConfig, {"init_std": 0.1}, r"init_std 0\.1 is for init_type fixed_normal and megatron; set it"),
        (HRMTextConfig, {"num_layers": 3}, "even number of layers"),
        (HRMTextConfig, {"bp_min_steps": 6}, "bp_min_steps 6 is more than bp_max_steps 5"),
        (HRMTextConfig, {"bp_min_steps": 1}, "bp_min_steps\n.*greater than or equal to 2"),
        (HRMTextConfig, {"H_override": {"hidden_size": 32}}, "H_override has hidden_size"),
        (RINSTextConfig, {"H_override": {"num_heads": 5}}, "H_override: .*num_heads 5"),
        (GPTConfig, {"num_heads": 4, "num_kv_heads": 3}, "not divisible by num_kv_heads 3"),
        (UTTextConfig, {"half_layers": True}, "half_layers"),
    ],
)
def test_what_does_not_fit_together_is_named(arch: type[TextConfig], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        make_config(arch, **options)


def test_the_override_changes_the_H_stack_alone() -> None:
    override = {"num_layers": 3, "num_heads": 4, "norm_type": "post"}
    config = make_config(HRMTextConfig, num_layers=4, init_type="megatron", H_override=override)
    H, L = config.stacks["H_level"], config.stacks["L_level"]
    assert (H.num_layers, H.num_heads, H.norm) == (3, 4, "post")  # its layers are not halved
    assert (L.num_layers, L.num_heads, L.norm) == (2, 2, "pre")
    depths = [(stack.stds.inner / stack.stds.mlp_output) ** 2 / 2 for stack in (H, L)]
    assert depths == pytest.approx([3, 2]), "the deviation follows the layers of the stack, not num_layers"
