"""From a config to the optimizers of a model: who updates which parameter, at which rate, and what a checkpoint keeps.

The puzzle table is no parameter and has its own update (sparse_sign_sgd). Parameters may be plain tensors, or DTensors
on several meshes of one model (models/parallel/).
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from optim.adam_atan2 import AdamATan2
from optim.muon import Muon
from utils.config import Float, Int, StrictModel
from utils.errors import UserError
from utils.shapes import Shapes, compare_shapes

# ---- config ----------------------------------------------------------------------------------------------


class AdamATan2Config(StrictModel):
    """Nothing of its own: lr, betas and weight decay are the run's."""

    name: Literal["adam_atan2"]


class AdamWConfig(StrictModel):
    """config/optim/adamw.yaml explains the keys and holds the defaults."""

    name: Literal["adamw"]
    eps: Float

    @model_validator(mode="after")
    def _eps_is_in_range(self) -> Self:
        _require_eps(self.eps)
        return self


class MuonConfig(StrictModel):
    """config/optim/muon.yaml explains the keys and holds the defaults."""

    name: Literal["muon"]
    muon_lr: Float
    muon_momentum: Float
    muon_weight_decay: Float
    muon_iterations: Int
    rest: Literal["adamw", "adam_atan2"]
    eps: Float

    @model_validator(mode="after")
    def _numbers_are_in_range(self) -> Self:
        for name in ("muon_lr", "muon_weight_decay"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name} is {value}; give 0 or more")
        if not 0 <= self.muon_momentum < 1:
            raise ValueError(f"muon_momentum is {self.muon_momentum}; give a number from 0 up to, but not including, 1")
        if not 1 <= self.muon_iterations <= 100:
            raise ValueError(f"muon_iterations is {self.muon_iterations}; give 1 to 100 (5 is usual)")
        _require_eps(self.eps)
        return self


def _require_eps(eps: float) -> None:
    if eps <= 0:
        # Where a weight has never had a gradient, AdamW would divide 0 by 0.
        raise UserError(f"eps is {eps}; give a small positive number, such as 1e-8")


OptimConfig = Annotated[AdamATan2Config | AdamWConfig | MuonConfig, Field(discriminator="name")]

# ---- the optimizers of a run -----------------------------------------------------------------------------


class Optimizers:
    """The optimizers that share a model's parameters, stepped and saved as one; none at all where nothing is trained.

    A checkpoint holds their state only. Hyperparameters come from the config: restoring them would undo what a resumed
    run was just told.
    """

    def __init__(self, by_name: Mapping[str, torch.optim.Optimizer]) -> None:
        """Args: by_name: fresh optimizers under their config names; each group's lr is taken as its base rate."""
        self._by_name = by_name
        for name, optimizer in by_name.items():
            for group in optimizer.param_groups:
                group["base_lr"] = group["lr"]
                for parameter in group["params"]:
                    optimizer.state[parameter] = _initial_state(name, parameter)

    def step(self, multiplier: float) -> None:
        """One update of every parameter that has a gradient, at `multiplier` times each group's base rate. The host
        doesn't wait for the device.
        """
        for optimizer in self._by_name.values():
            for group in optimizer.param_groups:
                group["lr"] = group["base_lr"] * multiplier
            optimizer.step()

    def zero_grad(self) -> None:
        """Set every gradient to None."""
        for optimizer in self._by_name.values():
            optimizer.zero_grad()

    def export_state(self, model: nn.Module) -> dict[str, Tensor]:
        """The live state tensors, to be saved or overwritten in place, as "<optimizer>.<key>.<parameter>", such as
        "adamw.exp_avg.lm_head.weight": names survive another order of parameters. Each lies where its parameter does,
        but for the step counts: torch wants these on the host.
        """
        names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
        return {
            f"{owner}.{key}.{names[parameter]}": tensor
            for owner, optimizer in self._by_name.items()
            for parameter, state in optimizer.state.items()
            for key, tensor in state.items()
        }


