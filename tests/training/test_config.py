"""The config of a training run: what may be set together."""

import pytest
import yaml
from omegaconf import OmegaConf

from training.config import PretrainConfig
from utils.command_line import read_config, validate


def compose(*overrides: str) -> PretrainConfig:
    return validate(PretrainConfig, read_config("pretrain", list(overrides)))


def test_a_config_is_written_and_read_back_unchanged() -> None:
    config = compose("experiment=sudoku_hard_full", "run_name='[a, 1]: b'", "wandb.tags=[x,'1']")
    assert validate(PretrainConfig, yaml.safe_load(OmegaConf.to_yaml(OmegaConf.create(config.model_dump())))) == config


def test_a_config_does_not_change_after_validation() -> None:
    with pytest.raises(ValueError, match="frozen"):
        compose().lr = 1.0
