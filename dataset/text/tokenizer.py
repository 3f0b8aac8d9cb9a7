"""Turn text into tokens and back: one token for each byte, or a tokenizer.json.

A tokenizer with V tokens gets three special tokens behind them: V begins a document, V + 1 ends an
instruction, and V + 2 ends a document. Bytes have the special tokens 256, 257 and 258. Padding
needs no token, because it counts nowhere.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataset.text.schema import BYTES, UNKNOWN, SpecialTokens, TextSplit
from utils.errors import UserError
from utils.files import opened
from utils.json_files import parse_json
from utils.text import one_line

NUM_SPECIAL = 3
# The fewest tokens of a trained tokenizer: all bytes, the special tokens, and one merge.
LEAST_BPE = 256 + NUM_SPECIAL + 1
_INSTALL = "pip install -r requirements-text.txt"


class Tokenizer(ABC):
    """Text to tokens and back.

    Attributes:
        name: "bytes", or the sha256 of tokenizer.json.
        vocab_size: the number of tokens, the special ones included.
        num_unknown: how often `encode` has used the token for what the tokenizer lacks.
    """

    num_unknown = 0

    def __init__(self, name: str, num_text_tokens: int, special_tokens: SpecialTokens | None = None) -> None:
        self.name = name
        self.special_tokens = special_tokens or SpecialTokens(
            start=num_text_tokens, end_of_instruction=num_text_tokens + 1, end=num_text_tokens + 2
        )
        self.vocab_size = max(num_text_tokens, *(1 + token for token in self.special_tokens.model_dump().values()))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type of integers that holds every token."""
        return np.min_scalar_type(self.vocab_size - 1)

    @abstractmethod
    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """Return the tokens of each text, without special tokens."""

    def first_unknown(self, text: bytes) -> str | None:
        """Return the first part of a text that no token stands for; None if there is none."""
        return None

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens. Special tokens give no text."""

    @abstractmethod
    def bytes_of_tokens(self) -> np.ndarray:
        """Return how many bytes of text each token stands for, int64 (V,): 0 for special tokens."""


class ByteTokenizer(Tokenizer):
    """Each byte is a token, so any text can be read, in any encoding."""

    def __init__(self) -> None:
        super().__init__(BYTES, num_text_tokens=256)

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8).astype(self.dtype) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")

    def bytes_of_tokens(self) -> np.ndarray:
        return (np.arange(self.vocab_size) < 256).astype(np.int64)


class FileTokenizer(Tokenizer):
    """The tokenizer in a tokenizer.json of the `tokenizers` library."""

    def __init__(self, file: Path, special_tokens: SpecialTokens | None = None) -> None:
        tokenizers = _library(f"{file}: such a tokenizer")
        with opened(file) as stream:
            contents = stream.read()
        described = parse_json(contents, file, "give another --tokenizer")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(contents)
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"{file}: is no tokenizer.json ({one_line(error)}); give another --tokenizer") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise UserError(f"{file}: has no tokens; give another --tokenizer")
        name = described["model"].get("unk_token")
        self._unknown = described["model"].get("unk_id") if name is None else vocabulary.get(name)
        num_tokens = 1 + max(vocabulary.values())
        super().__init__(hashlib.sha256(contents).hexdigest(), num_tokens, special_tokens)
        # A text that spells out a special token holds its characters. Only a published model may be
        # asked with such tokens: those that it knows are tokens of its tokenizer.json.
        self._tokenizer.encode_special_tokens = self.special_tokens.start >= num_tokens

    def encode(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        decoded = [text.decode("utf-8") for text in texts]
        try:
            encoded = self._tokenizer.encode_batch(decoded, add_special_tokens=False)
        except Exception as error:  # the library raises nothing narrower
            raise UserError(f"the tokenizer can't read a text ({one_line(error)}); give another --tokenizer") from None
        tokens = [np.array(each.ids, self.dtype) for each in encoded]
        if self._unknown is not None:
            self.num_unknown += sum(int((each == self._unknown).sum()) for each in tokens)
        return tokens

    def first_unknown(self, text: bytes) -> str | None:
        decoded = text.decode("utf-8")
        encoding = self._tokenizer.encode(decoded, add_special_tokens=False)
        for token, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if token == self._unknown:
                return decoded[start:end]
        # A tokenizer without a token for what it doesn't know leaves it out.
        characters = [each for each in dict.fromkeys(decoded) if each.isprintable() and not each.isspace()]
        alone = self._tokenizer.encode_batch(characters, add_special_tokens=False)
        return next((each for each, tokens in zip(characters, alone, strict=True) if not tokens.ids), None)

    def decode(self, tokens: Sequence[int]) -> str:
        special = set(self.special_tokens.model_dump().values())
        return str(self._tokenizer.decode([int(token) for token in tokens if int(token) not in special]))

    def bytes_of_tokens(self) -> np.ndarray:
        """Count for a token that doesn't show its bytes what it adds to another token."""
        num_bytes = np.zeros(self.vocab_size, np.int64)
        added = self._tokenizer.get_added_tokens_decoder()
        is_byte_level = "ByteLevel" in str(self._tokenizer.decoder)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        before = next((token for token in vocabulary.values() if self.decode([token]).isalpha()), None)
        for name, token in vocabulary.items():
            if token in added:
                num_bytes[token] = 0 if added[token].special else len(name.encode())
            elif is_byte_level:
                num_bytes[token] = len(name)  # one character for each byte
            elif re.fullmatch("<0x[0-9A-F]{2}>", name):
                num_bytes[token] = 1
            else:
                both = self.decode([token] if before is None else [before, token])
                num_bytes[token] = len(both.encode()) - (0 if before is None else len(self.decode([before]).encode()))
        num_bytes[list(self.special_tokens.model_dump().values())] = 0
        return num_bytes


def open_tokenizer(split: TextSplit) -> Tokenizer:
    """Return the tokenizer of a split. Raise UserError if it is unknown, or its library missing."""
    metadata = split.metadata
    return find_tokenizer(metadata.tokenizer, metadata.special_tokens, [split.path, split.path.parent], f"{split.path}")


def find_tokenizer(name: str, special_tokens: SpecialTokens | None, folders: Sequence[Path], whose: str) -> Tokenizer:
    """Return the tokenizer of this name that made a model's tokens."""
    if name == BYTES:
        return ByteTokenizer()
    if name == UNKNOWN or special_tokens is None:
        raise UserError(
            f"{whose} does not say which tokenizer made its tokens; give data_path=<a dataset of that tokenizer>"
        )
    for file in (folder / "tokenizer.json" for folder in folders):
        if file.is_file() and (tokenizer := FileTokenizer(file, special_tokens)).name == name:
            return tokenizer
    looked = ", ".join(map(str, folders)) or "no folder"
    raise UserError(
        f"{whose} reads tokens of the tokenizer.json {name[:12]} (sha256), which is not in {looked}; give "
        "data_path=<the folder of its dataset>, where the file is"
    )


def train_bpe(texts: Iterable[bytes], vocab_size: int, file: Path) -> None:
    """Train byte-level BPE, with special tokens in its size, and write its tokenizer.json."""
    tokenizers = _library("--train-bpe")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size - NUM_SPECIAL,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode("utf-8") for text in texts), trainer)
    file.write_text(tokenizer.to_str(pretty=True) + "\n", encoding="utf-8")


def _library(what: str) -> Any:
    try:
        import tokenizers
    except ImportError:
        raise UserError(f"{what} needs the package tokenizers, which is missing; {_INSTALL}") from None
    return tokenizers