def require_same_state(saved: Shapes, own: Shapes) -> None:
    """Raises UserError where a checkpoint's state is of other optimizers or parameters than this run's.

    By names and whole shapes only, so that nothing is overwritten, or read at all, before all of it is known to fit.

    Args:
        saved, own: of what `export_state` gives; of all ranks together, where each holds some of the parameters.
    """
    here, there = _owners(own), _owners(saved)
    if here and there and here != there and there <= _NAMES:
        raise UserError(
            f"the checkpoint holds the state of {' and '.join(sorted(there))}, but this run's optimizer is "
            f"{' and '.join(sorted(here))}; resuming keeps the optimizer: give {_options(there)}"
        )
    found = compare_shapes(saved, own)
    if found.missing:
        raise UserError(
            f"the checkpoint lacks the optimizer state {min(found.missing)} ({len(found.missing)} missing in all); "
            "resume with the optimizer and the frozen weights that it was saved with"
        )
    if found.unexpected:
        raise UserError(
            f"the checkpoint's optimizer state {min(found.unexpected)} belongs to nothing trained here "
            f"({len(found.unexpected)} such in all); resume with the optimizer and the frozen weights that it was "
            "saved with"
        )
    for name in found.reshaped:
        raise UserError(
            f"the checkpoint's optimizer state {name} is {tuple(saved[name])}, here it is {tuple(own[name])}; "
            "resume with the model that it was saved with"
        )


_NAMES = {"muon", "adamw", "adam_atan2"}


def _initial_state(name: str, parameter: Tensor) -> dict[str, Tensor]:
    """What the optimizer would make by itself at the parameter's first gradient. Made at once, so that a checkpoint is
    complete whenever it is taken, and a restored tensor has a place of the right device, dtype and shards to go to.
    """
    if name == "muon":
        return {"momentum_buffer": torch.zeros_like(parameter)}
    return {
        "step": torch.zeros((), device="cpu"),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def _owners(tensors: Iterable[str]) -> set[str]:
    return {name.split(".", 1)[0] for name in tensors}


def _options(owners: set[str]) -> str:
    """What to type to get these optimizers."""
    rest = " ".join(owners - {"muon"})
    return f"optim=muon optim.rest={rest}" if "muon" in owners else f"optim={rest}"


# ---- who gets what ---------------------------------------------------------------------------------------


def build_optimizers(
    model: nn.Module,
    block_weights: Iterable[Tensor],
    config: OptimConfig,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> Optimizers:
    """The optimizers that `config` asks for, over the parameters that require a gradient.

    Weight decay is for every parameter, biases and embeddings too: so the published recipes have it.

    Args:
        block_weights: the parameters inside the blocks; Muon takes the matrices among them. Embeddings and heads are
            matrices as well, but their rows are symbols, and an orthogonal step would mix these.
        lr, betas, weight_decay: of everything that isn't Muon's.
    """
    rest = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rest_name = config.rest if config.name == "muon" else config.name
    by_name: dict[str, torch.optim.Optimizer] = {}
    if config.name == "muon":
        matrices = [weight for weight in block_weights if weight.requires_grad and weight.ndim == 2]
        taken = set(matrices)
        rest = [parameter for parameter in rest if parameter not in taken]
        if matrices:
            by_name["muon"] = Muon(
                matrices,
                lr=config.muon_lr,
                momentum=config.muon_momentum,
                weight_decay=config.muon_weight_decay,
                iterations=config.muon_iterations,
            )
    if rest and rest_name == "adam_atan2":
        by_name[rest_name] = AdamATan2(_groups(rest), lr=lr, betas=betas, weight_decay=weight_decay)
    elif rest:
        assert config.name != "adam_atan2"
        by_name[rest_name] = torch.optim.AdamW(
            _groups(rest), lr=lr, betas=betas, eps=config.eps, weight_decay=weight_decay, foreach=True
        )
    groups = [group for optimizer in by_name.values() for group in optimizer.param_groups]
    require_exact_cover(model, [parameter for group in groups for parameter in group["params"]])
    return Optimizers(by_name)


def _groups(parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Parameter groups of which each lies in one way: torch's foreach functions take no plain tensors and DTensors, and
    no DTensors of several meshes, in one list.
    """
    groups: dict[Any, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        place = (parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else None
        groups[place].append(parameter)
    return [{"params": group} for group in groups.values()]


def require_exact_cover(model: nn.Module, updated: Iterable[Tensor]) -> None:
    """Asserts that `updated` is every trainable parameter of the model, each once: one left out would silently stay as
    it was initialised, and one named twice would be updated twice.
    """
    names: dict[Tensor, str] = {p: name for name, p in model.named_parameters() if p.requires_grad}
    counts = Counter(updated)
    wrong = {name: counts[p] for p, name in names.items() if counts[p] != 1}
    assert not wrong, f"number of optimizers per parameter: {wrong}"
    assert not counts.keys() - names.keys(), "an optimizer holds tensors that are no trainable parameter of the model"
