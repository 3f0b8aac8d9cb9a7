"""AdamATan2 equals its definition, and its state survives a checkpoint bit for bit."""

import math

import torch

from optim.adam import AdamATan2

BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1


def _reference(p: float, gradients: list[float], rates: list[float]) -> float:
    (beta1, beta2), m, v = BETAS, 0.0, 0.0
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
        p *= 1 - lr * WEIGHT_DECAY
        m = beta1 * m + (1 - beta1) * g
        v = beta2 * v + (1 - beta2) * g * g
        p -= lr / (1 - beta1**t) * math.atan2(m, math.sqrt(v / (1 - beta2**t)))
    return p


def test_the_update_equals_the_definition() -> None:
    """The last parameter has its first gradient later, and counts its own updates."""
    generator = torch.Generator().manual_seed(100)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(3, 2), (4,), (1,)]]
    start = [parameter.flatten().tolist() for parameter in parameters]
    rates = [0.01, 0.1, 0.05, 0.0, 0.2, 0.1, 0.03]
    optimizer = AdamATan2(parameters, lr=1.0, betas=BETAS, weight_decay=WEIGHT_DECAY)
    seen: list[list[list[float]]] = [[] for _ in parameters]
    for step, lr in enumerate(rates):
        optimizer.param_groups[0]["lr"] = lr
        for gradients, parameter in zip(seen, parameters, strict=True):
            if parameter is parameters[-1] and step < 3:
                continue
            gradient = 10.0 ** (step - 4) * torch.randn(parameter.shape, generator=generator)
            gradient.view(-1)[0] *= parameter is not parameters[1]  # other optimizers would divide 0 by 0
            parameter.grad = gradient
            gradients.append(gradient.flatten().tolist())
        optimizer.step()
    for parameter, values, gradients in zip(parameters, start, seen, strict=True):
        of_each = zip(values, zip(*gradients, strict=True), strict=True)
        expected = torch.tensor([_reference(p, list(its), rates[-len(gradients) :]) for p, its in of_each])
        torch.testing.assert_close(parameter.detach().flatten(), expected, rtol=1e-5, atol=1e-6)
