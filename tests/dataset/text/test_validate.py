"""Checks of text datasets by dataset.validate, as a user calls it."""

from pathlib import Path

import numpy as np
import pytest

from dataset import validate
from dataset.build_text_dataset import main as build
from tests.dataset.text.samples import write_hrm_text, write_lines, write_split


def _report(capsys: pytest.CaptureFixture[str], path: Path, *options: str) -> tuple[int, list[str]]:
    status = validate.main([str(path), *options])
    return status, capsys.readouterr().out.splitlines()


def test_what_the_builder_makes_is_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [{"text": f"the same beginning, {number} and the same end" * 3} for number in range(60)]
    problems = [{"instruction": f"{n} + 1", "response": str(n + 1)} for n in range(60)]
    source = write_lines(tmp_path / "a.jsonl", *texts, *problems)
    assert build(["--output-dir", str(tmp_path / "data"), "--source", str(source), "--max-len", "20"]) == 0
    built = capsys.readouterr().out
    status, lines = _report(capsys, tmp_path / "data")
    assert (status, lines[-1]) == (0, "ok: 0 errors, 0 warnings"), "texts that begin or end alike are no leak"
    assert "samples of 8 to 20 tokens (mean" in lines[0]
    assert lines[1].split()[-1] in built, "the fingerprint must be that of the builder"


def _problems(first: int, num: int) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens and samples of problems whose instructions are numbers."""
    tokens = np.array([[256, number, 257, 1, 258] for number in range(first, first + num)], np.uint16)
    table = np.array([[5 * number, 3, 2, 0] for number in range(num)])
    return tokens.reshape(-1), table


def _texts(first: int) -> tuple[np.ndarray, np.ndarray]:
    """Return texts in samples of 4 and 3 tokens to read. Only the last token differs."""
    tokens = np.array([[256, 1, 2, 3, 4, 5, number, 258] for number in range(first, first + 20)], np.uint16)
    table = np.array([[8 * n + start, 1, length, 0] for n in range(20) for start, length in ((0, 4), (4, 3))])
    return tokens.reshape(-1), table


def test_a_leak_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, train, test, first, message in (
        ("problems", _problems(0, 50), _problems(40, 20), 40, "samples.npy (10 of 20 test examples are, 50.00%)"),
        ("texts", _texts(0), _texts(18), 36, "samples.npy (2 of 20 test examples"),
    ):
        write_split(tmp_path / name / "train", *train)
        write_split(tmp_path / name / "test", *test)
        status, lines = _report(capsys, tmp_path / name)
        assert (
            status == 1
            and f"sample 0 of {tmp_path / name}/test/samples.npy is in the training data too, sample {first} of "
            in lines[0]
        )
        assert message in lines[0]
        status, lines = _report(capsys, tmp_path / name, "--allow-leak")
        assert status == 0 and lines[0].startswith("warning: ") and lines[-1] == "ok: 0 errors, 1 warning"


def test_every_error_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens, table = _problems(0, 50)
    write_split(tmp_path / "apart/train", tokens, table)
    write_split(tmp_path / "apart/test", *_problems(60, 5), tasks=["sums"], vocab_size=260)
    tokens[7] = 300
    write_split(tmp_path / "wrong/train", tokens, table)
    write_split(tmp_path / "wrong/test", *_problems(60, 5), num_samples=6)
    for name, first, second in (
        (
            "wrong",
            "train/tokens.npy: row 7 has token 300",
            "test/samples.npy: has 5 rows, but num_samples in dataset.json",
        ),
        ("apart", "has vocab_size 259, but ", "dataset.json: tasks are not those of train"),
    ):
        status, lines = _report(capsys, tmp_path / name)
        assert status == 1 and lines[-1] == "wrong: 2 errors, 0 warnings"
        assert any(first in line for line in lines[:2]) and any(second in line for line in lines[:2])


def test_a_folder_of_hrm_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("inst_start", "inst_len", "resp_start", "resp_len")
    epoch = {name: np.array(values) for name, values in zip(names, ([0, 9], [3, 4], [3, 13], [2, 6]), strict=True)}
    write_hrm_text(tmp_path / "data", np.arange(30, dtype=np.int32), [epoch, epoch])
    status, lines = _report(capsys, tmp_path / "data")
    assert status == 0 and lines[1].startswith("train  2 samples in each of 2 epochs of 4 to 9 tokens (mean 6)")
    write_hrm_text(tmp_path / "wrong", np.full(30, 64, np.int32), [epoch])
    status, lines = _report(capsys, tmp_path / "wrong")
    assert status == 1 and "tokens.npy: row 0 has token 64, but 0 to 63 are possible" in lines[0]
