"""A correct dataset passes the validation. Each mistake in one is a line that says where it is."""
# N = examples, S = tokens of an example, L = side of a grid

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dataset import arc, validate
from dataset.augment import BOXES, draw_symmetries
from dataset.build_sudoku_dataset import main as build_sudoku
from dataset.build_text_dataset import main as build_text
from dataset.builder import SplitWriter, finish
from dataset.schema import check_contents, open_split
from dataset.sudoku import generate
from dataset.validate import main
from tests.dataset.builders import put
from tests.dataset.mazes import random_maze, solved, turned_row
from tests.dataset.text.samples import write_hrm_text, write_lines, write_split

SEQ_LEN, VOCAB = 6, 9  # the sizes of no known task
NUM = {"train": 400, "test": 200}


def _write(
    path: Path,
    arrays: dict[str, tuple[np.ndarray, np.ndarray]],
    *,
    vocab_size: int = VOCAB,
    num_identifiers: int = 1,
) -> Path:
    """Write a dataset with these inputs and labels of each split."""
    path.mkdir()
    for split, (inputs_NS, labels_NS) in arrays.items():
        num, seq_len = inputs_NS.shape
        sizes = {"seq_len": seq_len, "vocab_size": vocab_size, "num_puzzle_identifiers": num_identifiers}
        with SplitWriter(path / split, **sizes) as writer:
            writer.add(inputs_NS, labels_NS, np.ones(num, int), np.arange(num) % num_identifiers)
            writer.end_groups(np.ones(num, int))
    names = ["<blank>", *(f"puzzle {number}" for number in range(1, num_identifiers))]
    finish(path, names, {"program": "test"})
    return path


