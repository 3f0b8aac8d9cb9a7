"""Read the words of a command line before Hydra does: bare paths, ~, and slips of the keyboard.

Each word is looked at once, in this order. The first step that knows the word decides.

1. Our own flags, and the word behind a flag that takes a value, stay.
2. A word that begins with a dash: --key=value is key=value. For --key and -key the message says
   key=value (`_without_dashes`).
3. key=value stays, unless a path with an equals sign exists under this name. ~ becomes the home
   directory.
4. Any other word (`_bare`). These checks come in this order, because a later one takes what an
   earlier one refuses:
   a. blanks around an equals sign, which make several words of an override;
   b. an override with a colon or quotes, such as lr:1e-4;
   c. a key whose value is the next word;
   d. a YAML file;
   e. the name of a choice, such as demo or experiment/demo;
   f. a path, which becomes key=path.
5. Values of keys of type text get quotes, so that Hydra reads none of them as a number.
6. A word that none of them knows stays for Hydra's parser, which refuses what it can't read.
"""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from utils.config_files import choices, default_groups, quoted
from utils.errors import UserError
from utils.mistakes import Origin, suggestions
from utils.typed_text import in_text_quotes

# The key that a bare path stands for.
_MAIN_KEYS = {"pretrain": "data_path", "ray": "data_path", "evaluate": "checkpoint", "solve": "checkpoint"}
_FLAGS = ("--help", "-h", "--multirun", "-m")
_FLAGS_WITH_VALUE = ("--cfg", "-c", "--config-dir")
_YAML = (".yaml", ".yml")
# The programs that pass keys on to pretrain.py.
_WITH_KEYS_OF_RUNS = ("ray", "sweep")


def overrides_among(words: Sequence[str], config_name: str) -> list[str]:
    """Return the words with key=path for a bare path, the home directory for ~, and text in quotes.

    Flags and unknown words stay. Hydra's parser refuses unknown words later.

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
    for page in _configs(config_name):
        found = [in_text_quotes(page, word) for word in found]
    return found


def _without_dashes(word: str, after: Sequence[str], config_name: str) -> str:
    """Return --key=value, the form in which an agent of W&B passes overrides, as key=value.

    The agent writes values as Python does. Hydra reads True and False, but None only as null.
    """
    if match := re.fullmatch(r"--(?!cfg=|config-dir=|help=)([\w.]+=)(.*)", word, re.DOTALL):
        return _at_home(match[1] + ("null" if match[2] == "None" else match[2]))
    key = word.lstrip("-").replace("-", "_")
    if re.fullmatch(r"[A-Za-z][\w.]*", key):
        is_value = bool(after) and "=" not in after[0] and not re.match(r"-[A-Za-z-]", after[0])
        typed, value = (f"{word} {after[0]}", shlex.quote(after[0])) if is_value else (word, "...")
        if key == "config_path":  # Hydra's own flag
            raise UserError(f"{typed}: a folder of configs is chosen with --config-dir; write --config-dir {value}")
        known = _known_keys(config_name)
        if key in known:
            raise UserError(f"{typed}: overrides are written key=value; write {key}={value}")
        if close := suggestions(key, known):
            meant = " or ".join(f"{each}={value}" for each in close)
            raise UserError(f"{typed}: overrides are written key=value; did you mean {meant}?")
    return word


def _known_keys(config_name: str) -> list[str]:
    return [key for name in _configs(config_name) for key in Origin(name).known_keys()]


def _groups(config_name: str) -> list[str]:
    """Return the groups whose files the program takes."""
    return [group for name in _configs(config_name) for group, _ in default_groups(name)]


def _configs(config_name: str) -> list[str]:
    """Return the names of the files in config/ that hold the keys of a program."""
    return [config_name, *["pretrain"] * (config_name in _WITH_KEYS_OF_RUNS)]


def _at_home(override: str) -> str:
    """Return an override with the home directory for ~, which Hydra can't read."""
    key, _, value = override.partition("=")
    if value == "~" or value.startswith("~/"):
        return f"{key}={quoted(os.path.expanduser(value))}" if "," not in value else _each_at_home(override)
    return _each_at_home(override) if value.startswith("[") else override


def _each_at_home(override: str) -> str:
    home = os.path.expanduser("~")
    return re.sub(r"([=,\[]\s*)~(?=/)", lambda match: match[1] + home, override)


def _bare(word: str, before: str, after: Sequence[str], config_name: str) -> str:
    """Return key=path for a bare path, and any unknown word as it is.

    Raises:
        UserError: The word is a slip, and the message says what to write instead.
    """
    _require_no_blanks(word, before, after)
    assigned = re.fullmatch(r"-*[\"']?([\w.]+)\s*[=:]\s*(\S.*)", word.strip())
    if assigned and assigned[1] in _known_keys(config_name):
        written = f"{assigned[1]}={assigned[2].rstrip(',')}".strip("\"'")
        raise UserError(f"{word!r} is no override; write {shlex.quote(written)}")
    is_value = bool(after) and "=" not in after[0] and not after[0].startswith("-")
    if is_value and re.fullmatch(r"[\w.]+:?", word) and word.rstrip(":") in _known_keys(config_name):
        raise UserError(f"{word!r} is no override; write {word.rstrip(':')}={shlex.quote(after[0])}")

    path = Path(word)
    if path.suffix in _YAML and config_name == "sweep":
        return f"sweep={word}"
    main, groups = _MAIN_KEYS.get(config_name), _groups(config_name)
    if path.suffix in _YAML and not path.is_dir():
        group = path.parent.name if path.parent.name in groups else "experiment"
        if group in groups:
            raise UserError(f"{word!r} is a file of keys; write {group}={shlex.quote(word)}")
        raise UserError(f"{word!r} is a file of keys, and this program reads none; write {main}=... and key=value")
    # A path such as checkpoints/p/trm names a run, but arch/trm names a choice of a group.
    named = [group for group in groups if path.name in choices(group) and path.parent.name in ("", group)]
    if named and not path.exists():
        raise UserError(f"{word!r} is no override; write {' or '.join(f'{group}={path.name}' for group in named)}")
    is_path = ("/" in word or os.path.exists(word) or word == "~") and not re.search(r"[\s\"'{}\[\]=]", word)
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
