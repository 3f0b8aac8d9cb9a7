"""Every YAML file composes and validates, explains its keys, and has the published values."""

import functools
import shlex
from pathlib import Path

import pytest
from pydantic import BaseModel

from evaluate import EvaluateConfig
from launch.ray_config import RayPage
from models import shapes_of
from models.tokens import TokenConfig
from search.sweep import Sweep, SweepPage
from tests.models.helpers import ARCH_NAMES
from training.config import PretrainConfig
from training.solver import SolveConfig
from utils.command_line import differences, read_config, validate
from utils.config import flatten
from utils.config_files import CONFIG_DIR

PROGRAMS: dict[str, type[BaseModel]] = {
    "pretrain": PretrainConfig,
    "evaluate": EvaluateConfig,
    "solve": SolveConfig,
    "sweep": SweepPage,
    "ray": RayPage,
}
ALL_FILES = sorted(path.relative_to(CONFIG_DIR) for path in CONFIG_DIR.rglob("*.yaml"))
# A file whose name begins with _ is a part of other files and cannot be chosen.
GROUP_FILES = [path for path in ALL_FILES if len(path.parts) == 2 and not path.name.startswith("_")]


def choices(group: str) -> list[str]:
    return [path.stem for path in GROUP_FILES if path.parent.name == group]


EXPERIMENTS = choices("experiment")
# Millions of parameters, and the vocabulary of the data for which the experiment is meant.
TEXT_EXPERIMENTS = {
    **{"demo_text": (0.984, 512), "gpt_small": (110, 32000), "hrm_text_l": (692, 65536)},
    **{"text_cpu_gpt": (3.07, 512), "text_cpu_hrm": (3.13, 512)},
}
PUZZLE_EXPERIMENTS = [name for name in EXPERIMENTS if name not in TEXT_EXPERIMENTS]


@functools.cache
def compose(*overrides: str) -> PretrainConfig:
    return validate(PretrainConfig, read_config("pretrain", list(overrides)))


@pytest.mark.parametrize("path", GROUP_FILES, ids=str)
def test_every_choice_of_every_group_composes_and_validates(path: Path) -> None:
    if path.parent.name == "sweep":
        Sweep.read([f"sweep={path.stem}"])
        return
    compose(f"{path.parent}={path.stem}")


# The experiments are of puzzles.
@pytest.mark.parametrize("experiment", PUZZLE_EXPERIMENTS)
@pytest.mark.parametrize("debug", [name for name in choices("debug") if name != "tiny_text"])
def test_debug_applies_to_every_experiment(experiment: str, debug: str) -> None:
    config = compose(f"experiment={experiment}", f"debug={debug}")
    assert config.project_name == "debug"
    # If the debug file did not set the evaluations, those of the experiment would apply.
    assert config.eval_every_n_steps == (10 if debug == "tiny" else None) and config.eval_interval is None


@pytest.mark.parametrize(
    ("program", "overrides"),
    [
        *(("pretrain", [f"{group}={choice}"]) for group in ("arch", "optim") for choice in choices(group)),
        ("evaluate", ["checkpoint=x"]),
        ("evaluate", ["checkpoint=x", "arch=trm"]),
        ("sweep", []),
        ("ray", []),
    ],
    ids=str,
)
def test_the_yaml_files_have_every_key(program: str, overrides: list[str]) -> None:
    """They have no other key. All defaults are in YAML and none in Python."""
    values = read_config(program, overrides)
    read = validate(PROGRAMS[program], values).model_dump()
    # Of H_override, null in YAML is an empty table.
    # on_event is read, but never stored.
    assert dict(flatten(read)).keys() == dict(flatten(values)).keys() - {"arch.H_override", "on_event"}


# The sizes of the tasks of the experiments.
SEQ_LEN_AND_VOCAB = {
    **{"sudoku-4x4": (16, 6), "sudoku": (81, 11), "maze": (900, 6), "arc": (900, 12)},
    "lights-out-5x5": (25, 5),
}
# Millions of parameters, from the abstract of the HRM paper, tables 4 and 5 of the TRM paper, and
# the README of the SE-RRM.
PUBLISHED_SIZES = {"hrm": 27, "trm": 7, "trm_mlp": 5, "se_rrm": 2}


def num_parameters(config: PretrainConfig, *, seq_len: int, vocab_size: int) -> int:
    """Count the parameters without the puzzle table, whose size depends on the dataset."""
    arch = config.arch.model_copy(update={"forward_dtype": "float32"})  # a run replaces auto before it builds
    model = shapes_of(arch, seq_len=seq_len, vocab_size=vocab_size, num_puzzle_identifiers=1)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("experiment", TEXT_EXPERIMENTS)
