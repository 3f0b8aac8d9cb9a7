"""Keep the characters of text that Hydra and YAML would read as a number, a date or true or false.

A key of type text keeps what was typed: run_name=1.10 is not 1.1, and 2026_11_27 is no number.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep
from hydra.errors import HydraException

from utils.config import PAGES, text_keys
from utils.config_files import quoted

# Where a value stands in a config: keys, and indices of lists.
Path = tuple[str | int, ...]

# A value among several, up to the next comma: in quotes, in brackets, or bare with commas as \\,
_VALUE = re.compile(
    r"""(\s*(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\[[^]]*\])\s*|(?:\\.|[^,\\]|\\$)*)(?:,|$)""", re.DOTALL
)


@cache
def _text_keys(page: str) -> dict[str, bool]:
    """Return the keys of type text of a page of config/, and whether each may be null.

    A program that reads only the defaults of a page does not import its config class.
    """
    return text_keys(PAGES[page]) if page in PAGES else {}


def in_text_quotes(page: str, override: str) -> str:
    """Return an override with quotes around each value of a key of type text.

    Quotes that were typed, interpolations, null where the key allows it, and Hydra's escapes
    (`\\,`) keep their meaning.
    """
    key, _, value = override.partition("=")
    may_be_null = _text_keys(page).get(key.lstrip("+"))
    if may_be_null is None or not value or "${" in value:
        return override
    return f"{key}={_in_quotes(value, may_be_null)}"


def _in_quotes(value: str, may_be_null: bool) -> str:
    if value.startswith("[") and not value.endswith("]"):
        return value  # a mistake
    if (choice := re.fullmatch(r"choice\((.*)\)", value, re.DOTALL)) and isinstance(_parsed(value), ChoiceSweep):
        return f"choice({_in_quotes(choice[1], may_be_null)})"
    values = [match[1].strip() for match in _VALUE.finditer(value) if match[0]]
    if len(values) > 1:
        return ",".join(_in_quotes(each, may_be_null) if each else "" for each in values)
    if (inner := re.fullmatch(r"\[(.*\S.*)\]", value, re.DOTALL)) and not isinstance(_parsed(value), str):
        return f"[{_in_quotes(inner[1], may_be_null=False)}]"
    return _as_text(value, may_be_null)


def _as_text(value: str, may_be_null: bool) -> str:
    parsed = _parsed(value)
    if isinstance(parsed, str):
        is_plain = value[0] not in "'\"" and not ("\\" in value and parsed != value)
    elif isinstance(parsed, HydraException):  # a=b is text, an unclosed list is a mistake
        is_plain = value[0] not in "'\"[{"
    else:
        is_plain = not may_be_null if parsed is None else isinstance(parsed, int | float)
    return quoted(value) if is_plain else value


def _parsed(value: str) -> Any:
    """Return what Hydra makes of a value: its error if it can't read the value."""
    try:
        return OverridesParser.create().parse_override(f"key={value}").value()
    except HydraException as error:
        return error
    except ValueError as error:  # a number of thousands of digits
        return HydraException(str(error))


def lost_text(page: str, values: Any) -> Iterator[Path]:
    """Yield where a value of a key of type text is no text, because YAML or Hydra has read it."""
    for path, value in _leaves(values, ()):
        may_be_null = _text_keys_of(page, path)
        if may_be_null is not None and not isinstance(value, str) and not (value is None and may_be_null):
            yield path


def _text_keys_of(page: str, path: Path) -> bool | None:
    """Return whether the key of a value may be null; None if it is no key of type text."""
    names = [name for name in path if isinstance(name, str)]
    if page == "sweep" and names[1:2] in (["parameters"], ["points"]):
        keys = [name for name in names[2:] if name not in ("values", "when")]
        return _text_keys("pretrain").get(keys[-1]) if keys else None
    return _text_keys(page).get(".".join(names))


def _leaves(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if inner is None:
        yield path, value
        return
    for key, each in inner:
        yield from _leaves(each, (*path, key))
