"""Augmentation on the fly: what comes out is a symmetry of what went in, the same for any number of ranks."""
# B = examples of a batch, S = tokens, L = side of a grid, N = examples of a split, T = transforms

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataset.arc import SIDE, VOCAB_SIZE
from dataset.augment import BOXES, Box
from dataset.loader import IGNORE_LABEL, TrainLoader
from dataset.maze import VOCAB_SIZE as MAZE_VOCAB
from dataset.maze import allowed_transforms
from dataset.online import (
    ArcSymmetries,
    MazeSymmetries,
    OnlineAugmentation,
    SudokuSymmetries,
)
from dataset.sampler import Sampler
from dataset.schema import DatasetMetadata, PuzzleSet, Split
from dataset.sudoku import random_solution, symmetry_class, valid_solutions
from tests.dataset.mazes import random_maze, solved, turned, turned_row
from tests.spawn import world_of
from utils.dist.world import World

CPU = torch.device("cpu")


def _split(inputs_NS: np.ndarray, labels_NS: np.ndarray, vocab_size: int, ignore: int | None = 0) -> Split:
    num, seq_len = inputs_NS.shape
    puzzle_set = PuzzleSet("all", inputs_NS, labels_NS, np.zeros(num, np.int64), np.arange(num + 1), np.arange(num + 1))
    metadata = DatasetMetadata(
        pad_id=0,
        ignore_label_id=ignore,
        blank_identifier_id=0,
        vocab_size=vocab_size,
        seq_len=seq_len,
        num_puzzle_identifiers=1,
        total_groups=num,
        mean_puzzle_examples=1.0,
        sets=["all"],
    )
    return Split(Path("data/train"), metadata, {"all": puzzle_set})


def _tensors(inputs_BS: np.ndarray, labels_BS: np.ndarray, **arrays: np.ndarray) -> dict[str, torch.Tensor]:
    arrays = {"inputs": inputs_BS.astype(np.int32), "labels": labels_BS.astype(np.int32), **arrays}
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def _sudoku(box: Box, num: int) -> Split:
    rng = np.random.default_rng(0)
    solutions_NS = np.concatenate([random_solution(box, rng)[None] for _ in range(num)])
    puzzles_NS = np.where(rng.random(solutions_NS.shape) < 0.6, 0, solutions_NS)
    return _split((puzzles_NS + 1).astype(np.uint8), (solutions_NS + 1).astype(np.uint8), box.side + 2)


# ---- the stream ------------------------------------------------------------------------------------------


def _maze_split() -> Split:
    rng = np.random.default_rng(0)
    mazes = [random_maze(rng, 6) for _ in range(12)]
    return _split(np.stack([m for m, _ in mazes]), np.stack([label for _, label in mazes]), MAZE_VOCAB)


def _arc_split() -> Split:
    rng = np.random.default_rng(0)
    pairs = [_random_arc(rng) for _ in range(12)]
    return _split(np.stack([p[0] for p in pairs]), np.stack([p[1] for p in pairs]), VOCAB_SIZE)


SPLITS = {"sudoku": lambda: _sudoku(BOXES["2x2"], 12), "maze": _maze_split, "arc": _arc_split}


def _batches(split: Split, world: World, steps: range, size: int = 8, seed: int = 0, **options: Any) -> list[Any]:
    sets = list(split.sets.values())
    sampler = Sampler(sets, seed=seed, epochs=20, global_batch_size=size)
    slots = world.slice_of(size)
    augmentation = OnlineAugmentation.build(split, seed=seed, global_batch_size=size, slots=slots, device=world.device)
    return list(TrainLoader(split, sampler, world, augmentation=augmentation, **options).batches(steps))


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("task", SPLITS)
@pytest.mark.parametrize("num_ranks", [2, 4, 3])
def test_any_number_of_ranks_makes_the_same_batches(task: str, num_ranks: int) -> None:
    split = SPLITS[task]()
    whole = _batches(split, World.single(), range(1, 5))
    parts = [_batches(split, world_of(rank, num_ranks), range(1, 5)) for rank in range(num_ranks)]
    for step, batch in enumerate(whole):
        assert _same(batch, {name: torch.cat([part[step][name] for part in parts]) for name in batch})


