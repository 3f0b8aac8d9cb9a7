"""Decide by timing whether calls without gradient take the kernel of models/gated_product.py."""

from collections.abc import Sequence

import torch

from models.layers import NormalizedSwiGLU, SwiGLU
from models.parallel.layout import Layout
from models.tokens import TokenModel
from training.config import PretrainConfig
from utils.errors import UserError
from utils.ranks.world import World
from utils.text import one_line

# How far the kernel may move the result of a level, as a share of its norm. It rounds to 16 bits in
# fewer places.
_MOST_DIFFERENCE = 0.03


def with_swiglu_kernel(config: PretrainConfig, layout: Layout, world: World) -> tuple[PretrainConfig, list[str]]:
    """Replace swiglu_kernel=auto by true or false, and let the model use the kernel. Every rank.

    The config keeps the choice, because a resumed run has to round in the same places.
    """
    if config.swiglu_kernel is False:
        return config, []
    is_faster, found, why = False, "", _why_not(config, layout, world)
    if not why:
        try:
            plain_ms, kernel_ms, difference = _measure(config, layout, world)
        except Exception as error:  # a compiler raises many kinds
            why = one_line(error)[:200]
        else:
            is_faster = kernel_ms < plain_ms
            found = f"a level without gradient takes {kernel_ms:.3f} ms with the kernel, and {plain_ms:.3f} ms without"
            if not difference <= _MOST_DIFFERENCE:
                why = f"its result differs by {difference:.1%}"
    reasons = [each for each in world.gather_objects(why) if each]
    if reasons and config.swiglu_kernel is True:
        with world.shared_errors():
            raise UserError(f"swiglu_kernel=true can't be: {reasons[0]}; give swiglu_kernel=false")
    uses = not reasons and (config.swiglu_kernel is True or bool(world.broadcast_object(is_faster)))
    _use(layout, uses)
    note = f"swiglu_kernel={config.swiglu_kernel}: {'on' if uses else 'off'}, because {(reasons or [found])[0]}"
    return config.model_copy(update={"swiglu_kernel": uses}), [note]


def _why_not(config: PretrainConfig, layout: Layout, world: World) -> str:
    if world.device.type != "cuda":
        return f"the device is {world.device.type}, and Triton compiles for CUDA"
    if not isinstance(layout.model, TokenModel) or not _mlps(layout):
        return f"arch={config.arch.name} has no SwiGLU that it fits"
    if layout.model.dtype == torch.float32:
        return "arch.forward_dtype=float32, and it multiplies in 16 bits"
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
def _measure(config: PretrainConfig, layout: Layout, world: World) -> tuple[float, float, float]:
    """Return the ms of a level without and with the kernel, and by how much its result differs."""
    from triton.testing import do_bench

    model, generator = layout.model, torch.Generator(world.device).manual_seed(0)
    assert isinstance(model, TokenModel)
    shape = (config.num_slots // world.data_size // config.grad_accumulation, *model.state_shape)
    inputs = [torch.randn(shape, generator=generator, device=world.device).to(model.dtype) for _ in range(2)]
    level, ms, results = model.levels()[0], [], []
    for uses in (False, True):
        _use(layout, uses)
        results.append(level(*inputs, rotary=model.rotary()).float())
        ms.append(float(do_bench(lambda: level(*inputs, rotary=model.rotary()), return_mode="median")))
    plain, by_kernel = results
    return ms[0], ms[1], float((by_kernel - plain).norm() / plain.norm())
