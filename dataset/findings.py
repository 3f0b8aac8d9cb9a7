"""Collect what is wrong with a dataset, in place of the first error alone."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from utils.errors import UserError
from utils.text import one_line


@dataclass
class Findings:
    """The errors and warnings, in the order in which they were found.

    Each is a line that names a file or folder.
    """

    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Note a UserError inside as an error, and go on behind the block."""
        try:
            yield
        except UserError as error:
            self.errors.append(one_line(error))

    def add_leak(self, line: str, is_error: bool) -> None:
        if is_error:
            self.errors.append(f"{line}; leave them out of train or test, or add --allow-leak")
        else:
            self.warnings.append(line)
