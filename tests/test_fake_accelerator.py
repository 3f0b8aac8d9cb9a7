"""Training, evaluation and augmentation keep a device busy, and never let the host wait for it.

They run on a device that has no values (tests/fake_accelerator.py).
"""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch

from dataset.loader import DataOn, TrainLoader
from dataset.online import OnlineAugmentation
from dataset.sampler import Sampler
from models.inference import Slots
from models.metric_sums import EvalSums
from tests.dataset.samples import SAMPLES
from tests.fake_accelerator import failure_of, fake_accelerator, needs_fake_accelerator, register
from tests.fake_training import FakeTraining
from tests.in_process import pretrain_config
from tests.spawn import run_ranks
from tests.step_costs import RECIPES, Costs, costs_of_a_step, difference, read_record, torch_version
from utils.ranks.world import World

# N = sequences, B = slots, S = tokens
NUM_SLOTS = 8

SMALL = (
    f"global_batch_size={NUM_SLOTS}",
    "arch.hidden_size=32",
    "arch.H_cycles=2",
    "arch.L_cycles=2",
    "arch.forward_dtype=bfloat16",
    "loss_spike=3",
)
HEADS = (*SMALL, "data_path=x", "arch.num_heads=2", "arch.puzzle_emb_ndim=32")
LEVELS = (*HEADS, "arch.H_layers=1", "arch.L_layers=1")

TRAININGS: dict[str, tuple[str, ...]] = {
    "hrm": (*LEVELS, "arch=hrm", "ema=true", "grad_accumulation=2", "grad_clip=1"),
    "hrm, float32": (*LEVELS, "arch=hrm", "arch.forward_dtype=float32", "arch.pos_encodings=learned"),
    "trm": (*HEADS, "arch=trm", "arch.L_layers=1", "arch.pos_encodings=rope_2d", "optim=muon", "optim.rest=adam_atan2"),
    "trm_mlp": (*SMALL, "data_path=x", "arch=trm_mlp", "arch.L_layers=1", "ema=true", "optim=adamw"),
    "hrm, FP8": (*LEVELS, "arch=hrm", "arch.fp8_no_grad=true"),
    "trm_mlp, FP8": (*SMALL, "data_path=x", "arch=trm_mlp", "arch.L_layers=1", "arch.fp8_no_grad=true"),
    "urm": (*HEADS, "arch=urm", "arch.num_layers=1"),
    "transformer": (*HEADS, "arch=transformer", "arch.recurrent=true", "arch.num_layers=1"),
    "sudoku_extreme_1k": (*LEVELS, "experiment=sudoku_extreme_1k"),
    "sudoku_extreme_fast": (*SMALL, "experiment=sudoku_extreme_fast", "arch.L_layers=1"),
}


def _train(device: torch.device, typed: tuple[str, ...], *, as_cuda: bool) -> None:
    with fake_accelerator(device, as_cuda=as_cuda):
        FakeTraining(pretrain_config(*typed), device).step()


def _evaluate(device: torch.device, *, adaptive: bool) -> None:
    with fake_accelerator(device):
        training = FakeTraining(pretrain_config(*TRAININGS["hrm"]), device)
        pieces = [(np.arange(NUM_SLOTS), training.batch)] * 2
        sums = EvalSums(2, [], training.world)
        slots = Slots(training.model, iter(pieces), num_steps=2, adaptive=adaptive, keep_steps=True)
        while slots.busy:
            said = slots.advance()
            sums.add_segment(said.outputs, said.labels_BS, said.steps_B, said.halted_before_B)
            if said.finished is not None:
                labels_NS = said.finished.batch["labels"]
                config = training.model.config.loss
                sums.add_last(
                    said.finished.outputs,
                    labels_NS,
                    said.finished.steps_N,
                    {},
                    config=config,
                )


def _load(device: torch.device, task: str, data_on: DataOn) -> None:
    split, world = SAMPLES[task](), World(device=device)
    sampler = Sampler(list(split.sets.values()), seed=0, epochs=20, global_batch_size=NUM_SLOTS)
    augmentation = OnlineAugmentation(split, seed=0, global_batch_size=NUM_SLOTS, slots=world.slice_of(NUM_SLOTS))
    with fake_accelerator(device) as seen:
        with seen.waiting_is_allowed():
            loader = TrainLoader(split, sampler, world, augmentation=augmentation, data_on=data_on)
        for batch in loader.batches(range(1, 3)):
            assert all(tensor.device == device for tensor in batch.values())


def _checks(device: torch.device) -> dict[str, Callable[[], None]]:
    checks: dict[str, Callable[[], None]] = {}
    for name, typed in TRAININGS.items():
        checks[f"train {name}"] = partial(_train, device, typed, as_cuda=True)
    checks["train another device than cuda"] = partial(_train, device, TRAININGS["hrm"], as_cuda=False)
    for adaptive in (False, True):
        checks[f"evaluate, adaptive={adaptive}"] = partial(_evaluate, device, adaptive=adaptive)
    on: tuple[DataOn, ...] = ("host", "device")
    for task in SAMPLES:
        for data_on in on:
            checks[f"load {task} {data_on}"] = partial(_load, device, task, data_on)
    return checks


def _run_all(_: World) -> tuple[dict[str, str], dict[str, Costs]]:
    """Run all checks, and count. The device is registered for good, so a process runs only this."""
    device = register()
    failures = {name: failure_of(check) for name, check in _checks(device).items()}
    costs: dict[str, Costs] = {}

    def count(recipe: str) -> None:
        costs[recipe] = costs_of_a_step(device, RECIPES[recipe])

    return failures | {f"count {recipe}": failure_of(count, recipe) for recipe in RECIPES}, costs


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, str], dict[str, Costs]]:
    (found,) = run_ranks(_run_all, 1, timeout_s=300)
    return found


@pytest.fixture(scope="module")
def failures(found: tuple[dict[str, str], dict[str, Costs]]) -> dict[str, str]:
    return found[0]


@needs_fake_accelerator
@pytest.mark.parametrize("name", [*TRAININGS, "another device than cuda"])
def test_a_step_never_waits_for_the_device(name: str, failures: dict[str, str]) -> None:
    assert not failures[f"train {name}"], failures[f"train {name}"]


@needs_fake_accelerator
def test_an_evaluation_waits_only_to_know_which_sequences_are_settled(failures: dict[str, str]) -> None:
    assert not failures["evaluate, adaptive=False"], failures["evaluate, adaptive=False"]
    assert "HostWait: models/inference.py" in failures["evaluate, adaptive=True"]
    assert "settled_B.cpu()" in failures["evaluate, adaptive=True"]


@needs_fake_accelerator
@pytest.mark.parametrize("data_on", ["host", "device"])
@pytest.mark.parametrize("task", SAMPLES)
def test_loading_and_augmenting_never_wait(task: str, data_on: str, failures: dict[str, str]) -> None:
    assert not failures[f"load {task} {data_on}"], failures[f"load {task} {data_on}"]


@needs_fake_accelerator
@pytest.mark.skipif(
    read_record()["torch"] != torch_version(), reason="tests/step_costs.json counts operators of another PyTorch"
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_costs_what_is_recorded(recipe: str, found: tuple[dict[str, str], dict[str, Costs]]) -> None:
    failures, costs = found
    assert not failures[f"count {recipe}"], failures[f"count {recipe}"]
    changed = difference(read_record()["recipes"][recipe], costs[recipe])
    assert not changed, (
        f"a step of {recipe} costs something else than tests/step_costs.json says. If that is meant, "
        f"python -m tests.step_costs renews the file.\n{changed}"
    )
