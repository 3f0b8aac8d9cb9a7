"""YAML files: how they build on one another, and the file and line of each mistake."""

from pathlib import Path

import pytest

import evaluate
import search.sweep  # noqa: F401 registers its page
from launch.ray_config import RayPage
from pretrain import USAGE
from training.config import PretrainConfig
from training.solver import SolveConfig
from utils.command_line import CommandLine, read_config, validate
from utils.composing import compose
from utils.config import PAGES, keys_of
from utils.config_files import default_groups
from utils.errors import UserError
from utils.mistakes import OTHER_NAMES

GLOBAL = "# @package _global_\n"
EXPERIMENT = GLOBAL + "defaults:\n  - override /arch: small\n\nlr: 3e-4\n"
ARCH = "defaults:\n  - trm\n  - _self_\n\nhidden_size: 64\nnum_heads: 2\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder like config/, with an experiment that chooses an architecture beside it."""
    root = tmp_path / "my configs, 'new' ${x} \\"
    for group, name, text in (("experiment", "mine", EXPERIMENT), ("arch", "small", ARCH)):
        (root / group).mkdir(parents=True)
        (root / group / f"{name}.yaml").write_text(text)
    return root


def _read(*typed: str) -> PretrainConfig:
    overrides = CommandLine.parse(list(typed), "pretrain", USAGE).overrides
    return validate(PretrainConfig, read_config("pretrain", overrides), lambda: compose("pretrain", overrides))


def _mistake(*typed: str) -> str:
    with pytest.raises(UserError) as caught:
        _read(*typed)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- how files build on one another ------------------------------------------------------------


def test_an_experiment_by_its_path_refers_to_files_beside_it(folder: Path) -> None:
    config = _read(f"experiment={folder}/experiment/mine.yaml")
    assert (config.lr, config.arch.name, config.arch.hidden_size) == (3e-4, "trm", 64)
    config = _read(f"experiment={folder}/experiment/mine.yaml", "lr=1e-2", "arch.hidden_size=32")
    assert (config.lr, config.arch.hidden_size) == (1e-2, 32), "what is typed comes last"
    assert _read(f"experiment={folder}/experiment/mine.yaml", "arch=hrm").arch.name == "hrm", "also a choice"


def test_a_folder_of_configs(folder: Path, tmp_path: Path) -> None:
    by_path = _read(f"experiment={folder}/experiment/mine.yaml")
    assert _read("--config-dir", str(folder), "experiment=mine") == by_path
    assert _read("experiment=mine", f"--config-dir={folder}") == by_path
    own, known = _read(f"--config-dir={folder}", "arch=small", "experiment=demo"), _read("experiment=demo")
    assert own.arch.hidden_size == 64 and own.lr == known.lr
    swept = CommandLine.parse([f"--config-dir={folder}", "arch=small,trm"], "sweep", USAGE).overrides
    assert swept == [f"arch={folder}/arch/small.yaml,trm"]
    for useless in (str(folder), str(tmp_path / "none")):
        assert f"--config-dir {useless} holds none" in _mistake("--config-dir", useless, "experiment=demo")


def test_files_of_one_name_are_told_apart_and_read_anew(folder: Path, tmp_path: Path) -> None:
    """Whatever the order of the words, the file that was typed is taken."""
    (tmp_path / "small.yaml").write_text(ARCH.replace("64", "128"))
    (tmp_path / "demo.yaml").write_text("# @package _global_\nlr: 0.25\n")
    typed = [f"experiment={folder}/experiment/mine.yaml", f"arch={tmp_path}/small.yaml"]
    for words in (typed, typed[::-1]):
        assert _read(*words).arch.hidden_size == 128, words
    assert _read(f"experiment={tmp_path}/demo.yaml").lr == 0.25, "the name of a file of config/ is free"
    (tmp_path / "demo.yaml").write_text("lr: 0.5\n")
    assert _read(f"experiment={tmp_path}/demo.yaml").lr == 0.5, "it was changed, and needs no first line"


def test_an_experiment_on_another_one(tmp_path: Path) -> None:
    """Its own keys come last, or where _self_ stands. Its own choices come first."""
    (tmp_path / "mine.yaml").write_text(GLOBAL + "defaults:\n  - demo\n  - override /optim: adamw\nlr: 7\nseed: 3\n")
    config, demo = _read(f"experiment={tmp_path}/mine.yaml"), _read("experiment=demo")
    assert (config.lr, config.seed, config.optim.name, config.arch) == (7, 3, "adamw", demo.arch)
    (tmp_path / "mine.yaml").write_text(GLOBAL + "defaults: [_self_, demo]\nlr: 7\nseed: 3\n")
    config = _read(f"experiment={tmp_path}/mine.yaml")
    assert (config.lr, config.seed, config.optim) == (demo.lr, 3, demo.optim)
    both = _read("experiment=[demo,trm_maze_hard]")
    assert (both.arch.name, both.optim.name, both.project_name) == ("trm", "muon", "demo")


