"""Write a page, and prepare what pages of datasets and runs share: tokens and names."""

import base64
import hashlib
import html
import json
import math
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataset.schema import read_names
from utils import json_files
from utils.errors import UserError
from utils.files import write_atomically
from utils.text import one_line

FOLDER = Path(__file__).parent
# The character at place i stands for token i, and IGNORED for an ignored label. Tokens of larger
# vocabularies are lists of numbers.
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
IGNORED = "-"

Page = dict[str, Any]
"""The data of a page, which becomes JSON. The comment in viewer/page.html lists the keys."""


@dataclass(frozen=True)
class Settings:
    """The options of the command line."""

    paths: list[Path]
    output: Path
    max_examples: int
    step: int | None
    set: str | None
    png: bool


def write_page(page: Page, output: Path) -> None:
    """Fill the template with the page's data, and write it to a file.

    Raises:
        UserError: the file cannot be written.
    """
    template, style, script = (
        (FOLDER / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")
    )
    style, script = f"\n{style}", f"\n{script}"
    data = json.dumps(page, separators=(",", ":"), allow_nan=False).encode()
    filled_in = {
        "@@TITLE@@": html.escape(page["title"]),
        "@@STYLE_HASH@@": digest(style),
        "@@SCRIPT_HASH@@": digest(script),
        # Compression leaves a tenth of the data. No character of base64 has a meaning in HTML.
        "@@DATA@@": base64.b64encode(zlib.compress(data, 9)).decode(),
        '<link rel="stylesheet" href="page.css">': f"<style>{style}</style>",
        '<script src="page.js"></script>': f"<script>{script}</script>",
    }
    # One pass replaces everything, because a title may look like a placeholder.
    text = re.sub("|".join(map(re.escape, filled_in)), lambda match: filled_in[match[0]], template)
    try:
        write_atomically(output, text.encode(errors="replace"))  # the title is a name, perhaps not UTF-8
    except OSError as error:
        raise UserError(
            f"cannot write {output} ({error.strerror or one_line(error)}); choose another --output"
        ) from None


def digest(body: str) -> str:
    """Return the hash with which the content security policy allows a script or a style.

    The browser runs no other script, even if a name in a dataset contains one.
    """
    return base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()


def to_text(tokens_S: np.ndarray) -> str | list[int]:
    """Return tokens as the page takes them. Negative tokens are ignored labels."""
    if tokens_S.max(initial=0) >= len(ALPHABET):
        return [max(int(token), -1) for token in tokens_S]
    characters = np.frombuffer((ALPHABET + IGNORED).encode(), dtype=np.uint8)
    places_S = np.where(tokens_S < 0, len(ALPHABET), tokens_S).astype(np.intp)
    return characters[places_S].tobytes().decode()


def from_text(text: str | list[int]) -> np.ndarray:
    """Return the tokens that `to_text` wrote, int64; -1 is an ignored label."""
    if isinstance(text, list):
        return np.array(text, dtype=np.int64)
    return np.array([ALPHABET.find(character) for character in text], dtype=np.int64)


def label_of(example: Page) -> np.ndarray:
    """Return the solution, int64 (S,); -1 where none is known."""
    return from_text(example["label"]) if "label" in example else np.full(len(example["input"]), -1)


def board_for(page: Page, example: Page) -> Any:
    """Return how an example is drawn: as its set, if sets have boards of several sizes."""
    return page.get("boards", {}).get(example["set"], page["board"])


def spread(num: int, most: int) -> np.ndarray:
    """Return at most `most` of the numbers 0 to num - 1, evenly spread from first to last."""
    return np.arange(num) if num <= most else np.linspace(0, num - 1, most).round().astype(np.int64)


def read_json(file: Path) -> Any:
    """Read a JSON file.

    Raises:
        UserError: The file is missing, or holds no JSON.
    """
    try:
        return json_files.read_json(file, "remove it or write it again")
    except FileNotFoundError:
        raise UserError(f"{file} is missing; write it again") from None


def names_of(data: Path) -> list[str]:
    """Return the names of puzzle identifiers, an empty list if the dataset has none."""
    try:
        names = read_names(data)
    except FileNotFoundError:
        return []
    return names if len(names) > 1 else []  # a single name is <blank>


def name_at(names: list[str], identifier: int) -> Page:
    """Return the entry that names the puzzle of an example; empty for a puzzle without a name."""
    return {"name": str(names[identifier])} if 0 <= identifier < len(names) else {}


def finite(value: float) -> float | None:
    """Return the value with six digits, more than a curve shows; None for NaN and infinity."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
