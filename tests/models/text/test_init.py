"""The initial weights have unit deviation times std, and end where they should."""

import torch

from models.text.init import modulo_normal


def test_the_distribution_is_a_normal_one_reduced_modulo_3() -> None:
    drawn = modulo_normal(torch.Size([200_000]), 0.5, torch.Generator().manual_seed(0))
    normal = torch.empty(200_000).normal_(generator=torch.Generator().manual_seed(0))
    expected = torch.where(normal.abs() < 3, normal, normal - 3 * normal.sign()) * 1.014762601732121 * 0.5
    torch.testing.assert_close(drawn, expected)
    assert abs(drawn.std().item() / 0.5 - 1) < 5e-3
