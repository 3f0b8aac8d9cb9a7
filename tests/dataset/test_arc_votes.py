"""Predictions for the versions of an ARC task become votes, a score and a submission.

The results do not depend on the number of ranks.
"""
# N = examples, S = cells of the canvas

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset import arc_votes
from dataset.arc import parse_name, to_tokens, transform
from dataset.arc_votes import ArcVotes
from dataset.build_arc_dataset import main
from dataset.schema import Split, merge_splits, open_split
from tests.spawn import run_ranks
from utils.errors import UserError
from utils.ranks.world import World

KS = (1, 2, 5, 10, 100, 1000)
NUM_AUG = 20


def _pair(rng: np.random.Generator, height: int, width: int) -> dict[str, Any]:
    return {name: rng.integers(10, size=(height, width)).tolist() for name in ("input", "output")}


def _evaluation() -> dict[str, Any]:
    """Return three ARC tasks: with one test input, with two, and with two equal test inputs."""
    rng = np.random.default_rng(0)
    train = [_pair(rng, 3, 4), _pair(rng, 2, 2)]
    twin = _pair(rng, 3, 3)
    return {
        "one": {"train": train, "test": [_pair(rng, 4, 5)]},
        "two": {"train": train, "test": [_pair(rng, 1, 1), _pair(rng, 30, 30)]},
        "twins": {"train": train, "test": [twin, dict(twin)]},
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arc")
    (folder / "tasks" / "evaluation").mkdir(parents=True)
    for name, task in _evaluation().items():
        (folder / "tasks" / "evaluation" / f"{name}.json").write_text(json.dumps(task))
    options = ["--dataset-dirs", str(folder / "tasks"), "--num-aug", str(NUM_AUG)]
    assert main([*options, "--output-dir", str(folder / "data")]) == 0
    return folder / "data"


def _rows(split: Split) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the identifiers, inputs and labels of all examples, as an evaluation reads them."""
    puzzle_set = split.sets["all"]
    identifiers_N = np.repeat(puzzle_set.puzzle_identifiers, np.diff(puzzle_set.puzzle_indices)).astype(np.int32)
    return identifiers_N, np.array(puzzle_set.inputs, dtype=np.int32), np.array(puzzle_set.labels, dtype=np.int32)


def _copy_dataset(data: Path, folder: Path) -> Path:
    """Copy the files beside the splits into a new folder, and link to the splits."""
    folder.mkdir()
    for entry in data.iterdir():
        if entry.is_dir():
            (folder / entry.name).symlink_to(entry)
        else:
            (folder / entry.name).write_text(entry.read_text())
    return folder


def _version(task: dict[str, Any], test: int, name: str) -> tuple[np.ndarray, Any]:
    """Return the tokens of a test input in the version `name` of a task, and a function.

    The function makes the tokens of an answer to this version from a grid of the task itself.
    """
    _, number, permutation_C = parse_name(name)

    def tokens(grid: list[list[int]]) -> np.ndarray:
        return to_tokens(permutation_C[transform(np.array(grid, dtype=np.uint8), number)]).astype(np.int32)

    return tokens(task["test"][test]["input"]), tokens


class _Ballot:
    """Collects votes of a test. Their answers are grids of the task itself, for any version."""

    def __init__(self, data: Path) -> None:
        self.names = json.loads((data / "identifiers.json").read_text())
        self.rows: list[tuple[int, np.ndarray, np.ndarray, float]] = []

    def vote(self, task: str, test: int, version: int, answer: list[list[int]] | None, confidence: float) -> None:
        """Add a vote. An answer of None becomes tokens that form no grid."""
        identifiers = [number for number, name in enumerate(self.names) if parse_name(name)[0] == task]
        identifier = identifiers[version]
        input_S, tokens = _version(_evaluation()[task], test, self.names[identifier])
        answer_S = np.zeros_like(input_S) if answer is None else tokens(answer)
        self.rows.append((identifier, input_S, answer_S, confidence))

    def cast(self, votes: ArcVotes, rows: slice = slice(None)) -> None:
        identifiers, inputs, answers, confidences = zip(*self.rows[rows], strict=True)
        votes.add(
            np.array(identifiers, dtype=np.int32),
            np.stack(inputs),
            np.stack(answers),
            np.array(confidences, dtype=np.float32),
        )


WRONG, WORSE = [[1, 2]], [[3], [4]]


def test_votes_are_counted_as_by_hand(tmp_path: Path, data: Path) -> None:
    tasks = _evaluation()
    ballot = _Ballot(data)
    right = tasks["one"]["test"][0]["output"]
    ballot.vote("one", 0, 0, WRONG, 0.25)
    ballot.vote("one", 0, 1, WRONG, 0.5)
    ballot.vote("one", 0, 2, right, 0.875)
    ballot.vote("one", 0, 3, WORSE, 0.75)
    ballot.vote("one", 0, 4, None, 1.0)
    ballot.vote("two", 1, 7, tasks["two"]["test"][1]["output"], 0.0)
    ballot.vote("twins", 0, 5, None, 1.0)
    votes = ArcVotes(open_split(data, "test"))
    ballot.cast(votes)
    # The solution of `one` is second. Half of `two` was answered. No vote for `twins` is a grid.
    expected = {k: ((k >= 2) + 0.5 + 0) / 3 for k in KS}
    assert votes.result(World.single(), tmp_path) == {f"pass@{k}": pytest.approx(expected[k]) for k in KS}

    submission = json.loads((tmp_path / "submission.json").read_text())
    assert submission["one"] == [{"attempt_1": WRONG, "attempt_2": right}]
    none = {"attempt_1": [[0]], "attempt_2": [[0]]}
    only = tasks["two"]["test"][1]["output"]
    assert submission["two"] == [none, {"attempt_1": only, "attempt_2": only}]
    assert submission["twins"] == [none, none]

    report = json.loads((tmp_path / "arc_votes.json").read_text())
    assert report["one"] == [
        {
            "input": tasks["one"]["test"][0]["input"],
            "solution": right,
            "num_votes": 4,
            "num_empty": 1,
            "candidates": [
                {"grid": WRONG, "count": 2, "confidence": 0.375, "right": False},
                {"grid": right, "count": 1, "confidence": 0.875, "right": True},
                {"grid": WORSE, "count": 1, "confidence": 0.75, "right": False},
            ],
        }
    ]
    assert [(test["num_votes"], test["num_empty"], test["candidates"]) for test in report["twins"]] == [(0, 1, [])] * 2


def test_a_hidden_test_set_has_a_submission_but_no_score(tmp_path: Path, data: Path) -> None:
    folder = _copy_dataset(data, tmp_path / "hidden")
    puzzles = _evaluation()
    for task in puzzles.values():
        for pair in task["test"]:
            del pair["output"]
    (folder / "test_puzzles.json").write_text(json.dumps(puzzles))
    votes = ArcVotes(open_split(folder, "test"))
    ballot = _Ballot(data)
    ballot.vote("one", 0, 0, WRONG, 0.5)
    ballot.cast(votes)
    assert votes.metrics == () and votes.result(World.single(), tmp_path) == {}
    assert json.loads((tmp_path / "submission.json").read_text())["one"] == [{"attempt_1": WRONG, "attempt_2": WRONG}]
    (one,) = json.loads((tmp_path / "arc_votes.json").read_text())["one"]
    assert one["solution"] is None and one["candidates"][0]["right"] is None


# ---- several ranks -----------------------------------------------------------------------------


def _election(data: Path) -> _Ballot:
    """Return votes in a random order.

    For each test input three answers tie, in the number of votes and in confidence.
    """
    tasks = _evaluation()
    ballot = _Ballot(data)
    rng = np.random.default_rng(3)
    confidences = rng.random(21).tolist()
    for name in tasks:
        for test in range(len(tasks[name]["test"])):
            for answer in (tasks[name]["test"][test]["output"], WRONG, WORSE):
                for version in rng.permutation(21):
                    ballot.vote(name, test, int(version), answer, confidences[version])
    order = rng.permutation(len(ballot.rows))
    ballot.rows = [ballot.rows[n] for n in order]
    return ballot


def _vote_on_rank(world: World, data: Path, save_to: Path) -> dict[str, float]:
    votes = ArcVotes(open_split(data, "test"))
    arc_votes.TASKS_AT_A_TIME = 2  # of three tasks, so that the last part is smaller
    ballot = _election(data)
    ballot.cast(votes, world.slice_of(len(ballot.rows)))
    return votes.result(world, save_to)


def test_four_ranks_have_the_results_of_one(tmp_path: Path, data: Path) -> None:
    alone = _vote_on_rank(World.single(), data, tmp_path / "1")
    assert run_ranks(_vote_on_rank, 4, data, tmp_path / "4") == [alone] * 4
    for name in ("submission.json", "arc_votes.json"):
        assert (tmp_path / "4" / name).read_text() == (tmp_path / "1" / name).read_text()
    (one,) = json.loads((tmp_path / "1" / "arc_votes.json").read_text())["one"]
    assert [found["count"] for found in one["candidates"]] == [21, 21, 21]
    assert len({found["confidence"] for found in one["candidates"]}) == 1, (
        "the three answers do not tie, so that the test proves little"
    )


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, data: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(UserError, match="file"):
        ArcVotes(open_split(data, "test")).result(World.single(), tmp_path / "file")


# ---- mistakes ----------------------------------------------------------------------------------


def _edit(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder


def test_files_that_do_not_belong_to_the_split_are_refused(tmp_path: Path, data: Path) -> None:
    names = json.loads((data / "identifiers.json").read_text())
    puzzles = _evaluation()

    hashed = [name.split("|||")[0] + ("_t3_-812735" if "|||" in name else "") for name in names]
    one = json.dumps(puzzles["one"])
    del puzzles["two"]
    for number, (name, text, said) in enumerate(
        (
            ("test_puzzles.json", None, "is missing, without which votes can't be counted"),
            ("identifiers.json", json.dumps([0] * len(names)), "is no list of names"),
            ("identifiers.json", json.dumps(names[:3]), f"but the test split has identifier {len(names) - 1}"),
            ("identifiers.json", json.dumps(hashed), "one_t3_-812735, a name as HRM's builder writes it"),
            ("test_puzzles.json", json.dumps(puzzles), "two is not in test_puzzles.json"),
            ("test_puzzles.json", one, "holds one ARC task without its name"),
        )
    ):
        folder = _copy_dataset(data, tmp_path / str(number))
        (folder / name).unlink() if text is None else (folder / name).write_text(text)
        with pytest.raises(UserError) as error:
            ArcVotes(open_split(folder, "test"))
        assert said in str(error.value)


def test_rows_that_do_not_belong_to_the_tasks_are_refused(tmp_path: Path, data: Path) -> None:
    split = open_split(data, "test")
    identifiers_N, inputs_NS, labels_NS = (array[:1] for array in _rows(split))
    confidence_N = np.ones(1, dtype=np.float32)
    puzzles = _evaluation()
    puzzles["one"]["test"][0]["input"][0][0] ^= 1
    folder = _copy_dataset(data, tmp_path / "x")
    votes = ArcVotes(open_split(_edit(folder, "test_puzzles.json", json.dumps(puzzles)), "test"))
    votes.add(identifiers_N, inputs_NS, labels_NS, confidence_N)
    # `add` raises nothing, because the rows of other ranks may be right.
    with pytest.raises(UserError, match=r"test_puzzles\.json: task one has no test input like that of an example"):
        votes.result(World.single())
    votes.clear()
    votes.result(World.single())
    for identifier in (0, 10**6):
        votes = ArcVotes(split)
        votes.add(np.array([identifier]), inputs_NS, labels_NS, confidence_N)
        with pytest.raises(UserError, match=f"identifier {identifier} is not in the test split"):
            votes.result(World.single())


def test_splits_that_are_not_one_arc_dataset_are_refused(tmp_path: Path, data: Path) -> None:
    other = _copy_dataset(data, tmp_path / "other")
    both = [open_split(folder, "test") for folder in (data, other)]
    merged = merge_splits(both, [0, both[0].metadata.num_puzzle_identifiers])
    with pytest.raises(ValueError, match="votes are of one dataset at a time"):
        ArcVotes(merged)