def _random(seed: int = 0) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return examples without duplicates. No label equals its input."""
    rows = np.random.default_rng(seed).permutation(VOCAB**4)[: sum(NUM.values())]
    inputs_NS = np.stack([rows // VOCAB**place % VOCAB for place in range(SEQ_LEN)], axis=1).astype(np.uint8)
    labels_NS = (inputs_NS % (VOCAB - 1) + 1).astype(np.uint8)
    cut = NUM["train"]
    return {"train": (inputs_NS[:cut], labels_NS[:cut]), "test": (inputs_NS[cut:], labels_NS[cut:])}


def _edit(file: Path, change: Callable[[np.ndarray], np.ndarray]) -> None:
    np.save(file, change(np.load(file)))


def _edit_json(file: Path, **changes: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


class _Report:
    """The errors, the warnings, the summary and the exit status of the program."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> None:
        self.status = main([str(argument) for argument in arguments])
        lines = capsys.readouterr().out.splitlines()
        self.errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        self.warnings = [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")]
        self.summary = lines[len(self.errors) + len(self.warnings) :]
        assert self.status == (1 if self.errors else 0)
        assert all(str(arguments[0]) in line for line in self.errors + self.warnings), "each line must name the dataset"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Return a correct dataset without a recorded fingerprint.

    With a fingerprint, every edit of a test would cause a second error.
    """
    path = _write(tmp_path / "data", _random())
    (path / "fingerprint.json").unlink()
    return path


def test_a_correct_dataset_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path / "data", _random())
    report = _Report(capsys, path)
    assert (report.errors, report.warnings) == ([], [])
    assert report.summary == [
        "train  400 examples, 400 puzzles, 400 groups, 1 identifier, 6 tokens of 9 kinds",
        f"       sha256 {check_contents(open_split(path, 'train'))}",
        "test   200 examples, 200 puzzles, 200 groups, 1 identifier, 6 tokens of 9 kinds",
        f"       sha256 {check_contents(open_split(path, 'test'))}",
        "ok: 0 errors, 0 warnings",
    ]


def _assert_errors(report: _Report, *expected: str) -> None:
    assert len(report.errors) == len(expected), report.errors
    for line in expected:
        assert [found for found in report.errors if line in found], f"{line} is not in {report.errors}"


def test_one_error_hides_no_other_of_its_kind(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """First the files of both splits are checked, then the values, then the examples."""
    _edit(data / "train/all__puzzle_identifiers.npy", put(5, 1))
    _edit(data / "train/all__inputs.npy", put((slice(3, 6), 0), 77))
    _edit(data / "train/all__labels.npy", put(20, 0))
    _edit(data / "test/all__inputs.npy", put((1, 1), 99))
    damaged, missing = data / "train/all__group_indices.npy", data / "test/all__puzzle_identifiers.npy"
    other = data / "train/all__labels.npy"
    contents = {file: file.read_bytes() for file in (damaged, missing, other)}
    for file in (damaged, other):
        file.write_bytes(b"nothing")
    missing.unlink()
    of_files = (
        "all__labels.npy: cannot be mapped",
        "all__group_indices.npy: cannot be mapped",
        "all__puzzle_identifiers.npy is missing",
    )
    _assert_errors(_Report(capsys, data), *of_files)

    for file, content in contents.items():
        file.write_bytes(content)
    _edit_json(data / "test/dataset.json", num_puzzle_identifiers=2, blank_identifier_id=1, pad_id=3)
    (data / "identifiers.json").write_text('["<blank>", "a", "b"]')
    of_values = (
        "test/dataset.json: num_puzzle_identifiers is 2, but 1 in train",
        "test/dataset.json: blank_identifier_id is 1, but 0 in train",
        "test/dataset.json: pad_id is 3, but 0 in train",
        "identifiers.json: holds 3 names, but num_puzzle_identifiers is 1",
        "test/all__inputs.npy: row 1 has token 99, but 0 to 8 are possible",
    )
    wrong = (
        "train/all__inputs.npy: row 3 has token 77, but 0 to 8 are possible (3 rows of 400 in all)",
        "train/all__puzzle_identifiers.npy: row 5 has puzzle identifier 1, but 0 to 0 are possible",
    )
    report = _Report(capsys, data)
    _assert_errors(report, *of_values, *wrong)
    assert report.summary[-1] == "wrong: 7 errors, 0 warnings"

    _edit(data / "train/all__puzzle_identifiers.npy", put(5, 0))
    _edit(data / "train/all__inputs.npy", put((slice(3, 6), 0), 7))
    unlabelled = "train/all__labels.npy: row 20 has no label that counts"
    _assert_errors(_Report(capsys, data), *of_values, unlabelled)


def test_a_change_after_the_build_is_found_and_rows_are_numbered_through_all_chunks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _write(tmp_path / "data", _random())
    _edit(path / "train/all__labels.npy", put(slice(389, 391), 0))
    (error,) = _Report(capsys, path).errors
    assert "train changed after it was built" in error
    (path / "fingerprint.json").unlink()
    for chunk_bytes in (1, 7 * SEQ_LEN, 10**6):
        monkeypatch.setattr(validate, "CHUNK_BYTES", chunk_bytes)
        (error,) = _Report(capsys, path).errors
        assert error.endswith("row 389 has no label that counts (2 rows of 400 in all)")


def test_names_and_unseen_identifiers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = _write(tmp_path / "data", _random(), num_identifiers=5)
    (path / "fingerprint.json").unlink()
    assert _Report(capsys, path).warnings == []
    _edit(path / "train/all__puzzle_identifiers.npy", lambda array: np.where(array == 3, 2, array))
    (path / "identifiers.json").write_text('["<blank>", "a", "b", "a", "c"]')
    unseen, names = _Report(capsys, path).warnings
    assert "names 'a' twice" in names
    assert "puzzle 3 has identifier 3, which no training puzzle has (40 puzzles in all)" in unseen
    (path / "identifiers.json").write_text("{}")
    assert "no list of names" in _Report(capsys, path).errors[0]
    (path / "identifiers.json").unlink()
    assert "identifiers.json: is missing" in _Report(capsys, path).warnings[-1]


def test_one_group_for_all_puzzles_is_a_warning(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _edit(data / "train/all__group_indices.npy", lambda array: np.array([0, 400]))
    _edit_json(data / "train/dataset.json", total_groups=1, mean_puzzle_examples=3.5)
    _edit(data / "test/all__group_indices.npy", lambda array: np.array([0, 200]))
    _edit_json(data / "test/dataset.json", total_groups=1)
    mean, group = _Report(capsys, data).warnings
    assert "mean_puzzle_examples is 3.5, but 400 examples of 400 puzzles are 1" in mean
    assert "one group holds all 400 puzzles" in group


def test_a_few_labels_that_teach_nothing_are_a_warning_and_all_an_error(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs_NS = np.load(data / "train/all__inputs.npy")
    _edit(data / "test/all__labels.npy", put(slice(10, 13), 0))
    _edit(data / "train/all__labels.npy", lambda array: np.concatenate([inputs_NS[:2], array[2:]]))
    report = _Report(capsys, data)
    same, unlabelled = report.warnings
    assert same.endswith("train/all__labels.npy: row 0 is the same as its input (2 rows of 400 in all)")
    assert unlabelled.endswith("test/all__labels.npy: row 10 has no label that counts (3 rows of 200 in all)")
    assert report.errors == []
    np.save(data / "train/all__labels.npy", inputs_NS)
    (error,) = _Report(capsys, data).errors
    assert error.endswith("row 0 is the same as its input (400 rows of 400 in all)")


# ---- leaks and duplicates ----------------------------------------------------------------------


@pytest.mark.parametrize("num_leaked, is_error", [(2, False), (3, True)])
def test_a_few_leaks_are_a_warning_and_many_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_leaked: int, is_error: bool
) -> None:
    arrays = _random()
    rng = np.random.default_rng(num_leaked)
    at, leaked = rng.permutation(400)[:num_leaked], np.sort(rng.permutation(200)[:num_leaked])
    for train_NS, test_NS in zip(arrays["train"], arrays["test"], strict=True):
        train_NS[at] = test_NS[leaked]
    path = _write(tmp_path / "data", arrays)
    report = _Report(capsys, path)
    (line,) = report.errors + report.warnings
    assert bool(report.errors) == is_error
    test = path / "test/all__inputs.npy"
    assert line.startswith(f"row {leaked[0]} of {test} is in the training data too, row {at[0]} ")
    assert f"({num_leaked:,} of 200 test examples are, {num_leaked / 200:.2%})" in line
    assert _Report(capsys, path, "--allow-leak").status == 0


@pytest.mark.parametrize("num_identifiers, is_leak", [(1, True), (3, False)])
def test_an_input_with_two_labels_is_a_fault_and_a_leak_unless_identifiers_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_identifiers: int, is_leak: bool
) -> None:
    """Without identifiers the input alone is the question. With them puzzles may share an input."""
    arrays = _random()
    arrays["train"][0][5] = arrays["test"][0][6]
    path = _write(tmp_path / "data", arrays, num_identifiers=num_identifiers)
    report = _Report(capsys, path)
    assert len(report.warnings) == len(report.errors) == is_leak
    for line in report.errors:
        assert line.startswith(
            f"row 5 of {path / 'train/all__inputs.npy'} and row 6 of {path / 'test/all__inputs.npy'} "
        )


def test_tokens_above_255_are_told_apart(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    of_train_NS = np.load(data / "train/all__inputs.npy")
    for split in ("train", "test"):
        _edit_json(data / split / "dataset.json", vocab_size=300)
    _edit(data / "test/all__inputs.npy", lambda array: np.concatenate([of_train_NS[:9] + np.uint16(256), array[9:]]))
    assert _Report(capsys, data).summary[-1] == "ok: 0 errors, 0 warnings"


def test_labels_disagree_only_where_both_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate, "_ANSWERS_AT_ONCE", 3)
    arrays = _random()
    inputs_NS, labels_NS = arrays["train"]
    inputs_NS[[3, 4, 7]] = inputs_NS[3]
    labels_NS[[3, 4, 7]] = labels_NS[3]
    labels_NS[4, :2], labels_NS[7, 2:] = 0, 0
    path = _write(tmp_path / "data", arrays)
    assert _Report(capsys, path).errors == []
    (path / "fingerprint.json").unlink()
    _edit(path / "train/all__labels.npy", put((7, 0), labels_NS[3, 0] % 8 + 1))
    (error,) = _Report(capsys, path).errors
    assert "row 7 of " in error and ("row 3 of " in error or "row 4 of " in error)
    shutil.rmtree(path / "test")
    assert _Report(capsys, path).errors == [error]


def test_symmetric_sudokus_with_two_answers_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = BOXES["2x2"]
    question, answer, other = "0004002023400032", "3214142323414132", "3214412323411432"
    symmetry = draw_symmetries(np.random.default_rng(1), 1, shape)
    (test,) = generate(1, shape, np.random.default_rng(0))

    def errors(second: str) -> list[str]:
        tokens = [np.array([list(map(int, text))], np.uint8) for text in (question, answer, question, second)]
        tokens[2:] = [symmetry.apply(board_NS) for board_NS in tokens[2:]]
        train = np.concatenate(tokens[::2]) + np.uint8(1), np.concatenate(tokens[1::2]) + np.uint8(1)
        splits = {"train": train, "test": (test[0][None] + np.uint8(1), test[1][None] + np.uint8(1))}
        return _Report(capsys, _write(tmp_path / second, splits, vocab_size=6)).errors

    assert errors(answer) == []
    (error,) = errors(other)
    assert error.startswith("row 0 of ") and "and row 1 of " in error and "are symmetries, but their labels" in error


def test_mazes_with_two_answers_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A turned label is an answer of its own, unless augmentation may turn the maze so."""
    rng = np.random.default_rng(0)
    others = [random_maze(rng, 5) for _ in range(4)]
    # Turned upside down, the label of this maze is the label of the turned maze.
    while True:
        maze_S, label_S = random_maze(rng, 5)
        flipped_S, flipped_label_S = turned_row(maze_S, 2), turned_row(label_S, 2)
        of_turned_S = solved(turned_row(flipped_S, 4))
        assert of_turned_S is not None
        second_S = turned_row(of_turned_S, 4)
        if (flipped_label_S == solved(flipped_S)).all() and (flipped_label_S != second_S).any():
            break

    def errors(*row: np.ndarray) -> list[str]:
        train, test = [(maze_S, label_S), *others[:2], row], others[2:]
        splits = {
            name: tuple(map(np.stack, zip(*rows, strict=True))) for name, rows in (("train", train), ("test", test))
        }
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        return _Report(capsys, _write(folder, splits, vocab_size=6)).errors  # type: ignore[arg-type]

    assert errors(turned_row(maze_S, 4), turned_row(label_S, 4)) == []
    assert errors(flipped_S, flipped_label_S) == []
    assert errors(flipped_S, second_S * (np.arange(25) > 0)) == [], "a label with a gap is no other answer"
    for row, what in (
        ((flipped_S, second_S), "are symmetries"),
        ((maze_S, turned_row(second_S, 2)), "have the same input"),
    ):
        (error,) = errors(*row)
        assert error.startswith("row 0 of ") and "and row 3 of " in error and what in error


def test_duplicates_in_the_test_split_are_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of four identifiers, rows 20, 50, 150 and 199 have 0, 2, 2 and 3: two rows share one."""
    arrays = _random()
    for test_NS in arrays["test"]:
        test_NS[[50, 150, 199]] = test_NS[20]
    for num_identifiers, row, first, num in ((1, 50, 20, 3), (4, 150, 50, 1)):
        path = _write(tmp_path / str(num_identifiers), arrays, num_identifiers=num_identifiers)
        (line,) = _Report(capsys, path).warnings
        assert line.startswith(f"row {row} of {path / 'test/all__inputs.npy'} repeats row {first} of ")
        assert f"({num} of 200 test examples are such copies)" in line


# ---- tasks -------------------------------------------------------------------------------------


def test_sudoku(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "data"
    assert build_sudoku(["--output-dir", str(path), "--generate", "50", "--box", "2x2"]) == 0
    capsys.readouterr()
    report = _Report(capsys, path)
    assert (report.errors, report.warnings) == ([], []) and "(Sudoku 2x2)" in report.summary[0]
    (path / "fingerprint.json").unlink()
    inputs_NS, labels_NS = (np.load(path / f"train/all__{name}.npy") for name in ("inputs", "labels"))
    blank = int(np.flatnonzero(inputs_NS[4] == 1)[0])
    labels_NS[4, blank] = (labels_NS[4, blank] - 1) % 4 + 2
    # With other names of the digits the board stays valid, but loses the clues.
    labels_NS[7] = np.array([0, 1, 3, 4, 5, 2], np.uint8)[labels_NS[7]]
    inputs_NS[9, 0] = 0
    for name, array in (("inputs", inputs_NS), ("labels", labels_NS)):
        np.save(path / f"train/all__{name}.npy", array)
    assert sorted(error.split("/")[-1] for error in _Report(capsys, path).errors) == [
        "all__inputs.npy: row 9 has padding inside the board",
        "all__labels.npy: row 4 is no valid board with boxes of 2x2",
        "all__labels.npy: row 7 changes a clue of its input",
    ]
    assert _Report(capsys, path, "--any-task").errors == []


def test_arc(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grids = np.random.default_rng(0).integers(0, 10, (500, 2, 3, 4)).astype(np.uint8)
    grids[17] = grids[330]
    # The training inputs touch the lower right corner, where end markers do not fit.
    places = [(27, 26)] * 300 + [(0, 0)] * 200
    inputs_NS, labels_NS = (
        np.stack([arc.to_tokens(pair[part], *place) for pair, place in zip(grids, places, strict=True)])
        for part in (0, 1)
    )
    arrays = {"train": (inputs_NS[:300], labels_NS[:300]), "test": (inputs_NS[300:], labels_NS[300:])}
    path = _write(tmp_path / "data", arrays, vocab_size=12, num_identifiers=4)
    report = _Report(capsys, path)
    assert report.errors == [] and "(ARC)" in report.summary[0]
    (leak,) = report.warnings
    assert "row 30 of" in leak and "row 17 of" in leak
    (path / "fingerprint.json").unlink()
    _edit(path / "train/all__inputs.npy", put(9, inputs_NS[300]))
    _edit(path / "train/all__labels.npy", put((12, 0), 5))
    _assert_errors(
        _Report(capsys, path),
        "train/all__labels.npy: row 9 has its grid elsewhere on the canvas than its input",
        "train/all__labels.npy: row 12 is no rectangle of colours",
    )


# ---- text ---------------------------------------------------------------------------------------


def test_a_correct_text_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [{"text": f"the same beginning, {number} and the same end" * 3} for number in range(60)]
    problems = [{"instruction": f"{n} + 1", "response": str(n + 1)} for n in range(60)]
    source = write_lines(tmp_path / "a.jsonl", *texts, *problems)
    assert build_text(["--output-dir", str(tmp_path / "data"), "--source", str(source), "--max-len", "20"]) == 0
    built = capsys.readouterr().out
    lines = _Report(capsys, tmp_path / "data").summary
    assert lines[-1] == "ok: 0 errors, 0 warnings", "texts that begin or end alike are no leak"
    assert "samples of 8 to 20 tokens (mean" in lines[0]
    for name, line in (("train", lines[1]), ("test", lines[3])):
        assert f"sha256 {line.split()[-1]} ({name})\n" in built, "the fingerprint must be that of the builder"


def _problems(first: int, num: int, answer: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and samples of problems whose instructions are numbers."""
    tokens = np.array([[256, number, 257, answer, 258] for number in range(first, first + num)], np.uint16)
    table = np.array([[5 * number, 3, 2, 0] for number in range(num)])
    return tokens.reshape(-1), table


def _texts(first: int) -> tuple[np.ndarray, np.ndarray]:
    """Return texts in samples of 4 and 3 tokens to read. Only the last token differs."""
    tokens = np.array([[256, 1, 2, 3, 4, 5, number, 258] for number in range(first, first + 20)], np.uint16)
    table = np.array([[8 * n + start, 1, length, 0] for n in range(20) for start, length in ((0, 4), (4, 3))])
    return tokens.reshape(-1), table


def test_a_leak_of_texts_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(validate, "CHUNK_BYTES", 40 * 7)
    for name, train, test, first, message in (
        ("problems", _problems(0, 50), _problems(40, 20, answer=2), 40, "(10 of 20 test examples are, 50.00%)"),
        ("texts", _texts(0), _texts(18), 36, "(2 of 20 test examples"),
    ):
        write_split(tmp_path / name / "train", *train)
        write_split(tmp_path / name / "test", *test)
        (error,) = _Report(capsys, tmp_path / name).errors
        place = f"{tmp_path / name}/test/samples.npy"
        assert f"sample 0 of {place} is in the training data too, sample {first} of " in error
        assert f"samples.npy {message}" in error
        report = _Report(capsys, tmp_path / name, "--allow-leak")
        assert len(report.warnings) == 1 and report.summary[-1] == "ok: 0 errors, 1 warning"


def test_an_error_in_each_split_of_text_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens, table = _problems(0, 50)
    write_split(tmp_path / "apart/train", tokens, table)
    write_split(tmp_path / "apart/test", *_problems(60, 5), tasks=["sums"], vocab_size=260)
    tokens[7] = 300
    write_split(tmp_path / "wrong/train", tokens, table)
    write_split(tmp_path / "wrong/test", *_problems(60, 5), num_samples=6)
    of_wrong = "train/tokens.npy: row 7 has token 300", "test/samples.npy: has 5 rows, but num_samples in dataset.json"
    of_apart = "has vocab_size 259, but ", "dataset.json: tasks are not those of train"
    for name, expected in (("wrong", of_wrong), ("apart", of_apart)):
        report = _Report(capsys, tmp_path / name)
        _assert_errors(report, *expected)
        assert report.summary[-1] == "wrong: 2 errors, 0 warnings"


def test_a_folder_of_hrm_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("inst_start", "inst_len", "resp_start", "resp_len")
    epoch = {name: np.array(values) for name, values in zip(names, ([0, 9], [3, 4], [3, 13], [2, 6]), strict=True)}
    write_hrm_text(tmp_path / "data", np.arange(30, dtype=np.int32), [epoch, epoch])
    report = _Report(capsys, tmp_path / "data")
    assert report.errors == []
    assert report.summary[0].startswith("train  2 samples in each of 2 epochs of 4 to 9 tokens (mean 6)")
