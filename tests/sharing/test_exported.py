"""A file of weights describes its model. A damaged or forged description is one line."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from models.text.config import GPTConfig
from sharing.exported import ExportedPuzzles, ExportedText, open_model
from tests.models.text.helpers import make_config
from tests.sharing.test_published import build
from training.data import TextSizes
from utils.errors import UserError


def _described(**changes: Any) -> dict[str, Any]:
    model = build("trm")
    return {
        "format": 1,
        "arch": model.config.model_dump(mode="json"),
        "seq_len": 6,
        "vocab_size": 7,
        "num_puzzle_identifiers": 5,
        "data": ["sudoku-6x6"],
        "run": "demo/happy-otter",
        "step": 12,
    } | changes


def _text(**changes: Any) -> dict[str, Any]:
    """Return the description of a model of text."""
    return {
        "format": 1,
        "kind": "text",
        "arch": make_config(GPTConfig).model_dump(mode="json"),
        "vocab_size": 512,
        "max_len": 40,
        "mean_context": 20,
        "tokenizer": "bytes",
        "special_tokens": {"start": 256, "end_of_instruction": 257, "end": 258},
        "form": "text",
        "data": ["book"],
        "run": "demo/happy-otter",
        "step": 12,
    } | changes


def _file(tmp_path: Path, text: str) -> str:
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(2)}, file, {"recursive_model": text})
    return str(file)


def test_a_description_of_a_model_of_text_survives_the_file(tmp_path: Path) -> None:
    described = ExportedText.model_validate(_text())
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(2)}, file, described.as_metadata())
    assert open_model(str(file)).described == described
    assert described.sizes.keys() == {field.name for field in dataclasses.fields(TextSizes)}


def test_files_without_a_description_have_none(tmp_path: Path) -> None:
    torch.save({"x": torch.ones(2)}, tmp_path / "a.pt")
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors", {"format": "pt"})
    assert [open_model(str(tmp_path / f"a.{kind}")).described for kind in ("pt", "safetensors")] == [None, None]


def test_a_description_of_puzzles_is_as_before(tmp_path: Path) -> None:
    """Earlier versions refuse further keys. Options that were added since get their defaults."""
    described, older = ExportedPuzzles.model_validate(_described()), _described()
    assert json.loads(described.as_metadata()["recursive_model"]) == older
    del older["arch"]["num_registers"], older["arch"]["loss"]["halt_weight"]
    assert open_model(_file(tmp_path, json.dumps(older))).described == described


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no JSON"),
        ("[]", "no description of format 1"),
        (_described(format=2), "no description of format 1"),
        (_described(arch={"name": "os.system"}), "'os.system'"),
        (_described(arch=_described()["arch"] | {"hidden_size": "${oc.env:HOME}"}), "arch.hidden_size"),
        (_described(arch=_described()["arch"] | {"code": "x"}), "unknown key 'arch.code'"),
        (_described(seq_len=2**40), "seq_len"),
        (_text(arch=_described()["arch"]), "trm reads puzzles, but the sizes are of text"),
        (_described(arch=_text()["arch"]), "gpt reads text, but the sizes are of puzzles"),
    ],
)
def test_damaged_and_forged_descriptions_are_one_line(text: Any, message: str, tmp_path: Path) -> None:
    file = _file(tmp_path, text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(UserError) as caught:
        open_model(file)
    said = str(caught.value)
    assert said.startswith(file) and message in said and "\n" not in said and len(said) < 800