def test_an_experiment_of_text_has_a_model_of_its_size(experiment: str) -> None:
    config = compose(f"experiment={experiment}")
    millions, vocab_size = TEXT_EXPERIMENTS[experiment]
    model = shapes_of(config.arch.model_copy(update={"forward_dtype": "float32"}), vocab_size=vocab_size)
    assert sum(weight.numel() for weight in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.05)
    assert config.global_batch_size % config.rows_per_step == 0


@pytest.mark.parametrize("experiment", PUZZLE_EXPERIMENTS)
def test_an_experiment_has_a_model_for_its_task(experiment: str) -> None:
    config = compose(f"experiment={experiment}")
    name = Path(config.data_path).name
    seq_len, vocab_size = next(sizes for task, sizes in SEQ_LEN_AND_VOCAB.items() if name.startswith(task))
    num = num_parameters(config, seq_len=seq_len, vocab_size=vocab_size)
    if experiment in COMMANDS and experiment != "sudoku_hard_full":  # its learned positions add parameters
        arch = config.puzzle_arch
        kind = "trm_mlp" if isinstance(arch, TokenConfig) and arch.mlp_t else arch.name
        assert round(num / 1e6) == PUBLISHED_SIZES[kind]
    assert compose(f"experiment={experiment}", "data_path=mine").train_paths == ["mine"]


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
    "eval_save_outputs": [],
    # TRM's additions
    "data_paths_test": [],
    "min_eval_interval": 0,
    "ema": False,
    "ema_rate": 0.999,
    "freeze_weights": False,
    "load_checkpoint": None,
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
}
PUBLISHED_TRM = PUBLISHED_HRM | {
    "name": "trm",
    "H_cycles": 3,
    "L_cycles": 6,
    "H_layers": 0,
    "L_layers": 2,
    "puzzle_emb_len": 16,
    "no_ACT_continue": True,
    "backprop": "last_H_cycle",  # the published code has no such key, but its recursion does this
}
# Neither published code has these options. These values switch them off.
OFF = {
    "augment": "none",
    "max_steps": None,
    "overfit_one_batch": False,
    "grad_clip": None,
    "ema_start": 0.0,
    "init_from": None,
    "puzzle_table": None,
    "freeze": "none",
    "early_stop_patience": None,
    "optim": {"name": "adam_atan2"},
}
OFF_ARCH = {
    "mlp": "swiglu",
    "conv_bias": True,
    "conv_2d": False,
    "width_multiple": 256,
    "num_registers": 0,
    "backprop_warmup_steps": 0,
    "activation_checkpointing": "none",
    "depth_curriculum": [],
    "num_states": 1,
    "noise": "none",
    "pseudo_target_steps": 0,
    "fp8_no_grad": False,
    "loss": {"loss_type": "stablemax_cross_entropy", "label_smoothing": 0.0, "halt_weight": 0.5},
}


def test_the_defaults_are_published_values() -> None:
    hrm_as_trm_says_it = {"puzzle_emb_len": 0, "no_ACT_continue": False, "backprop": "one_step"}
    for typed, arch in (([], PUBLISHED_HRM | hrm_as_trm_says_it), (["arch=trm"], PUBLISHED_TRM)):
        values = compose(*typed).model_dump()
        assert {key: values[key] for key in PUBLISHED | OFF} == PUBLISHED | OFF
        assert values["arch"] == arch | OFF_ARCH
    assert compose("arch=trm_mlp").arch == compose("arch=trm", "arch.mlp_t=True", "arch.pos_encodings=none").arch
    assert compose("arch=hrm_v1") == compose(), "the published name of the arch"


# Keys of this project alone, where another default would change what a run or an answer is.
OWN: dict[str, dict[str, object]] = {
    "pretrain": {"on_nonfinite": "stop", "on_save_error": "stop", "max_failed_saves": 3, "max_rewinds": 3}
    | {"eval_adaptive": True, "target_only": True, "best_metric": "auto", "check_replicas_every_n_steps": 1000},
    "evaluate": {"adaptive": True, "num_steps": None, "max_examples": None},
    "solve": {"max_new_tokens": 256, "temperature": None, "prompt_form": "auto", "batch_size": 256},
}


@pytest.mark.parametrize("program", OWN)
def test_the_defaults_of_this_project(program: str) -> None:
    values = read_config(program, [] if program == "pretrain" else ["checkpoint=x"])
    assert {key: values[key] for key in OWN[program]} == OWN[program]


