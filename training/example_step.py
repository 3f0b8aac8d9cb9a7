"""Make the model and a training step of a run without its data, to count or to time the step."""

from typing import Any

import torch

from dataset.schema import IGNORE_LABEL
from models import shapes_of
from models.act import ActSettings, empty_batch, initial_carry
from models.base import RecursiveModel
from models.carry import Carry
from models.model import Model
from models.text.config import LONGEST_RUN
from models.text.objective import TextBatch, TextRow, TextSettings
from models.text.packing import Packing
from training.config import PretrainConfig
from training.data import AnySizes, Sizes, TextSizes


def model_on_meta(config: PretrainConfig, sizes: AnySizes) -> Model:
    """Return the whole model of a run on the meta device, whose tensors have no memory.

    float32 takes the place of forward_dtype=auto.
    """
    arch = config.arch
    if arch.forward_dtype == "auto":
        arch = arch.model_copy(update={"forward_dtype": "float32"})
    model = shapes_of(arch, **sizes.of_model())
    model.freeze("weights" if config.freeze_weights else config.freeze)
    return model


def num_parameters(config: PretrainConfig, sizes: AnySizes) -> int:
    """Return the number of parameters of a run's whole model, without its puzzle table."""
    return sum(weight.numel() for weight in model_on_meta(config, sizes).parameters())


def example_step(
    model: Model, config: PretrainConfig, sizes: AnySizes, num_slots: int, device: torch.device
) -> tuple[Carry | None, Any, Any]:
    """Return carry, batch and settings, which `Layout.forward_backward` takes.

    Puzzles get the depth of `arch.depth`. Texts get the calls with gradient of the end of a run,
    and sequences of the dataset's mean length, half of each an instruction.

    Args:
        num_slots: slots of puzzles, or rows of text.
    """
    if isinstance(sizes, TextSizes):
        arch = config.text_arch
        num_tokens = num_slots * tokens_of_row(config)
        length = min(max(2, sizes.mean_context), num_tokens)
        lengths = [length] * (num_tokens // length) + [num_tokens % length] * (num_tokens % length > 0)
        packing = Packing([(-(-n // 2), n // 2) for n in lengths], num_tokens, kernel=arch.attention_kernel)
        tokens_N = torch.zeros(num_tokens, dtype=torch.int32)
        row = TextRow(tokens_N, tokens_N.clone(), tokens_N.clone(), packing)
        settings = TextSettings(arch.grad_calls_at(LONGEST_RUN, LONGEST_RUN), IGNORE_LABEL)
        return None, TextBatch([row.apply(lambda tensor: tensor.to(device))], num_tokens), settings
    assert isinstance(model, RecursiveModel) and isinstance(sizes, Sizes)
    batch = empty_batch(num_slots, sizes.seq_len, device)
    return initial_carry(model, batch, training=True), batch, act_settings(config, num_slots, device)


def act_settings(config: PretrainConfig, num_slots: int, device: torch.device) -> ActSettings:
    """Return the settings of a step of puzzles, with seeds if the architecture draws."""
    arch = config.puzzle_arch
    seeds_B = torch.zeros(num_slots, dtype=torch.int64, device=device) if arch.is_random else None
    return ActSettings(arch.depth, arch.loss, IGNORE_LABEL, num_slots, min_halt_steps_B=None, seeds_B=seeds_B)


def tokens_of_row(config: PretrainConfig) -> int:
    return config.global_batch_size // config.rows_per_step
