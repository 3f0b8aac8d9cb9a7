"""HRM and TRM in MLX compute what PyTorch and the published code compute."""

# K = segments, B = batch, S = tokens

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("mlx.core")

import mlx.core as mx

from models.act import ActSettings, initial_carry, segment
from models.base import RecursiveModel
from models.carry import Carry
from models.inference import trace
from models.losses import ACT_SUMS, METRICS
from models.metric_sums import OpenSums
from models.parallel.layout import Layout
from optim.build import AdamATan2Config, build_optimizers
from pretrain import train_step
from records.checkpoint.format import Progress
from sharing.apple.model import Model, run_of, write_mlx
from sharing.apple.training import Rates, Trainer
from sharing.exported import ExportedPuzzles, Source, open_model
from sharing.segment.function import SegmentFunction
from tests import parity
from tests.models.helpers import NUM_PUZZLES, SEQ_LEN, VOCAB_SIZE, random_batch, small_model
from tests.recordings import TOLERANCE, Report
from training.number_watch import NumberWatch
from training.state import TrainState
from training.step import StepSettings
from utils.errors import UserError
from utils.ranks.world import World

pytestmark = [pytest.mark.export]
LARGER = Path(__file__).parents[2].parent / "shared" / "reference"
SIZES = {"seq_len": SEQ_LEN, "vocab_size": VOCAB_SIZE, "num_puzzle_identifiers": NUM_PUZZLES}
# Every way to mix tokens and to tell positions, with and without puzzle rows.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "hrm": ("hrm", {"puzzle_emb_len": 3}),
    "hrm_2d": ("hrm", {"pos_encodings": "rope_2d", "H_layers": 2, "puzzle_emb_ndim": 0}),
    "hrm_tokens": ("hrm", {"mlp_t": True, "pos_encodings": "learned"}),
    "trm": ("trm", {"pos_encodings": "learned", "L_layers": 2, "puzzle_emb_ndim": 20}),
    "trm_tokens": ("trm", {"mlp_t": True, "pos_encodings": "none"}),
    "trm_continues": ("trm", {"no_ACT_continue": False, "pos_encodings": "none", "backprop": 4}),
}


def source_of(model: RecursiveModel, **sizes: int) -> Source:
    described = ExportedPuzzles(format=1, arch=model.config, data=[], run="a/b", step=0, **(sizes or SIZES))
    return Source(model.state_dict(), described)


def small(case: str, **changes: Any) -> RecursiveModel:
    name, options = CASES[case]
    return small_model(name, **{"halt_max_steps": 3, "width_multiple": 16, **options, **changes})


def close(ours: Any, theirs: torch.Tensor) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs.detach().numpy(), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_segments_answer_as_pytorch_does(case: str) -> None:
    model, batch = small(case), random_batch(4)
    apple = Model(source_of(model))
    inputs = batch["inputs"].numpy(), batch["puzzle_identifiers"].numpy()
    carry = initial_carry(model, batch)
    outputs = list(apple.segments(*inputs))
    assert len(outputs) == 3
    for state, logits_BSV, q_halt_B, q_continue_B in outputs:
        with torch.no_grad():
            carry, expected = segment(model, carry, batch)
        close(logits_BSV, expected.logits_BSV)
        close(q_halt_B, expected.q_halt_B)
        close(q_continue_B, expected.q_continue_B)
        for name, z_BTD in state.items():
            close(z_BTD, carry.state[name])
    found, answers = apple.solve(*inputs), trace(model, batch)
    np.testing.assert_array_equal(found.predictions_KBS, answers.predictions_TNS)
    np.testing.assert_array_equal(found.settled_at_B, answers.settled_at_N)
    np.testing.assert_array_equal(found.settled_B, answers.settled_N)
    close(found.q_halt_KB, answers.q_halt_TN)


RATES = Rates(lr=1e-2, puzzle_emb_lr=1e-2, weight_decay=0.1, puzzle_emb_weight_decay=0.1)


def torch_state(model: RecursiveModel, rates: Rates, carry: Carry, world: World) -> TrainState:
    betas = rates.beta1, rates.beta2
    config = AdamATan2Config(name="adam_atan2")
    optimizers = build_optimizers(
        model, model.block_weights(), config, lr=rates.lr, betas=betas, weight_decay=rates.weight_decay
    )
    sums, watch = OpenSums(ACT_SUMS, world), NumberWatch(ACT_SUMS, world)
    return TrainState(Layout(model, world), optimizers, None, None, carry, sums, watch, Progress())


