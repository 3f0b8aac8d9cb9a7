"""Build the optimizers of a model from a config, and save and check their state.

The puzzle table is not a parameter and has its own update (sparse_sign_sgd).
"""

from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.profiler import record_function

from optim.adam import AdamATan2, AdamW
from optim.muon import Coefficients, Muon, Scale
from optim.replayable import Replayable
from utils.config import Float, Int, StrictModel, name_of, union_of
from utils.errors import UserError
from utils.perf.recording import OPTIMIZER
from utils.ranks.world import is_dtensor
from utils.shapes import Shapes, compare_shapes

# ---- one class for each optimizer ---------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """The keys of the run that its optimizers share. Muon has a rate and a decay of its own."""

    lr: float
    betas: tuple[float, float]
    weight_decay: float


Groups = list[dict[str, Any]]
"""Parameters in the form that torch's optimizers take, grouped by the ranks over which they lie."""


class OptimizerConfig(StrictModel):
    """All that is known of one optimizer: its options, how it is made, and the state that it keeps.

    Its name begins the names of the optimizer's tensors in a checkpoint.
    """

    name: str

    def takes(self, left: list[nn.Parameter], block_weights: list[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that this optimizer updates; by default all that are left."""
        return left

    def for_the_rest(self) -> "OptimizerConfig | None":
        """Return the optimizer of the parameters that are left after this one, if there is one."""
        return None

    @abstractmethod
    def make(self, groups: Groups, rates: Rates) -> torch.optim.Optimizer:
        """Return the optimizer of these parameter groups. The lr of a group is its base rate."""

    @abstractmethod
    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state that the optimizer itself would make at the parameter's first gradient.

        It is made at once, so that every checkpoint is complete and can be restored.
        """


class AdamATan2Config(OptimizerConfig):
    """AdamATan2 has no options of its own: lr, betas and weight decay are keys of the run."""

    name: Literal["adam_atan2"]

    def make(self, groups: Groups, rates: Rates) -> torch.optim.Optimizer:
        return AdamATan2(groups, lr=rates.lr, betas=rates.betas, weight_decay=rates.weight_decay)

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return _moments(parameter)


class AdamWConfig(OptimizerConfig):
    name: Literal["adamw"]
    eps: Float = Field(gt=0)  # with 0, a weight whose gradients have all been 0 would become NaN

    def make(self, groups: Groups, rates: Rates) -> torch.optim.Optimizer:
        return AdamW(groups, lr=rates.lr, betas=rates.betas, weight_decay=rates.weight_decay, eps=self.eps)

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return _moments(parameter)


class MuonConfig(OptimizerConfig):
    """Muon for the matrices inside the blocks, and an Adam for the rest.

    An orthogonal step would mix the symbols for which the rows of embeddings and heads stand. URM's
    code gives Muon all matrices nevertheless.
    """

    name: Literal["muon"]
    muon_lr: Float | None = Field(ge=0)
    muon_momentum: Float = Field(ge=0, lt=1)
    muon_weight_decay: Float = Field(ge=0)
    muon_iterations: Int = Field(ge=1, le=100)
    muon_coefficients: Coefficients
    muon_scale: Scale
    muon_matrices: Literal["blocks", "all"]
    rest: Literal["adamw", "adam_atan2"]
    eps: Float = Field(gt=0)

    def takes(self, left: list[nn.Parameter], block_weights: list[nn.Parameter]) -> list[nn.Parameter]:
        weights = left if self.muon_matrices == "all" else block_weights
        return [weight for weight in weights if weight.requires_grad and weight.ndim == 2]

    def for_the_rest(self) -> OptimizerConfig:
        return AdamWConfig(name="adamw", eps=self.eps) if self.rest == "adamw" else AdamATan2Config(name="adam_atan2")

    def make(self, groups: Groups, rates: Rates) -> torch.optim.Optimizer:
        return Muon(
            groups,
            lr=rates.lr if self.muon_lr is None else self.muon_lr,
            momentum=self.muon_momentum,
            weight_decay=self.muon_weight_decay,
            iterations=self.muon_iterations,
            coefficients=self.muon_coefficients,
            scale=self.muon_scale,
        )

    def initial_state(self, parameter: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(parameter)}


def _moments(parameter: Tensor) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), device="cpu"),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


OPTIMIZERS: tuple[type[OptimizerConfig], ...] = (AdamATan2Config, AdamWConfig, MuonConfig)
"""Every optimizer. A new one is a class above, its entry here, and config/optim/<name>.yaml."""

if TYPE_CHECKING:
    OptimConfig = OptimizerConfig
else:  # a type checker can't follow the table
    OptimConfig = union_of(OPTIMIZERS)

# ---- the optimizers of a run --------------------------------------------------------------------


