"""Generation with a cache gives the logits of the packed forward pass."""

from typing import Any

import pytest
import torch

from models.text.config import GPTConfig, HRMTextConfig, TextConfig
from models.text.generation import greedy
from models.text.packing import Packing
from tests.models.text.helpers import ARCHS, make_config, make_model

PROMPTS = [[5, 2, 9], [3, 7, 2, 2, 10, 8, 4], [1]]
NUM_NEW = 4


@pytest.mark.parametrize("mask", ["prefixlm", "causal"])
@pytest.mark.parametrize(
    ("arch", "options"),
    [
        *((arch, {}) for arch in ARCHS),
        (HRMTextConfig, {"norm_type": "post", "H_override": {"num_heads": 4, "attention": "causal"}}),
        (GPTConfig, {"num_heads": 4, "num_kv_heads": 2, "tie_head": True}),
    ],
    ids=str,
)
def test_the_cache_changes_nothing(arch: type[TextConfig], options: dict[str, Any], mask: str) -> None:
    model = make_model(make_config(arch, attention=mask, **options))
    tokens, logits = greedy(model, PROMPTS, NUM_NEW)
    for prompt, new, logits_TV in zip(PROMPTS, tokens.tolist(), logits, strict=True):
        inputs_N = torch.tensor(prompt + new)
        packing = Packing([(len(prompt), NUM_NEW)], len(inputs_N))
        y_ND = model.hidden(inputs_N, torch.arange(len(inputs_N)), packing, model.config.num_calls)
        expected_TV = model.logits(y_ND)[len(prompt) - 1 : -1]
        torch.testing.assert_close(logits_TV, expected_TV, rtol=1e-4, atol=1e-5)
        assert new == expected_TV.argmax(-1).tolist()


def test_prompts_do_not_see_one_another() -> None:
    model = make_model(make_config(HRMTextConfig))
    together, _ = greedy(model, PROMPTS, NUM_NEW)
    alone = [greedy(model, [prompt], NUM_NEW)[0][0].tolist() for prompt in PROMPTS]
    assert together.tolist() == alone
