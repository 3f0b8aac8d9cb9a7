"""Score ARC by votes: each version of an ARC task predicts an answer, and the answers vote.

The augmentation of a prediction is undone before it votes. Each rank counts the votes of its own
predictions, and sends the counts to rank 0 for a few ARC tasks at a time.
"""
# N = examples, S = cells of the canvas, U = identifiers in the split, C = the ten colours

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dataset.arc import (
    CONFIDENCE_UNIT,
    NUM_COLOURS,
    Candidate,
    Task,
    Votes,
    crop,
    grid_key,
    grid_of,
    parse_name,
    parse_tasks,
    rank,
    score,
    undo,
)
from dataset.schema import Split, read_names
from utils.errors import UserError
from utils.files import file_errors, write_atomically
from utils.json_files import read_json
from utils.ranks.world import World

KS = (1, 2, 5, 10, 100, 1000)
# The number of answers per test input in arc_votes.json.
NUM_SHOWN = 10
TASKS_AT_A_TIME = 8
# HRM's builder calls a version <task>_t<transform>_<hash of the permutation>.
_HASHED = re.compile(r".+_t[0-7]_-?\d+")


class ArcVotes:
    """Votes on the ARC tasks of one dataset's test split.

        votes = ArcVotes(split)
        for each batch of this rank's share:
            votes.add(identifiers_N, inputs_NS, predictions_NS, confidence_N)
        scores = votes.result(world, save_to=folder)  # {"pass@1": ..., ...}, on every rank
        votes.clear()                                 # before another checkpoint votes

    Attributes:
        metrics: the names in the result; none if the dataset holds no solutions.

    Raises:
        UserError: The split is merged or has several sets, or identifiers.json or test_puzzles.json
            is missing or does not fit the split.
    """

    def __init__(self, split: Split) -> None:
        if split.parts:
            raise UserError(f"{split.path}: votes are of one dataset at a time; evaluate each by itself")
        if len(split.sets) > 1:
            raise UserError(f"{split.path}: votes are of one set, not of {', '.join(split.sets)}; give evaluators=[]")
        folder = split.path.parent
        self._puzzles_file = folder / "test_puzzles.json"
        self._tasks = _read_puzzles(self._puzzles_file)
        # The place of each test input's votes in the lists of an ARC task. Equal inputs share a
        # place.
        self._slots = [
            {key: slot for slot, key in enumerate(dict.fromkeys(grid_key(pair.input) for pair in task.test))}
            for task in self._tasks
        ]
        self._solved = [task.test[0].output is not None for task in self._tasks]
        self.metrics: tuple[str, ...] = tuple(f"pass@{k}" for k in KS) if any(self._solved) else ()
        self._identifiers_U = np.unique(
            np.concatenate([puzzle_set.puzzle_identifiers for puzzle_set in split.sets.values()])
        )
        self._read_names(folder / "identifiers.json")
        self.clear()

    @property
    def num_tasks(self) -> int:
        """The number of ARC tasks with known solutions, over which the metrics are means."""
        return sum(self._solved)

    def clear(self) -> None:
        """Forget all votes."""
        self._mistake = ""
        self._votes: list[list[dict[bytes, tuple[int, int]]]] = [[{} for _ in slots] for slots in self._slots]
        self._num_empty = [[0 for _ in slots] for slots in self._slots]

    def add(
        self, identifiers_N: np.ndarray, inputs_NS: np.ndarray, predictions_NS: np.ndarray, confidence_N: np.ndarray
    ) -> None:
        """Add one vote for each row.

        A prediction whose first cell is not a colour is not a grid, and votes for nothing. If an
        input is not a test input of its identifier's ARC task, `result` raises the error: here only
        some ranks would raise it.

        Args:
            identifiers_N: the puzzle identifiers.
            inputs_NS: the tokens of the inputs.
            predictions_NS: the tokens of the predictions.
            confidence_N: the confidence in [0, 1] that the prediction is right.
        """
        places_N = np.searchsorted(self._identifiers_U, identifiers_N)
        inputs, predictions = crop(inputs_NS), crop(predictions_NS)
        units_N = np.rint(confidence_N.astype(np.float64) * CONFIDENCE_UNIT).astype(np.int64)
        for n, (place, units) in enumerate(zip(places_N.tolist(), units_N.tolist(), strict=True)):
            if place == len(self._identifiers_U) or self._identifiers_U[place] != identifiers_N[n]:
                self._mistake = f"identifier {identifiers_N[n]} is not in the test split; evaluate on its own dataset"
                continue
            index, number, permutation_C = self._task_U[place], self._number_U[place], self._permutation_UC[place]
            slot = self._slots[index].get(grid_key(undo(inputs[n], number, permutation_C)))
            if slot is None:
                self._mistake = (
                    f"{self._puzzles_file}: task {self._tasks[index].name} has no test input like that of an example "
                    f"with identifier {identifiers_N[n]}; rebuild the dataset, or give evaluators=[]"
                )
                continue
            if predictions[n].size == 0:
                self._num_empty[index][slot] += 1
                continue
            votes = self._votes[index][slot]
            key = grid_key(undo(predictions[n], number, permutation_C))
            num_votes, total = votes.get(key, (0, 0))
            votes[key] = (num_votes + 1, total + units)

    def result(self, world: World, save_to: Path | None = None) -> dict[str, float]:
        """Return pass@k for each k, the mean over all ARC tasks with solutions. Every rank.

        An ARC task without votes counts as well.

        Args:
            save_to: a folder into which rank 0 writes submission.json (two attempts for each test
                input of each ARC task, in Kaggle's format) and arc_votes.json (the best
                candidates).

        Raises:
            UserError: A vote was invalid (see `add`), or a file can't be written.
        """
        with world.shared_errors():
            if self._mistake:
                raise UserError(self._mistake)
        sums = np.zeros(len(KS))
        submission: dict[str, Any] = {}
        report: dict[str, Any] = {}
        for start in range(0, len(self._tasks), TASKS_AT_A_TIME):
            some = slice(start, start + TASKS_AT_A_TIME)
            shares = world.gather_to_main((self._votes[some], self._num_empty[some]))
            if shares is None:
                continue
            for i, task in enumerate(self._tasks[some]):
                slots = self._slots[start + i]
                candidates = [rank(_merged(votes[i][slot] for votes, _ in shares)) for slot in slots.values()]
                num_empty = [sum(empty[i][slot] for _, empty in shares) for slot in slots.values()]
                of_test = [slots[grid_key(pair.input)] for pair in task.test]
                solutions = [grid_key(pair.output) for pair in task.test if pair.output is not None]
                if solutions:
                    sums += score([candidates[slot] for slot in of_test], solutions, KS)
                submission[task.name] = [_attempts(candidates[slot]) for slot in of_test]
                report[task.name] = [
                    _report(pair.input, pair.output, candidates[slot], num_empty[slot])
                    for pair, slot in zip(task.test, of_test, strict=True)
                ]
        with world.shared_errors(), file_errors():
            if world.is_main and save_to is not None:
                save_to.mkdir(parents=True, exist_ok=True)
                write_atomically(save_to / "submission.json", json.dumps(submission) + "\n")
                write_atomically(save_to / "arc_votes.json", json.dumps(report) + "\n")
        scores = world.broadcast_object((sums / max(1, sum(self._solved))).tolist())
        return dict(zip(self.metrics, scores, strict=False))

    def _read_names(self, file: Path) -> None:
        """Read the ARC task, transform and permutation of each identifier of the split.

        They are kept as arrays, because a million Python objects would take much memory.
        """
        with _needed():
            names = read_names(file.parent)
        if len(names) <= self._identifiers_U[-1]:
            raise UserError(
                f"{file}: has {len(names)} names, but the test split has identifier {self._identifiers_U[-1]}; "
                "rebuild the dataset"
            )
        index_of = {task.name: index for index, task in enumerate(self._tasks)}
        num = len(self._identifiers_U)
        self._task_U = np.empty(num, dtype=np.int32)
        self._number_U = np.empty(num, dtype=np.uint8)
        self._permutation_UC = np.empty((num, NUM_COLOURS), dtype=np.uint8)
        for u, identifier in enumerate(self._identifiers_U.tolist()):
            name = names[identifier]
            task, self._number_U[u], self._permutation_UC[u] = parse_name(name)
            index = index_of.get(task)
            if index is None and _HASHED.fullmatch(name):
                raise UserError(
                    f"{file}: {name}, a name as HRM's builder writes it, hides how colours were permuted, so "
                    "votes can't be counted; rebuild the dataset with dataset/build_arc_dataset.py, or give "
                    "evaluators=[]"
                )
            if index is None:
                raise UserError(f"{file}: {task} is not in {self._puzzles_file.name}; rebuild the dataset")
            self._task_U[u] = index


