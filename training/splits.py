"""Open the splits of a run, and tell the sizes of the data that a model was trained on."""

import json
import os
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dataset.schema import SplitName
from dataset.text.schema import has_split, kind_of_data
from models import ArchConfig
from training.config import PretrainConfig
from training.data import AnySizes, AnySplit, Data, require_whole_shares
from training.kinds import KINDS, kind_of_arch
from utils.errors import UserError
from utils.ranks.world import World


def open_data(config: PretrainConfig, world: World) -> Data:
    """Open the splits of a run. Rank 0 also reads and checks their contents once. Every rank."""
    kind, fingerprint = kind_of_arch(config.arch), dict[str, str]()
    with world.shared_errors():
        train = open_own(config, "train")
        test = open_own(config, "test") if config.evaluates else None
        require_whole_shares(config, world)
        for split in (train, test) if test is not None else (train,):
            kind.require_fit(config, train, split)
            if world.is_main:
                fingerprint[split.path.name] = kind.check(split)
    return Data(train, test, kind.sizes.of(train), world.broadcast_object(fingerprint))


def open_own(config: PretrainConfig, name: SplitName) -> AnySplit:
    """Open the train or the test split of a run, and refuse what its architecture does not read."""
    paths, here = (config.train_paths if name == "train" else config.test_paths), os.getcwd()
    for path in [*config.train_paths, *paths]:
        if config.started_in not in (None, here) and not (os.path.isabs(path) or os.path.exists(path)):
            key = "data_paths_test" if path not in config.train_paths else "data_path"
            raise UserError(
                f"no dataset at {path}: the run was started in {config.started_in}, and it is neither there nor here "
                f"in {here}; give {key}=<folder of the dataset>"
            )
    kind, arch = kind_of_arch(config.arch), config.arch
    for path in paths:
        held = kind_of_data(path)
        if held not in (None, kind.name):
            raise UserError(
                f"arch={arch.name} reads {kind.name}, but {path} holds {held}; take {KINDS[held].archs}, or a "
                f"dataset of {kind.name}"
            )
    split: AnySplit = kind.open_all(arch, paths, name, config.train_paths)
    return split


def sizes_from(stored: dict[str, Any], arch: ArchConfig, where: str = "the checkpoint") -> AnySizes:
    """Return the sizes of the data that a model was trained on."""
    try:
        found: AnySizes = TypeAdapter(kind_of_arch(arch).sizes).validate_json(json.dumps(stored), strict=True)
        return found
    except ValidationError as error:
        raise UserError(f"{where} is damaged: it has other sizes of data than {arch.name} reads") from error


def sizes_of_data(data_path: str, arch: ArchConfig) -> AnySizes:
    """Return the sizes of data that an architecture reads."""
    kind = kind_of_arch(arch)
    sizes: AnySizes = kind.sizes.of(kind.open(data_path, "train" if has_split(Path(data_path), "train") else "test"))
    return sizes
