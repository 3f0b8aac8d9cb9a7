"""Collect the data for the page of a dataset: its puzzles by group, and facts about them."""
# G = groups, P = puzzles, S = tokens of an example

from pathlib import Path

import numpy as np

from dataset.builder import SPLITS, size_mb
from dataset.pictures import board_of
from dataset.schema import PuzzleSet, Split, open_split
from dataset.tasks import task_of_shape
from utils.errors import UserError
from viewer.pages import Page, Settings, name_at, names_of, size_text, spread, to_text

# The page shows only a few puzzles of a group, because a group may have a thousand.
MAX_PUZZLES_OF_GROUP, MAX_EXAMPLES_OF_PUZZLE = 4, 5


def page_of_dataset(data: Path, settings: Settings) -> Page:
    """Return the data for the page.

    Raises:
        UserError: The dataset is damaged, or has no set of the chosen name.
    """
    splits = [open_split(data, split) for split in SPLITS if (data / split).is_dir()]
    every = {f"{split.path.name}/{name}": (split, one) for split in splits for name, one in split.sets.items()}
    chosen = {name: pair for name, pair in every.items() if settings.set in (None, pair[1].name, name)}
    if not chosen:
        raise UserError(f"{data} has no set {settings.set}; it has {', '.join(every)}")
    names = names_of(data)
    examples = [
        example
        for name, (split, puzzle_set) in chosen.items()
        for example in _examples_of_set(name, split, puzzle_set, names, settings.max_examples)
    ]
    metadata = splits[0].metadata
    counts = {name: f"{len(one.inputs):,} examples" for name, (_, one) in every.items()}
    for name, (_, one) in every.items():
        num_puzzles, num_groups = len(one.puzzle_indices) - 1, len(one.group_indices) - 1
        if num_puzzles != len(one.inputs):
            counts[name] += f" of {num_puzzles:,} puzzles"
        if num_groups != num_puzzles:
            counts[name] += f" in {num_groups:,} groups"
    task = task_of_shape(metadata.seq_len, metadata.vocab_size)
    facts = {"task": task.title} if task else {}
    facts |= {**counts, "tokens": f"{metadata.seq_len} of {metadata.vocab_size} kinds"}
    if metadata.num_puzzle_identifiers > 1:
        facts["identifiers"] = f"{metadata.num_puzzle_identifiers:,}"
    return {
        "kind": "dataset",
        "title": data.resolve().name,
        "board": board_of(task, metadata.seq_len),
        "facts": facts | {"size": size_text(size_mb(data))},
        "notes": [],
        "sets": {name: len(one.inputs) for name, (_, one) in chosen.items()},
        "examples": examples,
        "summary": f"sets {', '.join(chosen)}",
    }


def _examples_of_set(name: str, split: Split, puzzle_set: PuzzleSet, names: list[str], most: int) -> list[Page]:
    """Return examples of groups that are spread evenly over a set.

    Of each group, these are the first puzzle and a few of its augmentations.
    """
    puzzles_G = np.diff(puzzle_set.group_indices)
    examples_P = np.diff(puzzle_set.puzzle_indices)
    per_group = min(int(puzzles_G.max()), MAX_PUZZLES_OF_GROUP) - 1 + min(int(examples_P.max()), MAX_EXAMPLES_OF_PUZZLE)
    examples: list[Page] = []
    for group in spread(len(puzzles_G), max(1, most // per_group)):
        first_puzzle = int(puzzle_set.group_indices[group])
        for place in spread(int(puzzles_G[group]), MAX_PUZZLES_OF_GROUP):
            puzzle = first_puzzle + int(place)
            # The first puzzle shows its examples, such as the pairs of an ARC task. Each of the
            # other puzzles shows one.
            shown = MAX_EXAMPLES_OF_PUZZLE if place == 0 else 1
            first_row = int(puzzle_set.puzzle_indices[puzzle])
            for row in range(first_row, first_row + min(int(examples_P[puzzle]), shown)):
                label_S = puzzle_set.labels[row].astype(np.int64)
                examples.append(
                    {
                        "set": name,
                        "row": row,
                        "input": to_text(puzzle_set.inputs[row]),
                        "label": to_text(np.where(label_S == split.metadata.ignore_label_id, -1, label_S)),
                        "group": int(group),
                        "puzzle": int(place),
                        "group_size": int(puzzles_G[group]),
                        **name_at(names, int(puzzle_set.puzzle_identifiers[puzzle])),
                    }
                )
    return examples
