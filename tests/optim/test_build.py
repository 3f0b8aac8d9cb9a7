"""Which optimizer updates which parameter, at which rate, and what its checkpoint restores."""

# B = examples

import copy
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from optim.build import OPTIMIZERS, OptimConfig, Optimizers, build_optimizers, require_same_state
from optim.ema import EMA
from tests.spawn import run_ranks
from utils.command_line import read_config
from utils.config import name_of
from utils.errors import UserError
from utils.ranks.world import World

LR, BETAS, WEIGHT_DECAY = 0.1, (0.9, 0.95), 0.2


def _defaults(name: str) -> dict[str, object]:
    return dict(read_config("pretrain", [f"optim={name}"])["optim"])


# Options that three steps of a tiny model show.
MUON: dict[str, object] = {"muon_momentum": 0.9, "muon_weight_decay": 0.3}
CONFIGS = {
    **{name: _defaults(name) for name in map(name_of, OPTIMIZERS) if name != "muon"},
    **{
        f"muon with {rest}": _defaults("muon") | MUON | {"muon_lr": 0.05, "rest": rest}
        for rest in ("adamw", "adam_atan2")
    },
    "muon of URM with adamw": _defaults("muon_urm") | MUON,
}
CONFIGS["adamw"]["eps"] = 1e-3
each_config = pytest.mark.parametrize("name", CONFIGS)


