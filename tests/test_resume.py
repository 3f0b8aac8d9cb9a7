"""What a resumed run takes from its checkpoint, what may change, and which checkpoints it keeps."""

import json
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from records.folder import Launched
from tests import runs
from tests.in_process import mistake, train_here
from tests.runs import assert_same_run, rows, settings, train, until, with_arguments


def test_a_finished_run_and_one_without_a_checkpoint_change_no_file(data: Path, copied: Path, log: Path) -> None:
    before = runs.contents(copied)
    (copied / "stopped").write_text("SIGUSR1\n")
    assert "is finished: it has done 12 of 12 steps" in runs.resume(data, copied, log).ok()
    assert runs.contents(copied) == before and not (copied / "stopped").exists()
    train_here(settings(data, copied, resume="auto", max_steps=10))
    assert (launched := Launched.read(copied)) is not None and (launched.last_step, launched.finished_at) == (12, 12)
    for weights in copied.glob("step_*/model.safetensors"):
        weights.unlink()
    before = runs.contents(copied)
    assert "none of the 7 checkpoints" in mistake(settings(data, copied, resume="auto"))
    assert runs.contents(copied) == before


def test_a_branch_starts_from_an_older_step(quiet: Path, tmp_path: Path) -> None:
    older, branch = quiet / "step_00000004", tmp_path / "branch"
    before = runs.contents(quiet)
    train_here([f"resume={older}", f"checkpoint_path={branch}"])
    assert_same_run(branch, quiet)  # the stored config wins over the defaults of the YAML files
    assert runs.contents(quiet) == before
    times, source = ([json.loads(row)["time_s"] for row in (run / "metrics.jsonl").open()] for run in (branch, quiet))
    assert times[0] == source[0] and times == sorted(times), "the clock goes on from the rows that are kept"


def test_a_branch_without_a_step_to_do_is_a_mistake(quiet: Path, tmp_path: Path) -> None:
    """The sentence that a run is finished would name a folder that does not exist."""
    branch, newest = tmp_path / "branch", quiet / "step_00000012"
    typed = [f"resume={quiet}", f"checkpoint_path={branch}", "lr=3e-5"]
    assert mistake(typed).startswith(f"{newest} has done 12 steps")
    assert not branch.exists(), "a refused branch left a folder"
    train_here([*typed, "max_steps=13", "epochs=100"])
    assert runs.latest(branch) == 13


def test_another_optimizer_or_dataset(data: Path, copied: Path, tmp_path: Path) -> None:
    def resumed(data: Path, **changes: object) -> list[str]:
        return settings(data, copied, resume="auto", **changes)

    runs.rewind(copied, 4)
    other = Path(shutil.copytree(data, tmp_path / "other"))
    inputs = np.load(other / "train" / "all__inputs.npy")
    inputs[0, 0] = 1 if inputs[0, 0] != 1 else 2
    np.save(other / "train" / "all__inputs.npy", inputs)
    assert "was trained on other data" in mistake(resumed(other))
    message = mistake([f"resume={copied}", "optim=muon"])
    assert "state of adam_atan2" in message and "give optim=adam_atan2" in message
    assert (copied / "latest").read_text() == "step_00000004\n"
    # allow_changed_data applies to this start only. Then the new data belong to the run.
    train_here(resumed(other, allow_changed_data="true", max_steps=6))
    assert "was trained on other data" in mistake(resumed(data, max_steps=8))
    train_here(resumed(other, max_steps=8))


# Every option that has a state, and a patience that ends the run before its last step. In `max`
# mode the falling loss is best at the first evaluation.
EVERYTHING = {
    "arch": "trm_mlp",
    "optim": "muon",
    "augment": "online",
    "ema": "true",
    "ema_rate": 0.5,
    "ema_start": 0.1,
    "grad_clip": 1.0,
    "arch.noise": "annealed",
    "arch.pseudo_target_steps": 20,
    "arch.H_cycles": 2,
    "arch.depth_curriculum": "[{until: 0.4, H_cycles: 1, L_cycles: 1}]",
    "early_stop_patience": 2,
    "best_metric": "lm_loss",
    "best_mode": "max",
    "eval_every_n_steps": 3,
}


