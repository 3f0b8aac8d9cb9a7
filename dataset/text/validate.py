"""Check a dataset of text for dataset.validate: files, values, and problems in both splits."""
# N = samples

import hashlib
from pathlib import Path

import numpy as np

from dataset.builder import SPLITS
from dataset.schema import CHUNK_BYTES, Findings, SplitName
from dataset.text.schema import TextSplit, check_text_contents, has_split, open_text_split, require_same_tokens


def validate_text(path: Path, most_leaks: float, findings: Findings) -> str:
    """Check a dataset of text, perhaps in HRM-Text's format, and return lines that describe it.

    `most_leaks` is the largest share of test samples that may be in the training data.
    """
    lines: list[str] = []
    splits: dict[SplitName, TextSplit] = {}
    for name in SPLITS:
        if name == "test" and not has_split(path, name):
            findings.warnings.append(f"{path}: has no test split, so nothing can be evaluated on it")
            continue
        with findings.collecting():
            split = open_text_split(path, name)
            lines += [f"{name:<6} {described(split)}", f"       sha256 {check_text_contents(split)}"]
            splits[name] = split
    if len(splits) < len(SPLITS):
        return "\n".join([*lines, "samples in both splits were not looked for; that takes two splits without errors"])
    train, test = splits["train"], splits["test"]
    with findings.collecting():
        require_same_tokens(train, test)
    if train.metadata.tasks != test.metadata.tasks:
        findings.errors.append(
            f"{test.path / 'dataset.json'}: tasks are not those of train; build both splits together"
        )
    (train_keys_N, train_numbers_N), (test_keys_N, test_numbers_N) = _keys(train), _keys(test)
    leaked_N = np.isin(test_keys_N, train_keys_N)
    if leaked_N.any():
        at = int(leaked_N.argmax())
        in_train = int(train_numbers_N[(train_keys_N == test_keys_N[at]).argmax()])
        share = float(leaked_N.mean())
        line = (
            f"{test.epochs[0].files[0]}: sample {int(test_numbers_N[at]):,} is in the training data too, as sample "
            f"{in_train:,} ({int(leaked_N.sum()):,} of {len(leaked_N):,} test documents are, {share:.2%})"
        )
        findings.add_leak(line, share > most_leaks)
    return "\n".join(lines)


def described(split: TextSplit) -> str:
    """Return a line about the samples of a split."""
    lengths_N = split.epochs[0].lengths()
    epochs = f" in each of {len(split.epochs)} epochs" if len(split.epochs) > 1 else ""
    return (
        f"{len(lengths_N):,} samples{epochs} of {int(lengths_N.min()):,} to {int(lengths_N.max()):,} tokens (mean "
        f"{lengths_N.mean():,.0f}), {len(split.tokens):,} tokens of {split.metadata.vocab_size:,} kinds"
    )


def _keys(split: TextSplit) -> tuple[np.ndarray, np.ndarray]:
    """Return a key of each document, uint64, and the number of its first sample.

    The key of a problem is that of its instruction, and the key of a text that of all its samples.
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
