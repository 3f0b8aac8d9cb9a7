"""Command lines of programs that take options instead of Hydra overrides."""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from utils.errors import UserError


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError, and takes output=FILE as --output FILE.

    Programs that pass `overrides` on take only options. `path_keys` are names of the first
    positional argument, as in checkpoint=RUN.
    """

    def __init__(self, prog: str, description: str, epilog: str = "", path_keys: Sequence[str] = ()) -> None:
        super().__init__(
            prog,
            description=description,
            epilog=epilog,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=24, width=100),
            allow_abbrev=False,
        )
        self._path_keys = path_keys

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help shows the options")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        if not any(action.dest == "overrides" for action in self._actions):
            words = list(self._with_dashes(words))
        return super().parse_known_args(words, namespace)

    def _with_dashes(self, words: Sequence[str]) -> Iterator[str]:
        """Yield the words with --option=value for option=value, and PATH for checkpoint=PATH."""
        is_value = False  # of the option before it
        for number, word in enumerate(words):
            if word == "--":
                yield from words[number:]
                return
            typed, equals, value = word.partition("=")
            name, has_dashes = typed.lstrip("-"), word.startswith("--")
            action = self._option_string_actions.get(option(name) if has_dashes or equals else word)
            is_path = action is None and not has_dashes and os.path.exists(word)  # perhaps with an equals sign
            is_key = has_dashes or (equals and re.fullmatch(r"[A-Za-z][\w-]*", typed))
            if is_value or not is_key or (is_path and name not in self._path_keys):
                yield word
            elif name in self._path_keys:  # --checkpoint RUN, checkpoint=RUN
                yield from [value] * bool(equals)
            elif action is None:
                known = {key: f"{key}=..." for key in self._path_keys}
                known |= {each.lstrip("-"): each for each in self._option_string_actions if each.startswith("--")}
                close = difflib.get_close_matches(name.replace("_", "-"), known, n=1)
                self.error(f"unrecognized arguments: {word}" + (f" (did you mean {known[close[0]]}?)" if close else ""))
            elif action.nargs == 0 and equals:
                if value.lower() not in ("true", "false"):
                    raise UserError(f"{name} is {value!r}; write {name}=true, or leave it out")
                yield from [option(name)] * (value.lower() == "true")
            elif action.nargs == "+" and equals and not has_dashes:
                yield from [option(name), *filter(None, re.split(r"[,\s]+", value.strip("[]")))]
            else:
                yield option(name) + equals + value
            is_value = not is_value and action is not None and action.nargs != 0 and not equals


def typed_path(text: str) -> Path:
    """Return a path that was typed, for `type=` of an argument. ~ is the home directory."""
    path = Path(os.path.expanduser(text))
    try:
        path.exists()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text!r} can't be used ({error.strerror}); give another path") from error
    return path


def option(name: str) -> str:
    """Return the command-line option of a setting: --num-slots for num_slots."""
    return f"--{name.replace('_', '-')}"


def given(settings: object, *names: str) -> list[str]:
    """Return the options among `names` that are not None."""
    return [option(name) for name in names if getattr(settings, name) is not None]


def check_at_least(settings: object, **least: int) -> None:
    """Raise UserError if a setting is below its least value. A setting of None passes."""
    for name, limit in least.items():
        value = getattr(settings, name)
        if value is not None and value < limit:
            raise UserError(f"{option(name)} is {value}; it must be at least {limit}")


def check_exclusive(settings: object, *names: str) -> None:
    """Raise UserError if more than one of these settings was given."""
    found = given(settings, *names)
    if len(found) > 1:
        raise UserError(f"{' and '.join(found)} exclude each other; give one of them")
