"""The average of the weights equals its definition. Swapping keeps every pointer and every bit."""

from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn

from optim.adam import AdamATan2
from optim.ema import EMA, require_same_average
from utils.errors import UserError


def _live() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": nn.Parameter(torch.randn(3, 4, generator=generator)),
        "bias": nn.Parameter(torch.randn(4, generator=generator)),
        "table": torch.randn(5, 2, generator=generator),
    }


@torch.no_grad()
def _take_step(live: dict[str, Tensor], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for tensor in live.values():
        tensor += torch.randn(tensor.shape, generator=generator)
        if isinstance(tensor, nn.Parameter):
            tensor.grad = torch.zeros_like(tensor)  # a step updates only what has a gradient


def _clone(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_average_equals_its_definition() -> None:
    live = _live()
    ema = EMA(live)
    averages = {name: tensor.flatten().tolist() for name, tensor in live.items()}
    for step, rate in enumerate([0.9, 0.5, 1.0, 0.999, 0.0, 0.9]):
        _take_step(live, step)
        ema.update(rate)
        for name, tensor in live.items():
            numbers = zip(averages[name], tensor.flatten().tolist(), strict=True)
            averages[name] = [rate * average + (1 - rate) * now for average, now in numbers]
    for name, tensor in ema.tensors().items():
        torch.testing.assert_close(tensor.flatten(), torch.tensor(averages[name]), rtol=1e-5, atol=1e-6)
        assert not tensor.requires_grad


def test_a_parameter_without_a_gradient_is_left_out() -> None:
    """Neither the optimizer nor the average touches it, and its own count of steps stays."""
    live = {"used": nn.Parameter(torch.ones(3)), "unused": nn.Parameter(torch.ones(3))}
    optimizer = AdamATan2(live.values(), lr=0.1, betas=(0.9, 0.95), weight_decay=0.5)
    ema = EMA(live)
    for step in range(3):
        for name, parameter in live.items():
            parameter.grad = torch.ones(3) if name == "used" or step == 0 else None
        before = _clone(dict(live)) | {f"ema.{name}": tensor.clone() for name, tensor in ema.tensors().items()}
        optimizer.step()
        ema.update(0.5)
        for name, tensor in (*live.items(), *((f"ema.{name}", tensor) for name, tensor in ema.tensors().items())):
            assert torch.equal(tensor, before[name]) == (name.endswith("unused") and step > 0), (name, step)
    assert [optimizer.state[parameter]["step"].item() for parameter in live.values()] == [3, 1]


def test_swapping_in_and_out_keeps_every_bit_and_every_pointer() -> None:
    """An exception while the average is there changes nothing of that."""
    live = _live()
    ema = EMA(live)
    for step in range(3):
        _take_step(live, step)
        ema.update(0.9)
    values, average = _clone(live), _clone(ema.tensors())
    places = {name: tensor.data_ptr() for name, tensor in live.items()}
    for error in (None, KeyError()):
        with suppress(KeyError), ema.swapped():
            assert _equal(_clone(live), average)
            assert {name: tensor.data_ptr() for name, tensor in live.items()} == places
            if error is not None:
                raise error
        assert _equal(_clone(live), values)
        assert _equal(ema.tensors(), average)
        assert {name: tensor.data_ptr() for name, tensor in live.items()} == places


def test_an_average_of_another_model_is_refused() -> None:
    own: dict[str, tuple[int, ...]] = {"weight": (3, 4), "bias": (4,)}
    require_same_average(dict(own), own)
    for saved, expected in (
        (own | {"bias": (5,)}, r"average of bias is \(5,\), here it is \(4,\)"),
        ({"weight": (3, 4)}, r"average of bias is absent, here it is \(4,\)"),
        (own | {"other": (2,)}, r"average of other is \(2,\), here it is absent"),
    ):
        with pytest.raises(UserError, match=expected):
            require_same_average(saved, own)
