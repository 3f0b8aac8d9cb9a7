"""The command line: pages, the forms of an override, one line for each mistake, and a resume."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

import evaluate  # noqa: F401 registers its page
import search.sweep  # noqa: F401
import training.solver  # noqa: F401
from pretrain import USAGE
from training.config import PretrainConfig
from utils.command_line import CommandLine, differences, read_config, typed_changes, validate, with_changes
from utils.config_files import CONFIG_DIR
from utils.errors import UserError


def _overrides(typed: str, config_name: str = "pretrain") -> list[str]:
    return CommandLine.parse(shlex.split(typed), config_name, USAGE).overrides


def _read(*typed: str) -> PretrainConfig:
    command = CommandLine.parse(list(typed), "pretrain", USAGE)
    return validate(PretrainConfig, read_config("pretrain", command.overrides))


def _mistake(typed: str, config_name: str = "pretrain") -> str:
    with pytest.raises(UserError) as caught:
        values = read_config(config_name, _overrides(typed, config_name))
        validate(PretrainConfig, values)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- pages -------------------------------------------------------------------------------------


def test_help_is_usage_the_choices_and_the_yaml() -> None:
    page = CommandLine.parse(["bogus=1", "--help"], "pretrain", USAGE).page
    assert page is not None and page.startswith("pretrain.py: ")
    assert re.search(r"^ +optim +adam_atan2, adamw, .*\(default: adam_atan2\)$", page, re.MULTILINE)
    for name in ("pretrain.yaml", "arch/_common.yaml", "arch/_tokens.yaml", "arch/hrm.yaml", "optim/adam_atan2.yaml"):
        assert (CONFIG_DIR / name).read_text().strip() in page, name


def test_cfg_job_shows_a_config_that_can_be_run() -> None:
    for flags in (["--cfg", "job"], ["--cfg=job"], ["-c", "job"]):
        page = CommandLine.parse(["lr=5e-4", *flags, "experiment=sudoku_hard_full"], "pretrain", USAGE).page
        assert page is not None
        shown = yaml.safe_load(page)
    assert validate(PretrainConfig, shown) == _read("experiment=sudoku_hard_full", "lr=5e-4")


# ---- what is read ------------------------------------------------------------------------------


def test_values_of_every_type() -> None:
    for text, value in (("1e-4", 1e-4), ("0", 0.0), ("1E-3", 1e-3), (".5", 0.5)):
        lr = _read(f"lr={text}").lr
        assert lr == value and isinstance(lr, float), text
    config = _read("best_metric=null", "wandb.tags=[a,b]", "lr=1", "lr=2", "max_steps=${epochs}", "ema=True")
    assert (config.best_metric, config.wandb.tags, config.lr) == (None, ["a", "b"], 2.0)
    assert (config.max_steps, config.ema) == (100000, True)
    assert _read("arch={hidden_size: 64}").arch.hidden_size == 64
    assert _read("experiment=[sudoku_hard_full,lights_out]").project_name == "lights-out", "the last one wins"
    assert _read("data_paths=[a,b]", "data_paths=[c]").data_paths == ["c"]


def test_the_time_gives_a_name() -> None:
    typed = ["run_name=a_${now:%Y-%m-%d}", "project_name=${now:%Y}"]
    name = _read(*typed).run_name
    assert name is not None and re.fullmatch(r"a_2\d\d\d-\d\d-\d\d", name)
    assert _read(*typed).project_name == name[2:6]


def test_a_plus_and_two_dashes_mean_nothing() -> None:
    """Published commands have the first, and agents of W&B the second, with values as in Python."""
    expected = _read("lr=1e-2", "arch=trm", "ema=true", "grad_clip=null", "wandb.tags=[a,b]")
    assert _read("+lr=1e-2", "++arch=trm", "+ema=true", "grad_clip=null", "+wandb.tags=[a,b]") == expected
    assert _read("--lr=1e-2", "--arch=trm", "--ema=True", "--grad-clip=None", "--wandb.tags=['a', 'b']") == expected


@pytest.mark.parametrize(
    ("config_name", "key"), [("pretrain", "data_path"), ("evaluate", "checkpoint"), ("solve", "checkpoint")]
)
def test_a_bare_path_stands_for_the_main_key(
    config_name: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a=b").mkdir()
    for path in ("some/trm", str(tmp_path), "a folder", "./a=b"):
        assert read_config(config_name, _overrides(f"device=cpu {shlex.quote(path)}", config_name))[key] == path
    assert f"{key} is given twice" in _mistake(f"x/y {key}=z", config_name)


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "my home"
    (home / "cfg").mkdir(parents=True)
    (home / "cfg" / "mine.yaml").write_text("# @package _global_\ndata_paths_test: [~/t]\ncheckpoint_path: ~/c\n")
    monkeypatch.setenv("HOME", str(home))
    typed = "'data_path=~/x' 'experiment=~/cfg/mine.yaml' \"init_from='~/i'\" 'data_paths=[~/a, ~/b]'"
    config = read_config("pretrain", _overrides(typed))
    assert (config["data_path"], config["data_paths_test"]) == (f"{home}/x", [f"{home}/t"])
    assert (config["checkpoint_path"], config["init_from"]) == (f"{home}/c", f"{home}/i")
    assert config["data_paths"] == [f"{home}/a", f"{home}/b"]
    assert read_config("evaluate", _overrides("'~/run'", "evaluate"))["checkpoint"] == f"{home}/run"


def test_a_key_that_a_users_yaml_leaves_out_can_be_typed(tmp_path: Path) -> None:
    arch = {key: value for key, value in read_config("pretrain", [])["arch"].items() if key != "rope_theta"}
    (file := tmp_path / "mine.yml").write_text(yaml.safe_dump(arch))
    for typed in ("arch.rope_theta=7", "+arch.rope_theta=7", "arch={rope_theta: 7}"):
        for more in ([], ["experiment=demo"]):
            assert _read(*more, f"arch={file}", typed).arch.model_dump()["rope_theta"] == 7, typed


def test_interpolations_see_the_keys_that_they_name() -> None:
    values = read_config("pretrain", ["run_name=seed", "seed=7", "lr='${${run_name}}'", "beta1=${lr}"])
    assert (values["lr"], values["beta1"]) == (7, 7)
    assert read_config("pretrain", ["run_name='${oc.select:${project_name}}'", "project_name=seed"])["run_name"] == "0"
    with pytest.raises(UserError, match="data_paths"):
        read_config("pretrain", ["data_paths=[a,???]"])


def test_other_names_of_keys_work_in_each_program() -> None:
    for name in ("batch_size", "eval_batch_size"):
        assert read_config("pretrain", _overrides(f"{name}=32"))["eval_batch_size"] == 32
        assert read_config("evaluate", _overrides(f"checkpoint=x {name}=32", "evaluate"))["batch_size"] == 32


def test_reading_leaves_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is written, and a second reading does not see the values of the first."""
    monkeypatch.chdir(tmp_path)
    read_config("pretrain", ["lr=3"])["arch"]["hidden_size"] = 1
    assert (_read().lr, _read("lr=3").arch.hidden_size) == (1e-4, 512)
    assert list(tmp_path.iterdir()) == []


