"""Score ARC by votes: each version of an ARC task predicts an answer, and the answers vote."""
# N = examples, S = cells of the canvas, U = identifiers in the split, C = the ten colours

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataset.arc import NUM_COLOURS, Pair, crop, grid_key, grid_of, parse_name, parse_tasks, undo
from dataset.schema import Split, read_names
from utils.errors import UserError
from utils.files import file_errors, write_atomically
from utils.json_files import read_json
from utils.ranks.world import World

KS = (1, 2, 5, 10, 100, 1000)
# The number of answers per test input in arc_votes.json.
NUM_SHOWN = 10
TASKS_AT_A_TIME = 8
_REBUILD = "rebuild the dataset with dataset/build_arc_dataset.py, or give evaluators=[]"
# For each answer to a test input: the number of predictions that gave it, and the sum of their
# confidences in units of 1 / CONFIDENCE_UNIT. The units are integers, whose sum is the same in any
# order, so that the winner doesn't depend on the number of ranks.
Votes = dict[bytes, tuple[int, int]]
CONFIDENCE_UNIT = 2**32
# The key of a prediction whose first cell is not a colour.
_NO_GRID = grid_key(np.empty((0, 0)))


class ArcVotes:
    """Votes on the ARC tasks of one dataset's test split."""

    def __init__(self, split: Split) -> None:
        if split.parts or len(split.sets) > 1:
            raise UserError(f"{split.path}: votes are of one set of one dataset; evaluate each by itself")
        self._file = split.path.parent / "test_puzzles.json"
        try:
            self._tasks = parse_tasks(read_json(self._file, "rebuild the dataset"), str(self._file), "")
            names = read_names(split.path.parent)
        except FileNotFoundError as error:
            raise UserError(f"{error} is missing, without which votes can't be counted; {_REBUILD}") from None
        self.num_tasks = sum(task.test[0].output is not None for task in self._tasks)
        self.metrics: tuple[str, ...] = tuple(f"pass@{k}" for k in KS) if self.num_tasks else ()
        (puzzle_set,) = split.sets.values()
        self._identifiers_U = np.unique(puzzle_set.puzzle_identifiers)
        # What each identifier stands for. These are arrays, because a million Python objects would
        # take much memory.
        num = len(self._identifiers_U)
        self._task_U, self._number_U = np.empty(num, dtype=np.int32), np.empty(num, dtype=np.uint8)
        self._permutation_UC = np.empty((num, NUM_COLOURS), dtype=np.uint8)
        index_of = {task.name: index for index, task in enumerate(self._tasks)}
        for u, identifier in enumerate(self._identifiers_U.tolist()):
            # HRM's builder writes names that hide how colours were permuted.
            name = names[identifier] if identifier < len(names) else ""
            task, self._number_U[u], self._permutation_UC[u] = parse_name(name)
            if task not in index_of:
                raise UserError(f"{self._file}: lacks the ARC task of identifier {identifier}, {name!r}; {_REBUILD}")
            self._task_U[u] = index_of[task]
        self.clear()

    def clear(self) -> None:
        """Forget all votes."""
        self._mistake = ""
        # For each ARC task the votes on each test input. Equal inputs share their votes.
        self._votes: list[dict[bytes, Votes]] = [
            {grid_key(pair.input): {} for pair in task.test} for task in self._tasks
        ]

    def add(
        self, identifiers_N: np.ndarray, inputs_NS: np.ndarray, predictions_NS: np.ndarray, confidence_N: np.ndarray
    ) -> None:
        """Add one vote for each row. The confidence is in [0, 1].

        A prediction whose first cell is not a colour is not a grid, and votes for nothing. If an
        input is not a test input of its identifier's ARC task, `result` raises the error: here only
        some ranks would raise it.
        """
        places_N = np.searchsorted(self._identifiers_U, identifiers_N)
        inputs, predictions = crop(inputs_NS), crop(predictions_NS)
        units_N = np.rint(confidence_N.astype(np.float64) * CONFIDENCE_UNIT).astype(np.int64)
        for n, (place, units) in enumerate(zip(places_N.tolist(), units_N.tolist(), strict=True)):
            if place == len(self._identifiers_U) or self._identifiers_U[place] != identifiers_N[n]:
                self._mistake = f"identifier {identifiers_N[n]} is not in the test split; evaluate on its own dataset"
                continue
            index, number, permutation_C = self._task_U[place], self._number_U[place], self._permutation_UC[place]
            votes = self._votes[index].get(grid_key(undo(inputs[n], number, permutation_C)))
            if votes is None:
                self._mistake = (
                    f"{self._file}: task {self._tasks[index].name} has no test input like that of an example "
                    f"with identifier {identifiers_N[n]}; {_REBUILD}"
                )
                continue
            key = grid_key(undo(predictions[n], number, permutation_C))
            num_votes, total = votes.get(key, (0, 0))
            votes[key] = (num_votes + 1, total + units)

    def result(self, world: World, save_to: Path | None = None) -> dict[str, float]:
        """Return pass@k for each k, the mean over all ARC tasks with solutions. Every rank.

        pass@k of an ARC task is the share of its test inputs whose solution is among the k best
        answers. TRM's evaluator counts in the same way. An ARC task without votes counts as well.
        Into `save_to` rank 0 writes submission.json (two attempts for each test input, in Kaggle's
        format) and arc_votes.json (the best candidates).
        """
        with world.shared_errors():
            if self._mistake:
                raise UserError(self._mistake)
        sums = np.zeros(len(KS))
        submission: dict[str, list[dict[str, Any]]] = {}
        report: dict[str, list[dict[str, Any]]] = {}
        for start in range(0, len(self._tasks), TASKS_AT_A_TIME):
            some = slice(start, start + TASKS_AT_A_TIME)
            shares = world.gather_to_main(self._votes[some])
            for i, task in enumerate(self._tasks[some] if shares is not None else ()):
                of_ranks = [of_rank[i] for of_rank in shares or ()]
                judged = [_judge(pair, [votes[grid_key(pair.input)] for votes in of_ranks]) for pair in task.test]
                report[task.name], submission[task.name], places = map(list, zip(*judged, strict=True))
                sums += [sum(place <= k for place in places) / len(places) for k in KS]
        with world.shared_errors(), file_errors():
            if world.is_main and save_to is not None:
                save_to.mkdir(parents=True, exist_ok=True)
                write_atomically(save_to / "submission.json", json.dumps(submission) + "\n")
                write_atomically(save_to / "arc_votes.json", json.dumps(report) + "\n")
        scores = world.broadcast_object((sums / max(1, self.num_tasks)).tolist())
        return dict(zip(self.metrics, scores, strict=False))