@pytest.fixture
def without_compilation() -> Iterator[None]:
    """Save the time that MLX takes on Linux to have its kernels compiled by g++."""
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.usefixtures("without_compilation")
@pytest.mark.parametrize("case", CASES)
def test_training_steps_are_those_of_pytorch(case: str) -> None:
    is_softmax = case in ("hrm", "trm_tokens")
    loss_type = "softmax_cross_entropy" if is_softmax else "stablemax_cross_entropy"
    loss = {"loss_type": loss_type, "label_smoothing": 0.1 * is_softmax, "halt_weight": 0.7}
    model, world = small(case, loss=loss), World.single()
    trainer = Trainer(Model(source_of(model)), RATES, batch_size=4)
    state = torch_state(model, RATES, initial_carry(model, random_batch(4)), world)
    for number in range(1, 6):
        batch = random_batch(4, seed=number)
        batch["labels"][0], batch["labels"][1, 1:] = -100, -100  # no label, and one that may be right
        minimum_B = torch.tensor([0, 0, 2, 3], dtype=torch.int32)
        settings = StepSettings(
            objective=ActSettings(model.config.depth, global_batch_size=4, min_halt_steps_B=minimum_B),
            lr_factor=number / 5,
            puzzle_emb_lr=RATES.puzzle_emb_lr * number / 5,
            puzzle_emb_weight_decay=RATES.puzzle_emb_weight_decay,
            grad_clip=None,
            ema_rate=0.0,
        )
        result = train_step(state, batch, settings, world)
        found = trainer.step({name: tensor.numpy() for name, tensor in batch.items()}, number / 5, minimum_B.numpy())
        assert state.carry is not None
        np.testing.assert_array_equal(trainer.carry["halted"], state.carry.halted_B)
        close(found["grad_norm"], result.grad_norm)
        close(found["logits"], result.outputs[0].logits_BSV)
        for name in ("lm_loss", "q_halt_loss", "q_continue_loss"):
            close(found[name], result.sums[METRICS.index(name)])
    weights = model.state_dict()
    for name, weight in trainer.model.weights.items():
        close(weight, weights[name])
    if trainer.model.table_PE is not None:
        close(trainer.model.table_PE, weights["puzzle_embedding.weight"])


RECORDINGS = [
    path
    for folder in (parity.REFERENCE, LARGER)
    for path in parity.recordings_in(folder)
    if path.name.startswith(("hrm_", "trm_"))
]
if not LARGER.is_dir():
    skipped = pytest.mark.skip(reason="there are no larger recordings beside this checkout")
    RECORDINGS.append(pytest.param(LARGER, marks=skipped))  # type: ignore[arg-type]


def tensor(array: Any) -> torch.Tensor:
    return torch.tensor(np.asarray(array))


