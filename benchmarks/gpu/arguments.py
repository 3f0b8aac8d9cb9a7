"""Read the command line of a part."""

import argparse
from pathlib import Path


def parser_of_part(page: str | None, *, num_steps: int | None = None) -> argparse.ArgumentParser:
    """Return a parser of `json`, the file for the result, `overrides`, and perhaps `steps`.

    Args:
        page: what --help prints above the options.
        num_steps: how many steps it takes by default; None if it takes none.
    """
    parser = argparse.ArgumentParser(description=page, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    if num_steps is not None:
        parser.add_argument("--steps", type=int, default=num_steps)
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    return parser


def read_arguments(page: str | None, *, num_steps: int | None = None) -> argparse.Namespace:
    """Return what the command line of a part gives, if it has no other arguments."""
    return parser_of_part(page, num_steps=num_steps).parse_intermixed_args()
