"""Sampling keeps its definition, written out here slowly, and depends on seed and prompt alone."""

# B = prompts, V = vocabulary

import numpy as np
import pytest
import torch
from torch import Tensor

from models.text.sampling import GREEDY, Draws, Sampling, probabilities, sample
from utils.errors import UserError

LOGITS_BV = torch.tensor([[1.0, 3.0, 2.0, 0.0, 3.0], [0.0, -1.0, 5.0, 4.0, -9.0]])


def _reference(logits_V: list[float], sampling: Sampling) -> list[float]:
    weights_V = [np.exp(logit / sampling.temperature) for logit in logits_V]
    order = sorted(range(len(logits_V)), key=lambda token: (-weights_V[token], token))[: sampling.top_k]
    total = sum(weights_V[token] for token in order)
    kept, reached = [], 0.0
    for token in order:
        if sampling.top_p is None or reached < sampling.top_p:
            kept.append(token)
            reached += weights_V[token] / total
    total = sum(weights_V[token] for token in kept)
    return [weights_V[token] / total if token in kept else 0.0 for token in range(len(logits_V))]


@pytest.mark.parametrize("temperature", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("top_k", [None, 1, 2, 3, 9])
@pytest.mark.parametrize("top_p", [None, 0.01, 0.5, 0.9, 1.0])
def test_probabilities_equal_the_definition(temperature: float, top_k: int | None, top_p: float | None) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    expected_BV = torch.tensor([_reference(row, sampling) for row in LOGITS_BV.tolist()], dtype=torch.float64)
    torch.testing.assert_close(probabilities(LOGITS_BV, sampling), expected_BV, rtol=1e-12, atol=1e-12)


def test_no_temperature_takes_the_likeliest_token() -> None:
    draws_B = torch.tensor([0.999, 0.0], dtype=torch.float64)
    assert sample(LOGITS_BV, GREEDY, draws_B).tolist() == [1, 2]  # the first of two equal ones
    assert sample(LOGITS_BV, Sampling(1e-30), draws_B).tolist()[1] == 2
    assert probabilities(LOGITS_BV, GREEDY).tolist()[1] == [0, 0, 1, 0, 0]


def test_tokens_come_as_often_as_their_probability_says() -> None:
    sampling, num = Sampling(1.0, top_k=3), 2000
    draws_B = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    tokens_B = sample(LOGITS_BV[:1].expand(num, -1), sampling, draws_B)
    shares_V = tokens_B.bincount(minlength=5) / num
    torch.testing.assert_close(shares_V.double(), probabilities(LOGITS_BV[:1], sampling)[0], rtol=0, atol=1 / num)


@pytest.mark.parametrize("draw", [0.0, np.nextafter(1.0, 0.0)])
def test_a_token_without_probability_is_never_drawn(draw: float) -> None:
    draws_B = torch.full((2,), draw, dtype=torch.float64)
    for top_k in range(1, 6):
        sampling = Sampling(0.7, top_k=top_k)
        tokens_B = sample(LOGITS_BV, sampling, draws_B)
        chosen_B: Tensor = probabilities(LOGITS_BV, sampling)[torch.arange(2), tokens_B]
        assert (chosen_B > 0).all()


def test_seeds_and_prompts_have_draws_of_their_own() -> None:
    assert len({Draws(seed, [number]).next().item() for seed in (7, 8) for number in (0, 1)}) == 4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("logits", [[1.0, torch.nan, 0.5], [-torch.inf] * 3])
def test_logits_that_are_not_finite_give_no_token(logits: list[float], temperature: float) -> None:
    with pytest.raises(UserError, match=r"values that are not finite, so it has no next token; give arch"):
        sample(torch.tensor([[1.0, 2.0, 3.0], logits]), Sampling(temperature), torch.tensor([0.5, 0.5]))
