"""Every text model computes what its equations say, forward and backward."""

from typing import Any
from unittest.mock import MagicMock, Mock, call

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from models.text.config import (
    CallCounts,
    GPTConfig,
    HRMTextConfig,
    RINSTextConfig,
    TextConfig,
    TransformerTextConfig,
    TRMTextConfig,
    UTTextConfig,
)
from models.text.model import TextModel
from models.text.packing import Packing
from models.text.stack_config import Sequences
from tests.models.text.helpers import ARCHS, NUM_TOKENS, SEQUENCES, make_config, make_model, make_row, plain_logits
from utils.batch import IGNORE_LABEL

CASES: list[tuple[type[TextConfig], dict[str, Any]]] = [
    *((arch, {}) for arch in ARCHS),
    *((arch, {"attention": "causal"}) for arch in ARCHS),
    *((arch, {"activation_checkpointing": kept}) for arch in ARCHS for kept in ("block", "cycle")),
    (HRMTextConfig, {"norm_type": "post"}),
    (HRMTextConfig, {"pos_encodings": "none"}),
    (HRMTextConfig, {"half_layers": False, "bp_min_steps": 2, "bp_max_steps": 2}),
    (HRMTextConfig, {"H_override": {"num_layers": 3, "num_heads": 4, "expansion": 4.0, "attention": "causal"}}),
    (HRMTextConfig, {"H_override": {"norm_type": "post", "rope_theta": 7.0, "init_type": "fixed_normal"}}),
    (RINSTextConfig, {"H_override": {"pos_encodings": "none"}, "L_bp_cycles": 0}),
    (TRMTextConfig, {"init_type": "megatron", "H_bp_steps": 2}),
    (UTTextConfig, {"init_type": "fixed_normal", "init_std": 0.1, "norm_type": "post"}),
    (GPTConfig, {"mlp": "gelu", "tie_head": True, "num_kv_heads": 2}),
    (GPTConfig, {"num_heads": 4, "num_kv_heads": 2, "norm_type": "post"}),
]


def _loss(model: TextModel, grad_calls: CallCounts, sequences: Sequences = SEQUENCES) -> Tensor:
    inputs_N, labels_N, positions_N = make_row()
    packing = Packing(sequences, NUM_TOKENS)
    loss: Tensor = model(inputs_N, labels_N, positions_N, packing, grad_calls=grad_calls)[0]
    return loss


@pytest.mark.parametrize(("arch", "options"), CASES, ids=str)
def test_loss_and_gradients_are_those_of_the_equations(
    arch: type[TextConfig], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, of_blocks = MagicMock(), Mock(return_value=None)
    monkeypatch.setattr("models.text.model.record_function", recorded)
    model = make_model(make_config(arch, **options))
    for block in model.blocks():
        block.register_forward_pre_hook(of_blocks)
    inputs_N, labels_N, positions_N = make_row()
    grad_calls = model.config.grad_calls_at(1, 10)
    loss = _loss(model, grad_calls)
    before = of_blocks.call_count
    loss.backward()
    assert (of_blocks.call_count > before) == (model.config.activation_checkpointing != "none"), "computed again"
    calls = model.config.num_calls
    num_without = max(0, calls.H - grad_calls.H) + max(0, calls.L - grad_calls.L)
    assert recorded.call_args_list == [call("forward without gradient")] * num_without
    ours = {name: weight.grad for name, weight in model.named_parameters()}
    if model.lm_head is not None:  # otherwise the head gives the embedding a gradient
        assert (ours["embed_tokens.weight"] is not None) == model.config.embedding_has_gradient(grad_calls)
    model.zero_grad()
    logits_NV = plain_logits(model, inputs_N, positions_N, SEQUENCES, grad_calls)
    expected = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORE_LABEL, reduction="sum")
    expected.backward()

    torch.testing.assert_close(loss.double(), expected, rtol=2e-5, atol=0)
    for name, weight in model.named_parameters():
        grad = ours[name]
        assert (grad is None) == (weight.grad is None), f"{name}: a gradient of zero is not the same as none"
        if grad is not None and weight.grad is not None:
            assert torch.allclose(grad, weight.grad, rtol=2e-4, atol=2e-5), name


