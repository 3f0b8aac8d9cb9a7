"""The loss and the metric sums of a packed row, without all of its logits in memory at once."""

# N = tokens of the row, C = tokens of a chunk, D = hidden size, V = vocabulary

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from models.losses import widest_float
from models.objective import SumsSpec
from models.text.packing import Packing
from utils.batch import IGNORE_LABEL

TEXT_METRICS = ("labels", "accuracy", "sequences", "exact_accuracy", "loss")
"""Order of the vector of sums: the labelled tokens, those whose label has the largest logit, the
sequences with a label, those whose labelled tokens are all right, and the cross-entropy (nats) over
the labelled tokens.
"""

TEXT_SUMS = SumsSpec(
    names=TEXT_METRICS,
    means={"loss": "labels", "accuracy": "labels", "exact_accuracy": "sequences"},
    losses=("loss",),
)

MOST_LOGITS = 2**25
"""How many logits exist at once: 128 MB in float32, and a few times that in the backward pass."""


def chunked_cross_entropy(
    y_ND: Tensor, labels_N: Tensor, head: Callable[[Tensor], Tensor], *, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the cross-entropy of the labelled tokens, and whether each token is right.

    The logits of a chunk of tokens are computed, used and dropped before those of the next chunk.
    The backward pass computes them again. A row that needs only one chunk keeps its logits.

    Args:
        y_ND: what the head reads, with gradient.
        labels_N: what each token must predict, or IGNORE_LABEL.
        head: gives the logits (C, V) of (C, D).

    Returns:
        The sum, a float32 scalar with gradient; that of each token, a detached float32 (N,), zero
        where there is no label; and a bool (N,), false where there is no label.
    """
    num_tokens = max(1, MOST_LOGITS // vocab_size)

    def of_chunk(y_CD: Tensor, labels_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits_CV = head(y_CD)
        loss_C = F.cross_entropy(logits_CV.float(), labels_C, ignore_index=IGNORE_LABEL, reduction="none")
        # The backward pass stops before the last line, because it needs nothing of it.
        loss = loss_C.sum()
        return loss, loss_C.detach(), logits_CV.detach().argmax(-1) == labels_C

    chunks = zip(y_ND.split(num_tokens), labels_N.long().split(num_tokens), strict=True)
    if len(y_ND) <= num_tokens:
        parts = [of_chunk(*chunk) for chunk in chunks]
    else:
        parts = [checkpoint(of_chunk, *chunk, use_reentrant=False, preserve_rng_state=False) for chunk in chunks]
    losses, losses_of_tokens, right = zip(*parts, strict=True)
    return torch.stack(losses).sum(), torch.cat(losses_of_tokens), torch.cat(right)


@torch.no_grad()
def text_sums(loss: Tensor, right_N: Tensor, labels_N: Tensor, packing: Packing) -> Tensor:
    """Return the sums of TEXT_METRICS over a row, in the widest float of its device."""
    is_label_N = labels_N != IGNORE_LABEL
    num_labels, num_wrong = (
        torch.zeros(packing.num_sequences + 1, dtype=torch.int64, device=labels_N.device).index_add(
            0, packing.sequence_N, which_N.long()
        )[:-1]  # without padding
        for which_N in (is_label_N, is_label_N & ~right_N)
    )
    sums = {
        "labels": is_label_N.sum(),
        "accuracy": right_N.sum(),
        "sequences": (num_labels > 0).sum(),
        "exact_accuracy": ((num_labels > 0) & (num_wrong == 0)).sum(),
        "loss": loss,
    }
    return torch.stack([sums[name].to(widest_float(loss.device)) for name in TEXT_METRICS])
