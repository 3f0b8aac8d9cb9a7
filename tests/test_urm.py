"""URM runs as published, and runs and weights of URM from before it was go on as they were."""

import json
from pathlib import Path

import pytest

from models.layers import ConvSwiGLU
from models.urm import URMConfig
from optim.build import MuonConfig
from tests import runs
from tests.in_process import changed, load_run, pretrain_config, train_here
from tests.records.checkpoint.helpers import fix_manifest

SMALL = "debug=tiny device=cpu arch=urm arch.num_layers=1 arch.H_cycles=2 arch.L_cycles=2 lr_warmup_steps=3"
SHORT = "max_steps=4 checkpoint_every_n_steps=2 eval_every_n_steps=null log_interval=1"
OLD = "arch.conv_bias=false lr_counts_from=1 ema=true"


@pytest.fixture(scope="module")
def old(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of URM as it was stored before the convolution had a bias."""
    run = tmp_path_factory.mktemp("old") / "run"
    train_here([*f"{SMALL} {SHORT} {OLD}".split(), f"data_path={data}", f"checkpoint_path={run}"])
    for state in run.glob("step_*/state.json"):
        stored = json.loads(state.read_text())
        del stored["config"]["arch"]["conv_bias"], stored["config"]["lr_counts_from"]
        state.write_text(json.dumps(stored))
        fix_manifest(state.parent)
    return run


def test_an_old_run_goes_on_bit_for_bit_without_the_bias(old: Path, tmp_path: Path) -> None:
    config, model, _ = load_run(old)
    assert isinstance(config.arch, URMConfig) and not config.arch.conv_bias
    assert config.lr_counts_from == 1
    (layer,) = [module for module in model.modules() if isinstance(module, ConvSwiGLU)]
    assert layer.conv_bias_W is None
    train_here([f"resume={old / 'step_00000002'}", f"checkpoint_path={tmp_path / 'again'}"])
    assert not changed(runs.tensors(old, 4), runs.tensors(tmp_path / "again", 4))


# From the scripts of the URM repository, by the name of the recipe here.
_COMMON = "arch=urm arch.loops=16 arch.H_cycles=2 arch.L_cycles=6 arch.num_layers=4 eval_interval=2000 +run_name=URM"
_ARC = f"{_COMMON} +ema=True epochs=200000 puzzle_emb_lr=1e-2 weight_decay=0.1"
COMMANDS = {
    "urm_arc_1": f"data_path=data/arc1concept-aug-1000 {_ARC}",
    "urm_arc_2": f"data_path=data/arc2concept-aug-1000 {_ARC} use_muon=True",
    "urm_sudoku_extreme": f"data_path=PATH_TO_SUDOKU {_COMMON} +ema=True epochs=50000 lr=1e-4 puzzle_emb_lr=1e-4 "
    "weight_decay=1.0 puzzle_emb_weight_decay=1.0 global_batch_size=128",
}


def _typed(name: str, run: str = "checkpoints/URM") -> list[str]:
    return [*COMMANDS[name].split(), f"+checkpoint_path={run}"]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_recipe_is_its_published_command_and_both_say_what_they_say_there(name: str) -> None:
    recipe = pretrain_config(f"experiment={name}")
    config = pretrain_config(*_typed(name), f"data_path={recipe.data_path}")
    apart = {"run_name", "checkpoint_path", "evaluators"}
    assert recipe.model_dump(exclude=apart) == config.model_dump(exclude=apart)
    arch = config.puzzle_arch
    assert isinstance(arch, URMConfig)
    assert (arch.halt_max_steps, arch.H_cycles, arch.L_cycles, arch.num_layers) == (16, 2, 6, 4)
    assert (arch.mlp, arch.backprop) == ("conv_swiglu", "last_H_cycle") and arch.conv_bias and arch.no_ACT_continue
    assert (arch.hidden_size, arch.num_heads, arch.expansion, arch.puzzle_emb_ndim) == (512, 8, 4, 512)
    assert (config.run_name, config.checkpoint_path, config.ema_rate * config.ema) == ("URM", "checkpoints/URM", 0.999)
    assert (config.lr, config.lr_warmup_steps, config.lr_min_ratio, config.first_lr_step) == (1e-4, 2000, 1.0, 0)
    if name != "urm_arc_2":
        assert config.optim.name == "adam_atan2"
        return
    assert isinstance(config.optim, MuonConfig)
    assert config.optim.model_dump() == {
        **{"name": "muon", "muon_lr": None, "muon_momentum": 0.95, "muon_weight_decay": 0.1, "muon_iterations": 5},
        **{"muon_coefficients": "urm", "muon_scale": "rms", "muon_matrices": "all", "rest": "adamw", "eps": 1e-8},
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_the_published_commands_run_and_resume(name: str, data: Path, tmp_path: Path, log: Path) -> None:
    """Only the sizes are smaller. The shell of the scripts makes the folder before."""
    run = tmp_path / "run"
    run.mkdir()
    smaller = ["arch.hidden_size=32", "arch.num_heads=2", "global_batch_size=8", "max_steps=2", "eval_max_examples=2"]
    typed = [*_typed(name, str(run)), *smaller, f"data_path={data}", "device=cpu", "compile=false"]
    typed += ["arch.forward_dtype=float32", "wandb.mode=disabled"]
    runs.train(typed, log).ok()
    stored = json.loads((run / "step_00000002" / "state.json").read_text())["config"]
    assert stored["arch"]["halt_max_steps"] == 16 and "loops" not in stored["arch"]
    assert stored["optim"]["name"] == ("muon" if name == "urm_arc_2" else "adam_atan2")
    train_here([f"resume={run}", "max_steps=3", "arch.loops=4"])
    assert json.loads((run / "step_00000003" / "state.json").read_text())["config"]["arch"]["halt_max_steps"] == 4
