"""YAML files outside of config/ can be chosen by their path, or with --config-dir."""

from pathlib import Path

import pytest

from pretrain import USAGE
from tests import runs
from training.config import PretrainConfig
from utils.command_line import CommandLine, read_config, validate
from utils.config_files import as_override
from utils.errors import UserError

EXPERIMENT = """# @package _global_
defaults:
  - override /arch: small

lr: 3e-4
"""
ARCH = """defaults:
  - trm
  - _self_

hidden_size: 64
num_heads: 2
"""

# These few lines stand for 10^12 numbers.
BOMB = "# @package _global_\na0: &a0 [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)


@pytest.fixture(params=["configs", "my configs, 'new' ${x} \\"])
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Return a folder like config/, with an experiment that chooses an architecture beside it."""
    root = tmp_path / str(request.param)
    for group, name, text in (("experiment", "mine", EXPERIMENT), ("arch", "small", ARCH)):
        (root / group).mkdir(parents=True)
        (root / group / f"{name}.yaml").write_text(text)
    return root


def _read(*typed: str) -> PretrainConfig:
    command = CommandLine.parse(list(typed), "pretrain", USAGE)
    return validate(PretrainConfig, read_config("pretrain", command.overrides))


def _mistake(*typed: str) -> str:
    with pytest.raises(UserError) as caught:
        _read(*typed)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_experiment_by_its_path_refers_to_files_beside_it(folder: Path) -> None:
    config = _read(f"experiment={folder}/experiment/mine.yaml")
    assert (config.lr, config.arch.name, config.arch.hidden_size) == (3e-4, "trm", 64)
    config = _read(f"experiment={folder}/experiment/mine.yaml", "lr=1e-2", "arch.hidden_size=32")
    assert (config.lr, config.arch.hidden_size) == (1e-2, 32), "what is typed comes last"


def test_a_folder_of_configs(folder: Path) -> None:
    by_path = _read(f"experiment={folder}/experiment/mine.yaml")
    assert _read("--config-dir", str(folder), "experiment=mine") == by_path
    assert _read("experiment=mine", f"--config-dir={folder}") == by_path
    own, known = _read(f"--config-dir={folder}", "arch=small", "experiment=demo"), _read("experiment=demo")
    assert own.arch.hidden_size == 64 and own.lr == known.lr


def test_a_file_may_lie_anywhere_and_is_read_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    Path("loose.yml").write_text(ARCH)
    assert _read("arch=loose.yml").arch.hidden_size == 64
    Path("loose.yml").write_text(ARCH.replace("64", "128"))
    assert _read("arch=loose.yml").arch.hidden_size == 128


def test_the_form_in_which_an_agent_of_wandb_passes_overrides() -> None:
    assert _read("--lr=1e-2", "--arch=trm", "--arch.hidden_size=64") == _read(
        "lr=1e-2", "arch=trm", "arch.hidden_size=64"
    )
    # The values are those that Python prints.
    as_python = _read("--ema=True", "--compile=False", "--grad_clip=None", "--wandb.tags=['a', 'b']")
    assert as_python == _read("ema=true", "compile=false", "grad_clip=null", "wandb.tags=[a,b]")
    assert "unknown key 'bogus'" in _mistake("--bogus=3")
    assert CommandLine.parse(["--cfg=job", "--lr=1e-2"], "pretrain", USAGE).page is not None


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.yaml", None, "is not there, or is no regular file; correct the path"),
        ("late.yaml", "lr: 3e-4\n# @package _global_\n", "the first line has to be '# @package _global_'"),
        ("hydra.yaml", "# @package _global_\nhydra: {job: {name: x}}\n", "hydra.yaml has settings of Hydra's own"),
        ("defaults.yaml", "# @package _global_\ndefaults: 3\n", "defaults.yaml: defaults is no list"),
        (
            "twice.yaml",
            "# @package _global_\nlr: 1\nlr: 2\n",
            "twice.yaml:3: can't be read as YAML (found duplicate key lr)",
        ),
        ("open.yaml", "# @package _global_\nlr: ${\n", "open.yaml can't be read as YAML"),
        (
            "bytes.yaml",
            "# @package _global_\nlr: \udcff\n",
            "bytes.yaml can't be read as YAML ('utf-8' codec can't decode",
        ),
        ("deep.yaml", "# @package _global_\nlr: " + "[" * 5000 + "\n", "deep.yaml can't be read as YAML"),
        ("code.yaml", "# @package _global_\nlr: !!python/object/apply:os.getpid []\n", "code.yaml:2: can't be read"),
        ("keys.yaml", "lr: 3e-4\n", "the first line has to be '# @package _global_'"),
        ("bad.yaml", "# @package _global_\nlr: [3\nb: 2\n", "bad.yaml:3: can't be read as YAML (expected ',' or ']'"),
        ("empty.yaml", "", "the first line has to be '# @package _global_'"),
        ("list.yaml", "# @package _global_\n- 1\n", "list.yaml holds no keys; write lines such as lr: 1e-4"),
        ("bomb.yaml", BOMB, "bomb.yaml can't be read as YAML (has anchors, or is nested deeper than any config)"),
        ("more.yaml", "# @package _global_\nlrr: 3\n", "unknown key 'lrr'"),
        ("text.yaml", "# @package _global_\nlr: fast\n", "lr: input should be a valid number"),
        ("other.yaml", "# @package _global_\ndefaults:\n  - override /arch: nope\n", "'arch/nope'; choose one of gpt"),
        ("b" * 300 + ".yaml", None, "can't be used (File name too long)"),
    ],
)
def test_a_mistake_in_a_file_is_one_line(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    file = tmp_path / name
    if text is not None:
        file.write_text(text, encoding="utf-8", errors="surrogateescape")
    assert message in _mistake(f"experiment={file}")


def test_a_folder_that_is_of_no_use_is_refused(folder: Path, tmp_path: Path) -> None:
    assert "it has arch=small, experiment=mine" in _mistake("--config-dir", str(folder), "experiment=demo")
    assert "it needs folders like those of config/" in _mistake("--config-dir", str(tmp_path), "lr=1")
    assert "is no folder; give one that holds experiment/" in _mistake("--config-dir", str(tmp_path / "none"), "lr=1")


def test_files_of_one_name_are_told_apart(folder: Path, tmp_path: Path) -> None:
    """Whatever the order of the words, the file that was typed is taken."""
    (tmp_path / "small.yaml").write_text(ARCH.replace("64", "128"))
    (tmp_path / "demo.yaml").write_text("# @package _global_\nlr: 0.25\n")
    typed = [f"experiment={folder}/experiment/mine.yaml", f"arch={tmp_path}/small.yaml"]
    for words in (typed, typed[::-1]):
        assert _read(*words).arch.hidden_size == 128, words
    assert _read(f"experiment={tmp_path}/demo.yaml").lr == 0.25, "the name of a file of config/ is free"


def test_a_file_that_refers_to_itself_is_refused(folder: Path) -> None:
    (folder / "arch" / "small.yaml").write_text("defaults: [small]\n")
    assert "refers to itself" in _mistake(f"arch={folder}/arch/small.yaml")


def test_defaults_that_are_no_list_are_refused_in_a_file_beside_it_as_well(folder: Path) -> None:
    (folder / "arch" / "small.yaml").write_text("defaults: 3\n")
    assert "defaults must be a list" in _mistake(f"experiment={folder}/experiment/mine.yaml")


def test_paths_need_no_quotes_from_python(folder: Path) -> None:
    assert read_config("pretrain", [f"arch={folder}/arch/small.yaml"])["arch"]["hidden_size"] == 64


def test_a_run_by_an_own_experiment_resumes_without_the_file(folder: Path, data: Path, tmp_path: Path) -> None:
    run, file = tmp_path / "run", folder / "experiment" / "mine.yaml"
    tiny = ["arch.hidden_size=32", "arch.H_cycles=1", "arch.L_cycles=1", "global_batch_size=16", "lr_warmup_steps=0"]
    typed = [f"experiment={file}", f"data_path={data}", f"checkpoint_path={run}", "device=cpu", *tiny]
    typed = CommandLine.parse(
        [*typed, "arch.forward_dtype=float32", "wandb.mode=disabled"], "pretrain", USAGE
    ).overrides
    runs.train([*typed, "max_steps=2"], tmp_path / "log").ok()
    file.unlink()
    assert "at step 2" in runs.train([f"resume={run}", "max_steps=3"], tmp_path / "log").ok()


@pytest.mark.parametrize(
    "value",
    [
        "runs/a-1.b",
        "my runs/a",
        "my runs/a, b",
        "it's \\",
        "1",
        "1e-4",
        "true",
        "null",
        "",
        "a=b",
        "key:x",
        "(a)",
        "@~%ü",
        "{a",
        "[1",
    ],
)
def test_a_text_that_is_typed_as_an_override_is_read_as_that_text(value: str) -> None:
    assert read_config("pretrain", [f"run_name={as_override(value)}", "data_path=x"])["run_name"] == value


@pytest.mark.parametrize("value", [None, True, 3, 0.5, ["a b", "1", 2], [{"until": 0.3, "name": "a, b"}]])
def test_a_value_that_is_typed_as_an_override_is_read_as_that_value(value: object) -> None:
    assert read_config("pretrain", [f"arch.depth_curriculum={as_override(value)}"])["arch"]["depth_curriculum"] == value
