"""Values that a thread computes ahead of their use."""

from utils.errors import UserError
from utils.prefetch import Prefetcher


class _Numbers(Prefetcher[int, int]):
    def _host_part(self, step: int) -> int:
        if step in (3, 7):
            raise UserError("the file shrank") if step == 3 else OSError("a fault")
        return step

    def _whole(self, part: int) -> int:
        return part


def test_a_mistake_is_that_of_the_next_value() -> None:
    for first, mistake in ((1, "the file shrank"), (5, "None")):  # which raises a fault only when it is taken
        prefetcher = _Numbers(lambda: None)
        values = prefetcher.batches(range(first, first + 4))
        for step in (first, first + 1):
            assert prefetcher.next_mistake() is None and next(values) == step
        assert str(prefetcher.next_mistake()) == mistake
