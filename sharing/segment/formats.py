"""Write a segment as ONNX, as an AOTInductor package, and as TorchScript."""

import io
import logging
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sharing.segment.function import Function, SegmentFunction, TextFunction
from sharing.segment.model import Run, onnx_runner
from utils.errors import UserError

# Constants with more numbers stay what they are. Otherwise the optimizer of ONNX would store a
# transposed copy of each weight for each call of the recursion, and int8 weights as float32.
_LARGEST_FOLDED = 100


def write_onnx(function: Function, inputs: Sequence[Tensor], file: Path) -> Run:
    """Write a file of ONNX, and return what runs it."""
    try:
        import onnx_ir
        import onnxruntime  # noqa: F401 (which runs the file in the end)
        import onnxscript
    except ImportError:
        raise UserError("--format onnx needs more packages; run pip install -r requirements-export.txt") from None
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it says that torchvision is missing
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        program = torch.onnx.export(
            _exported(function, inputs),
            dynamo=True,
            input_names=function.names,
            output_names=function.outputs,
            optimize=False,
            verbose=False,
        )
    assert program is not None
    onnxscript.optimizer.optimize(program.model, input_size_limit=_LARGEST_FOLDED)
    # Stack traces name the folders of this machine.
    onnx_ir.passes.common.ClearMetadataAndDocStringPass()(program.model)
    for value in (each for node in program.model.graph for each in node.outputs):
        if value not in program.model.graph.outputs:
            value.shape = value.type = None
    program.save(file)
    return onnx_runner(file, str(file), function.names, function.outputs)


def write_aoti(function: Function, inputs: Sequence[Tensor], file: Path) -> Run:
    """Compile a package for this kind of CPU, and return what runs it. It needs a C++ compiler."""
    from torch._inductor import aoti_compile_and_package, aoti_load_package

    # A program of code and weights, which only whoever compiled it should run.
    loaded = aoti_load_package(aoti_compile_and_package(_exported(function, inputs), package_path=str(file)))
    return lambda given: loaded(*given)


def write_torchscript(function: Function, inputs: Sequence[Tensor], file: Path) -> Run:
    """Trace the function, write it, and return what was traced. No program here reads the file."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of sizes that are numbers; the comparison finds wrong ones
        traced = torch.jit.trace(function, tuple(inputs), check_trace=False)
        whole = io.BytesIO()
        torch.jit.save(traced, whole)
    with zipfile.ZipFile(whole) as written, zipfile.ZipFile(file, "w") as stripped:
        for entry in written.infolist():
            if not entry.filename.endswith(".debug_pkl"):  # stack traces name the folders of this machine
                stripped.writestr(entry.filename, written.read(entry))
    return lambda given: traced(*given)


WRITERS: dict[str, Callable[[Function, Sequence[Tensor], Path], Run]] = {
    "onnx": write_onnx,
    "aoti": write_aoti,
    "torchscript": write_torchscript,
}
FILES = {
    "onnx": "model.onnx",
    "aoti": "model.pt2",
    "torchscript": "model.pt",
    "web": "page.html",
    "mlx": "model.safetensors",
}
"""Each format's name for its file."""


def _exported(function: Function, inputs: Sequence[Tensor]) -> torch.export.ExportedProgram:
    of = torch.export.Dim
    batch = of("batch", min=1, max=2**20)
    shapes: dict[str, dict[int, object]] = {name: {0: batch} for name in function.names}
    if isinstance(function, TextFunction):
        shapes["tokens"][1] = of("length", min=1, max=2**20)
    if isinstance(function, SegmentFunction) and function.has_any_size:
        # PyTorch gives these names to SymPy, where "symbols" has another meaning.
        cells, num_symbols = of("cells", min=1, max=2**20), of("num_symbols", min=1, max=2**10)
        shapes["tokens"][1] = cells
        shapes["units"] = {0: of("units", min=1, max=2**20), 1: cells}
        shapes |= {name: {0: batch, 1: cells, 2: num_symbols} for name in function.states}
        if "noise" in shapes:
            shapes["noise"] = {0: batch, 1: cells, 2: num_symbols + 2}
    return torch.export.export(function, tuple(inputs), dynamic_shapes=[tuple(shapes[name] for name in function.names)])
