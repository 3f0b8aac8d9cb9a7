"""Generation with a cache gives the logits of the packed forward pass."""

from typing import Any

import pytest
import torch
from torch import Tensor

from models.text.config import GPTConfig, HRMTextConfig, TextConfig
from models.text.generation import Decoder, generate
from models.text.model import TextModel
from models.text.packing import Packing
from models.text.sampling import Draws, Sampling
from tests.models.text.helpers import ARCHS, greedy, make_config, make_model

PROMPTS = [[5, 2, 9], [3, 7, 2, 2, 10, 8, 4], [1]]
NUM_NEW = 4


def _packed(model: TextModel, tokens: list[int], prefix_len: int) -> Tensor:
    packing = Packing([(prefix_len, len(tokens) - prefix_len)], len(tokens))
    return model.logits(model.hidden(torch.tensor(tokens), torch.arange(len(tokens)), packing, model.config.num_calls))


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
        expected_TV = _packed(model, prompt + new, len(prompt))[len(prompt) - 1 : -1]
        torch.testing.assert_close(logits_TV, expected_TV, rtol=1e-4, atol=1e-5)
        assert new == expected_TV.argmax(-1).tolist()


def test_the_beginning_of_a_text_is_read_as_in_training_on_text() -> None:
    """A sample of text has a prefix of one token, and the rest sees what is before it."""
    model = make_model(make_config(HRMTextConfig))
    logits_BV = Decoder(model, PROMPTS, most_new_tokens=0, prefix_lens=[1] * len(PROMPTS)).read_prompts()
    for prompt, logits_V in zip(PROMPTS, logits_BV, strict=True):
        torch.testing.assert_close(logits_V, _packed(model, prompt, 1)[-1], rtol=1e-4, atol=1e-5)
    options: dict[str, Any] = {"stop_tokens": (), "sampling": Sampling(1.0)}
    assert _texts(model, PROMPTS, prefix_lens=[1, 1, 1], **options) != _texts(model, PROMPTS, **options)


def _texts(model: TextModel, prompts: list[list[int]], **options: Any) -> list[list[int]]:
    steps = list(generate(model, prompts, most_new_tokens=12, **options))
    texts = [[token for step in steps if (token := step[n]) is not None] for n in range(len(prompts))]
    for n, text in enumerate(texts):  # nothing follows the end
        assert [step[n] for step in steps] == [*text, *[None] * (len(steps) - len(text))]
    return texts


def test_each_prompt_ends_with_its_first_stop_token() -> None:
    model = make_model(make_config(HRMTextConfig))
    unstopped = greedy(model, PROMPTS, 12)[0].tolist()
    stop_tokens = {unstopped[0][2], unstopped[1][5]}
    expected = []
    for text in unstopped:
        ends = [place for place, token in enumerate(text) if token in stop_tokens]
        expected.append(text[: ends[0] + 1] if ends else text)
    assert len({len(text) for text in expected}) > 1, "the prompts should end at different places"
    assert _texts(model, PROMPTS, stop_tokens=stop_tokens) == expected
    assert _texts(model, PROMPTS, stop_tokens=()) == unstopped


def test_samples_do_not_depend_on_the_other_prompts() -> None:
    model = make_model(make_config(HRMTextConfig))
    options: dict[str, Any] = {"sampling": Sampling(1.0, top_k=8), "stop_tokens": [3]}
    together = _texts(model, PROMPTS, draws=Draws(5, range(3)), **options)
    for n, prompt in enumerate(PROMPTS):
        assert _texts(model, [prompt], draws=Draws(5, [n]), **options) == [together[n]]
    assert _texts(model, PROMPTS, draws=Draws(6, range(3)), **options) != together


def test_tokens_of_the_rounded_vocabulary_are_not_drawn() -> None:
    model = make_model(make_config(HRMTextConfig))
    texts = _texts(model, PROMPTS, stop_tokens=(), vocab_size=3, sampling=Sampling(5.0))
    assert {token for text in texts for token in text} == {0, 1, 2}
