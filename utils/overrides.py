"""Read and write the values of overrides, and keep the characters of text.

A key of type text keeps what was typed: run_name=1.10 is not 1.1, and 2026_11_27 is no number.
"""

import json
import re
from functools import lru_cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from utils.config import null_of_text
from utils.errors import UserError
from utils.text import for_shell, one_line

# A value among several, up to the next comma: in quotes, in brackets, or bare with commas as \\,
_VALUE = re.compile(
    r"""(\s*(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\[[^]]*\])\s*|(?:\\.|[^,\\]|\\$)*)(?:,|$)""", re.DOTALL
)


@lru_cache(4096)  # the grammar takes milliseconds
def _parsed(override: str) -> Override | HydraException:
    try:
        return OverridesParser.create().parse_override(override)
    except HydraException as error:
        return error
    except ValueError as error:  # a number of thousands of digits
        return HydraException(str(error))


def parse_override(typed: str) -> Override:
    """Return an override as Hydra's grammar reads it, or raise UserError."""
    key, equals, value = typed.partition("=")
    if not re.fullmatch(r"[\w./-]+", key) or not equals:
        raise UserError(f"{typed!r} is no override; write key=value without blanks, and see --help for the keys")
    override = _parsed(typed)
    if isinstance(override, HydraException):
        raise UserError(
            f"{typed!r} can't be read ({one_line(override)}); "
            f"a value with special characters needs quotes of its own: {typed_override(key, value)}"
        ) from override
    return override


def _value_of(text: str) -> Any:
    override = _parsed(f"key={text}")
    return override if isinstance(override, HydraException) else override.value()


def quoted(text: str) -> str:
    """Return a text in the quotes of an override, where only backslashes before a quote count."""
    escaped = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + match[2].replace("'", "\\'"), text)
    return f"'{escaped}'"


def typed_override(key: str, value: str) -> str:
    """Return the override of a text as a shell takes it."""
    return for_shell([f"{key}={as_override(value)}"])


def as_override(value: Any) -> str:
    """Return a value as it is typed after the equals sign of an override."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, list):
        return f"[{','.join(map(as_override, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{as_override(inner)}" for key, inner in value.items()) + "}"
    text = str(value)
    if not isinstance(value, str):
        return text
    read = _value_of(text)
    # A sweep keeps a list among the values of a parameter as text.
    return text if read == text or isinstance(read, list | dict) else quoted(text)


def in_text_quotes(config_name: str, override: str) -> str:
    """Return an override with quotes around each value of a key of type text.

    Typed quotes, interpolations, null where it is allowed, and escapes (`\\,`) keep their meaning.
    """
    key, _, value = override.partition("=")
    may_be_null = null_of_text(config_name, key.split("."))
    if may_be_null is None or not value or "${" in value:
        return override
    return f"{key}={_in_quotes(value, may_be_null)}"


def _in_quotes(value: str, may_be_null: bool) -> str:
    if choice := re.fullmatch(r"choice\((.*)\)", value, re.DOTALL):
        return f"choice({_in_quotes(choice[1], may_be_null)})"
    if value.startswith("[") and not value.endswith("]"):
        return value  # a mistake
    values = [match[1].strip() for match in _VALUE.finditer(value) if match[0]]
    if len(values) > 1:
        return ",".join(_in_quotes(each, may_be_null) if each else "" for each in values)
    if inner := re.fullmatch(r"\[(.*\S.*)\]", value, re.DOTALL):
        return f"[{_in_quotes(inner[1], may_be_null=False)}]"
    if value[:1] in ("'", '"', "[", "{"):
        return value
    read = _value_of(value)
    if isinstance(read, str):
        keeps = "\\" in value and read != value
    else:  # what can't be read, such as a=b, is text
        keeps = may_be_null if read is None else not isinstance(read, int | float | HydraException)
    return value if keeps else quoted(value)
