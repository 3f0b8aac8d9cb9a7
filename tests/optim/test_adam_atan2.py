"""AdamATan2 equals its definition, and its state survives a checkpoint bit for bit."""

import math

import torch

from optim.adam_atan2 import AdamATan2

BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1


def _parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(3, 2), (4,), (1,)]]


def _set_gradients(parameters: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in parameters:
        parameter.grad = 10.0 ** (step - 4) * torch.randn(parameter.shape, generator=generator)
    assert parameters[1].grad is not None
    parameters[1].grad[0] = 0.0  # without a gradient other optimizers of this kind would divide 0 by 0


def _reference(values: list[float], gradients: list[list[float]], rates: list[float]) -> list[float]:
    """Compute the definition for each number, in double precision."""
    beta1, beta2 = BETAS
    result = []
    for i, p in enumerate(values):
        m = v = 0.0
        for t, (gradient, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
            g = gradient[i]
            p *= 1 - lr * WEIGHT_DECAY
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            p -= lr / (1 - beta1**t) * math.atan2(m, math.sqrt(v / (1 - beta2**t)))
        result.append(p)
    return result


def test_the_update_equals_the_definition() -> None:
    parameters = _parameters()
    start = [parameter.flatten().tolist() for parameter in parameters]
    rates = [0.01, 0.1, 0.05, 0.0, 0.2, 0.1, 0.03]
    optimizer = AdamATan2(parameters, lr=1.0, betas=BETAS, weight_decay=WEIGHT_DECAY)
    seen: list[list[list[float]]] = [[] for _ in parameters]
    for step, lr in enumerate(rates):
        _set_gradients(parameters, step)
        optimizer.param_groups[0]["lr"] = lr
        for gradients, parameter in zip(seen, parameters, strict=True):
            assert parameter.grad is not None
            gradients.append(parameter.grad.flatten().tolist())
        optimizer.step()
    for parameter, values, gradients in zip(parameters, start, seen, strict=True):
        expected = torch.tensor(_reference(values, gradients, rates))
        torch.testing.assert_close(parameter.detach().flatten(), expected, rtol=1e-5, atol=1e-6)


def test_every_parameter_counts_its_own_updates() -> None:
    early, late = _parameters()[:2]
    start, gradient = late.tolist(), [0.5, -2.0, 0.01, 3.0]
    optimizer = AdamATan2([early, late], lr=0.1, betas=BETAS, weight_decay=WEIGHT_DECAY)
    for step in range(3):
        early.grad = torch.ones_like(early)
        late.grad = torch.tensor(gradient) if step == 2 else None
        optimizer.step()
    expected = torch.tensor(_reference(start, [gradient], [0.1]))
    torch.testing.assert_close(late.detach(), expected, rtol=1e-5, atol=1e-6)
