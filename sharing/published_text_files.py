"""Find a published HRM-Text model on the disk: its architecture, and its weights by our names.

There are two kinds (sharing/published_text.py). The training program writes a folder:

    all_config.yaml         the options of the architecture
    train_metadata.yaml     the sizes of the data
    fsdp2_epoch_3/          weights and optimizer of an epoch, by torch.distributed.checkpoint

The export for transformers is a folder as well, or its file model.safetensors on the Hugging Face
Hub:

    config.json
    model.safetensors       the weights, or several files with an index
"""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor

from models.layers import swiglu_width
from sharing.dcp_folder import METADATA, is_dcp_folder, read_index, read_tensors
from sharing.hub import is_address, path_of, with_file
from sharing.published_text import Kind, Weights, to_ours
from sharing.weights_file import read_names, read_weights
from utils.errors import UserError
from utils.files import file_errors, plain, read_plain_yaml
from utils.json_files import RepeatedKey, read_json
from utils.safetensors_files import FILE, INDEX, INDEX_ENDING

TRAINING_CONFIG, TRANSFORMERS_CONFIG = "all_config.yaml", "config.json"
_METADATA_OF_DATA = "train_metadata.yaml"
_EPOCH = re.compile(r"fsdp2_epoch_(\d+)")
_MOST_JSON_BYTES = 1 << 20
_MODEL, _STATE, _AVERAGE = "model.", "optim.state.", ".param_ema"
_LAYER = re.compile(r"([HL]_level)\.layers\.(\d+)\..*")

# The class of a published model, and our name.
_ARCHS = {
    "HierarchicalReasoningModel": "hrm_text",
    "TinyRecursiveModel": "trm_text",
    "UniversalTransformer": "ut_text",
    "RINS": "rins_text",
    "TransformerWrapper": "transformer_text",
}
_RENAMED = {"n_layers": "num_layers", "pos_emb_type": "pos_encodings", "attn_type": "attention"}
_OF_A_STACK = {
    *("hidden_size", "num_layers", "num_heads", "expansion", "attention", "norm_type", "norm_eps"),
    *("pos_encodings", "rope_theta", "init_type", "init_std"),
}
_OF_A_MODEL = {
    "hrm_text": {
        "half_layers",
        "H_cycles",
        "L_cycles",
        "H_override",
        "bp_warmup_ratio",
        "bp_min_steps",
        "bp_max_steps",
    },
    "trm_text": {"half_layers", "H_cycles", "L_cycles", "H_bp_steps", "L_bp_steps"},
    "ut_text": {"cycles", "bp_cycles"},
    "rins_text": {"half_layers", "H_override", "L_cycles", "L_bp_cycles"},
    "transformer_text": set[str](),
}
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


@dataclass(frozen=True)
class PublishedModel:
    """A published model whose weights have not been read.

    Attributes:
        where: as the user typed it.
        kind: who wrote it.
        arch: the options of our architecture, with its name. All others have no part in the model.
        vocab_size: the number of rows of the embedding.
        max_len: the most tokens of a sample in its training.
    """

    where: str
    kind: Kind
    arch: dict[str, Any]
    vocab_size: int
    max_len: int
    _weights: str

    def read_weights(self) -> Weights:
        """Return the weights by our names: the moving average if the training kept one.

        Raises:
            UserError: The weights are damaged, or of another architecture.
        """
        if self.kind == "transformers":
            return to_ours(read_weights(self._weights), self.arch["name"])
        return to_ours(_of_training(Path(self._weights)), self.arch["name"])


