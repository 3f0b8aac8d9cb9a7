"""Boards of several sides on one canvas: shapes, labels, draws, symmetries, judges and votes."""
# N = examples, S = cells of a board, C = cells of the canvas

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from dataset.augment import BOXES
from dataset.canvas import common_side
from dataset.evaluators import build_evaluators, fitting_evaluators
from dataset.loader import EvalLoader, TrainLoader
from dataset.sampler import Sampler
from dataset.schema import check_contents, merge_splits, open_datasets
from dataset.sudoku import valid_solutions
from dataset.tasks import task_of_set
from dataset.tta import Variations
from tests.dataset.shapes import augmented_batches, mixed_split, split_with
from utils.batch import IGNORE_LABEL
from utils.errors import UserError
from utils.ranks.world import World

SINGLE = World.single()


def _board(canvas_C: torch.Tensor, side: int) -> tuple[np.ndarray, torch.Tensor]:
    """Return the board in the corner, and the cells outside of it."""
    inside_LL = torch.zeros(9, 9, dtype=torch.bool)
    inside_LL[:side, :side] = True
    canvas_LL = canvas_C.view(9, 9)
    return canvas_LL[inside_LL].numpy(), canvas_LL[~inside_LL]


def test_a_merged_split_has_the_shape_of_the_largest_boards() -> None:
    mixed = mixed_split()
    assert mixed.metadata.shape == (81, 11) and mixed.metadata.total_groups == 12
    assert list(mixed.sets) == ["four.all", "six.all", "nine.all"]
    assert [mixed.shape_of(name) for name in mixed.sets] == [(16, 6), (36, 8), (81, 11)]
    titles = [task.title for name in mixed.sets if (task := task_of_set(mixed, name)) is not None]
    assert titles == ["Sudoku 2x2", "Sudoku 2x3", "Sudoku 3x3"]
    with pytest.raises(UserError, match=r"four/train has seq_len 16, but data/six/train has 36; .*arch=se_mixer"):
        merge_splits(mixed.parts, [0, 1, 2])


@pytest.mark.parametrize("data_on", ["host", "device"])
def test_training_reads_boards_in_the_corner_and_no_label_outside(data_on: str) -> None:
    mixed = mixed_split()
    sampler = Sampler(list(mixed.sets.values()), seed=0, epochs=4, global_batch_size=6)
    assert sampler.num_draws == 4 * 12 and sampler.last_step == 8
    seen = Counter[tuple[str, int]]()
    for batch in TrainLoader(mixed, sampler, SINGLE, data_on=data_on).batches(range(1, 9)):  # type: ignore[arg-type]
        for n in range(6):
            name = list(mixed.sets)[int(batch["puzzle_identifiers"][n])]
            side = mixed.sets[name].corner.side if mixed.sets[name].corner else 9  # type: ignore[union-attr]
            inputs_S, outside_of_inputs = _board(batch["inputs"][n], side)
            labels_S, outside_of_labels = _board(batch["labels"][n], side)
            assert (outside_of_inputs == 0).all() and (outside_of_labels == IGNORE_LABEL).all()
            rows_N = (mixed.sets[name].inputs == inputs_S).all(1) & (mixed.sets[name].labels == labels_S).all(1)
            assert rows_N.any()
            seen[name, int(rows_N.argmax())] += 1
    everything = [(name, row) for name, puzzles in mixed.sets.items() for row in range(len(puzzles.inputs))]
    assert seen == dict.fromkeys(everything, 4), "an epoch draws each example once"


@pytest.mark.parametrize("most_clues", [0.0, 0.9])
def test_symmetries_and_further_clues_keep_a_board_inside_its_corner(most_clues: float) -> None:
    mixed, steps = mixed_split(), range(1, 9)
    sampler = Sampler(list(mixed.sets.values()), seed=0, epochs=20, global_batch_size=8)
    plain = list(TrainLoader(mixed, sampler, SINGLE).batches(steps))
    changed, num_clues = set[int](), [0, 0]
    for before, after in zip(plain, augmented_batches(mixed, SINGLE, steps, most_clues=most_clues), strict=True):
        for n in range(8):
            side = int((before["labels"][n].view(9, 9)[0] != IGNORE_LABEL).sum())
            labels_S, outside = _board(after["labels"][n], side)
            box = next(box for box in BOXES.values() if box.side == side)
            assert valid_solutions(labels_S[None] - 1, box)[0] and (outside == IGNORE_LABEL).all()
            inputs_S, outside = _board(after["inputs"][n], side)
            assert (outside == 0).all() and ((inputs_S == 1) | (inputs_S == labels_S)).all()
            for index, batch in enumerate((before, after)):
                num_clues[index] += int((batch["inputs"][n] > 1).sum())
            if not torch.equal(before["labels"][n], after["labels"][n]):
                changed.add(side)
    assert changed == {4, 6, 9} and (num_clues[1] > num_clues[0]) == (most_clues > 0)


