"""Recognise the errors that a lack of memory raises, and say in two lines what to change."""

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# In the messages of the host's allocator, of MPS and CUDA, and of cuBLAS for its workspace.
_SAID = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")
# Of torch on the host, of torch on a GPU, and of NumPy: 691200000 bytes, 20.00 GiB.
_ASKED = re.compile(r"allocate ([\d.]+) (bytes|[KMGTPE]i?B)")
# Where nobody knows anything better.
LESS_AT_A_TIME = "smaller inputs need less memory; otherwise take a machine that has more"


class OutOfMemory(Exception):
    """The device or the host lacks memory: the program prints two lines and exits with status 1.

    `change` returns the second line: the smallest change that fits. It may take some seconds.
    """

    def __init__(self, error: Exception, change: Callable[[], str]) -> None:
        super().__init__(str(error))
        self._error, self._change = error, change

    def lines(self) -> tuple[str, str]:
        """Return what happened, and what to change. Frees what the failed calls held."""
        for error in (self, self._error):
            traceback.clear_frames(error.__traceback__)
        notes = [note for error in (self._error, self) for note in getattr(error, "__notes__", [])]
        try:
            change = self._change()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            change = LESS_AT_A_TIME
        said = str(self._error)
        on_host = isinstance(self._error, MemoryError) or "CPU" in said
        what = f"out of memory on the {'host' if on_host else 'GPU'}"
        if found := _ASKED.search(said):
            number, unit = found.groups()
            what += f": {f'{float(number) / 1e6:,.1f} MB' if unit == 'bytes' else f'{number} {unit}'} more did not fit"
        return "; ".join([what, *notes]), change


def is_out_of_memory(error: BaseException) -> bool:
    # torch.OutOfMemoryError is a RuntimeError, and torch does not raise it on every device.
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID)
    return said or isinstance(error, MemoryError)


@contextmanager
def advising(change: Callable[[], str]) -> Iterator[None]:
    """Raise OutOfMemory if memory runs out inside. The innermost advice counts."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(error, change) from error
        raise


def half(key: str, value: int) -> str:
    return f"{key}={value // 2} needs about half as much for the batch" if value > 1 else LESS_AT_A_TIME
