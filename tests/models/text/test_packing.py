"""Tokens of a packed row see what they should of their own sequence, and nothing else."""

import pytest
import torch

from models.text.objective import TextBatch, TextRow
from models.text.packing import Packing, _Batches
from models.text.stack_config import Kernel, Mask, Sequences
from tests.models.text.helpers import sees, varlen_attention

ROWS: list[tuple[Sequences, int]] = [
    ([(4, 3), (1, 6), (2, 0), (1, 0), (5, 1)], 25),
    ([(3, 2)], 5),
    ([(1, 0), (40, 9), (1, 1), (2, 5), (17, 0)], 80),
    ([], 3),
]


@pytest.fixture
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """The kernel, and for varlen a plain loop in place of the part that runs on CUDA alone."""
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attention)
    kernel: Kernel = request.param
    return kernel


both_kernels = pytest.mark.parametrize("kernel", ["sdpa", "varlen"], indirect=True)


@both_kernels
@pytest.mark.parametrize("mask", ["prefixlm", "causal"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("sequences", "num_tokens"), ROWS)
def test_attention_equals_a_loop_over_tokens(
    sequences: Sequences, num_tokens: int, num_kv_heads: int, mask: Mask, kernel: Kernel
) -> None:
    generator = torch.Generator().manual_seed(0)
    q_NAH = torch.randn(num_tokens, 4, 8, generator=generator)
    k_NGH, v_NGH = torch.randn(2, num_tokens, num_kv_heads, 8, generator=generator)
    y_NAH = Packing(sequences, num_tokens, kernel=kernel).attend(q_NAH, k_NGH, v_NGH, mask)
    visible_NN = sees(sequences, num_tokens, mask)
    expected_NAH = torch.zeros_like(q_NAH)
    for token in range(num_tokens):
        seen = visible_NN[token].nonzero().flatten()
        for head in range(4):
            if len(seen):
                shared = head * num_kv_heads // 4
                weights = (k_NGH[seen, shared] @ q_NAH[token, head] / 8**0.5).softmax(0)
                expected_NAH[token, head] = weights @ v_NGH[seen, shared]
    torch.testing.assert_close(y_NAH, expected_NAH)
    padding = y_NAH[sum(map(sum, sequences)) :]
    assert torch.equal(padding, torch.zeros_like(padding))


@both_kernels
def test_no_gradient_crosses_from_one_sequence_to_another(kernel: Kernel) -> None:
    q, k, v = (torch.randn(12, 2, 4, requires_grad=True) for _ in range(3))
    Packing([(3, 2), (2, 3)], 12, kernel=kernel).attend(q, k, v, "prefixlm")[:5].sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad[5:].count_nonzero() == 0 and x.grad[:5].count_nonzero() > 0


def test_scores_are_only_computed_for_sequences_of_similar_length() -> None:
    """A long row does not need a score for each pair of its tokens."""
    sequences = [(500, 500), *[(5, 5)] * 300]
    batches = Packing(sequences, 4000)._attention
    assert isinstance(batches, _Batches)
    num_scores = sum(group.places_BL.shape[0] * group.places_BL.shape[1] ** 2 for group in batches.groups)
    assert num_scores == 1000**2 + 300 * 10**2
    assert sum(group.places_BL.numel() for group in batches.groups) <= 2 * 4000


@both_kernels
def test_a_copy_of_the_packing_attends_alike(kernel: Kernel) -> None:
    """The loader copies packings to the device; nothing may stay behind or be changed in place."""
    packing, changed = Packing([(3, 2), (2, 0)], 9, kernel=kernel), list[torch.Tensor]()

    def change(tensor: torch.Tensor) -> torch.Tensor:
        changed.append(tensor)
        return tensor.clone()

    copied = packing.apply(change)
    for tensor in changed:
        tensor.zero_()
    q, k, v = torch.randn(3, 9, 2, 4)
    expected = Packing([(3, 2), (2, 0)], 9, kernel=kernel).attend(q, k, v, "prefixlm")
    assert torch.equal(copied.attend(q, k, v, "prefixlm"), expected)
    parts = torch.arange(27).view(3, 9)
    (row,) = TextBatch([TextRow(parts[0], parts[1], parts[2], packing)], 5).apply(lambda tensor: tensor + 1).rows
    assert torch.equal(torch.stack([row.inputs_N, row.labels_N, row.positions_N]), parts + 1)


@pytest.mark.parametrize("mask", ["prefixlm", "causal"])
@pytest.mark.parametrize("num_kv_heads", [4, 2])
def test_pytorch_takes_the_arguments_of_the_kernel_varlen(mask: Mask, num_kv_heads: int) -> None:
    """The meta device knows the kernel's arguments and shapes, but computes nothing."""
    packing = Packing([(3, 2), (1, 4), (2, 0)], 14, "meta", kernel="varlen")
    q = torch.randn(14, 4, 8, device="meta", requires_grad=True)
    k, v = (torch.randn(14, num_kv_heads, 8, device="meta", requires_grad=True) for _ in range(2))
    y = packing.attend(q, k, v, mask)
    y.sum().backward()
    assert y.shape == q.shape
    assert [x.grad.shape for x in (q, k, v) if x.grad is not None] == [q.shape, k.shape, v.shape]
