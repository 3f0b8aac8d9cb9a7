"""The names of step folders, and the numbers in the state of a run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from records.checkpoint.format import (
    Progress,
    RunState,
    nearest_run,
    no_run,
    read_name,
    refuse_folder_of_runs,
    run_folder_of,
    step_folders,
    step_named,
)
from tests.records.checkpoint.helpers import PROGRESS
from utils.errors import UserError

REST: dict[str, Any] = {"fingerprint": {"train": "f"}, "task": {"seq_len": 16}, "config": {"lr": 0.1}}
STATE = RunState(**PROGRESS.model_dump(), **REST)


def test_steps_are_sorted_by_number(tmp_path: Path) -> None:
    for name in ("step_100000000", "step_00000009", "step_99999999", "step_1", ".incomplete_step_00000001", "best"):
        (tmp_path / name).mkdir()
    assert [path.name for path in step_folders(tmp_path)] == ["step_00000009", "step_99999999", "step_100000000"]
    assert step_folders(tmp_path / "nowhere") == []


def test_only_the_name_of_a_step_folder_is_accepted(tmp_path: Path) -> None:
    assert read_name(tmp_path / "latest") == ""
    for text in ("step_00000012\n", "step_100000000"):
        (tmp_path / "latest").write_text(text)
        assert read_name(tmp_path / "latest") == text.strip()
    for text in ("", "step_12\n", "../step_00000012\n", "step_00000012/..", "step_00000012\nstep_00000013\n"):
        (tmp_path / "latest").write_text(text)
        assert read_name(tmp_path / "latest") == ""


# ---- progress ----------------------------------------------------------------------------------


def test_every_number_of_the_progress_is_stored_and_read() -> None:
    """A number that a checkpoint of an older version lacks has its default."""
    read = RunState.model_validate_json(STATE.model_dump_json(indent=1))
    assert read == STATE
    assert read.progress() == PROGRESS and type(read.progress()) is Progress
    for newer in Progress.model_fields.keys() - {"step", "draws", "wandb_run_id"}:
        stored = json.loads(STATE.model_dump_json())
        del stored[newer]
        expected = PROGRESS.model_copy(update={newer: getattr(Progress(), newer)})
        assert RunState.model_validate_json(json.dumps(stored)).progress() == expected


def test_a_branch_has_no_best_and_skips_only_the_steps_ahead() -> None:
    branch = PROGRESS.of_branch("def")
    changed = {"wandb_run_id": "def", "best": None, "evaluations_since_best": 0, "skipped_steps": [9]}
    assert branch.model_dump() == PROGRESS.model_dump() | changed | {"failed_saves": 0, "spent_until": 0.0}
    assert PROGRESS.skipped_steps == [3, 6, 9], "the progress of the source was changed"
    assert PROGRESS.model_copy(update={"skipped_steps": [7, 8]}).of_branch("def").skipped_steps == [8]


# ---- what a typed path names ---------------------------------------------------------------------


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
    _run(_run(project / "new", 4, at=50), 5, at=200)
    (project / "no_checkpoint_yet").mkdir()
    _run(project / ".launches", 9, at=300)
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