class Optimizers:
    """The optimizers that share a model's parameters, stepped and saved together.

    A checkpoint holds only their state. Hyperparameters come from the config.
    """

    def __init__(self, optimizers: Sequence[tuple[OptimizerConfig, torch.optim.Optimizer]]) -> None:
        """Make the initial state of every parameter."""
        self._by_name = {config.name: optimizer for config, optimizer in optimizers}
        self._numbers: Tensor | None = None  # those of the next step on the device, if steps are replayed
        for config, optimizer in optimizers:
            for group in optimizer.param_groups:
                group["base_lr"] = group["lr"]
                for parameter in group["params"]:
                    optimizer.state[parameter] = config.initial_state(parameter)

    def step(self, multiplier: float) -> None:
        """Update every parameter that has a gradient, at a multiple of each group's base rate."""
        with record_function(OPTIMIZER):
            if self._numbers is None:
                self._set_rates(multiplier)
                for optimizer in self._by_name.values():
                    optimizer.step()
            else:  # `prepare` has set the rates
                left = iter(self._numbers.unbind())
                for optimizer in self._replayable():
                    optimizer.update(left)

    def _set_rates(self, multiplier: float) -> None:
        for optimizer in self._by_name.values():
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * multiplier

    # ---- steps that are replayed ----

    @property
    def can_be_replayed(self) -> bool:
        return all(isinstance(optimizer, Replayable) for optimizer in self._by_name.values())

    def _replayable(self) -> list[Replayable]:
        return [optimizer for optimizer in self._by_name.values() if isinstance(optimizer, Replayable)]

    def prepare(self, multiplier: float, device: torch.device) -> None:
        """Let the next `step`, captured or not, read what depends on the step from the device."""
        self._set_rates(multiplier)
        numbers = torch.tensor([number for optimizer in self._replayable() for number in optimizer.numbers()])
        if self._numbers is None:
            self._numbers = torch.empty_like(numbers, device=device)
        self._numbers.copy_(numbers.pin_memory() if device.type == "cuda" else numbers, non_blocking=True)

    def count_replay(self) -> None:
        """Count a step that was replayed, as `step` does on the host."""
        for optimizer in self._replayable():
            optimizer.count()

    def zero_grad(self) -> None:
        for optimizer in self._by_name.values():
            optimizer.zero_grad()

    def export_state(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the live state tensors, to be saved or overwritten in place.

        Their names are "<optimizer>.<key>.<parameter>", such as "adamw.exp_avg.lm_head.weight".
        """
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        return {
            f"{owner}.{key}.{names[parameter]}": tensor
            for owner, optimizer in self._by_name.items()
            for parameter, state in optimizer.state.items()
            for key, tensor in state.items()
        }


def require_same_state(saved: Shapes, own: Shapes) -> None:
    """Raise UserError if the whole shapes of a checkpoint's `export_state` are not this run's."""
    here, there = ({name.split(".", 1)[0] for name in tensors} for tensors in (own, saved))
    if here and there and here != there and there <= set(map(name_of, OPTIMIZERS)):
        raise UserError(
            f"the checkpoint holds the state of {' and '.join(sorted(there))}, but this run's optimizer is "
            f"{' and '.join(sorted(here))}; resuming keeps the optimizer: give {_options(there)}; "
            "a new run with init_from=<run> instead of resume takes the weights and may have another optimizer"
        )
    found = compare_shapes(saved, own)
    if found.first is not None:
        raise UserError(
            f"the checkpoint's optimizer state {found.first} is {saved.get(found.first, 'absent')}, here it is "
            f"{own.get(found.first, 'absent')}; resume with the model, the optimizer and the frozen weights that it "
            "was saved with"
        )


def _options(owners: set[str]) -> str:
    leading = {name_of(config) for config in OPTIMIZERS if "rest" in config.model_fields} & owners
    chosen = [f"optim={name}" for name in leading or owners]
    return " ".join([*chosen, *(f"optim.rest={name}" for name in owners if leading and name not in leading)])


# ---- who gets what -----------------------------------------------------------------------------


def build_optimizers(
    model: nn.Module,
    block_weights: Iterable[nn.Parameter],
    config: OptimConfig,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> Optimizers:
    """Build the optimizers that `config` asks for, for the parameters that require a gradient.

    Weight decay applies to every parameter, also to biases and embeddings, as published.
    """
    rates, in_blocks = Rates(lr, betas, weight_decay), list(block_weights)
    left = [parameter for parameter in model.parameters() if parameter.requires_grad]
    built: list[tuple[OptimizerConfig, torch.optim.Optimizer]] = []
    each: OptimizerConfig | None = config
    while each is not None:
        if taken := each.takes(left, in_blocks):
            built.append((each, each.make(_groups(taken), rates)))
        gone = set(taken)
        left = [parameter for parameter in left if parameter not in gone]
        each = each.for_the_rest()
    groups = [group for _, optimizer in built for group in optimizer.param_groups]
    require_exact_cover(model, [parameter for group in groups for parameter in group["params"]])
    return Optimizers(built)


def _groups(parameters: Iterable[nn.Parameter]) -> Groups:
    """Group parameters by mesh and placements, which torch's foreach functions can't mix."""
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        place = (parameter.device_mesh, parameter.placements) if is_dtensor(parameter) else None
        groups[place].append(parameter)
    return [{"params": group} for group in groups.values()]


def require_exact_cover(model: nn.Module, updated: Iterable[Tensor]) -> None:
    """Assert that `updated` holds every trainable parameter of the model exactly once."""
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
    counts = Counter(updated)
    wrong = {name: counts[p] for p, name in names.items() if counts[p] != 1}
    assert not wrong, f"number of optimizers per parameter: {wrong}"
    assert not counts.keys() - names.keys(), "an optimizer holds tensors that are no trainable parameter of the model"
