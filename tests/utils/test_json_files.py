"""A key that stands twice in an object of somebody else's JSON is an error, wherever it is read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dataset.arc import read_tasks
from dataset.schema import read_metadata, read_names, read_record
from dataset.text.schema import _published_special_tokens, kind_of_data, open_text_split
from dataset.text.sources import read_documents
from dataset.text.tokenizer import FileTokenizer
from sharing.exported import open_model
from sharing.published_text import find_published
from utils.errors import UserError
from utils.json_files import parse_json, read_json
from utils.run.history import History
from utils.safetensors_files import read_index
from viewer import pages

TASK = '{"train": [{"input": [[1]], "output": [[2]]}], "test": [{"input": [[1]]}]}'


def _described(file: Path) -> None:
    save_file({"x": torch.ones(2)}, file, {"recursive_model": file.read_text()})
    open_model(str(file))


def _published(file: Path) -> None:
    save_file({"x": torch.ones(2)}, file.parent / "model.safetensors")
    find_published(str(file.parent))


def _documents(file: Path) -> None:
    list(read_documents(file))


def _text(file: Path) -> None:
    open_text_split(file.parents[1], "test")


def _solutions(file: Path) -> None:
    challenges = file.with_name("challenges.json")
    challenges.write_text(f'{{"a": {TASK}}}')
    read_tasks(challenges, file)


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("challenges.json", f'{{"a": {TASK}, "b": {TASK}, "a": {TASK}}}', read_tasks),
        ("task.json", f'{{"a": 1, {TASK[1:-1]}, "a": 2}}', read_tasks),
        ("solutions.json", '{"a": [[[2]]], "a": [[[3]]]}', _solutions),
        (
            "b.jsonl",
            '{"text": "one"}\n{"a": {"b": 0, "a": 1, "a": 2}, "text": "two"}',
            _documents,
        ),
        ("identifiers.json", '["<blank>", {"a": 1, "a": 2}]', lambda file: read_names(file.parent)),
        ("test/dataset.json", '{"a": 1, "a": 2}', lambda file: read_metadata(file.parent)),
        (
            "test/dataset.json",
            '{"kind": "text", "a": 1, "a": 2}',
            _text,
        ),
        ("fingerprint.json", '{"a": "1", "a": "2"}', lambda file: read_record(file.parent)),
        ("tokenizer.json", '{"model": {"a": 0, "a": 1}}', FileTokenizer),
        ("tokenizer.json", '{"added_tokens": {"a": 0, "a": 1}}', lambda file: _published_special_tokens(file, {})),
        ("index.json", '{"weight_map": {"a": "x", "a": "y"}}', read_index),
        ("model.safetensors", '{"format": 1, "a": 1, "a": 2}', _described),
        ("config.json", '{"model_type": "hrm_text", "a": 1, "a": 2}', _published),
        ("metrics.jsonl", '{"step": 1, "a": 1, "a": 2}\n', lambda file: History(file).refresh()),
        ("results.json", '[{"a": 1, "a": 2}]', pages.read_json),
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
    assert name in str(caught.value) and "'a' twice" in str(caught.value)


def test_the_kind_of_a_dataset_is_asked_without_an_error(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "dataset.json").write_text('{"kind": "text", "kind": "text"}')
    assert kind_of_data(tmp_path) != "text"


def test_equal_keys_of_different_objects_are_allowed(tmp_path: Path) -> None:
    value = {"a": {"a": [{"a": 1}, {"a": 2}]}, "b": None}
    (tmp_path / "a.json").write_text(json.dumps(value), encoding="utf-8-sig")
    assert read_json(tmp_path / "a.json", "") == value


@pytest.mark.parametrize("text", [b"", b"{", b"[" * 100_000, b"9" * 5000, b'"\xff"'])
def test_what_is_no_json_is_an_error_in_one_line(text: bytes) -> None:
    with pytest.raises(UserError, match=r"^here: is no JSON \([^\n]*\); correct it$"):
        parse_json(text, "here", "correct it")
