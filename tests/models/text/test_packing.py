"""Tokens of a packed row see what they should of their own sequence, and nothing else."""

import pytest
import torch

from models.text.packing import Packing, Sequences
from models.text.stack_config import Mask
from tests.models.text.helpers import sees

ROWS: list[tuple[Sequences, int]] = [
    ([(4, 3), (1, 6), (2, 0), (1, 0), (5, 1)], 25),
    ([(3, 2)], 5),
    ([(1, 0), (40, 9), (1, 1), (2, 5), (17, 0)], 80),
    ([], 3),
]


@pytest.mark.parametrize("mask", ["prefixlm", "causal"])
@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("sequences", "num_tokens"), ROWS)
def test_attention_equals_a_loop_over_tokens(
    sequences: Sequences, num_tokens: int, num_kv_heads: int, mask: Mask
) -> None:
    generator = torch.Generator().manual_seed(0)
    q_NAH = torch.randn(num_tokens, 4, 8, generator=generator)
    k_NGH, v_NGH = torch.randn(2, num_tokens, num_kv_heads, 8, generator=generator)
    y_NAH = Packing(sequences, num_tokens).attend(q_NAH, k_NGH, v_NGH, mask)
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


def test_no_gradient_crosses_from_one_sequence_to_another() -> None:
    q, k, v = (torch.randn(12, 2, 4, requires_grad=True) for _ in range(3))
    Packing([(3, 2), (2, 3)], 12).attend(q, k, v, "prefixlm")[:5].sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad[5:].count_nonzero() == 0 and x.grad[:5].count_nonzero() > 0


def test_scores_are_only_computed_for_sequences_of_similar_length() -> None:
    """A long row does not need a score for each pair of its tokens."""
    sequences = [(500, 500), *[(5, 5)] * 300]
    packing = Packing(sequences, 4000)
    num_scores = sum(group.places_BL.shape[0] * group.places_BL.shape[1] ** 2 for group in packing._groups)
    assert num_scores == 1000**2 + 300 * 10**2
    assert sum(group.places_BL.numel() for group in packing._groups) <= 2 * 4000


def test_the_sequence_of_each_token_is_known() -> None:
    assert Packing([(2, 1), (1, 0)], 6).sequence_N.tolist() == [0, 0, 0, 1, 2, 2]
