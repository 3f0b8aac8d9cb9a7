"""Check a dataset of text for dataset.validate: files, values, and problems in both splits."""
# N = samples

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dataset.builder import SPLITS
from dataset.schema import CHUNK_BYTES, SplitName
from dataset.text.schema import TextSplit, check_text_contents, has_split, open_text_split, require_same_tokens


def validate_text(
    path: Path, *, most_leaks: float, collect: Callable[[Callable[[], Any]], Any], warn: Callable[[str], None]
) -> tuple[str, list[str]]:
    """Check a dataset of text.

    Args:
        path: the folder that holds train and test, or a folder in HRM-Text's format.
        most_leaks: the largest share of test samples that may be in the training data.
        collect: returns what a check returns, or notes its UserError and returns None.
        warn: called with each warning.

    Returns:
        Lines that describe the dataset, and the errors about the two splits together.
    """
    lines: list[str] = []
    splits: dict[SplitName, TextSplit] = {}
    for name in SPLITS:
        if name == "test" and not has_split(path, name):
            warn(f"{path}: has no test split, so nothing can be evaluated on it")
            continue
        split = collect(partial(open_text_split, path, name))
        fingerprint = None if split is None else collect(partial(check_text_contents, split))
        if fingerprint is not None:
            splits[name] = split
            lines += [f"{name:<6} {described(split)}", f"       sha256 {fingerprint}"]
    errors = []
    if len(splits) == 2:
        train, test = splits["train"], splits["test"]
        collect(partial(require_same_tokens, train, test))
        if train.metadata.tasks != test.metadata.tasks:
            errors.append(f"{test.path / 'dataset.json'}: tasks are not those of train; build both splits together")
        if leak := _leak(train, test, most_leaks):
            line, is_error = leak
            errors.append(line) if is_error else warn(line)
    else:
        lines.append("samples in both splits were not looked for; that takes two splits without errors")
    return "\n".join(lines), errors


def described(split: TextSplit) -> str:
    """Return a line about the samples of a split."""
    lengths_N = split.epochs[0].lengths()
    epochs = f" in each of {len(split.epochs)} epochs" if len(split.epochs) > 1 else ""
    return (
        f"{len(lengths_N):,} samples{epochs} of {int(lengths_N.min()):,} to {int(lengths_N.max()):,} tokens (mean "
        f"{lengths_N.mean():,.0f}), {len(split.tokens):,} tokens of {split.metadata.vocab_size:,} kinds"
    )


def _leak(train: TextSplit, test: TextSplit, most: float) -> tuple[str, bool] | None:
    """Return a line about test samples that are in train, too, and whether they are too many."""
    train_keys_N, train_numbers_N = _keys(train)
    test_keys_N, test_numbers_N = _keys(test)
    leaked_N = np.isin(test_keys_N, train_keys_N)
    if not leaked_N.any():
        return None
    at = int(leaked_N.argmax())
    in_train = int(train_numbers_N[(train_keys_N == test_keys_N[at]).argmax()])
    share = float(leaked_N.mean())
    line = (
        f"{test.epochs[0].files[0]}: sample {int(test_numbers_N[at]):,} is in the training data too, as sample "
        f"{in_train:,} ({int(leaked_N.sum()):,} of {len(leaked_N):,} test documents are, {share:.2%})"
    )
    is_error = share > most
    return (f"{line}; leave them out of train or test, or add --allow-leak" if is_error else line), is_error


def _keys(split: TextSplit) -> tuple[np.ndarray, np.ndarray]:
    """Return a key of each document, uint64, and the number of its first sample.

    The key of a problem is that of its instruction, and the key of a text that of all its samples,
    which lie one behind the other.
    """
    samples, special = split.epochs[0], split.metadata.special_tokens
    digests, numbers = list["hashlib.blake2b"](), list[int]()
    step = CHUNK_BYTES // 40
    for first in range(0, len(samples), step):
        for number, (start, prefix_len, _, response_len, _) in enumerate(
            samples.take(slice(first, first + step)).tolist(), first
        ):
            if prefix_len == 1 and special is not None and split.tokens[start] != special.start:
                contents = split.tokens[start + 1 : start + 1 + response_len]  # goes on where the sample before ends
            else:
                digests.append(hashlib.blake2b(digest_size=8))
                numbers.append(number)
                contents = split.tokens[start : start + (prefix_len if prefix_len > 1 else 1 + response_len)]
            if digests:
                digests[-1].update(contents.astype(np.uint32).tobytes())
    keys = [int.from_bytes(digest.digest(), "big") for digest in digests]
    return np.array(keys, np.uint64), np.array(numbers, np.int64)