def test_the_judges_of_a_set_are_those_of_its_size() -> None:
    mixed = mixed_split()
    assert fitting_evaluators(mixed) == ["sudoku"]
    evaluators = build_evaluators(["sudoku"], mixed)
    for name, puzzle_set in mixed.sets.items():
        inputs, labels = (torch.from_numpy(array.astype(np.int64)) for array in (puzzle_set.inputs, puzzle_set.labels))
        judged = evaluators.judge(inputs, labels, name)
        assert judged["valid_boards"].all() and judged["clues_kept"].all()
        labels[:, 0] = labels[:, 0] % puzzle_set.labels.max() + 2
        assert not evaluators.judge(inputs, labels, name)["valid_boards"].any()


def test_variations_of_a_smaller_set_are_undone_and_cropped() -> None:
    mixed, count = mixed_split(), 4
    for name, puzzle_set in mixed.sets.items():
        variations = Variations.of(mixed, count).of_set(mixed, name)
        task = task_of_set(mixed, name)
        assert task is not None
        for numbers_N, batch in variations.spread(EvalLoader(mixed, name, 2).batches(SINGLE)):
            undone = variations.undo(numbers_N, batch["inputs"])
            assert undone.numpy().tolist() == puzzle_set.inputs[numbers_N // count].tolist()
            if puzzle_set.corner is not None:
                for canvas_C in batch["inputs"]:
                    assert (_board(canvas_C, puzzle_set.corner.side)[1] == 0).all()
            assert not torch.equal(batch["inputs"][0], batch["inputs"][1])
        # What a model answers outside of the board, or as another digit, must not count.
        if puzzle_set.corner is not None:
            wild_NC = torch.full((count, 81), puzzle_set.corner.shape[1])
            assert (variations.undo(np.arange(count), wild_NC) == 0).all()


def test_boards_without_known_symmetries_or_rules_are_refused() -> None:
    latin_NS = np.tile(np.arange(25) % 5 + 2, (3, 1)).astype(np.uint8)
    parts = [replace(split_with(latin_NS, latin_NS, 7), path=Path("data/latin/train")), *mixed_split().parts[2:]]
    other = parts[1].metadata.model_copy(update={"ignore_label_id": 1})
    with pytest.raises(UserError, match="ignore_label_id"):
        merge_splits([parts[0], replace(parts[1], metadata=other)], [0, 1], canvas_side=9)
    mixed = merge_splits(parts, [0, 1], canvas_side=9)
    assert fitting_evaluators(mixed) == []
    with pytest.raises(UserError, match=r"latin\.all has 25 tokens of 7 kinds"):
        build_evaluators(["sudoku"], mixed)
    with pytest.raises(UserError, match=r"latin\.all .* are not known; set augment=none"):
        augmented_batches(mixed, SINGLE, range(1, 2))


def test_opened_datasets_share_a_canvas_only_if_asked(boards: dict[str, Path]) -> None:
    paths = [str(boards["2x2"]), str(boards["2x3"])]
    with pytest.raises(UserError, match=r"has seq_len 16, but .* has 36"):
        open_datasets(paths, "train", numbered_by=paths)
    mixed = open_datasets(paths, "train", numbered_by=paths, any_size=True)
    assert mixed.metadata.shape == (36, 8) and mixed.metadata.num_puzzle_identifiers == 2
    assert isinstance(next(iter(mixed.sets.values())).inputs, np.memmap), "the small boards stay mapped"
    assert len(check_contents(mixed)) == 64
    assert check_contents(mixed) != check_contents(
        open_datasets(paths[::-1], "train", numbered_by=paths[::-1], any_size=True)
    )
    # The canvas of a test split is that of the training.
    small = open_datasets(paths[:1], "test", numbered_by=paths, any_size=True)
    assert small.metadata.shape == (36, 8) and small.shape_of("s2x2.all") == (16, 6)
    alone = open_datasets(paths[:1], "test", numbered_by=paths[:1], any_size=True)
    assert alone.metadata.shape == (16, 6) and list(alone.sets) == ["all"]
    assert common_side([(16, 6), (36, 8), (36, 6)]) is None, "mazes share no canvas"
    after_large = open_datasets(paths[:1], "test", numbered_by=paths[1:], any_size=True)
    assert after_large.metadata.shape == (36, 8) and list(after_large.sets) == ["s2x2.all"]
