"""Build an ARC dataset from folders of ARC tasks, or from the combined files of Kaggle.

Every ARC task is a group: a puzzle and up to --num-aug augmented versions. A version may turn or
mirror the grids and permute all colours but black. In the training split grids also move on the
canvas. The files and the settings, with the seed, decide every byte of the dataset.
"""
# A = versions of an ARC task, E = examples in one version, S = cells of the canvas,
# T = kinds of tokens

import contextlib
import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

# A script's modules are looked up in its own folder, dataset/, instead of the folder above.
if not __package__:
    sys.path[0] = str(Path(__file__).absolute().parents[1])

import numpy as np

from dataset import arc
from dataset.builder import (
    OUTPUT_DIR,
    SPLITS,
    Builder,
    SplitWriter,
    Typed,
    Written,
    option,
    progress,
    require_index,
    seed_option,
)
from dataset.schema import SplitName
from dataset.tasks.base import some
from dataset.transforms import NUM_TRANSFORMS
from utils.arguments import check_exclusive, given
from utils.errors import UserError
from utils.files import files_below
from utils.terminal import tell

DEFAULT_NUM_AUG = 1000
DEFAULT_DIRS = [Path("dataset/raw-data/ARC-AGI/data"), Path("dataset/raw-data/ConceptARC/corpus")]
TEST_FOLDER = "evaluation"
# The largest share of test pairs that may be among the training pairs.
MAX_LEAK = 0.01
CHUNK_ROWS = 8192
# Independent streams of random numbers. Every ARC task has both of its own.
_AUGMENT, _TRANSLATE = 0, 1

EXAMPLES = """
examples:
  # ARC-AGI-1 and ConceptARC, from their repositories in dataset/raw-data, into data/arc-aug-1000
  python dataset/build_arc_dataset.py

  # ARC-AGI-2
  python dataset/build_arc_dataset.py --dataset-dirs dataset/raw-data/ARC-AGI-2/data \\
      --output-dir data/arc-2-aug-1000

  # combined files: kaggle/combined/arc-agi_training_challenges.json, ..._solutions.json and so on,
  # or with a hyphen, as URM has them: arc-agi_training-challenges.json
  python -m dataset.build_arc_dataset --input-file-prefix kaggle/combined/arc-agi \\
      --output-dir data/arc1concept-aug-1000 --subsets training evaluation concept \\
      --test-set-name evaluation

Files may be .json or .json.gz. All pairs of a training task are trained on. The demonstrations of a
test task are trained on too, and its test pairs are the test split. From a test set without
solutions you get a dataset for a submission.
"""

_FOLDERS, _COMBINED = "ARC tasks in folders", "ARC tasks in combined files"


@dataclass(frozen=True)
class Settings:
    """The options of the command line.

    Either `dataset_dirs` is given, or all three options of combined files are. The others are None.
    """

    dataset_dirs: list[Path] | None = option(
        "DIR",
        f"folders whose subfolders hold a .json file for each ARC task; {TEST_FOLDER} is the test set "
        f"(default: {' '.join(map(str, DEFAULT_DIRS))})",
        group=_FOLDERS,
    )
    input_file_prefix: str | None = option(
        "PREFIX", "read <PREFIX>_<subset>_challenges.json (or -challenges) and ..._solutions.json", group=_COMBINED
    )
    subsets: list[str] | None = option("NAME", "the subsets to take", group=_COMBINED)
    test_set_name: str | None = option("NAME", "the subset that is the test set", group=_COMBINED)
    output_dir: Path = OUTPUT_DIR
    num_aug: int = option("N", f"augmented versions of each ARC task (default: {DEFAULT_NUM_AUG})", at_least=0)
    seed: int = seed_option(42)
    allow_leak: bool = option(
        None, f"build even if over {100 * MAX_LEAK:g} %% of the test pairs are among the training pairs", default=False
    )
    keep_colours: bool = option(None, "only turn and mirror, in all eight ways, instead of --num-aug random versions")
    side: int = option(
        "L",
        "a canvas of L x L cells, without the ARC tasks that have a larger grid (default: %(default)s)",
        default=arc.SIDE,
    )


