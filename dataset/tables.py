"""Read lines, and the rows of CSV and TSV files, as a stream."""

import csv
import io
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import IO

from utils.errors import UserError
from utils.text import one_line

# The longest line, and the longest field: a gzipped file of a MB can hold a line of a GB.
MOST_BYTES = 1 << 26


def read_lines(file: Path, stream: IO[bytes], most: int | None = None) -> Iterator[tuple[int, str]]:
    r"""Yield each line with its number, from 1. It may end with \n, \r or both.

    A longer line than `most` characters is an error. Bytes that are no UTF-8 become characters that
    can't be encoded again.
    """
    most = most or MOST_BYTES
    text = io.TextIOWrapper(stream, "utf-8-sig", "surrogateescape", newline="")
    for number, line in enumerate(iter(partial(text.readline, most), ""), 1):
        if len(line) == most:
            raise UserError(f"{file}:{number}: the line has {most:,} bytes or more; split it")
        yield number, line


def read_table(
    file: Path, stream: IO[bytes], delimiter: str = ",", most: int | None = None, *, strict: bool = True
) -> Iterator[tuple[int, list[str]]]:
    """Yield the header and every row that is not empty, with the line where they begin.

    strict: a quote that is misplaced or not closed is an error. It may swallow all rows behind it.
    """
    num_read, first = 0, 1  # lines, and the line of the row under way

    def lines() -> Iterator[str]:
        nonlocal num_read
        for num_read, line in read_lines(file, stream, most):  # noqa: B007 - read below
            yield line

    limit = csv.field_size_limit(most or MOST_BYTES)
    try:
        rows = csv.reader(lines(), strict=strict, delimiter=delimiter)
        header = next(rows, [])
        yield first, header
        first = num_read + 1
        for row in rows:
            if row and len(row) != len(header):
                raise UserError(f"{file}:{first}: {len(row)} fields instead of {len(header)}; correct the row")
            if row:
                yield first, row
            first = num_read + 1
    except csv.Error as error:
        raise UserError(f"{file}:{first}: cannot be read ({one_line(error)}); correct or remove the row") from None
    finally:
        csv.field_size_limit(limit)
