"""Read and write published HRM-Text models on the disk: the architecture, and the weights.

The training program writes a folder:

    all_config.yaml         the options of the architecture
    train_metadata.yaml     the sizes of the data
    fsdp2_epoch_3/          weights and optimizer of an epoch, by torch.distributed.checkpoint

The transformers library reads another one, also on the Hugging Face Hub:

    config.json
    model.safetensors       the weights, or several files with an index
"""

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from models.layers import swiglu_width
from models.text.config import (
    HRMTextConfig,
    RINSTextConfig,
    TextConfig,
    TransformerTextConfig,
    TRMTextConfig,
    UTTextConfig,
)
from sharing.dcp_folder import METADATA, DCPFolder
from sharing.published import Weights, to_ours, to_published, unusual_beginnings
from sharing.weights_file import WeightsFile, open_weights, write_weights
from utils.command_line import validate
from utils.config import Container, Float, Int, name_of
from utils.errors import UserError
from utils.files import file_errors, read_yaml
from utils.hub import is_address, path_of, with_file
from utils.json_files import RepeatedKey, read_json
from utils.safetensors_files import FILE, INDEX, INDEX_ENDING
from utils.terminal import tell

_TRAINING, _DATA, _TRANSFORMERS = "all_config.yaml", "train_metadata.yaml", "config.json"
_EPOCH = re.compile(r"fsdp2_epoch_(\d+)")

_ARCHS: dict[str, type[TextConfig]] = {
    "HierarchicalReasoningModel": HRMTextConfig,
    "TinyRecursiveModel": TRMTextConfig,
    "UniversalTransformer": UTTextConfig,
    "RINS": RINSTextConfig,
    "TransformerWrapper": TransformerTextConfig,
}
"""The classes of published models, and ours."""
_RENAMED = {"n_layers": "num_layers", "pos_emb_type": "pos_encodings", "attn_type": "attention"}
# Options that no published program has.
_OURS = {"name", "width_multiple", "forward_dtype", "activation_checkpointing", "attention_kernel"}
# What the published classes take if the config does not say it.
_DEFAULTS: dict[str, Any] = {
    "attention": "prefixlm",
    "init_std": None,
    "half_layers": False,
    "H_override": {},
    "bp_warmup_ratio": 0.0,
    "bp_min_steps": 2,
    "bp_max_steps": 5,
}
_PUBLISHED_MULTIPLE = 256  # of the width of the MLP


Found = tuple[Container, Callable[[], Weights]]
"""A published model: arch, vocab_size and max_len; and what reads the weights, by our names.

In arch are those options that are a part of the model, and its name.
"""


class _Data(BaseModel):
    """The keys of train_metadata.yaml that are read."""

    vocab_size: Int = Field(ge=1)
    max_seq_len: Int = Field(ge=1)


