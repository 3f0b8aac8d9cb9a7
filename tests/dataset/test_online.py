"""Augmentation during training is the same for any number of ranks."""
# N = examples, S = tokens

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from dataset.augment import BOXES
from dataset.online import OnlineAugmentation
from dataset.schema import Split
from dataset.tasks import sudoku
from tests.dataset.samples import SAMPLES
from tests.dataset.shapes import augmented_batches, maze_split, mixed_split, split_with, sudoku_split
from tests.spawn import world_of
from utils.ranks.world import World

SPLITS: dict[str, Callable[[], Split]] = {
    **SAMPLES,
    "boards of three sizes": mixed_split,
    "clues": lambda: sudoku_split(BOXES["2x2"], 12),
}


def _batches(task: str, world: World, steps: range, **options: Any) -> list[Any]:
    return augmented_batches(SPLITS[task](), world, steps, most_clues=0.9 if task == "clues" else 0.0, **options)


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("task", SPLITS)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_any_number_of_ranks_makes_the_same_augmented_batches(task: str, num_ranks: int) -> None:
    whole = _batches(task, World.single(), range(1, 5))
    parts = [_batches(task, world_of(rank, num_ranks), range(1, 5)) for rank in range(num_ranks)]
    for step, batch in enumerate(whole):
        assert _same(batch, {name: torch.cat([part[step][name] for part in parts]) for name in batch})


@pytest.mark.parametrize("task", SPLITS)
def test_a_resumed_run_and_data_on_the_device_see_the_same_augmented_batches(task: str) -> None:
    whole = _batches(task, World.single(), range(1, 9))
    assert all(map(_same, _batches(task, World.single(), range(5, 9)), whole[4:]))
    assert all(map(_same, _batches(task, World.single(), range(1, 9), data_on="device"), whole))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device here")
@pytest.mark.parametrize("task", SPLITS)
@pytest.mark.parametrize("data_on", ["host", "device"])
def test_a_gpu_sees_the_same_augmented_batches(task: str, data_on: str) -> None:
    on_gpu = _batches(task, World.single("cuda"), range(1, 9), data_on=data_on)
    for batch, same in zip(on_gpu, _batches(task, World.single(), range(1, 9)), strict=True):
        assert _same({name: tensor.cpu() for name, tensor in batch.items()}, same)


def _clue_split(num: int) -> Split:
    """Return boards with blanks in even cells, whose answer is the digit 1 everywhere."""
    inputs_NS = np.full((num, 81), 2, np.uint8)
    inputs_NS[:, ::2] = 1
    return split_with(inputs_NS, np.full((num, 81), 2, np.uint8), 11)


def test_clues_fill_blank_cells_with_their_answers_and_change_nothing_else() -> None:
    split = sudoku_split(BOXES["3x3"], 12)
    plain = augmented_batches(split, World.single(), range(1, 9))
    num_shown = 0
    for without, clued in zip(
        plain, augmented_batches(split, World.single(), range(1, 9), most_clues=0.9), strict=True
    ):
        is_shown = clued["inputs"] != without["inputs"]
        num_shown += int(is_shown.sum())
        assert torch.equal(clued["labels"], without["labels"])
        assert (without["inputs"][is_shown] == 1).all(), "a clue replaced a token that is no blank"
        assert torch.equal(clued["inputs"][is_shown], clued["labels"][is_shown])
    assert num_shown > 0


def test_half_of_the_visits_show_clues_up_to_the_given_share() -> None:
    num = 2000
    (batch,) = augmented_batches(_clue_split(num), World.single(), range(1, 2), size=num, most_clues=0.4)
    shown_N = (batch["inputs"] != 1).sum(1).float() - 40  # 41 blanks and 40 clues
    # The probability of a cell is 0.2 on average in half of the visits: 0.1 over all.
    assert abs(float(shown_N.mean()) / 41 - 0.1) < 0.01
    assert 0.48 < float((shown_N == 0).float().mean()) < 0.58  # half, and those whose draws showed none
    assert float(shown_N.max()) / 41 < 0.7


def test_cells_with_ignored_labels_stay_blank() -> None:
    split = _clue_split(4)
    split = dataclasses.replace(split, metadata=split.metadata.model_copy(update={"ignore_label_id": 2}))
    batches = augmented_batches(split, World.single(), range(1, 9), most_clues=0.99)
    assert all(int((batch["inputs"] == 1).sum(1).min()) == 41 for batch in batches)


def test_steps_slots_and_seeds_draw_differently() -> None:
    """Symmetries differ, and so do further clues."""
    one = np.tile(sudoku_split(BOXES["3x3"], 1).sets["all"].inputs, (8, 1))
    split = split_with(one, np.full((8, 81), 2, np.uint8), 11)
    drawn, shown = list[bytes](), list[bytes]()
    for seed in (0, 1):
        augmentation = OnlineAugmentation(split, seed=seed, global_batch_size=8, slots=slice(0, 8), most_clues=0.9)
        batches = [augmentation.draw(step, np.arange(8)) for step in range(1, 5)]
        drawn += [row.tobytes() for batch in batches for row in batch["cells"].numpy()]
        shown += [row.tobytes() for batch in batches for row in batch["shown"].numpy() if row.any()]
    assert len(set(drawn)) == len(drawn) == 2 * 4 * 8
    assert len(set(shown)) == len(shown) > 16


def test_each_set_of_a_canvas_numbers_its_own_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some tasks know of each example which symmetries it has."""
    split, asked = mixed_split(), list[list[int]]()
    symmetries = sudoku.SudokuSymmetries.choose

    def choose(self: Any, uniform_BU: np.ndarray, examples_B: np.ndarray) -> dict[str, np.ndarray]:
        asked.append(examples_B.tolist())
        return symmetries(self, uniform_BU, examples_B)

    monkeypatch.setattr(sudoku.SudokuSymmetries, "choose", choose)
    augmentation = OnlineAugmentation(split, seed=0, global_batch_size=6, slots=slice(0, 6), most_clues=0.5)
    sizes_and_clues = "Sudoku 2x2, symmetries of Sudoku 2x3 and symmetries of Sudoku 3x3 with up to 50% of the blanks"
    assert sizes_and_clues in augmentation.description
    sizes = [len(each.inputs) for each in split.sets.values()]
    ends = np.cumsum(sizes)
    augmentation.draw(1, np.sort(np.concatenate([ends - sizes, ends - 1])))
    assert asked == [[0, size - 1] for size in sizes]


def test_splits_without_symmetries_or_blanks_are_refused() -> None:
    split = split_with(np.ones((2, 82), np.uint8), np.ones((2, 82), np.uint8), 12)
    for each, most_clues, message in (
        (split, 0.0, r"has 82 tokens of 12 kinds.*augment=none"),
        (maze_split(), 0.4, r"0\.4 fills blank cells of Sudokus"),
    ):
        with pytest.raises(ValueError, match=message):
            augmented_batches(each, World.single(), range(1, 2), most_clues=most_clues)
