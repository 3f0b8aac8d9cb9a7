"""Read the words of a command line before Hydra does: bare paths, ~, and slips of the keyboard."""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from utils.config_files import choices, default_groups, is_group, quoted
from utils.errors import UserError
from utils.look_alikes import look_alikes, plain_text
from utils.mistakes import Origin

# The key that a bare path stands for.
_MAIN_KEYS = {"pretrain": "data_path", "ray": "data_path", "evaluate": "checkpoint", "solve": "checkpoint"}
_FLAGS = ("--help", "-h", "--multirun", "-m")
_FLAGS_WITH_VALUE = ("--cfg", "-c", "--config-dir")
_YAML = (".yaml", ".yml")


def overrides_among(words: Sequence[str], config_name: str) -> list[str]:
    """Return the words with key=path for a bare path, and with the home directory for ~.

    Flags stay. A word of which nobody knows what it means stays as well, for Hydra to refuse.

    Raises:
        UserError: A word is no override, and the message says what to write instead.
    """
    found: list[str] = []
    for number, word in enumerate(words):
        before, after = words[number - 1] if number else "", words[number + 1 :]
        if before in _FLAGS_WITH_VALUE or word in (*_FLAGS, *_FLAGS_WITH_VALUE):
            found.append(word)
        elif word.startswith("-"):
            found.append(_without_dashes(word, after, config_name))
        elif re.match(r"[+~]*[\w.@/-]+=", word) and not ("/" in word.split("=")[0] and os.path.exists(word)):
            found.append(_at_home(word))
        else:
            found.append(_bare(word, before, after, config_name))
    main = _MAIN_KEYS.get(config_name)
    paths = [each for each in found if main is not None and re.match(rf"\+*{main}=", each)]
    if len(paths) > 1 and not set(paths) <= set(words):
        raise UserError(f"{' and '.join(paths)}: there is one {main}; give one of them")
    return found


def correction(typed: str) -> str | None:
    """Return a message for an override that Hydra can't read; None: nobody knows what is meant."""
    plain = plain_text(typed)
    if plain != typed:
        written = re.sub(r"=([\"'])(.*)\1$", r"=\2", plain).strip("-\"' ")
        return f"{typed!r} has typographic characters ({look_alikes(typed)}); write {_word(written)}"
    if typed.endswith((",", ";")) and len(typed.split("=")[1]) > 1:
        return f"{typed!r} ends with a {'comma' if typed[-1] == ',' else 'semicolon'}; write {typed.rstrip(',;')}"
    return None


def _word(text: str) -> str:
    return re.sub(r"\s*=\s*", "=", text) if re.fullmatch(r"[\w.]+\s*=\s*[^\s]*", text) else shlex.quote(text)


def _without_dashes(word: str, after: Sequence[str], config_name: str) -> str:
    """Return --key=value, the form in which an agent of W&B passes overrides, as key=value.

    The agent writes values as Python does. Hydra reads True and False, but None only as null.
    """
    if match := re.fullmatch(r"--(?!cfg=|config-dir=|help=)([\w.]+=)(.*)", word, re.DOTALL):
        return _at_home(match[1] + ("null" if match[2] == "None" else match[2]))
    key = word.lstrip("-").replace("-", "_")
    if re.fullmatch(r"[A-Za-z][\w.]*", key):
        is_value = bool(after) and "=" not in after[0] and not re.match(r"-[A-Za-z-]", after[0])
        if is_value and word.startswith("--"):
            raise UserError(f"{word} {after[0]}: overrides are written key=value; write {key}={shlex.quote(after[0])}")
        if key in Origin(config_name).known_keys():
            value = shlex.quote(after[0]) if is_value else "..."
            raise UserError(f"{word}: overrides are written key=value; write {key}={value}")
    return word


def _at_home(override: str) -> str:
    """Return an override with the home directory for ~, which Hydra can't read."""
    key, _, value = override.partition("=")
    if value == "~" or value.startswith("~/"):
        return f"{key}={quoted(os.path.expanduser(value))}" if "," not in value else _each_at_home(override)
    return _each_at_home(override) if value.startswith("[") else override


def _each_at_home(override: str) -> str:
    return re.sub(r"(?<=[=,\[])~(?=/)", os.path.expanduser("~"), override)


def _bare(word: str, before: str, after: Sequence[str], config_name: str) -> str:
    """Return key=path for a bare path; a word that is none stays as it is."""
    _require_no_blanks(word, before, after)
    plain = plain_text(word).strip()
    known = Origin(config_name).known_keys
    assigned = re.fullmatch(r"-*[\"']?([\w.]+)\s*[=:]\s*(\S.*)", plain)
    if assigned and (assigned[1] in known() or is_group(assigned[1])):
        written = f"{assigned[1]}={assigned[2].rstrip(',')}".strip("\"'")
        has = f" has typographic characters ({look_alikes(word)})" if look_alikes(word) else ""
        raise UserError(f"{word!r}{has or ' is no override'}; write {shlex.quote(written)}")
    is_value = bool(after) and "=" not in after[0] and not after[0].startswith("-")
    if is_value and re.fullmatch(r"[\w.]+:?", word) and word.rstrip(":") in known():
        raise UserError(f"{word!r} is no override; write {word.rstrip(':')}={shlex.quote(after[0])}")

    path = Path(word)
    if path.suffix in _YAML and config_name == "sweep":
        return f"sweep={word}"
    if path.suffix in _YAML:
        group = path.parent.name if is_group(path.parent.name) else "experiment"
        raise UserError(f"{word!r} is a file of keys; write {group}={shlex.quote(word)}")
    groups = [group for group, _ in default_groups(config_name) if path.name in choices(group)]
    if groups and not path.exists():
        raise UserError(f"{word!r} is no override; write {' or '.join(f'{group}={path.name}' for group in groups)}")
    main = _MAIN_KEYS.get(config_name)
    is_path = ("/" in word or os.path.exists(word) or word == "~") and not re.search(r"[\s\"'{}\[\]=]", plain)
    if main is not None and (is_path or os.path.exists(word)):
        return f"{main}={quoted(os.path.expanduser(word))}"
    return word


def _require_no_blanks(word: str, before: str, after: Sequence[str]) -> None:
    """Raise UserError for blanks around an equals sign, which make several words of an override."""
    is_key = re.fullmatch(r"[+~]*[A-Za-z][\w.]*", word) is not None
    if is_key and after and after[0].startswith("="):  # lr = 1e-4, lr =1e-4
        written = f"{word}{''.join(after[: 1 if len(after[0]) > 1 else 2])}"
    elif re.fullmatch(r"[+~]*[A-Za-z][\w.]*=", before):  # lr= 1e-4
        written = f"{before}{word}"
    else:
        return
    raise UserError(f"an override has no blanks around its equals sign; write {shlex.quote(written)}")
