"""Show a dataset of text for dataset.show: its size, its tasks, and some samples as text."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dataset.schema import SplitName
from dataset.text.schema import BYTES, UNKNOWN, TextSplit, has_split, open_text_split
from dataset.text.tokenizer import open_tokenizer
from dataset.text.validate import described
from utils.errors import UserError

# A sample is cut to so many characters.
_MOST_CHARACTERS = 600


def describe_text(path: Path) -> list[str]:
    """Return lines about both splits of a dataset."""
    names: tuple[SplitName, ...] = ("train", "test")
    splits = [(name, open_text_split(path, name)) for name in names if has_split(path, name)]
    if not splits:
        open_text_split(path, "train")  # raises an error that names what is missing
    metadata = splits[0][1].metadata
    kinds = metadata.tokenizer if metadata.tokenizer in (BYTES, UNKNOWN) else f"tokenizer {metadata.tokenizer[:12]}"
    lines = [f"  text     {metadata.vocab_size:,} tokens ({kinds}), max_len {metadata.max_len:,}"]
    for name, split in splits:
        lines.append(f"  {name:<8} {described(split)}")
        task = split.epochs[0].task
        if task is not None and len(metadata.tasks) > 1:
            counts = np.bincount(task, minlength=len(split.metadata.tasks))
            shown = [f"{each} {num:,}" for each, num in zip(split.metadata.tasks, counts.tolist(), strict=False)]
            lines.append(f"  {'':<8} {', '.join(shown)}")
    return lines


def show_samples(split: TextSplit, name: SplitName, numbers: Sequence[int]) -> list[str]:
    """Return the samples with these numbers, as text if the tokenizer is known."""
    tokenizer = None if split.metadata.tokenizer == UNKNOWN else open_tokenizer(split)
    lines = []
    for number, place in zip(numbers, split.epochs[0].take(np.array(numbers)).tolist(), strict=True):
        start, prefix_len, response_start, response_len, task = place
        parts = [split.tokens[start : start + prefix_len], split.tokens[response_start : response_start + response_len]]
        if len(parts[0]) != prefix_len or len(parts[1]) != response_len or not 0 <= task < len(split.metadata.tasks):
            raise UserError(f"{split.path}: sample {number} is wrong; python -m dataset.validate says where")
        title = f"{name} sample {number}: {_cut(split.metadata.tasks[task])}, {prefix_len} + {response_len} tokens"
        decode = tokenizer.decode if tokenizer is not None else lambda tokens: " ".join(map(str, tokens))
        instruction, response = (decode(part.tolist()) for part in parts)
        has_instruction = prefix_len > 1
        shown = [_cut(instruction), "-> " + _cut(response)] if has_instruction else [_cut(instruction + response)]
        lines += ["", title, *shown]
    return lines


def _cut(text: str) -> str:
    """Return the beginning of a text, with ? in place of control characters but line breaks."""
    cut = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in cut)
