"""A mistake in a YAML file is one line with the file, the line number and what to write."""

from pathlib import Path

import pytest

from search.sweep import Sweep
from training.config import PretrainConfig
from training.trained import read_config_of_new_run
from utils import synonyms
from utils.command_line import read_config, validate
from utils.config_files import CONFIG_DIR
from utils.errors import UserError
from utils.mistakes import Origin
from utils.yaml_places import name_of_choice

GLOBAL = "# @package _global_\n"


def _mistake(*overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        validate(PretrainConfig, read_config("pretrain", list(overrides)), Origin("pretrain", overrides))
    assert "\n" not in str(caught.value)
    return str(caught.value)


# The group, the text of the file, and the message after the name of the file.
MISTAKES = {
    "no package": ("experiment", "lr: 3\n", ":1: the first line has to be '# @package _global_', as in config/exp"),
    "no package of debug": (
        "debug",
        "lr: 3\n",
        ":1: the first line has to be '# @package _global_'",
    ),
    "misspelt": ("experiment", GLOBAL + "# why\nlrr: 3\n", ":3: unknown key 'lrr'; did you mean lr?"),
    "misspelt in debug": ("debug", GLOBAL + "max_step: 3\n", ":2: unknown key 'max_step'; did you mean max_steps?"),
    "nested": (
        "experiment",
        GLOBAL + "arch:\n  loss:\n    los_type: x\n",
        ":4: unknown key 'arch.loss.los_type'; did you mean loss_type?",
    ),
    "in a group": (
        "arch",
        "defaults: [trm]\nhiden_size: 64\n",
        ":2: unknown key 'arch.hiden_size'; did you mean",
    ),
    "in an optimizer": (
        "optim",
        "defaults: [muon]\nmuonlr: 3\n",
        "unknown key 'optim.muonlr'; did you mean muon_lr?",
    ),
    "another program's": (
        "experiment",
        GLOBAL + "ema_decay: 0.9\n",
        "unknown key 'ema_decay'; did you mean ema_rate?",
    ),
    "too high": (
        "experiment",
        GLOBAL + "hidden_size: 64\n",
        ":2: unknown key 'hidden_size'; did you mean arch.hidden_size? Write hidden_size: indented below a line arch:",
    ),
    "too deep": (
        "experiment",
        GLOBAL + "arch:\n  lr: 3e-4\n",
        ":3: unknown key 'arch.lr'; did you mean lr? Write lr: without indentation",
    ),
    "dotted": (
        "experiment",
        GLOBAL + "arch.hidden_size: 64\n",
        ":2: unknown key 'arch.hidden_size'; write hidden_size: indented below a line arch:",
    ),
    "dotted beside the key": (
        "experiment",
        GLOBAL + "arch:\n  hidden_size: 32\narch.hidden_size: 64\n",
        ":4: unknown key 'arch.hidden_size'; write hidden_size: indented below a line arch:",
    ),
    "dotted below its group": (
        "experiment",
        GLOBAL + "arch:\n  loss.loss_type: x\n",
        ":3: unknown key 'arch.loss.loss_type'; write loss_type: indented below a line loss:",
    ),
    "dotted in its own group": ("arch", "defaults: [trm]\narch.hidden_size: 64\n", "write hidden_size: without arch"),
    "not indented": (
        "experiment",
        GLOBAL + "arch:\nhidden_size: 64\n",
        ":2: arch is empty; indent its keys below it, or leave it out",
    ),
    "its own group": (
        "arch",
        "arch:\n  hidden_size: 64\n",
        ":1: unknown key 'arch.arch'; the keys of this file",
    ),
    "of another choice": (
        "experiment",
        GLOBAL + "optim:\n  muon_lr: 3\n",
        ":3: unknown key 'optim.muon_lr': the chosen optim doesn't have it; take optim=muon",
    ),
    "indented": ("experiment", GLOBAL + "lr: 3\n  epochs: 3\n", ":3: can't be read as YAML (mapping values are not"),
    "indented by one": (
        "experiment",
        GLOBAL + "arch:\n  hidden_size: 64\n num_heads: 2\n",
        ":4: can't be read as YAML (expected <block end>, but found '<block mapping start>'); indent this line as",
    ),
    "tab": (
        "experiment",
        GLOBAL + "arch:\n\tlr: 3\n",
        "any token); replace the tab in this line by blanks",
    ),
    "twice": (
        "experiment",
        GLOBAL + "lr: 1\nlr: 2\n",
        ":3: can't be read as YAML (found duplicate key lr); keep one",
    ),
    "equals sign": ("experiment", GLOBAL + "lr=1e-3\n", ":2: unknown key 'lr=1e-3'; write lr: 1e-3"),
    "no blank": ("experiment", GLOBAL + "lr:1e-3\n", ":2: unknown key 'lr:1e-3'; write lr: 1e-3"),
    "no blank after others": (
        "experiment",
        GLOBAL + "epochs: 3\nlr:1e-3\n",
        ":3: can't be read as YAML (could not find expected ':'); write key: value, with a blank after the colon",
    ),
    "value": ("experiment", GLOBAL + "lr: fast\n", ":2: lr: input should be a valid number, but it is 'fast'"),
    "quotes": ("experiment", GLOBAL + "lr: '1e-3'\n", "but it is '1e-3'; write 1e-3 without quotes"),
    "comma": ("experiment", GLOBAL + "lr: 1e-3,\n", "; write 1e-3"),
    "group as a key": (
        "experiment",
        GLOBAL + "arch: trm\n",
        ":2: arch: trm belongs under defaults:, as the line - override /arch: trm",
    ),
    "group without override": (
        "experiment",
        GLOBAL + "defaults:\n  - arch: trm\n",
        ":3: here a group is chosen as - override /arch: trm",
    ),
    "group without slash": (
        "experiment",
        GLOBAL + "defaults:\n  - override arch: trm\n",
        ":3: here a group is chosen as - override /arch: ...",
    ),
    "element of a list": (
        "experiment",
        GLOBAL + "lr: 3\nevaluators:\n  - sudko\n",
        ":3: evaluators.0: input should be",
    ),
    "package of an architecture": (
        "arch",
        GLOBAL + "defaults: [trm]\nhidden_size: 64\n",
        ":1: the keys of this file belong to arch; remove this line",
    ),
    "name of another choice": (
        "experiment",
        GLOBAL + "arch:\n  name: trm\n",
        ":3: arch.name=trm does not choose the options of trm",
    ),
    "unknown group": (
        "experiment",
        GLOBAL + "defaults:\n  - override /arc: trm\n",
        ":3: unknown key 'arc'; did you",
    ),
    "unknown choice": (
        "experiment",
        GLOBAL + "defaults:\n  - override /arch: tmr\n",
        ":3: there is no config 'arch/tmr'; did you mean trm?",
    ),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_a_file_names_the_line_and_what_to_write(case: str, tmp_path: Path) -> None:
    group, text, expected = MISTAKES[case]
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8")
    message = _mistake(f"{group}={file}")
    assert message.startswith(f"{file}:") and expected in message


def test_a_value_that_is_derived_from_a_wrong_one_is_no_second_mistake(tmp_path: Path) -> None:
    """puzzle_emb_ndim is ${.hidden_size}."""
    (tmp_path / "mine.yaml").write_text(GLOBAL + "arch: {hidden_size: big}\n")
    wrong = "arch.hidden_size: input should be a valid integer, but it is 'big'"
    assert _mistake(f"experiment={tmp_path}/mine.yaml") == f"{tmp_path}/mine.yaml:2: {wrong}"
    assert _mistake("arch.hidden_size=big") == wrong


def test_keys_that_are_not_set_do_not_bury_the_misspelt_one(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: trm\nhiden_size: 64\n")
    message = _mistake(f"arch={tmp_path}/mine.yaml")
    assert message.startswith(f"{tmp_path}/mine.yaml:2: unknown key 'arch.hiden_size'; did you mean hidden_size?")
    assert message.endswith(" more keys are not set; give them") and message.count("arch.") < 6


def test_every_place_in_a_file_has_the_same_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for text in ("lr: 3\n", GLOBAL + "lr: fast\n", GLOBAL + "lr: [\n", GLOBAL + "lr: 1\nlr: 2\n"):
        Path("mine.yaml").write_text(text)
        assert _mistake("experiment=mine.yaml").startswith("mine.yaml:")


def test_files_of_config_are_checked_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "experiment").mkdir()
    for name in ("forgot", "my-other"):
        (tmp_path / "experiment" / f"{name}.yaml").write_text("lr: 3\n")
    for module in ("utils.config_files", "utils.yaml_places"):
        monkeypatch.setattr(f"{module}.CONFIG_DIR", tmp_path)
    for typed, name in (("forgot", "forgot"), ("my-other", "my-other"), ("['my-other']", "my-other")):
        expected = f"{tmp_path}/experiment/{name}.yaml:1: the first line has to be '# @package _global_'"
        with pytest.raises(UserError, match=expected):
            read_config("pretrain", [f"experiment={typed}"])


def test_the_name_of_a_choice_is_found_in_any_form_of_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "arch").mkdir()
    for name, text in {
        "trm": "name: 'trm'  # quoted\n",
        "flow": "defaults: [trm]\n",
        "commented": "defaults:\n- trm  # and more\n- _self_\n",
        "deep": "defaults:\n  - commented\n  - override /optim: muon\n",
        "no_default": "puzzles:\n  - blocks\n",  # a list that names no file
        "broken": "name: [\n",
    }.items():
        (tmp_path / "arch" / f"{name}.yaml").write_text(text)
    monkeypatch.setattr("utils.yaml_places.CONFIG_DIR", tmp_path)
    found = {path.stem for path in (tmp_path / "arch").iterdir() if name_of_choice("arch", path.stem) == "trm"}
    assert found == {"trm", "flow", "commented", "deep"}
    assert name_of_choice("arch", "no_default") is None and name_of_choice("arch", "broken") is None


def test_an_architecture_without_a_name_is_a_mistake(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("hidden_size: 3\n")
    with pytest.raises(UserError, match=r"arch\.name is not set"):
        validate(PretrainConfig, read_config_of_new_run("pretrain", [f"arch={tmp_path}/mine.yaml"]))


def test_a_value_that_is_typed_is_not_sought_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(GLOBAL + "lr: 3\n")
    assert _mistake(f"experiment={tmp_path}/mine.yaml", "lr=fast").startswith("lr: input should be")


def test_a_mistake_behind_the_defaults_of_a_file_is_found(tmp_path: Path) -> None:
    for group, text in (
        ("experiment", GLOBAL + "defaults:\n  - override /arch: small\n"),
        ("arch", "defaults: [trm]\nx: 1\n"),
    ):
        (tmp_path / group).mkdir()
        (tmp_path / group / "small.yaml").write_text(text)
    message = _mistake(f"experiment={tmp_path}/experiment/small.yaml")
    assert message.startswith(f"{tmp_path}/arch/small.yaml:2: unknown key 'arch.x'")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trals: 20\n", ":3: unknown key 'sweep.trals'; did you mean trials?"),
        ("pruner:\n  nme: median\n", ":4: unknown key 'sweep.pruner.nme'; did you mean name?"),
        (
            "max_steps: 3\n",
            ":3: unknown key 'sweep.max_steps'; max_steps is a key of the runs; write it",
        ),
        ("sweep:\n  trials: 3\n", ":3: unknown key 'sweep.sweep'; the keys of this file belong to sweep already"),
        ("paramters: {}\n", ":3: unknown key 'sweep.paramters'; did you mean parameters?"),
        (" trials: 3\n", ":3: can't be read as YAML"),
    ],
)
def test_a_mistake_in_the_file_of_a_sweep(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("parameters:\n  lr: [1e-4, 1e-3]\n" + text)
    with pytest.raises(UserError) as caught:
        Sweep.read([f"sweep={file}"])
    assert str(caught.value).startswith(f"{file}{expected}")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("ema_decay=0.9", "ema_rate"),
        ("learning_rate=1", "lr"),
        ("batch_size=1", "global_batch_size"),
        ("warmup_steps=1", "lr_warmup_steps"),
        ("n_layer=1", "arch.L_layers or arch.H_layers"),
        ("arch.n_embd=1", "arch.hidden_size"),
        ("wd=1", "weight_decay"),
        ("seed_everything=1", "seed"),
        ("trainer.max_epochs=1", "epochs"),
        ("output_dir=x", "checkpoint_path"),
        ("optimizer=muon", "optim"),
        ("model=trm", "arch"),
        ("hidden_size=1", "arch.hidden_size"),
        ("optim.lr=1", "lr"),
        ("muon_lr=1", "optim.muon_lr with optim=muon"),
    ],
)
def test_a_key_of_another_program_or_level_suggests_ours(typed: str, meant: str) -> None:
    assert _mistake(typed) == f"unknown key {typed.split('=')[0]!r}; did you mean {meant}?"


def test_a_key_that_nobody_has_suggests_none() -> None:
    assert _mistake("batch_norm=0.1") == "unknown key 'batch_norm'; --help lists the keys"


def test_synonyms_are_of_keys_that_exist() -> None:
    """A name that is itself a key of the same program would never be looked up."""
    configs = {path.stem: set(Origin(path.stem).known_keys()) for path in CONFIG_DIR.glob("*.yaml")}
    for ours in synonyms.NAMES:
        assert any(ours in keys for keys in configs.values()), f"{ours} is no key"
