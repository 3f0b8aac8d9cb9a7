"""The number of calls in a segment at each step, which calls carry gradient, and that gradient."""

# B = batch, T = positions, D = hidden size

from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from models.act import initial_carry, segment
from models.block import Level
from models.depth import Depth
from tests.models.helpers import (
    ARCH_NAMES,
    RECURRENT,
    fresh_state,
    gradients_of,
    in_training,
    random_batch,
    run,
    small_config,
    small_model,
)

BATCH = 2


@pytest.mark.parametrize(
    ("name", "backprop", "calls", "with_gradient"),
    [
        ("hrm", "one_step", 12, 2),  # 3 H cycles of 3 L calls and 1 H call; the last L call and H call carry gradient
        ("hrm", "last_H_cycle", 12, 4),
        ("hrm", "all", 12, 12),
        ("hrm", 100, 12, 12),
        ("trm", 5, 12, 5),
        ("urm", "one_step", 9, 1),  # one state, so that each loop is one call
        ("urm", "last_H_cycle", 9, 3),
        ("urm", 1, 9, 1),
        ("transformer", "last_H_cycle", 9, 3),
    ],
)
def test_calls_and_their_gradient(
    name: str, backprop: str | int, calls: int, with_gradient: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If not, `calls_of_H` of the config is wrong, and other calls carry gradient than it says."""
    model = small_model(name, H_cycles=3, L_cycles=3, backprop=backprop, **RECURRENT.get(name, {}))
    assert model.config.depth == Depth(3, 3, calls, with_gradient)
    found, recorded = list[bool](), MagicMock()
    monkeypatch.setattr("models.depth.record_function", recorded)
    for level in (module for module in model.modules() if isinstance(module, Level)):
        level.register_forward_pre_hook(lambda *_: found.append(torch.is_grad_enabled()))
    run(model, random_batch(BATCH))
    assert recorded.call_args_list == [call("forward without gradient")] * (calls - with_gradient)
    assert found == [False] * (calls - with_gradient) + [True] * with_gradient


@pytest.mark.parametrize(("name", "backprop", "least"), [("hrm", 1, 2), ("trm", 0, 2), ("urm", 0, 1), ("hrm", -3, 2)])
def test_gradient_must_reach_every_network(name: str, backprop: int, least: int) -> None:
    message = f"backprop is {backprop} calls, but {least} are needed .* give {least} or more, or one_step"
    with pytest.raises(ValidationError, match=message):
        small_config(name, backprop=backprop)


@pytest.mark.parametrize("backprop", ["one_step", "last_H_cycle", "all", 5])
@pytest.mark.parametrize(("name", "one_step"), [("hrm", 2), ("urm", 1)])
@pytest.mark.parametrize("warmup_steps", [0, 1, 7, 100])
def test_warmup_grows_from_one_step_to_all_of_backprop(
    name: str, one_step: int, backprop: str | int, warmup_steps: int
) -> None:
    config = small_config(name, H_cycles=3, L_cycles=3, backprop=backprop, backprop_warmup_steps=warmup_steps)
    full = config.depth
    depths = [config.depth_at(step, 200) for step in range(1, 201)]
    assert all((d.H_cycles, d.L_cycles, d.num_calls) == (3, 3, full.num_calls) for d in depths)
    with_gradient = [d.num_grad_calls for d in depths]
    assert with_gradient == sorted(with_gradient)
    assert set(with_gradient[max(warmup_steps - 1, 0) :]) == {full.num_grad_calls}
    if warmup_steps == 100:
        assert with_gradient[0] == one_step
        # Each number of calls lasts for equally many steps, within one step.
        lengths = [with_gradient[: warmup_steps - 1].count(n) for n in range(one_step, full.num_grad_calls)]
        assert not lengths or max(lengths) - min(lengths) <= 1


def _staged(*stages: tuple[float, int, int], **changes: Any) -> Any:
    curriculum = [{"until": until, "H_cycles": H, "L_cycles": L} for until, H, L in stages]
    return small_config("trm", **{"H_cycles": 3, "L_cycles": 6, "depth_curriculum": curriculum, **changes})


@pytest.mark.parametrize(
    ("ends", "last_step", "last_of_stages"),
    [
        ((0.25, 0.5), 8, (2, 4)),
        ((0.3, 0.6), 11, (3, 6)),  # the exact boundaries are 3.3 and 6.6
        ((0.1, 0.7), 1000, (100, 700)),
        ((0.29, 0.57), 100, (29, 57)),  # in floating point 0.57 * 100 is less than 57
    ],
)
def test_curriculum_changes_at_its_exact_boundaries(
    ends: tuple[float, float], last_step: int, last_of_stages: tuple[int, int]
) -> None:
    """A stage holds for the steps s with s / last_step <= until."""
    config = _staged((ends[0], 1, 2), (ends[1], 2, 4))
    for step in range(1, last_step + 1):
        depth = config.depth_at(step, last_step)
        first, second = last_of_stages
        expected = (1, 2) if step <= first else (2, 4) if step <= second else (3, 6)
        assert (depth.H_cycles, depth.L_cycles) == expected, f"step {step} of {last_step}"
        assert (depth.num_calls, depth.num_grad_calls) == (expected[0] * (expected[1] + 1), expected[1] + 1)
    assert config.depth_at(last_step, last_step) == config.depth == Depth(3, 6, 21, 7)


def test_warmup_and_curriculum_can_be_combined() -> None:
    config = _staged((0.5, 1, 2), backprop="all", backprop_warmup_steps=8)
    depths = [config.depth_at(step, 10) for step in range(1, 11)]
    assert [d.num_calls for d in depths] == [3] * 5 + [21] * 5
    # It goes from 2 to 3 calls in the first stage and from 2 to 21 in the second.
    assert [d.num_grad_calls for d in depths] == [2 + (1 if s < 6 else 19) * min(s, 8) // 8 for s in range(1, 11)]


def test_backprop_is_limited_to_the_calls_of_a_shallow_stage() -> None:
    config = _staged((0.5, 1, 2), backprop=5)
    assert [config.depth_at(step, 10) for step in (1, 10)] == [Depth(1, 2, 3, 3), Depth(3, 6, 21, 5)]


@pytest.mark.parametrize("ends", [(0.5, 0.5), (0.6, 0.3), (0.0,), (1.0,), (0.5, 1.2), (-0.1,)])
def test_stages_must_grow_within_the_run(ends: tuple[float, ...]) -> None:
    with pytest.raises(ValidationError, match="give increasing shares of the run"):
        _staged(*((end, 1, 1) for end in ends))


@pytest.mark.parametrize("name", ARCH_NAMES)
def test_forward_at_another_depth_is_the_model_of_that_depth(name: str) -> None:
    batch, changes = random_batch(BATCH), RECURRENT.get(name, {})
    deep = small_model(name, H_cycles=3, L_cycles=3, **changes)
    shallow = small_model(name, H_cycles=1, L_cycles=2, **changes)
    assert deep.state_dict().keys() == shallow.state_dict().keys()
    ours, theirs = run(deep, batch, depth=shallow.config.depth), run(shallow, batch)
    assert torch.equal(ours[1], theirs[1])
    assert not torch.equal(run(deep, batch)[1], theirs[1])


@pytest.mark.parametrize("of", ["z_H", "z_L"])
@pytest.mark.parametrize("name", ["hrm", "trm"])
def test_the_gradient_of_all_calls_is_the_slope_of_the_answer(name: str, of: str) -> None:
    model, batch = small_model(name, backprop="all"), random_batch(BATCH)
    start = fresh_state(model, BATCH)

    def answer(moved: Tensor) -> Tensor:
        return run(model, batch, state=start | {of: start[of] + moved})[1].square().sum()

    still = torch.zeros_like(start[of], requires_grad=True)
    (gradient,) = torch.autograd.grad(answer(still), still)
    step = 0.01 * gradient / gradient.norm()
    slope = (answer(step) - answer(-step)).detach() / 0.02
    torch.testing.assert_close(slope, gradient.norm(), rtol=0.05, atol=0)


@pytest.mark.parametrize("forward_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["hrm", "trm", "transformer", "urm"])
def test_activation_checkpointing_changes_no_bit_and_keeps_less(name: str, forward_dtype: str) -> None:
    layers = {"hrm": ["H_layers", "L_layers"], "trm": ["L_layers"]}.get(name, ["num_layers"])

    def trained(checkpointing: str) -> tuple[list[Tensor], int]:
        options: dict[str, Any] = dict.fromkeys(layers, 2) | {"forward_dtype": forward_dtype}
        model, num_bytes = small_model(name, activation_checkpointing=checkpointing, **options), 0

        def keep(tensor: Tensor) -> Tensor:
            nonlocal num_bytes
            num_bytes += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = run(model, random_batch(BATCH))
        gradients = gradients_of(model, output)
        return [*(tensor.detach() for tensor in output[1:]), *map(gradients.get, sorted(gradients))], num_bytes  # type: ignore[list-item]

    plain, kept = trained("none")
    by_block, kept_by_block = trained("block")
    by_cycle, kept_by_cycle = trained("cycle")
    for ours, first, second in zip(plain, by_block, by_cycle, strict=True):
        assert torch.equal(first, ours) and torch.equal(second, ours)
    assert kept_by_cycle < kept_by_block < kept / 2


def test_the_boolean_activation_checkpointing_of_older_runs_is_accepted() -> None:
    found = [small_config("hrm", activation_checkpointing=stored).activation_checkpointing for stored in (False, True)]
    assert found == ["none", "cycle"]


# ---- FP8 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        # Each call multiplies 4 times by a weight. 6 calls, of which 2 carry gradient; then 6 calls
        # for the target of q_continue.
        ("hrm", {}, 4 * (4 + 6)),
        ("hrm", {"no_ACT_continue": True}, 4 * 4),
        ("hrm", {"backprop": "all"}, 4 * 6),
        ("trm", {"activation_checkpointing": "block"}, 4 * 3),
        ("trm", {"activation_checkpointing": "cycle"}, 4 * 3),
        # 9 tokens and 3 positions of a prefix: the first product of mlp_t has 12 columns.
        ("trm", {"mlp_t": True}, 3 * 3),
        ("urm", {}, 4 * 2),
    ],
)
def test_fp8_is_for_calls_of_training_without_gradient(
    name: str, changes: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    products = []

    def product(a_MK: Tensor, b_NK: Tensor, dtype: torch.dtype) -> Tensor:
        products.append(torch.is_grad_enabled())
        return a_MK @ b_NK.T

    monkeypatch.setattr("models.layers.fp8_product", product)
    model, batch = small_model(name, fp8_no_grad=True, **changes), random_batch(BATCH)
    _, outputs = segment(model, initial_carry(model, batch), batch, in_training(model))
    outputs.logits_BSV.sum().backward()
    assert products == [False] * expected
    products.clear()
    with torch.no_grad():
        segment(model, initial_carry(model, batch), batch)
    assert not products


@pytest.mark.parametrize(
    ("name", "changes", "schedule"),
    [
        ("hrm", {"backprop": "all", "halt_max_steps": 1}, {}),
        ("transformer", {}, {}),
        ("trm", {"backprop": "all"}, {"backprop_warmup_steps": 9}),
        (
            "trm",
            {"backprop": 3, "H_cycles": 1},
            {"depth_curriculum": [{"until": 0.5, "H_cycles": 2, "L_cycles": 2}]},
        ),
    ],
)
def test_fp8_without_a_call_to_compute_is_refused(name: str, changes: dict[str, Any], schedule: dict[str, Any]) -> None:
    small_config(name, **changes)
    with pytest.raises(ValidationError, match="every call carries gradient; set fp8_no_grad to false, or backprop"):
        small_config(name, fp8_no_grad=True, **changes)
    if schedule:  # leaves calls for FP8
        small_config(name, fp8_no_grad=True, **changes, **schedule)


def test_fp8_needs_a_hidden_size_that_it_can_multiply() -> None:
    with pytest.raises(ValidationError, match="hidden_size is 24"):
        small_config("hrm", fp8_no_grad=True, hidden_size=24, puzzle_emb_ndim=24)
