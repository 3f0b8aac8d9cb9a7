"""Collect the data for the page of a dataset: its puzzles by group, or its texts by token."""
# G = groups, P = puzzles, S = tokens of an example, N = samples of text

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from dataset.builder import SPLITS, size_mb
from dataset.pictures import board_of
from dataset.schema import PuzzleSet, Split, open_split
from dataset.tasks import task_of_shape
from dataset.text.schema import BYTES, UNKNOWN, TextSplit, has_split, kind_of_data, open_text_split
from dataset.text.stream import TextStream
from dataset.text.tokenizer import Tokenizer, open_tokenizer
from utils.errors import UserError
from utils.text import for_shell
from viewer.pages import Names, Page, Settings, names_of_puzzles, spread

# The page shows only a few puzzles of a group, because a group may have a thousand.
MAX_PUZZLES_OF_GROUP, MAX_EXAMPLES_OF_PUZZLE = 4, 5
_MOST_TOKENS = 4000  # of a part of a text
_MOST_BARS = 40

Piece = str | list[str | int]
"""A part of a text: a token and its number, or characters whose bytes are the tokens."""


def page_of_dataset(data: Path, settings: Settings) -> Page:
    """Return the data for the page."""
    page = _page_of_texts(data, settings) if kind_of_data(data) == "text" else _page_of_puzzles(data, settings)
    megabytes = size_mb(data)
    size = f"{megabytes:,.1f} MB" if megabytes >= 1 else f"{megabytes * 1000:,.0f} kB"
    facts, summary = page["facts"] | {"size": size}, f"sets {', '.join(page['sets'])}"
    return {"kind": "dataset", "title": data.resolve().name, **page, "facts": facts, "summary": summary}


def _no_set(data: Path, settings: Settings, names: Iterable[str]) -> UserError:
    return UserError(f"{data} has no set {settings.set}; it has {', '.join(names)}")


# ---- puzzles -------------------------------------------------------------------------------------


def _page_of_puzzles(data: Path, settings: Settings) -> Page:
    splits = [open_split(data, split) for split in SPLITS if (data / split).is_dir()]
    every = {f"{split.path.name}/{name}": (split, one) for split in splits for name, one in split.sets.items()}
    chosen = {name: pair for name, pair in every.items() if settings.set in (None, pair[1].name, name)}
    if not chosen:
        raise _no_set(data, settings, every)
    metadata = splits[0].metadata
    task = task_of_shape(metadata.seq_len, metadata.vocab_size)
    facts = {"task": task.title} if task else {}
    for name, (_, one) in every.items():
        num_puzzles, num_groups = len(one.puzzle_indices) - 1, len(one.group_indices) - 1
        facts[name] = f"{len(one.inputs):,} examples"
        if num_puzzles != len(one.inputs):
            facts[name] += f" of {num_puzzles:,} puzzles"
        if num_groups != num_puzzles:
            facts[name] += f" in {num_groups:,} groups"
    facts["tokens"] = f"{metadata.seq_len} of {metadata.vocab_size} kinds"
    if metadata.num_puzzle_identifiers > 1:
        facts["identifiers"] = f"{metadata.num_puzzle_identifiers:,}"
    names, most = names_of_puzzles(data), settings.max_examples
    return {
        "board": board_of(task, metadata.seq_len),
        "facts": facts,
        "sets": {name: len(one.inputs) for name, (_, one) in chosen.items()},
        "examples": [example for name, pair in chosen.items() for example in _examples_of(name, *pair, names, most)],
    }


def _examples_of(name: str, split: Split, puzzle_set: PuzzleSet, names: Names, most: int) -> Iterator[Page]:
    """Yield the first puzzle and a few augmentations of groups, spread evenly over a set."""
    puzzles_G = np.diff(puzzle_set.group_indices)
    examples_P = np.diff(puzzle_set.puzzle_indices)
    per_group = min(int(puzzles_G.max()), MAX_PUZZLES_OF_GROUP) - 1 + min(int(examples_P.max()), MAX_EXAMPLES_OF_PUZZLE)
    for group in spread(len(puzzles_G), max(1, most // per_group)):
        for place in spread(int(puzzles_G[group]), MAX_PUZZLES_OF_GROUP):
            puzzle = int(puzzle_set.group_indices[group]) + int(place)
            # The first puzzle shows its examples, such as the pairs of an ARC task. Each of the
            # other puzzles shows one.
            shown = MAX_EXAMPLES_OF_PUZZLE if place == 0 else 1
            first_row = int(puzzle_set.puzzle_indices[puzzle])
            for row in range(first_row, first_row + min(int(examples_P[puzzle]), shown)):
                label_S = puzzle_set.labels[row]
                yield {
                    "set": name,
                    "row": row,
                    "input": puzzle_set.inputs[row],
                    "label": np.where(label_S == split.metadata.ignore_label_id, -1, label_S.astype(np.int64)),
                    "group": int(group),
                    "puzzle": int(place),
                    "group_size": int(puzzles_G[group]),
                    **names.get(int(puzzle_set.puzzle_identifiers[puzzle]), {}),
                }


# ---- texts ---------------------------------------------------------------------------------------


def _page_of_texts(data: Path, settings: Settings) -> Page:
    splits = {name: open_text_split(data, name) for name in SPLITS if has_split(data, name)}
    chosen = {name: split for name, split in splits.items() if settings.set in (None, name)}
    if not chosen:
        raise _no_set(data, settings, splits)
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
        "facts": facts,
        "sets": {name: len(split.epochs[0]) for name, split in chosen.items()},
        "examples": [],
        "texts": [text for name, split in chosen.items() for text in _texts_of(name, split, settings.max_examples)],
        "lengths": [_lengths_of(name, split) for name, split in chosen.items()],
    }


def _texts_of(name: str, split: TextSplit, most: int) -> Iterator[Page]:
    """Yield samples that are spread evenly over a split, with their tokens."""
    samples, metadata = split.epochs[0], split.metadata
    tokenizer = None if metadata.tokenizer == UNKNOWN else open_tokenizer(split)
    rows = spread(len(samples), most)
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
        yield {"set": name, "row": row, "task": metadata.tasks[task], "parts": shown}


def pieces_of(tokens: Sequence[int], tokenizer: Tokenizer | None) -> list[Piece | Page]:
    """Return tokens as the page takes them; numbers if there is no tokenizer.

    Tokens that are parts of a character belong to the piece that ends the character.
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
