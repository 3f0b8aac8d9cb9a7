"""Show how much a figure differs from round to round."""

import statistics
from collections.abc import Callable, Sequence


def spread(values: Sequence[float], show: Callable[[float], str]) -> str:
    """Return the median, then the lowest and the highest value.

    Args:
        show: writes a number, such as `"{:.2f}".format`.
    """
    median, lowest, highest = map(show, (statistics.median(values), min(values), max(values)))
    return f"{median} ({lowest} to {highest})"
