"""Published HRM-Text weights fit our models, and a round trip changes no bit."""

import pytest
import torch

from models.text.config import HRMTextConfig, RINSTextConfig, TextConfig, TransformerTextConfig, TRMTextConfig
from sharing.published_text import Kind, to_ours, to_published
from tests.models.text.helpers import make_config, make_model
from utils.errors import UserError

_LAYER = ("attn.gqkv_proj", "attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
_OUTSIDE = {"embed_tokens.embedding_weight", "lm_head.weight"}


def _names(arch: type[TextConfig], kind: Kind, **options: object) -> set[str]:
    model = make_model(make_config(arch, **options))
    weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    published = to_published(weights, model.config.name, kind)
    back = to_ours(published, model.config.name)
    assert back.keys() == weights.keys() and all(back[name] is weights[name] for name in weights)
    model.load_state_dict(back)
    return set(published)


def _layers(*stacks: str) -> set[str]:
    return {f"{stack}.layers.0.{part}.weight" for stack in stacks for part in _LAYER}


def test_names_of_the_training_checkpoint() -> None:
    hrm = _layers("model.H_level.core", "model.L_level.core")
    assert _names(HRMTextConfig, "training") == hrm | _OUTSIDE | {"model.zL_init"}
    assert _names(TRMTextConfig, "training") == _layers("model.L_level.core") | _OUTSIDE | {"model.zL_init"}
    assert _names(RINSTextConfig, "training") == _layers("model.H_level", "model.L_level") | _OUTSIDE | {
        "model.zL_init"
    }
    assert _names(TransformerTextConfig, "training", num_layers=1) == _layers("model") | _OUTSIDE


def test_names_of_the_export_for_transformers() -> None:
    outside = {"model.embed_tokens.weight", "lm_head.weight", "model.z_L_init"}
    assert _names(HRMTextConfig, "transformers") == _layers("model.H_module", "model.L_module") | outside


def test_compiled_names_and_unused_weights_are_understood() -> None:
    own = make_model(make_config(HRMTextConfig)).state_dict()
    published = {f"_orig_mod.{name}": tensor for name, tensor in to_published(own, "hrm_text", "training").items()}
    assert to_ours(published | {"model.zH_init": torch.zeros(16)}, "hrm_text").keys() == own.keys()


@pytest.mark.parametrize("name", ["model.layers.0.attn.o_proj.weight", "model.H_level.core.layers.0.norm.weight", "x"])
def test_a_name_of_another_architecture_is_named(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} is no weight of a published hrm_text"):
        to_ours({name: torch.zeros(1)}, "hrm_text")


def test_what_has_no_published_name_is_named() -> None:
    with pytest.raises(UserError, match=r"a published hrm_text has no level.norm.weight"):
        to_published({"level.norm.weight": torch.zeros(1)}, "hrm_text", "training")
    with pytest.raises(UserError, match=r"no published names .* of trm_text; take hrm_text"):
        to_published({}, "trm_text", "transformers")
    with pytest.raises(UserError, match=r"are both lm_head.weight"):
        to_ours({"lm_head.weight": torch.zeros(1), "_orig_mod.lm_head.weight": torch.zeros(1)}, "hrm_text")
