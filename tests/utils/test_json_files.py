"""A key that stands twice in an object of somebody else's JSON is an error, wherever it is read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dataset.arc import read_tasks
from dataset.schema import read_metadata, read_names, read_record
from dataset.text.schema import _published_special_tokens, open_text_split
from dataset.text.sources import read_documents
from dataset.text.tokenizer import FileTokenizer
from records.history import History
from sharing.exported import open_model
from sharing.published_text import find_published
from utils.errors import UserError
from utils.json_files import parse_json, read_json
from utils.safetensors_files import read_index
from viewer import pages

TASK = '{"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[1]]}]}'


def _open(file: Path) -> None:
    save_file({"x": torch.ones(2)}, file.parent / "model.safetensors", {"recursive_model": file.read_text()})
    open_model(str(file.parent / "model.safetensors"))


def _find(file: Path) -> None:
    save_file({"x": torch.ones(2)}, file.parent / "model.safetensors")
    find_published(str(file.parent))


def _solutions(file: Path) -> None:
    challenges = file.with_name("challenges.json")
    challenges.write_text(f'{{"a": {TASK}}}')
    read_tasks(challenges, file)


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("challenges.json", f'{{"a": {TASK}, "b": {TASK}, "a": {TASK}}}', read_tasks),
        ("solutions.json", '{"a": [[[2]]], "a": [[[3]]]}', _solutions),
        (
            "b.jsonl",
            '{"text": "one"}\n{"a": {"b": 0, "a": 1, "a": 2}, "text": "two"}',
            lambda file: [*read_documents(file)],
        ),
        ("identifiers.json", '["<blank>", {"a": 1, "a": 2}]', lambda file: read_names(file.parent)),
        ("test/dataset.json", '{"a": 1, "a": 2}', lambda file: read_metadata(file.parent)),
        (
            "test/dataset.json",
            '{"kind": "text", "a": 1, "a": 2}',
            lambda file: open_text_split(file.parents[1], "test"),
        ),
        ("fingerprint.json", '{"a": "1", "a": "2"}', lambda file: read_record(file.parent)),
        ("tokenizer.json", '{"model": {"a": 0, "a": 1}}', FileTokenizer),
        ("tokenizer.json", '{"added_tokens": {"a": 0, "a": 1}}', lambda file: _published_special_tokens(file, {})),
        ("index.json", '{"weight_map": {"a": "x", "a": "y"}}', read_index),
        ("model.json", '{"format": 1, "a": 1, "a": 2}', _open),
        ("config.json", '{"model_type": "hrm_text", "a": 1, "a": 2}', _find),
        ("metrics.jsonl", '{"step": 1, "a": 1, "a": 2}\n', lambda file: History(file).refresh()),
        ("results.json", '[{"a": 1, "a": 2}]', lambda file: pages.read_json(file, list)),
    ],
)
def test_a_repeated_key_is_an_error_with_file_and_key(
    tmp_path: Path, name: str, text: str, read: Callable[[Path], object]
) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    with pytest.raises(UserError, match=r"^[^\n]*$") as caught:
        read(file)
    assert name.replace("model.json", "model.safetensors") in str(caught.value) and "'a' twice" in str(caught.value)


def test_equal_keys_of_different_objects_are_allowed(tmp_path: Path) -> None:
    value = {"a": {"a": [{"a": 1}, {"a": 2}]}, "b": None}
    (tmp_path / "a.json").write_text(json.dumps(value), encoding="utf-8-sig")
    assert read_json(tmp_path / "a.json", "") == value


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000, b"9" * 5000, b'"\xff"'])
def test_what_is_no_json_is_an_error_in_one_line(text: bytes) -> None:
    with pytest.raises(UserError, match=r"^here: is no JSON \([^\n]*\); correct it$"):
        parse_json(text, "here", "correct it")
