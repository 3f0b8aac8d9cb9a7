"""Tokenizers: text to tokens and back."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset.text.schema import SpecialTokens
from dataset.text.tokenizer import ByteTokenizer, FileTokenizer, find_tokenizer, train_bpe
from utils.errors import UserError


def test_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.special_tokens == SpecialTokens(start=256, end_of_instruction=257, end=258)
    text = "Straße, 東京\n"
    (tokens,) = tokenizer.encode([text.encode()])
    assert tokens.dtype == np.uint16 and tokens.tolist() == list(text.encode())
    assert tokenizer.decode([256, *tokens.tolist(), 258]) == text and tokenizer.decode([0xC3]) == "\ufffd"
    assert tokenizer.bytes_of_tokens().tolist() == [1] * 256 + [0] * 3 and tokenizer.first_unknown(b"\xff\0") is None


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


def _sentencepiece(tokenizers: Any) -> Any:
    """Return a tokenizer that marks spaces, and spells out what it does not know in bytes."""
    pieces = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ("▁", "t", "h", "e", "th", "the", "▁the", "c", "a", "ca"):
        pieces[piece] = len(pieces)
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("c", "a")]
    made = tokenizers.Tokenizer(tokenizers.models.BPE(pieces, merges, byte_fallback=True))
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return made


def _word_pieces(tokenizers: Any) -> Any:
    words = ["the", "cat", "and", "Stra", "##ße"]
    made = tokenizers.Tokenizer(tokenizers.models.WordPiece({word: number for number, word in enumerate(words)}))
    made.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    made.decoder = tokenizers.decoders.WordPiece(cleanup=False)
    return made


@pytest.mark.parametrize("make", [None, _sentencepiece, _word_pieces])
def test_the_bytes_of_tokens_add_up_to_the_text(tmp_path: Path, make: Callable[[Any], Any] | None) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs pip install -r requirements-text.txt")
    text = "the cat and the Straße"
    if make is None:
        train_bpe([text.encode()] * 20, 300, tmp_path / "tokenizer.json")
    else:
        made = make(tokenizers)
        made.add_special_tokens(["<end>"])
        made.add_tokens(["dög"])
        made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    (tokens,) = tokenizer.encode([text.encode()])
    assert tokenizer.decode(tokens.tolist()) == text
    num_bytes = tokenizer.bytes_of_tokens()
    # The space before the first word is not in the text.
    assert num_bytes[tokens].sum() == len(text.encode()) + (make is not None)
    assert make is None or num_bytes[-4] == len("dög".encode()), (
        "the last token before the special ones of this project"
    )
    assert num_bytes[-3:].tolist() == [0, 0, 0] and len(num_bytes) == tokenizer.vocab_size


def test_the_tokenizer_of_a_model_is_known_by_its_digest(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs pip install -r requirements-text.txt")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        train_bpe([f"the cat {name}".encode()] * 20, 300, tmp_path / name / "tokenizer.json")
    of_b = FileTokenizer(tmp_path / "b" / "tokenizer.json")
    folders = [tmp_path / "a", tmp_path / "b"]
    assert find_tokenizer(of_b.name, of_b.special_tokens, folders, "run").name == of_b.name
    own = SpecialTokens(start=7, end_of_instruction=8, end=9)
    assert find_tokenizer(of_b.name, own, folders, "run").special_tokens == own
    with pytest.raises(UserError, match="run does not say which tokenizer made its tokens"):
        find_tokenizer(of_b.name, None, folders, "run")
    with pytest.raises(UserError, match=rf"run reads tokens of the tokenizer.json {of_b.name[:12]}"):
        find_tokenizer(of_b.name, of_b.special_tokens, folders[:1], "run")
    for contents in (b"", b"{}", b'{"model": {"type": "BPE"}}'):
        (tmp_path / "tokenizer.json").write_bytes(contents)
        with pytest.raises(UserError, match=r"tokenizer.json: is no .*; give another --tokenizer"):
            FileTokenizer(tmp_path / "tokenizer.json")


def test_what_a_tokenizer_does_not_know_is_named(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs pip install -r requirements-text.txt")
    train_bpe([b"the cat"] * 9, 300, tmp_path / "bytes.json")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cat": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    letters = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    letters.save(str(tmp_path / "letters.json"))
    pieces = tokenizers.Tokenizer(tokenizers.models.Unigram([("?", 0.0), ("a", -1.0)], 0))
    pieces.save(str(tmp_path / "pieces.json"))
    for name, text, unknown in (
        ("bytes", "東京 \n\0", None),
        ("words", "the cat", None),
        ("words", "the dog", "dog"),
        ("letters", "ab \naßb", "ß"),
        ("pieces", "aab", "b"),
    ):
        assert FileTokenizer(tmp_path / f"{name}.json").first_unknown(text.encode()) == unknown
    with pytest.raises(UnicodeDecodeError):
        FileTokenizer(tmp_path / "letters.json").first_unknown(b"\xff")


def test_a_text_that_spells_out_a_special_token_has_its_characters(tmp_path: Path) -> None:
    """Only a published model may be asked with special tokens, which its tokenizer.json holds."""
    tokenizers = pytest.importorskip("tokenizers", reason="needs pip install -r requirements-text.txt")
    train_bpe([b"some text <|end|>"], 300, tmp_path / "tokenizer.json")
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    library.add_special_tokens(["<|start|>", "<|middle|>", "<|end|>"])
    library.enable_truncation(2)
    library.enable_padding(length=50)
    library.save(str(tmp_path / "tokenizer.json"))
    numbers = [library.token_to_id(name) for name in ("<|start|>", "<|middle|>", "<|end|>")]
    text = b"some <|end|> text"
    ours = FileTokenizer(tmp_path / "tokenizer.json")
    (tokens,) = ours.encode([text])
    assert not set(tokens.tolist()) & set(numbers) and ours.decode(tokens.tolist()) == text.decode()
    assert ours.bytes_of_tokens()[tokens].sum() == len(text)
    special = dict(zip(("start", "end_of_instruction", "end"), numbers, strict=True))
    (tokens,) = FileTokenizer(tmp_path / "tokenizer.json", SpecialTokens(**special)).encode([text])
    assert numbers[2] in tokens.tolist()
