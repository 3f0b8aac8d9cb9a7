"""A device without arithmetic that refuses every wait of the host: tests for GPUs without a GPU.

PyTorch lets a Python program register a device (PrivateUse1), and FakeTensorMode gives its tensors
shapes and dtypes, but no values. So nothing can be read from the device: `.item()`, `bool(tensor)`,
a mask as an index, and a tensor on the wrong device raise errors. `FakeAccelerator` adds errors for
copies that a CUDA stream would have to wait for, and counts operators and bytes.

The registration is for the whole process and can't be undone. Therefore only a process of its own
may call `register` (tests.spawn.run_ranks starts one).
"""

import ast
import sys
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

_NAME = "fake_accelerator"
_REPOSITORY = Path(__file__).resolve().parents[1]
_HERE = str(Path(__file__).resolve())
# Operators that read or write some rows of their first argument.
_OF_ROWS = {
    getattr(torch.ops.aten, name)
    for name in ("embedding", "gather", "index", "index_add_", "index_copy_", "index_put_", "index_select")
}

needs_fake_accelerator = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason=f"PyTorch {torch.__version__} can't register a device from Python",
)


class HostWait(AssertionError):
    """The host waited for the device."""


def register() -> torch.device:
    """Register the device in this process, for good, and return it."""
    backend_registration._setup_privateuseone_for_python_backend(_NAME)
    return torch.device(_NAME, 0)


@cache
def _functions(path: str) -> list[tuple[int, int, str]]:
    """Return the first line, the last line and the qualified name of each function of a file."""
    found = list[tuple[int, int, str]]()

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{prefix}{child.name}"
                if isinstance(child, ast.FunctionDef):
                    found.append((child.lineno, child.end_lineno or child.lineno, name))
                visit(child, f"{name}.")

    visit(ast.parse(Path(path).read_text()), "")
    return found


@cache
def _is_ours(path: str) -> bool:
    return path.startswith(str(_REPOSITORY)) and "/.venv" not in path and path != _HERE


@cache
def _at(path: str, line: int) -> tuple[str, str]:
    """Return the innermost function that holds a line, such as "models/layers.py rms_norm"."""
    inside = [(first, name) for first, last, name in _functions(path) if first <= line <= last]
    relative = Path(path).relative_to(_REPOSITORY)
    return f"{relative} {max(inside)[1] if inside else '<module>'}", f"{relative}:{line}"


def _place() -> tuple[str, str]:
    """Return the function of this repository that is running, and its file and line."""
    node = torch._C._current_autograd_node()
    if node is not None:
        # Anomaly detection keeps the stack of each operator of the forward pass.
        metadata: Any = node.metadata  # typed as a method
        for entry in reversed(metadata.get("traceback_", [])):
            path, line = entry.split('"')[1], int(entry.split("line ")[1].split(",")[0])
            if _is_ours(path):
                name, place = _at(path, line)
                return f"{name} (backward)", place
        return "(backward)", ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if _is_ours(path):
            return _at(path, frame.f_lineno)
        frame = frame.f_back
    return "(elsewhere)", ""


class FakeAccelerator(TorchDispatchMode):
    """Raises HostWait where a CUDA device would let the host wait, and counts what is computed.

    Use `fake_accelerator`, which enters this mode.

    Attributes:
        operators: how often each function of this repository called each operator on the device.
            Views don't count. Functions stand as "models/layers.py rms_norm", their backward
            passes as "models/layers.py rms_norm (backward)".
        num_bytes: the bytes that these operators read and wrote, by function.
    """

    def __init__(self, fake: FakeTensorMode) -> None:
        super().__init__()
        self._fake, self._refuses_waits = fake, True
        self.operators: dict[str, Counter[str]] = defaultdict(Counter)
        self.num_bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        if func is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "cpu":
            return 1  # such as the step count of an optimizer, which lies on the host
        if not all(isinstance(tensor, FakeTensor) for tensor in _tensors_in((args, kwargs))):
            args, kwargs = tree_map_only(Tensor, self._as_fake, (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise HostWait(f"{_place()[1]} waits for a value or a shape that only the device knows ({func})") from error
        tensors = _tensors_in((args, kwargs, result))
        places = {tensor.fake_device.type if isinstance(tensor, FakeTensor) else "cpu" for tensor in tensors}
        if _NAME in places:
            if self._refuses_waits and "cpu" in places and _copies(func) and not _is_non_blocking(func, args, kwargs):
                raise HostWait(f"{_place()[1]} copies between host and device and waits for the copy ({func})")
            if not _is_view(func):
                self._count(func, tensors)
        return result

    @contextmanager
    def waiting_is_allowed(self) -> Iterator[None]:
        """Let the host wait for copies inside, as it may while a run starts."""
        self._refuses_waits = False
        try:
            yield
        finally:
            self._refuses_waits = True

    def forget(self) -> None:
        self.operators.clear()
        self.num_bytes.clear()

    def _as_fake(self, tensor: Tensor) -> Tensor:
        """Return the tensor without its values, such as those of a batch that a thread read."""
        return tensor if isinstance(tensor, FakeTensor) else self._fake.from_tensor(tensor)

    def _count(self, func: Any, tensors: list[Tensor]) -> None:
        name, _ = _place()
        self.operators[name][func.overloadpacket.__name__] += 1
        distinct = {id(tensor): tensor for tensor in tensors}
        if func.overloadpacket in _OF_ROWS:  # of the table, only as much as there is to read or to write
            table = distinct.pop(id(tensors[0]))
            self.num_bytes[name] += min(max(tensor.nbytes for tensor in distinct.values()), table.nbytes)
        self.num_bytes[name] += sum(tensor.nbytes for tensor in distinct.values())


def _tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors among the arguments or results of an operator."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, tuple | list):
        return []
    return [tensor for each in value for tensor in _tensors_in(each)]


def _copies(func: Any) -> bool:
    return func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)


def _is_non_blocking(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    by_place = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
    return bool({**by_place, **kwargs}.get("non_blocking", False))


def _is_view(func: Any) -> bool:
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


@contextmanager
def fake_accelerator(device: torch.device, *, as_cuda: bool = False) -> Iterator[FakeAccelerator]:
    """Let all tensors that are made inside be fake; `as_cuda`: they say that they lie on CUDA."""
    on_device = property(lambda tensor: tensor.device == device)
    answer = patch.object(FakeTensor, "is_cuda", on_device, create=True)
    with FakeTensorMode() as fake, FakeAccelerator(fake) as seen:
        if as_cuda:
            answer.start()
        try:
            yield seen
        finally:
            if as_cuda:
                answer.stop()


def failure_of(check: Any, *args: Any) -> str:
    try:
        check(*args)
    except Exception:
        return traceback.format_exc()
    return ""
