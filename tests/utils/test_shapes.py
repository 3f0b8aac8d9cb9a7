"""Names and shapes are compared before a tensor is loaded."""

import torch

from utils.shapes import Differences, compare_shapes, shapes_of


def test_every_kind_of_difference_is_named() -> None:
    source = {"both": (2,), "other": (2, 3), "only there": ()}
    place = {"other": (3, 2), "only here": (1,), "both": (2,)}
    found = compare_shapes(source, place)
    assert found == Differences(missing=["only here"], unexpected=["only there"], reshaped=["other"])
    assert found.first == "only here"


def test_equal_shapes_have_no_differences() -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(())}
    found = compare_shapes({name: tensor.shape for name, tensor in tensors.items()}, shapes_of(tensors))
    assert found == Differences([], [], []) and found.first is None
    assert compare_shapes({}, {}).first is None