# What tells the other architectures from one another, by what is typed after `arch=`.
OTHERS: dict[str, dict[str, object]] = {
    "se_rrm": {
        **{"hidden_size": 256, "num_heads": 4, "head_dim": 64, "num_heads_t": 2, "head_dim_t": 64, "L_layers": 2},
        **{"H_cycles": 3, "L_cycles": 4, "backprop": "last_H_cycle", "pos_encodings": "rope_2d", "add_tokens": 0},
        **{"halt_exploration_prob": 0.1, "halt_max_steps": 16, "equivariant_symbols": True, "dropout": 0.0},
    },
    "se_mixer": {"hidden_size": 16, "message_size": 16, "expansion": 3, "L_cycles": 6, "backprop": "all"},
    "transformer": {"num_layers": 8, "L_cycles": 1, "halt_max_steps": 1, "no_ACT_continue": True},
    "transformer arch.recurrent=true": {"num_layers": 4, "L_cycles": 6, "halt_max_steps": 16},
    "hrm_text": {
        **{"attention": "prefixlm", "norm_type": "pre", "norm_eps": 1e-6, "pos_encodings": "rope"},
        **{"rope_theta": 10000, "init_type": "lecun_normal", "half_layers": True, "H_cycles": 2, "L_cycles": 3},
        **{"bp_warmup_ratio": 0.2, "bp_min_steps": 2, "bp_max_steps": 5},
    },
    "trm_text": {"half_layers": False, "H_cycles": 2, "L_cycles": 1, "H_bp_steps": 1, "L_bp_steps": 1},
    "ut_text": {"cycles": 4, "bp_cycles": 2},
    "rins_text": {"half_layers": True, "L_cycles": 7, "L_bp_cycles": 4},
    "gpt": {"attention": "causal", "init_type": "megatron", "init_std": 0.02, "norm_eps": 1e-5, "num_kv_heads": 12},
}
# Heads, and millions of parameters with a vocabulary of 32,000.
SIZES = {
    **{"gpt_small": (12, 110), "gpt_medium": (16, 341), "gpt_large": (20, 772), "gpt_xl": (25, 1546)},
    **{"llama2_7b": (32, 6738), "llama2_13b": (40, 13016), "llama2_70b": (64, 68977), "seed_1024": (16, 220)},
    **{"seed_2048": (32, 1364), "seed_4096": (64, 6738), "hrm_text_b": (8, 232), "hrm_text_l": (10, 609)},
    **{"hrm_text_xl": (12, 1080), "hrm_text_xxl": (14, 3153), "hrm_text_xxl_wide": (20, 2911)},
}


@pytest.mark.parametrize("typed", OTHERS)
def test_the_other_architectures_have_their_published_values(typed: str) -> None:
    values = compose(*f"arch={typed}".split()).arch.model_dump()
    assert {key: values[key] for key in OTHERS[typed]} == OTHERS[typed]


def test_every_size_of_a_text_model_is_that_of_its_name() -> None:
    for name, (num_heads, millions) in SIZES.items():
        arch = compose(f"arch={name}", "arch.forward_dtype=float32").text_arch
        num = sum(weight.numel() for weight in shapes_of(arch, vocab_size=32000).parameters())
        assert (arch.num_heads, round(num / 1e6)) == (num_heads, millions), name


