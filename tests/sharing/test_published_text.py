"""Published HRM-Text models on the disk: their architecture and weights, whoever wrote them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver

from models.text.config import HRMTextConfig, RINSTextConfig, TextConfig, TransformerTextConfig, TRMTextConfig
from models.text.model import TextModel
from sharing.published import to_published
from sharing.published_text import Found, find_published
from tests.models.text.helpers import make_config, make_model
from utils.errors import UserError

HIDDEN, HEADS, WIDTH = 16, 2, 256
_CLASSES = {
    HRMTextConfig: "baselines.hrm_nocarry_bp_warmup@HierarchicalReasoningModel",
    TRMTextConfig: "baselines.trm_nocarry@TinyRecursiveModel",
    RINSTextConfig: "baselines.rins_nocarry@RINS",
    TransformerTextConfig: "baselines.transformer_wrapper@TransformerWrapper",
}


def _config(arch: type[TextConfig], **options: Any) -> TextConfig:
    return make_config(arch, width_multiple=256, num_layers=4, **options)


def _published_options(config: TextConfig) -> dict[str, Any]:
    """Return the options as the published program saves them."""
    ours = config.model_dump(exclude={"name", "width_multiple", "activation_checkpointing", "forward_dtype"})
    published = {"name": _CLASSES[type(config)], "head": "lm_head@LMHead"}
    for key, value in ours.items():
        name = {"num_layers": "n_layers", "pos_encodings": "pos_emb_type", "attention": "attn_type"}.get(key, key)
        published[name] = value
    return published


def _write_training(folder: Path, model: TextModel, *, epochs: int = 1, average: bool = True) -> dict[str, Tensor]:
    """Write what the published program leaves, and return the weights of the last epoch."""
    folder.mkdir()
    config = {"arch": _published_options(model.config), "epochs": epochs, "lr": 2.2e-4}
    (folder / "all_config.yaml").write_text(yaml.dump(config))
    data = {"tokenizer_info": {"boq": "<boq>"}, "vocab_size": model.vocab_size, "max_seq_len": 7, "total_length": 99}
    (folder / "train_metadata.yaml").write_text(yaml.dump(data))
    expected: dict[str, Tensor] = {}
    for epoch in range(1, epochs + 1):
        published = to_published(model.state_dict(), "training", model.config.name)
        trained = {name: tensor for name, tensor in published.items() if "init" not in name}
        averages = {name: tensor * 0.5 + epoch for name, tensor in trained.items()}
        optimizer = {
            name: {"step": torch.tensor(3.0), "exp_avg": tensor * 9}
            | ({"param_ema": averages[name]} if average else {})
            for name, tensor in trained.items()
        }
        state = {"model": published, "optim": {"state": optimizer, "param_groups": [{"params": list(trained)}]}}
        state_dict_saver.save(state, checkpoint_id=folder / f"fsdp2_epoch_{epoch}", no_dist=True)
        expected = published | (averages if average else {})
    return expected


def _write_transformers(folder: Path, model: TextModel, **options: Any) -> dict[str, Tensor]:
    folder.mkdir()
    config = {
        **{"model_type": "hrm_text", "architectures": ["HrmTextForCausalLM"], "vocab_size": model.vocab_size},
        **{"hidden_size": HIDDEN, "intermediate_size": WIDTH, "num_hidden_layers": 4, "num_attention_heads": HEADS},
        **{"num_key_value_heads": HEADS, "head_dim": HIDDEN // HEADS, "H_cycles": 2, "L_cycles": 3},
        **{"L_bp_steps": [0, 3], "max_position_embeddings": 7, "rms_norm_eps": 1e-6, "rope_theta": 100.0},
        **{"tie_word_embeddings": False, "initializer_range": 0.25, "embedding_scale": 4.0, "prefix_lm": True},
        **{"pad_token_id": 0},
    }
    told = {key: value for key, value in (config | options).items() if value != "left out"}
    (folder / "config.json").write_text(json.dumps(told))
    weights = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    published = to_published(weights, "transformers", "hrm_text")
    save_file(published, folder / "model.safetensors")
    return weights


def _found(where: Path | str) -> Found:
    found = find_published(str(where))
    assert found is not None
    return found


def _same_model(arch: dict[str, Any], config: TextConfig) -> None:
    """Check that the options that were found make the model of this config."""
    rest = config.model_dump(include={"activation_checkpointing", "attention_kernel", "forward_dtype"})
    options = config.model_dump(include={"bp_warmup_ratio", "bp_min_steps", "bp_max_steps"})
    ours = type(config)(**(rest | options | arch))
    assert ours.stacks == config.stacks and ours.num_calls == config.num_calls
    assert ours.embedding_scale == config.embedding_scale


@pytest.mark.parametrize("arch", _CLASSES, ids=lambda arch: arch.__name__)
def test_a_folder_of_the_training_program(tmp_path: Path, arch: type[TextConfig]) -> None:
    config = _config(arch)
    expected = _write_training(tmp_path / "run", make_model(config))
    found, read_weights = _found(tmp_path / "run")
    assert (found["vocab_size"], found["max_len"]) == (11, 7)
    assert found["arch"] | config.model_dump() == config.model_dump()
    _same_model(found["arch"], config)
    back = to_published(read_weights(), "training", config.name)
    assert back.keys() == expected.keys()
    assert all(torch.equal(back[name], expected[name]) and back[name].dtype == expected[name].dtype for name in back)


def test_the_newest_epoch_is_taken_unless_one_is_named(tmp_path: Path) -> None:
    model = make_model(_config(HRMTextConfig))
    _write_training(tmp_path / "run", model, epochs=2)
    head = model.state_dict()["lm_head.weight"]
    assert torch.equal(_found(tmp_path / "run")[1]()["lm_head.weight"], head * 0.5 + 2)
    _write_training(tmp_path / "without", model, average=False)
    assert torch.equal(_found(tmp_path / "without")[1]()["lm_head.weight"], head)
    _, read_first = _found(tmp_path / "run/fsdp2_epoch_1")
    assert torch.equal(read_first()["lm_head.weight"], head * 0.5 + 1)
    assert torch.equal(read_first()["zL_init"], model.zL_init)


def test_options_that_a_config_leaves_out_are_the_published_ones(tmp_path: Path) -> None:
    _write_training(tmp_path / "run", make_model(_config(HRMTextConfig, half_layers=False)))
    file = tmp_path / "run/all_config.yaml"
    config = yaml.safe_load(file.read_text())
    for key in ("half_layers", "attn_type", "bp_min_steps", "bp_max_steps", "bp_warmup_ratio", "init_std"):
        del config["arch"][key]
    config["arch"] |= {"pos_emb_type": "none", "rope_theta": None, "H_override": {"n_layers": 3}}
    file.write_text(yaml.dump(config))
    arch = _found(tmp_path / "run")[0]["arch"]
    assert arch["half_layers"] is False and arch["attention"] == "prefixlm" and arch["init_std"] is None
    assert (arch["bp_min_steps"], arch["bp_max_steps"], arch["bp_warmup_ratio"]) == (2, 5, 0.0)
    assert arch["H_override"] == {"num_layers": 3} and "rope_theta" not in arch


def test_the_export_for_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file on the Hub has its config beside it, as one on the disk."""

    def hf_hub_download(repo: str, file: str, *, revision: str | None) -> str:
        assert (repo, revision) == ("sapientinc/HRM-Text-1B", None)
        shutil.copy(tmp_path / "hf" / file, tmp_path / file)
        return str(tmp_path / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hf_hub_download)
    config = _config(HRMTextConfig)
    expected = _write_transformers(tmp_path / "hf", make_model(config))
    on_the_hub = "hf://sapientinc/HRM-Text-1B/model.safetensors"
    for where in (tmp_path / "hf", tmp_path / "hf/model.safetensors", on_the_hub):
        found, read_weights = _found(where)
        assert (found["vocab_size"], found["max_len"]) == (11, 7)
        _same_model(found["arch"], config)
        weights = read_weights()
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    (tmp_path / "hf/config.json").unlink()
    assert find_published(on_the_hub) is None


