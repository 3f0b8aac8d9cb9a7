"""The start of a run: its config, and the checkpoint that it resumes."""

import fcntl
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from records.folder import Launched
from tests.records.checkpoint.helpers import fix_manifest
from tests.runs import contents
from tests.training.starts import prepare_run, read, set_attempt
from training.resume import Start
from utils.errors import UserError
from utils.ranks.launch import Launch

pytestmark = pytest.mark.usefixtures("empty_folder")

HOLDS_CHECKPOINTS = r"already holds checkpoints \(newest step_00000012\)"


def _step(start: Start) -> int:
    """Return the step from which a run goes on."""
    assert start.checkpoint is not None
    return start.checkpoint.state.step


def test_a_requeued_job_resumes_only_what_it_began(copied: Path, quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job may be requeued before it trains. Then its folder may hold another run."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    typed = [f"checkpoint_path={copied}"]
    for another in ([], [f"resume={quiet}/step_00000012"]):
        with pytest.raises(ValueError, match=HOLDS_CHECKPOINTS):
            read(*typed, *another)
    begun = Launched.read(copied)
    assert begun is not None
    begun.model_copy(update={"launch": Launch.from_environment().identity}).write(copied)
    assert _step(read(*typed)) == 12
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    with pytest.raises(ValueError, match=HOLDS_CHECKPOINTS):
        read(*typed)


def test_resume_of_a_run_takes_the_newest_step(copied: Path) -> None:
    for resume in ("{}", "auto", "{}/step_00000012", "{}/latest"):
        start = read(f"resume={resume.format(copied)}", *([f"checkpoint_path={copied}"] if resume == "auto" else []))
        assert (_step(start), start.config.run_path, start.branches_off) == (12, copied, False)
        assert f"resuming {copied}/step_00000012 at step 12" in start.notes
    (copied / "best").write_text("step_00000010\n")
    for older in ("step_00000004", "best"):
        with pytest.raises(ValueError, match=r"went on to step_00000012; resume=.* continues .*checkpoint_path"):
            read(f"resume={copied}/{older}")
    assert _step(read(f"resume={copied}/best", "project_name=p", "run_name=branch")) == 10


def test_restart_implies_resume(quiet: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step on the command line is the start of the launch."""
    with pytest.raises(ValueError, match=HOLDS_CHECKPOINTS + "; resume=.*continues that run"):
        read(f"checkpoint_path={quiet}")
    set_attempt(monkeypatch, "x", 1)
    for typed in (f"checkpoint_path={quiet}", f"resume={quiet}/step_00000004"):
        assert _step(read(typed)) == 12


def test_a_typed_name_branches_off_into_a_folder_of_its_own(quiet: Path, tmp_path: Path) -> None:
    """The run at PATH stays as it is, also if only its newest step is named."""
    before = contents(quiet)
    own = json.loads((quiet / "step_00000012" / "state.json").read_text())["config"]
    checkpoints = Path("checkpoints")
    for typed, run, project, name in (
        (["run_name=branch"], checkpoints / own["project_name"] / "branch", own["project_name"], "branch"),
        (["project_name=p"], checkpoints / "p" / own["run_name"], "p", own["run_name"]),
        (["project_name=p", "+run_name=branch"], checkpoints / "p" / "branch", "p", "branch"),
        ([f"checkpoint_path={tmp_path}/else"], tmp_path / "else", own["project_name"], "else"),
        ([f"checkpoint_path={tmp_path}/else", "run_name=branch"], tmp_path / "else", own["project_name"], "branch"),
    ):
        for source, step in ((quiet, 12), (quiet / "latest", 12), (quiet / "step_00000004", 4)):
            start = read(f"resume={source}", *typed)
            assert start.branches_off and _step(start) == step
            config = start.config
            assert (config.run_path, config.project_name, config.run_name) == (run, project, name)
            assert f"branches off {quiet} at step {step} into {run}" in start.notes
            prepare_run(start)
            assert (run / "metrics.jsonl").read_bytes() == (quiet / "metrics.jsonl").read_bytes()
    (tmp_path / "taken" / "step_00000001").mkdir(parents=True)
    with pytest.raises(ValueError, match="already holds checkpoints"):
        read(f"resume={quiet}/step_00000004", f"checkpoint_path={tmp_path}/taken")
    assert contents(quiet) == before


def test_the_names_of_the_run_itself_are_no_branch(quiet: Path) -> None:
    """A person repeats the first command with resume=PATH. A group with a name is no new name."""
    for typed in (
        ["run_name=run", f"checkpoint_path={quiet}"],
        ["run_name=run"],
        ["project_name=debug", "run_name=null"],
        ["debug=overfit"],
    ):
        start = read(f"resume={quiet}", *typed)
        assert not start.branches_off and start.config.run_path == quiet
        assert (start.config.project_name, start.config.run_name) == ("debug", "run")


def test_a_run_whose_config_has_no_names_has_those_of_its_folder(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However its folder is reached. If only steps were copied, the newest one holds the config."""
    file, link = copied / "config.yaml", tmp_path / "link"
    stored = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump(stored | {"project_name": None, "run_name": None}))
    link.symlink_to(copied)
    monkeypatch.chdir(copied)
    for source in (copied, link, Path()):
        assert not read(f"resume={source}", "run_name=run").branches_off
        branch = read(f"resume={source}", "run_name=branch").config
        assert branch.run_path == Path("checkpoints", tmp_path.name, "branch")
    file.unlink()
    branch = read(f"resume={copied}", "run_name=branch").config
    assert branch.run_path == Path("checkpoints", stored["project_name"], "branch") and branch.project_name == "debug"


def test_a_branch_goes_on_by_itself(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart of the launch repeats the command, and so does a requeued job of Slurm."""
    typed = [f"resume={copied}/step_00000004", "project_name=p", "run_name=branch"]
    branch = Path("checkpoints/p/branch")
    set_attempt(monkeypatch, "x", 0)
    prepare_run(read(*typed))
    set_attempt(monkeypatch, "x", 1)
    start = read(*typed)
    assert start.branches_off and _step(start) == 4
    (copied / "step_00000006").rename(branch / "step_00000006")
    for gone in (False, True):
        if gone:
            shutil.rmtree(copied)
        start = read(*typed)
        assert not start.branches_off and start.config.run_path == branch
        assert f"resuming {branch}/step_00000006 at step 6" in start.notes
        assert (start.config.project_name, start.config.run_name) == ("p", "branch")


def test_resume_auto_needs_the_run_unless_a_launch_knows_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drawn name would mean another run each time."""
    with pytest.raises(UserError, match=r"^resume=auto finds a run by its folder; give checkpoint_path=checkpoints/"):
        read("resume=auto")
    assert read("resume=auto", "project_name=p", "run_name=r").config.run_path == Path("checkpoints/p/r")
    set_attempt(monkeypatch, "x", 0)
    first = read("resume=auto", "project_name=p")
    prepare_run(first)
    set_attempt(monkeypatch, "x", 1)
    assert read("resume=auto", "project_name=p").config.run_path == first.config.run_path


def test_resume_auto_without_a_folder_warns(copied: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert read("resume=auto", f"checkpoint_path={copied}x").checkpoint is None
    said = capfd.readouterr().err
    assert f"warning: resume=auto finds no folder {copied}x (did you mean {copied}?)" in " ".join(said.split())


def test_what_is_no_run_cannot_be_resumed(copied: Path) -> None:
    file = copied / "step_00000012" / "model.safetensors"
    of_runs = f"{copied.parent} is a folder of runs; give one of them: {copied} \\(step 12\\)"
    for typed, message in (
        ("resume=nowhere", "no checkpoint at nowhere; give the folder of a run"),
        ("resume=nowhere/step_00000004", "no checkpoint at nowhere/step_00000004; give the folder of a run"),
        (f"resume={copied.parent}", of_runs),
        (f"resume=auto checkpoint_path={copied.parent}", of_runs),
        (f"resume={file}", f"is a part of a checkpoint; give the step folder above it, {file.parent}"),
        ("resume=hf://owner/repo", r"are weights alone.*init_from=hf://owner/repo starts another run"),
    ):
        with pytest.raises(ValueError, match=message):
            read(*typed.split())
    assert not (copied.parent / ".lock").exists()


def test_typed_values_win_over_stored_values_and_stored_values_over_yaml(quiet: Path) -> None:
    stored = json.loads((quiet / "step_00000012" / "state.json").read_text())["config"]
    start = read(f"resume={quiet}", "lr=3e-3", "arch.halt_exploration_prob=0.25")
    changed = dict(stored, lr=3e-3, resume=str(quiet), arch=dict(stored["arch"], halt_exploration_prob=0.25))
    assert start.config.model_dump() == changed
    told = [note for note in start.notes if note.startswith("changed on the command line: ")]
    assert sorted(told) == [
        "changed on the command line: arch.halt_exploration_prob: 0.5 -> 0.25",
        f"changed on the command line: lr: {stored['lr']} -> 0.003",
    ]
    assert stored["checkpoint_every_n_steps"] == 2
    typed_default = read(f"resume={quiet}", "checkpoint_every_n_steps=null")
    assert typed_default.config.checkpoint_every_n_steps is None, "a typed default replaces the stored value"
    # A recipe types auto at every start, and the run keeps the dtype that it began with.
    for dtype, is_told in (("auto", False), ("bfloat16", True)):
        notes = read(f"resume={quiet}", f"arch.forward_dtype={dtype}").notes
        assert any("arch.forward_dtype: float32 -> bfloat16" in note for note in notes) == is_told


def test_typed_data_replace_all_stored_data(tmp_path: Path) -> None:
    """A typed data_path clears the stored data_paths, which would win otherwise."""
    run = tmp_path / "run"
    prepare_run(read(f"checkpoint_path={run}", "data_paths=[a,b]"))
    for typed, expected in (
        ([], ["a", "b"]),
        (["data_path=c"], ["c"]),
        (["data_path=c", "data_paths=[d,e]"], ["d", "e"]),
        (["data_paths=[]"], ["data/arc-aug-1000"]),
    ):
        assert read("resume=auto", f"checkpoint_path={run}", *typed).config.train_paths == expected, typed


@pytest.mark.parametrize("stored", [True, False])
def test_a_stored_switch_gets_its_options_and_a_key_that_is_gone_is_dropped(tmp_path: Path, stored: bool) -> None:
    """Older runs stored `profile: false`, and not where they were started."""
    run = tmp_path / "run"
    prepare_run(read(f"checkpoint_path={run}"))
    config = yaml.safe_load((run / "config.yaml").read_text())
    options = config["profile"] | {"enabled": stored}
    gone = {"static_graph": False, "compression": "none"}
    del config["wandb"]["pictures"], config["started_in"]
    changes = {"profile": stored, "parallel": config["parallel"] | gone, "dist": config["dist"] | {"launcher": "mpi"}}
    (run / "config.yaml").write_text(yaml.safe_dump(config | changes))
    start = read("resume=auto", f"checkpoint_path={run}")
    (note,) = (note for note in start.notes if "no longer exist" in note)
    assert "parallel.static_graph=False" in note and "parallel.compression=none" in note
    assert start.config.profile.model_dump() == options
    assert [note for note in start.notes if "not known" in note] == ["not known when the run began: wandb.pictures=4"]
    assert not [note for note in start.notes if "profile" in note]
    assert start.config.started_in == os.getcwd()
    assert start.config.dist.launcher == "auto", "each start says how its ranks find one another"
    start = read("resume=auto", f"checkpoint_path={run}", f"profile={not stored}", "profile.steps=[2,3]")
    assert start.config.profile.model_dump() == options | {"enabled": not stored, "steps": [2, 3]}
    assert f"changed on the command line: profile.enabled: {stored} -> {not stored}" in start.notes


def test_a_run_by_an_own_experiment_needs_its_file_no_more(tmp_path: Path) -> None:
    run, file = tmp_path / "run", tmp_path / "mine.yaml"
    file.write_text("# @package _global_\nlr: 3e-3\n")
    prepare_run(read(f"experiment={file}", f"checkpoint_path={run}"))
    file.unlink()
    assert read("resume=auto", f"checkpoint_path={run}").config.lr == 3e-3


def test_a_run_killed_before_its_first_checkpoint_keeps_its_recipe(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    prepare_run(read(f"checkpoint_path={run}", "lr=3e-3", f"data_path={data}"))
    start = read("resume=auto", f"checkpoint_path={run}", "seed=5")
    assert start.checkpoint is None and "starting afresh with its config.yaml" in start.notes[0]
    assert (start.config.lr, start.config.seed, start.config.data_path) == (3e-3, 5, str(data))
    (run / "config.yaml").write_text("{")
    with pytest.raises(ValueError, match=r"config\.yaml:\d+: can't be read as YAML"):
        read("resume=auto", f"checkpoint_path={run}")


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_a_wrong_stored_value_is_named_with_its_file(copied: Path, has_checkpoint: bool) -> None:
    file = copied / ("step_00000012/state.json" if has_checkpoint else "config.yaml")
    wrong = {"lr": "fast", "seeed": 1, "evaluators": ["sudoko"]}
    if has_checkpoint:
        state = json.loads(file.read_text())
        file.write_text(json.dumps(state | {"config": state["config"] | wrong}, indent=1))
        fix_manifest(file.parent)
    else:
        for step in copied.glob("step_*"):
            shutil.rmtree(step)
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | wrong))
    lines = file.read_text().splitlines()

    def place(key: str) -> str:
        (number,) = (n for n, line in enumerate(lines, 1) if re.match(rf"^ *\"?{key}\"?:", line))
        return f"{file.relative_to(Path.cwd())}:{number}"

    with pytest.raises(UserError) as caught:
        read("resume=auto", f"checkpoint_path={copied}", "beta1=much")
    message = str(caught.value)
    for expected in (f"{place('lr')}: lr: ", f"{place('seeed')}: unknown key", f"{place('evaluators')}: evaluators."):
        assert expected in message
    assert "; beta1: " in f"; {message}", "this one was typed"
    with pytest.raises(UserError) as caught:
        read("resume=auto", f"checkpoint_path={copied}", "lr=1e-4")
    assert "lr:" not in str(caught.value), "the typed value replaces the wrong one"


def test_a_branch_killed_before_its_first_checkpoint_needs_its_source_again(quiet: Path, tmp_path: Path) -> None:
    """A start from fresh weights would contradict the branch's config.yaml."""
    branch = [f"resume={quiet}/step_00000004", f"checkpoint_path={tmp_path}/branch"]
    prepare_run(read(*branch))
    with pytest.raises(ValueError, match=r"was to go on from .*step_00000004 .*; give resume=.* again"):
        read("resume=auto", branch[1])
    assert read(*branch).branches_off


@pytest.mark.parametrize("branches_off", [False, True])
def test_a_folder_that_another_run_has_used_meanwhile_is_refused(
    quiet: Path, tmp_path: Path, branches_off: bool
) -> None:
    """The folder did not exist when the config was read, so that no run could lock it."""
    run = tmp_path / "run"
    start = read(f"checkpoint_path={run}", *([f"resume={quiet}"] if branches_off else []))
    (run / "step_00000001").mkdir(parents=True)
    before = contents(run)
    with pytest.raises(ValueError, match=r"already holds checkpoints \(newest step_00000001\)"):
        prepare_run(start)
    assert contents(run) == before


@pytest.mark.parametrize("how", ["resume={}", "resume=auto checkpoint_path={}", "afresh"])
def test_the_folder_is_read_under_the_lock(copied: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A run that waits for the lock finds the checkpoint that the holder saves meanwhile.

    The holder has renamed the old folder of its newest step, and the new folder does not exist yet.
    """
    newest, aside = copied / "step_00000012", copied / ".incomplete_replaced_step_00000012"
    newest.rename(aside)
    (copied / "latest").write_text("step_00000010\n")
    flock, calls = fcntl.flock, list[int]()

    def held_by_another(file: Any, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:
            assert aside.exists(), "the folder was repaired before it was locked"
            aside.rename(newest)
            (copied / "latest").write_text("step_00000012\n")
            raise BlockingIOError
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", held_by_another)
    if how == "afresh":
        with pytest.raises(ValueError, match=HOLDS_CHECKPOINTS):
            read(f"checkpoint_path={copied}")
    else:
        assert _step(read(*how.format(copied).split())) == 12, "the folder was read before it was locked"
    assert len(calls) == 2, "the run did not try the lock twice"
