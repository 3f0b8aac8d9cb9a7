"""Build an ARC dataset from folders of ARC tasks, or from the combined files of Kaggle.

Every ARC task is a group: a puzzle and up to --num-aug augmented versions. A version may turn or
mirror the grids and permute all colours but black. In the training split grids also move on the
canvas. A smaller canvas holds only the ARC tasks whose grids fit on it. The files and the settings,
with the seed, decide every byte of the dataset. The dataset appears under its name only when it is
whole.
"""
# A = versions of an ARC task, E = examples in one version, S = cells of the canvas,
# T = kinds of tokens

import contextlib
import dataclasses
import hashlib
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

from dataset.arc import (
    END,
    FIRST_COLOUR,
    MIN_SIDE,
    NUM_TRANSFORMS,
    PADDING,
    SEPARATOR,
    SIDE,
    VOCAB_SIZE,
    Augmentations,
    Pair,
    Task,
    all_transforms,
    augmented_name,
    draw_augmentations,
    framed,
    read_tasks,
    side_of,
    transform,
)
from dataset.builder import (
    SPLITS,
    SplitWriter,
    build_dataset,
    builder_parser,
    progress,
    require_index,
    what_was_left_out,
)
from dataset.schema import SplitName
from dataset.tasks.base import some
from utils.arguments import check_at_least, check_exclusive, given, typed_path
from utils.errors import UserError
from utils.files import files_below
from utils.shell import run_command
from utils.terminal import tell

