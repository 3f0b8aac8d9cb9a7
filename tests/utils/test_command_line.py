"""The command line: readable pages, and one line for each mistake with the way to correct it."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrain import USAGE
from training.config import PretrainConfig
from utils.command_line import (
    CommandLine,
    differences,
    read_config,
    typed_changes,
    validate,
    with_changes,
)
from utils.config_files import CONFIG_DIR
from utils.errors import UserError


def _read(*typed: str) -> PretrainConfig:
    command = CommandLine.parse(list(typed), "pretrain", USAGE)
    return validate(PretrainConfig, read_config("pretrain", command.overrides))


def _mistake(*typed: str) -> str:
    with pytest.raises(ValueError) as caught:
        _read(*typed)
    message = str(caught.value)
    assert "\n" not in message and "\r" not in message
    assert 20 < len(message) < 500
    for jargon in ("struct", "object_type", "full_key", "hydra.cc", "pydantic", "Traceback"):
        assert jargon not in message
    return message


# ---- pages -------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_a_readable_page(flag: str) -> None:
    page = CommandLine.parse([flag], "pretrain", USAGE).page
    assert page is not None
    assert page.startswith("pretrain.py: ")
    assert "torchrun" in page and "resume=auto" in page
    for group in (path for path in CONFIG_DIR.iterdir() if path.is_dir() and path.name != "sweep"):
        choices = r",\s+".join(sorted(path.stem for path in group.glob("[!_]*.yaml")))
        assert re.search(rf"^ +{group.name} +{choices}\s+\(default: \w+\)$", page, re.MULTILINE)
    for name in ("pretrain.yaml", "arch/_common.yaml", "arch/_tokens.yaml", "arch/hrm.yaml", "optim/adam_atan2.yaml"):
        # The page has the whole YAML, with its comments.
        assert (CONFIG_DIR / name).read_text().strip() in page
    assert max(map(len, page.splitlines())) <= 160


def test_help_is_shown_in_spite_of_a_mistake() -> None:
    assert CommandLine.parse(["bogus=1", "--help"], "pretrain", USAGE).page is not None


def test_cfg_job_shows_the_composed_config() -> None:
    for flags in (["--cfg", "job"], ["--cfg=job"], ["-c", "job"]):
        page = CommandLine.parse([*flags, "experiment=sudoku_hard_full", "lr=5e-4"], "pretrain", USAGE).page
        assert page is not None
        shown = yaml.safe_load(page)
        assert (shown["lr"], shown["arch"]["L_cycles"], shown["arch"]["puzzle_emb_ndim"]) == (5e-4, 8, 512)
        # The shown config can be run.
        assert validate(PretrainConfig, shown) == _read("experiment=sudoku_hard_full", "lr=5e-4")


def test_cfg_job_refuses_what_a_run_would() -> None:
    assert "unknown key 'bogus'" in _mistake("--cfg", "job", "bogus=1")


def test_flags_may_stand_between_overrides() -> None:
    command = CommandLine.parse(["lr=1", "-c", "job", "epochs=3"], "pretrain", USAGE)
    assert command.overrides == ["lr=1", "epochs=3"]


# ---- mistakes ----------------------------------------------------------------------------------

MISTAKES: dict[str, tuple[list[str], str]] = {
    "unknown flag": (["--foo"], r"unrecognized arguments: --foo; .*key=value.*--help"),
    "abbreviated flag": (["--hel"], r"unrecognized arguments: --hel; "),
    "multirun": (["-m", "lr=1,2"], r"-m asks for several runs, and this is one; python sweep.py lr=1,2 runs them"),
    "multirun in full": (["--multirun"], r"asks for several runs"),
    "cfg of another kind": (["--cfg", "hydra"], r"invalid choice: 'hydra'.*job"),
    "cfg of nothing": (["--cfg"], r"--cfg.* expected one argument"),
    "no equals": (["lr"], r"'lr' is no override; write key=value, and see --help"),
    "no key": (["=3"], r"'=3' is no override; write key=value"),
    "spaces in a key": (["learning rate=3"], r"'learning rate=3' is no override; write key=value"),
    "unknown key": (["bogus=1"], r"unknown key 'bogus'; --help lists the keys"),
    "unknown key with plus": (["+bogus=1"], r"unknown key 'bogus'; --help"),
    "unknown key with pluses": (["++bogus=1"], r"unknown key 'bogus'; --help"),
    "misspelt key": (["epoch=1"], r"unknown key 'epoch'; did you mean epochs"),
    "misspelt nested key": (["arch.hiden_size=3"], r"unknown key 'arch.hiden_size'; did you mean arch.hidden_size"),
    "unknown nested key": (["arch.loss.foo=1"], r"unknown key 'arch.loss.foo'; "),
    "key of another choice": (
        ["arch=transformer", "arch.H_layers=1"],
        r"unknown key 'arch.H_layers': the defaults have it, but not the chosen options; leave it out",
    ),
    "key of other choices": (
        ["parallel=tp", "parallel.shard=2"],
        r"unknown key 'parallel.shard': the chosen parallel doesn't have it; take parallel=fsdp_tp or parallel=hsdp or "
        r"parallel=pipeline, or leave the key out",
    ),
    "key without its group": (["hidden_size=64"], r"unknown key 'hidden_size'; did you mean arch.hidden_size"),
    "unknown choice": (["arch=nope"], r"'arch/nope'; choose one of gpt, .*hrm, "),
    "unknown experiment": (["experiment=nope"], r"'experiment/nope'; choose one of arc_1, arc_12x12, "),
    "empty choice": (["experiment="], r"'experiment/'; choose one of arc_1"),
    "number for a choice": (["experiment=3"], r"'experiment=3' names no config of the group experiment; choose one of"),
    "null for a choice": (["arch=null"], r"'arch=null' names no config of the group arch; choose one of gpt, "),
    "unknown group": (["nogroup=x"], r"unknown key 'nogroup'"),
    "unknown group with slash": (["arch/loss=foo"], r"unknown key 'arch/loss'"),
    "group at a package": (["arch@foo=hrm"], r"unknown key 'arch@foo'"),
    "deleted key": (["~lr"], r"lr is not set; give lr=\.\.\."),
    "deleted key with value": (["~lr=1e-4"], r"lr is not set; give lr=\.\.\."),
    "deleted group": (["~arch"], r"arch is not set; give arch=\.\.\."),
    "deleted unknown key": (["~foo"], r"unknown key 'foo'; --help"),
    "missing value": (["max_steps=???"], r"max_steps is not set; give max_steps=\.\.\."),
    "Hydra's own": (["hydra.run.dir=x"], r"'hydra.run.dir=x' is a setting of Hydra's own.*; --help"),
    "Hydra's own group": (["hydra/launcher=basic"], r"'hydra/launcher=basic' is a setting of Hydra's own"),
    "sweep": (["lr=1,2", "arch=trm"], r"'lr=1,2' asks for several runs.*; python sweep.py lr=1,2 arch=trm runs them"),
    "decimal comma": (["lr=0,001"], r"'lr=0,001' asks for several runs.*; for a decimal number write lr=0.001$"),
    "sweep from a file": (["sweep=lr_arch", "lr=1"], r"; python sweep.py sweep=lr_arch lr=1 runs them"),
    "key of a sweep": (["sweep.trials=3"], r"'sweep.trials=3' asks for several runs"),
    "sweep function": (["lr=range(1,3)"], r"'lr=range\(1,3\)' asks for several runs"),
    "sweep of a group": (["debug=tiny,profile"], r"'debug=tiny,profile' asks for several runs"),
    "unclosed list": (["wandb.tags=[a,b"], r"'wandb.tags=\[a,b' can't be read.*\"wandb.tags='\[a,b'\""),
    "unclosed interpolation": (["lr=${lr"], r"'lr=\$\{lr' can't be read"),
    "second equals": (["wandb.mode=a=b"], r"can't be read.*quotes of its own: \"wandb.mode='a=b'\""),
    "interpolation of nothing": (["lr=${nokey}"], r"lr: .*'nokey' not found; "),
    "interpolation of nothing, nested": (
        ["arch.puzzle_emb_ndim=${.nope}"],
        r"arch.puzzle_emb_ndim: .*'nope' not found",
    ),
    "interpolation of itself": (["lr=${lr}"], r"lr: .*[Rr]ecursive"),
    "unknown resolver": (["lr=${foo:1}"], r"lr: Unsupported interpolation type foo"),
    "interpolation of another type": (["lr=${data_path}"], r"lr: .*number.*'data/arc-aug-1000'"),
    "text for a number": (["lr=abc"], r"lr: .*number.*'abc'"),
    "nothing for a number": (["lr="], r"lr: .*number.*''"),
    "a string that looks like a number": (['lr="1e-4"'], r"lr: .*number.*'1e-4'"),
    "bool for an int": (["epochs=true"], r"epochs: .*integer.*True"),
    "bool for a float": (["lr=true"], r"lr: .*number.*True"),
    "int for a bool": (["compile=1"], r"compile: .*boolean.*1"),
    "text for a bool": (["arch.mlp_t=maybe"], r"arch.mlp_t: .*boolean.*'maybe'"),
    "float for an int": (["epochs=1.5"], r"epochs: .*integer.*1.5"),
    "whole float for an int": (["epochs=3.0"], r"epochs: .*integer.*3.0"),
    "null for an int": (["epochs=null"], r"epochs: .*integer.*None"),
    "not a number": (["lr=nan"], r"lr: .*finite.*nan"),
    "infinite": (["lr=1e999"], r"lr: .*finite.*inf"),
    "negative rate": (["lr=-1e-4"], r"lr: .*greater than or equal to 0.*-0.0001"),
    "zero epochs": (["epochs=0"], r"epochs: .*greater than 0.*0"),
    "beta of one": (["beta1=1"], r"beta1: .*less than 1.*1"),
    "literal": (["device=gpu"], r"device: .*'auto', 'cuda', 'mps' or 'cpu'.*'gpu'"),
    "literal in a list": (["eval_save_outputs=[logits,foo]"], r"eval_save_outputs.1: .*'logits'.*'foo'"),
    "text for a list": (["eval_save_outputs=logits"], r"eval_save_outputs: .*list.*'logits'"),
    "map for a list": (["wandb.tags={a: 1}"], r"wandb.tags=\{a: 1\}"),
    "number for a map": (["wandb=3"], r"wandb: .*dictionary.*3"),
    "null for a map": (["wandb=null"], r"wandb: .*dictionary.*None"),
    "arch without a model": (["arch.name=mamba"], r"arch.name: .*'hrm', 'trm', .*'mamba'"),
    "name of another choice": (["arch.name=trm"], r"arch.name=trm does not choose .*; write arch=trm, or in YAML"),
    "name of another choice than that of a file below": (
        ["arch=trm_conv", "arch.name=urm"],
        r"those of trm_conv would stay; write arch=urm",
    ),
    "name of another optimizer": (["optim.name=adamw"], r"optim.name=adamw does not choose .*; write optim=adamw"),
    "a path for a list of paths": (["data_paths=data/a"], r"data_paths: .*list.*; write data_paths=\[data/a\]"),
    "best metric": (["evaluators=[]", "best_metric=foo"], r"best_metric is 'foo'; .*eval/all/exact_accuracy"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_line_with_the_value_and_the_correction(case: str) -> None:
    typed, expected = MISTAKES[case]
    assert re.search(expected, _mistake(*typed))


def test_several_mistakes_are_reported_together() -> None:
    message = _mistake("epochs=true", "lr=x", "arch.halt_max_steps=0", "seed=-1", "wandb.mode=maybe")
    for key in ("epochs", "lr", "halt_max_steps", "seed", "wandb.mode"):
        assert re.search(rf"\b{key}\b", message)
    assert message.count(";") >= 4


def test_a_mistake_for_another_program_names_the_keys_of_that_program() -> None:
    """An unknown key is reported first, even if a required key is missing."""
    with pytest.raises(ValueError, match=r"^unknown key 'batchsize'; did you mean batch_size\?$"):
        read_config("evaluate", ["batchsize=3"])
    with pytest.raises(ValueError, match=r"^checkpoint is not set; give checkpoint=\.\.\.$"):
        read_config("evaluate", [])


@given(
    text=st.text(min_size=0, max_size=30), key=st.sampled_from(["", "lr=", "run_name=", "arch=", "~", "wandb.tags="])
)
@settings(max_examples=80, deadline=None)
def test_any_text_is_accepted_or_refused_in_one_line(text: str, key: str) -> None:
    try:
        read_config("pretrain", [key + text])
    except ValueError as error:
        assert len(" ".join(str(error).split()).splitlines()) == 1


# ---- what is fine ------------------------------------------------------------------------------


@pytest.mark.parametrize("text, value", [("1e-4", 1e-4), ("0", 0.0), ("3", 3.0), ("1E-3", 1e-3), (".5", 0.5)])
def test_common_spellings_of_numbers_are_accepted(text: str, value: float) -> None:
    config = _read(f"lr={text}")
    assert config.lr == value and isinstance(config.lr, float)


def test_values_of_other_types_are_accepted() -> None:
    assert _read("run_name=42").run_name == "42"
    assert _read("run_name='a=b, c'").run_name == "a=b, c"
    assert _read("data_path=/with/space here").data_path == "/with/space here"
    assert _read("best_metric=null").best_metric is None
    assert _read("eval_interval=null").eval_interval is None
    assert _read("wandb.tags=[a,b]").wandb.tags == ["a", "b"]
    assert _read("lr=1", "lr=2").lr == 2.0
    assert _read("arch={hidden_size: 64}").arch.hidden_size == 64
    assert _read("experiment=[sudoku_hard_full,lights_out]").project_name == "lights-out"
    assert _read("max_steps=${epochs}").max_steps == 100000


def test_reading_leaves_no_trace_of_hydra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is written, and a second reading does not see the values of the first."""
    monkeypatch.chdir(tmp_path)
    _read("lr=3")
    assert _read().lr == 1e-4
    assert list(tmp_path.iterdir()) == []


