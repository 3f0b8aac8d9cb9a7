"""The training loss and the metric sums of one segment.

All of them are sums over slots. They are divided once, by a count over all ranks.
"""

# B = slots, S = tokens, V = vocabulary

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field

from models.carry import Outputs
from models.objective import SLOTS, SumsSpec
from utils.batch import IGNORE_LABEL
from utils.config import Float, StrictModel

LossType = Literal["stablemax_cross_entropy", "softmax_cross_entropy"]

LOSS_SUMS = ("lm_loss", "q_halt_loss", "q_continue_loss")
"""Sums over all slots. The Q losses are not yet multiplied by halt_weight."""

METRICS = ("count", "accuracy", "exact_accuracy", "q_halt_accuracy", "steps", *LOSS_SUMS)
"""Order of the vector of sums. All but LOSS_SUMS are over the slots that halted and have labels."""

ACT_SUMS = SumsSpec(
    names=METRICS,
    means={name: SLOTS if name in LOSS_SUMS else "count" for name in METRICS if name != "count"},
    losses=LOSS_SUMS,
)


class TokenLossConfig(StrictModel):
    """The options of the tokens' loss; config/arch/_common.yaml explains each."""

    loss_type: LossType
    label_smoothing: Float = Field(ge=0, lt=1)


class LossConfig(TokenLossConfig):
    """The options of the loss of a model with a Q head; config/arch/_tokens.yaml explains them."""

    halt_weight: Float = Field(ge=0)


def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype in which sums are kept and stablemax is computed."""
    return torch.float32 if device.type == "mps" else torch.float64  # mps has no float64


def stablemax(x: torch.Tensor) -> torch.Tensor:
    """Return x + 1 for x >= 0 and 1 / (1 - x) below, which replaces exp (arXiv 2501.04697)."""
    # `where` differentiates both branches. Without the clamp, the branch that is not taken would
    # give inf * 0 = NaN at x = 1.
    return torch.where(x >= 0, x + 1, 1 / (1 - x.clamp(max=0)))


def probabilities(logits_BSV: torch.Tensor, config: TokenLossConfig) -> torch.Tensor:
    """Return the probability of each token, as the loss has it, in float32."""
    if config.loss_type == "softmax_cross_entropy":
        return logits_BSV.float().softmax(-1)
    s_BSV = stablemax(logits_BSV.float())
    return s_BSV / s_BSV.sum(-1, keepdim=True)


def token_cross_entropy(logits_BSV: torch.Tensor, labels_BS: torch.Tensor, *, config: TokenLossConfig) -> torch.Tensor:
    """Return the cross-entropy of each token (B, S), 0 where the label is ignored.

    Stablemax is computed in float64 (float32 on mps), softmax in float32. With label smoothing e
    the target is 1 - e on the label, and e is spread evenly over the vocabulary.
    """
    ignored_BS = labels_BS == IGNORE_LABEL
    targets_BS = labels_BS.masked_fill(ignored_BS, 0).long()
    smoothing = config.label_smoothing
    if config.loss_type == "softmax_cross_entropy":
        loss_BS = F.cross_entropy(
            logits_BSV.float().flatten(0, 1), targets_BS.flatten(), reduction="none", label_smoothing=smoothing
        )
        return loss_BS.view_as(targets_BS).masked_fill(ignored_BS, 0)
    s_BSV = stablemax(logits_BSV.to(widest_float(logits_BSV.device)))
    s_target_BS = s_BSV.gather(-1, targets_BS.unsqueeze(-1)).squeeze(-1)
    log_target_BS = s_target_BS.log()
    if smoothing:
        log_target_BS = (1 - smoothing) * log_target_BS + smoothing * s_BSV.log().mean(-1)
    return (s_BSV.sum(-1).log() - log_target_BS).masked_fill(ignored_BS, 0)


def mean_token_loss(logits_BSV: torch.Tensor, labels_BS: torch.Tensor, *, config: TokenLossConfig) -> torch.Tensor:
    """Return the mean cross-entropy of the labelled tokens of each sequence, (B,).

    It is 0 without labels.
    """
    token_loss_BS = token_cross_entropy(logits_BSV, labels_BS, config=config)
    return token_loss_BS.sum(-1) / (labels_BS != IGNORE_LABEL).sum(-1).clamp(min=1)


@torch.no_grad()
def correctness(logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compare the answers of B sequences with their labels.

    Returns:
        has_labels: bool (B,).
        accuracy: the share of labelled tokens that are right, float32 (B,); 0 without labels.
        exact: whether all labelled tokens are right, bool (B,); true without labels.
    """
    is_label_BS = labels_BS != IGNORE_LABEL
    num_labels_B = is_label_BS.sum(-1)
    num_right_B = (is_label_BS & (logits_BSV.argmax(-1) == labels_BS)).sum(-1)
    return num_labels_B > 0, num_right_B / num_labels_B.clamp(min=1), num_right_B == num_labels_B


def act_loss(
    outputs: Outputs, labels_BS: torch.Tensor, *, halted_B: torch.Tensor, steps_B: torch.Tensor, config: TokenLossConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of one segment, summed over its slots, and the sums of METRICS.

    loss = sum over slots of: mean cross-entropy of the labelled tokens
    + halt_weight * (BCE(q_halt, right) + BCE(q_continue, target))

    The last term is there only if there is a target (HRM, arXiv 2506.21734, section 2). The
    published code has a halt_weight of 0.5. A model without a Q head has the first term alone.

    Args:
        labels_BS, halted_B, steps_B: of the carry that the segment returned.

    Returns:
        The loss, a scalar with gradient, and the detached sums in the order of METRICS, float64
        (float32 on mps).
    """
    labelled_B, token_accuracy_B, exact_B = correctness(outputs.logits_BSV, labels_BS)

    lm_loss = mean_token_loss(outputs.logits_BSV, labels_BS, config=config).sum()
    q_halt_loss = F.binary_cross_entropy_with_logits(outputs.q_halt_B, exact_B.float(), reduction="sum")
    if outputs.target_q_continue_B is None:
        q_continue_loss = torch.zeros_like(q_halt_loss)
    else:
        q_continue_loss = F.binary_cross_entropy_with_logits(
            outputs.q_continue_B, outputs.target_q_continue_B, reduction="sum"
        )
    loss = lm_loss
    if isinstance(config, LossConfig):
        loss = loss + config.halt_weight * (q_halt_loss + q_continue_loss)

    with torch.no_grad():
        counted_B = halted_B & labelled_B
        # In the widest dtype the sum is the same for every batch size.
        token_accuracy_B = token_accuracy_B.to(widest_float(loss.device))
        q_halt_right_B = (outputs.q_halt_B >= 0) == exact_B
        sums = {
            "count": counted_B.sum(),
            "accuracy": token_accuracy_B.where(counted_B, 0).sum(),
            "exact_accuracy": (counted_B & exact_B).sum(),
            "q_halt_accuracy": (counted_B & q_halt_right_B).sum(),
            "steps": steps_B.where(counted_B, 0).sum(),
            "lm_loss": lm_loss,
            "q_halt_loss": q_halt_loss,
            "q_continue_loss": q_continue_loss,
        }
        assert sums.keys() == set(METRICS), "METRICS names the sums that are computed here"
        return loss, torch.stack([sums[name].to(widest_float(loss.device)) for name in METRICS])
