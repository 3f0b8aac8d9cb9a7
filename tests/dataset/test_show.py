"""dataset/show.py shows the contents of a dataset."""
# N = examples, S = tokens of an example

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from dataset.build_sudoku_dataset import main as build_sudoku
from dataset.build_text_dataset import main as build_text
from dataset.builder import SplitWriter, finish
from dataset.show import main
from tests.dataset.text.samples import write_hrm_text, write_lines


@pytest.fixture(scope="module")
def sudoku(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("show") / "data"
    options = ["--generate", "8", "--generate-test", "5", "--box", "2x2", "--num-aug", "2"]
    assert build_sudoku(["--output-dir", str(path), *options]) == 0
    return path


@pytest.fixture(scope="module")
def own_task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset of an unknown task: 3x3 tokens of 12 kinds."""
    path = tmp_path_factory.mktemp("show") / "data"
    path.mkdir()
    inputs_NS = np.arange(12 * 9, dtype=np.uint8).reshape(12, 9) % 11 + 1
    labels_NS = inputs_NS.copy()
    labels_NS[:, 0], labels_NS[:, 8] = inputs_NS[:, 0] % 11 + 1, 0
    for split in ("train", "test"):
        with SplitWriter(path / split, seq_len=9, vocab_size=12, num_puzzle_identifiers=7) as writer:
            writer.add(inputs_NS, labels_NS, np.full(6, 2), np.arange(1, 7))
            writer.end_groups(np.array([3, 3]))
    names = ["<blank>", *(f"rule {letter}" for letter in "abcdef")]
    finish(path, names, {"program": "by_hand", "colour": None, "n": 3})
    return path


def _shown(capsys: pytest.CaptureFixture[str], *arguments: object) -> list[str]:
    assert main([str(argument) for argument in arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_sizes_and_fingerprints(
    sudoku: Path, own_task: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded = json.loads((sudoku / "fingerprint.json").read_text())
    lines = _shown(capsys, sudoku, "--num", 0)
    assert lines[1] == "  task     sudoku 2x2: 16 tokens of 6 kinds, padding 0, label 0 is ignored"
    assert lines[3].split() == ["train/all", "8", "24", "24", "1", "to", "1", "1", "of", "1"]
    assert lines[5:7] == [f"  sha256   {split:<5} {recorded[split]} (recorded)" for split in ("train", "test")]
    lines = _shown(capsys, own_task, "--num", 0)
    assert lines[1].startswith("  task     unknown: 9 tokens of 12 kinds")
    assert lines[3].split() == ["train/all", "2", "6", "12", "2", "to", "2", "6", "of", "7"]
    assert lines[-1] == "  built by by_hand n=3"
    copy = Path(shutil.copytree(sudoku, tmp_path / "copy"))
    (copy / "fingerprint.json").unlink()
    assert "  sha256   train not recorded; --fingerprint computes it" in _shown(capsys, copy, "--num", 0)
    assert f"  sha256   test  {recorded['test']} (computed)" in _shown(capsys, copy, "--num", 0, "--fingerprint")


def test_options_choose_the_rows_and_unknown_tasks_are_numbers(
    own_task: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows(*arguments: object) -> list[str]:
        return [line.split(":")[0] for line in _shown(capsys, own_task, *arguments) if " row " in line]

    assert rows("--split", "test", "--row", 3, "--num", 1) == ["test/all row 3"]
    assert rows("--row", 10, "--num", 5) == ["train/all row 10", "train/all row 11"]
    assert rows() == rows("--seed", 0) and len(rows()) == 3
    assert rows("--num", 12) == [f"train/all row {number}" for number in range(12)]
    assert any("\x1b[36m" in line for line in _shown(capsys, own_task, "--color"))
    assert len({tuple(rows("--seed", seed)) for seed in range(5)}) > 1
    assert _shown(capsys, own_task, "--row", 8, "--num", 1)[-4:] == [
        "train/all row 8: group 1, puzzle 4, identifier 5 rule e",
        " 7  8  9    8  8  9",
        "10 11  1   10 11  1",
        " 2  3  4    2  3  0",
    ]
    assert main([str(own_task), "--row", "12"]) == 2
    assert "has rows 0 to 11" in capsys.readouterr().err


# ---- text ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    problems = [{"instruction": f"{n} + 1", "response": str(n + 1), "task": "sums"} for n in range(40)]
    source = write_lines(folder / "a.jsonl", *problems, *({"text": f"text {n}\n\x1b[2J"} for n in range(40)))
    assert build_text(["--output-dir", str(folder / "data"), "--source", str(source)]) == 0
    return folder / "data"


def test_the_page_of_a_text(text_data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(text_data), "--row", "0", "--num", "100"]) == 0
    out = capsys.readouterr().out
    record = json.loads((text_data / "fingerprint.json").read_text())
    assert out.startswith(f"{text_data}\n  text     259 tokens (bytes), max_len 13\n  train    76 samples of 8 to 13")
    assert f"  sha256   train {record['train']} (recorded)\n" in out
    assert ": sums, 8 + 3 tokens\n12 + 1\n-> 13\n" in out
    assert f"sums {out.count(': sums, ')}, text {out.count(': text, ')}\n" in out
    assert "text 38\n?[2J\n" in out and "\x1b" not in out, "control characters must not reach the terminal"
    assert main([str(text_data), "--split", "test", "--num", "9", "--fingerprint"]) == 0
    out = capsys.readouterr().out
    assert out.count("test sample ") == 4 and f"{record['test']} (computed)" in out
    assert main([str(text_data), "--row", "99"]) == 2
    assert "--row is 99, but " in capsys.readouterr().err


def test_tokens_without_a_tokenizer_are_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("inst_start", "inst_len", "resp_start", "resp_len")
    epoch = {name: np.array([value]) for name, value in zip(names, (2, 3, 14, 2), strict=True)}
    write_hrm_text(tmp_path / "data", np.arange(30, dtype=np.int32), [epoch])
    assert main([str(tmp_path / "data")]) == 0
    assert capsys.readouterr().out.endswith("train sample 0: text, 3 + 2 tokens\n2 3 4\n-> 14 15\n")
