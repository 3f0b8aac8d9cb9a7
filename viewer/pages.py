"""Write a page, and prepare what pages of datasets and runs share: tokens and names."""

import html
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dataset.schema import read_names
from utils import json_files
from utils.errors import UserError
from utils.files import write_atomically
from utils.html_page import fill, packed, script_of
from utils.text import one_line

FOLDER = Path(__file__).parent / "page"

T = TypeVar("T")
Page = dict[str, Any]
"""The data of a page, which becomes JSON. The comment in viewer/page/page.html lists the keys."""

Names = dict[int, dict[str, str]]
"""For each puzzle identifier that has a name the entry of an example that says it."""


@dataclass(frozen=True)
class Settings:
    """The options of view.py."""

    paths: list[Path]
    output: Path
    max_examples: int
    step: int | None
    set: str | None
    png: bool


def write_page(page: Page, output: Path) -> None:
    """Fill the template with the page's data, and write it to a file."""
    data = json.dumps(_shortened(page), separators=(",", ":"), allow_nan=False).encode()
    # Compression leaves a tenth of the data.
    texts = {
        "TITLE": html.escape(page["title"]),
        "DATA": packed(data),
        "STAGE": (FOLDER / "stage.html").read_text(encoding="utf-8"),
    }
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    text = fill(FOLDER / "page.html", script=script_of(FOLDER / "main.mjs"), style=style, texts=texts)
    try:
        write_atomically(output, text.encode(errors="replace"))  # the title is a name, perhaps not UTF-8
    except OSError as error:
        raise UserError(f"cannot write {output} ({error.strerror or one_line(error)}); choose another file") from None


def _shortened(value: Any) -> Any:
    """Give fractions six digits, more than a curve shows. NaN and infinity become null."""
    if isinstance(value, float):
        short = int(value) if value.is_integer() else float(f"{value:.6g}")
        return short if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _shortened(each) for key, each in value.items()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "iu":
        return value.tolist()
    return [_shortened(each) for each in value] if isinstance(value, list | tuple | np.ndarray) else value


def label_of(example: Page) -> np.ndarray:
    """Return the solution, (S,); -1 where none is known."""
    return example["label"] if "label" in example else np.full_like(example["input"], -1)


def spread(num: int, most: int) -> np.ndarray:
    """Return at most `most` of the numbers 0 to num - 1, evenly spread from first to last."""
    return np.arange(num) if num <= most else np.linspace(0, num - 1, most).round().astype(np.int64)


def read_json(file: Path, parse: Callable[[Any], T]) -> T:
    """Return what `parse` makes of a JSON file. A missing part or another type is a UserError."""
    value = json_files.read_json(file, "remove it or write it again")
    try:
        return parse(value)
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        raise UserError(f"{file}: isn't what an evaluation writes; remove it, or run evaluate.py again") from None


def names_of_puzzles(data: Path) -> Names:
    try:
        names = read_names(data)
    except FileNotFoundError:
        return {}
    # A single name is <blank>.
    return {number: {"name": str(name)} for number, name in enumerate(names)} if len(names) > 1 else {}
