"""The names of step folders, and the numbers in the state of a run."""

import json
from pathlib import Path
from typing import Any

from records.checkpoint.format import Progress, RunState, read_name, step_folders

# Each value differs from the field's default.
PROGRESS = Progress(
    step=7,
    draws=112,
    skipped_steps=[3, 6, 9],
    open_steps=2,
    open_slots=32,
    best=0.1 + 0.2,
    evaluations_since_best=4,
    failed_saves=2,
    pending_row={"train/lm_loss": 1 / 3},
    wandb_run_id="abc",
)
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
    same = [name for name in Progress.model_fields if getattr(PROGRESS, name) == getattr(Progress(), name)]
    assert not same, f"this test must give {same} values other than the defaults"
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
    assert branch.model_dump() == PROGRESS.model_dump() | changed | {"failed_saves": 0}
    assert PROGRESS.skipped_steps == [3, 6, 9], "the progress of the source was changed"
    assert PROGRESS.model_copy(update={"skipped_steps": [7, 8]}).of_branch("def").skipped_steps == [8]