class Model(nn.Module):
    """A small model with matrices inside and outside of blocks, and with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)
        self.blocks = nn.ModuleList([nn.Linear(6, 16), nn.Linear(16, 6)])
        self.head = nn.Linear(6, 3)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))

    def forward(self, tokens_B: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens_B)
        for layer in (*self.blocks, self.head):
            x = torch.tanh(layer(x))
        return x


def _config(values: dict[str, object]) -> OptimConfig:
    adapter: TypeAdapter[OptimConfig] = TypeAdapter(OptimConfig)
    return adapter.validate_python(values)


def _build(
    model: Model, name: str, *, lr: float = LR, weight_decay: float = WEIGHT_DECAY, **changes: object
) -> Optimizers:
    config = _config(CONFIGS[name] | changes)
    return build_optimizers(model, model.blocks.parameters(), config, lr=lr, betas=BETAS, weight_decay=weight_decay)


def _set_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.device)


def _train(model: Model, optimizers: Optimizers, steps: range, multiplier: float = 1.0) -> None:
    for step in steps:
        _set_gradients(model, step)
        optimizers.step(multiplier)


def _shapes(state: dict[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in state.items()}


def _load(optimizers: Optimizers, model: nn.Module, state: dict[str, Tensor]) -> None:
    """Restore a state like a checkpoint: check that it fits, then copy it into the live tensors."""
    own = optimizers.export_state(model)
    require_same_state(_shapes(state), _shapes(own))
    for name, tensor in state.items():
        own[name].copy_(tensor)


def _same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# ---- updates -----------------------------------------------------------------------------------


def test_adamw_equals_its_definition_for_every_parameter() -> None:
    model, (beta1, beta2), moments = Model(), BETAS, dict[str, tuple[Tensor, Tensor]]()
    optimizers = _build(model, "adamw")
    expected = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
    for t, multiplier in enumerate([1.0, 0.3, 0.0, 0.7], start=1):
        _set_gradients(model, t)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            g, p, lr = parameter.grad.double(), expected[name], LR * multiplier
            m, v = moments.get(name, (torch.zeros_like(g), torch.zeros_like(g)))
            m, v = moments[name] = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            update = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + 1e-3)
            expected[name] = p - lr * WEIGHT_DECAY * p - lr * update
        optimizers.step(multiplier)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-5, atol=1e-6)


@each_config
def test_muon_updates_the_matrices_of_blocks_or_all_and_its_rest_updates_the_others(name: str) -> None:
    model = Model()
    owners = {full.split(".", 2)[2]: full.split(".")[0] for full in _build(model, name).export_state(model)}
    rest = name.split()[-1]
    matrices = {"blocks.0.weight", "blocks.1.weight"} if name.startswith("muon") else set()
    matrices |= {"embedding.weight", "head.weight"} if "URM" in name else set()
    assert owners == {p: "muon" if p in matrices else rest for p, _ in model.named_parameters()}


def test_without_a_rate_of_its_own_muon_takes_that_of_the_run() -> None:
    models = [Model(), Model(), Model(), Model()]
    for model, muon_lr in zip(models, (None, LR, LR / 2, 0.0), strict=True):
        _train(model, _build(model, "muon of URM with adamw", muon_lr=muon_lr), range(2))
    assert _same(models[0], models[1]) and not _same(models[0], models[2])
    first_weights = (model.get_parameter("blocks.0.weight") for model in (models[3], Model()))
    assert torch.equal(*first_weights), "a rate of 0 is one"


@each_config
def test_frozen_parameters_do_not_change(name: str) -> None:
    model, fresh = Model(), Model().state_dict()
    model.blocks[0].requires_grad_(False)
    model.embedding.requires_grad_(False)
    optimizers = _build(model, name)
    _train(model, optimizers, range(1))
    moved = {p for p, value in model.state_dict().items() if not torch.equal(value, fresh[p])}
    assert moved == {"blocks.1.weight", "blocks.1.bias", "head.weight", "head.bias"}
    assert moved == {full.split(".", 2)[2] for full in optimizers.export_state(model)}
    model.requires_grad_(False)
    optimizers = _build(model, name)
    optimizers.step(1.0)
    optimizers.zero_grad()
    assert optimizers.export_state(model) == {}


# ---- checkpoints -------------------------------------------------------------------------------


@each_config
def test_a_run_resumes_bit_for_bit_from_a_file(name: str, tmp_path: Path) -> None:
    """Before, a schedule that is at 0 changes nothing, and one that is at 1 every parameter."""
    model, still = Model(), Model()
    optimizers = _build(model, name)
    _train(model, optimizers, range(2), multiplier=0.0)
    assert _same(model, still)
    _train(model, optimizers, range(3))
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), still.parameters(), strict=True))
    save_file(optimizers.export_state(model), tmp_path / "optimizer.safetensors")

    resumed = copy.deepcopy(model)
    its_optimizers = _build(resumed, name)
    _load(its_optimizers, resumed, load_file(tmp_path / "optimizer.safetensors"))
    _train(model, optimizers, range(3, 6))
    _train(resumed, its_optimizers, range(3, 6))
    assert _same(model, resumed)


@each_config
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_initial_state_is_what_the_optimizer_makes_at_a_first_gradient(name: str, device: str) -> None:
    """A step from `initial_state` equals a step of an optimizer that has no state yet."""
    model, other = Model().to(device), Model().to(device)
    ours, theirs = _build(model, name), _build(other, name)
    for optimizer in theirs._by_name.values():
        optimizer.state.clear()
    _train(model, ours, range(1))
    _train(other, theirs, range(1))
    made = theirs.export_state(other)
    found = ours.export_state(model)
    assert found.keys() == made.keys()
    for key, tensor in made.items():
        ours_of = found[key]
        assert (ours_of.dtype, ours_of.device, ours_of.shape) == (tensor.dtype, tensor.device, tensor.shape), key
        assert tensor.is_meta or torch.equal(ours_of, tensor), f"initial_state of {key} has another value"
    assert device == "meta" or _same(model, other)


@each_config
def test_hyperparameters_come_from_the_config_not_from_the_checkpoint(name: str) -> None:
    model = Model()
    optimizers = _build(model, name)
    _train(model, optimizers, range(2), multiplier=0.25)
    still = copy.deepcopy(model)
    own_rates = {key: 0.0 for key in CONFIGS[name] if key.endswith(("_lr", "_weight_decay"))}
    resumed = _build(model, name, lr=0.0, weight_decay=0.0, **own_rates)
    _load(resumed, model, optimizers.export_state(model))
    _train(model, resumed, range(2, 4))
    assert _same(model, still), "the rate of the checkpoint was used instead of the 0 of the config"


@pytest.mark.parametrize(
    ("there", "here", "advice"),
    [
        ("adamw", "adam_atan2", "optim=adamw"),
        ("muon with adam_atan2", "muon with adamw", "optim=muon optim.rest=adam_atan2"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(there: str, here: str, advice: str) -> None:
    saved, model = Model(), Model()
    states = _shapes(_build(saved, there).export_state(saved)), _shapes(_build(model, here).export_state(model))
    with pytest.raises(ValueError, match=rf"give {advice}; a new run with init_from=<run> "):
        require_same_state(*states)


def test_state_that_does_not_fit_is_refused() -> None:
    model, weight = Model(), "adamw.exp_avg.head.weight"
    own = _shapes(_build(model, "adamw").export_state(model))
    lacking = {name: shape for name, shape in own.items() if name != weight}
    for saved, expected in (
        (lacking, r"head\.weight is absent"),
        (own | {weight: (5,)}, r"head\.weight is \(5,\), here it is \(3, 6\)"),
        (own | {"adamw.exp_avg.stranger": (3,)}, r"stranger is \(3,\), here it is absent"),
    ):
        with pytest.raises(UserError, match=expected):
            require_same_state(saved, own)


# ---- sharded parameters ------------------------------------------------------------------------


def _whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _train_on_data(model: Model, name: str) -> dict[str, Tensor]:
    """Train three steps, with the same data on every rank.

    Return the weights, their average and the state of the optimizer as whole tensors.
    """
    optimizers, ema = _build(model, name), EMA(dict(model.named_parameters()))
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens_B = torch.randint(7, (64,), generator=generator)
        targets_B3 = torch.randn(64, 3, generator=generator)
        (model(tokens_B) - targets_B3).square().mean().backward()
        optimizers.step(1.0)
        ema.update(0.5)
        optimizers.zero_grad()
    state = {**optimizers.export_state(model), **{f"average of {name}": each for name, each in ema.tensors().items()}}
    with ema.swapped():
        swapped = {f"swapped {name}": _whole(parameter) for name, parameter in model.named_parameters()}
    assert all(tensor.shape == _whole(tensor).shape for tensor in state.values()), "a tensor has the shape of a shard"
    return {
        **{name: _whole(tensor) for name, tensor in [*model.named_parameters(), *state.items()]},
        **swapped,
    }


def _lay_out(model: Model, layout: str, world: World) -> None:
    """Lay out the model with torch alone, in the same way as models/parallel/tensor.py."""
    mesh = init_device_mesh("cpu", (world.size // 2, 2), mesh_dim_names=("outer", "inner"))
    if layout in ("tp", "fsdp_tp"):
        parallelize_module(model.blocks, mesh["inner"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    if layout != "tp":
        over = {"fsdp": init_device_mesh("cpu", (world.size,)), "hsdp": mesh, "fsdp_tp": mesh["outer"]}[layout]
        for block in model.blocks:
            fully_shard(block, mesh=over)
        fully_shard(model, mesh=over)


# By number of ranks and layout: on how many different meshes the parameters lie. No mesh counts as
# one.
LAYOUTS = {2: {"fsdp": 1, "tp": 2}, 4: {"fsdp": 1, "hsdp": 1, "fsdp_tp": 2}}


def _check_rank(world: World) -> None:
    for layout, num_places in LAYOUTS[world.size].items():
        for name in CONFIGS:
            parted, whole, start = Model(), Model(), dict(Model().named_parameters())
            _lay_out(parted, layout, world)
            places = {p.device_mesh if isinstance(p, DTensor) else None for p in parted.parameters()}
            assert len(places) == num_places
            assert any(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in parted.parameters())
            ours, theirs = _train_on_data(parted, name), _train_on_data(whole, name)
            assert ours.keys() == theirs.keys()
            for key, expected in theirs.items():
                way = (expected - start[key]).norm() if key in start else expected.norm()
                # The polynomials of URM enlarge small singular values, and their rounding, more.
                tolerance = 4e-5 if "URM" in name else 1e-5
                assert (ours[key] - expected).norm() < tolerance * way, f"{layout}, {name}: {key}"


@pytest.mark.invariance
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_sharded_parameters_get_the_same_update(num_ranks: int) -> None:
    run_ranks(_check_rank, num_ranks)


# ---- config ------------------------------------------------------------------------------------


def _other_values(annotation: Any, value: object) -> list[object]:
    if isinstance(value, int | float):
        return [value + 1] if isinstance(value, int) else [value / 2]
    return [choice for choice in get_args(annotation) if choice != value]


def _trained(optimizer: str, weight_decay: float = WEIGHT_DECAY, **changes: Any) -> Model:
    model, name = Model(), next(name for name in CONFIGS if name.split()[0] == optimizer)
    _train(model, _build(model, name, weight_decay=weight_decay, **changes), range(3))
    return model


@pytest.mark.parametrize(
    ("optimizer", "option"),
    [(name_of(config), option) for config in OPTIMIZERS for option in config.model_fields if option != "name"],
)
def test_every_option_has_an_effect_or_is_refused(optimizer: str, option: str) -> None:
    (config,) = (config for config in OPTIMIZERS if name_of(config) == optimizer)
    value = next(values for values in CONFIGS.values() if values["name"] == optimizer)[option]
    usual, seen = _trained(optimizer), False
    assert not _same(usual, _trained(optimizer, weight_decay=0.0)), "the weight decay of the run has no effect"
    for other in _other_values(config.model_fields[option].annotation, value):
        change: dict[str, Any] = {option: other}
        try:
            seen |= not _same(usual, _trained(optimizer, **change))
        except (ValidationError, UserError):
            seen = True
    assert seen, f"optim.{option}={value} can be changed, but has no effect"


@pytest.mark.parametrize(("key", "value"), [("muon_lr", -0.1), ("muon_momentum", 1.0), ("eps", 0.0), ("rest", "muon")])
def test_values_out_of_range_are_refused(key: str, value: object) -> None:
    with pytest.raises(ValidationError, match=key):
        _config(CONFIGS["muon with adamw"] | {key: value})
