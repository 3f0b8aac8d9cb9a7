"""What a typed path names: a step, a run, or a folder of runs."""

import os
from pathlib import Path

import pytest

from records.checkpoint.format import read_name
from records.checkpoint.names import nearest_run, no_run, refuse_folder_of_runs, run_folder_of, step_named
from utils.errors import UserError


def _run(path: Path, *steps: int, at: int = 0) -> Path:
    """Make the folders of a run whose newest step was written at a time."""
    for step in steps:
        (path / f"step_{step:08d}").mkdir(parents=True)
        os.utime(path / f"step_{step:08d}", (at, at))
    return path


def test_a_path_names_a_step(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A marker without its step is a mistake."""
    best = read_name(copied / "best")
    for name, step in (("step_00000004", "step_00000004"), ("latest", "step_00000012"), ("best", best)):
        assert step_named(copied / name) == copied / step and run_folder_of(copied / name) == copied
    for path in (copied, copied / "step_00000099", copied / "config.yaml", copied / "nothing" / "best"):
        assert step_named(path) is None and run_folder_of(path) == path
    monkeypatch.chdir(copied)
    assert step_named(Path("latest")) == Path("step_00000012") and run_folder_of(Path("step_00000004")) == Path()
    (copied / "best").unlink()
    with pytest.raises(UserError, match=f"{copied} has no best step; give {copied} for its newest"):
        step_named(copied / "best")
    (copied / "best").write_text("step_00000007\n")
    with pytest.raises(UserError, match=r"step_00000007 is gone"):
        step_named(copied / "best")


def test_a_folder_of_runs_lists_them_newest_first(tmp_path: Path) -> None:
    project = tmp_path / "project"
    _run(project / "old", 3, 20, at=100)
    _run(project / "new", 5, at=200)
    (project / "no_checkpoint_yet").mkdir()
    (project / ".launches").mkdir()
    runs = f"give one of them: {project}/new (step 5), {project}/old (step 20)"
    assert no_run(project).endswith(runs)
    assert no_run(tmp_path).endswith(runs), "a folder of projects has runs too"
    with pytest.raises(UserError, match="is a folder of runs"):
        refuse_folder_of_runs(project)


@pytest.mark.parametrize("own", ["config.yaml", "latest", "nothing"])
def test_outputs_of_evaluations_are_no_run(tmp_path: Path, own: str) -> None:
    """The run has lost its checkpoints, or has none yet."""
    run = tmp_path / "project" / "run"
    _run(run / "eval_outputs", 100)
    if own != "nothing":
        (run / own).touch()
    for path in (run, run.parent):
        assert no_run(path).startswith(f"there is no checkpoint at {path}; give the folder of a run")
        refuse_folder_of_runs(path)


def test_the_nearest_run_is_named(tmp_path: Path) -> None:
    run = _run(tmp_path / "mellow-otter", 1)
    _run(tmp_path / "swift-falcon", 1)
    (tmp_path / "mellow-otters").mkdir()  # no run
    typed = run.with_name("melow-otter")
    assert nearest_run(typed) == run and f"but there is {run}" in no_run(typed)
    assert nearest_run(run.with_name("baseline")) is None and nearest_run(tmp_path / "a" / "b" / "mellow-otter") is None
