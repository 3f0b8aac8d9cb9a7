"""The builder of text datasets: what it writes, and the mistakes that it refuses."""

import json
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dataset import build_text_dataset
from dataset.build_text_dataset import main
from dataset.schema import SplitName
from dataset.text.sampler import ShuffledSampler
from dataset.text.schema import TextSplit, check_text_contents, open_text_split
from dataset.text.sources import Document
from dataset.text.tokenizer import open_tokenizer
from tests.dataset.builders import refused
from tests.dataset.text.samples import write_lines


def _texts(num: int, prefix: str = "text") -> list[object]:
    return [{"text": f"{prefix} {number} " + "x" * (number % 40)} for number in range(num)]


def _problems(num: int) -> list[object]:
    return [{"instruction": f"{n} + 1", "response": str(n + 1), "task": "sums"} for n in range(num)]


def _build(output_dir: Path, *options: object) -> dict[SplitName, TextSplit]:
    assert main(["--output-dir", str(output_dir), *map(str, options)]) == 0
    return {"train": open_text_split(output_dir, "train"), "test": open_text_split(output_dir, "test")}


def _documents(split: TextSplit) -> list[str]:
    """Return the documents of a split as text, with | where an instruction ends."""
    special = split.metadata.special_tokens
    assert special is not None
    found = []
    for tokens in np.split(split.tokens, np.flatnonzero(split.tokens == special.start)[1:]):
        assert tokens[0] == special.start and tokens[-1] == special.end
        found.append("".join("|" if token == 257 else chr(token) for token in tokens[1:-1]))
    return found


