"""Write an HTML page as one file: its data, its style and its JavaScript modules."""

import base64
import hashlib
import re
import zlib
from collections.abc import Mapping
from pathlib import Path


def fill(template: Path, *, script: str, style: str, texts: Mapping[str, str]) -> str:
    """Return a template with its @@PLACEHOLDERS@@ filled in: SCRIPT, STYLE, and `texts`.

    SCRIPT_HASH and STYLE_HASH are for the content security policy, which then allows this code
    alone: no script in a name of the data runs.
    """
    code = {"SCRIPT": script, "STYLE": style}
    hashes = {f"{name}_HASH": base64_of(hashlib.sha256(text.encode()).digest()) for name, text in code.items()}
    filled_in = {**texts, **code, **hashes}
    # One pass replaces everything, because a title may look like a placeholder.
    return re.sub("@@([A-Z_]+)@@", lambda match: filled_in[match[1]], template.read_text(encoding="utf-8"))


def packed(data: bytes) -> str:
    """Return data as a page holds them. No character of base64 has a meaning in HTML."""
    return base64_of(zlib.compress(data, 9))


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def script_of(module: Path, seen: set[Path] | None = None) -> str:
    """Return a JavaScript module behind all modules that it imports, as one module without imports.

    The page is a file, and browsers refuse to load modules from files.
    """
    seen = set() if seen is None else seen
    module = module.resolve()
    seen.add(module)
    text = module.read_text(encoding="utf-8")
    imported = re.findall(r'^import [^;]* from "(\..+)";$', text, re.MULTILINE)
    needed = ((module.parent / name).resolve() for name in imported)
    before = "".join(script_of(path, seen) for path in needed if path not in seen)
    return before + re.sub(r"^import [^;]*;\n|^export ", "", text, flags=re.MULTILINE)