@pytest.mark.parametrize("task", SPLITS)
def test_a_run_that_goes_on_in_the_middle_sees_the_same_batches(task: str) -> None:
    split = SPLITS[task]()
    whole = _batches(split, World.single(), range(1, 9))
    assert all(map(_same, _batches(split, World.single(), range(5, 9)), whole[4:]))
    assert all(map(_same, _batches(split, World.single(), range(1, 9), data_on="device"), whole))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no CUDA device here")
@pytest.mark.parametrize("task", SPLITS)
@pytest.mark.parametrize("data_on", ["host", "device"])
def test_a_gpu_sees_the_same_batches(task: str, data_on: str) -> None:
    split = SPLITS[task]()
    on_gpu = _batches(split, World.single("cuda"), range(1, 9), data_on=data_on)
    expected = _batches(split, World.single(), range(1, 9))
    for batch, same in zip(on_gpu, expected, strict=True):
        assert _same({name: tensor.cpu() for name, tensor in batch.items()}, same)


def test_steps_slots_and_seeds_draw_differently() -> None:
    split = _split(np.tile(_sudoku(BOXES["3x3"], 1).sets["all"].inputs, (8, 1)), np.full((8, 81), 2, np.uint8), 11)
    drawn = [
        row.tobytes()
        for seed in (0, 1)
        for batch in _batches(split, World.single(), range(1, 5), seed=seed)
        for row in batch["inputs"].numpy()
    ]
    assert len(set(drawn)) == len(drawn) == 2 * 4 * 8


def test_the_arrays_stay_as_they_are() -> None:
    split = _sudoku(BOXES["2x2"], 12)
    before = split.sets["all"].inputs.copy()
    for data_on in ("host", "device"):
        _batches(split, World.single(), range(1, 9), data_on=data_on)
    np.testing.assert_array_equal(split.sets["all"].inputs, before)


@pytest.mark.parametrize(
    ("seq_len", "vocab_size", "description"),
    [
        (16, 6, "symmetries of Sudoku 2x2"),
        (36, 8, "symmetries of Sudoku 2x3"),
        (81, 11, "symmetries of Sudoku 3x3"),
        (900, 12, "symmetries of ARC (which puzzle embeddings know nothing of)"),
        (900, 6, "symmetries of mazes 30x30 (2 of 16 keep the label)"),
        (81, 6, "symmetries of mazes 9x9 (2 of 16 keep the label)"),
    ],
)
def test_the_shape_tells_the_task(seq_len: int, vocab_size: int, description: str) -> None:
    split = _split(np.ones((2, seq_len), np.uint8), np.ones((2, seq_len), np.uint8), vocab_size)
    built = OnlineAugmentation.build(split, seed=0, global_batch_size=2, slots=slice(0, 2), device=CPU)
    assert built.description == description


@pytest.mark.parametrize(("seq_len", "vocab_size"), [(81, 12), (80, 6), (64, 10), (900, 11), (16, 12)])
def test_other_shapes_are_a_mistake(seq_len: int, vocab_size: int) -> None:
    split = _split(np.ones((2, seq_len), np.uint8), np.ones((2, seq_len), np.uint8), vocab_size)
    with pytest.raises(ValueError, match=f"has {seq_len} tokens of {vocab_size} kinds.*augment=none"):
        OnlineAugmentation.build(split, seed=0, global_batch_size=2, slots=slice(0, 2), device=CPU)


# ---- Sudoku ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("box", BOXES.values(), ids=str)
def test_labels_still_solve_the_inputs(box: Box) -> None:
    split = _sudoku(box, 4)
    batches = _batches(split, World.single(), range(1, 11))
    inputs_BS, labels_BS = (torch.cat([batch[name] for batch in batches]).numpy() for name in ("inputs", "labels"))
    assert {batch[name].dtype for batch in batches for name in ("inputs", "labels")} == {torch.int32}
    assert valid_solutions(labels_BS - 1, box).all()
    assert ((inputs_BS == 1) | (inputs_BS == labels_BS)).all()
    originals = {symmetry_class(row - np.uint8(1), box) for row in split.sets["all"].inputs}
    assert {symmetry_class((row - 1).astype(np.uint8), box) for row in inputs_BS} == originals
    assert len({row.tobytes() for row in inputs_BS}) > 70