def _read_puzzles(file: Path) -> list[Task]:
    with _needed():
        tasks = parse_tasks(read_json(file, "rebuild the dataset"), str(file), "")
    if tasks[0].name == "":
        raise UserError(f"{file}: holds one ARC task without its name; rebuild the dataset")
    return tasks


@contextmanager
def _needed() -> Iterator[None]:
    """Turn the error of a missing file into a UserError that says what it is for."""
    try:
        yield
    except FileNotFoundError as error:
        raise UserError(
            f"{error} is missing, without which votes can't be counted; rebuild the dataset with "
            "dataset/build_arc_dataset.py, or give evaluators=[]"
        ) from None


def _merged(shares: Iterable[Votes]) -> Votes:
    merged: dict[bytes, tuple[int, int]] = {}
    for votes in shares:
        for key, (num_votes, total) in votes.items():
            there, there_total = merged.get(key, (0, 0))
            merged[key] = (there + num_votes, there_total + total)
    return merged


def _attempts(candidates: list[Candidate]) -> dict[str, list[list[int]]]:
    """Return the two best candidates as Kaggle's two attempts, which must both be there.

    A single candidate is used twice. Without candidates both attempts are one black cell.
    """
    grids = [grid_of(candidate.key).tolist() for candidate in candidates[:2]] or [[[0]]]
    return {"attempt_1": grids[0], "attempt_2": grids[-1]}


def _report(
    input_hw: np.ndarray, solution_hw: np.ndarray | None, candidates: list[Candidate], num_empty: int
) -> dict[str, Any]:
    solution = None if solution_hw is None else grid_key(solution_hw)
    return {
        "input": input_hw.tolist(),
        "solution": None if solution_hw is None else solution_hw.tolist(),
        "num_votes": sum(candidate.num_votes for candidate in candidates),
        "num_empty": num_empty,
        "candidates": [
            {
                "grid": grid_of(candidate.key).tolist(),
                "count": candidate.num_votes,
                "confidence": candidate.confidence,
                "right": None if solution is None else candidate.key == solution,
            }
            for candidate in candidates[:NUM_SHOWN]
        ],
    }
