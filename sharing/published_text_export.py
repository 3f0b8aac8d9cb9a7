"""Write a HRM-Text model as the folder that the transformers library loads."""

import json
import shutil
from pathlib import Path
from typing import Any

from models.text.config import HRMTextConfig, TextConfig
from sharing.published_text import Weights, to_published
from sharing.published_text_files import TRANSFORMERS_CONFIG
from sharing.weights_file import write_weights
from utils.errors import UserError
from utils.safetensors_files import FILE


def write_for_transformers(
    folder: Path,
    weights: Weights,
    arch: TextConfig,
    *,
    max_len: int,
    special_tokens: dict[str, int],
    tokenizer: Path | None,
) -> None:
    """Write config.json and the weights, bit for bit, into an empty folder.

    Args:
        weights: by our names.
        max_len: the most tokens of a sample in the training.
        special_tokens: by name; empty if nobody knows them.
        tokenizer: a tokenizer.json to copy; None: there is none.

    Raises:
        UserError: transformers has no such model.
        OSError: The folder can't be written.
    """
    config = transformers_config(arch, vocab_size=len(weights["embed_tokens.weight"]), max_len=max_len)
    for key, name in (("bos_token_id", "start"), ("eos_token_id", "end")):
        if name in special_tokens:
            config[key] = special_tokens[name]
    published = to_published(weights, arch.name, "transformers")
    write_weights(folder / FILE, published, {"format": "pt"})
    if tokenizer is not None:
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
    (folder / TRANSFORMERS_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def transformers_config(arch: TextConfig, *, vocab_size: int, max_len: int) -> dict[str, Any]:
    """Return the contents of config.json.

    Raises:
        UserError: transformers has no such model.
    """
    if not isinstance(arch, HRMTextConfig):
        raise UserError(f"transformers has no model for arch={arch.name}; only hrm_text can be written for it")
    H_stack, L_stack = arch.stacks["H_level"], arch.stacks["L_level"]
    for option, suits in {
        f"norm_type={arch.norm_type}": arch.norm_type == "pre",
        f"pos_encodings={arch.pos_encodings}": arch.pos_encodings == "rope",
        f"H_override={arch.H_override}": {**vars(H_stack), "stds": None} == {**vars(L_stack), "stds": None},
    }.items():
        if not suits:
            raise UserError(f"transformers has no model with arch.{option}; leave --format out")
    return {
        "architectures": ["HrmTextForCausalLM"],
        "model_type": "hrm_text",
        "vocab_size": vocab_size,
        "hidden_size": arch.hidden_size,
        "intermediate_size": L_stack.width,
        "num_hidden_layers": L_stack.num_layers,  # of a stack: the library counts the calls itself
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_heads,
        "head_dim": L_stack.head_dim,
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
