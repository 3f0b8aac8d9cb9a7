"""Write a page, and prepare what pages of datasets and runs share: tokens and names."""

import base64
import hashlib
import html
import json
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataset.schema import read_names
from utils import json_files
from utils.errors import UserError
from utils.files import write_atomically
from utils.text import one_line

FOLDER = Path(__file__).parent / "page"
# The character at place i stands for token i, and IGNORED for an ignored label. Tokens of larger
# vocabularies are lists of numbers.
ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
IGNORED = "-"

Page = dict[str, Any]
"""The data of a page, which becomes JSON. The comment in viewer/page/page.html lists the keys."""


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
    code = {"STYLE": (FOLDER / "page.css").read_text(encoding="utf-8"), "SCRIPT": script_of(FOLDER / "main.mjs")}
    # The content security policy allows what has these hashes: no script in a name runs.
    hashes = {f"{name}_HASH": _base64(hashlib.sha256(text.encode()).digest()) for name, text in code.items()}
    # Compression leaves a tenth of the data. No character of base64 has a meaning in HTML.
    filled_in = {"TITLE": html.escape(page["title"]), "DATA": _base64(zlib.compress(data, 9)), **code, **hashes}
    # One pass replaces everything, because a title may look like a placeholder.
    template = (FOLDER / "page.html").read_text(encoding="utf-8")
    text = re.sub("@@([A-Z_]+)@@", lambda match: filled_in[match[1]], template)
    try:
        write_atomically(output, text.encode(errors="replace"))  # the title is a name, perhaps not UTF-8
    except OSError as error:
        raise UserError(f"cannot write {output} ({error.strerror or one_line(error)}); choose another file") from None


def script_of(module: Path, seen: set[Path] | None = None) -> str:
    """Return a JavaScript module behind all modules that it imports, as one module without imports.

    The page is a file, and browsers refuse to load modules from files.
    """
    seen = set() if seen is None else seen
    seen.add(module)
    text = module.read_text(encoding="utf-8")
    needed = (module.parent / name for name in re.findall(r'^import [^;]* from "\./(.+)";$', text, re.MULTILINE))
    before = "".join(script_of(path, seen) for path in needed if path not in seen)
    return before + re.sub(r"^import [^;]*;\n|^export ", "", text, flags=re.MULTILINE)


def _shortened(value: Any) -> Any:
    """Give numbers six digits, more than a curve shows. NaN and infinity become null."""
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _shortened(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_shortened(each) for each in value]
    return value


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def to_text(tokens_S: np.ndarray) -> str | list[int]:
    """Return tokens as the page takes them. Negative tokens are ignored labels."""
    if tokens_S.max(initial=0) >= len(ALPHABET):
        return [max(int(token), -1) for token in tokens_S]
    characters = np.frombuffer((ALPHABET + IGNORED).encode(), dtype=np.uint8)
    places_S = np.where(tokens_S < 0, len(ALPHABET), tokens_S).astype(np.intp)
    return characters[places_S].tobytes().decode()


def from_text(text: str | Sequence[int]) -> np.ndarray:
    """Return the tokens that `to_text` wrote, int64; -1 is an ignored label."""
    numbers = [ALPHABET.find(character) for character in text] if isinstance(text, str) else text
    return np.array(numbers, dtype=np.int64)


def label_of(example: Page) -> np.ndarray:
    """Return the solution, int64 (S,); -1 where none is known."""
    return from_text(example["label"]) if "label" in example else np.full(len(example["input"]), -1)


def spread(num: int, most: int) -> np.ndarray:
    """Return at most `most` of the numbers 0 to num - 1, evenly spread from first to last."""
    return np.arange(num) if num <= most else np.linspace(0, num - 1, most).round().astype(np.int64)


def size_text(megabytes: float) -> str:
    return f"{megabytes:,.1f} MB" if megabytes >= 1 else f"{megabytes * 1000:,.0f} kB"


def read_json(file: Path) -> Any:
    """Read a JSON file. Raise UserError if it is missing or holds no JSON."""
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