PROGRAM = "build_arc_dataset"
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
solutions you get a dataset for a submission. An old dataset in the output folder is replaced once
the new dataset is whole.
"""


@dataclass(frozen=True)
class Settings:
    """The options of the command line.

    Either `dataset_dirs` is given, or all three options of combined files are. The others are None.
    """

    dataset_dirs: list[Path] | None
    input_file_prefix: str | None
    subsets: list[str] | None
    test_set_name: str | None
    output_dir: Path
    num_aug: int
    seed: int
    allow_leak: bool
    keep_colours: bool
    side: int


class Source(NamedTuple):
    """The ARC tasks of one folder or file. They are all training tasks or all test tasks."""

    name: str
    is_test: bool
    tasks: list[Task]


class Puzzle(NamedTuple):
    """The pairs of an ARC task in each split. A training task has no pairs in the test split."""

    name: str
    pairs: dict[SplitName, list[Pair]]


# --------------------------------------------------------------------------------------------------
# Command line


def parse_settings(argv: list[str] | None = None) -> Settings:
    """Parse the command line.

    Raises:
        UserError: An option is unknown, malformed or in conflict with another.
    """
    description = "Build an ARC dataset. Inputs and labels are grids on a canvas of 30 x 30 cells, or fewer."
    parser = builder_parser(PROGRAM, description, EXAMPLES, "data/arc-aug-1000", seed=42)
    add = parser.add_argument
    add("--num-aug", type=int, metavar="N", help=f"augmented versions of each ARC task (default: {DEFAULT_NUM_AUG})")
    add(
        "--keep-colours",
        action="store_true",
        default=None,
        help="only turn and mirror, in all eight ways, instead of --num-aug random versions",
    )
    add(
        "--side",
        type=int,
        metavar="L",
        default=SIDE,
        help="a canvas of L x L cells, without the ARC tasks that have a larger grid (default: %(default)s)",
    )
    add(
        "--allow-leak",
        action="store_true",
        help=f"build even if over {100 * MAX_LEAK:g} %% of the test pairs are among the training pairs",
    )
    add = parser.add_argument_group("ARC tasks in folders").add_argument
    add(
        "--dataset-dirs",
        type=typed_path,
        nargs="+",
        metavar="DIR",
        help=f"folders whose subfolders hold a .json file for each ARC task; {TEST_FOLDER} is the test set "
        f"(default: {' '.join(map(str, DEFAULT_DIRS))})",
    )
    add = parser.add_argument_group("ARC tasks in combined files").add_argument
    add(
        "--input-file-prefix",
        metavar="PREFIX",
        help="read <PREFIX>_<subset>_challenges.json (or -challenges) and ..._solutions.json",
    )
    add("--subsets", nargs="+", metavar="NAME", help="the subsets to take")
    add("--test-set-name", metavar="NAME", help="the subset that is the test set")

    parsed = parser.parse_args(argv)
    check_exclusive(parsed, "num_aug", "keep_colours")
    parsed.keep_colours = bool(parsed.keep_colours)
    if parsed.num_aug is None:
        parsed.num_aug = NUM_TRANSFORMS - 1 if parsed.keep_colours else DEFAULT_NUM_AUG
    settings = Settings(**vars(parsed))
    check_at_least(settings, num_aug=0, seed=0)
    if side_of(settings.side**2) is None:
        raise UserError(
            f"--side is {settings.side}, but a canvas has a side from {MIN_SIDE} to {SIDE}, and not 10 (the shape "
            "of a Sudoku of 10x10); give another"
        )
    check_exclusive(settings, "dataset_dirs", "input_file_prefix")
    if settings.input_file_prefix is None:
        for option in given(settings, "subsets", "test_set_name"):
            raise UserError(f"{option} needs --input-file-prefix; add it or leave {option} out")
        return dataclasses.replace(settings, dataset_dirs=settings.dataset_dirs or DEFAULT_DIRS)
    if settings.subsets is None or settings.test_set_name is None:
        raise UserError("--input-file-prefix needs --subsets and --test-set-name; add them")
    subsets = " ".join(settings.subsets)
    if len(set(settings.subsets)) < len(settings.subsets):
        raise UserError(f"--subsets {subsets} names one twice; name each subset once")
    if settings.test_set_name not in settings.subsets:
        raise UserError(f"--test-set-name is {settings.test_set_name}, which is not among --subsets {subsets}; add it")
    return settings


# --------------------------------------------------------------------------------------------------
# Where the ARC tasks come from


def load_sources(settings: Settings) -> list[Source]:
    """Read the ARC tasks of all folders or files whose grids fit on the canvas.

    Raises:
        UserError: A file is missing or holds something else than ARC tasks, or no test task fits.
    """
    sources = _read_sources(settings)
    if settings.side == SIDE:
        return sources
    fitting = [
        source._replace(tasks=[task for task in source.tasks if _side(task) <= settings.side]) for source in sources
    ]
    size = f"{settings.side}x{settings.side}"
    if not any(source.tasks for source in fitting if source.is_test):
        raise UserError(f"no ARC task of the test set has only grids of at most {size}; give a larger --side")
    num, num_fitting = (sum(len(source.tasks) for source in each) for each in (sources, fitting))
    tell(f"note: {num_fitting:,} of {num:,} ARC tasks have only grids of at most {size}; the others are left out")
    return fitting


def _side(task: Task) -> int:
    """Return the largest number of rows or columns of a grid of the ARC task."""
    return max(max(grid.shape) for pair in task.train + task.test for grid in pair.grids)


def _read_sources(settings: Settings) -> list[Source]:
    if settings.dataset_dirs is not None:
        return _read_folders(settings.dataset_dirs)
    assert settings.input_file_prefix is not None and settings.subsets is not None
    sources = []
    for subset in settings.subsets:
        challenges = _find_json(f"{settings.input_file_prefix}_{subset}", "challenges")
        solutions = _find_json(f"{settings.input_file_prefix}_{subset}", "solutions")
        if challenges is None:
            name = f"{settings.input_file_prefix}_{subset}_challenges.json"
            raise UserError(
                f"there is no file {name} (or .json.gz), nor one with -challenges in its name; correct "
                "--input-file-prefix or --subsets"
            )
        sources.append(Source(subset, subset == settings.test_set_name, read_tasks(challenges, solutions)))
    return sources


def _find_json(stem: str, kind: str) -> Path | None:
    """Return the file <stem>_<kind>.json, as Kaggle and TRM name it, or <stem>-<kind>.json, as URM
    does, compressed or not; None if there is none.

    Raises:
        UserError: There are several such files.
    """
    names = (f"{stem}{separator}{kind}{ending}" for separator in "_-" for ending in (".json", ".json.gz"))
    found = [file for file in map(Path, names) if file.is_file()]
    if len(found) > 1:
        raise UserError(f"{found[0]} and {found[1].name} are both there; remove one of them")
    return found[0] if found else None


def _read_folders(dataset_dirs: Sequence[Path]) -> list[Source]:
    sources = []
    for folder in dataset_dirs:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; get the ARC tasks or correct --dataset-dirs")
        files_of: dict[Path, list[Path]] = {}
        left_out: list[Path] = []
        for file in files_below(folder):
            if file.name.lower().endswith((".json", ".json.gz")) and file.parent.parent == folder:
                files_of.setdefault(file.parent, []).append(file)
            else:
                left_out.append(file)
        others = what_was_left_out(folder, {"that are no .json file in a subfolder": left_out})
        if not files_of:
            raise UserError(f"{folder}: no subfolder of it holds a .json file{others}; correct --dataset-dirs")
        if others:
            tell(f"note: {folder}: {sum(map(len, files_of.values())):,} files of its subfolders are read{others}")
        for subfolder, files in files_of.items():
            tasks = [task for file in files for task in read_tasks(file)]
            sources.append(Source(str(subfolder), subfolder.name == TEST_FOLDER, tasks))
    return sources


def make_puzzles(sources: Sequence[Source], allow_leak: bool) -> list[Puzzle]:
    """Return the puzzles of all sources, in order, and print on stderr which pairs are left out.

    An ARC task that occurs twice with the same content becomes one puzzle. An ARC task that occurs
    as a training task and as a test task becomes one puzzle too, and all its known pairs are
    trained on.

    Raises:
        UserError: There is no test set, a name can't be used, two different ARC tasks have the same
            name, or too many test pairs are trained on.
    """
    if not any(source.is_test for source in sources):
        names = ", ".join(source.name for source in sources)
        raise UserError(f"none of {names} is called {TEST_FOLDER}, so there is no test set; add a folder that has one")
    _check_leak(sources, allow_leak)
    puzzles: dict[str, Puzzle] = {}
    first: dict[str, tuple[Source, Task]] = {}
    repeated: list[str] = []
    num_unknown = 0
    for source in sources:
        for task in source.tasks:
            if not task.name or SEPARATOR in task.name:
                raise UserError(
                    f"{source.name}: a task is called {task.name!r}; names need a letter and must not hold {SEPARATOR}"
                )
            known = [pair for pair in task.test if pair.output is not None]
            pairs: dict[SplitName, list[Pair]]
            if source.is_test:
                pairs = {"train": task.train, "test": task.test}
            else:
                pairs = {"train": task.train + known, "test": []}
                num_unknown += len(task.test) - len(known)
            if task.name not in first:
                first[task.name] = (source, task)
                puzzles[task.name] = Puzzle(task.name, pairs)
                continue
            other_source, other = first[task.name]
            both_ways = allow_leak and source.is_test != other_source.is_test
            if _content(task) != _content(other) and not both_ways:
                raise UserError(
                    f"{source.name} and {other_source.name} hold different ARC tasks called {task.name}; "
                    "rename one or leave one out"
                )
            repeated.append(task.name)
            puzzles[task.name] = _merge(puzzles[task.name], pairs)
    if repeated:
        tell(f"note: ARC tasks that occur more than once are built once: {some(repeated)}")
    if num_unknown:
        tell(f"note: test pairs of training tasks without output are left out: {num_unknown}")
    return list(puzzles.values())


def _content(task: Task) -> tuple[list[bytes], list[bytes]]:
    """Return a key that is equal for ARC tasks with the same pairs in any order.

    Revisions of ARC differ in the order of pairs.
    """
    return sorted(pair.key for pair in task.train), sorted(pair.key for pair in task.test)


def _merge(puzzle: Puzzle, pairs: dict[SplitName, list[Pair]]) -> Puzzle:
    merged = {}
    for split in SPLITS:
        there = {pair.key for pair in puzzle.pairs[split]}
        merged[split] = puzzle.pairs[split] + [pair for pair in pairs[split] if pair.key not in there]
    return Puzzle(puzzle.name, merged)


def _check_leak(sources: Sequence[Source], allow_leak: bool) -> None:
    """Raise UserError if too many test pairs are also training pairs, before augmentation."""
    trained_on: dict[bytes, str] = {}
    for source in sources:
        for task in source.tasks:
            for pair in task.train if source.is_test else task.train + task.test:
                trained_on.setdefault(pair.key, task.name)
    tested = [
        (task.name, pair.key)
        for source in sources
        if source.is_test
        for task in source.tasks
        for pair in task.test
        if pair.output is not None
    ]
    leaks = [f"{name} (in {trained_on[key]})" for name, key in tested if key in trained_on]
    if not leaks:
        return
    what = f"{len(leaks)} of {len(tested)} test pairs are among the training pairs: {some(leaks)}"
    if len(leaks) > MAX_LEAK * len(tested) and not allow_leak:
        raise UserError(f"{what}; leave those ARC tasks out of training, or add --allow-leak")
    tell(f"warning: {what}")


# --------------------------------------------------------------------------------------------------
# The dataset


def _rng(settings: Settings, puzzle: Puzzle, stream: int) -> np.random.Generator:
    """Return random numbers for one puzzle, which do not depend on the other puzzles."""
    digest = hashlib.sha256(puzzle.name.encode("utf-8", "surrogatepass")).digest()
    return np.random.default_rng([settings.seed, stream, int.from_bytes(digest)])


def draw_all(puzzles: Sequence[Puzzle], settings: Settings) -> list[Augmentations]:
    """Draw the versions of every puzzle. The first version is the puzzle itself.

    All versions are drawn before the first is written, because dataset.json holds their number.

    Raises:
        UserError: There would be more examples than a dataset can index.
    """
    num_aug = settings.num_aug
    require_index((1 + num_aug) * sum(len(puzzle.pairs["train"]) for puzzle in puzzles), "--num-aug")
    drawn = []
    with progress("augmenting", len(puzzles), "tasks") as bar:
        for puzzle in puzzles:
            pairs = [pair for split in SPLITS for pair in puzzle.pairs[split]]
            if settings.keep_colours:
                drawn.append(all_transforms(pairs))
            else:
                drawn.append(draw_augmentations(pairs, num_aug, _rng(settings, puzzle, _AUGMENT)))
            bar.update()
    fewer = [puzzle.name for puzzle, found in zip(puzzles, drawn, strict=True) if len(found[0]) <= num_aug]
    if fewer:
        tell(f"note: fewer than {num_aug} different versions were found of {some(fewer)}")
    return drawn


def write_splits(folder: Path, puzzles: Sequence[Puzzle], drawn: Sequence[Augmentations], settings: Settings) -> None:
    """Write both splits. Every puzzle becomes a group of its versions.

    The versions are numbered from 1 on. A version has this number as its identifier in both splits.
    """
    num_identifiers = 1 + sum(len(found.transforms_A) for found in drawn)
    with contextlib.ExitStack() as stack:
        writers = {
            split: stack.enter_context(
                SplitWriter(
                    folder / split,
                    seq_len=settings.side**2,
                    vocab_size=VOCAB_SIZE,
                    num_puzzle_identifiers=num_identifiers,
                )
            )
            for split in SPLITS
        }
        bar = stack.enter_context(progress("writing", num_identifiers - 1, "versions"))
        next_identifier = 1
        for puzzle, found in zip(puzzles, drawn, strict=True):
            num_versions = len(found.transforms_A)
            identifiers_A = np.arange(next_identifier, next_identifier + num_versions)
            next_identifier += num_versions
            for split in SPLITS:
                pairs = puzzle.pairs[split]
                if not pairs:
                    continue
                if split == "train":
                    rng = _rng(settings, puzzle, _TRANSLATE)
                    places_AE2 = draw_places(pairs, found.transforms_A, rng, settings.side)
                else:
                    places_AE2 = np.zeros((num_versions, len(pairs), 2), dtype=np.int64)
                step = max(1, CHUNK_ROWS // len(pairs))
                for start in range(0, num_versions, step):
                    chunk = slice(start, start + step)
                    versions = Augmentations(found.transforms_A[chunk], found.permutations_AC[chunk])
                    inputs_NS, labels_NS = rows_of(pairs, versions, places_AE2[chunk], settings.side)
                    sizes_P = np.full(len(versions.transforms_A), len(pairs))
                    writers[split].add(inputs_NS, labels_NS, sizes_P, identifiers_A[chunk])
                writers[split].end_groups(np.array([num_versions]))
            bar.update(num_versions)


def draw_places(pairs: Sequence[Pair], transforms_A: np.ndarray, rng: np.random.Generator, side: int) -> np.ndarray:
    """Draw the row and the column at which the grids of each example begin, (A, E, 2).

    Both grids of an example begin there and stay on the canvas. One random example of each version
    begins at (0, 0), as published.
    """
    sizes_E2 = np.array([np.max([grid.shape for grid in pair.grids], axis=0) for pair in pairs])
    is_transposed_8 = [transform(np.empty((1, 2)), number).shape == (2, 1) for number in range(NUM_TRANSFORMS)]
    is_transposed_A11 = np.array(is_transposed_8)[transforms_A][:, None, None]
    places_AE2 = rng.integers(side + 1 - np.where(is_transposed_A11, sizes_E2[:, ::-1], sizes_E2))
    stays_A = rng.integers(len(pairs), size=len(transforms_A))
    places_AE2[np.arange(len(transforms_A)), stays_A] = 0
    return places_AE2


def rows_of(
    pairs: Sequence[Pair], versions: Augmentations, places_AE2: np.ndarray, side: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the inputs and the labels of all examples, (A * E, S) uint8 each.

    The rows are ordered by version, then by example. The label of an unknown output is padding,
    which is ignored.
    """
    num_versions, num_examples = places_AE2.shape[:2]
    # The canvases have room for end markers beyond the edge, which are cut off at the end.
    canvases = np.full((2, num_versions, num_examples, side + 1, side + 1), PADDING, dtype=np.uint8)
    tokens_AT = np.empty((num_versions, VOCAB_SIZE), dtype=np.uint8)
    tokens_AT[:, [PADDING, END]] = PADDING, END
    tokens_AT[:, FIRST_COLOUR:] = versions.permutations_AC + np.uint8(FIRST_COLOUR)
    for number in np.unique(versions.transforms_A):
        (which,) = np.nonzero(versions.transforms_A == number)
        for e, pair in enumerate(pairs):
            for canvas_AERC, grid in zip(canvases, (pair.input, pair.output), strict=True):
                if grid is None:
                    continue
                tokens = framed(transform(grid, number))
                rows = places_AE2[which, e, 0][:, None, None] + np.arange(tokens.shape[0])[:, None]
                columns = places_AE2[which, e, 1][:, None, None] + np.arange(tokens.shape[1])
                canvas_AERC[which[:, None, None], e, rows, columns] = tokens_AT[which][:, tokens]
    inputs_NS, labels_NS = canvases[..., :side, :side].reshape(2, -1, side * side)
    return inputs_NS, labels_NS