@pytest.mark.parametrize("folder", RECORDINGS, ids=lambda path: f"{path.parent.parent.name}-{path.name}")
def test_recordings_of_published_code_are_reproduced(
    folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Compare what MLX computes. The other metrics follow from the logits and Q values."""
    if folder.parent == LARGER:
        request.getfixturevalue("without_compilation")
    recording = parity.read_recording(folder)
    report, sizes = Report(dict(recording.recorded), ()), dict(recording.sizes)
    batch_size = sizes.pop("batch_size")
    described = ExportedPuzzles(format=1, arch=recording.config, data=[], run="", step=0, **sizes)
    trainer = Trainer(Model(Source(recording.initial, described)), Rates(**recording.optim), batch_size)
    for t, (batch, multiplier) in enumerate(zip(recording.batches, recording.lr_multipliers, strict=True)):
        found = trainer.step({name: each.numpy() for name, each in batch.items()}, multiplier)
        for ours, theirs in (("logits", "logits"), ("q_halt", "q_halt_logits"), ("q_continue", "q_continue_logits")):
            report.compare(ours, f"train.{t:02d}.out.{theirs}", tensor(found[ours]))
        if recording.config.has_target_pass:
            report.compare("target", f"train.{t:02d}.out.target_q_continue", tensor(found["target"]))
        for name in ("halted", "steps"):
            report.compare("halting", f"train.{t:02d}.carry.{name}", tensor(trainer.carry[name]), exact=True)
        report.compare("loss", f"train[{t}].loss", tensor(found["loss"]).item() * batch_size)
        for name in ("grad_norm", "lm_loss", "q_halt_loss"):
            report.compare(name, f"train[{t}].{name}", tensor(found[name]).item())
    model, batch = trainer.model, recording.batches[0]
    model.save(tmp_path / "final.safetensors")
    for name, weight in open_model(str(tmp_path / "final.safetensors")).read_weights().items():
        report.compare("final weights", f"final.{name}", weight)
    *_, (_, logits_BSV, q_halt_B, _) = model.segments(batch["inputs"].numpy(), batch["puzzle_identifiers"].numpy())
    report.compare("evaluation", "eval.out.logits", tensor(logits_BSV))
    report.compare("evaluation", "eval.out.q_halt_logits", tensor(q_halt_B))
    assert not [name for name in report.recorded if name.startswith("final.")]
    report.quantities = tuple(report.errors)
    report.print(folder)
    assert not report.failures


REFUSED = [
    ("trm", {"mlp": "conv_swiglu"}),
    ("trm", {"mlp": "normalized_swiglu"}),
    ("trm", {"conv_2d": True, "puzzle_emb_ndim": 0}),
    ("hrm", {"num_registers": 1}),
    ("hrm", {"num_states": 2}),
    ("hrm", {"noise": "fresh"}),
]


@pytest.mark.parametrize(("name", "options"), REFUSED)
def test_what_is_not_computed_is_refused_by_name(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    source = source_of(small_model(name, **options))
    with pytest.raises(UserError, match=f"arch.{next(iter(options))}=") as refused:
        write_mlx(source, tmp_path / "model.safetensors")
    assert "\n" not in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_other_models_and_tokens_are_refused(tmp_path: Path) -> None:
    for name in ("urm", "transformer"):
        with pytest.raises(UserError, match=f"arch={name}"):
            Model(source_of(small_model(name)))
    source = source_of(small("trm"))
    assert isinstance(source.model, ExportedPuzzles)
    for wrong in (replace(source, model=None), source_of(small("trm", L_layers=1), **SIZES | {"seq_len": 8})):
        with pytest.raises(UserError):
            Model(wrong)
    model, whole = Model(source), np.zeros((2, SEQ_LEN))
    for tokens in (whole[:, 1:], whole[0, 0], whole[None], whole - 1, whole + VOCAB_SIZE, whole + np.nan):
        with pytest.raises(UserError):
            model.solve(tokens)
    with pytest.raises(UserError):
        model.solve(whole, [0, NUM_PUZZLES])
    with pytest.raises(UserError, match="depth_curriculum"):
        stage = {"until": 0.5, "H_cycles": 1, "L_cycles": 1}
        Trainer(Model(source_of(small("trm", depth_curriculum=[stage]))), RATES, 4)


@pytest.mark.usefixtures("without_compilation")
@pytest.mark.parametrize("case", ["hrm", "hrm_2d", "trm_tokens"])
def test_a_written_folder_is_read_by_mlx_and_by_this_project(case: str, tmp_path: Path) -> None:
    model, batch = small(case), random_batch(3)
    source = source_of(model)
    file = tmp_path / "model.safetensors"
    apple = write_mlx(source, file)
    arrays = mx.load(str(file))
    assert isinstance(arrays, dict)
    assert arrays.keys() == source.weights.keys()
    for name, weight in source.weights.items():
        np.testing.assert_array_equal(arrays[name], weight)
    assert open_model(str(file)).require_description() == apple.described

    function = SegmentFunction(model)
    state = model.reset(model.initial_state(3, torch.device("cpu")), torch.ones(3, dtype=torch.bool))
    given = {"tokens": batch["inputs"], "puzzles": batch["puzzle_identifiers"], **state}
    inputs = [given[name] for name in function.names]
    with torch.no_grad():
        for ours, theirs in zip(run_of(apple)(inputs), function(*inputs), strict=True):
            close(ours, theirs)

    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(UserError):
        Model.from_file(tmp_path)