def test_an_export_in_several_files(tmp_path: Path) -> None:
    expected = _write_transformers(tmp_path / "hf", make_model(_config(HRMTextConfig)))
    whole = load_file(tmp_path / "hf/model.safetensors")
    (tmp_path / "hf/model.safetensors").unlink()
    file_of = {name: f"model-{n % 2 + 1:05d}-of-00002.safetensors" for n, name in enumerate(whole)}
    for file in set(file_of.values()):
        save_file({name: whole[name] for name in whole if file_of[name] == file}, tmp_path / "hf" / file)
    index = tmp_path / "hf/model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": file_of}))
    for where in (tmp_path / "hf", index):
        weights = _found(where)[1]()
        assert weights.keys() == expected.keys()
        assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("ours", "options"),
    [
        ({}, {"num_hidden_layers": 16, "num_layers_per_stack": 2}),
        ({"expansion": 48.0}, {"intermediate_size": 512}),
        ({}, {"rms_norm_eps": "left out", "prefix_lm": "left out"}),
        ({}, {"num_hidden_layers": 2, "rope_theta": None, "rope_parameters": {"rope_theta": 100.0}}),
        ({}, {"embedding_scale": None, "head_dim": None, "num_key_value_heads": None, "hidden_act": "silu"}),
        (
            {"attention": "causal", "init_type": "fixed_normal", "H_override": {"num_layers": 3}},
            {"prefix_lm": False, "initializer_range": 0.02, "embedding_scale": 50.0},
        ),
    ],
)
def test_other_options_and_ways_to_write_config_json(
    tmp_path: Path, ours: dict[str, Any], options: dict[str, Any]
) -> None:
    config = _config(HRMTextConfig, **ours)
    _write_transformers(tmp_path / "hf", make_model(config), **options)
    _same_model(_found(tmp_path / "hf")[0]["arch"], config)


