"""A step can be replayed: two steps issue the same operators, with the same numbers and memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.carry import Carry
from models.text.objective import TextBatch
from pretrain import stepper
from tests.in_process import SINGLE, Begun, begin, changed, mistake
from tests.test_family import ARCHS, OPTIMS, OTHER_FORWARD, OTHER_GRADIENT
from training.plan import Plan
from training.step import StepResult, StepSettings, TrainStep
from training.step_graph import StepGraph
from utils.batch import Batch

NUM_WARM, NUM_RECORDED = 1, 2
OPTIONS = {
    **{arch: [f"arch={arch}", *(["arch.recurrent=true"] if arch == "transformer" else [])] for arch in ARCHS},
    **{f"optim={optim}": ["arch=trm", f"optim={optim}"] for optim in OPTIMS},
    **{name: ["arch=trm", *typed] for name, typed in {**OTHER_FORWARD, **OTHER_GRADIENT}.items()},
    "exploration, average, clipping": ["arch=trm", "arch.halt_exploration_prob=0.5", "ema=true", "grad_clip=0.1"],
    "accumulation": ["arch=trm", "grad_accumulation=2"],
    "blocks computed again": ["arch=trm", "arch.activation_checkpointing=block"],
    "cycles computed again": ["arch=trm", "arch.activation_checkpointing=cycle"],
    "frozen weights": ["arch=trm", "freeze_weights=true"],
    "frozen blocks": ["arch=trm", "freeze=blocks"],
}


class _Recorder(TorchDispatchMode):
    """Notes each operator with its numbers, and its tensors by the memory in which they lie.

    Memory that was there before counts by its address. What a step itself makes counts by its turn,
    because a graph gives it the same place in each replay.
    """

    def __init__(self, on_host: list[Tensor]) -> None:
        super().__init__()
        self.log: list[str] = []
        self._made: dict[int, int] = {}
        self._kept: list[Tensor] = []  # otherwise their memory would be used again
        self._on_host = {tensor.data_ptr() for tensor in on_host}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = tree_leaves((args, kwargs or {}))
        tensors = [each for each in given if isinstance(each, Tensor)]
        if func.namespace == "profiler" or (tensors and all(tensor.data_ptr() in self._on_host for tensor in tensors)):
            return func(*args, **(kwargs or {}))  # what the host counts for itself
        needs_host = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))
        if func is torch.ops.aten.index.Tensor and all(tensor.dtype != torch.bool for tensor in tensors):
            needs_host = False  # only a mask has as many rows as the device finds
        needs_host |= any(tensor.data_ptr() in self._on_host for tensor in tensors)
        self.log.append(f"{func} {[self._name(each) for each in given]}{' needs the host' if needs_host else ''}")
        result = func(*args, **(kwargs or {}))
        known = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        for made in (each for each in tree_leaves(result) if isinstance(each, Tensor)):
            self._kept.append(made)
            if (pointer := made.untyped_storage().data_ptr()) not in known:
                self._made.setdefault(pointer, len(self._made))
        return result

    def _name(self, value: object) -> str:
        if not isinstance(value, Tensor):
            return repr(value)
        pointer = value.untyped_storage().data_ptr()
        place = f"made {self._made[pointer]}" if pointer in self._made else f"at {pointer}"
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.storage_offset()} {place}"


Fault = Callable[[StepGraph], None]


class _RecordedGraph(StepGraph):
    """A StepGraph, each of whose steps is recorded."""

    def __init__(self, begun: Begun, fault: Fault) -> None:
        plain = stepper(begun.state, print, SINGLE)

        def step(batch: Batch | TextBatch, settings: StepSettings) -> StepResult:
            fault(self)
            return plain(batch, settings)

        super().__init__(step, begun.state, print, SINGLE)
        self.recorders: list[_Recorder] = []

    def step(self, settings: StepSettings) -> StepResult:
        state = self._state.optimizers.export_state(self._state.model)
        recorder = _Recorder([tensor for name, tensor in state.items() if ".step." in name])
        with recorder:
            result = super().step(settings)
        self.recorders.append(recorder)
        return result


def _begun(data: Path, run: Path, *typed: str) -> Begun:
    fixed = ["debug=tiny", "device=cpu", "arch.H_cycles=2", "arch.L_cycles=2", "eval_every_n_steps=null"]
    schedule = ["best_metric=null", "lr_warmup_steps=100", "lr_min_ratio=0.1"]
    return begin([*fixed, *schedule, f"data_path={data}", f"checkpoint_path={run}", *typed])


def _steps(begun: Begun, take: TrainStep, numbers: range) -> None:
    plan = Plan.make(begun.start.config, begun.data, begun.state.progress, SINGLE)
    loader: Any = plan.kind.loader(begun.start.config, begun.data.train, plan.sampler, None, SINGLE)
    for number, batch in zip(numbers, loader.batches(numbers), strict=True):
        take(batch, StepSettings.at(number, plan, SINGLE))


def _difference(begun: Begun, fault: Fault = lambda graph: None) -> str:
    """Return the first operator that two steps issue differently, or that needs the host."""
    graph = _RecordedGraph(begun, fault)
    _steps(begun, graph, range(1, NUM_WARM + NUM_RECORDED + 1))
    for one, other in pairwise(recorder.log for recorder in graph.recorders[NUM_WARM:]):
        assert len(one) > 100
        for a, b in zip(one, other, strict=True):
            if a != b or "needs the host" in a:
                return f"{a}\nthen\n{b}"
    return ""


@pytest.mark.parametrize("name", OPTIONS)
def test_two_steps_are_the_same_to_the_device(data: Path, tmp_path: Path, name: str) -> None:
    assert _difference(_begun(data, tmp_path / "run", *OPTIONS[name])) == ""


def _asks_the_device(graph: StepGraph) -> None:
    next(graph._state.model.parameters()).sum().item()


def _captures_a_rate(graph: StepGraph) -> None:
    (group, *_) = next(iter(graph._state.optimizers._by_name.values())).param_groups
    with torch.no_grad():
        group["params"][0].mul_(1 - group["lr"])


def _captures_a_count(graph: StepGraph) -> None:
    ((parameter, state), *_) = next(iter(graph._state.optimizers._by_name.values())).state.items()
    with torch.no_grad():
        parameter.mul_(state["step"])


def _reallocates_a_state(graph: StepGraph) -> None:
    moments = next(iter(next(iter(graph._state.optimizers._by_name.values())).state.values()))
    moments["exp_avg"] = moments["exp_avg"].clone()


def _moves_the_carry(graph: StepGraph) -> None:
    graph._carry = Carry.from_tensors({name: tensor.clone() for name, tensor in graph._carry.tensors().items()})


@pytest.mark.parametrize(
    "fault", [_asks_the_device, _captures_a_rate, _captures_a_count, _reallocates_a_state, _moves_the_carry]
)
def test_a_step_that_cant_be_replayed_is_seen(data: Path, tmp_path: Path, fault: Fault) -> None:
    assert _difference(_begun(data, tmp_path / "run", "arch=trm"), fault) != ""


@pytest.mark.parametrize("optim", OPTIMS)
def test_a_step_reads_the_same_numbers_from_the_device(data: Path, tmp_path: Path, optim: str) -> None:
    """Both steps have another batch, and another rate of the weights and of the puzzle rows."""
    typed = ["arch=trm", f"optim={optim}", "lr_warmup_steps=3", "lr=0.01", "ema=true", "arch.halt_max_steps=1"]
    numbers = range(1, 3)
    plain, fixed = (_begun(data, tmp_path / name, *typed) for name in ("plain", "fixed"))
    step, other = (stepper(begun.state, print, SINGLE) for begun in (plain, fixed))
    _steps(plain, step, numbers)
    _steps(fixed, StepGraph(other, fixed.state, print, SINGLE), numbers)
    found = fixed.state.local_tensors()
    for name, tensor in plain.state.local_tensors().items():
        assert torch.allclose(found[name], tensor, rtol=1e-4, atol=1e-5), name


class _FakeCard:
    """Stands in for a card: what runs while a graph is captured changes nothing but the host."""

    def __init__(self, graph: StepGraph, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._graph, self._fault, self._own_step = graph, fault, graph.step
        state = graph._state.optimizers.export_state(graph._state.model)
        self._counts = [tensor for name, tensor in state.items() if ".step." in name]
        graph._stream = Mock()
        monkeypatch.setattr(graph, "step", self._step)
        fakes = {"current_stream": Mock(), "stream": nullcontext, "CUDAGraph": lambda: self, "graph": self._capture}
        for name, fake in fakes.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    def _step(self, settings: StepSettings) -> StepResult:
        self._settings, self._result = settings, self._own_step(settings)
        return self._result

    @contextmanager
    def _capture(self, *given: object, **options: object) -> Iterator[None]:
        before = self._graph._copy()
        yield
        counts = [count.clone() for count in self._counts]
        self._graph._restore(before)
        torch._foreach_copy_(self._counts, counts)
        self._captured, self._replayed = self._result, self._settings
        self._numbers = self._graph._state.optimizers._numbers
        self._kept = None if self._numbers is None else self._numbers.clone()
        if self._fault == "raises":
            raise RuntimeError("operation not permitted when stream is capturing")

    def replay(self) -> None:
        counts = [count.clone() for count in self._counts]
        if self._fault == "keeps a rate" and self._numbers is not None and self._kept is not None:
            self._numbers.copy_(self._kept)
        result = self._own_step(self._replayed)
        torch._foreach_copy_(self._counts, counts)
        self._captured.sums.copy_(result.sums)
        if self._fault == "spoils":
            with torch.no_grad():
                next(self._graph._state.model.parameters()).mul_(1.001)


@pytest.mark.parametrize("fault", ["", "raises", "spoils", "keeps a rate"])
def test_a_replayed_run_is_the_same_and_one_without_a_graph_too(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """After the curriculum's change of depth the step is captured anew."""
    typed = ["arch=trm", "ema=true", "max_steps=12", "arch.depth_curriculum=[{until: 0.5, H_cycles: 1, L_cycles: 1}]"]
    ends, said = [], list[str]()
    for name in ("plain", "graph"):
        begun, sums = _begun(data, tmp_path / name, *typed), list[Tensor]()
        graph = StepGraph(stepper(begun.state, print, SINGLE), begun.state, said.append, SINGLE)
        if name == "graph":
            _FakeCard(graph, fault, monkeypatch)

        def step(*given: Any, graph: StepGraph = graph, begun: Begun = begun, sums: list[Tensor] = sums) -> StepResult:
            result = graph(*given)
            sums.append(result.sums.clone())
            with begun.state.averaged_weights():  # as an evaluation does
                return result

        _steps(begun, step, range(1, 13))
        ends.append(begun.state.local_tensors() | {f"sums of step {n}": each for n, each in enumerate(sums, start=1)})
    assert not changed(*ends)
    assert [line.split()[1] for line in said] == (["off,"] if fault else ["on;", "on;"])


def test_a_graph_is_refused_where_it_cant_be(data: Path, tmp_path: Path) -> None:
    typed = ["debug=tiny", "device=cpu", "cuda_graph=true", f"data_path={data}"]
    assert "CUDA" in mistake([*typed, f"checkpoint_path={tmp_path / 'run'}"])