def test_format(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same input gives the same bytes, which replace the dataset."""
    source = write_lines(tmp_path / "a.jsonl", *_problems(200), *_texts(100), {"text": ""})
    splits = _build(tmp_path / "data", "--source", source, "--max-len", 30)
    said = capsys.readouterr().out
    assert "\n  left out 1 documents without a text or a response\n" in said
    for name, split in splits.items():
        numbers = [len(_documents(split)), len(split.epochs[0]), len(split.tokens)]
        assert "{:<6} {:,} documents, {:,} samples, {:,} tokens\n".format(name, *numbers) in said
    documents = [document for split in splits.values() for document in _documents(split)]
    expected = [f"{n} + 1|{n + 1}" for n in range(200)] + [each["text"] for each in _texts(100)]  # type: ignore[index]
    assert sorted(documents) == sorted(expected)
    assert splits["train"].metadata.tasks == ["sums", "text"]
    monkeypatch.setattr(build_text_dataset, "BATCH_BYTES", 900)
    again = _build(tmp_path / "data", "--source", source, "--max-len", 30)
    record = json.loads((tmp_path / "data" / "fingerprint.json").read_text())
    for name, split in splits.items():
        assert record[name] == check_text_contents(split) == check_text_contents(again[name])
        places = split.epochs[0].take(slice(None))
        assert (split.tokens[places[places[:, 4] == 0][:, 2] - 1] == 257).all(), "a response follows its instruction"
        assert (places[places[:, 4] == 1][:, 1] == 1).all(), "a text has a prefix of one token"
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["fingerprint.json", "test", "train"]


def test_every_token_of_a_text_is_predicted_once(tmp_path: Path) -> None:
    split = _build(tmp_path / "data", "--source", write_lines(tmp_path / "a.jsonl", *_texts(60)), "--max-len", 7)[
        "train"
    ]
    sampler = ShuffledSampler(split, seed=0, epochs=1, capacity=7, rows_per_step=1)
    predicted = np.zeros(259, np.int64)
    for step in range(1, sampler.last_step + 1):
        labels = sampler.packed_row(step, slice(0, 1), target_only=True).labels
        predicted += np.bincount(labels[labels >= 0], minlength=259)
    expected = np.bincount(split.tokens, minlength=259)
    expected[256] = 0  # the first token of a document
    assert predicted.tolist() == expected.tolist()


def test_no_document_is_in_both_splits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems with one instruction are one document here, and no share leaves a split empty."""
    source = write_lines(tmp_path / "a.jsonl", *_texts(300), *_texts(300))
    splits = _build(tmp_path / "data", "--source", source, "--test-share", 0.3)
    train, test = (set(_documents(split)) for split in splits.values())
    assert not train & test and len(train | test) == 300 and len(test) == 90
    other = _build(tmp_path / "data", "--source", source, "--test-share", 0.3, "--seed", 1)
    of_other_seed = set(_documents(other["test"]))
    assert len(of_other_seed) == 90 and len(of_other_seed & test) < 60, "two draws of 90 share 27 on average"
    problems = [{"instruction": f"{n // 4} + 1", "response": str(n)} for n in range(400)]
    splits = _build(tmp_path / "data", "--source", write_lines(tmp_path / "b.jsonl", *problems), "--test-share", 0.3)
    train, test = ({each.split("|")[0] for each in _documents(split)} for split in splits.values())
    assert len(train) == 70 and len(test) == 30 and not train & test
    for num, share in ((2, 0.01), (2, 0.99), (10, 0.01), (10, 0.99)):
        few = write_lines(tmp_path / "c.jsonl", *_texts(num))
        splits = _build(tmp_path / "data", "--source", few, "--test-share", share)
        assert sum(numbers := [len(_documents(split)) for split in splits.values()]) == num and min(numbers) >= 1
    monkeypatch.setattr(build_text_dataset, "FEW_BYTES", 100)  # the share of more is nearly exact
    train, test = (set(_documents(split)) for split in _build(tmp_path / "data", "--source", source).values())
    assert not train & test and len(train | test) == 300 and 5 < len(test) < 30


def test_a_trained_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs pip install -r requirements-text.txt")
    source = write_lines(tmp_path / "a.jsonl", *_texts(300), *_problems(100))
    unseen = ["--test-source", write_lines(tmp_path / "b.jsonl", *({"text": f"{n} " + 30 * "qv"} for n in range(30)))]
    trained = _build(tmp_path / "data", "--source", source, *unseen, "--train-bpe", 300)["train"]
    assert "qv" not in (tmp_path / "data" / "tokenizer.json").read_text(), "it has learnt from the test split"
    tokenizer = open_tokenizer(trained)
    assert trained.metadata.tokenizer == tokenizer.name and len(tokenizer.name) == 64
    assert "text 7 xxxxxxx" in tokenizer.decode(trained.tokens.tolist())
    given = _build(tmp_path / "given", "--source", source, *unseen, "--tokenizer", tmp_path / "data/tokenizer.json")
    assert check_text_contents(given["train"]) == check_text_contents(trained)

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"+": 0, "1": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "words.json"))
    sums = write_lines(tmp_path / "sums.jsonl", *_problems(100))
    _build(tmp_path / "words", "--source", sums, "--tokenizer", tmp_path / "words.json")
    assert "unknown 198 tokens: the tokenizer lacks a part" in capsys.readouterr().out
    tokenizers.Tokenizer(tokenizers.models.BPE({"+": 0}, [])).save(str(tmp_path / "letters.json"))
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
    for file, options, message in (
        (sums, ["--tokenizer", tmp_path / "letters.json"], "1: the tokenizer has no token for this text or response"),
        (tmp_path / "latin.txt", ["--train-bpe", 300], "latin.txt, before byte 3: is not UTF-8"),
        (tmp_path / "latin.txt", ["--tokenizer", tmp_path / "words.json"], "before byte 3: is not UTF-8"),
    ):
        assert message in refused(main, capsys, tmp_path / "x", "--source", file, *options)


def test_test_sources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = write_lines(tmp_path / "a.jsonl", *_problems(50))
    test = write_lines(tmp_path / "b.jsonl", *_problems(10), {"text": ""})
    splits = _build(tmp_path / "data", "--source", train, "--test-source", test)
    expected = [f"{n} + 1|{n + 1}" for n in range(50)]
    assert [_documents(splits[name]) for name in ("test", "train")] == [expected[:10], expected[10:]]
    said = capsys.readouterr().out
    assert "max_len 10\n" in said and "left out 1 documents without a text" in said


