"""Read JSON of somebody else. A key that stands twice in an object is an error."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.files import plain
from utils.text import for_a_terminal, one_line


class RepeatedKey(UserError):
    """An object has a key twice."""


def read_json(file: Path, fix: str) -> Any:
    """Return the value in a file of JSON. `fix` says at the end of a message what to do.

    Raises:
        FileNotFoundError: There is no such file.
        UserError: The file can't be read, is no JSON, or has a key twice in one object.
    """
    try:
        contents = plain(file).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(file) from error
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror or one_line(error)}); {fix}") from None
    return parse_json(contents, file, fix)


def parse_json(
    text: str | bytes, where: object, fix: str, *, parse_int: Callable[[str], int | float] | None = None
) -> Any:
    """Return the value of a JSON text. Messages begin with `where`, and end with `fix`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            key = for_a_terminal(Counter(key for key, _ in pairs).most_common(1)[0][0])[:80]
            raise RepeatedKey(f"{where}: has the key {key!r} twice in one object; rename or remove one of them")
        return values

    try:
        return json.loads(text, object_pairs_hook=unique, parse_int=parse_int)
    except RepeatedKey:
        raise
    except (ValueError, RecursionError) as error:  # no text, or a number of thousands of digits, too
        raise UserError(f"{where}: is no JSON ({one_line(error)}); {fix}") from None