@file_errors()
def find_published(where: str) -> PublishedModel | None:
    """Look at a published model of text without reading its weights; None if it is none.

    Args:
        where: the folder of a training run, of one of its epochs, or of an export for transformers;
            or the file model.safetensors of the latter, or the index of several files, also as
            hf://owner/repo/model.safetensors, or hf://owner/repo alone.

    Raises:
        UserError: It is such a model, but incomplete, or with options that no model here has.
    """
    where, folder = with_file(where), Path(where)
    if not is_address(where) and os.path.isdir(folder):
        if is_dcp_folder(folder) and os.path.isfile(folder.parent / TRAINING_CONFIG):
            return _of_epoch(where, folder)
        if (epoch := _newest_epoch(folder)) is not None:
            return _of_epoch(where, epoch)
        weights = folder / (INDEX if os.path.isfile(folder / INDEX) else FILE)
        return _of_transformers(where, str(weights), folder / TRANSFORMERS_CONFIG)
    if not where.endswith((".safetensors", INDEX_ENDING)):
        return None
    beside = f"{where.rpartition('/')[0]}/" if "/" in where else ""
    try:
        return _of_transformers(where, where, path_of(f"{beside}{TRANSFORMERS_CONFIG}"))
    except UserError:
        if is_address(where):  # the repository has no config.json, or can't be reached
            return None
        raise


# --------------------------------------------------------------------------------------------------
# The folder of the training program


def _newest_epoch(folder: Path) -> Path | None:
    epochs = {int(found[1]): path for path in folder.iterdir() if (found := _EPOCH.fullmatch(path.name))}
    return epochs[max(epochs)] if epochs else None


def _of_epoch(where: str, epoch: Path) -> PublishedModel:
    config, data = (_yaml(epoch.parent / name) for name in (TRAINING_CONFIG, _METADATA_OF_DATA))
    published = config.get("arch")
    if not isinstance(published, dict) or not isinstance(published.get("name"), str):
        raise UserError(f"{epoch.parent / TRAINING_CONFIG} has no arch with a name; copy the file again")
    name = _ARCHS.get(published["name"].rpartition("@")[2])
    if name is None:
        known = ", ".join(_ARCHS)
        raise UserError(f"{epoch.parent / TRAINING_CONFIG}: arch.name is {published['name']}; known are {known}")
    try:
        vocab_size, max_len = _count(data, "vocab_size"), _count(data, "max_seq_len")
    except ValueError as error:
        raise UserError(f"{epoch.parent / _METADATA_OF_DATA}: {error}; copy the file again") from error
    return PublishedModel(where, "training", _arch_of_training(name, published), vocab_size, max_len, str(epoch))


def _arch_of_training(name: str, published: dict[str, Any]) -> dict[str, Any]:
    known = _OF_A_STACK | _OF_A_MODEL[name]
    options = {key: value for key, value in _renamed(published).items() if key in known}
    if isinstance(options.get("H_override"), dict):
        options["H_override"] = _renamed(options["H_override"])
    if options.get("rope_theta") is None:  # without positions
        options.pop("rope_theta", None)
    defaults = {key: value for key, value in _DEFAULTS.items() if key in known}
    return defaults | options | {"name": name, "width_multiple": _PUBLISHED_MULTIPLE}


def _renamed(options: dict[str, Any]) -> dict[str, Any]:
    return {_RENAMED.get(key, key): value for key, value in options.items()}


