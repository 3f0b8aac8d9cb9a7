"""Weights of the published programs fit our models."""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from models import ArchConfig
from models.base import RecursiveModel
from models.text.config import HRMTextConfig, RINSTextConfig, TextConfig, TransformerTextConfig, TRMTextConfig
from sharing.published import Kind, PuzzleTable, arch_of, fit_one_by_one, to_ours, to_published
from sharing.weights_file import open_weights
from tests.models.helpers import build_puzzle_arch
from tests.models.text.helpers import make_config, make_model
from utils.command_line import read_config
from utils.errors import UserError

REFERENCE = Path(__file__).resolve().parents[1] / "reference"
FOLDERS = ("hrm_rope", "hrm_learned", "hrm_softmax", "trm_attention", "trm_mlp", "urm_adam", "urm_muon")
NUM_PUZZLES, VOCAB_SIZE = 5, 7
TABLE = "puzzle_embedding.weight"


@functools.cache
def _config(arch: str, *overrides: str) -> Any:
    sizes = ["hidden_size=32", "num_heads=2", "forward_dtype=float32", *overrides]
    sizes += [] if arch == "urm" else ["L_layers=2"]
    options = read_config("pretrain", [f"arch={arch}", *(f"arch.{size}" for size in sizes)])["arch"]
    return TypeAdapter(ArchConfig).validate_python(options)


def build(arch: str, *overrides: str, num_puzzles: int = NUM_PUZZLES) -> RecursiveModel:
    """Return a small initialised model with the options of config/arch."""
    model = build_puzzle_arch(
        _config(arch, *overrides), seq_len=6, vocab_size=VOCAB_SIZE, num_puzzle_identifiers=num_puzzles
    )
    generator = torch.Generator().manual_seed(0)
    model.init_weights(generator)
    if model.puzzle_embedding is not None:
        model.puzzle_embedding.weight.normal_(generator=generator)
    return model


def reference(folder: str) -> dict[str, Tensor]:
    """Return recorded weights of the published code."""
    return open_weights(str(REFERENCE / folder / "initial.safetensors")).read()


MODELS = [
    ("hrm",),
    ("hrm", "pos_encodings=learned"),
    ("hrm", "puzzle_emb_ndim=0"),
    ("trm_mlp",),
    ("urm",),
    ("se_rrm", "pos_encodings=rope", "add_tokens=2", "puzzle_emb_ndim=1"),
    ("se_rrm", "pos_encodings=learned", "equivariant_symbols=false", "add_tokens=1"),
]


# ---- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "published, ours",
    [
        ("_orig_mod.model.inner.H_init", "H_init"),
        ("model.inner.L_level.layers.11.mlp_t.gate_up_proj.weight", "L_level.layers.11.mlp_t.gate_up_proj.weight"),
        ("model.model.inner.lm_head.weight", "lm_head.weight"),
        ("_orig_mod.module.L_level.layers.0.module._orig_mod.mlp.w", "L_level.layers.0.mlp.w"),
        ("model.inner.init_hidden", "z_init"),
        ("_orig_mod.model.inner.layers.3.self_attn.qkv_proj.weight", "level.layers.3.self_attn.qkv_proj.weight"),
        ("model.inner.layers.10.mlp.dwconv.bias", "level.layers.10.mlp.conv_bias_W"),
    ],
)
def test_published_names_are_translated(published: str, ours: str) -> None:
    assert to_ours({published: 1}) == {ours: 1} == to_ours({ours: 1})
    with pytest.raises(UserError, match=f"are both {ours}; remove"):
        to_ours({published: 1, ours: 2})


@pytest.mark.parametrize("model", MODELS, ids=" ".join)
def test_our_names_survive_the_translation_there_and_back(model: tuple[str, ...]) -> None:
    own = build(*model).state_dict()
    published = to_published(own, "puzzles", arch_of(own), compiled=True)
    assert all(name.startswith("_orig_mod.model.inner.") for name in published)
    assert list(to_ours(published)) == list(own) == list(to_ours(own))


