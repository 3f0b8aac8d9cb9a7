"""Write a split of text as a stream. Only counts stay in memory."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from dataset.builder import FolderWriter
from dataset.text.schema import TextMetadata
from dataset.text.tokenizer import Tokenizer


class TextSplitWriter(FolderWriter):
    """Writes the tokens and the samples of one split into a new folder."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, max_len: int, tasks: Iterable[str]) -> None:
        super().__init__(folder, tokens=(tokenizer.dtype,), samples=(np.int64, 4))
        self._tokenizer, self._max_len, self._tasks = tokenizer, max_len, tasks
        self.num_documents = self.num_samples = self.num_tokens = self.longest = 0

    def add_text(self, text: np.ndarray, task: int) -> None:
        """Append a text, cut into samples of at most `max_len` tokens to read.

        Each sample begins with the last token of the sample before it. So every token but the first
        is predicted once.
        """
        special = self._tokenizer.special_tokens
        first = self._append([special.start], text, [special.end])
        for start in range(first, self.num_tokens - 1, self._max_len):
            self._add_sample(start, 1, min(self._max_len, self.num_tokens - 1 - start), task)

    def add_problem(self, instruction: np.ndarray, response: np.ndarray, task: int) -> None:
        """Append a problem, which is one sample."""
        special = self._tokenizer.special_tokens
        first = self._append([special.start], instruction, [special.end_of_instruction], response, [special.end])
        self._add_sample(first, len(instruction) + 2, len(response) + 1, task)

    def _append(self, *parts: Sequence[int] | np.ndarray) -> int:
        """Append the tokens of a document, and return the place of the first one."""
        first = self.num_tokens
        document = np.concatenate([np.asarray(part, self._tokenizer.dtype) for part in parts])
        self._arrays["tokens"].append(document)
        self.num_tokens += len(document)
        self.num_documents += 1
        return first

    def _add_sample(self, start: int, prefix_len: int, response_len: int, task: int) -> None:
        self._arrays["samples"].append(np.array([[start, prefix_len, response_len, task]]))
        self.num_samples += 1
        self.longest = max(self.longest, prefix_len + response_len - 1)

    def _finish(self) -> TextMetadata:
        return TextMetadata(
            kind="text",
            vocab_size=self._tokenizer.vocab_size,
            max_len=self.longest,
            num_samples=self.num_samples,
            num_tokens=self.num_tokens,
            tokenizer=self._tokenizer.name,
            special_tokens=self._tokenizer.special_tokens,
            tasks=list(self._tasks),
        )
