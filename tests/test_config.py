"""Every YAML file composes and validates, says what its keys mean, and holds the published values."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf
from pydantic import BaseModel

from draw import DrawConfig
from evaluate import EvaluateConfig
from pretrain import PretrainConfig
from utils.command_line import CONFIG_DIR, differences, read_config, validate

PROGRAMS: dict[str, type[BaseModel]] = {"pretrain": PretrainConfig, "evaluate": EvaluateConfig, "draw": DrawConfig}
GROUP_FILES = sorted(path.relative_to(CONFIG_DIR) for path in CONFIG_DIR.glob("*/*.yaml"))
ALL_FILES = sorted(path.relative_to(CONFIG_DIR) for path in CONFIG_DIR.rglob("*.yaml"))


def compose(*overrides: str) -> PretrainConfig:
    return validate(PretrainConfig, read_config("pretrain", list(overrides)))


def test_every_program_has_its_page() -> None:
    assert sorted(path.stem for path in CONFIG_DIR.glob("*.yaml")) == sorted(PROGRAMS)


@pytest.mark.parametrize("path", GROUP_FILES, ids=str)
def test_every_choice_of_every_group_composes_and_validates(path: Path) -> None:
    assert len(path.parts) == 2
    compose(f"{path.parent}={path.stem}")


@pytest.mark.parametrize("experiment", [path.stem for path in GROUP_FILES if path.parent.name == "experiment"])
@pytest.mark.parametrize("debug", [path.stem for path in GROUP_FILES if path.parent.name == "debug"])
def test_debug_applies_to_every_experiment(experiment: str, debug: str) -> None:
    # Several debug files shrink the model; where the experiment says how, the person must too.
    assert compose(f"experiment={experiment}", f"debug={debug}").project_name == "debug"


def test_each_program_validates() -> None:
    validate(PretrainConfig, read_config("pretrain", []))
    validate(EvaluateConfig, read_config("evaluate", ["checkpoint=x"]))
    validate(DrawConfig, read_config("draw", ["checkpoint=x"]))


def _keys_of(model: type[BaseModel], prefix: str = "") -> set[str]:
    keys = set()
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys |= _keys_of(field.annotation, f"{prefix}{name}.")
        else:
            keys.add(prefix + name)
    return keys


def _leaves(values: dict[str, Any], prefix: str = "") -> set[str]:
    nested = [(f"{prefix}{key}", value) for key, value in values.items()]
    return {leaf for key, value in nested for leaf in (_leaves(value, f"{key}.") if isinstance(value, dict) else {key})}


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_key_that_can_be_set_stands_in_yaml(program: str) -> None:
    """And nothing else does; defaults stand there alone, not in Python too."""
    overrides = [] if program == "pretrain" else ["checkpoint=x"]
    assert _leaves(read_config(program, overrides)) == _keys_of(PROGRAMS[program])


def _no_defaults(model: type[BaseModel]) -> None:
    for name, field in model.model_fields.items():
        assert field.is_required(), f"{model.__name__}.{name} has a default in Python"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            _no_defaults(field.annotation)


@pytest.mark.parametrize("program", PROGRAMS)
def test_defaults_stand_in_yaml_alone(program: str) -> None:
    _no_defaults(PROGRAMS[program])


# Names that say it all, or are said in one comment for their group.
SPEAKING = {
    *("lr", "lr_warmup_steps", "beta1", "beta2", "weight_decay", "puzzle_emb_lr", "puzzle_emb_weight_decay"),
    *("name", "hidden_size", "num_heads", "H_cycles", "H_layers", "L_layers", "rope_theta"),
    *("entity", "group", "tags", "timeout_s", "checkpoint_every_eval", "checkpoint_every_n_steps"),
}


@pytest.mark.parametrize("path", ["pretrain.yaml", "evaluate.yaml", "draw.yaml", "arch/hrm.yaml"])
def test_every_key_has_a_comment(path: str) -> None:
    undocumented = {
        found[1]
        for line in (CONFIG_DIR / path).read_text().splitlines()
        if (found := re.match(r"\s*(\w+):\s*\S", line)) and " #" not in line
    }
    assert undocumented <= SPEAKING


@pytest.mark.parametrize("path", ALL_FILES, ids=str)
def test_every_file_says_what_it_is(path: Path) -> None:
    lines = (CONFIG_DIR / path).read_text().splitlines()
    assert re.match(r"# \w.{20}", next(line for line in lines if not line.startswith("# @package")))


@pytest.mark.parametrize("path", [path for path in GROUP_FILES if path.parent.name == "experiment"], ids=str)
def test_an_experiment_says_its_result_and_command(path: Path) -> None:
    text = (CONFIG_DIR / path).read_text()
    assert f"pretrain.py experiment={path.stem}" in text
    assert "dataset/build_" in text
    assert re.search(r"^# (Expected|Published):", text, re.MULTILINE)


@pytest.mark.parametrize("path", [path for path in GROUP_FILES if path.parent.name == "experiment"], ids=str)
def test_an_experiment_holds_only_differences(path: Path) -> None:
    own = {
        key: value
        for key, value in yaml.safe_load((CONFIG_DIR / path).read_text()).items()
        if key not in ("defaults", "weight_decay", "lr", "puzzle_emb_weight_decay")  # what a published command typed
    }
    plain = read_config("pretrain", [])
    same = [
        key
        for key in _leaves(own)
        if OmegaConf.select(OmegaConf.create(plain), key) == OmegaConf.select(OmegaConf.create(own), key)
    ]
    assert same == []


PUBLISHED = {
    "data_path": "data/arc-aug-1000",
    "global_batch_size": 768,
    "epochs": 100000,
    "eval_interval": 10000,
    "checkpoint_every_eval": True,
    "lr": 1e-4,
    "lr_min_ratio": 1.0,
    "lr_warmup_steps": 2000,
    "beta1": 0.9,
    "beta2": 0.95,
    "weight_decay": 0.1,
    "puzzle_emb_lr": 1e-2,
    "puzzle_emb_weight_decay": 0.1,
    "seed": 0,
    "project_name": None,
    "run_name": None,
    "checkpoint_path": None,
    "eval_save_outputs": [],
    "log_interval": 10,
    "device": "auto",
}
PUBLISHED_HRM = {
    "name": "hrm",
    "hidden_size": 512,
    "num_heads": 8,
    "expansion": 4.0,
    "H_cycles": 2,
    "L_cycles": 2,
    "H_layers": 4,
    "L_layers": 4,
    "halt_max_steps": 16,
    "halt_exploration_prob": 0.1,
    "puzzle_emb_ndim": 512,
    "pos_encodings": "rope",
    "rope_theta": 10000.0,
    "forward_dtype": "bfloat16",
    "mlp_t": False,
    "loss": {"loss_type": "stablemax_cross_entropy"},
}


def test_defaults_are_the_published_ones() -> None:
    values = compose().model_dump()
    assert {key: values[key] for key in PUBLISHED} == PUBLISHED
    assert values["arch"] == PUBLISHED_HRM


def test_the_published_name_of_the_arch_is_accepted() -> None:
    assert compose("arch=hrm_v1") == compose()


# The README of the HRM repository, as it stands there.
COMMANDS = {
    "sudoku_extreme_1k": (
        "data_path=data/sudoku-extreme-1k-aug-1000 epochs=20000 eval_interval=2000 lr=1e-4 puzzle_emb_lr=1e-4 "
        "weight_decay=1.0 puzzle_emb_weight_decay=1.0"
    ),
    "sudoku_extreme_1k_single_gpu": (
        "data_path=data/sudoku-extreme-1k-aug-1000 epochs=20000 eval_interval=2000 global_batch_size=384 lr=7e-5 "
        "puzzle_emb_lr=7e-5 weight_decay=1.0 puzzle_emb_weight_decay=1.0"
    ),
    "sudoku_hard_full": (
        "data_path=data/sudoku-hard-full epochs=100 eval_interval=10 lr_min_ratio=0.1 global_batch_size=2304 lr=3e-4 "
        "puzzle_emb_lr=3e-4 weight_decay=0.1 puzzle_emb_weight_decay=0.1 arch.loss.loss_type=softmax_cross_entropy "
        "arch.L_cycles=8 arch.halt_max_steps=8 arch.pos_encodings=learned"
    ),
}


@pytest.mark.parametrize("experiment", COMMANDS)
def test_published_commands_compose_as_written_and_as_an_experiment(experiment: str) -> None:
    typed = compose(*COMMANDS[experiment].split())
    assert differences(compose(f"experiment={experiment}").model_dump(), typed.model_dump()) == []


def test_published_8_gpu_command() -> None:
    config = compose(*COMMANDS["sudoku_extreme_1k"].split())
    assert (config.data_path, config.epochs, config.eval_interval) == ("data/sudoku-extreme-1k-aug-1000", 20000, 2000)
    assert (config.lr, config.puzzle_emb_lr) == (1e-4, 1e-4)
    assert (config.weight_decay, config.puzzle_emb_weight_decay) == (1.0, 1.0)
    assert config.global_batch_size == 768


def test_puzzle_embedding_follows_the_hidden_size() -> None:
    assert compose("arch.hidden_size=256").arch.puzzle_emb_ndim == 256
    assert compose("arch.hidden_size=256", "arch.puzzle_emb_ndim=0").arch.puzzle_emb_ndim == 0
    assert compose("experiment=sudoku_extreme_1k", "arch.hidden_size=128").arch.puzzle_emb_ndim == 128


def test_a_typed_key_wins_over_the_experiment_and_debug() -> None:
    config = compose("lr=5e-4", "experiment=sudoku_hard_full", "debug=tiny", "arch.hidden_size=64", "max_steps=3")
    assert (config.lr, config.arch.hidden_size, config.max_steps) == (5e-4, 64, 3)
    assert (config.arch.L_cycles, config.arch.H_layers, config.project_name) == (8, 1, "debug")


@pytest.mark.parametrize("group", ["experiment", "debug"])
def test_optional_groups_need_no_plus(group: str) -> None:
    assert f"{group}: null" in (CONFIG_DIR / "pretrain.yaml").read_text()


def test_a_plus_says_nothing_more() -> None:
    """Published TRM commands have `+run_name=...`."""
    assert compose("+run_name=x", "++lr=1e-3", "+experiment=sudoku_extreme_1k").run_name == "x"


def test_a_config_is_written_and_read_back_unchanged() -> None:
    config = compose("experiment=sudoku_hard_full", "run_name='[a, 1]: b'", "wandb.tags=[x,'1']")
    assert validate(PretrainConfig, yaml.safe_load(OmegaConf.to_yaml(OmegaConf.create(config.model_dump())))) == config


def test_a_config_does_not_change_after_validation() -> None:
    with pytest.raises(ValueError, match="frozen"):
        compose().lr = 1.0