# ---- names of text -----------------------------------------------------------------------------

_OUTSIDE = {"embed_tokens.embedding_weight", "lm_head.weight"}
_OF_TRANSFORMERS = {"model.embed_tokens.weight", "lm_head.weight", "model.z_L_init"}


def _layers(*stacks: str) -> set[str]:
    parts = ("attn.gqkv_proj", "attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    return {f"{stack}.layers.0.{part}.weight" for stack in stacks for part in parts}


@pytest.mark.parametrize(
    ("arch", "kind", "expected"),
    [
        (HRMTextConfig, "training", _layers("model.H_level.core", "model.L_level.core") | {"model.zL_init"} | _OUTSIDE),
        (TRMTextConfig, "training", _layers("model.L_level.core") | {"model.zL_init"} | _OUTSIDE),
        (RINSTextConfig, "training", _layers("model.H_level", "model.L_level") | {"model.zL_init"} | _OUTSIDE),
        (TransformerTextConfig, "training", _layers("model") | _OUTSIDE),
        (HRMTextConfig, "transformers", _layers("model.H_module", "model.L_module") | _OF_TRANSFORMERS),
    ],
)
def test_names_of_text_survive_the_translation(arch: type[TextConfig], kind: Kind, expected: set[str]) -> None:
    options = {"num_layers": 1} if arch is TransformerTextConfig else {}
    model = make_model(make_config(arch, **options))
    weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    published = to_published(weights, kind, model.config.name)
    assert published.keys() == expected
    compiled = {f"_orig_mod.{name}": tensor for name, tensor in published.items()} | {"model.zH_init": torch.ones(1)}
    back = to_ours(compiled, model.config.name)
    assert back.keys() == weights.keys() and all(back[name] is weights[name] for name in weights)


@pytest.mark.parametrize("name", ["model.layers.0.attn.o_proj.weight", "model.H_level.core.layers.0.norm.weight", "x"])
def test_a_name_of_another_architecture_of_text_is_named(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is no weight of a published hrm_text"):
        to_ours({name: torch.zeros(1)}, "hrm_text")
    with pytest.raises(UserError, match=r"no published names .* of trm_text; take hrm_text"):
        to_published({}, "transformers", "trm_text")


# ---- fitting -----------------------------------------------------------------------------------


def _fit(weights: dict[str, Tensor], model: RecursiveModel, choice: PuzzleTable | None = None) -> dict[str, Tensor]:
    before = {name: tensor.clone() for name, tensor in weights.items()}
    fitted = dict(fit_one_by_one(weights, model.state_dict(), choice, "the file"))
    model.load_state_dict(fitted, strict=True)
    for name, tensor in model.state_dict().items():
        assert fitted[name].dtype == tensor.dtype and torch.equal(fitted[name], tensor)
    assert all(torch.equal(before[name], weights[name]) for name in before), "fit_one_by_one changed its input"
    return fitted


def _refusal(weights: dict[str, Tensor], model: RecursiveModel, choice: PuzzleTable | None = None) -> str:
    with pytest.raises(UserError, match=r"^the file ") as caught:
        fit_one_by_one(weights, model.state_dict(), choice, "the file")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def _random(model: RecursiveModel) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(tensor.shape, generator=generator) for name, tensor in model.state_dict().items()}


def test_a_convolution_that_comes_without_a_bias_gets_zeros() -> None:
    """This project's own convolutions had no bias at first, which computed the same."""
    model = build("urm", "num_layers=2")
    own = dict(model.state_dict())
    old = {name: tensor for name, tensor in own.items() if not name.endswith("conv_bias_W")}
    for name, tensor in _fit(old, model).items():
        assert torch.equal(tensor, torch.zeros_like(tensor) if name.endswith("conv_bias_W") else own[name]), name
    written = to_ours(to_published(old, "puzzles", "urm"))
    assert written.keys() == own.keys() and not any(written[name].any() for name in own.keys() - old.keys())
    del old["level.layers.1.mlp.conv_weight_W12"]
    assert "missing level.layers.1.mlp.conv_weight_W12" in _refusal(old, model)
    old["level.layers.1.mlp.conv_weight_W12"] = torch.tensor(1.0)
    assert "level.layers.1.mlp.conv_weight_W12 is () there" in _refusal(old, model)


def test_fitted_weights_have_the_dtype_of_the_model() -> None:
    weights = _random(build("hrm"))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in _fit(weights, build("hrm")).items())
    in_bfloat16 = build("hrm", "forward_dtype=bfloat16")
    assert torch.equal(_fit(weights, in_bfloat16)["H_init"], weights["H_init"].bfloat16())
    weights["H_init"] = torch.ones(32, dtype=torch.int8)
    assert "H_init is torch.int8 there and torch.float32 in the model" in _refusal(weights, build("hrm"))


