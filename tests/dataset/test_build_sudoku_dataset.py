"""The Sudoku builder: its dataset, the mistakes that it refuses, and interruptions."""
# N = boards, S = cells of a board

import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dataset import boards, build_sudoku_dataset
from dataset.augment import BOXES
from dataset.build_sudoku_dataset import BUILDER, main
from dataset.schema import Split, open_split
from dataset.sudoku import count_solutions, generate, symmetry_keys
from tests.dataset.builders import build, fingerprints, refused, write_source

_build = partial(build, main)
_error = partial(refused, main)

REPOSITORY = Path(__file__).resolve().parents[2]
BOX = BOXES["2x2"]
QUESTION, ANSWER = "1...3..2.14.4...", "1234341221434321"


@pytest.fixture(scope="module")
def source_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with 12 training puzzles of 4x4, and 5 test puzzles, rated 0, 1, 2, ..."""
    folder = tmp_path_factory.mktemp("source")
    pairs = list(generate(17, BOX, np.random.default_rng(0)))
    rows = [
        f"x,{''.join(map(str, q)).replace('0', '.' if i % 2 else '0')},{''.join(map(str, a))},{i % 12}"
        for i, (q, a) in enumerate(pairs)
    ]
    return write_source(folder, rows)


def _boards(split: Split) -> tuple[np.ndarray, np.ndarray]:
    puzzle_set = split.sets["all"]
    return np.array(puzzle_set.inputs) - 1, np.array(puzzle_set.labels) - 1


def test_a_build_subsamples_train_alone_as_the_seed_says(
    tmp_path: Path, source_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _boards(_build(tmp_path / "whole", "--source-dir", source_dir)["train"])[0]
    options = ("--source-dir", source_dir, "--num-aug", 5, "--subsample-size", 9)
    drawn = [
        [
            question_S.tobytes()
            for question_S in _boards(_build(tmp_path / name, *options, "--seed", seed)["train"])[0][::6]
        ]
        for name, seed in (("a", 1), ("c", 2))
    ]
    assert len({*drawn[0]}) == 9 and {*drawn[0]} <= {question_S.tobytes() for question_S in whole}
    assert {*drawn[0]} != {*drawn[1]}, "each seed must draw puzzles of its own"
    monkeypatch.setattr(build_sudoku_dataset, "AUGMENT_CHUNK_BOARDS", 7)
    monkeypatch.setattr(boards, "CHUNK_ROWS", 5)
    _build(tmp_path / "b", *options, "--seed", 1)
    one, same, other = (fingerprints(tmp_path / name) for name in "abc")
    assert one == same and one[0] != other[0] and one[1] == other[1] == fingerprints(tmp_path / "whole")[1]


def test_dug_puzzles_follow_those_with_their_solutions(
    tmp_path: Path, source_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--source-dir", source_dir, "--dig", 3)
    old_NS = _boards(_build(tmp_path / "plain", "--source-dir", source_dir)["train"])[0]
    questions_NS, answers_NS = _boards(_build(tmp_path / "a", *options)["train"])
    assert (questions_NS[::4] == old_NS).all() and len(np.unique(questions_NS, axis=0)) == 4 * len(old_NS)
    assert (answers_NS == np.repeat(answers_NS[::4], 4, axis=0)).all()
    assert (count_solutions(questions_NS, BOX) == 1).all()
    _build(tmp_path / "b", *options)
    _build(tmp_path / "c", *options, "--seed", 1)
    plain, one, same, other = (fingerprints(tmp_path / name) for name in ("plain", "a", "b", "c"))
    assert one == same and one[0] not in (plain[0], other[0]) and one[1] == plain[1], "only training puzzles differ"
    monkeypatch.setattr(build_sudoku_dataset, "_MOST_MISSES", 3)
    message = _error(capsys, tmp_path / "none", *options, "--dig-guesses", 99)
    assert "no further puzzle was found; change --dig" in message


def test_puzzles_dug_near_a_puzzle_add_few_clues_to_it(tmp_path: Path) -> None:
    typed = ("--generate", 4, "--generate-test", 1, "--box", "3x3", "--dig", 6, "--dig-near", 3)
    questions_NS, _ = _boards(_build(tmp_path / "data", *typed)["train"])
    for puzzle_S, *dug in np.split(questions_NS, 4):
        added = [np.count_nonzero((each_S > 0) & (puzzle_S == 0)) for each_S in dug]
        assert max(added) <= 3 and sum(added) > 0
    assert (count_solutions(questions_NS, BOXES["3x3"]) == 1).all()


def test_no_dug_puzzle_is_a_symmetry_of_a_test_puzzle(tmp_path: Path) -> None:
    typed = ("--generate", 300, "--generate-test", 200, "--box", "2x2", "--dig", 4)
    train, test = (_boards(split) for split in _build(tmp_path / "data", *typed).values())
    assert not np.isin(symmetry_keys(*train, BOX)[0], symmetry_keys(*test, BOX)[0]).any()


def test_questions_with_several_solutions_are_counted(
    tmp_path: Path, source_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(source_dir, tmp_path / "source"))
    with (folder / "train.csv").open("a") as stream:
        stream.write(f"x,12..{'.' * 12},{ANSWER},0\nx,{'.' * 16},{ANSWER},0\n")
    _build(tmp_path / "data", "--source-dir", folder, "--check-unique")
    output = capsys.readouterr().out
    assert f"2 of 14 train questions have several solutions, the first is 12..{'.' * 12}" in output
    assert "0 of 5 test questions have several solutions" in output


def test_min_difficulty_selects_puzzles_of_both_splits(
    tmp_path: Path, source_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    splits = _build(tmp_path / "data", "--source-dir", source_dir, "--min-difficulty", 3)
    assert splits["train"].metadata.total_groups == 9  # rated 3 to 11
    assert splits["test"].metadata.total_groups == 2  # rated 3 and 4
    message = _error(capsys, tmp_path / "none", "--source-dir", source_dir, "--min-difficulty", 99)
    assert "train.csv: no puzzle is left; lower --min-difficulty" in message


def test_wrong_options_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, list[object]] = {
        "--source-dir and --generate exclude each other": ["--generate", 5, "--source-dir", "x"],
        "--subsample-size is for puzzles from files": ["--generate", 5, "--subsample-size", 3],
        "--generate is 0; it must be at least 1": ["--generate", 0],
        "--generate-test needs --generate": ["--source-dir", "x", "--generate-test", 5],
        "5,000,000,005 examples are more": ["--generate", 5, "--box", "2x2", "--num-aug", 10**9],
        "--check-unique": ["--generate", 3, "--check-unique"],
        "--dig-clues needs --dig": ["--source-dir", "x", "--dig-clues", 30],
        "--dig-near needs --dig": ["--source-dir", "x", "--dig-near", 3],
        "--dig needs boards up to side 9 with a blank": [
            "--generate",
            2,
            "--generate-test",
            1,
            "--box",
            "3x4",
            "--dig",
            1,
        ],
    }
    for expected, typed in options.items():
        assert expected in _error(capsys, tmp_path / "data", *typed)
    assert BUILDER.parse(["--generate", "5"]).box == "3x3"


def test_malformed_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test.csv").write_text(f"question,answer\n{QUESTION},{ANSWER}\n")
    for row, expected in (
        (f"{QUESTION[1:]},{ANSWER}", "train.csv:2: the question has 15 characters; boards have 16, 36"),
        (f"{QUESTION},2134342112434312", "train.csv:2: the answer changes a clue of its question"),
        (f"{'.' * 16},{'1234' * 4}", "train.csv:2: the answer is no valid board with boxes of 2x2"),
        ("." * 36 + ",123456456123231564564231312645645312", "test.csv: puzzles have 16 cells"),
    ):
        (tmp_path / "train.csv").write_text(f"question,answer\n{row}")
        assert expected in _error(capsys, tmp_path / "data", "--source-dir", tmp_path)


def test_files_with_the_columns_of_kaggle_are_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text(f"id,Solutions, quizzes \n1,{ANSWER},{QUESTION.replace('.', '0')}\n")
    built = _build(tmp_path / "data", "--source-dir", tmp_path, "--box", "2x2", "--subsample-size", 1)["train"]
    assert "".join(".1234"[token - 1] for token in built.sets["all"].inputs[0]) == QUESTION
    for more, expected in (
        (["--box", "2x3"], "boxes have 2x2 cells, not --box 2x3"),
        (["--min-difficulty", 3], "has no column rating"),
        (["--subsample-size", 2], "--subsample-size is 2, but there are 1 puzzles"),
    ):
        assert expected in _error(capsys, tmp_path / "other", "--source-dir", tmp_path, *more)


def test_download(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    asked = []

    def hf_hub_download(repo: str, filename: str, *, repo_type: str) -> str:
        asked.append((repo, filename, repo_type))
        return str(source_dir / {"train.csv": "train.csv", "test.csv": "test.csv.gz"}[filename])

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    assert _build(tmp_path / "data")["train"].metadata.total_groups == 12
    assert asked == [("sapientinc/sudoku-extreme", f"{split}.csv", "dataset") for split in ("train", "test")]
    _build(tmp_path / "data", "--source-repo", "me/mine")
    assert asked[-1][0] == "me/mine"

    def fails(*_: object, **__: object) -> str:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fails)
    message = _error(capsys, tmp_path / "other")
    assert "cannot download train.csv of sapientinc/sudoku-extreme (no network)" in message


def test_a_build_replaces_a_dataset_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source_dir: Path
) -> None:
    data, options = tmp_path / "data", ("--source-dir", source_dir)
    data.mkdir()
    _build(data, *options)
    assert _build(data, *options, "--subsample-size", 4)["train"].metadata.total_groups == 4
    before = fingerprints(data)
    _error(capsys, data, *options, "--subsample-size", 400)
    assert fingerprints(data) == before

    (tmp_path / "other" / "train").mkdir(parents=True)
    assert "other/train is no part of a dataset" in _error(capsys, tmp_path / "other", *options)
    for file in (data / "notes.txt", tmp_path / "file"):
        file.write_text("mine")
        output_dir = data if file.parent == data else file
        assert f"{file.name} is no part of a dataset" in _error(capsys, output_dir, *options)
        assert file.read_text() == "mine"
    assert main(["--output-dir", str(tmp_path / "file" / "data"), *map(str, options)]) == 2
    assert "cannot build" in capsys.readouterr().err


@pytest.mark.parametrize(("number", "replacing"), [(signal.SIGKILL, True), (signal.SIGINT, False)])
def test_an_interrupted_build_leaves_no_dataset_that_opens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source_dir: Path, number: signal.Signals, replacing: bool
) -> None:
    data, building = tmp_path / "data", tmp_path / ".data.building"
    if replacing:
        _build(data, "--source-dir", source_dir)
    before = fingerprints(data) if replacing else None
    # The build takes minutes, so that the signal interrupts it.
    options = ["--output-dir", str(data), "--source-dir", str(source_dir), "--num-aug", "5000000"]
    process = subprocess.Popen(
        [sys.executable, "dataset/build_sudoku_dataset.py", *options],
        cwd=REPOSITORY,
        stderr=subprocess.PIPE,
        text=True,
        # Tests that run in the background of a shell inherit an ignored SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    while not (building / "train" / "all__labels.npy").exists():
        assert process.poll() is None
        time.sleep(0.01)
    assert main(["--output-dir", str(data), "--source-dir", str(source_dir)]) == 2
    assert "is being built by another process" in capsys.readouterr().err
    process.send_signal(number)
    _, messages = process.communicate(timeout=60)
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert messages.strip().splitlines()[-1] == "error: interrupted; nothing was written"
        assert not building.exists()
    else:
        with pytest.raises(ValueError, match="no dataset at"):
            open_split(building, "train")
    assert (fingerprints(data) if data.exists() else None) == before
    _build(data, "--source-dir", source_dir, "--num-aug", 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


def test_a_kill_between_the_renames_loses_no_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], source_dir: Path
) -> None:
    data = tmp_path / "data"
    _build(data, "--source-dir", source_dir)
    before = fingerprints(data)
    os.rename(data, tmp_path / ".data.replaced")
    assert main(["--output-dir", str(data), "--source-dir", str(source_dir), "--subsample-size", "400"]) == 2
    assert "--subsample-size is 400" in capsys.readouterr().err
    assert fingerprints(data) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]
