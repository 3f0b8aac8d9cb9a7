"""A whole training step as one CUDA graph, so that a step does not wait for Python."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from models.text.objective import TextBatch
from training.config import PretrainConfig
from training.state import TrainState
from training.step import StepResult, StepSettings, TrainStep
from utils.batch import Batch
from utils.errors import UserError
from utils.ranks.world import World

# Steps before the capture. In these, PyTorch compiles, and libraries allocate what they keep.
WARMUP = 3
# How far the first replay may be from the same step without a graph, as a share of the largest
# change that the step makes in a tensor. Only kernels that add in any order leave a difference: on
# an H200, up to 3e-8 in the moments of an embedding.
_MOST_DIFFERENCE = 1e-3


class StepGraph:
    """Takes training steps, and from the fourth on replays one that was captured.

    A replay runs the same kernels with the same numbers on the same memory. So the batch, and what
    differs between steps, are copied into fixed tensors before each step, captured or not. Weights,
    states and averages are updated in place anyway, and the carry is copied back into its tensors.

    A new depth needs a new graph (depth_curriculum, backprop_warmup_steps), and so does a new rate
    of the average.
    """

    def __init__(self, train_step: TrainStep, state: TrainState, say: Callable[[str], None], world: World) -> None:
        assert state.carry is not None
        self._train_step, self._state, self._say, self._world = train_step, state, say, world
        self._carry = state.carry
        self._batch: Batch = {}
        self._varying: dict[str, Tensor] = {}
        self._key: StepSettings | None = None  # the settings, but for what changes
        self._num_steps = 0  # with these settings
        # Autograd remembers the stream of its first step, which must be that of the capture.
        self._stream = torch.cuda.Stream(world.device) if world.device.type == "cuda" else None
        self._has_failed = False
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: StepResult | None = None  # of the graph, whose tensors each replay overwrites

    def __call__(self, batch: Batch | TextBatch, settings: StepSettings) -> StepResult:
        """Take a step. The next one overwrites the tensors of its result."""
        device, optimizers = self._world.device, self._state.optimizers
        assert isinstance(batch, dict)  # of puzzles
        _fill(self._batch, batch)
        _fill(self._varying, settings.varying(device))
        optimizers.prepare(settings.lr_factor, device)
        key = settings.with_varying(dict.fromkeys(self._varying))
        if key != self._key:
            self._key, self._graph, self._result, self._num_steps = key, None, None, 0
        self._num_steps += 1
        fixed = settings.with_varying(self._varying)
        if self._graph is not None and self._result is not None:
            self._graph.replay()
            optimizers.count_replay()
            return self._result
        if self._stream is None:
            return self.step(fixed)
        current = torch.cuda.current_stream(device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            if self._num_steps <= WARMUP or self._has_failed:
                result = self.step(fixed)
            else:
                result = self._capture(fixed, settings.lr_factor)
        current.wait_stream(self._stream)
        return result

    def step(self, settings: StepSettings) -> StepResult:
        """Take the step that is captured: from fixed tensors, and with the carry in its place."""
        self._state.carry = self._carry
        result = self._train_step(self._batch, settings)
        for fixed, new in zip(self._carry.tensors().values(), self._state.carry.tensors().values(), strict=True):
            fixed.copy_(new)
        self._state.carry = self._carry
        return result

    def _capture(self, settings: StepSettings, lr_factor: float) -> StepResult:
        """Take a step, then take it again from a graph, and keep the graph if both are the same."""
        device, optimizers = self._world.device, self._state.optimizers
        before = self._copy()
        result = self.step(settings)
        expected = self._copy()
        # The capture comes after the step, and at another rate: a number of the host that the graph
        # has kept is wrong at the replay.
        optimizers.prepare(2 * lr_factor + 1, device)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads copy batches to the device meanwhile.
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                captured = self.step(settings)
        except RuntimeError as error:
            return self._go_on_without(expected, result, f"PyTorch can't capture this step ({error})".split("\n")[0])
        self._restore(before)
        optimizers.prepare(lr_factor, device)
        graph.replay()
        optimizers.count_replay()
        name, share = _largest_difference(before, expected, self._copy())
        most = 0.0 if torch.are_deterministic_algorithms_enabled() else _MOST_DIFFERENCE
        if not share <= most:
            why = f"a step and its replay differ in {name}, by {share:.1e} of the change"
            return self._go_on_without(expected, result, why)
        self._graph, self._result = graph, captured
        self._say("cuda_graph: on; a step is one CUDA graph from here on")
        return captured

    def _go_on_without(self, expected: dict[str, Tensor], result: StepResult, why: str) -> StepResult:
        self._has_failed = True
        self._state.carry = self._carry
        self._state.optimizers.zero_grad()
        self._restore(expected)
        self._say(f"cuda_graph: off, because {why}")
        return result

    def _copy(self) -> dict[str, Tensor]:
        """Return the state in host memory: the device may have no room for a copy."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._state.local_tensors().items()}

    @torch.no_grad()
    def _restore(self, copy: dict[str, Tensor]) -> None:
        for name, tensor in self._state.local_tensors().items():
            tensor.copy_(copy[name])


def uses_cuda_graph(config: PretrainConfig, state: TrainState, world: World) -> bool:
    """Decide for cuda_graph=auto, and check that cuda_graph=true is possible. Every rank."""
    if config.cuda_graph is False:
        return False
    why = _why_not(config, state, world)
    if why and config.cuda_graph is True:
        with world.shared_errors():
            raise UserError(f"cuda_graph=true can't be: {why}; give cuda_graph=auto")
    return not why


def _why_not(config: PretrainConfig, state: TrainState, world: World) -> str:
    if world.device.type != "cuda":
        return f"the device is {world.device.type}, and only CUDA has such graphs"
    if world.size > 1 or config.parallel.name != "ddp":
        return "a graph was never tried on several ranks, nor with another strategy than ddp"
    if state.carry is None:
        return "rows of text change their form, and a graph repeats one form"
    if state.loss_scale is not None:
        return "with float16 the host looks at each step before it is taken"
    if not state.optimizers.can_be_replayed:
        return f"optim={config.optim.name} is no Replayable (optim/replayable.py)"
    return ""


def _fill(fixed: dict[str, Tensor], given: Mapping[str, Tensor]) -> None:
    for name, tensor in given.items():
        if name in fixed:
            fixed[name].copy_(tensor, non_blocking=True)
        else:
            fixed[name] = tensor.clone()


def _largest_difference(
    before: dict[str, Tensor], expected: dict[str, Tensor], found: dict[str, Tensor]
) -> tuple[str, float]:
    """Return the tensor that differs most as a share of its largest change, and that share."""
    shares = {}
    for name, value in expected.items():
        if not torch.equal(value, found[name]):
            change, difference = ((value.double() - other[name].double()).abs().max() for other in (before, found))
            shares[name] = float((difference / change).nan_to_num(nan=math.inf))
    return max(shares.items(), key=lambda item: item[1], default=("", 0.0))
