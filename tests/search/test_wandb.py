"""The sweep of Weights & Biases that a sweep becomes, and the command lines of its agents."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from search.wandb import wandb_page
from sweep import sweep as main
from tests.search.finished import read_sweep
from utils.command_line import CommandLine, read_config
from utils.errors import UserError

# From schema.json of W&B's package sweeps: the keys of a sweep, and those of each distribution.
# run_cap is newer than that file.
TOP_LEVEL = {"name", "project", "program", "method", "metric", "parameters", "early_terminate", "command", "run_cap"}
DISTRIBUTIONS = {
    "categorical": {"values"},
    "uniform": {"min", "max", "distribution"},
    "log_uniform_values": {"min", "max", "distribution"},
    "int_uniform": {"min", "max", "distribution"},
}


def _page(folder: Path, data: Path, **keys: Any) -> dict[str, Any]:
    keys["overrides"] = ["debug=tiny", f"data_path={data}", *keys.get("overrides", [])]
    page = yaml.safe_load(wandb_page(read_sweep(folder, **keys)))
    assert page.keys() <= TOP_LEVEL and page["method"] in ("grid", "random", "bayes")
    for parameter in page["parameters"].values():
        assert parameter.keys() == DISTRIBUTIONS[parameter.get("distribution", "categorical")]
    assert isinstance(page, dict)
    return page


def _agent_types(page: dict[str, Any], values: dict[str, Any]) -> list[str]:
    """Return the command line that an agent starts, with what wandb itself makes of the values."""
    words = create_sweep_command([*page["command"]])
    arguments = create_sweep_command_args({"args": {key: {"value": value} for key, value in values.items()}})
    return [typed for word in words for typed in (arguments["args"] if word == "${args}" else [word])]


def test_every_kind_of_parameter(tmp_path: Path, data: Path) -> None:
    parameters = {
        "arch": ["hrm", "trm"],
        "lr": {"log_range": [1e-5, 1e-2]},
        "weight_decay": {"range": [0.0, 1.0]},
        "beta2": {"range": [0.9, 1.0], "num": 3},
        "arch.H_cycles": {"int_range": [1, 3]},
        "arch.L_cycles": {"int_range": [1, 5], "step": 2},
        "ema": [True, False],
        "grad_clip": [None, 1.0],
        "evaluators": [[], ["sudoku"]],
    }
    page = _page(tmp_path, data, parameters=parameters, seeds=[0, 1], trials=7)
    assert page["parameters"] == {
        "arch": {"values": ["hrm", "trm"]},
        "lr": {"distribution": "log_uniform_values", "min": 1e-5, "max": 1e-2},
        "weight_decay": {"distribution": "uniform", "min": 0.0, "max": 1.0},
        "beta2": {"values": pytest.approx([0.9, 0.95, 1.0])},
        "arch.H_cycles": {"distribution": "int_uniform", "min": 1, "max": 3},
        "arch.L_cycles": {"values": [1, 3, 5]},
        "ema": {"values": [True, False]},
        "grad_clip": {"values": ["null", 1.0]},
        "evaluators": {"values": ["[]", "[sudoku]"]},
        "seed": {"values": [0, 1]},
    }
    assert (page["method"], page["run_cap"], page["project"]) == ("bayes", 14, "debug")
    assert page["metric"] == {"name": "eval/all/exact_accuracy", "goal": "maximize"}
    assert "early_terminate" not in page


def test_a_grid_lists_its_values_and_has_no_cap(tmp_path: Path, data: Path) -> None:
    page = _page(tmp_path, data, parameters={"arch.H_cycles": {"int_range": [1, 3]}}, sampler={"name": "grid"})
    assert page["method"] == "grid" and "run_cap" not in page
    assert page["parameters"] == {"arch.H_cycles": {"values": [1, 2, 3]}}
    assert _page(tmp_path, data, parameters={"lr": [1, 2]}, sampler={"name": "random"})["run_cap"] == 2


def test_pretrain_reads_what_an_agent_types(tmp_path: Path, data: Path) -> None:
    overrides = ["wandb.mode=disabled", "project_name='it is: mine'"]
    page = _page(tmp_path, data, parameters={"lr": [1e-4]}, seeds=[5, 6], overrides=overrides)
    values = {
        **{"lr": 1e-05, "arch": "trm", "arch.L_cycles": 2, "ema": True, "compile": False, "seed": 6},
        **{"grad_clip": None, "eval_interval": "null", "evaluators": "[sudoku,maze]", "wandb.tags": ["a", "b"]},
    }
    command = _agent_types(page, values)
    assert command[:4] == ["${env}", "OMP_NUM_THREADS=1", "python", "pretrain.py"] and "--ema=True" in command
    typed = CommandLine.parse(command[4:], "pretrain", "")
    equal = [
        "debug=tiny",
        f"data_path={data}",
        "project_name='it is: mine'",
        "wandb.mode=online",
        "lr=1e-5",
        "arch=trm",
    ]
    equal += ["arch.L_cycles=2", "ema=true", "compile=false", "seed=6", "grad_clip=null", "eval_interval=null"]
    equal += ["evaluators=[sudoku,maze]", "wandb.tags=[a,b]"]
    assert read_config("pretrain", typed.overrides) == read_config("pretrain", equal)


def test_one_seed_is_a_fixed_override(tmp_path: Path, data: Path) -> None:
    page = _page(tmp_path, data, parameters={"lr": [1e-4]}, seeds=[5])
    assert "seed=5" in page["command"] and "seed" not in page["parameters"]


def test_torchrun(tmp_path: Path, data: Path) -> None:
    launcher = {"name": "torchrun", "ranks": 2}
    command = _page(tmp_path, data, parameters={"lr": [1e-4]}, launcher=launcher)["command"]
    assert command[2:7] == ["torchrun", "--standalone", "--nproc-per-node", "2", "pretrain.py"]


@pytest.mark.parametrize(
    ("metric", "warmup_steps", "rung"),
    [("exact_accuracy", 25, 3), ("exact_accuracy", None, 1), ("train/lm_loss", 25, 25)],
)
def test_successive_halving_counts_what_is_logged(
    tmp_path: Path, data: Path, metric: str, warmup_steps: int | None, rung: int
) -> None:
    """The runs evaluate every 10 steps and log every step."""
    pruner = {"name": "successive_halving", "reduction_factor": 3, "warmup_steps": warmup_steps}
    page = _page(tmp_path, data, parameters={"lr": [1e-4]}, metric=metric, pruner=pruner, direction="minimize")
    assert page["early_terminate"] == {"type": "hyperband", "min_iter": rung, "eta": 3}
    assert page["metric"]["goal"] == "minimize"


def test_what_wandb_cannot_do(tmp_path: Path, data: Path) -> None:
    overrides = ["debug=tiny", f"data_path={data}"]
    text = wandb_page(
        read_sweep(
            tmp_path, overrides=overrides, parameters={"lr": [1e-4]}, seeds=[0, 1], pruner={"name": "median"}, hours=2
        )
    )
    comments = [line for line in text.splitlines() if line.startswith("#")]
    assert "#   wandb sweep FILE.yaml" in comments
    assert "# W&B has no median pruner: every run trains to its end." in comments
    assert "# W&B takes the seed as one more parameter, and does not average over it." in comments
    assert "# W&B has no limit like sweep.hours: stop the agent yourself." in comments
    conditional = {"ema": [True, False], "ema_rate": {"values": [0.9], "when": {"ema": True}}}
    with pytest.raises(UserError, match=r"sweep\.parameters\.ema_rate has a condition \(when\), and W&B has none"):
        wandb_page(read_sweep(tmp_path, overrides=overrides, parameters=conditional))
    by_epochs = [*overrides, "eval_every_n_steps=null", "eval_interval=1"]
    pruner = {"name": "successive_halving", "warmup_steps": 5}
    with pytest.raises(UserError, match="W&B counts evaluations; give eval_every_n_steps"):
        wandb_page(read_sweep(tmp_path, overrides=by_epochs, parameters={"lr": [1e-4]}, pruner=pruner))


def test_a_dry_run_of_it_is_refused() -> None:
    with pytest.raises(UserError, match="--dry-run shows what a sweep would start, and wandb starts nothing; leave it"):
        main(["wandb", "--dry-run", "lr=1,2"])


def test_the_command(data: Path) -> None:
    printed = main(["wandb", "lr=1e-4,2e-4", "debug=tiny", f"data_path={data}", "seed=range(2)"])
    assert isinstance(printed, str)
    page = yaml.safe_load(printed)
    assert page["method"] == "grid" and page["parameters"]["lr"] == {"values": [1e-4, 2e-4]}