def test_the_environment_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A config goes into checkpoints and to W&B, and secrets stand in the environment."""
    monkeypatch.setenv("HF_TOKEN", "hf_qZxWvUtSrQpOnMlKj")
    for typed in ("run_name=${oc.env:HF_TOKEN}", "data_paths=[a,'${oc.env:HF_TOKEN}']", "arch=${oc.env:HF_TOKEN}"):
        message = _mistake(shlex.quote(typed))
        assert "oc.env" in message and "hf_qZ" not in message


# ---- mistakes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("--lr 1e-4", "write lr=1e-4"),
        ("'learning rate=3'", "'learning rate=3' is no override"),
        ("'arch={bogus: 1}'", "unknown key 'arch.bogus'"),
        ("hidden_size=64", "did you mean arch.hidden_size?"),
        ("muon_lr=1", "did you mean optim.muon_lr with optim=muon?"),
        ("arch=transformer arch.H_layers=1", "the chosen arch doesn't have it; take arch=hrm or arch=trm"),
        ("arch=TRM", "did you mean trm?"),
        ("experiment=demo.yaml", "is not there, or is no regular file; write experiment=demo"),
        ("arch.name=trm", "write arch=trm"),
        ("max_steps=???", "max_steps is not set"),
        ("lr=1,2", "'lr=1,2' asks for several runs"),
        ("'wandb.tags=[a,b'", "'wandb.tags=[a,b' can't be read"),
        ("'lr=${nokey}'", "lr: Interpolation key 'nokey' not found"),
        ("epochs=true lr=x seed=-1", "seed: input should be greater"),
        ("batch_size=32 eval_batch_size=16", "eval_batch_size=32, and that is given as well"),
        ("use_muon=True optim=adamw", "optim=muon_urm, and that is given as well"),
        ("lr=nan lr_min_ratio=inf", "lr: input should be a finite number"),
        ("data_paths=data/a", "write data_paths=[data/a]"),
        ("profile=yes", "profile: 'yes' is neither true nor false"),
        # Keys of other programs.
        ("--vocab-size=50000", "the tokens of the data decide it"),
        ("n_layer=1", "did you mean arch.L_layers or arch.H_layers?"),
    ],
)
def test_a_mistake_is_one_line_with_the_value_and_the_correction(typed: str, expected: str) -> None:
    assert expected in _mistake(typed)


def test_a_mistake_for_another_program_names_the_keys_of_that_program() -> None:
    """An unknown key is reported first, even if a required key is missing."""
    assert "did you mean batch_size?" in _mistake("batchsize=3", "evaluate")
    assert _mistake("", "evaluate") == "checkpoint is not set; give checkpoint=..."
    assert "write lr=3" in _mistake("--lr 3", "sweep"), "sweep.py passes keys of runs on"
    assert "unknown key 'lr'" in _mistake("--lr 3", "evaluate")


# ---- a key that was a switch -------------------------------------------------------------------


def test_a_switch_with_options_is_still_a_switch(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("# @package _global_\nprofile: true\n")
    off = {"enabled": False, "steps": [4, 6], "ranks": [0], "shapes": False, "stacks": False}
    for typed, changed in (
        ("", {}),
        ("--profile=True", {"enabled": True}),
        ("profile.ranks=null profile=true", {"enabled": True, "ranks": None}),
        ("'profile={enabled:true,shapes:true}'", {"enabled": True, "shapes": True}),
        ("debug=profile profile.stacks=true", {"enabled": True, "stacks": True}),
        ("debug=profile profile=false", {}),
        (f"experiment={file}", {"enabled": True}),
        (f"experiment={file} profile=false", {}),
    ):
        assert read_config("pretrain", _overrides(typed))["profile"] == off | changed, typed


# ---- resuming ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "changes"),
    [
        ([], {}),
        # A typed default is a change, because the stored run may have another value.
        (["+lr=1e-4", "max_steps=null", "wandb.tags=[]"], {"lr": 1e-4, "max_steps": None, "wandb.tags": []}),
        # puzzle_emb_ndim, which follows from it, stays that of the run.
        (["arch.hidden_size=64"], {"arch.hidden_size": 64}),
        (["+arch.loss={label_smoothing: 0.5}"], {"arch.loss.label_smoothing": 0.5}),
        (["profile=False", "profile.ranks=null"], {"profile.enabled": False, "profile.ranks": None}),
        (["use_muon=False", "batch_size=8"], {"eval_batch_size": 8}),
    ],
)
def test_the_changes_are_the_typed_values(typed: list[str], changes: dict[str, Any]) -> None:
    assert typed_changes("pretrain", typed) == changes


@pytest.mark.parametrize(
    "typed",
    [["debug=tiny", "arch.hidden_size=64"], ["experiment=sudoku_hard_full", "debug=overfit", "+seed=3"]],
)
def test_the_same_command_makes_no_change(typed: list[str]) -> None:
    """A restart by torchrun repeats the command line of the first attempt."""
    config, changes = read_config("pretrain", typed), typed_changes("pretrain", typed)
    assert differences(config, with_changes(config, changes)) == []


def test_changes_are_set_in_a_copy_and_differences_name_every_leaf() -> None:
    stored: dict[str, Any] = {"lr": 1.0, "arch": {"a": 1}, "name": "${lr}"}
    assert with_changes(stored, {"arch.a": 2, "wandb.mode": "x"}) == stored | {"arch": {"a": 2}, "wandb": {"mode": "x"}}
    assert stored["arch"] == {"a": 1}
    old = {"lr": 1e-4, "arch": {"a": 1, "b": 2}, "gone": 1, "tags": []}
    new = {"lr": 2e-4, "arch": {"a": 1, "b": 3}, "tags": ["x"], "added": None}
    assert differences(old, new) == ["lr: 0.0001 -> 0.0002", "arch.b: 2 -> 3", "tags: [] -> ['x']", "gone: 1 -> None"]
    assert differences(new, new) == []
