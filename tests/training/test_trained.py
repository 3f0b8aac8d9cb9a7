"""Start from trained weights, and train only a part of them."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dataset.schema import Split
from models import ArchConfig
from records.checkpoint.reader import Checkpoint
from records.lock import RunLock
from sharing import export
from solve import Solver
from tests import runs
from tests.in_process import SINGLE, Tensors, begin, changed, mistake, train_here, weights_of, with_identifiers
from tests.runs import rows, settings, train
from training.data import Sizes
from training.resume import Start, prepare, read_start
from training.trained import TrainedConfig, open_trained
from utils.command_line import validate
from utils.ranks.launch import Launch
from view import at_named_step, parse_settings

# A TRM that halts by q_halt. The published code knows all its options except the moving average.
TRAINED = {"arch": "trm", "ema": "true", "ema_rate": 0.8, "max_steps": 4, "eval_every_n_steps": 4}
PUZZLES = "puzzle_embedding.weight"


def _typed(data: Path, run: Path, **changes: object) -> list[str]:
    return settings(data, run, **TRAINED | changes)


def _start(typed: list[str]) -> Start:
    """Return how the program would start with this command line."""
    with RunLock() as lock:
        return read_start(typed, lock, SINGLE.launch)


@pytest.fixture(scope="module")
def puzzles(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a dataset with five puzzle identifiers, so that table rows can differ."""
    return with_identifiers(data, tmp_path_factory.mktemp("puzzles") / "five", 5)