def _yaml(file: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(read_plain_yaml(file))
    except FileNotFoundError:
        raise UserError(f"{file} is missing, which says what the model is; copy it there") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{file} is no config ({' '.join(str(error).split())}); copy it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{file} has no keys; copy it again")
    return values


def _of_training(epoch: Path) -> dict[str, Tensor]:
    """Return the weights of an epoch by their published names, averaged if there are averages."""
    index = read_index(epoch)
    stored_as = {name.removeprefix(_MODEL): name for name in index if name.startswith(_MODEL)}
    if not stored_as:
        raise UserError(f"{epoch / METADATA} names no weights of a model; give the folder of an epoch of HRM-Text")
    stored_as |= {name: average for name in stored_as if (average := f"{_STATE}{name}{_AVERAGE}") in index}
    tensors = read_tensors(epoch, index, stored_as.values())
    return {name: tensors[stored] for name, stored in stored_as.items()}


# --------------------------------------------------------------------------------------------------
# The export for transformers


def _of_transformers(where: str, weights: str, file: Path) -> PublishedModel | None:
    config = _json(file)
    if config is None or config.get("model_type") != "hrm_text":
        return None
    try:
        arch = _arch_of_transformers(config)
        vocab_size, max_len = _count(config, "vocab_size"), _count(config, "max_position_embeddings")
    except ValueError as error:
        raise UserError(f"{file}: {error}; only an export of HRM-Text itself can be read") from error
    # The programs that write this file do not agree on what num_hidden_layers counts.
    layers = {"H_level": 0, "L_level": 0}
    for found in filter(None, map(_LAYER.fullmatch, to_ours(dict.fromkeys(read_names(weights)), "hrm_text"))):
        layers[found[1]] = max(layers[found[1]], int(found[2]) + 1)
    arch |= {"half_layers": True, "num_layers": 2 * layers["L_level"]}
    arch["H_override"] = {} if layers["H_level"] == layers["L_level"] else {"num_layers": layers["H_level"]}
    return PublishedModel(where, "transformers", arch, vocab_size, max_len, weights)


def _arch_of_transformers(config: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a config.json of transformers, but for the layers.

    Raises:
        ValueError: A value is wrong, or no model here has it.
    """
    hidden_size, num_heads, width = (
        _count(config, key) for key in ("hidden_size", "num_attention_heads", "intermediate_size")
    )
    in_std = _number(config, "initializer_range", 0.02)
    H_cycles, L_cycles = _count(config, "H_cycles"), _count(config, "L_cycles")
    for key, expected in {
        "hidden_act": "silu",
        "num_key_value_heads": num_heads,
        "head_dim": hidden_size // num_heads,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }.items():
        if (value := config.get(key, expected)) not in (expected, None):
            raise ValueError(f"{key} is {value!r}, not {expected!r}")
    if not math.isclose(_number(config, "embedding_scale", 1 / in_std), 1 / in_std, rel_tol=1e-6):
        raise ValueError("embedding_scale is not 1 / initializer_range")
    is_lecun = math.isclose(in_std, 1 / math.sqrt(hidden_size), rel_tol=1e-6)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", "default") != "default":
        raise ValueError("rope_parameters are not the default ones")
    return {
        "name": "hrm_text",
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        "expansion": _expansion(hidden_size, width),
        "width_multiple": _PUBLISHED_MULTIPLE if width % _PUBLISHED_MULTIPLE == 0 else 1,
        "attention": "prefixlm" if config.get("prefix_lm", True) else "causal",
        "norm_type": "pre",
        "norm_eps": _number(config, "rms_norm_eps", 1e-6),
        "pos_encodings": "rope",
        "rope_theta": _number(config | rope, "rope_theta", 10000.0),
        "init_type": "lecun_normal" if is_lecun else "fixed_normal",
        "init_std": None if is_lecun else in_std,
        "H_cycles": H_cycles,
        "L_cycles": L_cycles,
    }


def _expansion(hidden_size: int, width: int) -> float:
    """Return an expansion that gives this width: the published one, 4, if it does."""
    return 4.0 if swiglu_width(hidden_size, 4.0, _PUBLISHED_MULTIPLE) == width else 1.5 * width / hidden_size


def _count(config: dict[str, Any], key: str) -> int:
    if type(value := config.get(key)) is not int or value < 1:
        raise ValueError(f"{key} is {value!r}, not a number")
    return value


def _number(config: dict[str, Any], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{key} is {value!r}, not a number")
    return float(value)


def _json(file: Path) -> dict[str, Any] | None:
    """Return the object in a file of JSON; None if it holds another value, or is missing.

    Raises:
        RepeatedKey: An object in the file has a key twice.
    """
    if not os.path.isfile(file) or plain(file).stat().st_size > _MOST_JSON_BYTES:
        return None
    try:
        values = read_json(file, "copy or download it again")
    except RepeatedKey:
        raise
    except UserError:
        return None
    return values if isinstance(values, dict) else None