def test_where_a_value_comes_from(folder: Path) -> None:
    composed = compose("pretrain", [f"experiment={folder / 'experiment' / 'mine.yaml'}", "seed=3"])
    places = {key: composed.place_of(key) for key in ("lr", "arch.hidden_size", "arch.name", "seed")}
    assert {key: place.rpartition("/")[2] for key, place in places.items()} == {
        "lr": "mine.yaml:5: ",
        "arch.hidden_size": "small.yaml:5: ",
        "arch.name": "trm.yaml:6: ",
        "seed": "",
    }
    assert composed.chosen == {"experiment", "arch"} and "arch.puzzle_emb_ndim" in composed.derived


# ---- mistakes ----------------------------------------------------------------------------------

# The group, the text of the file, and the message after the name of the file.
MISTAKES = {
    "misspelt": ("experiment", GLOBAL + "# why\nlrr: 3\n", ":3: unknown key 'lrr'; did you mean lr?"),
    "nested": ("experiment", GLOBAL + "arch:\n  loss:\n    los_type: x\n", ":4: unknown key 'arch.loss.los_type'; did"),
    "dotted": ("experiment", GLOBAL + "arch.hidden_size: 64\n", ":2: unknown key 'arch.hidden_size'; write hid"),
    "package of another": ("arch", GLOBAL + "name: trm\nhiden_size: 64\n", ":3: unknown key 'arch.hiden_size'"),
    "twice": ("experiment", GLOBAL + "lr: 1\nlr: 2\n", ":3: can't be read as YAML (found duplicate key lr)"),
    "no keys": ("experiment", GLOBAL + "lr=1e-3\n", ":2: the file holds no keys"),
    "bytes": ("experiment", GLOBAL + "lr: \udcff\n", " can't be read as YAML ('utf-8' codec"),
    "value": ("experiment", GLOBAL + "lr: fast\n", ":2: lr: input should be a valid number, but it is 'fast'"),
    "element": ("experiment", GLOBAL + "evaluators:\n  - sudko\n", ":2: evaluators.0: input should be"),
    "derived": ("experiment", GLOBAL + "arch: {hidden_size: big}\n", ":2: arch.hidden_size: input"),
    "group as a key": ("experiment", GLOBAL + "arch: trm\n", "below defaults: write - override /arch: trm"),
    "unknown choice": ("experiment", GLOBAL + "defaults: [override /arch: tmr]\n", ":2: there is no config 'arch/tmr'"),
    "choice of what was read": ("arch", "defaults: [trm, override /optim: muon]\n", ":1: "),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_a_file_names_the_line_and_what_to_write(case: str, tmp_path: Path) -> None:
    group, text, expected = MISTAKES[case]
    file = tmp_path / "mine.yaml"
    file.write_text(text, encoding="utf-8", errors="surrogateescape")
    message = _mistake(f"{group}={file}")
    assert expected in message and f"{file}" in message, message
    if case == "derived":
        assert "puzzle_emb_ndim" not in message, "it is ${.hidden_size}, and no mistake of its own"


def test_a_file_whose_defaults_name_itself_is_one_line(folder: Path) -> None:
    file = folder / "arch" / "small.yaml"
    file.write_text("defaults: [small]\n")
    assert f"{file}:1: small refers to itself" in _mistake(f"arch={file}")


def test_keys_that_are_not_set_do_not_bury_the_misspelt_one(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: trm\nhiden_size: 64\n")
    message = _mistake(f"arch={tmp_path}/mine.yaml")
    assert message.startswith(f"{tmp_path}/mine.yaml:2: unknown key 'arch.hiden_size'; did you mean arch.hidden_size?")
    assert message.endswith(" keys are missing in all)") and message.count("arch.") < 9
    (tmp_path / "mine.yaml").write_text("hidden_size: 3\n")
    assert "arch.name is not set" in _mistake(f"arch={tmp_path}/mine.yaml")


def test_names_of_other_programs_are_of_keys_that_exist() -> None:
    """A name that is itself a key of the same program would never be looked up."""
    assert {evaluate.EvaluateConfig, SolveConfig, RayPage} <= {each.config_class for each in PAGES.values()}
    known = {key for name in PAGES for key in (*keys_of(PAGES[name].config_class), *dict(default_groups(name)))}
    assert OTHER_NAMES.keys() <= known
