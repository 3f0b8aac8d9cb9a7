"""Run a track of docs/records.md by its rules, and print its row of the table.

python -m benchmarks.record TRACK --told WHAT [--seeds 0 1 2] [--evaluate KEY=VALUE ...]
                            OVERRIDE ... [then OVERRIDE ...]
e.g. python -m benchmarks.record sudoku-extreme --told "the units" experiment=sudoku_extreme_mixer

Each seed trains a model with the overrides of pretrain.py; after `then` a further run begins with
its weights. The last run is evaluated on the test puzzles of the track. The program refuses a tree
with changes, other test puzzles, training answers that the track does not have, and a training that
takes longer than the track allows. Its clock is the time of the processors. Stopped and started
again, it keeps the seeds that it had finished.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from hashlib import sha256
from pathlib import Path

import numpy as np

from benchmarks.harness import REPOSITORY, machine, pretrain_command, table
from dataset.augment import BOXES, Box
from dataset.schema import Split, SplitName, open_split
from dataset.sudoku import symmetry_keys
from dataset.text.schema import kind_of_data
from records.history import METRICS_FILE, History, read_run_config
from training.config import PretrainConfig
from training.flops import flops_until
from training.kinds import KINDS, TEXT
from training.trained import open_trained
from utils.command_line import validate
from utils.files import write_atomically
from utils.ranks.world import World

# Keys of pretrain.py and evaluate.py that the program gives.
_OURS = {"init_from", "load_checkpoint", "resume", "checkpoint_path", "seed", "device", "data_paths_test"}
_OURS |= {"checkpoint", "out", "max_examples"}
RUNS = REPOSITORY / "checkpoints/records"
TITLES = (
    "date",
    "scores",
    "segments",
    "minutes",
    "parameters",
    "operations",
    "training examples",
    "told",
    "commit",
    "recipe",
    "machine",
)
PASSES = {"trajectories", "restarts", "tta"}


@dataclass(frozen=True)
class Track:
    """A task and a budget.

    Attributes:
        data: the folder whose test puzzles are scored, and whose training answers may be used.
        test: how the fingerprint of the test puzzles begins.
        minutes: of the training of a seed, for each of its threads.
        score: the metric of the test set `all`, of so many examples; None: of all.
        goal: the clock stops when the score has this value, and the time is what counts.
    """

    data: str
    test: str
    minutes: float
    threads: int = 1
    score: str = "exact_accuracy"
    max_examples: int | None = None
    goal: float | None = None


TRACKS = {
    "sudoku-extreme": Track("data/sudoku-extreme-1k", "ed9c9c1f", 60, max_examples=2000),
    "maze-hard": Track("data/maze-30x30-hard-1k", "2a56aa3f", 10, threads=2),
    "sudoku-6x6": Track("data/sudoku-6x6", "cf59469d", 5, goal=0.95),
    "arc-12x12": Track("data/arc-12x12", "2f45b7f2", 10, score="accuracy"),
    "text": Track("data/shakespeare", "c0199ded", 10, threads=2, score="bits_per_byte"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("track", choices=TRACKS)
    parser.add_argument("overrides", nargs="+", metavar="OVERRIDE", help="of pretrain.py; then: of a further run")
    parser.add_argument("--told", required=True, help="what the model is told about the task besides examples")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--evaluate", nargs="+", default=[], metavar="KEY=VALUE", help="of evaluate.py")
    args = parser.parse_intermixed_args()
    track, folder = TRACKS[args.track], RUNS / args.track
    require_rules(args.overrides, args.evaluate, args.seeds, track)
    if _git("status", "--porcelain"):
        sys.exit("the tree has changes; commit them, so that the row can name a commit")
    if not _fingerprint(track.data, "test").startswith(track.test):
        sys.exit(f"{track.data}: its test data are not those of the track; docs/records.md says how to build it")
    commit = _git("rev-parse", "--short", "HEAD")
    recipe = " ".join([*args.overrides, *(["--evaluate", *args.evaluate] if args.evaluate else [])])
    folders = [folder / f"{commit}-{sha256(recipe.encode()).hexdigest()[:8]}-{seed}" for seed in args.seeds]
    rows = [_of_seed(args.overrides, *each, track, args.evaluate) for each in zip(args.seeds, folders, strict=True)]
    of_seeds = [" ".join(each) for each in zip(*(row[:3] for row in rows), strict=True)]
    row = [date.today(), *of_seeds, *rows[-1][3:], args.told, commit, recipe, machine()["machine"]]
    print(table(TITLES, [row]))


def _of_seed(overrides: list[str], seed: int, folder: Path, track: Track, evaluation: list[str]) -> list[str]:
    """Train and score a model.

    Return its score, segments of a test puzzle, minutes, parameters, operations and puzzles.
    """
    kept = folder / "row.json"
    if kept.exists():
        row = json.loads(kept.read_text())
        if isinstance(row, str):  # why it was refused
            sys.exit(row)
        return row
    shutil.rmtree(folder, ignore_errors=True)  # of a program that was stopped, and its clock with it
    runs, num_puzzles, operations, began = list[Path](), 0, 0.0, _clock()
    for number, stage in enumerate(stages_of(overrides)):
        ours = [f"init_from={runs[-1]}"] if runs else []
        runs.append(folder / str(number))
        ours += [f"seed={seed}", f"checkpoint_path={runs[-1]}", "device=cpu"]
        if track.goal is not None:
            ours += [f"data_paths_test=[{track.data}]", "eval_max_examples=null", "eval_max_share=null"]
        command = pretrain_command(1, *stage, *ours)
        subprocess.run(command, cwd=REPOSITORY, check=True, env=os.environ | {"OMP_NUM_THREADS": str(track.threads)})
        if (runs[-1] / "stopped").exists():
            sys.exit(f"{runs[-1]} was stopped; start the record again, which begins this seed anew")
    minutes = (_clock() - began) / 60
    if minutes > (allowed := track.minutes * track.threads):
        # Kept as well, or a seed could be tried until the machine is fast.
        refused = f"seed {seed} took {minutes:.1f} minutes; the track allows {allowed:g}"
        write_atomically(kept, json.dumps(refused))
        sys.exit(refused)
    for run in runs:
        config = validate(PretrainConfig, read_run_config(run))
        history = History(run / METRICS_FILE)
        history.refresh()
        operations += flops_until(run, [history.rows[-1]["step"]])[0]
        of_run = [num_allowed(path, track) for path in config.train_paths]
        num_puzzles = max(num_puzzles, sum(of_run))
    if track.goal is not None:
        reached = [row for row in history.rows if row.get(f"eval/all/{track.score}", 0) >= track.goal]
        found = f"{reached[0]['time_s']:.0f} s" if reached else "never"
        segments = f"{reached[0]['eval/all/steps']:.1f}" if reached else "-"
    else:
        out = folder / "evaluation"
        command = ["evaluate.py", f"checkpoint={runs[-1]}", f"data_path={track.data}", f"out={out}", *evaluation]
        command += [f"max_examples={track.max_examples}"] if track.max_examples else []
        subprocess.run([sys.executable, *command], cwd=REPOSITORY, check=True)
        metrics = json.loads((out / "results.json").read_text())["metrics"]
        asked = PASSES & {each.split("=")[0] for each in evaluation}
        of_set = "/".join(["eval/all", *asked])
        of_segments = f"{of_set}/segments" if asked else f"{of_set}/steps"
        found = f"{metrics[f'{of_set}/{track.score}']:.4f}"
        segments = f"{metrics[of_segments]:.1f}" if of_segments in metrics else "-"  # texts have none
    model = open_trained(runs[-1], World.single()).load_model(World.single())
    parameters = sum(each.numel() for each in model.parameters())
    row = [found, segments, f"{minutes:.1f}", f"{parameters:,}", f"{operations:.1e}", f"{num_puzzles:,}"]
    write_atomically(kept, json.dumps(row))
    return row


def require_rules(overrides: list[str], evaluation: list[str], seeds: list[int], track: Track) -> None:
    """End the program if what was typed breaks a rule of docs/records.md."""
    stages = list(stages_of(overrides))
    keys = {each.split("=")[0].lstrip("+") for each in [*overrides, *evaluation]}
    if own := keys & _OURS:
        sys.exit(f"{', '.join(sorted(own))}: the rules of the track decide this; leave it out")
    if len(set(seeds)) < 3:
        sys.exit("a row has three seeds or more; give --seeds three numbers, or leave it out")
    if track.goal is not None and (len(stages) > 1 or evaluation):
        sys.exit("this track measures the time of one run; leave out then and --evaluate")
    if len(keys & PASSES) > (track.score == "exact_accuracy"):
        sys.exit(f"a record takes one of {', '.join(sorted(PASSES))}, and only where exact_accuracy is scored")


def stages_of(words: Sequence[str]) -> Iterator[list[str]]:
    """Yield the overrides of each run, which `then` parts."""
    text = "\0".join(words).split("\0then\0")
    yield from (stage.split("\0") for stage in text)


def num_allowed(path: str, track: Track) -> int:
    """Return the number of training examples. End the program if the track does not allow one.

    Symmetries that a run draws on the fly are no puzzles of the folder, and always allowed.
    """
    if kind_of_data(path) == "text":
        if _fingerprint(path, "train") != _fingerprint(track.data, "train"):
            sys.exit(f"{path}: is not the text of the track, which trains on no other")
        return sum(TEXT.open(path, "train").num_examples(None).values())
    train = open_split(path, "train")
    known = {row.tobytes() for each in open_split(track.data, "train").sets.values() for row in np.asarray(each.labels)}
    rows = [row.tobytes() for each in train.sets.values() for row in np.asarray(each.labels)]
    if not known.issuperset(rows):
        sys.exit(f"{train.path}: has answers that {track.data} does not have; the track trains on no others")
    box = next((box for box in BOXES.values() if (box.num_cells, box.side + 2) == train.metadata.shape), None)
    if box is not None:
        keys, tested = (_keys(split, box) for split in (train, open_split(track.data, "test")))
        if leaked := np.isin(keys, tested).sum():
            sys.exit(f"{train.path}: {leaked:,} of its puzzles are symmetries of test puzzles; leave them out")
    return len(rows)


def _keys(split: Split, box: Box) -> np.ndarray:
    return np.concatenate([symmetry_keys(each.inputs - 1, each.labels - 1, box)[0] for each in split.sets.values()])


def _fingerprint(path: str, name: SplitName) -> str:
    kind = KINDS[kind_of_data(path) or "puzzles"]
    return kind.check(kind.open(path, name))


def _clock() -> float:
    """Return the seconds of all processors in programs that ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
