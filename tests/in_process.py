"""Run training in the process of the test, as main() does after reading the command line."""

import json
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from models.base import RecursiveModel
from pretrain import build_state, train
from records.checkpoint.reader import Checkpoint
from records.lock import RunLock
from training.config import PretrainConfig
from training.data import Data
from training.resume import Start, read_start
from training.splits import open_data
from training.state import TrainState
from training.trained import open_trained
from utils.command_line import read_config, validate
from utils.errors import UserError
from utils.ranks.launch import Launch
from utils.ranks.world import World
from utils.stop import StopSignal

SINGLE = World.single()
Tensors = dict[str, torch.Tensor]


@dataclass
class Begun:
    """A run before its first step. After `fit` it is the same run after its last step."""

    start: Start
    data: Data
    state: TrainState
    lock: RunLock
    world: World

    def fit(self) -> TrainState:
        with self.lock:
            train(self.start, self.data, self.state, StopSignal(), self.lock, self.world)
        return self.state


def begin(overrides: list[str], world: World = SINGLE) -> Begun:
    with ExitStack() as held:  # a refused run leaves its folder to the next one
        lock = held.enter_context(RunLock())
        start = read_start(overrides, lock, Launch())
        opened = open_data(start.config, world)
        begun = Begun(start, opened, build_state(start, opened, world), lock, world)
        held.pop_all()
    return begun


def train_here(overrides: list[str], world: World = SINGLE) -> TrainState:
    return begin(overrides, world).fit()


def pretrain_config(*typed: str) -> PretrainConfig:
    return validate(PretrainConfig, read_config("pretrain", list(typed)))


def load_run(path: Path, world: World = SINGLE) -> tuple[PretrainConfig, RecursiveModel, Checkpoint]:
    trained = open_trained(path, world)
    assert trained.config is not None and trained.checkpoint is not None
    return trained.config, trained.load_puzzle_model(world), trained.checkpoint


def mistake(overrides: list[str]) -> str:
    """Return the one-line message that refuses a run with these overrides."""
    with pytest.raises((ValueError, UserError)) as caught:
        train_here(overrides)
    message = str(caught.value)
    assert "\n" not in message and 20 < len(message) < 600
    return message


def weights_of(state: TrainState) -> Tensors:
    """Return a copy of the model's weights by name."""
    return {name: tensor.clone() for name, tensor in state.model.state_dict().items()}


def changed(before: Tensors, after: Tensors) -> set[str]:
    """Return the names of the tensors that changed in any bit."""
    assert before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def with_identifiers(data: Path, to: Path, num_identifiers: int) -> Path:
    """Copy a dataset, and number its puzzles 0, 1, ..., num_identifiers - 1, 0, 1, ..."""
    shutil.copytree(data, to)
    (to / "fingerprint.json").unlink(missing_ok=True)
    for split in ("train", "test"):
        file = to / split / "all__puzzle_identifiers.npy"
        np.save(file, np.arange(len(np.load(file))) % num_identifiers)
        description = to / split / "dataset.json"
        values = json.loads(description.read_text()) | {"num_puzzle_identifiers": num_identifiers}
        description.write_text(json.dumps(values))
    return to