# ---- a key that was a switch -------------------------------------------------------------------

DEFAULTS = {"steps": [4, 6], "ranks": [0], "shapes": False, "stacks": False}


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("", {"enabled": False}),
        ("profile=true", {"enabled": True}),
        ("--profile=True", {"enabled": True}),
        ("+profile=false", {"enabled": False}),
        ("profile.enabled=true", {"enabled": True}),
        ("profile=true profile.steps=[2,3]", {"enabled": True, "steps": [2, 3]}),
        ("profile.ranks=null profile=true", {"enabled": True, "ranks": None}),
        ("profile={enabled:true,shapes:true}", {"enabled": True, "shapes": True}),
        ("debug=profile profile.stacks=true", {"enabled": True, "stacks": True}),
        ("debug=profile profile=false", {"enabled": False}),
    ],
)
def test_a_switch_with_options_is_still_a_switch(typed: str, expected: dict[str, object]) -> None:
    overrides = CommandLine.parse(typed.split(), "pretrain", USAGE).overrides
    assert validate(PretrainConfig, read_config("pretrain", overrides)).profile.model_dump() == DEFAULTS | expected


@pytest.mark.parametrize("in_file", [True, False])
def test_a_file_may_have_the_switch_alone(tmp_path: Path, in_file: bool) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"# @package _global_\nprofile: {str(in_file).lower()}\n")
    typed = [f"experiment={file}"]
    assert read_config("pretrain", typed)["profile"] == DEFAULTS | {"enabled": in_file}
    for other in (True, False):
        assert read_config("pretrain", [*typed, f"profile={other}"])["profile"] == DEFAULTS | {"enabled": other}


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("profile=yes", "profile: 'yes' is neither true nor false; give one of them, or profile.steps and the like"),
        ("profile=null", "profile: None is neither true nor false; give one of them"),
        ("profile.steps=3", "profile.steps: input should be a valid list, but it is 3"),
        ("profile.steps=[6,4]", r"profile.steps: \[6, 4\] is no range of steps; give the first and the last"),
        ("profile.ranks=[]", r"profile.ranks: \[\] names no rank; give some, such as \[0\], or null for all"),
        ("profile.step=[1,2]", "unknown key 'profile.step'; did you mean profile.steps"),
    ],
)
def test_options_of_a_switch_that_are_wrong(typed: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(PretrainConfig, read_config("pretrain", [typed]))


def test_a_typed_switch_changes_no_option_of_a_resumed_run() -> None:
    assert typed_changes("pretrain", ["profile=true"]) == {"profile.enabled": True}
    assert typed_changes("pretrain", ["+profile=False", "profile.ranks=null"]) == {
        "profile.enabled": False,
        "profile.ranks": None,
    }


# ---- resuming ----------------------------------------------------------------------------------


def test_the_changes_are_the_typed_values() -> None:
    assert typed_changes("pretrain", []) == {}
    assert typed_changes("pretrain", ["lr=3e-4", "arch.L_cycles=4"]) == {"lr": 3e-4, "arch.L_cycles": 4}


def test_a_typed_default_is_a_change() -> None:
    """The stored run may have another value."""
    assert typed_changes("pretrain", ["lr=1e-4"]) == {"lr": 1e-4}
    assert typed_changes("pretrain", ["+lr=1e-4", "max_steps=null"]) == {"lr": 1e-4, "max_steps": None}
    assert typed_changes("pretrain", ["wandb.tags=[]"]) == {"wandb.tags": []}


def test_changes_of_a_typed_group() -> None:
    changes = typed_changes("pretrain", ["debug=profile"])
    assert changes["profile.enabled"] is True and changes["wandb.mode"] == "disabled" and changes["max_steps"] == 8
    assert "lr" not in changes and "data_path" not in changes


def test_values_from_interpolation_are_not_changes() -> None:
    """Otherwise a typed hidden_size would give a run with puzzle_emb_ndim=0 a puzzle table."""
    assert typed_changes("pretrain", ["arch.hidden_size=64"]) == {"arch.hidden_size": 64}
    assert typed_changes("pretrain", ["+arch.loss={loss_type: softmax_cross_entropy}"]) == {
        "arch.loss.loss_type": "softmax_cross_entropy"
    }
    by_group = typed_changes("pretrain", ["debug=tiny", "lr=1e-4"])
    assert (by_group["arch.puzzle_emb_ndim"], by_group["max_steps"], by_group["lr"]) == (32, 20, 1e-4)


@pytest.mark.parametrize(
    "typed",
    [
        [],
        ["debug=tiny", "arch.hidden_size=64"],
        ["experiment=demo", "arch.hidden_size=32", "lr=1e-5"],
        ["experiment=sudoku_hard_full", "debug=overfit", "+seed=3"],
    ],
)
def test_the_same_command_makes_no_change(typed: list[str]) -> None:
    """A restart by torchrun repeats the command line of the first attempt."""
    config = read_config("pretrain", typed)
    assert differences(config, with_changes(config, typed_changes("pretrain", typed))) == []


def test_changes_reach_nested_keys_and_leave_the_original() -> None:
    stored: dict[str, Any] = {"lr": 1.0, "arch": {"a": 1, "loss": {"b": "x"}}, "tags": ["old", "older"], "n": None}
    changed = with_changes(stored, {"arch.loss.b": "y", "tags": ["new"], "n": 3, "wandb.mode": "offline"})
    assert changed == {
        "lr": 1.0,
        "arch": {"a": 1, "loss": {"b": "y"}},
        "tags": ["new"],
        "n": 3,
        "wandb": {"mode": "offline"},
    }
    assert stored["arch"]["loss"]["b"] == "x" and stored["tags"] == ["old", "older"]
    assert with_changes(stored, {}) == stored


def test_stored_text_is_not_interpolated() -> None:
    assert with_changes({"run_name": "${lr}", "lr": 1}, {"lr": 2}) == {"run_name": "${lr}", "lr": 2}


def test_differences_name_every_leaf() -> None:
    old = {"lr": 1e-4, "arch": {"a": 1, "b": 2}, "gone": 1, "tags": []}
    new = {"lr": 2e-4, "arch": {"a": 1, "b": 3}, "tags": ["x"], "added": None}
    assert differences(old, new) == [
        "lr: 0.0001 -> 0.0002",
        "arch.b: 2 -> 3",
        "tags: [] -> ['x']",
        "gone: 1 -> None",
    ]
    assert differences(new, new) == []


def test_a_config_with_changes_is_validated() -> None:
    stored = _read("experiment=sudoku_extreme_1k", "run_name=x").model_dump()
    changes = typed_changes("pretrain", ["lr=3e-4", "wandb.mode=offline", "resume=auto"])
    config = validate(PretrainConfig, with_changes(stored, changes))
    assert (config.lr, config.epochs, config.run_name) == (3e-4, 20000, "x")
    assert differences(stored, config.model_dump()) == [
        "resume: None -> auto",
        "lr: 0.0001 -> 0.0003",
        "wandb.mode: auto -> offline",
    ]
