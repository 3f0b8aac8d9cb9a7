"""Predictions for the versions of an ARC task become votes, a score and a submission."""
# N = examples, S = cells of the canvas

import json
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from dataset import arc_votes
from dataset.arc import parse_name, to_tokens, transform
from dataset.arc_votes import ArcVotes
from dataset.build_arc_dataset import main
from dataset.schema import merge_splits, open_split
from tests.dataset.builders import build, write_arc_tasks
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
    tasks = write_arc_tasks(folder / "tasks", evaluation=_evaluation())
    build(main, folder / "data", "--dataset-dirs", tasks, "--num-aug", NUM_AUG)
    return folder / "data"


class _Ballot:
    """Collects votes of a test. Their answers are grids of the task itself, for any version."""

    def __init__(self, data: Path) -> None:
        self.names = json.loads((data / "identifiers.json").read_text())
        self.rows: list[tuple[int, np.ndarray, np.ndarray, float]] = []

    def vote(self, task: str, test: int, version: int, answer: list[list[int]] | None, confidence: float) -> None:
        """Add a vote. An answer of None becomes tokens that form no grid."""
        identifier = [number for number, name in enumerate(self.names) if parse_name(name)[0] == task][version]
        _, number, permutation_C = parse_name(self.names[identifier])

        def tokens(grid: list[list[int]]) -> np.ndarray:
            return to_tokens(permutation_C[transform(np.array(grid, dtype=np.uint8), number)]).astype(np.int32)

        input_S = tokens(_evaluation()[task]["test"][test]["input"])
        self.rows.append((identifier, input_S, np.zeros(900) if answer is None else tokens(answer), confidence))

    def cast(self, votes: ArcVotes) -> None:
        identifiers, inputs, answers, confidences = zip(*self.rows, strict=True)
        confidence_B = np.array(confidences, np.float32)
        votes.add(np.array(identifiers, np.int32), np.stack(inputs), np.stack(answers), confidence_B)


WRONG, WORSE = [[1, 2]], [[3], [4]]


def test_votes_are_counted_as_by_hand(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arc_votes, "TASKS_AT_A_TIME", 2)
    monkeypatch.setattr(arc_votes, "NUM_SHOWN", 2)
    tasks = _evaluation()
    ballot = _Ballot(data)
    right, only = tasks["one"]["test"][0]["output"], tasks["two"]["test"][1]["output"]
    for version, (answer, confidence) in enumerate(
        ((WRONG, 0.25), (WRONG, 0.5), (right, 0.875), (WORSE, 0.75), (None, 1.0))
    ):
        ballot.vote("one", 0, version, answer, confidence)
    ballot.vote("two", 1, 7, only, 0.0)
    ballot.vote("twins", 0, 5, None, 1.0)
    votes = ArcVotes(open_split(data, "test"))
    ballot.cast(votes)
    # The solution of `one` is second. Half of `two` was answered. No vote for `twins` is a grid.
    expected = {k: ((k >= 2) + 0.5 + 0) / 3 for k in KS}
    assert votes.result(World.single(), tmp_path) == {f"pass@{k}": pytest.approx(expected[k]) for k in KS}

    none = {"attempt_1": [[0]], "attempt_2": [[0]]}
    assert json.loads((tmp_path / "submission.json").read_text()) == {
        "one": [{"attempt_1": WRONG, "attempt_2": right}],
        "two": [none, {"attempt_1": only, "attempt_2": only}],
        "twins": [none, none],
    }
    report = json.loads((tmp_path / "arc_votes.json").read_text())
    (one,) = report["one"]
    assert (one["input"], one["solution"]) == (tasks["one"]["test"][0]["input"], right)
    assert one["candidates"] == [
        {"grid": WRONG, "count": 2, "confidence": 0.375, "right": False},
        {"grid": right, "count": 1, "confidence": 0.875, "right": True},
    ]
    numbers = [(test["num_votes"], test["num_empty"]) for name in ("one", "twins") for test in report[name]]
    assert numbers == [(4, 1), (0, 1), (0, 1)] and not report["twins"][0]["candidates"]


