"""What a run is called, what it begins with, and who may write into its folder."""

import fcntl
import json
from pathlib import Path
from typing import Any

import pytest

from training.config import PretrainConfig
from utils.dist.launch import Launch
from utils.run.folder import claim_fresh, mark_stopped, run_folder_of
from utils.run.lock import RunLock
from utils.run.resume import Start, prepare, read_start


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def _read(*overrides: str) -> Start[PretrainConfig]:
    return read_start(PretrainConfig, "pretrain", list(overrides), RunLock(), Launch.from_environment())


def _prepare(start: Start[PretrainConfig]) -> None:
    prepare(start, RunLock(), Launch.from_environment())


def _attempt(monkeypatch: pytest.MonkeyPatch, run_id: str, restarts: int) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", run_id)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))


def _all_bytes(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ---- names ---------------------------------------------------------------------------------------------


def test_names_are_filled_in() -> None:
    config = _read("data_path=data/sudoku").config
    assert config.project_name == "sudoku" and config.run_name
    assert config.run_path == Path("checkpoints/sudoku") / config.run_name
    assert _read("data_path=data/sudoku").config.run_name != config.run_name
    assert _read("checkpoint_path=somewhere/mine").config.run_name == "mine"
    assert _read("run_name=42", "project_name=p").config.run_path == Path("checkpoints/p/42")


@pytest.mark.parametrize("run_id", ["job 7", "none", "../../etc/passwd"])
def test_restarted_attempt_finds_the_name(monkeypatch: pytest.MonkeyPatch, run_id: str) -> None:
    _attempt(monkeypatch, run_id, 0)
    first = _read("project_name=p")
    _prepare(first)
    assert all(path.is_relative_to(Path("checkpoints")) for path in Path().rglob("*") if path.is_file())
    _attempt(monkeypatch, run_id, 1)
    second = _read("project_name=p")
    assert second.config.run_path == first.config.run_path
    assert second.checkpoint is None and "starting afresh" in second.notes[0]


def test_another_launch_gets_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    _attempt(monkeypatch, "a", 0)
    first = _read("project_name=p")
    _prepare(first)
    _attempt(monkeypatch, "b", 0)
    assert _read("project_name=p").config.run_path != first.config.run_path
    _attempt(monkeypatch, "a", 0)  # the same id, but begun anew by a person
    assert _read("project_name=p").config.run_path != first.config.run_path


# ---- what a run begins with ----------------------------------------------------------------------------


def test_resume_of_a_run_takes_the_newest_step(quiet: Path) -> None:
    for resume in ([f"resume={quiet}"], ["resume=auto", f"checkpoint_path={quiet}"], [f"resume={quiet}/step_00000012"]):
        start = _read(*resume)
        assert start.checkpoint is not None and start.checkpoint.state.step == 12
        assert start.config.run_path == quiet and not start.branches_off
        assert f"resuming {quiet}/step_00000012 at step 12" in start.notes


def test_restart_implies_resume(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"already holds checkpoints \(newest step_00000012\); resume=auto"):
        _read(f"checkpoint_path={quiet}")
    _attempt(monkeypatch, "x", 1)
    start = _read(f"checkpoint_path={quiet}")
    assert start.checkpoint is not None and start.checkpoint.state.step == 12


def test_restart_goes_on_where_the_earlier_attempt_was(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where the command line says that the launch began, which would be refused or be lost work."""
    _attempt(monkeypatch, "x", 1)
    start = _read(f"resume={copied}/step_00000004")
    assert start.checkpoint is not None and start.checkpoint.state.step == 12


def test_older_step_is_refused_or_branched_off(quiet: Path, tmp_path: Path) -> None:
    before = _all_bytes(quiet)
    with pytest.raises(ValueError, match=r"went on to step_00000012; resume=.* continues .*checkpoint_path"):
        _read(f"resume={quiet}/step_00000004")
    start = _read(f"resume={quiet}/step_00000004", f"checkpoint_path={tmp_path}/branch")
    assert start.branches_off and start.checkpoint is not None and start.checkpoint.state.step == 4
    assert start.config.run_path == tmp_path / "branch" and start.config.run_name == "branch"
    (tmp_path / "taken" / "step_00000001").mkdir(parents=True)
    with pytest.raises(ValueError, match="already holds checkpoints"):
        _read(f"resume={quiet}/step_00000004", f"checkpoint_path={tmp_path}/taken")
    assert _all_bytes(quiet) == before


@pytest.mark.parametrize("where", ["nowhere", "nowhere/step_00000004"])
def test_resume_of_nothing(where: str) -> None:
    with pytest.raises(ValueError, match=f"no checkpoint at {where}; give the folder of a run"):
        _read(f"resume={where}")


def test_damaged_step_that_was_asked_for_by_name(copied: Path) -> None:
    (copied / "step_00000012" / "state.json").unlink()
    with pytest.raises(ValueError, match=r"step_00000012 is damaged: state\.json is missing"):
        _read(f"resume={copied}/step_00000012")
    assert any("going back to step_00000010" in note for note in _read(f"resume={copied}").notes)


def test_typed_wins_over_stored_and_stored_over_yaml(quiet: Path) -> None:
    stored = json.loads((quiet / "step_00000012" / "state.json").read_text())["config"]
    start = _read(f"resume={quiet}", "lr=3e-3", "arch.halt_exploration_prob=0.25")
    changed = dict(stored, lr=3e-3, resume=str(quiet), arch=dict(stored["arch"], halt_exploration_prob=0.25))
    assert start.config.model_dump() == changed
    told = [note for note in start.notes if note.startswith("changed on the command line: ")]
    assert sorted(told) == [
        "changed on the command line: arch.halt_exploration_prob: 0.5 -> 0.25",
        f"changed on the command line: lr: {stored['lr']} -> 0.003",
    ]


def test_value_that_is_the_default_but_typed_wins(quiet: Path) -> None:
    """checkpoint_every_n_steps was 2; the default, null, is typed."""
    assert _read(f"resume={quiet}", "checkpoint_every_n_steps=null").config.checkpoint_every_n_steps is None
    assert _read(f"resume={quiet}").config.checkpoint_every_n_steps == 2


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ([], ["a", "b"]),
        (["data_path=c"], ["c"]),
        (["data_path=c", "data_paths=[d,e]"], ["d", "e"]),
        (["data_paths=[]"], ["data/arc-aug-1000"]),
    ],
)
def test_typed_data_take_the_place_of_all_stored_data(tmp_path: Path, typed: list[str], expected: list[str]) -> None:
    """A typed data_path clears the stored data_paths, which would win otherwise."""
    run = tmp_path / "run"
    _prepare(_read(f"checkpoint_path={run}", "data_paths=[a,b]"))
    train_paths = _read("resume=auto", f"checkpoint_path={run}", *typed).config.train_paths
    assert train_paths == expected, f"with {typed} typed over data_paths=[a,b] the run would train on {train_paths}"


# ---- the folder ----------------------------------------------------------------------------------------


def test_run_folder_of(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_folder_of(quiet) == quiet
    assert run_folder_of(quiet / "step_00000004") == quiet
    assert run_folder_of(quiet / "step_00000099") == quiet / "step_00000099"
    monkeypatch.chdir(quiet)
    assert run_folder_of(Path("step_00000004")) == Path()


def test_prepare_says_what_runs_and_clears_the_marker(tmp_path: Path) -> None:
    start = _read("checkpoint_path=new/run", "lr=0.5")
    _prepare(start)
    mark_stopped(start.config.run_path, "SIGTERM")
    assert Path("new/run/stopped").read_text() == "SIGTERM\n"
    _prepare(start)
    assert not Path("new/run/stopped").exists()
    assert "lr: 0.5" in Path("new/run/config.yaml").read_text().splitlines()
    assert not list(Path("new/run").glob(".incomplete*"))


def test_folder_that_is_a_file() -> None:
    Path("file").touch()
    with pytest.raises(ValueError, match=r"can't write to file: .*; free it, or give another checkpoint_path"):
        _prepare(_read("checkpoint_path=file"))


def test_claim_fresh(quiet: Path, tmp_path: Path) -> None:
    claim_fresh(tmp_path / "nothing")
    claim_fresh(tmp_path)
    with pytest.raises(ValueError, match="already holds checkpoints"):
        claim_fresh(quiet)


@pytest.mark.parametrize("branches_off", [False, True])
def test_another_run_comes_and_goes_while_data_are_read(quiet: Path, tmp_path: Path, branches_off: bool) -> None:
    """The folder did not exist when the config was read, so nobody could lock it."""
    run = tmp_path / "run"
    start = _read(f"checkpoint_path={run}", *([f"resume={quiet}"] if branches_off else []))
    (run / "step_00000001").mkdir(parents=True)
    before = _all_bytes(run)
    with pytest.raises(ValueError, match=r"already holds checkpoints \(newest step_00000001\)"):
        _prepare(start)
    assert {path: text for path, text in _all_bytes(run).items() if path.name != ".lock"} == before


def test_killed_before_its_first_checkpoint_a_run_keeps_its_recipe(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    _prepare(_read(f"checkpoint_path={run}", "lr=3e-3", f"data_path={data}"))
    start = _read("resume=auto", f"checkpoint_path={run}", "seed=5")
    assert start.checkpoint is None and "starting afresh with its config.yaml" in start.notes[0]
    assert (start.config.lr, start.config.seed, start.config.data_path) == (3e-3, 5, str(data))
    (run / "config.yaml").write_text("{")
    with pytest.raises(ValueError, match=r"config\.yaml can't be read as YAML; remove it"):
        _read("resume=auto", f"checkpoint_path={run}")


def test_note_of_an_earlier_launch_is_not_taken_for_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that dies before it notes its own name must not leave the restart another launch's run."""
    _attempt(monkeypatch, "a", 0)
    old = _read("project_name=p")
    _prepare(old)
    _attempt(monkeypatch, "a", 0)
    _read("project_name=p")  # and dies here
    _attempt(monkeypatch, "a", 1)
    assert _read("project_name=p").config.run_path != old.config.run_path


def test_relative_and_absolute_paths_name_one_run(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(copied.parent)
    start = _read(f"resume={copied.name}", f"checkpoint_path={copied}")
    assert start.checkpoint is not None and not start.branches_off


def test_branch_of_a_run_without_metrics(copied: Path, tmp_path: Path) -> None:
    (copied / "metrics.jsonl").unlink()
    _prepare(_read(f"resume={copied}/step_00000004", f"checkpoint_path={tmp_path}/branch"))
    assert (tmp_path / "branch" / "config.yaml").exists()


def test_branch_that_was_killed_before_its_first_checkpoint(quiet: Path, tmp_path: Path) -> None:
    """Not begun again from fresh weights, which its config.yaml contradicts."""
    branch = [f"resume={quiet}/step_00000004", f"checkpoint_path={tmp_path}/branch"]
    _prepare(_read(*branch))
    with pytest.raises(ValueError, match=r"was to go on from .*step_00000004 .*; give resume=.* again"):
        _read("resume=auto", branch[1])
    assert _read(*branch).branches_off


def test_names_that_are_taken_away_come_back(quiet: Path) -> None:
    config = _read("resume=auto", f"checkpoint_path={quiet}", "project_name=null", "run_name=null").config
    assert config.run_name == "run" and config.project_name is not None


# ---- the lock --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["auto", "path", "restart", "afresh"])
def test_the_folder_is_read_under_the_lock(copied: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A run that waits for the lock finds the checkpoint that the holder of the lock saves meanwhile.

    The holder is replacing its newest step: the old folder is renamed, and the new folder does not exist yet.
    """
    newest, aside = copied / "step_00000012", copied / ".incomplete_replaced_step_00000012"
    newest.rename(aside)
    (copied / "latest").write_text("step_00000010\n")
    flock, num_calls = fcntl.flock, 0

    def held_by_another(file: Any, operation: int) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            assert aside.exists(), "the folder was put in order before it was locked"
            aside.rename(newest)
            (copied / "latest").write_text("step_00000012\n")
            raise BlockingIOError
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", held_by_another)
    if how == "restart":
        _attempt(monkeypatch, "x", 1)
    if how == "afresh":
        with pytest.raises(ValueError, match=r"already holds checkpoints \(newest step_00000012\)"):
            _read(f"checkpoint_path={copied}")
    else:
        typed = [f"resume={copied}"] if how == "path" else [f"checkpoint_path={copied}", "resume=auto"]
        start = _read(*(typed[:1] if how == "restart" else typed))
        assert start.checkpoint is not None
        assert start.checkpoint.state.step == 12, "the folder was read before it was locked"
    assert num_calls == 2, "the folder was read without its lock"
