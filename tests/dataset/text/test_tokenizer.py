"""Tokenizers: text to tokens and back.

Those of the tokenizers library need requirements-text.txt.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest

from dataset.text.tokenizer import ByteTokenizer, FileTokenizer, train_bpe
from utils.errors import UserError


def test_bytes() -> None:
    tokenizer = ByteTokenizer()
    special = tokenizer.special_tokens
    assert (special.start, special.end_of_instruction, special.end, tokenizer.vocab_size) == (256, 257, 258, 259)
    text = "Straße, 東京\n"
    (tokens,) = tokenizer.encode([text.encode()])
    assert tokens.dtype == np.uint16 and tokens.tolist() == list(text.encode())
    assert tokenizer.decode([256, *tokens.tolist(), 258]) == text
    assert tokenizer.decode([0xC3]) == "\ufffd"


def test_bpe(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs pip install -r requirements-text.txt")
    texts = [b"the cat and the dog", "the Straße".encode()] * 20
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        train_bpe(texts, 300, file)
    assert files[0].read_bytes() == files[1].read_bytes()
    tokenizer = FileTokenizer(files[0])
    special = tokenizer.special_tokens
    assert tokenizer.name == hashlib.sha256(files[0].read_bytes()).hexdigest()
    assert special.start >= 256 and special.end == special.start + 2 == tokenizer.vocab_size - 1 < 300
    text = "the cat, 東京\0 "
    (tokens,) = tokenizer.encode([text.encode()])
    assert len(tokens) < len(text.encode()) and tokenizer.decode([special.start, *tokens, special.end]) == text


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"--train-bpe needs the package tokenizers, .*-r requirements-text.txt"):
        train_bpe([b"a"], 300, tmp_path / "tokenizer.json")


@pytest.mark.parametrize("contents", [b"", b"{", b"{}", b"\xff", b'{"model": {"type": "BPE"}}'])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, contents: bytes) -> None:
    pytest.importorskip("tokenizers", reason="needs pip install -r requirements-text.txt")
    (tmp_path / "tokenizer.json").write_bytes(contents)
    with pytest.raises(UserError, match=r"tokenizer.json: is no tokenizer.json .*; give another --tokenizer"):
        FileTokenizer(tmp_path / "tokenizer.json")