def complete(typed: Typed) -> None:
    check_exclusive(typed, "num_aug", "keep_colours")
    check_exclusive(typed, "dataset_dirs", "input_file_prefix")
    typed.keep_colours = bool(typed.keep_colours)
    if typed.num_aug is None:
        typed.num_aug = NUM_TRANSFORMS - 1 if typed.keep_colours else DEFAULT_NUM_AUG
    if arc.side_of(typed.side**2) is None:
        raise UserError(
            f"--side is {typed.side}, but a canvas has a side from {arc.MIN_SIDE} to {arc.SIDE}, and not 10 (the shape "
            "of a Sudoku of 10x10); give another"
        )
    if typed.input_file_prefix is None:
        for name in given(typed, "subsets", "test_set_name"):
            raise UserError(f"{name} needs --input-file-prefix; add it or leave {name} out")
        typed.dataset_dirs = typed.dataset_dirs or DEFAULT_DIRS
    elif typed.subsets is None or typed.test_set_name is None:
        raise UserError("--input-file-prefix needs --subsets and --test-set-name; add them")
    elif len(set(typed.subsets)) < len(typed.subsets) or typed.test_set_name not in typed.subsets:
        subsets = " ".join(typed.subsets)
        raise UserError(f"--subsets {subsets} must name each subset once, and {typed.test_set_name} too; correct it")


class Source(NamedTuple):
    """The ARC tasks of one folder or file. They are all training tasks or all test tasks."""

    name: str
    is_test: bool
    tasks: list[arc.Task]


Puzzles = dict[str, dict[SplitName, list[arc.Pair]]]
"""The pairs of each ARC task in each split. A training task has no pairs in the test split."""


def load_sources(settings: Settings) -> list[Source]:
    """Read the ARC tasks of all folders or files whose grids fit on the canvas."""
    sources = list(_in_folders(settings.dataset_dirs) if settings.dataset_dirs else _in_combined_files(settings))
    if not any(source.is_test for source in sources):
        names = ", ".join(source.name for source in sources)
        raise UserError(f"none of {names} is called {TEST_FOLDER}, so there is no test set; add a folder that has one")
    if settings.side == arc.SIDE:
        return sources
    fitting = [
        source._replace(tasks=[task for task in source.tasks if task.side <= settings.side]) for source in sources
    ]
    size = f"{settings.side}x{settings.side}"
    if not any(source.tasks for source in fitting if source.is_test):
        raise UserError(f"no ARC task of the test set has only grids of at most {size}; give a larger --side")
    num, num_fitting = (sum(len(source.tasks) for source in each) for each in (sources, fitting))
    tell(f"note: {num_fitting:,} of {num:,} ARC tasks have only grids of at most {size}; the others are left out")
    return fitting


def _in_combined_files(settings: Settings) -> Iterator[Source]:
    for subset in settings.subsets or ():
        stem = f"{settings.input_file_prefix}_{subset}"
        challenges, solutions = _find_json(stem, "challenges"), _find_json(stem, "solutions")
        if challenges is None:
            raise UserError(
                f"there is no file {stem}_challenges.json (or .json.gz), nor one with -challenges in its name; correct "
                "--input-file-prefix or --subsets"
            )
        yield Source(subset, subset == settings.test_set_name, arc.read_tasks(challenges, solutions))


def _find_json(stem: str, kind: str) -> Path | None:
    """Return <stem>_<kind>.json of Kaggle and TRM, or <stem>-<kind>.json of URM, if any."""
    names = (f"{stem}{separator}{kind}{ending}" for separator in "_-" for ending in (".json", ".json.gz"))
    found = [file for file in map(Path, names) if file.is_file()]
    if len(found) > 1:
        raise UserError(f"{found[0]} and {found[1].name} are both there; remove one of them")
    return found[0] if found else None


def _in_folders(dataset_dirs: Sequence[Path]) -> Iterator[Source]:
    for folder in dataset_dirs:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; get the ARC tasks or correct --dataset-dirs")
        found = [file for file in files_below(folder) if file.name.lower().endswith((".json", ".json.gz"))]
        chosen = [file for file in found if file.parent.parent == folder]
        if not chosen:
            raise UserError(f"{folder}: no subfolder of it holds a .json file; correct --dataset-dirs")
        if num_others := len(found) - len(chosen):
            tell(f"note: {folder}: left out are {num_others:,} .json files that lie not right in a subfolder")
        for subfolder, files in itertools.groupby(chosen, key=lambda file: file.parent):
            tasks = [task for file in files for task in arc.read_tasks(file)]
            yield Source(str(subfolder), subfolder.name == TEST_FOLDER, tasks)