# The commands are those of the READMEs of the HRM and TRM repositories, with all their words.
TRM_COMMAND = (
    'arch=trm data_paths="[{data}]" evaluators="[]" epochs=50000 eval_interval=5000 lr=1e-4 puzzle_emb_lr=1e-4 '
    "weight_decay=1.0 puzzle_emb_weight_decay=1.0 {arch} +run_name=${{run_name}} ema=True"
)
TRM_ARC_COMMAND = (
    'arch=trm data_paths="[{data}]" arch.L_layers=2 arch.H_cycles=3 arch.L_cycles=4 +run_name=${{run_name}} ema=True'
)
LIKE_SUDOKU = (
    "epochs=20000 eval_interval=2000 lr={lr} puzzle_emb_lr={lr} weight_decay=1.0 puzzle_emb_weight_decay=1.0 "
    "data_path=data/{data}"
)
COMMANDS = {
    "arc_1": "",
    "arc_2": "data_path=data/arc-2-aug-1000",
    "maze_hard": LIKE_SUDOKU.format(lr="1e-4", data="maze-30x30-hard-1k"),
    "sudoku_extreme_1k": LIKE_SUDOKU.format(lr="1e-4", data="sudoku-extreme-1k-aug-1000"),
    "sudoku_extreme_1k_single_gpu": (
        LIKE_SUDOKU.format(lr="7e-5", data="sudoku-extreme-1k-aug-1000") + " global_batch_size=384"
    ),
    "sudoku_hard_full": (
        "data_path=data/sudoku-hard-full epochs=100 eval_interval=10 lr_min_ratio=0.1 global_batch_size=2304 lr=3e-4 "
        "puzzle_emb_lr=3e-4 weight_decay=0.1 puzzle_emb_weight_decay=0.1 arch.loss.loss_type=softmax_cross_entropy "
        "arch.L_cycles=8 arch.halt_max_steps=8 arch.pos_encodings=learned"
    ),
    "trm_sudoku_extreme": TRM_COMMAND.format(
        data="data/sudoku-extreme-1k-aug-1000",
        arch="arch.mlp_t=True arch.pos_encodings=none arch.L_layers=2 arch.H_cycles=3 arch.L_cycles=6",
    ),
    "trm_sudoku_extreme_attention": TRM_COMMAND.format(
        data="data/sudoku-extreme-1k-aug-1000", arch="arch.L_layers=2 arch.H_cycles=3 arch.L_cycles=6"
    ),
    "trm_maze_hard": TRM_COMMAND.format(
        data="data/maze-30x30-hard-1k", arch="arch.L_layers=2 arch.H_cycles=3 arch.L_cycles=4"
    ),
    "se_rrm_sudoku_extreme": (
        "arch=trm_equi data_paths=[data/sudoku-extreme-1k-aug-1000] evaluators=[] epochs=10000 eval_interval=5000 "
        "arch.L_cycles=6 ema=True weight_decay=1 arch.dropout=0.2 arch.puzzle_emb_ndim=0 arch.add_tokens=4 "
        "global_batch_size=272 arch.halt_exploration_prob=0.05"
    ),
    "trm_arc_1": TRM_ARC_COMMAND.format(data="data/arc1concept-aug-1000"),
    "trm_arc_2": TRM_ARC_COMMAND.format(data="data/arc2concept-aug-1000"),
}


@pytest.mark.parametrize("experiment", COMMANDS)
def test_a_published_command_equals_its_experiment(experiment: str) -> None:
    """They may differ in names, and recipes of this project also name evaluators."""
    typed = shlex.split(COMMANDS[experiment].replace("${run_name}", "x"))
    one, other = compose(f"experiment={experiment}"), compose(*typed)
    apart = {"run_name", "data_path", "data_paths", "evaluators"}
    assert differences(one.model_dump(exclude=apart), other.model_dump(exclude=apart)) == []
    assert one.train_paths == other.train_paths


@pytest.mark.parametrize("arch", ARCH_NAMES)
@pytest.mark.parametrize("experiment", ["demo", "trm_sudoku_6x6", "sudoku_extreme_cpu", "sudoku_extreme_fast"])
def test_a_recipe_runs_with_another_architecture_and_optimizer(experiment: str, arch: str) -> None:
    """Options that the experiment sets for its own architecture and optimizer are left out."""
    optim = choices("optim")[len(arch + experiment) % len(choices("optim"))]
    # An experiment sets the recursion of every architecture. The transformer has no recursion.
    one_pass = ["arch.H_cycles=1", "arch.L_cycles=1", "arch.halt_max_steps=1"] * (arch == "transformer")
    config = compose(f"experiment={experiment}", f"arch={arch}", f"optim={optim}", *one_pass)
    assert (config.arch.name, config.optim.name) == (arch, "muon" if optim == "muon_urm" else optim)


def test_an_option_that_was_typed_is_not_dropped() -> None:
    with pytest.raises(ValueError, match=r"unknown key 'arch\.L_layers'"):
        compose("experiment=trm_sudoku_6x6", "arch=urm", "arch.L_layers=2")


def test_what_is_typed_wins_over_the_experiment_and_debug() -> None:
    config = compose("lr=5e-4", "experiment=sudoku_hard_full", "debug=tiny", "arch.hidden_size=64", "max_steps=3")
    assert (config.lr, config.arch.hidden_size, config.max_steps) == (5e-4, 64, 3)
    assert (config.puzzle_arch.halt_max_steps, config.puzzle_arch.H_cycles, config.project_name) == (8, 1, "debug")
    # Only the choice of the architecture changes. The options that the experiment sets stay.
    config = compose("experiment=trm_maze_hard", "arch=hrm", "optim=adamw")
    assert (config.puzzle_arch.name, config.puzzle_arch.L_cycles, config.optim.name) == ("hrm", 4, "adamw")
    # The width of the puzzle embedding follows the hidden size.
    for typed, expected in ((["arch.puzzle_emb_ndim=0"], 0), ([], 256), (["experiment=sudoku_extreme_1k"], 256)):
        assert compose("arch.hidden_size=256", *typed).puzzle_arch.puzzle_emb_ndim == expected
