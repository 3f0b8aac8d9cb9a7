"""Pages about text datasets by dataset.show, as a user calls it."""

import json
from pathlib import Path

import numpy as np
import pytest

from dataset import show
from dataset.build_text_dataset import main as build
from tests.dataset.text.samples import write_hrm_text, write_lines


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    problems = [{"instruction": f"{n} + 1", "response": str(n + 1), "task": "sums"} for n in range(40)]
    source = write_lines(folder / "a.jsonl", *problems, *({"text": f"text {n}\n\x1b[2J"} for n in range(40)))
    assert build(["--output-dir", str(folder / "data"), "--source", str(source)]) == 0
    return folder / "data"


def test_the_page(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show.main([str(built), "--row", "0", "--num", "100"]) == 0
    out = capsys.readouterr().out
    record = json.loads((built / "fingerprint.json").read_text())
    assert out.startswith(f"{built}\n  text     259 tokens (bytes), max_len 13\n  train    76 samples of 8 to 13")
    assert f"  sha256   train {record['train']} (recorded)\n" in out
    assert ": sums, 8 + 3 tokens\n12 + 1\n-> 13\n" in out
    assert "text 38\n?[2J\n" in out and "\x1b" not in out, "control characters must not reach the terminal"
    assert show.main([str(built), "--split", "test", "--num", "1", "--fingerprint"]) == 0
    out = capsys.readouterr().out
    assert out.count("test sample ") == 1 and f"{record['test']} (computed)" in out
    assert show.main([str(built), "--row", "99"]) == 2
    assert "--row is 99, but " in capsys.readouterr().err


def test_tokens_without_a_tokenizer_are_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ("inst_start", "inst_len", "resp_start", "resp_len")
    epoch = {name: np.array([value]) for name, value in zip(names, (2, 3, 5, 2), strict=True)}
    write_hrm_text(tmp_path / "data", np.arange(30, dtype=np.int32), [epoch])
    assert show.main([str(tmp_path / "data")]) == 0
    assert capsys.readouterr().out.endswith("train sample 0: text, 3 + 2 tokens\n2 3 4\n-> 5 6\n")
