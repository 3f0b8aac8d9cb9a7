"""Bytes that are counted on the meta device are those that the same operations take on a CPU."""

import torch
import torch.nn.functional as F

from utils.perf.allocations import Allocations, SavedTensors, fused_attention


def test_tensors_count_as_long_as_they_live() -> None:
    given = torch.empty(100, device="meta")
    with Allocations([given]) as allocations:
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


def test_what_the_backward_pass_needs_counts_once_in_the_part_that_kept_it_first() -> None:
    weight = torch.empty(10, 10, device="meta", requires_grad=True)
    x = torch.empty(4, 10, device="meta")
    saved = SavedTensors("body", [weight])
    with saved.counting():
        y = (x @ weight).exp()
        saved.begin("head")
        (y.view(2, 20) * y.view(2, 20)).sum()
    assert saved.bytes_of_parts == {"body": 2 * 160, "head": 0}, "x and y in the body; y again in the head"


def test_attention_on_the_meta_device_keeps_no_scores() -> None:
    own = F.scaled_dot_product_attention
    for device, dtype in (("cuda", torch.bfloat16), ("cuda", torch.float32), ("cpu", torch.float32)):
        q = torch.empty(2, 4, 256, 8, device="meta", dtype=dtype, requires_grad=True)
        k = torch.empty(2, 2, 256, 8, device="meta", dtype=dtype, requires_grad=True)
        mask = torch.ones(2, 1, 256, 256, device="meta", dtype=torch.bool)
        scores = 2 * 4 * 256 * 256 * dtype.itemsize
        for options in ({"is_causal": True, "enable_gqa": True}, {"attn_mask": mask, "enable_gqa": True}):
            saved = SavedTensors("", [q, k])
            with fused_attention(device), saved.counting():  # type: ignore[arg-type]
                F.scaled_dot_product_attention(q, k, k, **options).sum().backward()
            of_mask = scores // 4 if "attn_mask" in options else 0
            assert 0 < saved.bytes_of_parts[""] - of_mask < scores / 4, (device, dtype, options)
            assert k.grad is not None and k.grad.shape == k.shape
    assert F.scaled_dot_product_attention is own
