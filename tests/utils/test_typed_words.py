"""Slips of the keyboard, flags of other programs and bare paths on the command line of Hydra."""

import shlex
from pathlib import Path

import pytest

from pretrain import USAGE
from utils.command_line import CommandLine, read_config
from utils.errors import UserError


def _overrides(typed: str, config_name: str = "pretrain") -> list[str]:
    return CommandLine.parse(shlex.split(typed), config_name, USAGE).overrides


def _mistake(typed: str, config_name: str = "pretrain") -> str:
    with pytest.raises(UserError) as caught:
        read_config(config_name, _overrides(typed, config_name))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("--lr 1e-4", "--lr 1e-4: overrides are written key=value; write lr=1e-4"),
        ("-lr 1e-4", "-lr 1e-4: overrides are written key=value; write lr=1e-4"),
        ("--arch.hidden_size 64", "write arch.hidden_size=64"),
        ("--compile", "--compile: overrides are written key=value; write compile=..."),
        ("--learning-rate 3", "--learning-rate 3: overrides are written key=value; did you mean lr=3?"),
        ("--config-name trm", "did you mean experiment=trm?"),
        ("--config-path mine", "write --config-dir mine"),
        ("--bogus 3", "unrecognized arguments: --bogus; overrides are written key=value, flags are --help"),
        ("lr = 1e-4", "an override has no blanks around its equals sign; write lr=1e-4"),
        ("lr =1e-4", "write lr=1e-4"),
        ("lr= 1e-4", "write lr=1e-4"),
        ("resume= checkpoints/x", "write resume=checkpoints/x"),
        ("'lr = 1e-4'", "'lr = 1e-4' is no override; write lr=1e-4"),
        ("lr:1e-4", "'lr:1e-4' is no override; write lr=1e-4"),
        ("lr: 1e-4", "'lr:' is no override; write lr=1e-4"),
        ("lr 1e-4", "'lr' is no override; write lr=1e-4"),
        ("demo", "'demo' is no override; write experiment=demo"),
        ("experiment/demo", "'experiment/demo' is no override; write experiment=demo"),
        ("experiment:demo", "'experiment:demo' is no override; write experiment=demo"),
        ("mine/arch/small.yaml", "'mine/arch/small.yaml' is a file of keys; write arch=mine/arch/small.yaml"),
        ("mine.yaml", "'mine.yaml' is a file of keys; write experiment=mine.yaml"),
        ("experiment=demo.yaml", "is not there, or is no regular file; write experiment=demo"),
        ("experiment=demoo", "there is no config 'experiment/demoo'; did you mean demo?"),
        ("arch=TRM", "there is no config 'arch/TRM'; did you mean trm?"),
        (
            "data/a data_path=data/b",
            "data_path='data/a' and data_path=data/b: there is one data_path; give one of them",
        ),
        ("word", "'word' is no override; write key=value, and see --help for the keys"),
    ],
)
def test_a_slip_is_named_with_what_to_write(typed: str, message: str) -> None:
    assert message in _mistake(typed)


@pytest.mark.parametrize(
    ("config_name", "key"),
    [("pretrain", "data_path"), ("evaluate", "checkpoint"), ("solve", "checkpoint")],
)
def test_a_bare_path_stands_for_the_main_key(
    config_name: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a folder").mkdir()
    (tmp_path / "a=b").mkdir()
    for path in ("some/where", str(tmp_path), "a folder", "./a=b"):
        overrides = _overrides(f"device=cpu {shlex.quote(path)}", config_name)
        needed = [] if config_name == "pretrain" else ["checkpoint=_"]
        assert read_config(config_name, [*needed, *overrides])[key] == path
    assert "'word' is no override" in _mistake("word checkpoint=x", "evaluate")


def test_advice_names_only_what_the_program_has() -> None:
    expected = "'model.yaml' is a file of keys, and this program reads none; write checkpoint=... and key=value"
    assert _mistake("model.yaml", "evaluate") == _mistake("model.yaml", "solve") == expected
    assert "unrecognized arguments: --lr" in _mistake("--lr 3", "evaluate")
    assert "write arch=mine/arch/small.yaml" in _mistake("mine/arch/small.yaml", "evaluate")
    for config_name in ("sweep", "ray"):  # they pass the keys of runs on
        assert "write lr=3" in _mistake("--lr 3", config_name)
        assert "write experiment=demo" in _mistake("demo", config_name)
    assert "write experiment=mine.yaml" in _mistake("mine.yaml", "ray")


def test_a_path_that_ends_like_a_choice_is_a_path() -> None:
    assert _overrides("checkpoints/p/trm", "evaluate") == ["checkpoint='checkpoints/p/trm'"]
    assert _overrides("data/demo") == ["data_path='data/demo'"]
    assert "write arch=trm" in _mistake("config/arch/trm")


def test_a_bare_file_is_that_of_a_sweep() -> None:
    assert _overrides("my/file.yaml trials=3", "sweep")[0] == "sweep='my/file.yaml'"
    assert "write sweep=lr_arch" in _mistake("lr_arch", "sweep")


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "my home"
    (home / "cfg").mkdir(parents=True)
    (home / "cfg" / "mine.yaml").write_text("# @package _global_\ndata_paths_test: [~/t]\ncheckpoint_path: ~/c\n")
    monkeypatch.setenv("HOME", str(home))
    config = read_config("pretrain", _overrides("'data_path=~/x' 'experiment=~/cfg/mine.yaml' \"init_from='~/i'\""))
    assert config["data_path"] == f"{home}/x"
    assert config["data_paths_test"] == [f"{home}/t"]
    assert (config["checkpoint_path"], config["init_from"]) == (f"{home}/c", f"{home}/i")
    assert read_config("evaluate", _overrides("'~/run'", "evaluate"))["checkpoint"] == f"{home}/run"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_config("pretrain", _overrides("'data_paths=[~/a,~/b]'"))["data_paths"] == [
        f"{tmp_path}/a",
        f"{tmp_path}/b",
    ]
    assert read_config("pretrain", _overrides("'data_paths=[~/a, ~/b]'"))["data_paths"] == [
        f"{tmp_path}/a",
        f"{tmp_path}/b",
    ]


def test_what_only_looks_like_a_slip_is_read() -> None:
    assert (
        read_config("pretrain", _overrides("\"run_name='\u201cx\u201d \u2013 y'\""))["run_name"]
        == "\u201cx\u201d \u2013 y"
    )
    assert read_config("pretrain", _overrides("+seed=3 'lr= 1e-3' ~debug"))["seed"] == 3
