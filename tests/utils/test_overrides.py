"""Text stays as it was typed, on a command line, in YAML, in a sweep and in what a run stores."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from records.history import read_run_config
from records.lock import RunLock
from search.sweep import Sweep, differing
from training.resume import prepare, read_start
from utils.command_line import CommandLine, read_config
from utils.overrides import as_override
from utils.ranks.launch import Launch

NUMBERS = st.from_regex(r"[-+]?[0-9][0-9_.:eEx]{0,9}", fullmatch=True)
WORDS = st.sampled_from(["on", "No", "True", "Null", "nan", ".inf", "0x1f", "0o17", "0012", "1_000", "a=b"])
DATES = st.dates().map(str) | st.datetimes().map(str)
# Without what separates values (, [] {} ()), paths, and what Hydra and OmegaConf expand (\ $ ~).
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["C"], exclude_characters=",[]{}()/\\$~"), max_size=20)
NAMES = (NUMBERS | WORDS | DATES | TEXTS).filter(
    lambda name: name not in ("", ".", "..", "???", "=", "<<") and name.strip() == name and name[0] not in "'\""
)


def _start(typed: list[str]) -> dict[str, Any]:
    """Begin a run and write its folder, as rank 0 does, and return the config."""
    overrides = CommandLine.parse([*typed, "wandb.mode=disabled"], "pretrain", "").overrides
    with RunLock() as lock:
        start = read_start(overrides, lock, Launch())
        prepare(start, lock, Launch())
    return start.config.model_dump()


@settings(max_examples=12)
@given(name=NAMES)
@example(name="1.10")
@example(name="2026_11_27")
@example(name="1e3")
@example(name="it's")
def test_a_typed_name_is_that_of_the_folder_of_the_stored_config_and_of_the_resumed_run(
    name: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    assume(name.lower() != "null")  # which is no name where a key may be null
    folder = tmp_path_factory.mktemp("names")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        of_run = [f"data_path={name}", f"project_name={name}", f"run_name={name}", f"wandb.group={name}"]
        before = _start([*of_run, f"wandb.tags=[{name}]"])
        again = _start(["resume=auto", f"checkpoint_path=checkpoints/{name}/{name}"])
    path = folder / "checkpoints" / name / name
    assert path.is_dir(), f"{name!r} began in {[*folder.rglob('*')]}"
    by_omegaconf: Any = OmegaConf.to_container(OmegaConf.load(path / "config.yaml"))
    stored = [before, again, read_run_config(path), by_omegaconf]
    for config in stored:
        assert [config[key] for key in ("data_path", "project_name", "run_name")] == [name] * 3
        assert config["wandb"]["group"] == name and config["wandb"]["tags"] == [name]


@settings(max_examples=15)
@given(name=NAMES)
@example(name="1_0")
@example(name="null")
def test_yaml_and_a_sweep_keep_the_characters_of_a_name(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    assume(_is_plain(name, f"key: {name}\nlast: 1\n"))  # else the name needs quotes in any YAML
    file = tmp_path_factory.mktemp("yaml") / "names.yaml"
    file.write_text(
        f"# @package _global_\ndata_path: {name}\nrun_name: x_${{data_path}}\nwandb:\n  tags: [a, '1']\n"
        f"data_paths:\n- {name}\n- other\n",
        encoding="utf-8",
    )
    values = read_config("pretrain", [f"experiment={file}"])
    assert (values["data_path"], values["run_name"]) == (name, f"x_{name}")
    assert values["data_paths"] == [name, "other"] and values["wandb"]["tags"] == ["a", "1"]

    swept = file.with_name("sweep.yaml")
    swept.write_text(
        f"parameters:\n  data_path: [b, {name}]\n  lr:\n  - {{values: [1e-3], when: {{data_path: [{name}]}}}}\n",
        encoding="utf-8",
    )
    assume(_is_plain(name, f"key: [{name}]"))
    parameters = Sweep.read([f"sweep={swept}"]).config.parameters
    assert parameters["data_path"][0].values == ["b", name]
    assert parameters["lr"][0].values == [1e-3] and parameters["lr"][0].when == {"data_path": [name]}


def _is_plain(name: str, text: str) -> bool:
    """Return whether YAML reads the name from the text as it stands there."""
    try:
        events = [*yaml.parse(text, Loader=yaml.SafeLoader)]
    except yaml.YAMLError:
        return False
    return name in (event.value for event in events if isinstance(event, yaml.ScalarEvent))


def test_the_runs_of_a_sweep_get_what_was_typed() -> None:
    for typed, values in (
        ("1.1,1.10,on", ["1.1", "1.10", "on"]),
        ("it's,1.10", ["it's", "1.10"]),
        ("a=b,c#d,e f", ["a=b", "c#d", "e f"]),
        (r"a\,b,c", ["a,b", "c"]),
        ("'a,b',c", ["a,b", "c"]),
        ("choice(1.10,b)", ["1.10", "b"]),
    ):
        words = [f"data_path={typed}", "lr=1e-3,2e-3", "wandb.group=1_0"]
        sweep = Sweep.read(CommandLine.parse(words, "sweep", "").overrides)
        assert sweep.config.parameters["data_path"][0].values == values
        for _, point in sweep.space.grid():
            config = read_config("pretrain", sweep.arguments(0, point, seed=0))
            assert config["data_path"] == point["data_path"] and config["wandb"]["group"] == "1_0"
            assert config["lr"] == point["lr"]


def test_a_sweep_of_an_earlier_version_stored_no_quotes() -> None:
    typed = CommandLine.parse(["data_path=/data/sudoku", "lr=1e-3,2e-3"], "sweep", "").overrides
    identity = Sweep.read(typed).identity
    assert differing(identity, identity | {"overrides": ["data_path=/data/sudoku"]}) == []
    assert differing(identity, identity | {"overrides": ["data_path=/data/maze"]}) == ["overrides"]


def test_quotes_null_lists_and_interpolations_keep_their_meaning() -> None:
    typed = ["data_path=null", "run_name=null", "project_name='1.10'", "checkpoint_path=x_${seed}"]
    values = read_config(
        "pretrain", [*typed, "init_from=${seed}", r"wandb.tags=[ 1.10, 'a, b', c\,d, e (1)]", r"resume=a\,b"]
    )
    assert values["data_path"] == "null" and values["run_name"] is None and values["project_name"] == "1.10"
    assert (values["checkpoint_path"], values["init_from"], values["resume"]) == ("x_0", "0", "a,b")
    assert values["wandb"]["tags"] == ["1.10", "a, b", "c,d", "e (1)"]


def test_a_stored_config_that_was_edited_keeps_its_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _start(["data_path=a", "checkpoint_path=run"])
    file = tmp_path / "run/config.yaml"
    file.write_text(file.read_text().replace("data_path: a", "data_path: 1.10").replace("lr: 0.0001", "lr: 1e-3"))
    again = _start(["resume=auto", "checkpoint_path=run"])
    assert (again["data_path"], again["lr"]) == ("1.10", 1e-3)
    assert not os.path.exists(tmp_path / "checkpoints")


# ---- values as they are typed ------------------------------------------------------------------


def test_a_value_that_is_typed_as_an_override_is_read_as_that_value() -> None:
    for text in ("my runs/a, b", "it's \\", "1e-4", "true", "null", "", "a=b", "(a)", "@~%ü", "{a", "[1"):
        assert read_config("pretrain", [f"run_name={as_override(text)}", "data_path=x"])["run_name"] == text
    for value in (None, True, 3, 0.5, ["a b", "1", 2], [{"until": 0.3, "name": "a, b"}]):
        config = read_config("pretrain", [f"arch.depth_curriculum={as_override(value)}"])
        assert config["arch"]["depth_curriculum"] == value
