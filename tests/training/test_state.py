"""A checkpoint saves and restores everything that a step changes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from models.losses import METRICS
from pretrain import build_state
from records.checkpoint.format import Progress
from records.checkpoint.reader import Checkpoint
from records.checkpoint.writer import Checkpointer
from tests.in_process import SINGLE, Begun, begin
from tests.records.checkpoint.helpers import PROGRESS, fix_manifest
from tests.runs import settings
from training.resume import Start
from training.state import TrainState, require_same_run
from utils.errors import UserError


def _tensors(state: TrainState) -> dict[str, torch.Tensor]:
    assert state.carry is not None
    tensors = state.replicated_tensors() | state.carry.tensors() | state.sums.tensors() | state.watch.tensors()
    return {name: tensor.clone() for name, tensor in tensors.items()}


def _scramble(state: TrainState) -> None:
    """Give every tensor values that no fresh state has."""
    generator = torch.Generator().manual_seed(0)
    assert state.carry is not None
    tensors = state.replicated_tensors() | state.carry.tensors()
    with torch.no_grad():
        for tensor in tensors.values():
            if tensor.dtype == torch.bool:
                tensor.logical_not_()
            else:
                tensor.add_(torch.randint(1, 3, tensor.shape, generator=generator).to(tensor.dtype))
        state.sums.add(torch.arange(1.0, 1 + len(METRICS), dtype=torch.float64), torch.tensor(3.0))
        for step in range(1, 4):
            state.watch.add(step, 16, torch.full((len(METRICS),), float(step), dtype=torch.float64), torch.tensor(1.0))
    state.watch.require_no_bad_step(lambda: "nothing")


def _saved(begun: Begun, run: Path) -> Checkpoint:
    run.mkdir(exist_ok=True)
    checkpointer = Checkpointer(run, SINGLE, None)
    checkpointer.save(begun.state.snapshot(begun.start.config, begun.data, SINGLE), is_best=False)
    checkpointer.wait()
    return Checkpoint.open(run / f"step_{begun.state.progress.step:08d}")


@pytest.fixture
def begun(data: Path, tmp_path: Path) -> Begun:
    """Return a run with an average, a loss scale and a watch on its loss, amid training."""
    options = {"ema": "true", "loss_spike": 5, "arch__forward_dtype": "float16", "best_mode": "max"}
    begun = begin(settings(data, tmp_path / "run", **options))
    _scramble(begun.state)
    begun.state.progress = PROGRESS.model_copy(deep=True)
    return begun


def _resumed(begun: Begun, checkpoint: Checkpoint, **changes: object) -> TrainState:
    return build_state(Start(begun.start.config.model_copy(update=changes), checkpoint), begun.data, SINGLE)


def test_a_restored_state_equals_the_saved_state(begun: Begun, tmp_path: Path) -> None:
    """All tensors are equal bit for bit, and all numbers of the progress are equal."""
    same = [name for name in Progress.model_fields if getattr(PROGRESS, name) == getattr(Progress(), name)]
    assert not same, f"this test must give {same} values other than the defaults"
    expected, fresh = _tensors(begun.state), _tensors(build_state(begun.start, begun.data, SINGLE))
    assert not [name for name in fresh if torch.equal(fresh[name], expected[name])], "_scramble left a tensor unchanged"
    another = _tensors(build_state(Start(begun.start.config.model_copy(update={"seed": 1})), begun.data, SINGLE))
    assert not torch.equal(fresh["lm_head.weight"], another["lm_head.weight"]), "the seed decides the first weights"
    resumed = _resumed(begun, _saved(begun, tmp_path / "run"))
    found = _tensors(resumed)
    assert found.keys() == expected.keys() and {"open_sums", "losses"} < found.keys()
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]
    assert resumed.progress == PROGRESS


def test_tensors_of_older_versions_are_ignored(begun: Begun, tmp_path: Path) -> None:
    """Runs with gradient compression wrote the error of each rank."""
    folder = _saved(begun, tmp_path / "run").path
    file = folder / "state" / "rank_0000.safetensors"
    with safe_open(file, framework="pt") as shard:
        header = shard.metadata()
    offsets = json.loads(header["DCP_SHARDING_INFO"]) | {"rank_0000_of_0001.error": {"saved_offsets": [0]}}
    header["DCP_SHARDING_INFO"] = json.dumps(offsets)
    save_file(load_file(file) | {"rank_0000_of_0001.error": torch.ones(3)}, file, header)
    fix_manifest(folder)
    checkpoint = Checkpoint.open(folder)
    assert checkpoint.sizes("rank_0000_of_0001"), "the tensor is not in the checkpoint"
    found, expected = _tensors(_resumed(begun, checkpoint)), _tensors(begun.state)
    assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def test_best_of_another_metric_is_forgotten(begun: Begun, tmp_path: Path) -> None:
    checkpoint = _saved(begun, tmp_path / "run")
    for changes in ({"best_metric": "lm_loss"}, {"best_mode": "min"}):
        progress = _resumed(begun, checkpoint, **changes).progress
        assert progress == PROGRESS.model_copy(update={"best": None, "evaluations_since_best": 0})


def test_a_branch_has_its_own_best_and_wandb_run(begun: Begun, tmp_path: Path) -> None:
    progress = _resumed(begun, _saved(begun, tmp_path / "run"), checkpoint_path=str(tmp_path / "branch")).progress
    assert progress.wandb_run_id not in ("", PROGRESS.wandb_run_id)
    assert progress == PROGRESS.of_branch(progress.wandb_run_id)


def test_with_another_batch_size_all_slots_are_fresh(begun: Begun, tmp_path: Path) -> None:
    checkpoint = _saved(begun, tmp_path / "run")
    resumed = _resumed(begun, checkpoint, global_batch_size=8)
    fresh = build_state(Start(begun.start.config.model_copy(update={"global_batch_size": 8})), begun.data, SINGLE)
    assert fresh.carry is not None and resumed.carry is not None
    expected = fresh.carry.tensors()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in resumed.carry.tensors().items())
    assert resumed.progress == PROGRESS


def test_the_average_replaces_the_weights_inside_the_context(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that keeps copies is told of each of the two swaps."""
    state, seen = begun.state, list[bool]()
    assert state.ema is not None
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    average = {name: tensor.clone() for name, tensor in state.ema.tensors().items()}

    def has(expected: dict[str, torch.Tensor]) -> bool:
        inside = state.model.state_dict()
        return all(torch.equal(inside[name], tensor) for name, tensor in expected.items())

    monkeypatch.setattr(state.layout, "values_changed", lambda: seen.append(has(average)))
    with pytest.raises(KeyError), state.averaged_weights():
        assert has(average) and not has(before) and seen == [True]
        raise KeyError
    assert has(before) and seen == [True, False]


