"""A wrong option of the process group is refused, with the values that are possible."""

import pytest

from tests.utils.dist.helpers import dist_config


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"init_method": "udp://here"}, "give env, tcp://host:port or file:///path"),
        ({"rank_weights": [1.0, 0.0]}, "give a positive number for each rank"),
    ],
)
def test_a_wrong_option_is_refused_with_the_possible_values(changes: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        dist_config(**changes)