def test_a_large_file_needs_little_memory(tmp_path: Path) -> None:
    """The file has 16 MB, and the limit is 10 MB."""
    (tmp_path / "a.txt").write_text("".join(f"{number:099d}\n" for number in range(160_000)))
    tracemalloc.start()
    try:
        _build(tmp_path / "data", "--source", tmp_path / "a.txt")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000, f"building took {peak:,} bytes"


def test_long_problems_can_be_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "a.jsonl", *_problems(100))
    splits = _build(tmp_path / "data", "--source", source, "--max-len", 9, "--skip-long", "--test-share", 0.5)
    left = [document for split in splits.values() for document in _documents(split)]
    assert sorted(left) == sorted(f"{n} + 1|{n + 1}" for n in range(10) if len(f"{n}{n + 1}") < 4)
    assert f"left out {100 - len(left)} documents longer than --max-len" in capsys.readouterr().out


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "a.jsonl", *_problems(100))
    one = write_lines(tmp_path / "one.jsonl", *_texts(1))
    for options, message in (
        (["--source", source, "--max-len", 8], "the problem reads 9 tokens, above --max-len 8"),
        (["--source", source, "--test-share", 1.5], "--test-share is 1.5"),
        (["--source", one], "no document is for testing"),
        (["--source", source, "--test-source", source], "no document is for training (100 for training"),
        (["--source", source, "--separator", " + 1"], "no plain text in --source has the separator ' + 1'"),
        (["--source", source, "--seed", 10**80], "; give a number below 2^64"),
        (["--source", source, "--train-bpe", 5], "--train-bpe is 5; it must be at least 260"),
        (["--source", source, "--test-source", source, "--test-share", 0.1], "exclude each other"),
        (["--source", source, "--train-bpe", 300, "--tokenizer", source], "exclude each other"),
        (["--source", source, "--generate-num", 5], "--generate-num needs --generate"),
        ([], "there is nothing to read"),
    ):
        found = refused(main, capsys, tmp_path / "data", *options)
        assert message in found, found


def test_a_separator_divides_documents(tmp_path: Path) -> None:
    (tmp_path / "stories").mkdir()
    stories = tmp_path / "stories" / "all.txt"
    stories.write_text("One story.\n<|endoftext|>\nTwo stories.\n<|endoftext|>\nThree stories.\n")
    other = write_lines(tmp_path / "a.jsonl", *_texts(20))
    divided = _build(tmp_path / "data", "--source", stories.parent, other, "--separator", "<|endoftext|>")
    found = {each for split in divided.values() for each in _documents(split)}
    assert {"One story.", "Two stories.", "Three stories.\n"} < found
    _build(tmp_path / "test", "--source", other, "--test-source", stories.parent, "--separator", "<|endoftext|>")
    record = json.loads((tmp_path / "data" / "fingerprint.json").read_text())["builder"]
    assert record["program"] == "build_text_dataset" and "output_dir" not in record
    assert (record["separator"], record["source"][0]) == ("<|endoftext|>", str(stories.parent))


def test_files_and_generated_problems_make_one_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package reasoning-gym is optional, so the problems come from a generator of the test."""

    def sums(tasks: list[str], num: int, seed: int) -> Iterator[Document]:
        assert (num, seed) == (30, 4)
        for n in range(num * len(tasks)):
            yield Document(f"problem {n}", f"{n} + 1".encode(), str(n + 1).encode(), "sums")

    monkeypatch.setattr(build_text_dataset, "generate", sums)
    source = write_lines(tmp_path / "a.jsonl", *_texts(20))
    splits = _build(tmp_path / "data", "--source", source, "--generate", "sums", "--generate-num", 30, "--seed", 4)
    assert splits["train"].metadata.tasks == ["text", "sums"]
    documents = [document for split in splits.values() for document in _documents(split)]
    assert len(documents) == 50 and "29 + 1|30" in documents
    options = ("--test-source", source, "--generate", "sums", "--generate-num", 30, "--seed", 4)
    splits = _build(tmp_path / "tested", *options)
    assert [len(_documents(split)) for split in splits.values()] == [30, 20], "problems are for training"
