"""The name of a run, and where its paths lead."""

import os
from pathlib import Path

import pytest

from records.folder import located_paths
from tests.in_process import pretrain_config
from tests.training.starts import prepare_run, read, set_attempt

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_missing_names_are_filled_in() -> None:
    config = read("data_path=data/sudoku").config
    assert config.project_name == "sudoku" and config.run_name
    assert config.run_path == Path("checkpoints/sudoku") / config.run_name
    assert read("data_path=data/sudoku").config.run_name != config.run_name
    assert read("checkpoint_path=somewhere/mine").config.run_name == "mine"
    assert read("run_name=42", "project_name=p").config.run_path == Path("checkpoints/p/42")


@pytest.mark.parametrize("run_id", ["job 7", "none", "../../etc/passwd"])
def test_restarted_attempt_finds_the_name(monkeypatch: pytest.MonkeyPatch, run_id: str) -> None:
    set_attempt(monkeypatch, run_id, 0)
    first = read("project_name=p")
    prepare_run(first)
    assert all(path.is_relative_to(Path("checkpoints")) for path in Path().rglob("*") if path.is_file())
    set_attempt(monkeypatch, run_id, 1)
    second = read("project_name=p")
    assert second.config.run_path == first.config.run_path
    assert second.checkpoint is None and "starting afresh" in second.notes[0]


def test_another_launch_gets_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if its attempt dies before it notes its name, and a restart comes."""
    set_attempt(monkeypatch, "a", 0)
    first = read("project_name=p")
    prepare_run(first)
    set_attempt(monkeypatch, "b", 0)
    assert read("project_name=p").config.run_path != first.config.run_path
    set_attempt(monkeypatch, "a", 0)  # a person starts again with the same id, and this attempt dies here
    assert read("project_name=p").config.run_path != first.config.run_path
    set_attempt(monkeypatch, "a", 1)
    assert read("project_name=p").config.run_path != first.config.run_path


def test_a_run_with_a_path_of_its_own_leaves_no_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart reads the path on its command line. A note could only mislead another run."""
    set_attempt(monkeypatch, "a", 0)
    prepare_run(read("checkpoint_path=elsewhere/mine"))
    assert Path("elsewhere/mine/config.yaml").is_file() and not Path("checkpoints").exists()


def test_a_relative_path_is_relative_to_where_the_run_was_started(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "there").mkdir(parents=True)
    others = ["nowhere", "/absolute", "hf://owner/repo/file"]
    assert located_paths(str(folder), ["there", None, "", *others]) == [str(folder / "there"), *others]
    for started_in in (None, 3):  # a run of an older version, and a damaged config
        assert located_paths(started_in, ["there"]) == ["there"]
    Path("data").mkdir()
    config = pretrain_config(f"started_in={folder}", "data_paths_test=[there]", "init_from=there")
    assert config.test_paths == [config.initial_weights] == [str(folder / "there")]
    config = read("checkpoint_path=run", "data_path=data", "data_paths_test=[data]").config
    assert config.started_in == os.getcwd() and config.test_paths == ["data"]


def test_a_typed_architecture_names_the_keys_of_the_recipe_that_it_replaces() -> None:
    (note,) = read("experiment=demo", "arch=hrm", "arch.L_layers=2", "checkpoint_path=run").notes
    assert "arch.hidden_size 16 -> 512" in note and "arch.L_layers" not in note
    assert not read("experiment=demo", "arch=se_mixer", "checkpoint_path=other").notes
