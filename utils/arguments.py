"""Command lines of programs that take options instead of Hydra overrides."""

import argparse
from pathlib import Path
from typing import NoReturn

from utils.errors import UserError


class Parser(argparse.ArgumentParser):
    """A parser that raises UserError and keeps the line breaks of its description and examples."""

    def __init__(self, prog: str, description: str, epilog: str = "") -> None:
        super().__init__(
            prog,
            description=description,
            epilog=epilog,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=24, width=100),
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise UserError instead of printing the usage: a mistake is reported in one line."""
        raise UserError(f"{message}; --help shows the options")


def typed_path(text: str) -> Path:
    """Return a path that was typed, for `type=` of an argument.

    Raises:
        argparse.ArgumentTypeError: No file can have this name, or its folder may not be read.
    """
    path = Path(text)
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
