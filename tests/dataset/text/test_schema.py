"""Opening and checking splits of text: what is accepted, and what each fault is called."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset.schema import unchanged
from dataset.text import schema
from dataset.text.schema import TextSplit, check_text_contents, kind_of_data, open_text_split, require_same_tokens
from tests.dataset.builders import put
from tests.dataset.text.samples import random_split, write_hrm_text
from utils.errors import UserError


def _change(path: Path, **changed: object) -> None:
    file = path / "train" / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def _edit(path: Path, array: str, edit: Callable[[np.ndarray], object]) -> None:
    """Change an array in place, so that its shape stays."""
    values = np.load(path / "train" / array, mmap_mode="r+")
    edit(values)
    values.flush()


def test_a_split_is_opened_as_it_was_written(tmp_path: Path) -> None:
    split = random_split(tmp_path, num=20, longest=30)
    assert kind_of_data(tmp_path) == "text" and not split.is_published_form
    assert isinstance(split.tokens, np.memmap) and split.tokens.dtype == np.uint16
    with unchanged(split.files):
        table = np.load(tmp_path / "train" / "samples.npy")
    places = split.samples(7).take(np.array([3, 1]))
    assert places[:, [0, 1, 3, 4]].tolist() == table[[3, 1]].tolist()
    assert places[:, 2].tolist() == (table[[3, 1], 0] + table[[3, 1], 1]).tolist()
    assert split.samples(0).lengths().tolist() == (table[:, 1] + table[:, 2] - 1).tolist()
    for num_texts, form in ((20, "text"), (11, "text"), (10, "instruction")):
        lens_N = np.where(np.arange(20) < num_texts, 1, 2)
        assert replace(split, epochs=(replace(split.epochs[0], instruction_len=lens_N),)).form == form
    with pytest.raises(UserError, match=r"samples.npy was written to or replaced"), unchanged(split.files):
        os.utime(tmp_path / "train" / "samples.npy", ns=(0, 0))  # while it is read
    os.truncate(tmp_path / "train" / "tokens.npy", 200)
    with pytest.raises(UserError, match=r"tokens.npy was written to or replaced"), unchanged(split.files):
        pytest.fail("the change is noticed before the file is read")


def test_the_fingerprint_depends_on_every_file(tmp_path: Path) -> None:
    random_split(tmp_path, num=20, longest=30)

    def fingerprint() -> str:
        return check_text_contents(open_text_split(tmp_path, "train"))

    found = [fingerprint()]
    _edit(tmp_path, "tokens.npy", put(5, 77))
    found.append(fingerprint())
    _edit(tmp_path, "samples.npy", lambda table: table.__setitem__((4, 3), 1 - table[4, 3]))
    found.append(fingerprint())
    _change(tmp_path, tasks=["a", "b"])
    found.append(fingerprint())
    assert len(set(found)) == 4
    (tmp_path / "fingerprint.json").write_text(json.dumps({"train": found[-1]}))
    assert fingerprint() == found[-1]
    _edit(tmp_path, "tokens.npy", put(5, 78))
    with pytest.raises(UserError, match=r"train changed after it was built"):
        fingerprint()


@pytest.mark.parametrize(
    "damage, message",
    [
        (
            lambda path: _edit(path, "tokens.npy", put(7, 259)),
            "row 7 has token 259, but 0 to 258 are possible; rebuild",
        ),
        *(
            (partial(_edit, array="samples.npy", edit=put(place, value)), "samples.npy: sample 3 is empty, longer")
            for place, value in (((3, 1), 0), ((3, 0), -1), ((3, 2), 10**6), ((3, 2), 0), ((3, 1), 40), ((3, 3), 2))
        ),
        (lambda path: os.truncate(path / "train" / "tokens.npy", 200), "tokens.npy: cannot be mapped .*rebuild"),
        (lambda path: (path / "train" / "samples.npy").unlink(), "samples.npy is missing; rebuild"),
        (lambda path: _change(path, num_tokens=12345), "tokens.npy: has .* rows, but num_tokens .* is 12,345"),
        (lambda path: _change(path, num_samples=3), "samples.npy: has 20 rows, but num_samples .* is 3"),
        (lambda path: _change(path, vocab_size=258), "dataset.json: special_tokens are above vocab_size, 258"),
        (lambda path: _change(path, tokenizer="gpt2"), "dataset.json: tokenizer: String should match"),
        (lambda path: _change(path, tokenizer="0" * 64), "tokenizer.json is missing, but the tokens were made"),
        (lambda path: np.save(path / "train" / "tokens.npy", np.zeros(9)), "tokens.npy: holds float64"),
        (lambda path: np.save(path / "train" / "samples.npy", np.ones((20, 3), int)), "rows have 3 numbers, not 4"),
    ],
)
def test_a_damaged_split_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object], message: str
) -> None:
    monkeypatch.setattr(schema, "CHUNK_BYTES", 80)
    random_split(tmp_path, num=20, longest=30)
    damage(tmp_path)
    with pytest.raises(UserError, match=message):
        check_text_contents(open_text_split(tmp_path, "train"))


def test_a_changed_tokenizer_is_refused(tmp_path: Path) -> None:
    random_split(tmp_path, num=20, longest=30)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    _change(tmp_path, tokenizer=hashlib.sha256(b"{}").hexdigest())
    split = open_text_split(tmp_path, "train")
    tokenizer.write_text("{ }")
    with pytest.raises(UserError, match=r"tokenizer.json is \w{12}, but the tokens were made by the tokenizer \w{12}"):
        open_text_split(tmp_path, "train")
    other = random_split(tmp_path / "other", num=20, longest=30)
    with pytest.raises(UserError, match=r"has tokenizer bytes, but .* has .*; build both with one tokenizer"):
        require_same_tokens(other, split)
    other = replace(split, metadata=split.metadata.model_copy(update={"special_tokens": None}))
    with pytest.raises(UserError, match=r"has special_tokens start=256 .*, but .* has None"):
        require_same_tokens(split, other)
    require_same_tokens(split, split)


# ---- HRM-Text's own format -----------------------------------------------------------------------


def _hrm_text(path: Path, num_epochs: int = 2, dtype: type[np.integer[Any]] = np.int64) -> TextSplit:
    rng = np.random.default_rng(0)
    whole = {
        "inst_start": np.array([0, 12, 30]),
        "inst_len": np.array([3, 4, 5]),
        "resp_start": np.array([3, 20, 35]),  # the second response lies elsewhere
        "resp_len": np.array([2, 6, 1]),
    }
    orders = [rng.permutation(3) for _ in range(num_epochs)]
    epochs = [{name: array[order].astype(dtype) for name, array in whole.items()} for order in orders]
    write_hrm_text(path, np.arange(40, dtype=np.int32), epochs)
    return open_text_split(path, "train")


@pytest.mark.parametrize("dtype", [np.int32, np.uint64])
def test_a_folder_of_hrm_text_is_opened_unchanged(tmp_path: Path, dtype: type[np.integer[Any]]) -> None:
    split = _hrm_text(tmp_path / "data", dtype=dtype)
    assert split.is_published_form and kind_of_data(tmp_path / "data") == "text"
    assert (split.metadata.vocab_size, split.metadata.max_len, split.metadata.tokenizer) == (64, 9, "unknown")
    assert split.metadata.special_tokens is None
    assert len(split.epochs) == 2 and split.samples(3) is split.epochs[1]
    for samples in split.epochs:
        places = samples.take(slice(None))
        assert sorted(samples.lengths().tolist()) == [4, 5, 9]
        assert sorted(places[:, 2].tolist()) == [3, 20, 35] and (places[:, 4] == 0).all()
    assert {file.path.parent.name for file in split.files} == {"data", "epoch_0", "epoch_1"}
    first = check_text_contents(split)
    assert first == check_text_contents(open_text_split(tmp_path / "data", "train"))
    with pytest.raises(UserError, match=r"is HRM-Text's training data without a test split; put one in .*test"):
        open_text_split(tmp_path / "data", "test")
    for place, value in (("resp_start", 39), ("inst_start", 39)):
        file = tmp_path / "data" / "epoch_1" / f"{place}.npy"
        array = np.load(file)
        np.save(file, np.where(np.load(file.with_name("inst_len.npy")) == 4, value, array).astype(dtype))
        with pytest.raises(UserError, match=rf"epoch_1.*sample \d is empty, longer than .*{value}"):
            check_text_contents(open_text_split(tmp_path / "data", "train"))
        np.save(file, array)
    (tmp_path / "data").rename(tmp_path / "test")  # a split may be such a folder
    assert open_text_split(tmp_path, "test").is_published_form


def test_the_special_tokens_of_hrm_text_are_those_of_its_tokenizer(tmp_path: Path) -> None:
    _hrm_text(tmp_path / "data")
    added = [{"id": 60 + number, "content": f"<{letter}>"} for number, letter in enumerate("abc")]
    tokenizer = json.dumps({"added_tokens": added})
    (tmp_path / "data" / "tokenizer.json").write_text(tokenizer)
    metadata = open_text_split(tmp_path / "data", "train").metadata
    assert metadata.tokenizer == hashlib.sha256(tokenizer.encode()).hexdigest()
    assert metadata.special_tokens is not None
    assert metadata.special_tokens.model_dump() == {"start": 60, "end_of_instruction": 61, "end": 62}


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda path: os.truncate(path / "epoch_0" / "resp_len.npy", 140), "resp_len.npy: cannot be mapped"),
        (lambda path: np.save(path / "epoch_0" / "resp_len.npy", np.ones(2, int)), "has 2 entries, but inst_start"),
        (lambda path: (path / "epoch_0").rename(path / "epoch_9"), "epoch_0 is missing; rebuild"),
        (
            lambda path: (path / "metadata.json").write_text('{"max_seq_len": 9, "tokenizer_info": {}}'),
            re.escape("metadata.json: tokenizer_info.vocab_size is None, no number of tokens"),
        ),
    ],
)
def test_a_damaged_folder_of_hrm_text_is_refused(
    tmp_path: Path, damage: Callable[[Path], object], message: str
) -> None:
    _hrm_text(tmp_path / "data", num_epochs=1)
    damage(tmp_path / "data")
    with pytest.raises(UserError, match=message):
        open_text_split(tmp_path / "data", "train")
