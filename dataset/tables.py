"""Read lines, and the rows of CSV and TSV files, as a stream."""

import codecs
import csv
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

from utils.errors import UserError
from utils.text import one_line

# The longest line, and the longest field: a gzipped file of a MB can hold a line of a GB.
MOST_BYTES = 1 << 26


def read_lines(file: Path, stream: IO[bytes], most: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield each line with its number, from 1. A longer line than `most` bytes is an error."""
    most = most or MOST_BYTES
    for number, line in enumerate(iter(partial(stream.readline, most), b""), 1):
        if len(line) == most:
            raise UserError(f"{file}:{number}: the line has {most:,} bytes or more; split it")
        yield number, line.removeprefix(codecs.BOM_UTF8) if number == 1 else line


def read_table(
    file: Path, stream: IO[bytes], delimiter: str = ",", most: int | None = None
) -> Iterator[tuple[int, list[str]]]:
    """Yield the header and every row that is not empty, with the line where they begin."""
    num_read, first = 0, 1  # lines, and the line of the row under way

    def lines() -> Iterator[str]:
        nonlocal num_read
        for num_read, line in read_lines(file, stream, most):  # noqa: B007 - read below
            yield line.decode()

    limit = csv.field_size_limit(most or MOST_BYTES)
    try:
        # strict: a quote that is not closed would else swallow all rows behind it.
        rows = csv.reader(lines(), strict=True, delimiter=delimiter)
        header = next(rows, [])
        yield first, header
        first = num_read + 1
        for row in rows:
            if row and len(row) != len(header):
                raise UserError(f"{file}:{first}: {len(row)} fields instead of {len(header)}; correct the row")
            if row:
                yield first, row
            first = num_read + 1
    except (csv.Error, UnicodeDecodeError) as error:
        raise UserError(f"{file}:{first}: cannot be read ({one_line(error)}); correct or remove the row") from None
    finally:
        csv.field_size_limit(limit)
