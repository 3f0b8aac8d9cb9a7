"""Cross-entropies, the loss and the metrics of a batch equal their definitions."""

# B = slots, S = tokens, V = vocabulary

import math
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F

from models.carry import Outputs
from models.losses import METRICS, LossConfig, LossType, act_loss, stablemax, token_cross_entropy

IGNORE = -100


def _config(loss_type: LossType, *, label_smoothing: float = 0.0, halt_weight: float = 0.5) -> LossConfig:
    return LossConfig(loss_type=loss_type, label_smoothing=label_smoothing, halt_weight=halt_weight)


def _naive_stablemax_loss(logits: list[float], label: int) -> float:
    def s(x: float) -> Fraction:
        return Fraction(x) + 1 if x >= 0 else 1 / (1 - Fraction(x))

    share = s(logits[label]) / sum(s(x) for x in logits)
    return math.log(share.denominator) - math.log(share.numerator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "logits",
    [[0.0, -0.0, 0.0], [1.0, -1.0, 0.5], [1e4, -1e4, 0.0], [-1e30, 1e30, 1.0], [-1e-30, 1e-30, -3.0], [-50, -60, -70]],
)
def test_stablemax_is_exact_for_extreme_logits(logits: list[float], dtype: torch.dtype) -> None:
    logits_V = torch.tensor(logits, dtype=dtype)
    for label in range(3):
        loss = token_cross_entropy(
            logits_V.view(1, 1, 3),
            torch.tensor([[label]]),
            config=_config("stablemax_cross_entropy"),
        )
        assert loss.dtype == torch.float64
        # 1e-14 is the rounding error of the difference of two logarithms in float64.
        expected = _naive_stablemax_loss(logits_V.tolist(), label)
        assert loss.item() == pytest.approx(expected, rel=1e-12, abs=1e-14), f"label {label}"


def test_stablemax_gradient_is_right_where_its_unused_branch_is_singular() -> None:
    x = torch.tensor([1.0, 0.0, -1.0, 3.0, -1e30], dtype=torch.float64, requires_grad=True)
    stablemax(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == pytest.approx([1.0, 1.0, 0.25, 1.0, 0.0])


LOGITS_BSV = 5 * torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1))
LABELS_BS = torch.tensor([[0, 5, IGNORE], [2, IGNORE, 1]], dtype=torch.int32)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.75])
@pytest.mark.parametrize("loss_type", ["stablemax_cross_entropy", "softmax_cross_entropy"])
def test_label_smoothing_equals_its_definition(loss_type: LossType, smoothing: float) -> None:
    """The target spreads `smoothing` over the whole vocabulary, including the label."""
    config = _config(loss_type, label_smoothing=smoothing)
    loss_BS = token_cross_entropy(LOGITS_BSV, LABELS_BS, config=config)
    for b in range(2):
        for s in range(3):
            label, logits = int(LABELS_BS[b, s]), LOGITS_BSV[b, s].tolist()
            if loss_type == "softmax_cross_entropy":
                weights = [math.exp(x) for x in logits]
            else:
                weights = [x + 1 if x >= 0 else 1 / (1 - x) for x in logits]
            expected = 0.0
            for v, weight in enumerate(weights):
                share = (1 - smoothing) * (v == label) + smoothing / len(weights)
                expected -= share * math.log(weight / sum(weights))
            assert loss_BS[b, s].item() == pytest.approx(0.0 if label == IGNORE else expected, rel=1e-5)


def _bce(logit: float, target: float) -> float:
    probability = 1 / (1 + math.exp(-logit))
    return -target * math.log(probability) - (1 - target) * math.log(1 - probability)


# The predicted token has logit 9, the two other tokens have 0. The five slots: right; half right;
# wrong; right but not halted; without labels.
PREDICTED = [[0, 1], [0, 1], [2, 2], [1, 1], [0, 0]]
LABELS = [[0, 1], [0, 2], [IGNORE, 0], [1, IGNORE], [IGNORE, IGNORE]]
HALTED = [True, True, True, False, True]
STEPS = [2, 3, 4, 1, 4]
Q_HALT = [0.5, 0.0, -1.0, 2.0, 3.0]
Q_CONTINUE = [0.1, 0.2, -0.3, 0.4, -0.5]
TARGET = [0.9, 0.8, 0.1, 0.5, 0.0]
RIGHT = [1.0, 0.0, 0.0, 1.0, 1.0]  # a slot without labels counts as right


def _outputs(*, with_target: bool) -> Outputs:
    return Outputs(
        logits_BSV=(9 * F.one_hot(torch.tensor(PREDICTED), 3)).float().requires_grad_(),
        q_halt_B=torch.tensor(Q_HALT, requires_grad=True),
        q_continue_B=torch.tensor(Q_CONTINUE, requires_grad=True),
        target_q_continue_B=torch.tensor(TARGET) if with_target else None,
        puzzle_rows_BE=None,
    )


@pytest.mark.parametrize("with_target", [True, False])
@pytest.mark.parametrize("loss_type", ["stablemax_cross_entropy", "softmax_cross_entropy"])
@pytest.mark.parametrize("halt_weight", [0.0, 0.5, 2.0])
def test_loss_and_metrics_of_a_batch_made_by_hand(loss_type: LossType, with_target: bool, halt_weight: float) -> None:
    outputs = _outputs(with_target=with_target)
    loss, sums = act_loss(
        outputs,
        torch.tensor(LABELS, dtype=torch.int32),
        halted_B=torch.tensor(HALTED),
        steps_B=torch.tensor(STEPS, dtype=torch.int32),
        config=_config(loss_type, halt_weight=halt_weight),
    )
    # The weight of the predicted token. The other tokens have weight 1.
    weight = 10.0 if loss_type == "stablemax_cross_entropy" else math.exp(9)
    hit, miss = math.log((weight + 2) / weight), math.log(weight + 2)
    lm_loss = (hit + hit) / 2 + (hit + miss) / 2 + miss + hit + 0
    q_halt_loss = sum(map(_bce, Q_HALT, RIGHT))
    q_continue_loss = sum(map(_bce, Q_CONTINUE, TARGET)) if with_target else 0.0
    expected = {
        "count": 3.0,  # the first three slots have halted and have labels
        "accuracy": 1.0 + 0.5 + 0.0,
        "exact_accuracy": 1.0,
        "q_halt_accuracy": 2.0,  # right for slots 0 and 2; in slot 1 the value 0 means halt, but the answer is wrong
        "steps": 9.0,
        "lm_loss": lm_loss,
        "q_halt_loss": q_halt_loss,
        "q_continue_loss": q_continue_loss,
    }
    assert sums.dtype == torch.float64 and not sums.requires_grad
    named = dict(zip(METRICS, sums.tolist(), strict=True))
    assert {name: named[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert loss.item() == pytest.approx(lm_loss + halt_weight * (q_halt_loss + q_continue_loss), rel=1e-5)

    loss.backward()
    gradient_BSV = outputs.logits_BSV.grad
    assert gradient_BSV is not None and torch.isfinite(gradient_BSV).all()
    is_ignored_BS = torch.tensor(LABELS) == IGNORE
    assert (gradient_BSV[is_ignored_BS] == 0).all(), "an ignored token has a gradient"
    assert (gradient_BSV[~is_ignored_BS].abs().sum(-1) > 0).all()
    assert (outputs.q_continue_B.grad is not None) == with_target
    assert outputs.q_halt_B.grad is not None and bool(outputs.q_halt_B.grad.any()) == (halt_weight > 0)
