"""What the pages of datasets and of runs share: boards, tokens, names, and the file that is written."""

import base64
import hashlib
import html
import json
import math
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataset.tasks import task_of_shape
from utils.errors import UserError
from utils.files import plain
from utils.text import one_line

FOLDER = Path(__file__).parent
# A token is one character, its place in here; an ignored label is IGNORED. Larger vocabularies are lists of numbers.
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
IGNORED = "-"
# Of examples that are no square.
MAX_COLUMNS = 24

Page = dict[str, Any]
"""What the page shows, as JSON: viewer/page.html says how."""


@dataclass(frozen=True)
class Settings:
    """What the command line said."""

    path: Path
    output: Path
    max_examples: int
    step: int | None
    set: str | None
    png: bool


def write_page(page: Page, output: Path) -> None:
    """The template with the page's data in it, under its name only when it is whole. Raises UserError."""
    template, style, script = (
        (FOLDER / name).read_text(encoding="utf-8") for name in ("page.html", "page.css", "page.js")
    )
    style, script = f"\n{style}", f"\n{script}"
    data = json.dumps(page, separators=(",", ":"), allow_nan=False).encode()
    filled_in = {
        "@@TITLE@@": html.escape(page["title"]),
        "@@STYLE_HASH@@": digest(style),
        "@@SCRIPT_HASH@@": digest(script),
        # A tenth of the text, and without a character that HTML could misread.
        "@@DATA@@": base64.b64encode(zlib.compress(data, 9)).decode(),
        '<link rel="stylesheet" href="page.css">': f"<style>{style}</style>",
        '<script src="page.js"></script>': f"<script>{script}</script>",
    }
    # In one pass, since a title may look like a placeholder.
    text = re.sub("|".join(map(re.escape, filled_in)), lambda match: filled_in[match[0]], template)
    beside = output.with_name(f".{output.name}.{os.getpid()}")
    try:
        try:
            beside.write_text(text, encoding="utf-8")
            beside.replace(output)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {output} ({one_line(error)}); choose another --output") from None


def digest(body: str) -> str:
    """The browser runs this script and this style only: nothing that might come with a dataset's names."""
    return base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()


def board_of(seq_len: int, vocab_size: int) -> Page:
    """Return how the page draws an example: as the task says, or as the numbers of its tokens."""
    task = task_of_shape(seq_len, vocab_size)
    if task is not None:
        return task.drawing
    side = math.isqrt(seq_len)
    columns = side if side * side == seq_len else min(seq_len, MAX_COLUMNS)
    return {"kind": "numbers", "rows": math.ceil(seq_len / columns), "columns": columns}


def to_text(tokens_S: np.ndarray) -> str | list[int]:
    """Tokens for the page; negative ones are ignored labels."""
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


def spread(num: int, most: int) -> np.ndarray:
    """At most so many of the numbers 0 to num - 1, evenly spread, the first and the last among them."""
    return np.arange(num) if num <= most else np.linspace(0, num - 1, most).round().astype(np.int64)


def read_json(file: Path) -> Any:
    """Raises UserError, one line, where it isn't JSON."""
    try:
        return json.loads(plain(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file}: not JSON ({one_line(error)}); remove it or write it again") from None


def names_of(data: Path) -> list[str]:
    """The names of puzzle identifiers; empty where nobody wrote them down."""
    file = data / "identifiers.json"
    names = read_json(file) if file.exists() else []
    if not isinstance(names, list):
        raise UserError(f"{file}: is no list of names; rebuild the dataset or delete the file")
    return names if len(names) > 1 else []  # the only one is <blank>


def name_at(names: list[str], identifier: int) -> Page:
    """The entry of an example whose puzzle has a name."""
    return {"name": str(names[identifier])} if 0 <= identifier < len(names) else {}


def finite(value: float) -> float | None:
    """With six digits, which is more than a curve shows; None for what JSON can't say."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