def test_ignored_labels_and_padding_move_but_keep_their_value() -> None:
    box = BOXES["2x2"]
    symmetries = SudokuSymmetries(box)
    uniform_BU = np.random.default_rng(0).random((50, symmetries.num_draws))
    chosen = {name: torch.from_numpy(a) for name, a in symmetries.choose(uniform_BU, np.zeros(50, np.int64)).items()}
    inputs_BS = np.tile(np.arange(16) % 6, (50, 1))
    labels_BS = np.where(inputs_BS == 3, IGNORE_LABEL, inputs_BS)
    batch = symmetries.apply(_tensors(inputs_BS, labels_BS), chosen)
    for value in (0, 1):
        assert torch.equal(batch["inputs"] == value, batch["labels"] == value)
        assert (batch["inputs"] == value).sum(1).tolist() == [int((inputs_BS[0] == value).sum())] * 50
    # The cells of one digit, wherever they went and whatever it is now called.
    ignored_BS = batch["labels"] == IGNORE_LABEL
    assert ignored_BS.sum(1).tolist() == [3] * 50
    assert all(len(set(row[hidden].tolist())) == 1 for row, hidden in zip(batch["inputs"], ignored_BS, strict=True))
    assert torch.equal(batch["inputs"][~ignored_BS], batch["labels"][~ignored_BS])


# ---- mazes -----------------------------------------------------------------------------------------------


def test_every_maze_is_turned_as_its_label_allows_and_equally_often() -> None:
    split = _maze_split()
    puzzle_set = split.sets["all"]
    allowed_NT = allowed_transforms(puzzle_set.inputs, puzzle_set.labels)
    symmetries = MazeSymmetries([puzzle_set], CPU)
    assert symmetries.num_allowed == allowed_NT.sum()
    examples_B = np.repeat(np.arange(12), 400)
    chosen = symmetries.choose(np.random.default_rng(0).random((len(examples_B), 1)), examples_B)
    counts_NT = np.zeros((12, 8), int)
    np.add.at(counts_NT, (examples_B, chosen["transforms"]), 1)
    expected_NT = 400 * allowed_NT / allowed_NT.sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(counts_NT > 0, allowed_NT)
    assert (abs(counts_NT - expected_NT) < 6 * np.sqrt(expected_NT + 1)).all()

    batch = _tensors(puzzle_set.inputs[examples_B], puzzle_set.labels[examples_B])
    batch = symmetries.apply(batch, {"transforms": torch.from_numpy(chosen["transforms"])})
    for row in range(0, len(examples_B), 37):
        inputs_S, labels_S = (batch[name][row].numpy() for name in ("inputs", "labels"))
        transform = int(chosen["transforms"][row])
        np.testing.assert_array_equal(inputs_S, turned_row(puzzle_set.inputs[examples_B[row]], transform))
        np.testing.assert_array_equal(labels_S, solved(inputs_S))


def test_examples_are_numbered_over_all_sets() -> None:
    one, other = _maze_split().sets["all"], _maze_split().sets["all"]
    together = MazeSymmetries([one, other], CPU)
    uniform_BU = np.full((12, 1), 0.99)
    for shift in (0, 12):
        np.testing.assert_array_equal(
            together.choose(uniform_BU, np.arange(12) + shift)["transforms"],
            MazeSymmetries([one], CPU).choose(uniform_BU, np.arange(12))["transforms"],
        )


# ---- ARC -------------------------------------------------------------------------------------------------


def _on_canvas(grid: np.ndarray, top: int, left: int) -> np.ndarray:
    """A grid of colours on the canvas as published: (900,) tokens."""
    canvas_LL = np.zeros((SIDE, SIDE), np.uint8)
    for row in range(len(grid)):
        for column in range(len(grid[0])):
            canvas_LL[top + row, left + column] = grid[row, column] + 2
    if top + len(grid) < SIDE:
        for column in range(len(grid[0])):
            canvas_LL[top + len(grid), left + column] = 1
    if left + len(grid[0]) < SIDE:
        for row in range(len(grid)):
            canvas_LL[top + row, left + len(grid[0])] = 1
    return canvas_LL.ravel()


