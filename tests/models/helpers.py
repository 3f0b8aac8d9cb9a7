"""A small HRM for tests."""

from typing import Any

import torch

from models.act import Batch
from models.hrm import HRM, HRMConfig

SEQ_LEN, VOCAB_SIZE, NUM_PUZZLES = 6, 7, 5


def small_options(**changes: Any) -> dict[str, Any]:
    return {
        "name": "hrm",
        "hidden_size": 32,
        "num_heads": 2,
        "expansion": 4.0,
        "H_cycles": 2,
        "L_cycles": 2,
        "H_layers": 1,
        "L_layers": 1,
        "halt_max_steps": 4,
        "halt_exploration_prob": 0.0,
        "puzzle_emb_ndim": 32,
        "pos_encodings": "rope",
        "rope_theta": 10000.0,
        "forward_dtype": "float32",
        "mlp_t": False,
        "loss": {"loss_type": "stablemax_cross_entropy"},
        **changes,
    }


def small_hrm(*, seed: int = 0, **changes: Any) -> HRM:
    """Initialised, and with a q head and puzzle rows that are not zero, so that their paths are live."""
    config = HRMConfig.model_validate(small_options(**changes))
    model = HRM(config, seq_len=SEQ_LEN, vocab_size=VOCAB_SIZE, num_puzzle_identifiers=NUM_PUZZLES)
    generator = torch.Generator().manual_seed(seed)
    model.init_weights(generator)
    with torch.no_grad():
        model.q_head.weight.normal_(generator=generator)
        assert model.q_head.bias is not None
        model.q_head.bias.zero_()
        if model.puzzle_embedding is not None:
            model.puzzle_embedding.weight.normal_(generator=generator)
    return model


def random_batch(batch_size: int, *, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)

    def draw(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, dtype=torch.int32)

    return {
        "inputs": draw(VOCAB_SIZE, batch_size, SEQ_LEN),
        "labels": draw(VOCAB_SIZE, batch_size, SEQ_LEN),
        "puzzle_identifiers": draw(NUM_PUZZLES, batch_size),
    }
