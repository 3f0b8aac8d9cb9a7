"""The options of a run's ranks say what would fit."""

import pytest

from tests.utils.dist.helpers import dist_config


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"init_method": "udp://here"}, "give env, tcp://host:port or file:///path"),
        ({"rank_weights": [1.0, 0.0]}, "give a positive number for each rank"),
    ],
)
def test_config_says_what_fits(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        dist_config(**changes)
