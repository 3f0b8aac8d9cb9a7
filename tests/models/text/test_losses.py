"""The loss in chunks is the plain one, and the logits never lie in memory whole."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.text import losses
from models.text.losses import TEXT_METRICS, TEXT_SUMS, chunked_cross_entropy, text_sums
from models.text.packing import Packing

NUM_TOKENS, DIM, VOCAB_SIZE, IGNORE = 512, 8, 4096, -100


class _Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that is made inside."""

    size = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.size = max([self.size, *(each.numel() for each in tree_leaves(result) if isinstance(each, Tensor))])
        return result


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    y_ND = torch.randn(NUM_TOKENS, DIM, generator=generator, requires_grad=True)
    head_VD = torch.randn(VOCAB_SIZE, DIM, generator=generator, requires_grad=True)
    labels_N = torch.randint(VOCAB_SIZE, (NUM_TOKENS,), generator=generator)
    labels_N[::3] = IGNORE
    return y_ND, head_VD, labels_N


def _loss(y_ND: Tensor, head_VD: Tensor, labels_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return chunked_cross_entropy(y_ND, labels_N, lambda y_CD: F.linear(y_CD, head_VD), vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("most_logits", [1, 3 * VOCAB_SIZE, 64 * VOCAB_SIZE, 2**25])
def test_chunks_change_neither_loss_nor_gradients(most_logits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "MOST_LOGITS", most_logits)
    y_ND, head_VD, labels_N = _inputs()
    loss, loss_N, right_N = _loss(y_ND, head_VD, labels_N)
    ours = torch.autograd.grad(loss, (y_ND, head_VD))
    logits_NV = y_ND @ head_VD.T
    expected = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORE, reduction="sum")
    torch.testing.assert_close(loss, expected)
    of_tokens = F.cross_entropy(logits_NV, labels_N, ignore_index=IGNORE, reduction="none")
    torch.testing.assert_close(loss_N, of_tokens.detach())
    assert torch.equal(right_N, logits_NV.argmax(-1) == labels_N)
    for grad, plain in zip(ours, torch.autograd.grad(expected, (y_ND, head_VD)), strict=True):
        torch.testing.assert_close(grad, plain, rtol=1e-4, atol=1e-5)


def test_the_logits_never_lie_in_memory_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "MOST_LOGITS", 64 * VOCAB_SIZE)
    y_ND, head_VD, labels_N = _inputs()
    kept = list[int]()

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with _Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss, *_ = _loss(y_ND, head_VD, labels_N)
        assert max(kept) <= head_VD.numel(), "no logits are kept for the backward pass"
        loss.backward()
    assert largest.size == 64 * VOCAB_SIZE < NUM_TOKENS * VOCAB_SIZE / 7


def test_sums_count_tokens_and_whole_sequences() -> None:
    packing = Packing([(2, 2), (1, 1), (2, 0), (1, 2)], 12)
    labels_N = torch.tensor([IGNORE, 5, 6, 7, 1, 2, IGNORE, IGNORE, 3, 4, IGNORE, IGNORE])
    right_N = torch.tensor([0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 0, 0]).bool()
    sums = text_sums(torch.tensor(2.5), right_N, labels_N, packing)
    named = dict(zip(TEXT_METRICS, sums.tolist(), strict=True))
    # The third sequence has no label, and one token of the second is wrong.
    assert named == {"labels": 7, "accuracy": 6, "sequences": 3, "exact_accuracy": 2, "loss": 2.5}
    means = {name: named[name] / named[by] for name, by in TEXT_SUMS.means.items()}
    assert means == {"loss": 2.5 / 7, "accuracy": 6 / 7, "exact_accuracy": 2 / 3}
