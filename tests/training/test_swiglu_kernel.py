"""swiglu_kernel: the kernel is right, a Hopper can run it, and a faster one is taken."""

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from models.layers import NormalizedSwiGLU
from models.parallel.layout import Layout
from tests.in_process import pretrain_config
from tests.models.helpers import small_model
from training import swiglu_kernel
from training.swiglu_kernel import with_swiglu_kernel
from utils.errors import UserError
from utils.ranks.world import World

CUDA = replace(World.single(), device=torch.device("cuda"))


TRITON = Path(sys.prefix) / "triton"  # as the Makefile installs it
with_triton = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")


@pytest.mark.skipif(not TRITON.is_dir(), reason="Triton is not installed (make .venv/.triton)")
@pytest.mark.parametrize("module", ["pytest", "tests.models.gated_product_on_cpu"])
def test_in_a_process_that_has_triton(module: str) -> None:
    """Triton's interpreter computes the formula, and the tests below pass."""
    arguments = ["-q", "-k", "not process", __file__] if module == "pytest" else []
    variables = {"PYTHONPATH": os.pathsep.join(["", str(TRITON)])}
    variables |= {} if module == "pytest" else {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert done.returncode == 0 and "skipped" not in done.stdout, (done.stdout + done.stderr)[-3000:]


@with_triton
@pytest.mark.parametrize("columns", [False, True])
def test_a_hopper_multiplies_on_its_tensor_cores(columns: bool) -> None:
    import triton

    from models.gated_product import _CONFIGS, _kernel

    names, config = _kernel.fn.arg_names, _CONFIGS[0]
    constants = config.kwargs | dict.fromkeys(("x_m", "y_m") if columns else ("x_k", "weight_k", "y_w"), 1)
    constants |= {"WITH_SQUARES": True}
    types = {name: "constexpr" if name in constants else "i32" for name in names}
    types |= {"x": "*bf16", "weight": "*bf16", "y": "*bf16", "squares": "*fp32"}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name not in constants}
    source = triton.compiler.ASTSource(_kernel.fn, types, constexprs, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": config.num_warps})
    assert "wgmma" in compiled.asm["ptx"]


def _decided(
    monkeypatch: pytest.MonkeyPatch,
    typed: str,
    *,
    error: Any = 1e-3,
    times: tuple[float, float] = (2.0, 1.0),
    before: bool | None = None,
    **arch: Any,
) -> bool:
    """Return the choice, which all MLPs must follow."""

    def of_kernel(layout: Any) -> Any:
        swiglu_kernel._use(layout, True)
        if isinstance(error, Exception):
            raise error
        return error

    monkeypatch.setattr(swiglu_kernel, "_error", of_kernel)
    monkeypatch.setattr(swiglu_kernel, "_times", lambda *_: times)
    layout = Layout[Any, Any, Any](small_model("trm_mlp", forward_dtype="bfloat16", **arch), World.single())
    config = pretrain_config("arch=trm", f"swiglu_kernel={typed}")
    config, notes = with_swiglu_kernel(config, layout, CUDA, before=before)
    assert len(notes) == (typed == "auto"), "auto says what was chosen"
    uses = [mlp.gated_product is not None for mlp in swiglu_kernel._mlps(layout)]
    assert uses == [config.swiglu_kernel] * 2, "over the tokens, and over the vectors"
    return bool(config.swiglu_kernel)


@with_triton
def test_the_faster_one_is_taken_if_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    slower = (1.0, 2.0)
    assert _decided(monkeypatch, "auto")
    assert not _decided(monkeypatch, "auto", times=slower)
    assert not _decided(monkeypatch, "auto", fp8_no_grad=True)
    assert _decided(monkeypatch, "true", times=slower)
    assert _decided(monkeypatch, "auto", times=slower, before=True) and not _decided(monkeypatch, "auto", before=False)
    for error in (0.02, float("nan"), OSError("no ptxas")):
        assert not _decided(monkeypatch, "auto", error=error)
        for typed, before in (("true", None), ("auto", True)):
            with pytest.raises(UserError, match="give swiglu_kernel=false"):
                _decided(monkeypatch, typed, error=error, before=before)
    with pytest.raises(UserError, match="no SwiGLU"):
        _decided(monkeypatch, "true", mlp_t=False, mlp="conv_swiglu")


@with_triton
@pytest.mark.parametrize("over_first", [False, True])
def test_it_is_a_part_of_a_compiled_graph(monkeypatch: pytest.MonkeyPatch, over_first: bool) -> None:
    from models.gated_product import gated_product

    layer, kernels = NormalizedSwiGLU(24, 40, over_first=over_first), list[str]()

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        kernels.extend(str(node.target) for node in graph.graph.nodes if "triton_kernel" in str(node.target))
        return lambda *_: [torch.zeros(1)]

    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)  # it asks for a card
    layer.gated_product = gated_product
    with torch.no_grad():
        torch.compile(layer, backend=backend, fullgraph=True)(torch.randn(24, 24))
    assert len(kernels) == 1