class _Config(BaseModel):
    """The keys of a config.json of transformers that decide what a HRM-Text computes."""

    vocab_size: Int = Field(ge=1)
    hidden_size: Int = Field(ge=1)
    intermediate_size: Int = Field(ge=1)
    num_attention_heads: Int = Field(ge=1)
    num_key_value_heads: Int | None = None
    head_dim: Int | None = None
    H_cycles: Int = Field(ge=1)
    L_cycles: Int = Field(ge=1)
    max_position_embeddings: Int = Field(ge=1)
    hidden_act: Literal["silu", None] = None
    tie_word_embeddings: Literal[False, None] = None
    attention_bias: Literal[False, None] = None
    mlp_bias: Literal[False, None] = None
    prefix_lm: bool = True
    rms_norm_eps: Float = 1e-6
    initializer_range: Float = Field(default=0.02, gt=0)
    embedding_scale: Float | None = None
    rope_theta: Float | None = None
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None

    @property
    def rope(self) -> dict[str, Any]:
        return self.rope_parameters or self.rope_scaling or {}

    @model_validator(mode="after")
    def _is_computed_here(self) -> Self:
        heads, scale = self.num_attention_heads, 1 / self.initializer_range
        if self.num_key_value_heads not in (None, heads) or self.head_dim not in (None, self.hidden_size // heads):
            raise ValueError("num_key_value_heads and head_dim are not those of full attention")
        if self.embedding_scale is not None and not math.isclose(self.embedding_scale, scale, rel_tol=1e-6):
            raise ValueError("embedding_scale is not 1 / initializer_range")
        if self.rope.get("rope_type", "default") != "default":
            raise ValueError("rope_parameters are not the default ones")
        return self

    def arch(self, names: Iterable[str]) -> Container:
        """Return the options of our architecture, whose weights have these names."""
        # The programs that write this file do not agree on what num_hidden_layers counts.
        layers = [name.partition(".")[0] for name in names if name.endswith(".attn.o_proj.weight")]
        H_layers, L_layers = layers.count("H_level"), layers.count("L_level")
        width = self.intermediate_size
        has_published_width = swiglu_width(self.hidden_size, 4.0, _PUBLISHED_MULTIPLE) == width
        is_lecun = math.isclose(self.initializer_range, 1 / math.sqrt(self.hidden_size), rel_tol=1e-6)
        return {
            "name": "hrm_text",
            "hidden_size": self.hidden_size,
            "num_heads": self.num_attention_heads,
            "half_layers": True,
            "num_layers": 2 * L_layers,
            "H_override": {} if H_layers == L_layers else {"num_layers": H_layers},
            "expansion": 4.0 if has_published_width else 1.5 * width / self.hidden_size,
            "width_multiple": _PUBLISHED_MULTIPLE if width % _PUBLISHED_MULTIPLE == 0 else 1,
            "attention": "prefixlm" if self.prefix_lm else "causal",
            "norm_type": "pre",
            "norm_eps": self.rms_norm_eps,
            "pos_encodings": "rope",
            "rope_theta": float(self.rope.get("rope_theta") or self.rope_theta or 10000.0),
            "init_type": "lecun_normal" if is_lecun else "fixed_normal",
            "init_std": None if is_lecun else self.initializer_range,
            "H_cycles": self.H_cycles,
            "L_cycles": self.L_cycles,
        }


@file_errors()
def find_published(where: str) -> Found | None:
    """Look at a published model of text without reading its weights; None if it is none.

    Args:
        where: the folder of a training run, of one of its epochs, or of an export for transformers;
            or a file of weights of the latter, as for `open_weights`.

    Raises:
        UserError: It is such a model, but incomplete, or with options that no model here has.
    """
    where, folder = with_file(where), Path(where)
    if not is_address(where) and os.path.isdir(folder):
        if os.path.isfile(folder / METADATA) and os.path.isfile(folder.parent / _TRAINING):
            return _of_epoch(folder)
        if epochs := {int(found[1]): path for path in folder.iterdir() if (found := _EPOCH.fullmatch(path.name))}:
            return _of_epoch(epochs[max(epochs)])
        where = str(folder / (INDEX if os.path.isfile(folder / INDEX) else FILE))
    elif not where.endswith((".safetensors", INDEX_ENDING)):
        return None
    beside = where[: where.rfind("/") + 1]
    try:
        file = path_of(f"{beside}{_TRANSFORMERS}")
        values = read_json(file, "copy or download it again")
    except RepeatedKey:
        raise
    except (FileNotFoundError, UserError):  # none is there, or that of another program
        return None
    if not isinstance(values, dict) or values.get("model_type") != "hrm_text":
        return None
    try:
        config = validate(_Config, values)
    except UserError as error:
        raise UserError(f"{file}: {error}; only an export of HRM-Text itself can be read") from error
    opened = open_weights(where)
    _, names = opened.header()
    arch, read = config.arch(to_ours(dict.fromkeys(names), "hrm_text")), partial(read_ours, opened, "hrm_text")
    return {"arch": arch, "vocab_size": config.vocab_size, "max_len": config.max_position_embeddings}, read


def read_ours(file: WeightsFile, arch_of_text: str | None = None) -> Weights:
    weights = file.read()
    if arch_of_text is None and (dropped := unusual_beginnings(weights)):
        tell(f"{file.where}: dropped {' and '.join(dropped)} from the names of its weights")
    return to_ours(weights, arch_of_text)


def _of_epoch(epoch: Path) -> Found:
    file = epoch.parent / _TRAINING
    options = read_yaml(file, "copy it again").get("arch")
    published = _renamed(options) if isinstance(options, dict) else {}
    class_name = str(published.get("name")).rpartition("@")[2]
    if class_name not in _ARCHS:
        raise UserError(f"{file}: arch.name is {class_name!r}; known are {', '.join(_ARCHS)}")
    data = validate(_Data, read_yaml(epoch.parent / _DATA, "copy it again"))
    name, known = name_of(_ARCHS[class_name]), _ARCHS[class_name].model_fields.keys() - _OURS
    arch = {key: value for key, value in (_DEFAULTS | published).items() if key in known}
    if isinstance(arch.get("H_override"), dict):
        arch["H_override"] = _renamed(arch["H_override"])
    if arch.get("rope_theta") is None:  # without positions
        arch.pop("rope_theta", None)
    arch |= {"name": name, "width_multiple": _PUBLISHED_MULTIPLE}
    found = {"arch": arch, "vocab_size": data.vocab_size, "max_len": data.max_seq_len}
    return found, partial(_read_epoch, epoch, name)


def _renamed(options: Container) -> Container:
    return {_RENAMED.get(key, key): value for key, value in options.items()}


def _read_epoch(path: Path, arch: str) -> Weights:
    """Return the moving average of the weights, or the weights if the training kept none."""
    epoch, stored_as = DCPFolder(path), dict[str, str]()
    for name in epoch.names:
        if name.startswith("model."):
            published = name.removeprefix("model.")
            average = f"optim.state.{published}.param_ema"
            stored_as[published] = average if average in epoch.names else name
    if not stored_as:
        raise UserError(f"{path} holds no weights of a model; give the folder of an epoch of HRM-Text")
    tensors = epoch.read(stored_as.values())
    return to_ours({name: tensors[stored] for name, stored in stored_as.items()}, arch)


def write_for_transformers(
    folder: Path,
    weights: Weights,
    arch: TextConfig,
    max_len: int,
    special_tokens: dict[str, int],
    tokenizer: Path | None,
) -> None:
    """Write config.json, weights by our names and a tokenizer.json into an empty folder.

    Raises:
        UserError: transformers has no such model.
        OSError: The folder can't be written.
    """
    if not isinstance(arch, HRMTextConfig):
        raise UserError(f"transformers has no model for arch={arch.name}; only hrm_text can be written for it")
    H_stack, stack = arch.stacks["H_level"], arch.stacks["L_level"]
    for option, suits in {
        "norm_type": arch.norm_type == "pre",
        "pos_encodings": arch.pos_encodings == "rope",
        "H_override": replace(H_stack, stds=stack.stds) == stack,
    }.items():
        if not suits:
            raise UserError(f"transformers has no model with arch.{option}={getattr(arch, option)}; leave --format out")
    config = {
        "architectures": ["HrmTextForCausalLM"],
        "model_type": "hrm_text",
        "vocab_size": len(weights["embed_tokens.weight"]),
        "hidden_size": arch.hidden_size,
        "intermediate_size": stack.width,
        "num_hidden_layers": stack.num_layers,  # of a stack: the library counts the calls itself
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_heads,
        "head_dim": stack.head_dim,
        "hidden_act": "silu",
        "H_cycles": arch.H_cycles,
        "L_cycles": arch.L_cycles,
        "max_position_embeddings": max_len,
        "rms_norm_eps": arch.norm_eps,
        "rope_theta": arch.rope_theta,
        "tie_word_embeddings": False,
        "initializer_range": H_stack.stds.inner,
        "embedding_scale": arch.embedding_scale,
        "prefix_lm": arch.attention == "prefixlm",
        "pad_token_id": 0,
    }
    for key, token in (("bos_token_id", "start"), ("eos_token_id", "end")):
        if token in special_tokens:
            config[key] = special_tokens[token]
    write_weights(folder / FILE, to_published(weights, "transformers", arch.name), {"format": "pt"})
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / tokenizer.name)
    (folder / _TRANSFORMERS).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