def make_puzzles(sources: Sequence[Source], allow_leak: bool) -> Puzzles:
    """Return the puzzles of all sources, in order, and print on stderr which pairs are left out.

    An ARC task that occurs twice with the same content becomes one puzzle. An ARC task that occurs
    as a training task and as a test task becomes one puzzle too, and all its known pairs are
    trained on.
    """
    _check_leak(sources, allow_leak)
    puzzles: Puzzles = {}
    first: dict[str, tuple[Source, arc.Task]] = {}
    repeated: list[str] = []
    num_unknown = 0
    for source in sources:
        for task in source.tasks:
            if not task.name or arc.SEPARATOR in task.name:
                raise UserError(
                    f"{source.name}: a task is called {task.name!r}; names need a letter and no {arc.SEPARATOR}"
                )
            pairs: dict[SplitName, list[arc.Pair]] = {"train": task.train, "test": task.test}
            if not source.is_test:
                known = [pair for pair in task.test if pair.output is not None]
                pairs = {"train": task.train + known, "test": []}
                num_unknown += len(task.test) - len(known)
            other_source, other = first.setdefault(task.name, (source, task))
            if other is not task:
                repeated.append(task.name)
                both_ways = allow_leak and source.is_test != other_source.is_test
                if task.content != other.content and not both_ways:
                    raise UserError(
                        f"{source.name} and {other_source.name} hold different ARC tasks called {task.name}; "
                        "rename one or leave one out"
                    )
            puzzle = puzzles.setdefault(task.name, {"train": [], "test": []})
            for split in SPLITS:
                there = {pair.key for pair in puzzle[split]}
                puzzle[split] += [pair for pair in pairs[split] if pair.key not in there]
    if repeated:
        tell(f"note: ARC tasks that occur more than once are built once: {some(repeated)}")
    if num_unknown:
        tell(f"note: test pairs of training tasks without output are left out: {num_unknown}")
    return puzzles


def _check_leak(sources: Sequence[Source], allow_leak: bool) -> None:
    """Raise UserError if too many test pairs are also training pairs, before augmentation."""
    trained_on: dict[bytes, str] = {}
    tested: list[tuple[str, bytes]] = []
    for source in sources:
        for task in source.tasks:
            for pair in task.train if source.is_test else task.train + task.test:
                trained_on.setdefault(pair.key, task.name)
            if source.is_test:
                tested += [(task.name, pair.key) for pair in task.test if pair.output is not None]
    leaks = [f"{name} (in {trained_on[key]})" for name, key in tested if key in trained_on]
    if leaks:
        what = f"{len(leaks)} of {len(tested)} test pairs are among the training pairs: {some(leaks)}"
        if len(leaks) > MAX_LEAK * len(tested) and not allow_leak:
            raise UserError(f"{what}; leave those ARC tasks out of training, or add --allow-leak")
        tell(f"warning: {what}")


def write(folder: Path, settings: Settings) -> Written:
    """Write both splits, and the test tasks. Raise UserError if the input is bad."""
    sources = load_sources(settings)
    puzzles = make_puzzles(sources, settings.allow_leak)
    require_index((1 + settings.num_aug) * sum(len(puzzle["train"]) for puzzle in puzzles.values()))
    versions: dict[str, arc.Augmentations] = {}
    next_identifier = 1
    with contextlib.ExitStack() as stack:
        shape = {"seq_len": settings.side**2, "vocab_size": arc.VOCAB_SIZE, "num_puzzle_identifiers": 0}
        writers = {split: stack.enter_context(SplitWriter(folder / split, **shape)) for split in SPLITS}
        bar = stack.enter_context(progress("writing", len(puzzles), "tasks"))
        for name, puzzle in puzzles.items():
            pairs = [pair for split in SPLITS for pair in puzzle[split]]
            if settings.keep_colours:
                found = arc.all_transforms(pairs)
            else:
                found = arc.draw_augmentations(pairs, settings.num_aug, _rng(settings, name, _AUGMENT))
            identifiers_A = next_identifier + np.arange(len(found.transforms_A))
            for split in SPLITS:
                rng = _rng(settings, name, _TRANSLATE) if split == "train" else None
                _write_group(writers[split], puzzle[split], found, identifiers_A, rng, settings.side)
            next_identifier += len(identifiers_A)
            versions[name] = found
            bar.update()
        for writer in writers.values():
            writer.num_puzzle_identifiers = next_identifier
    fewer = [name for name, found in versions.items() if len(found.transforms_A) <= settings.num_aug]
    if fewer:
        tell(f"note: fewer than {settings.num_aug} different versions were found of {some(fewer)}")
    of_test = {task.name: task.as_json() for source in sources if source.is_test for task in source.tasks}
    (folder / "test_puzzles.json").write_text(json.dumps(of_test) + "\n", encoding="utf-8")
    lines = [
        f"{split:<5}  {each.num_examples:,} examples of {each.num_puzzles:,} versions of {each.num_groups:,} tasks"
        for split, each in writers.items()
    ]
    tokens = f"tokens padding 0, end 1, colours from 2: vocab_size {arc.VOCAB_SIZE}, seq_len {settings.side**2}"
    names = (
        arc.augmented_name(task, number, permutation_C)
        for task, found in versions.items()
        for number, permutation_C in zip(found.transforms_A.tolist(), found.permutations_AC, strict=True)
    )
    return itertools.chain(["<blank>"], names), [*lines, tokens]