@pytest.fixture(scope="module")
def quiet_everything(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("quiet_everything") / "run"
    train_here(settings(data, run, **EVERYTHING))
    assert runs.latest(run) == 9 and (run / "best").read_text() == "step_00000003\n", "the run must end by its patience"
    assert "rank_0000.safetensors:ema.puzzle_embedding.weight" in runs.tensors(run, 9)
    return run


def test_a_run_with_all_options_can_be_killed_stopped_and_resumed(
    data: Path, quiet_everything: Path, tmp_path: Path, log: Path
) -> None:
    """The kill comes in the shallow stage, and the stop when an evaluation was no new best."""
    run = tmp_path / "run"
    typed = settings(data, run, **EVERYTHING)
    running = runs.start(typed, log, hook=runs.slowly)
    until(lambda: runs.latest(run) >= 2, running)
    running.signal(signal.SIGKILL)
    running.wait().killed()
    assert runs.latest(run) < 6
    running = runs.start([*typed, "resume=auto"], log, hook=runs.slowly)
    until(lambda: runs.latest(run) >= 6, running)
    running.signal(signal.SIGTERM)
    assert "stopped by SIGTERM" in running.wait().ok()
    assert runs.latest(run) < 9
    assert "arch differs in num_states: 1 -> 2" in mistake([f"resume={run}", "arch.num_states=2"])
    train([f"resume={run}"], log).ok()
    assert_same_run(run, quiet_everything)
    assert not (run / "stopped").exists()


def test_a_stop_in_the_evaluation_that_exhausts_patience(
    data: Path, quiet_everything: Path, tmp_path: Path, log: Path
) -> None:
    """At the stop the average is swapped in. The checkpoint must have the weights."""
    run = tmp_path / "run"
    hook = with_arguments(runs.stopped_in_evaluation, 3, 0)
    train(settings(data, run, eval_batch_size=8, **EVERYTHING), log, hook=hook).ok()
    assert runs.latest(run) == 9 and rows(run)[-1]["step"] < 9
    assert "no better eval/all/lm_loss" in train([f"resume={run}"], log).ok()
    # The resumed run keeps its batch size of evaluation, which changes only the order of summation.
    assert [row["step"] for row in rows(run)] == [row["step"] for row in rows(quiet_everything)]
    assert_same_run(run, quiet_everything, metrics=False)
    assert not (run / "stopped").exists()


def test_an_average_that_is_switched_on_later_starts_from_the_weights(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train_here(settings(data, run, max_steps=4))
    train_here([f"resume={run}", "ema=true", "ema_rate=0.75", "max_steps=5", "lr=1e-2"])
    weights, end = runs.tensors(run, 4), runs.tensors(run, 5)
    averaged = [name for name in end if ":ema." in name]
    assert len(averaged) > 5
    for name in averaged:
        old, new = (tensors[f"model.safetensors:{name.split(':ema.')[1]}"] for tensors in (weights, end))
        torch.testing.assert_close(end[name], 0.75 * old + 0.25 * new)
    # After the average is switched off, the next checkpoint has none.
    train_here([f"resume={run}", "ema=false", "max_steps=6"])
    assert not [name for name in runs.tensors(run, 6) if ":ema." in name]


@pytest.mark.parametrize("changes", [{"eval_every_n_steps": None}, {"eval_max_share": 1e-9}])
def test_a_pending_evaluation_is_logged_after_a_resume_with_changes(
    data: Path, tmp_path: Path, log: Path, changes: dict[str, object]
) -> None:
    """The pending row is logged whether or not its evaluation is still due, and later rows too."""
    run = tmp_path / "run"
    train(settings(data, run, eval_batch_size=8), log, hook=with_arguments(runs.stopped_in_evaluation, 1, 0)).ok()
    pending = runs.latest(run)
    runs.resume(data, run, log, **changes).ok()
    logged = [row["step"] for row in rows(run)]
    assert pending in logged and logged[-1] > pending and len(logged) == len(set(logged))
    if "eval_max_share" in changes:  # in a new process the pending evaluation has no time limit
        (row,) = [row for row in rows(run) if row["step"] == pending]
        assert row["eval/all/num_examples"] == 20


def test_a_stop_while_data_are_read_takes_effect_after_the_first_step(data: Path, tmp_path: Path, log: Path) -> None:
    run = tmp_path / "run"
    train(settings(data, run), log, hook=runs.stopped_at_once).ok()
    assert runs.latest(run) == 1 and (run / "stopped").read_text() == "SIGTERM\n"


def test_a_run_tells_its_events_to_a_typed_command_alone(data: Path, tmp_path: Path) -> None:
    """A file of a stranger must not run one, and none is stored, as an address may be a secret."""
    recipe, run, told = tmp_path / "recipe.yaml", tmp_path / "run", tmp_path / "told"
    recipe.write_text(f"# @package _global_\non_event: touch {tmp_path}/sprung\n")
    assert "on_event stands in a file" in mistake([f"experiment={recipe}", *settings(data, run)])
    typed = f"on_event=cat >> {told}"
    train_here([*settings(data, run, max_steps=6), typed])
    stored = run / "config.yaml"
    assert "on_event" not in stored.read_text() and str(told) not in (run / "step_00000006/state.json").read_text()
    stored.write_text(stored.read_text() + f"on_event: touch {tmp_path}/sprung\n")
    train_here([f"resume={run}", "max_steps=8", typed.replace("=", "='", 1) + "'"])
    events = [json.loads(line) for line in told.read_text().replace("}{", "}\n{").splitlines()]
    assert [event["event"] for event in events] == ["record", "record", "ended", "ended"]
    assert {event["run"] for event in events} == {str(run)} and not (tmp_path / "sprung").exists()