def _arc_grids(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Two grids of different sizes, often as wide or high as the canvas, and where on it both begin."""
    sizes = rng.choice([1, 2, 3, 7, 18, 29, 30], size=(2, 2))
    top, left = (int(rng.integers(0, SIDE - sizes[:, axis].max() + 1)) for axis in (0, 1))
    one, other = (rng.integers(0, 10, size) for size in sizes)
    return one, other, top, left


def _random_arc(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    one, other, top, left = _arc_grids(rng)
    return _on_canvas(one, top, left), _on_canvas(other, top, left)


@pytest.mark.parametrize("around", [0, IGNORE_LABEL])
@pytest.mark.parametrize("transform", range(8))
def test_grids_are_transformed_inside_their_boxes(transform: int, around: int) -> None:
    rng = np.random.default_rng(transform)
    symmetries = ArcSymmetries()
    cases = [_arc_grids(rng) for _ in range(30)]
    assert any(len(grid) == SIDE or len(grid[0]) == SIDE for one, other, *_ in cases for grid in (one, other))
    inputs_BS = np.stack([_on_canvas(one, top, left) for one, _, top, left in cases]).astype(np.int32)
    labels_BS = np.stack([_on_canvas(other, top, left) for _, other, top, left in cases]).astype(np.int32)
    labels_BS[labels_BS == 0] = around

    uniform_BU = rng.random((30, symmetries.num_draws))
    uniform_BU[:, -1] = (transform + 0.5) / 8
    chosen = symmetries.choose(uniform_BU, np.arange(30))
    batch = symmetries.apply(
        _tensors(inputs_BS, labels_BS), {name: torch.from_numpy(array) for name, array in chosen.items()}
    )
    assert {batch[name].dtype for name in ("inputs", "labels")} == {torch.int32}
    for index, (one, other, top, left) in enumerate(cases):
        names = chosen["names"][index].tolist()
        assert names[:3] == [0, 1, 2] and sorted(names) == list(range(VOCAB_SIZE))
        new_top, new_left = (left, top) if transform & 4 else (top, left)
        for name, grid in (("inputs", one), ("labels", other)):
            colours = np.vectorize(lambda colour, names=names: names[colour + 2] - 2)(grid)
            expected_S = _on_canvas(turned(colours, transform), new_top, new_left).astype(np.int32)
            if name == "labels":
                expected_S[expected_S == 0] = around
            np.testing.assert_array_equal(batch[name][index].numpy(), expected_S, err_msg=f"{name} {index}")


def test_an_example_without_an_answer_has_none_afterwards() -> None:
    inputs_S, _ = _random_arc(np.random.default_rng(0))
    symmetries = ArcSymmetries()
    chosen = symmetries.choose(np.random.default_rng(0).random((8, symmetries.num_draws)), np.arange(8))
    batch = symmetries.apply(
        _tensors(np.tile(inputs_S, (8, 1)), np.full((8, 900), IGNORE_LABEL)),
        {name: torch.from_numpy(array) for name, array in chosen.items()},
    )
    assert (batch["labels"] == IGNORE_LABEL).all()


def test_an_ignored_cell_of_a_grid_stays_ignored() -> None:
    symmetries = ArcSymmetries()
    chosen = symmetries.choose(np.random.default_rng(0).random((8, symmetries.num_draws)), np.arange(8))
    inputs_S = _on_canvas(np.full((3, 3), 5), 0, 0)
    labels_S = inputs_S.astype(np.int32)
    labels_S[31] = IGNORE_LABEL  # the middle
    batch = symmetries.apply(
        _tensors(np.tile(inputs_S, (8, 1)), np.tile(labels_S, (8, 1))),
        {name: torch.from_numpy(array) for name, array in chosen.items()},
    )
    assert (batch["labels"][:, 31] == IGNORE_LABEL).all()


def test_every_arc_transform_and_colour_is_drawn_about_equally_often() -> None:
    symmetries, num = ArcSymmetries(), 8000
    chosen = symmetries.choose(np.random.default_rng(0).random((num, symmetries.num_draws)), np.arange(num))
    assert abs(np.bincount(chosen["transforms"], minlength=8) - num / 8).max() < 6 * (num / 8) ** 0.5
    for colour in range(3, VOCAB_SIZE):
        counts = np.bincount(chosen["names"][:, colour], minlength=VOCAB_SIZE)[3:]
        assert abs(counts - num / 9).max() < 6 * (num / 9) ** 0.5