@pytest.mark.parametrize(
    ("grad_calls", "has_gradient"),
    [
        (CallCounts(H=1, L=1), False),
        (CallCounts(H=1, L=3), False),  # the last cycle of L has z_H of the first H call, a constant
        (CallCounts(H=2, L=1), True),
        (CallCounts(H=1, L=4), True),
    ],
)
def test_the_embedding_has_a_gradient_only_where_a_call_with_gradient_sees_it(
    grad_calls: CallCounts, has_gradient: bool
) -> None:
    model = make_model(make_config(HRMTextConfig))
    _loss(model, grad_calls).backward()
    assert (model.embed_tokens.weight.grad is not None) == has_gradient
    assert model.config.embedding_has_gradient(grad_calls) == has_gradient


@pytest.mark.parametrize("arch", ARCHS)
def test_bfloat16_is_close_to_float32(arch: type[TextConfig]) -> None:
    exact, rounded = (make_model(make_config(arch, forward_dtype=dtype)) for dtype in ("float32", "bfloat16"))
    grad_calls = exact.config.grad_calls_at(1, 10)
    torch.testing.assert_close(_loss(rounded, grad_calls), _loss(exact, grad_calls), rtol=2e-2, atol=0)
    inputs_N, _, positions_N = make_row()
    y_ND = rounded.hidden(inputs_N, positions_N, Packing(SEQUENCES, NUM_TOKENS), grad_calls)
    assert rounded.logits(y_ND).dtype == torch.bfloat16


def test_a_seed_gives_one_model_and_every_tensor_has_values() -> None:
    config = make_config(HRMTextConfig)
    one, same, other = (make_model(config, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in one)
    assert one["zL_init"].dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("init_type", "init_std", "inner", "attention_output", "mlp_output"),
    [
        ("lecun_normal", None, 64**-0.5, 64**-0.5, 256**-0.5),
        ("fixed_normal", None, 0.02, 0.02, 0.02),
        ("fixed_normal", 0.3, 0.3, 0.3, 0.3),
        ("megatron", None, 64**-0.5, 64**-0.5 / 2, 64**-0.5 / 2),
        ("megatron", 0.1, 0.1, 0.05, 0.05),
    ],
)
def test_initial_weights_have_the_deviations_of_their_type(
    init_type: str, init_std: float | None, inner: float, attention_output: float, mlp_output: float
) -> None:
    sizes = {"hidden_size": 64, "expansion": 4.0, "width_multiple": 256}
    config = make_config(TransformerTextConfig, init_type=init_type, init_std=init_std, **sizes)
    model = make_model(config)
    assert config.embedding_scale == pytest.approx(1 / inner)
    expected = {"o_proj": attention_output, "down_proj": mlp_output}
    for name, weight in model.named_parameters():
        if weight.numel() > 2000:
            assert weight.std().item() == pytest.approx(expected.get(name.split(".")[-2], inner), rel=0.06), name


@pytest.mark.parametrize("checkpointing", ["none", "block"])
def test_other_sequences_in_a_row_compile_nothing_anew(checkpointing: str) -> None:
    counter = CompileCounterWithBackend("eager")
    plain, compiled = (make_model(make_config(HRMTextConfig, activation_checkpointing=checkpointing)) for _ in range(2))
    torch._dynamo.reset()
    for stack in compiled.stacks().values():
        stack.compile(backend=counter)
    counts, grad_calls = [], plain.config.num_calls
    for sequences in (SEQUENCES, [(7, 3), (4, 4)], [(1, 9)], [(3, 3), (1, 1), (9, 2), (2, 2)]):
        losses = [_loss(model, grad_calls, sequences) for model in (plain, compiled)]
        torch.testing.assert_close(*losses)
        losses[1].backward()
        counts.append(counter.frame_count)
    assert len(set(counts)) == 1 and counts[0] > 0
