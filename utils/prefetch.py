"""Compute values in a thread, a few of them ahead of their use."""

from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Generic, TypeVar

from utils.errors import UserError

T = TypeVar("T")

_AHEAD = 4


class Prefetcher(Generic[T]):
    """Computes a value for each of some steps, such as the host's part of a batch.

    The thread calls `enter_thread` before anything else.
    """

    def __init__(self, compute: Callable[[int], T], enter_thread: Callable[[], None]) -> None:
        self._compute, self._enter_thread = compute, enter_thread
        self._pending: deque[Future[T]] = deque()

    def values(self, steps: range) -> Generator[T, None, None]:
        """Return the values of these steps, in order. The thread begins at once."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="loader", initializer=self._enter_thread)
        upcoming = (pool.submit(self._compute, step) for step in steps)
        self._pending = pending = deque(islice(upcoming, _AHEAD))

        def arriving() -> Generator[T, None, None]:
            try:
                while pending:
                    value = pending.popleft().result()
                    pending.extend(islice(upcoming, 1))
                    yield value
            finally:
                pool.shutdown(cancel_futures=True)

        return arriving()

    def next_mistake(self) -> UserError | None:
        """Wait for the next value, and return the UserError of its computation, if any.

        So all ranks can end together. A rank that met the error when it takes the value would end
        alone. Any other error is a fault, and is raised when the value is taken.
        """
        error = self._pending[0].exception() if self._pending else None
        return error if isinstance(error, UserError) else None
