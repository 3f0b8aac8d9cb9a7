"""The ARC builder: the dataset that it writes, its warnings, and the mistakes that it refuses."""
# S = cells of the canvas

import json
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dataset import build_arc_dataset, builder
from dataset.arc import SIDE, crop, parse_name
from dataset.arc_votes import ArcVotes
from dataset.build_arc_dataset import main
from dataset.validate import main as main_of_validate
from tests.dataset.builders import build, fingerprints, refused, write_arc_tasks, write_combined_arc_tasks
from utils.ranks.world import World

_build = partial(build, main)
_error = partial(refused, main)

Grid = list[list[int]]


def _pair(rng: np.random.Generator, height: int, width: int) -> dict[str, Grid]:
    sizes = {"input": (height, width), "output": (max(1, height - 1), min(SIDE, width + 1))}
    return {name: rng.integers(10, size=size).tolist() for name, size in sizes.items()}


def _task(seed: int, num_train: int = 2, num_test: int = 1) -> dict[str, list[dict[str, Grid]]]:
    rng = np.random.default_rng(seed)
    sides = iter(rng.integers(2, 12, size=(num_train + num_test, 2)).tolist())
    return {
        "train": [_pair(rng, *next(sides)) for _ in range(num_train)],
        "test": [_pair(rng, *next(sides)) for _ in range(num_test)],
    }


TRAINING = {"a": _task(1), "b": _task(2, num_train=3, num_test=2)}
EVALUATION = {"c": _task(3, num_train=3), "d": _task(4, num_train=2, num_test=2)}


@pytest.fixture
def tasks_dir(tmp_path: Path) -> Path:
    return write_arc_tasks(tmp_path / "tasks", training=TRAINING, evaluation=EVALUATION)


def _names(output_dir: Path) -> list[str]:
    names = json.loads((output_dir / "identifiers.json").read_text())
    assert names[0] == "<blank>"
    return list(names)


def test_format(tmp_path: Path, tasks_dir: Path) -> None:
    splits = _build(tmp_path / "data", "--dataset-dirs", tasks_dir, "--num-aug", 3)
    for split, num_groups, mean in (("train", 4, (3 + 5 + 3 + 2) / 4), ("test", 2, (1 + 2) / 2)):
        described = json.loads((tmp_path / "data" / split / "dataset.json").read_text())
        numbers = [described[key] for key in ("seq_len", "vocab_size", "num_puzzle_identifiers", "total_groups")]
        assert numbers == [900, 12, 17, num_groups] and described["mean_puzzle_examples"] == mean
    train, test = splits["train"].sets["all"], splits["test"].sets["all"]
    # The builder sorts folders and files by name, so that evaluation comes before training.
    for puzzle_set, num_examples in ((train, [3, 2, 3, 5]), (test, [1, 2])):
        num_puzzles = 4 * len(num_examples)
        assert puzzle_set.puzzle_identifiers.tolist() == list(range(1, num_puzzles + 1))
        assert np.diff(puzzle_set.puzzle_indices).tolist() == np.repeat(num_examples, 4).tolist()
        assert puzzle_set.group_indices.tolist() == list(range(0, num_puzzles + 1, 4))
    names = _names(tmp_path / "data")
    assert len(names) == len(set(names)) == 17 and names[1::4] == ["c", "d", "a", "b"]
    assert [parse_name(name)[0] for name in names[1:]] == [task for task in "cdab" for _ in range(4)]
    assert [name[1:] for name in names[1:5]] != [name[1:] for name in names[5:9]], "each task must draw for itself"
    assert json.loads((tmp_path / "data" / "test_puzzles.json").read_text()) == EVALUATION