def _rng(settings: Settings, name: str, stream: int) -> np.random.Generator:
    """Return random numbers for one puzzle, which do not depend on the other puzzles."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    return np.random.default_rng([settings.seed, stream, int.from_bytes(digest)])


def _write_group(
    writer: SplitWriter,
    pairs: Sequence[arc.Pair],
    found: arc.Augmentations,
    identifiers_A: np.ndarray,
    rng: np.random.Generator | None,
    side: int,
) -> None:
    """Write the versions of a puzzle. Random numbers move the grids on the canvas."""
    if not pairs:
        return
    num = len(identifiers_A)
    places_AE2 = (
        np.zeros((num, len(pairs), 2), int) if rng is None else draw_places(pairs, found.transforms_A, rng, side)
    )
    step = max(1, CHUNK_ROWS // len(pairs))
    for start in range(0, num, step):
        chunk = slice(start, start + step)
        versions = arc.Augmentations(found.transforms_A[chunk], found.permutations_AC[chunk])
        inputs_NS, labels_NS = rows_of(pairs, versions, places_AE2[chunk], side)
        writer.add(inputs_NS, labels_NS, np.full(len(versions.transforms_A), len(pairs)), identifiers_A[chunk])
    writer.end_groups(np.array([num]))


def draw_places(pairs: Sequence[arc.Pair], transforms_A: np.ndarray, rng: np.random.Generator, side: int) -> np.ndarray:
    """Draw the row and the column at which the grids of each example begin, (A, E, 2).

    Both grids of an example begin there and stay on the canvas. One random example of each version
    begins at (0, 0), as published.
    """
    sizes_E2 = np.array([np.max([grid.shape for grid in pair.grids], axis=0) for pair in pairs])
    is_transposed_8 = [arc.transform(np.empty((1, 2)), number).shape == (2, 1) for number in range(NUM_TRANSFORMS)]
    is_transposed_A11 = np.array(is_transposed_8)[transforms_A][:, None, None]
    places_AE2 = rng.integers(side + 1 - np.where(is_transposed_A11, sizes_E2[:, ::-1], sizes_E2))
    stays_A = rng.integers(len(pairs), size=len(transforms_A))
    places_AE2[np.arange(len(transforms_A)), stays_A] = 0
    return places_AE2


def rows_of(
    pairs: Sequence[arc.Pair], versions: arc.Augmentations, places_AE2: np.ndarray, side: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and the labels of all examples, (A * E, S) uint8 each."""
    num_versions, num_examples = places_AE2.shape[:2]
    # The canvases have room for end markers beyond the edge, which are cut off at the end.
    canvases = np.full((2, num_versions, num_examples, side + 1, side + 1), arc.PADDING, dtype=np.uint8)
    tokens_AT = np.empty((num_versions, arc.VOCAB_SIZE), dtype=np.uint8)
    tokens_AT[:, [arc.PADDING, arc.END]] = arc.PADDING, arc.END
    tokens_AT[:, arc.FIRST_COLOUR :] = versions.permutations_AC + np.uint8(arc.FIRST_COLOUR)
    for number in np.unique(versions.transforms_A):
        (which,) = np.nonzero(versions.transforms_A == number)
        for e, pair in enumerate(pairs):
            for canvas_AERC, grid in zip(canvases, (pair.input, pair.output), strict=True):
                if grid is None:
                    continue
                tokens = arc.framed(arc.transform(grid, number))
                rows = places_AE2[which, e, 0][:, None, None] + np.arange(tokens.shape[0])[:, None]
                columns = places_AE2[which, e, 1][:, None, None] + np.arange(tokens.shape[1])
                canvas_AERC[which[:, None, None], e, rows, columns] = tokens_AT[which][:, tokens]
    inputs_NS, labels_NS = canvases[..., :side, :side].reshape(2, -1, side * side)
    return inputs_NS, labels_NS


BUILDER = Builder("build_arc_dataset", __doc__, EXAMPLES, "data/arc-aug-1000", Settings, complete, write)
main = BUILDER.main

if __name__ == "__main__":
    sys.exit(main())
