"""Load batches in a thread, a few of them ahead of their use."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Generic, TypeVar

from utils.errors import UserError

H = TypeVar("H")
B = TypeVar("B")

_AHEAD = 4


class Prefetcher(ABC, Generic[H, B]):
    """Loads a batch for each of some steps: its host's part H in a thread, the rest when it is due.

    The thread calls `enter_thread` before anything else.
    """

    def __init__(self, enter_thread: Callable[[], None]) -> None:
        self._enter_thread = enter_thread
        self._pending: deque[Future[H]] = deque()

    @abstractmethod
    def _host_part(self, step: int) -> H:
        """Return the host's part of the batch of a step."""

    @abstractmethod
    def _whole(self, part: H) -> B:
        """Return the batch, on the device."""

    def batches(self, steps: range) -> Generator[B, None, None]:
        """Return the batches of these steps, in order. The thread begins at once."""
        pool = ThreadPoolExecutor(1, thread_name_prefix="loader", initializer=self._enter_thread)
        upcoming = (pool.submit(self._host_part, step) for step in steps)
        self._pending = pending = deque(islice(upcoming, _AHEAD))

        def arriving() -> Generator[B, None, None]:
            try:
                while pending:
                    part = pending.popleft().result()
                    pending.extend(islice(upcoming, 1))
                    yield self._whole(part)
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