def test_kept_colours_give_the_eight_transforms_or_fewer_with_a_note(
    tmp_path: Path, tasks_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    black = [{"input": [[0]], "output": [[0, 0]]}]
    (tasks_dir / "training" / "a.json").write_text(json.dumps({"train": black, "test": black}))
    _build(tmp_path / "data", "--dataset-dirs", tasks_dir, "--keep-colours")
    versions = [parse_name(name) for name in _names(tmp_path / "data")[1:]]
    numbers = [number for _, number, permutation_C in versions if (permutation_C == np.arange(10)).all()]
    assert numbers == [*[*range(8)] * 2, 0, 1, *range(8)]
    assert "fewer than 7 different versions were found of a\n" in capsys.readouterr().err
    _build(tmp_path / "data", "--dataset-dirs", tasks_dir, "--num-aug", 2)
    assert "fewer than 2 different versions were found of a\n" in capsys.readouterr().err


def test_combined_files_and_folders_give_the_dataset_of_the_seed(
    tmp_path: Path, tasks_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Combined files may be named with a hyphen, as those of URM."""
    prefix = write_combined_arc_tasks(tmp_path, evaluation=EVALUATION, training=TRAINING)
    options = ("--subsets", "evaluation", "training", "--test-set-name", "evaluation", "--num-aug", 4)
    _build(tmp_path / "folders", "--dataset-dirs", tasks_dir, "--num-aug", 4)
    of_e03333b = ["77661aba487c", "2bc08c2b40db"]
    assert [digest[:12] for digest in fingerprints(tmp_path / "folders")] == of_e03333b
    monkeypatch.setattr(build_arc_dataset, "CHUNK_ROWS", 7)
    _build(tmp_path / "files", "--input-file-prefix", prefix, *options)
    for file in tmp_path.glob("*_*"):
        file.rename(re.sub("_(challenges|solutions)", r"-\1", str(file)))
    _build(tmp_path / "hyphens", "--input-file-prefix", prefix, *options)
    for other in ("files", "hyphens"):
        assert fingerprints(tmp_path / "folders") == fingerprints(tmp_path / other)
        for name in ("identifiers.json", "test_puzzles.json"):
            assert (tmp_path / "folders" / name).read_text() == (tmp_path / other / name).read_text()
    _build(tmp_path / "seed", "--dataset-dirs", tasks_dir, "--num-aug", 4, "--seed", 1)
    assert fingerprints(tmp_path / "seed")[0] != fingerprints(tmp_path / "folders")[0]
    both = tmp_path / "arc-agi_training_challenges.json"
    both.write_text("{}")
    message = _error(capsys, tmp_path / "data", "--input-file-prefix", prefix, *options)
    assert f"{both} and arc-agi_training-challenges.json are both there" in message


def test_a_test_set_without_outputs_is_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_combined_arc_tasks(tmp_path, training=TRAINING, evaluation=EVALUATION)
    for subset in ("training", "evaluation"):
        Path(f"{prefix}_{subset}_solutions.json.gz").unlink()
    options = ("--subsets", "training", "evaluation", "--test-set-name", "evaluation", "--num-aug", 2)
    splits = _build(tmp_path / "data", "--input-file-prefix", prefix, *options)
    assert "note: test pairs of training tasks without output are left out: 3" in capsys.readouterr().err
    assert np.diff(splits["train"].sets["all"].puzzle_indices)[::3].tolist() == [2, 3, 3, 2]
    assert main_of_validate([str(tmp_path / "data")]) == 0, "labels that nobody knows are no fault"
    assert (splits["test"].sets["all"].labels == 0).all() and (splits["test"].sets["all"].inputs != 0).any(1).all()
    test_puzzles = json.loads((tmp_path / "data" / "test_puzzles.json").read_text())
    assert test_puzzles["d"]["test"] == [{"input": pair["input"]} for pair in EVALUATION["d"]["test"]]
    assert test_puzzles["d"]["train"] == EVALUATION["d"]["train"]


# ---- leaks and repetitions ---------------------------------------------------------------------


@pytest.mark.parametrize(("num_test", "status"), [(99, 2), (100, 0)])
def test_leaks_of_up_to_one_percent_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_test: int, status: int
) -> None:
    evaluation = {f"many{seed:03}": _task(1000 + seed, num_train=1) for seed in range(num_test)}
    leaking = {"train": TRAINING["a"]["train"], "test": evaluation["many007"]["test"]}
    prefix = write_combined_arc_tasks(tmp_path, t={"leaking": leaking}, e=evaluation)
    options = ["--subsets", "t", "e", "--test-set-name", "e", "--num-aug", "0", "--output-dir", str(tmp_path / "data")]
    assert main(["--input-file-prefix", str(prefix), *options]) == status
    messages = capsys.readouterr().err
    assert f"1 of {num_test} test pairs are among the training pairs: many007 (in leaking)" in messages
    assert ("warning: " in messages) == (status == 0)


def test_a_task_that_occurs_twice_is_built_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Some revisions of ARC have the same pairs in another order.
    again = {"train": TRAINING["b"]["train"][::-1], "test": TRAINING["b"]["test"][::-1]}
    tasks = write_arc_tasks(tmp_path / "tasks", training=TRAINING, copy={"b": again}, evaluation=EVALUATION)
    splits = _build(tmp_path / "data", "--dataset-dirs", tasks, "--num-aug", 1)
    assert "note: ARC tasks that occur more than once are built once: b\n" in capsys.readouterr().err
    assert splits["train"].metadata.total_groups == 4
    assert sorted(_names(tmp_path / "data")[1::2]) == ["a", "b", "c", "d"]

    for part in ("train", "test"):
        (tasks / "copy" / "b.json").write_text(json.dumps(TRAINING["b"] | {part: _task(77)[part]}))
        message = _error(capsys, tmp_path / "other", "--dataset-dirs", tasks, "--allow-leak")
        assert "training and " in message and "copy hold different ARC tasks called b; rename one" in message


def test_a_task_both_trained_on_and_tested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --allow-leak the two revisions become one puzzle, which trains on the pairs of both."""
    task = EVALUATION["c"]
    revised = {**task, "train": [*task["train"][1:], TRAINING["a"]["train"][0]]}
    tasks = write_arc_tasks(tmp_path / "tasks", evaluation=EVALUATION, training={"c": revised})
    options = ("--dataset-dirs", tasks, "--num-aug", 0)
    assert "1 of 3 test pairs are among the training pairs: c (in c)" in _error(capsys, tmp_path / "data", *options)
    splits = _build(tmp_path / "data", *options, "--allow-leak")
    assert _names(tmp_path / "data") == ["<blank>", "c", "d"]
    train = splits["train"].sets["all"]
    # A canvas is rolled so that its first cell without padding comes first.
    rolled = [np.roll(input_S, -(input_S > 0).argmax()) for input_S in train.inputs[: train.puzzle_indices[1]]]
    trained_on = [grid.tolist() for grid in crop(np.stack(rolled))]
    pairs = [*task["train"], revised["train"][-1], *task["test"]]
    assert sorted(trained_on) == sorted(pair["input"] for pair in pairs)
    assert np.diff(splits["test"].sets["all"].puzzle_indices).tolist() == [1, 2]
    assert json.loads((tmp_path / "data" / "test_puzzles.json").read_text()) == EVALUATION


# ---- mistakes ----------------------------------------------------------------------------------


def test_wrong_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, list[object]] = {
        "--subsets needs --input-file-prefix": ["--subsets", "x"],
        "and c too; correct it": ["--input-file-prefix", "x", "--subsets", "a", "b", "--test-set-name", "c"],
        "--dataset-dirs and --input-file-prefix exclude": ["--dataset-dirs", "x", "--input-file-prefix", "y"],
        "there is no folder missing": ["--dataset-dirs", "missing"],
        "--side is 10, but a canvas has a side from 5 to 30, and not 10": ["--side", 10],
        "must name each subset once": ["--input-file-prefix", "x", "--subsets", "a", "a", "--test-set-name", "a"],
        "--num-aug and --keep-colours exclude each other": ["--num-aug", 7, "--keep-colours"],
        "--side is 31, but a canvas has a side from 5 to 30": ["--side", 31],
    }
    for expected, typed in options.items():
        assert expected in _error(capsys, tmp_path / "data", *typed)


def test_wrong_tasks_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "MAX_ROWS", 15)
    for number, (evaluation, options, expected) in enumerate(
        (
            ({}, [], "so there is no test set"),
            ({"c": _task(5)}, ["--num-aug", 1], "20 examples are more than a dataset can index"),
            ({"a|||b": _task(5)}, [], "a task is called 'a|||b'"),
            ({"e": _task(5)}, ["--side", 5], "no ARC task of the test set has only"),
        )
    ):
        tasks = write_arc_tasks(tmp_path / str(number), training=TRAINING, evaluation=evaluation)
        assert expected in _error(capsys, tmp_path / "data", "--dataset-dirs", tasks, "--num-aug", 0, *options)


