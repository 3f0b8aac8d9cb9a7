"""The maze builder: the dataset that it writes, and the mistakes that it refuses."""
# N = mazes, S = cells of a maze

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dataset import boards
from dataset.build_maze_dataset import BUILDER, main
from dataset.schema import Split, check_contents
from tests.dataset.builders import HEADER, build, refused, write_source
from tests.dataset.mazes import random_maze, to_text, turned_row

_build = partial(build, main)
_error = partial(refused, main)

# The path goes right, right, down, down around the walls.
GOOD_ROW = "x,S  ##   G,Soo##o  G,4"


@pytest.fixture(scope="module")
def source_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 12 training mazes of 5x5, and 5 test mazes in a compressed file."""
    folder = tmp_path_factory.mktemp("source")
    rng = np.random.default_rng(0)
    rows = [f"x,{','.join(map(to_text, random_maze(rng, 5)))},3" for _ in range(17)]
    return write_source(folder, rows)


def _arrays(split: Split) -> tuple[np.ndarray, np.ndarray]:
    puzzle_set = split.sets["all"]
    return np.array(puzzle_set.inputs), np.array(puzzle_set.labels)


def test_a_file_gives_its_mazes(tmp_path: Path, source_dir: Path) -> None:
    splits = _build(tmp_path / "data", "--source-dir", source_dir)
    assert [len(split.sets["all"].inputs) for split in splits.values()] == [12, 5]
    rows = [line.split(",") for line in (source_dir / "train.csv").read_text().splitlines()[1:]]
    for row, question_S, answer_S in zip(rows, *_arrays(splits["train"]), strict=True):
        assert [to_text(question_S), to_text(answer_S)] == row[1:3]


def test_the_eight_images_of_a_maze_form_a_group(
    tmp_path: Path, source_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = _build(tmp_path / "plain", "--source-dir", source_dir)
    monkeypatch.setattr(boards, "_CHUNK_BOARDS", 5)
    augmented = _build(tmp_path / "data", "--source-dir", source_dir, "--aug")
    for one, images in zip(_arrays(plain["train"]), _arrays(augmented["train"]), strict=True):
        expected = [turned_row(maze_S, transform) for maze_S in one for transform in range(8)]
        np.testing.assert_array_equal(images, expected)
    assert augmented["train"].sets["all"].group_indices.tolist() == list(range(0, 97, 8))
    assert check_contents(augmented["test"]) == check_contents(plain["test"])


def test_malformed_rows_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test.csv").write_text(f"{HEADER}\n{GOOD_ROW}\n")
    for question, answer, expected in (
        ("", "", "the question has 0 characters; a maze is a square"),
        ("S  ##   G", "So ##0 oG", "the answer has '0' in cell 6, where only #, blank, S, G and o can be"),
        ("S  ##   G", "So ##o  G", "the answer is not its question with one path from S to G"),
        ("S  ##   G", "So o#o  G", "the answer is not its question with one path from S to G"),
        ("S     G  ", "Soo  oGoo", "the answer is a path, but not a shortest one"),
    ):
        (tmp_path / "train.csv").write_text(f"{HEADER}\nx,{question},{answer},4\n")
        assert f"train.csv:2: {expected}" in _error(capsys, tmp_path / "data", "--source-dir", tmp_path)
    assert "--size is 5; it must be 6 to 40" in _error(capsys, tmp_path / "data", "--generate", 3, "--size", 5)
    assert BUILDER.parse([]).source_repo == "sapientinc/maze-30x30-hard-1k"


def test_any_shortest_path_is_accepted(tmp_path: Path) -> None:
    for split, answer in (("train", "S  o  oG "), ("test", "So  o  G ")):
        (tmp_path / f"{split}.csv").write_text(f"{HEADER}\nx,S      G ,{answer},3\n")
    splits = _build(tmp_path / "data", "--source-dir", tmp_path)
    assert [to_text(_arrays(split)[1][0]) for split in splits.values()] == ["S  o  oG ", "So  o  G "]
