"""Decide by timing whether calls without gradient take the kernel of models/gated_product.py."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from models.layers import NormalizedSwiGLU, SwiGLU
from models.parallel.layout import Layout
from models.tokens import TokenModel
from training.config import PretrainConfig
from utils.errors import UserError
from utils.ranks.world import World
from utils.text import one_line


def with_swiglu_kernel(
    config: PretrainConfig, layout: Layout, world: World, *, before: bool | None = None
) -> tuple[PretrainConfig, list[str]]:
    """Replace swiglu_kernel=auto by true or false, and let the model use the kernel. Every rank.

    Args:
        before: what the checkpoint says. The run keeps it, because the kernel rounds otherwise.
    """
    is_auto, found = config.swiglu_kernel == "auto", "as before in this run"
    wanted = before if is_auto and before is not None else config.swiglu_kernel
    if wanted is False:
        notes = [f"swiglu_kernel=auto: off; {found}"] if is_auto else []
        return config.model_copy(update={"swiglu_kernel": False}), notes
    is_wanted, why = wanted is True, _why_not(config, layout, world)
    if not why:
        try:
            error, most = _error(layout), torch.finfo(layout.model.dtype).eps
            if not error <= most:
                why = f"its results are off by {error:.1e}, more than the spacing of the dtype, {most:.1e}"
            elif wanted == "auto":
                plain_ms, kernel_ms = _times(config, layout, world)
                is_wanted = kernel_ms < plain_ms
                found = f"a level without gradient takes {kernel_ms:.3f} ms with it and {plain_ms:.3f} ms without"
        except Exception as failure:  # a compiler raises many kinds
            why = one_line(failure)[:200]
    said = world.gather_objects((why, is_wanted))
    reasons = [each for each, _ in said if each]
    if reasons and (before or not is_auto):
        with world.shared_errors():
            raise UserError(f"this run needs swiglu_kernel, but {reasons[0]}; give swiglu_kernel=false")
    uses = not reasons and said[0][1]  # rank 0 decides
    _use(layout, uses)
    notes = [f"swiglu_kernel=auto: {'on' if uses else 'off'}; {(reasons or [found])[0]}"] if is_auto else []
    return config.model_copy(update={"swiglu_kernel": uses}), notes


def _why_not(config: PretrainConfig, layout: Layout, world: World) -> str:
    if world.device.type != "cuda":
        return f"the device is {world.device.type}, and Triton compiles for CUDA"
    if not isinstance(layout.model, TokenModel) or not _mlps(layout):
        return f"arch={config.arch.name} has no SwiGLU that it fits"
    arch = layout.model.config
    if not (arch.has_target_pass or arch.has_calls_without_gradient) or arch.fp8_no_grad:
        return "there are no calls without gradient that are not in FP8"
    if layout.model.dtype == torch.float32:
        return "arch.forward_dtype is float32, and it multiplies in 16 bits"
    if config.deterministic:
        return "deterministic is true, and Triton may choose other blocks at the next start"
    if config.parallel.name != "ddp":
        return f"with parallel={config.parallel.name} a rank has a part of each matrix"
    return ""


def _mlps(layout: Layout) -> Sequence[SwiGLU]:
    return [each for each in layout.model.modules() if type(each) in (SwiGLU, NormalizedSwiGLU)]  # type: ignore[misc]


def _use(layout: Layout, uses: bool) -> None:
    if uses:
        from models.gated_product import gated_product  # needs Triton
    for mlp in _mlps(layout):
        mlp.gated_product = gated_product if uses else None


@torch.no_grad()
def _error(layout: Layout) -> float:
    """Return the largest error of the kernel for an MLP of the model, as a share of the norm."""
    from models.gated_product import gated_product

    errors = []
    for mlp in _mlps(layout):
        weight, over_first = mlp.gate_up_proj.weight.to(layout.model.dtype), mlp.over_first
        generator = torch.Generator(weight.device).manual_seed(0)
        x_KM = torch.randn(weight.shape[1], 256, generator=generator, device=weight.device).to(weight.dtype)
        x = x_KM if over_first else x_KM.mT.contiguous()
        gate, up = (weight.float() @ x_KM.float()).chunk(2)
        exact = F.silu(gate) * up, (gate * up).square().mean(0, keepdim=True)
        results = gated_product(x, weight, over_first=over_first, with_squares=mlp.is_normalized)
        for found, right in zip(results, exact, strict=True):
            if found is not None:
                errors.append(float(((found if over_first else found.mT) - right).norm() / right.norm()))
    return max(errors)


@torch.no_grad()
def _times(config: PretrainConfig, layout: Layout, world: World) -> tuple[float, float]:
    """Return the ms of a call of a level without and with the kernel."""
    from triton.testing import do_bench

    model, slots = layout.model, world.slice_of(config.num_slots)
    assert isinstance(model, TokenModel)
    num_sequences = (slots.stop - slots.start) // config.grad_accumulation * model.config.num_states
    shape = (num_sequences, *model.state_shape)
    generator = torch.Generator(world.device).manual_seed(0)
    inputs = [torch.randn(shape, generator=generator, device=world.device).to(model.dtype) for _ in range(2)]
    level, ms = model.levels()[-1], []
    for uses in (False, True):
        _use(layout, uses)
        ms.append(float(do_bench(lambda: level(*inputs, rotary=model.rotary()), return_mode="median")))
    return ms[0], ms[1]