def test_a_hidden_test_set_has_a_submission_but_no_score(tmp_path: Path, data: Path) -> None:
    puzzles = _evaluation()
    for task in puzzles.values():
        for pair in task["test"]:
            del pair["output"]
    votes = _damaged(data, tmp_path / "hidden", "test_puzzles.json", json.dumps(puzzles))
    ballot = _Ballot(data)
    ballot.vote("one", 0, 0, WRONG, 0.5)
    ballot.cast(votes)
    assert votes.metrics == () and votes.result(World.single(), tmp_path) == {}
    assert json.loads((tmp_path / "submission.json").read_text())["one"] == [{"attempt_1": WRONG, "attempt_2": WRONG}]
    (one,) = json.loads((tmp_path / "arc_votes.json").read_text())["one"]
    assert one["solution"] is None and one["candidates"][0]["right"] is None


def test_the_order_of_answers(tmp_path: Path, data: Path) -> None:
    """The number of votes counts before confidence, confidence breaks ties, and bytes the rest."""
    black = [[0]]
    for cast, ranked in (
        ([(WRONG, 0.99), (WORSE, 0.1), (WORSE, 0.1)], [WORSE, WRONG]),
        ([(WRONG, 0.1), (WRONG, 0.5), (WORSE, 0.4), (WORSE, 0.3), (black, 0.9)], [WORSE, WRONG, black]),
        ([(WORSE, 0.5), (WRONG, 0.5), (black, 0.5)], [black, WRONG, WORSE]),
    ):
        votes, ballot = ArcVotes(open_split(data, "test")), _Ballot(data)
        for version, (answer, confidence) in enumerate(cast):
            ballot.vote("one", 0, version, answer, confidence)
        ballot.cast(votes)
        votes.result(World.single(), tmp_path)
        (one,) = json.loads((tmp_path / "arc_votes.json").read_text())["one"]
        assert [candidate["grid"] for candidate in one["candidates"]] == ranked


# ---- mistakes ----------------------------------------------------------------------------------


def _damaged(data: Path, folder: Path, name: str, text: str) -> ArcVotes:
    """Return the votes on a copy of the dataset in which one file is another."""
    folder.mkdir()
    for entry in data.iterdir():
        (folder / entry.name).symlink_to(entry)
    (folder / name).unlink()
    (folder / name).write_text(text)
    return ArcVotes(open_split(folder, "test"))


def test_files_that_do_not_belong_to_the_split_are_refused(tmp_path: Path, data: Path) -> None:
    names = json.loads((data / "identifiers.json").read_text())
    puzzles = _evaluation()
    hashed = [name.split("|||")[0] + ("_t3_-812735" if "|||" in name else "") for name in names]
    del puzzles["two"]
    for number, (name, contents, said) in enumerate(
        (
            ("identifiers.json", [0] * len(names), "is no list of names"),
            ("identifiers.json", names[:3], "lacks the ARC task of identifier 3, ''"),
            ("identifiers.json", hashed, "'one_t3_-812735'; rebuild the dataset with"),
            ("test_puzzles.json", puzzles, "lacks the ARC task of identifier"),
        )
    ):
        with pytest.raises(UserError, match=re.escape(said)):
            _damaged(data, tmp_path / str(number), name, json.dumps(contents))


def test_rows_that_do_not_belong_to_the_tasks_are_refused(tmp_path: Path, data: Path) -> None:
    puzzles = _evaluation()
    puzzles["one"]["test"][0]["input"][0][0] ^= 1
    votes = _damaged(data, tmp_path / "x", "test_puzzles.json", json.dumps(puzzles))
    ballot = _Ballot(data)
    ballot.vote("one", 0, 0, WRONG, 0.5)
    # `add` raises nothing, because the rows of other ranks may be right.
    ballot.cast(votes)
    world = Mock(wraps=World.single())
    with pytest.raises(UserError, match=r"test_puzzles\.json: task one has no test input like that of an example"):
        votes.result(world)
    world.shared_errors.assert_called_once()  # else the other ranks would wait for this one
    votes.clear()
    votes.result(World.single())
    for identifier in (0, 10**6):
        ballot.rows = [(identifier, *ballot.rows[0][1:])]
        ballot.cast(votes)
        with pytest.raises(UserError, match=f"identifier {identifier} is not in the test split"):
            votes.result(World.single())


def test_splits_that_are_not_one_arc_dataset_are_refused(tmp_path: Path, data: Path) -> None:
    shutil.copytree(data, tmp_path / "other")
    both = [open_split(folder, "test") for folder in (data, tmp_path / "other")]
    with pytest.raises(ValueError, match="evaluate each by itself"):
        ArcVotes(merge_splits(both, [0, both[0].metadata.num_puzzle_identifiers]))