def test_a_host_copy_fits_only_its_own_place_and_model(begun: Begun, data: Path, tmp_path: Path) -> None:
    """One rank has whole tensors under every strategy, so that shapes do not tell the layout."""
    config, state = begun.start.config, begun.state
    sharded = config.model_copy(update={"parallel": config.parallel.model_copy(update={"name": "fsdp"})})
    fresh = build_state(begun.start, begun.data, SINGLE)
    before, copy = _tensors(fresh), state.host_copy(config, SINGLE)
    for wrong, message in (
        (state.host_copy(sharded, SINGLE), "rank 0 of 1 with parallel=fsdp, here is rank 0 of 1 with parallel=ddp"),
        (replace(copy, place=(1, 2, "ddp")), "rank 1 of 2 with parallel=ddp"),
        (replace(copy, tensors=copy.tensors | {"model.H_init": torch.ones(3)}), "another model.H_init"),
    ):
        with pytest.raises(UserError, match=message):
            fresh.take_host_copy(wrong, config, SINGLE)
    assert all(torch.equal(tensor, before[name]) for name, tensor in _tensors(fresh).items())
    of_folder = {"best", "evaluations_since_best", "failed_saves", "pending_row", "wandb_run_id"}
    of_folder |= {"spent_s", "spent_until"}
    own = fresh.progress.model_dump(include=of_folder)
    fresh.take_host_copy(copy, config, SINGLE)
    expected = _tensors(state)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in _tensors(fresh).items())
    assert fresh.progress == PROGRESS.model_copy(update=own), "what describes the folder of the run stays"


def test_a_run_resumes_only_with_its_own_data(begun: Begun, tmp_path: Path) -> None:
    checkpoint, config, data = _saved(begun, tmp_path / "run"), begun.start.config, begun.data
    assert require_same_run(checkpoint, config, data) == []
    train_only = {"train": data.fingerprint["train"]}
    data.fingerprint = train_only  # a run without evaluations opens no test split
    assert require_same_run(checkpoint, config, data) == []
    data.fingerprint = train_only | {"test": "another"}
    with pytest.raises(ValueError, match=r"was trained on other data than .* holds now \(test changed\); give the"):
        require_same_run(checkpoint, config, data)
    allowed = config.model_copy(update={"allow_changed_data": True})
    (line,) = require_same_run(checkpoint, allowed, data)
    assert line == f"test data are others than before: {checkpoint.state.fingerprint['test'][:12]} -> another"


def test_a_run_resumes_only_with_its_own_initial_weights(begun: Begun, tmp_path: Path) -> None:
    """A resumed run keeps the stored key, although it takes its weights from the checkpoint."""
    for key in ("init_from", "load_checkpoint"):
        config = begun.start.config.model_copy(update={key: "weights.pt"})
        checkpoint = _saved(replace(begun, start=Start(config)), tmp_path / key)
        assert require_same_run(checkpoint, config, begun.data) == []
        with pytest.raises(ValueError, match=r"init_from=others\.pt is where a run begins, but .*step_00000007"):
            require_same_run(checkpoint, config.model_copy(update={key: "others.pt"}), begun.data)
