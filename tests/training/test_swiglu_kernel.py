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


@pytest.mark.skipif(not TRITON.is_dir(), reason="Triton is not installed (make .venv/.dev)")
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
    types = {name: "constexpr" if name in constants else "i32" for name in names}
    types |= {"x": "*bf16", "weight": "*bf16", "y": "*bf16", "squares": "*fp32"}
    constexprs = {(names.index(name),): value for name, value in constants.items()}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in names if name not in constants}
    source = triton.compiler.ASTSource(_kernel.fn, types, constexprs, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": config.num_warps})
    assert "wgmma" in compiled.asm["ptx"]


def _decided(monkeypatch: pytest.MonkeyPatch, typed: str, measured: Any, **arch: Any) -> tuple[Any, str, int]:
    """Return the choice, the line about it, and how many MLPs take the kernel."""
    monkeypatch.setattr(swiglu_kernel, "_measure", measured)
    layout = Layout[Any, Any, Any](small_model("trm_mlp", forward_dtype="bfloat16", **arch), World.single())
    config, notes = with_swiglu_kernel(pretrain_config("arch=trm", f"swiglu_kernel={typed}"), layout, CUDA)
    return config.swiglu_kernel, notes[0], sum(mlp.gated_product is not None for mlp in swiglu_kernel._mlps(layout))


@with_triton
def test_the_faster_one_is_taken_if_it_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(config: object, layout: Any, world: object) -> None:
        swiglu_kernel._use(layout, True)
        raise OSError("no ptxas")

    num_mlps = 2  # over the tokens, and over the vectors
    assert _decided(monkeypatch, "auto", lambda *_: (2.0, 1.0, 0.01))[::2] == (True, num_mlps)
    assert _decided(monkeypatch, "auto", lambda *_: (1.0, 2.0, 0.01))[::2] == (False, 0)
    assert _decided(monkeypatch, "true", lambda *_: (1.0, 2.0, 0.01))[::2] == (True, num_mlps)
    for measured in (lambda *_: (2.0, 1.0, 0.5), lambda *_: (2.0, 1.0, float("nan")), fails):
        assert _decided(monkeypatch, "auto", measured)[::2] == (False, 0)
        with pytest.raises(UserError, match="give swiglu_kernel=false"):
            _decided(monkeypatch, "true", measured)
    with pytest.raises(UserError, match="no SwiGLU"):
        _decided(monkeypatch, "true", fails, mlp_t=False, mlp="conv_swiglu")
