"""The pieces of a stream make the whole text, in whole characters, up to a stop text."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

from dataset.text.stream import TextStream
from dataset.text.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, train_bpe

TEXT = "Straße, 東京 🙂\n\nEnde"


def _pieces(tokenizer: Tokenizer, tokens: Sequence[int], stop: Sequence[str] = ()) -> list[str]:
    stream = TextStream(tokenizer.decode, stop)
    pieces = []
    for token in tokens:
        pieces.append(stream.add(token))
        if stream.has_stopped:
            assert stream.add(token) == stream.end() == ""
            return pieces
    return [*pieces, stream.end()]


@pytest.mark.parametrize("seed", range(5))
def test_pieces_of_any_bytes_make_the_whole_text(seed: int) -> None:
    draw = random.Random(seed)
    parts = [bytes([draw.randrange(256)]) if draw.random() < 0.3 else draw.choice("aß東🙂").encode() for _ in range(60)]
    tokens = [256, *b"".join(parts), 258]
    tokenizer = ByteTokenizer()
    assert "".join(_pieces(tokenizer, tokens)) == tokenizer.decode(tokens)


def test_pieces_of_a_trained_tokenizer(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers", reason="needs pip install -r requirements-text.txt")
    train_bpe([TEXT.encode()] * 20, 290, tmp_path / "tokenizer.json")
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    text = f"{TEXT} 京 東🙂 Straßen"
    (tokens,) = tokenizer.encode([text.encode()])
    assert "".join(_pieces(tokenizer, tokens.tolist())) == text
    assert "\ufffd" not in "".join(_pieces(tokenizer, tokens.tolist()))


@pytest.mark.parametrize(
    ("text", "stop", "pieces"),
    [
        # A character of several bytes comes whole. What may begin a stop text is held back.
        ("aß🙂", [], ["a", "", "ß", "", "", "", "🙂", ""]),
        ("ababc", ["abc"], ["", "", "ab", "", ""]),
        ("xab", ["abc"], ["x", "", "", "ab"]),
    ],
)
def test_the_pieces_of_a_text(text: str, stop: list[str], pieces: list[str]) -> None:
    assert _pieces(ByteTokenizer(), list(text.encode()), stop) == pieces


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        (["京 🙂\n", "Ende"], "Straße, 東"),
        (["Ende", "東"], "Straße, "),
        (["🙂\n\nEnder"], TEXT),
        (["S"], ""),
    ],
)
def test_the_text_ends_before_a_stop_text(stop: list[str], expected: str) -> None:
    assert "".join(_pieces(ByteTokenizer(), list(TEXT.encode()), stop)) == expected


def test_a_token_without_text_leaves_the_blank_before_the_next_word() -> None:
    """Some tokenizers leave out the blank in front of a first word."""

    def decode(tokens: Sequence[int]) -> str:
        return "".join({0: " a", 1: " b", 2: ""}[token] for token in tokens).lstrip()

    stream = TextStream(decode)
    pieces = [stream.add(token) for token in (0, 2, 2, 1, 2, 0)]
    assert "".join(pieces) + stream.end() == decode([0, 2, 2, 1, 2, 0]) == "a b a"