def _judge(pair: Pair, shares: Sequence[Votes]) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Count the votes of all ranks on a test input.

    Return what arc_votes.json says, the two attempts, and the solution's place among the answers.
    The best answer has the most votes, then the highest mean confidence, then the first bytes.
    """
    merged: Votes = {}
    for votes in shares:
        for key, (num_votes, total) in votes.items():
            there, there_total = merged.get(key, (0, 0))
            merged[key] = (there + num_votes, there_total + total)
    num_empty, _ = merged.pop(_NO_GRID, (0, 0))
    # Sums stand in for means: they are only compared if the numbers of votes are equal.
    ranked = sorted(merged, key=lambda key: (-merged[key][0], -merged[key][1], key))
    solution = None if pair.output is None else grid_key(pair.output)
    place = ranked.index(solution) + 1 if solution in merged else math.inf
    # A single answer is both attempts, which must be there. Without answers they are a black cell.
    attempts = [grid_of(key).tolist() for key in ranked[:2]] or [[[0]]]
    report = {
        "input": pair.input.tolist(),
        "solution": None if pair.output is None else pair.output.tolist(),
        "num_votes": sum(num_votes for num_votes, _ in merged.values()),
        "num_empty": num_empty,
        "candidates": [
            {
                "grid": grid_of(key).tolist(),
                "count": num_votes,
                "confidence": total / num_votes / CONFIDENCE_UNIT,
                "right": None if solution is None else key == solution,
            }
            for key in ranked[:NUM_SHOWN]
            for num_votes, total in [merged[key]]
        ],
    }
    return report, {"attempt_1": attempts[0], "attempt_2": attempts[-1]}, place