def identifier_names(puzzles: Sequence[Puzzle], drawn: Sequence[Augmentations]) -> Iterator[str]:
    """Yield the names of all identifiers, from number 0."""
    yield "<blank>"
    for puzzle, found in zip(puzzles, drawn, strict=True):
        for number, permutation_C in zip(found.transforms_A.tolist(), found.permutations_AC, strict=True):
            yield augmented_name(puzzle.name, number, permutation_C)


def _write_test_puzzles(file: Path, sources: Sequence[Source]) -> None:
    """Write the test tasks without augmentation. Votes are compared with their outputs."""

    def plain(pair: Pair) -> dict[str, list[list[int]]]:
        grids = {"input": pair.input, "output": pair.output}
        return {name: grid.tolist() for name, grid in grids.items() if grid is not None}

    puzzles = {
        task.name: {"train": [plain(pair) for pair in task.train], "test": [plain(pair) for pair in task.test]}
        for source in sources
        if source.is_test
        for task in source.tasks
    }
    file.write_text(json.dumps(puzzles) + "\n", encoding="utf-8")


def build(settings: Settings) -> str:
    """Build the dataset and return a summary of it.

    Raises:
        UserError: The input is bad, or the folder can't be written. No new dataset is left then.
    """

    def write(folder: Path) -> tuple[Iterator[str], list[str]]:
        sources = load_sources(settings)
        puzzles = make_puzzles(sources, settings.allow_leak)
        drawn = draw_all(puzzles, settings)
        write_splits(folder, puzzles, drawn, settings)
        _write_test_puzzles(folder / "test_puzzles.json", sources)
        lines = []
        for split in SPLITS:
            # The numbers of versions and of pairs of each ARC task that is in the split.
            sizes = [
                (len(found.transforms_A), len(pairs))
                for puzzle, found in zip(puzzles, drawn, strict=True)
                if (pairs := puzzle.pairs[split])
            ]
            num_examples = sum(num_versions * num_pairs for num_versions, num_pairs in sizes)
            num_versions = sum(num for num, _ in sizes)
            lines.append(f"{split:<5}  {num_examples:,} examples of {num_versions:,} versions of {len(sizes):,} tasks")
        lines.append(f"tokens padding 0, end 1, colours from 2: vocab_size {VOCAB_SIZE}, seq_len {settings.side**2}")
        return identifier_names(puzzles, drawn), lines

    return build_dataset(PROGRAM, settings, write)


def main(argv: list[str] | None = None) -> int:
    """Run the program and return its exit status: 0, 2 after a user's mistake, 130 after Ctrl-C."""
    less_memory = "fewer puzzles need less memory: lower --num-aug"
    return run_command(lambda arguments: build(parse_settings(arguments)), argv, less_memory=less_memory)


if __name__ == "__main__":
    sys.exit(main())
