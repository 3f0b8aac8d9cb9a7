"""A file of weights describes its model. A damaged or forged description is one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from models.text.config import GPTConfig
from sharing.exported import ExportedPuzzles, open_model
from tests.models.text.helpers import make_config
from tests.sharing.test_published import build
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


def _with_sizes_of_text() -> dict[str, Any]:
    described = _described(kind="text", max_len=40, mean_context=20, tokenizer="bytes", special_tokens={})
    del described["seq_len"], described["num_puzzle_identifiers"]
    return described


def _file(tmp_path: Path, text: str) -> str:
    file = tmp_path / "model.safetensors"
    save_file({"x": torch.ones(2)}, file, {"recursive_model": text})
    return str(file)


def test_a_description_of_puzzles_is_as_before(tmp_path: Path) -> None:
    """Earlier versions refuse further keys. Options that were added since get their defaults."""
    described, older = ExportedPuzzles.model_validate(_described()), _described()
    assert json.loads(described.as_metadata()["recursive_model"]) == older
    del older["arch"]["num_registers"], older["arch"]["loss"]["halt_weight"]
    assert open_model(_file(tmp_path, json.dumps(older))).described == described


@pytest.mark.parametrize(
    ("name", "dropped"),
    [
        ("model.module.inner.q_head.bias", "model.module.inner."),
        ("_orig_mod.q_head.bias", "_orig_mod."),
        ("_orig_mod.model.inner.q_head.bias", ""),
        ("q_head.bias", ""),
    ],
)
def test_a_model_inside_another_is_read_and_told(
    name: str, dropped: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({name: torch.ones(2)}, tmp_path / "file")
    assert open_model(str(tmp_path / "file")).read_weights().keys() == {"q_head.bias"}
    told = f"{tmp_path / 'file'}: dropped {dropped} from the names of its weights\n"
    assert capsys.readouterr().err == (told if dropped else "")


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
        (_with_sizes_of_text(), "trm reads puzzles, but the sizes are of text"),
        (
            _described(arch=make_config(GPTConfig).model_dump(mode="json")),
            "gpt reads text, but the sizes are of puzzles",
        ),
    ],
)
def test_damaged_and_forged_descriptions_are_one_line(text: Any, message: str, tmp_path: Path) -> None:
    file = _file(tmp_path, text if isinstance(text, str) else json.dumps(text))
    with pytest.raises(UserError) as caught:
        open_model(file)
    said = str(caught.value)
    assert said.startswith(file) and message in said and "\n" not in said and len(said) < 800