def test_mismatches_are_named_and_counted() -> None:
    model = build("hrm")
    weights = _random(model)
    del weights["q_head.bias"]
    weights |= {f"L_level.layers.{i}.mlp.down_proj.weight": torch.ones(32, 256) for i in range(2, 7)}
    weights["lm_head.weight"] = torch.ones(9, 32)
    message = _refusal(weights, model)
    assert "missing q_head.bias (2,); unexpected L_level.layers.2.mlp.down_proj.weight (32, 256), " in message
    assert "and 2 more; lm_head.weight is (9, 32) there and (7, 32) in the model" in message


# ---- the puzzle table --------------------------------------------------------------------------


@pytest.mark.parametrize("num_loaded", [2, NUM_PUZZLES, 9])
@pytest.mark.parametrize("choice", ["keep", "mean", "zero"])
def test_the_choice_decides_the_rows_of_the_puzzle_table(choice: PuzzleTable, num_loaded: int) -> None:
    weights = _random(build("hrm", num_puzzles=num_loaded))
    if num_loaded != NUM_PUZZLES:
        assert f"puzzle rows for {num_loaded} identifiers, the model for 5; choose" in _refusal(weights, build("hrm"))
    fitted = _fit(weights, build("hrm"), choice)
    expected_KE = torch.zeros(NUM_PUZZLES, 32)
    if choice == "keep":
        expected_KE[:num_loaded] = weights[TABLE][:NUM_PUZZLES]
    if choice == "mean":
        expected_KE[:] = sum(weights[TABLE]) / num_loaded
    torch.testing.assert_close(fitted[TABLE], expected_KE, rtol=0, atol=1e-6 if choice == "mean" else 0.0)
    assert all(torch.equal(fitted[name], weights[name]) for name in weights if name != TABLE)


@pytest.mark.parametrize("choice", [None, "keep", "mean", "zero"])
def test_a_table_of_another_width_or_none_needs_the_choice_zero(choice: PuzzleTable | None) -> None:
    model = build("hrm")
    narrow, without = (_random(build("hrm", f"puzzle_emb_ndim={ndim}", num_puzzles=9)) for ndim in (16, 0))
    empty, number = (_random(model) | {TABLE: table} for table in (torch.ones(0, 32), torch.tensor(1.0)))
    for weights, message in (
        (narrow, f"{TABLE} is (9, 16) there and (5, 32) in the model"),
        (without, f"missing {TABLE} (5, 32)"),
        (empty, f"{TABLE} is (0, 32) there"),
        (number, f"{TABLE} is () there"),
    ):
        if choice == "zero":
            assert not _fit(weights, model, choice)[TABLE].any()
        else:
            assert message in _refusal(weights, model, choice)
    assert f"unexpected {TABLE} (5, 32)" in _refusal(_random(model), build("hrm", "puzzle_emb_ndim=0"), choice)