@pytest.fixture(scope="module")
def trained(puzzles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("trained") / "run"
    train_here(_typed(puzzles, run))
    return run


@pytest.fixture(scope="module")
def raw(trained: Path) -> Tensors:
    return load_file(trained / "step_00000004" / "model.safetensors")


@pytest.fixture(scope="module")
def average(trained: Path, raw: Tensors) -> Tensors:
    """Return the weights with which the run was evaluated."""
    averaged = Checkpoint.open(trained / "step_00000004").load("ema")
    assert changed({name: raw[name] for name in averaged}, averaged) == averaged.keys()
    return raw | averaged


@pytest.mark.parametrize("kind", ["run", "best", "our file", "published"])
def test_a_run_starts_with_exactly_the_given_weights(
    puzzles: Path, trained: Path, raw: Tensors, average: Tensors, tmp_path: Path, kind: str
) -> None:
    """A run, step or export gives the moving average. A file of weights gives its own contents."""
    published = tmp_path / "published.pt"
    ours = {"run": trained, "best": trained / "best", "our file": trained / "step_00000004" / "model.safetensors"}
    source = ours.get(kind, published)
    if source == published:
        assert export.main(["--format", "hrm", str(trained), "-o", str(published), "--compiled"]) == 0
        assert all(name.startswith("_orig_mod.model.inner.") for name in torch.load(published, weights_only=True))
    begun = begin(_typed(puzzles, tmp_path / "run", init_from=source, seed=9))
    expected = raw if kind == "our file" else average
    assert not changed(expected, weights_of(begun.state))
    assert begun.state.progress.step == 0 and begun.state.progress.best is None
    assert begun.state.ema is not None
    own_average = begun.state.ema.tensors()
    assert own_average and all(torch.equal(tensor, expected[name]) for name, tensor in own_average.items())


@pytest.mark.parametrize("kind", ["an exported file", "a run", "a step"])
def test_a_run_has_the_architecture_of_its_first_weights(
    puzzles: Path, trained: Path, tmp_path: Path, kind: str
) -> None:
    """Only if the command line chooses none. A damaged newest step does not hide it."""
    file, damaged = tmp_path / "model.safetensors", tmp_path / "damaged"
    assert export.main([str(trained), "-o", str(file)]) == 0
    shutil.copytree(trained, damaged)
    shutil.copytree(trained / "step_00000004", damaged / "step_00000009")
    (damaged / "step_00000009" / "state.json").write_text("{")
    source = {"an exported file": file, "a run": damaged, "a step": trained / "best"}[kind]
    key = "load_checkpoint" if kind == "a step" else "init_from"
    typed = [f"data_path={puzzles}", f"{key}={source}", f"checkpoint_path={tmp_path / 'run'}"]

    def arch(*more: str) -> ArchConfig:
        return _start([*typed, *more]).config.arch

    of_run = open_trained(trained, SINGLE).arch
    assert arch() == of_run and of_run.name == "trm"
    assert arch("arch=hrm").name == "hrm"
    assert arch("experiment=sudoku_extreme_1k") == of_run, "this experiment chooses no architecture"
    assert arch("experiment=demo").hidden_size != of_run.hidden_size, "this one does"
    for option, changes in (
        ("arch.halt_exploration_prob=0.25", {"halt_exploration_prob": 0.25}),
        ("arch.no_ACT_continue=false", {"no_ACT_continue": False}),  # an option of TRM, not of HRM
        ("debug=tiny", {"H_cycles": 1, "L_cycles": 1}),
    ):
        changed_arch = of_run.model_copy(update=changes)
        assert arch(option) == changed_arch != of_run, f"{option} must leave all other options as they are"


def test_a_restart_keeps_its_architecture(puzzles: Path, trained: Path, tmp_path: Path) -> None:
    """The run is killed before its first checkpoint. Its config.yaml holds typed options."""
    run = tmp_path / "run"
    typed = [f"data_path={puzzles}", f"init_from={trained}", f"checkpoint_path={run}"]
    first = _start([*typed, "arch.halt_max_steps=2"])
    assert first.config.puzzle_arch.halt_max_steps == 2
    with RunLock() as lock:
        prepare(first, lock, Launch())
    again = _start(["resume=auto", f"checkpoint_path={run}"])
    assert again.config.arch == first.config.arch, "nothing was typed that changes the architecture"
    assert not [note for note in again.notes if "changed" in note]


def test_a_run_with_rate_0_saves_the_loaded_weights(
    puzzles: Path, trained: Path, average: Tensors, tmp_path: Path
) -> None:
    """Two ranks train, but only one of them reads the file."""
    still = {"lr": 0, "puzzle_emb_lr": 0, "max_steps": 1}
    train(_typed(puzzles, tmp_path / "run", init_from=trained, **still), tmp_path / "log", ranks=2).ok()
    assert not changed(average, load_file(tmp_path / "run" / "step_00000001" / "model.safetensors"))
    (row,) = [row for row in rows(tmp_path / "run") if "eval/all/lm_loss" in row]
    for name in ("eval/all/lm_loss", "eval/all/exact_accuracy"):
        assert row[name] == pytest.approx(rows(trained)[-1][name], abs=1e-6)


def test_a_resumed_run_keeps_its_own_weights(puzzles: Path, average: Tensors, tmp_path: Path) -> None:
    """The config still names the file of initial weights, which is gone at the resume."""
    source = tmp_path / "source.pt"
    torch.save(average, source)
    train_here(_typed(puzzles, tmp_path / "whole", init_from=source, max_steps=6))
    train_here(_typed(puzzles, tmp_path / "run", init_from=source, max_steps=6, checkpoint_every_n_steps=2))
    runs.rewind(tmp_path / "run", 2)
    source.unlink()
    train_here([f"resume={tmp_path / 'run'}"])
    runs.assert_same_run(tmp_path / "run", tmp_path / "whole", metrics=False)


def test_every_command_takes_a_step_by_its_name(trained: Path, tmp_path: Path) -> None:
    named, step = trained / "best", trained / "step_00000004"
    config = {"checkpoint": str(named), "arch": None, "puzzle_table": None, "data_path": None}
    assert validate(TrainedConfig, config).source == "run"
    assert export.main(["--format", "hrm", str(named), "-o", str(tmp_path / "weights")]) == 0
    assert Solver.from_checkpoint(named, device="cpu").trained.name == str(step)
    settings = at_named_step(parse_settings([str(named)]))
    assert (settings.paths, settings.step) == ([trained], 4)


def test_puzzle_table_chooses_the_rows_for_other_puzzles(
    data: Path, trained: Path, average: Tensors, tmp_path: Path
) -> None:
    more_puzzles, own_KE = with_identifiers(data, tmp_path / "eight", 8), average[PUZZLES]
    assert own_KE.shape == (5, 32) and own_KE.abs().sum(1).gt(0).all()
    weights = weights_of(begin(_typed(more_puzzles, tmp_path / "run", init_from=trained, puzzle_table="mean")).state)
    torch.testing.assert_close(weights.pop(PUZZLES), own_KE.mean(0).expand(8, -1))
    assert not changed({name: tensor for name, tensor in average.items() if name != PUZZLES}, weights)


def test_a_dataset_of_the_run_keeps_its_rows_however_its_path_is_typed(
    data: Path, puzzles: Path, trained: Path
) -> None:
    """The run numbers its puzzles over both datasets."""
    opened = open_trained(trained, SINGLE)
    assert opened.config is not None
    both = opened.config.model_copy(update={"data_paths": [str(data), str(puzzles)]})
    opened = replace(opened, config=both, sizes=Sizes(16, 6, 1 + 5))
    for typed in (str(puzzles), os.path.relpath(puzzles)):
        _, split = opened.with_test_split(typed, SINGLE)
        assert isinstance(split, Split)
        (of_set,) = split.sets.values()
        assert set(of_set.puzzle_identifiers) == {1, 2, 3, 4, 5}, typed


def test_wrong_sources_are_refused(puzzles: Path, trained: Path, tmp_path: Path) -> None:
    run, gone, file = tmp_path / "run", tmp_path / "gone.pt", trained / "step_00000004" / "model.safetensors"
    for source, arch, expected in (
        (gone, "trm", f"there is no checkpoint at {gone}; give the folder of a run or"),
        (file, "hrm", "doesn't fit the model: missing H_level"),
        ("'hf://owner'", "trm", "hf://owner names no file on the Hugging Face Hub"),
    ):
        assert expected in mistake(_typed(puzzles, run, init_from=source, arch=arch))
    assert not run.exists()


@pytest.mark.parametrize("optim", ["adam_atan2", "muon"])
@pytest.mark.parametrize("frozen", ["freeze=blocks", "freeze=puzzle_table", "freeze_weights=true"])
def test_frozen_tensors_keep_every_bit_and_all_others_change(
    puzzles: Path, trained: Path, tmp_path: Path, optim: str, frozen: str
) -> None:
    """Weight decay must not change frozen tensors either."""
    decays = {"weight_decay": 1.0, "puzzle_emb_weight_decay": 1.0, "grad_clip": 1.0}
    few = {"optim": optim, "max_steps": 3, "eval_every_n_steps": None}
    begun = begin([*_typed(puzzles, tmp_path / "run", init_from=trained, **decays | few), frozen])
    before, tensors = weights_of(begun.state), begun.state.model.trained_tensors()
    of_blocks = {id(weight) for weight in begun.state.model.block_weights()}
    blocks = {name for name, tensor in tensors.items() if id(tensor) in of_blocks}
    assert blocks and not {PUZZLES, "lm_head.weight", "embed_tokens.weight"} & blocks
    expected = {
        "freeze=blocks": tensors.keys() - blocks,
        "freeze=puzzle_table": tensors.keys() - {PUZZLES},
        "freeze_weights=true": {PUZZLES},
    }[frozen]
    assert changed(before, weights_of(begun.fit())) == expected


def test_runs_with_frozen_weights_resume(puzzles: Path, trained: Path, tmp_path: Path) -> None:
    """Frozen weights have no optimizer state. In one case that is all weights."""
    for name, changes in (("table", {"freeze_weights": "true"}), ("heads", {"freeze": "blocks", "optim": "muon"})):
        whole, run = tmp_path / f"{name}_whole", tmp_path / name
        for folder in (whole, run):
            train_here(_typed(puzzles, folder, init_from=trained, **{"checkpoint_every_n_steps": 2} | changes))
        runs.rewind(run, 2)
        train_here([f"resume={run}"])
        runs.assert_same_run(run, whole, metrics=False)


def test_a_run_saves_and_resumes_several_files(puzzles: Path, tmp_path: Path) -> None:
    few = {"max_steps": 2, "checkpoint_every_n_steps": 1, "checkpoint_file_gb": 1e-5}
    ended = train_here(_typed(puzzles, tmp_path / "run", **few))
    step = tmp_path / "run" / "step_00000002"
    assert not (step / "model.safetensors").exists() and len(list(step.glob("model-*.safetensors"))) > 2
    again = train_here([f"resume={step.with_name('step_00000001')}", f"checkpoint_path={tmp_path / 'branch'}"])
    assert not changed(weights_of(ended), weights_of(again))
