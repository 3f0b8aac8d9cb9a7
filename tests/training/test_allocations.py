"""Bytes that are counted on the meta device are those that the same operations take on a CPU."""

import torch
import torch.nn.functional as F

from training.allocations import Allocations


def test_tensors_count_as_long_as_they_live() -> None:
    given = torch.empty(100, device="meta")
    with (allocations := Allocations([given])).counting():
        first = given + 1
        second = first * 2
        assert allocations.live == 800
        view = first[:10]
        assert allocations.live == 800, "a view takes no memory"
        del first
        assert allocations.live == 800, "the view keeps its storage"
        del view
        assert allocations.live == 400
        given.add_(1)
        assert allocations.live == 400, "a tensor that was there does not count"
    assert allocations.peak == 800 and len(second) == 100


def test_attention_on_the_meta_device_keeps_no_scores() -> None:
    own = F.scaled_dot_product_attention
    q = torch.empty(2, 4, 256, 8, device="meta", requires_grad=True)
    k = torch.empty(2, 2, 256, 8, device="meta", requires_grad=True)
    mask = torch.ones(2, 1, 256, 256, device="meta", dtype=torch.bool)
    scores = 2 * 4 * 256 * 256 * 4
    for options, of_mask in (({"is_causal": True}, 0), ({"attn_mask": mask}, scores // 4)):
        allocations = Allocations([q, k, mask])
        with allocations.counting():
            attended = F.scaled_dot_product_attention(q, k, k, enable_gqa=True, **options)
            assert 0 < allocations.live - of_mask < scores / 4, options
            attended.sum().backward()
        assert k.grad is not None and k.grad.shape == k.shape
    assert F.scaled_dot_product_attention is own
