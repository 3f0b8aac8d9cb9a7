"""Collect what pages show of text: a dataset's samples by token, and the answers of a run."""
# N = samples

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataset.builder import SPLITS, size_mb
from dataset.text.schema import BYTES, UNKNOWN, TextSplit, has_split, open_text_split
from dataset.text.stream import TextStream
from dataset.text.tokenizer import Tokenizer, open_tokenizer
from utils.errors import UserError
from utils.text import for_shell
from viewer.pages import Page, Settings, read_json, size_text, spread

_MOST_TOKENS = 4000  # of a part of a sample
_MOST_BARS = 40
_MOST_STEPS = 50
_SAMPLES = re.compile(r"step_(\d+)\.json")

Piece = str | list[str | int]
"""A part of a text: a token and its number, or characters whose bytes are the tokens."""


def page_of_text(data: Path, settings: Settings) -> Page:
    """Return the data for the page."""
    splits = {name: open_text_split(data, name) for name in SPLITS if has_split(data, name)}
    chosen = {name: split for name, split in splits.items() if settings.set in (None, name)}
    if not chosen:
        raise UserError(f"{data} has no set {settings.set}; it has {', '.join(splits)}")
    metadata = next(iter(splits.values())).metadata
    facts: dict[str, str] = {
        name: f"{len(split.epochs[0]):,} samples, {len(split.tokens):,} tokens" for name, split in splits.items()
    }
    # A tokenizer is named by its hash.
    tokenizer = metadata.tokenizer if metadata.tokenizer in (BYTES, UNKNOWN) else metadata.tokenizer[:12]
    facts |= {"vocabulary": f"{metadata.vocab_size:,}", "tokenizer": tokenizer}
    if len(metadata.tasks) > 1:
        facts["tasks"] = f"{len(metadata.tasks):,}"
    return {
        "kind": "dataset",
        "title": data.resolve().name,
        "facts": facts | {"size": size_text(size_mb(data))},
        "notes": [],
        "sets": {name: len(split.epochs[0]) for name, split in chosen.items()},
        "examples": [],
        "texts": [text for name, split in chosen.items() for text in _texts_of(name, split, settings.max_examples)],
        "lengths": [_lengths_of(name, split) for name, split in chosen.items()],
        "summary": f"sets {', '.join(chosen)}",
    }


def _texts_of(name: str, split: TextSplit, most: int) -> list[Page]:
    """Return samples that are spread evenly over a split, with their tokens."""
    samples, metadata = split.epochs[0], split.metadata
    tokenizer = None if metadata.tokenizer == UNKNOWN else open_tokenizer(split)
    rows = spread(len(samples), most)
    texts: list[Page] = []
    for row, (start, prefix_len, response_start, response_len, task) in zip(
        rows.tolist(), samples.take(rows).tolist(), strict=True
    ):
        prefix = split.tokens[start : start + prefix_len].tolist()
        response = split.tokens[response_start : response_start + response_len].tolist()
        if (len(prefix), len(response)) != (prefix_len, response_len) or not 0 <= task < len(metadata.tasks):
            checking = f"python -m dataset.validate {for_shell([str(split.path.parent)])}"
            raise UserError(f"{split.path}: sample {row} is wrong; {checking} says where")
        # The prefix of a text is its first token.
        parts = {"text": prefix + response} if prefix_len == 1 else {"instruction": prefix, "response": response}
        shown = [
            {
                "title": title,
                "num_tokens": len(tokens),
                "shown": min(len(tokens), _MOST_TOKENS),
                "pieces": pieces_of(tokens[:_MOST_TOKENS], tokenizer),
            }
            for title, tokens in parts.items()
        ]
        texts.append({"set": name, "row": row, "task": metadata.tasks[task], "parts": shown})
    return texts


def pieces_of(tokens: Sequence[int], tokenizer: Tokenizer | None) -> list[Piece | Page]:
    """Return tokens as the page takes them.

    Tokens that are parts of a character belong to the piece that ends the character. A special
    token is {"special": its name}.

    Args:
        tokenizer: None: tokens are numbers.
    """
    if tokenizer is None:
        return [[str(token), token] for token in tokens]
    special = {number: name.replace("_", " ") for name, number in tokenizer.special_tokens.model_dump().items()}
    pieces: list[Piece | Page] = []
    stream, waiting = TextStream(tokenizer.decode), list[int]()
    for token in [*tokens, None]:
        if token is None or token in special:
            text = stream.end() if waiting else ""
            stream = TextStream(tokenizer.decode)
        else:
            waiting.append(token)
            text = stream.add(token)
        if text and tokenizer.name != BYTES:
            pieces.append([text, *waiting])
        elif text and pieces and isinstance(pieces[-1], str):
            pieces[-1] += text
        elif text:
            pieces.append(text)
        if text:
            waiting.clear()
        if token in special:
            pieces.append({"special": special[token]})
    return pieces


def _lengths_of(name: str, split: TextSplit) -> Page:
    """Return how many samples have how many tokens, those that a model reads."""
    lengths_N = split.epochs[0].lengths()
    least, longest = int(lengths_N.min()), int(lengths_N.max())
    width = -(-(longest + 1 - least) // _MOST_BARS) | 1  # odd, so that the middle of a bar is a length
    return {
        "set": name,
        "least": least,
        "width": width,
        "counts": np.bincount((lengths_N - least) // width).tolist(),
        "mean": round(float(lengths_N.mean()), 1),
        "longest": longest,
    }


# ---- runs ----------------------------------------------------------------------------------------


def is_text_run(config: Mapping[str, Any]) -> bool:
    """Return whether the config of a run is that of a model of text."""
    arch = config.get("arch")
    return isinstance(arch, dict) and arch.get("attention") in ("prefixlm", "causal")


def answers_of(run: Path, step: int | None) -> list[Page]:
    """Return the answers that a run of text wrote at its evaluations, the newest first.

    Args:
        step: only those of this step; None: those of a few steps, evenly spread.
    """
    found = {int(match[1]): file for file in (run / "samples").glob("*") if (match := _SAMPLES.fullmatch(file.name))}
    if step is not None and step not in found:
        has = ", ".join(map(str, sorted(found))) or "none"
        raise UserError(f"{run} has no answers of step {step}, but of: {has}; choose one of them")
    steps = sorted(found) if step is None else [step]
    texts: list[Page] = []
    for place in reversed(spread(len(steps), _MOST_STEPS)):
        file = found[steps[place]]
        try:
            texts += [_answer_of(steps[place], answer) for answer in read_json(file)]
        except (KeyError, TypeError):
            raise UserError(f"{file}: isn't what an evaluation writes; remove it") from None
    return texts


def _answer_of(step: int, answer: Page) -> Page:
    is_problem = bool(answer["is_problem"])
    titles = ("instruction", "answer", "right answer")
    if not is_problem:
        titles = ("text", "the model goes on", "the text goes on")
    told = [str(answer[key]) for key in ("prompt", "answer", "right")]
    return {
        "set": f"step {step:,}",
        "row": int(answer["row"]),
        "task": str(answer["task"]),
        **({"is_right": told[1] == told[2]} if is_problem else {}),
        "parts": [{"title": title, "pieces": [text]} for title, text in zip(titles, told, strict=True)],
    }