def test_other_files_and_folders_are_not_published_models(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    for where in (tmp_path, tmp_path / "model.safetensors", tmp_path / "missing", tmp_path / "x.pt"):
        assert find_published(str(where)) is None
    for contents in ("", "[]", '{"model_type": "bert"}', "{" * 100_000):
        (tmp_path / "config.json").write_text(contents)
        assert find_published(str(tmp_path)) is None


def test_an_export_that_no_model_here_computes_is_refused(tmp_path: Path) -> None:
    _write_transformers(tmp_path / "hf", make_model(_config(HRMTextConfig)))
    file = tmp_path / "hf/config.json"
    whole = json.loads(file.read_text())
    for key, value, message in (
        ("hidden_act", "gelu", "hidden_act"),
        *((key, True, key) for key in ("tie_word_embeddings", "attention_bias", "mlp_bias")),
        ("num_key_value_heads", 1, "num_key_value_heads"),
        ("embedding_scale", 1.0, "embedding_scale is not 1 / initializer_range"),
        ("H_cycles", "2", "H_cycles"),
        ("rope_parameters", {"rope_type": "yarn"}, "rope_parameters"),
    ):
        file.write_text(json.dumps(whole | {key: value}))
        with pytest.raises(UserError, match=message):
            find_published(str(tmp_path / "hf"))
    file.write_text(json.dumps(whole))
    (tmp_path / "hf/model.safetensors").unlink()
    with pytest.raises(UserError, match="there is no file at"):
        find_published(str(tmp_path / "hf"))


def test_an_incomplete_training_folder_is_refused(tmp_path: Path) -> None:
    _write_training(tmp_path / "run", make_model(_config(HRMTextConfig)))
    whole = {name: (tmp_path / "run" / name).read_text() for name in ("all_config.yaml", "train_metadata.yaml")}
    for name, contents, message in (
        ("train_metadata.yaml", "vocab_size: 3", "max_seq_len"),
        ("all_config.yaml", "arch: {name: x@Y}", "known are HierarchicalReasoningModel"),
        ("all_config.yaml", "&a [*a]", "cannot be read as YAML"),
        ("all_config.yaml", None, "all_config.yaml: cannot be read"),
    ):
        file = tmp_path / "run" / name
        file.unlink() if contents is None else file.write_text(contents)
        with pytest.raises(UserError, match=message):
            find_published(str(tmp_path / "run"))
        file.write_text(whole[name])