def test_the_files_of_subfolders_and_links_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tasks_dir: Path
) -> None:
    tasks = tasks_dir / "training"
    (tasks / "UPPER.JSON").write_text(json.dumps(_task(40)))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "linked.json").write_text(json.dumps(_task(41)))
    os.symlink(tmp_path / "elsewhere", tasks_dir / "more")
    (tasks / "deeper").mkdir()
    for path in (tasks_dir / "top.json", tasks / "deeper" / "two.json", tasks / "README.md"):
        path.write_text("not read")
    _build(tmp_path / "data", "--dataset-dirs", tasks_dir, "--num-aug", 0)
    assert sorted(_names(tmp_path / "data")) == ["<blank>", "UPPER", "a", "b", "c", "d", "linked"]
    assert "left out are 2 .json files that lie not right in a subfolder" in capsys.readouterr().err
    message = _error(capsys, tmp_path / "other", "--dataset-dirs", tmp_path / "elsewhere")
    assert "no subfolder of it holds a .json file" in message


def test_a_small_canvas_holds_the_tasks_with_small_grids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)

    def task(*sides: int) -> dict[str, list[dict[str, Grid]]]:
        pairs = [{name: rng.integers(10, size=(side, 2)).tolist() for name in ("input", "output")} for side in sides]
        return {"train": pairs[:-1], "test": pairs[-1:]}

    folder = write_arc_tasks(
        tmp_path / "tasks",
        training={"small": task(5, 5), "large": task(5, 6)},
        evaluation={"s": task(2, 5), "l": task(2, 6), "x": task(6, 2)},
    )
    splits = _build(tmp_path / "data", "--dataset-dirs", folder, "--side", 5, "--num-aug", 3)
    assert "note: 2 of 5 ARC tasks have only grids of at most 5x5; the others are left out" in capsys.readouterr().err
    assert all((split.metadata.seq_len, split.metadata.vocab_size) == (25, 12) for split in splits.values())
    assert {name.partition("|||")[0] for name in _names(tmp_path / "data")[1:]} == {"small", "s"}
    assert main_of_validate([str(tmp_path / "data")]) == 0

    votes, world = ArcVotes(splits["test"]), World()
    (tests,) = splits["test"].sets.values()
    identifiers_N = np.repeat(tests.puzzle_identifiers, np.diff(tests.puzzle_indices))
    votes.add(identifiers_N, tests.inputs, tests.labels, np.ones(len(tests.inputs)))
    assert votes.num_tasks == 1 and set(votes.result(world).values()) == {1.0}
