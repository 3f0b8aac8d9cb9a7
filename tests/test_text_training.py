"""Models of text train, resume and evaluate in the same loop as models of puzzles."""

import math
from pathlib import Path

import pytest
import torch

from models import ARCHS
from models.text.objective import TextBatch
from tests import runs
from tests.in_process import SINGLE, begin, changed, mistake, train_here, weights_of
from tests.text_runs import write_run
from training.plan import Plan
from training.step import StepSettings
from utils.config import name_of

TEXT_ARCHS = sorted(name_of(arch) for arch in ARCHS if arch.kind == "text")


def _typed(data: Path, run: Path, *more: str) -> list[str]:
    fixed = ["debug=tiny_text", "device=cpu", "max_steps=4", "global_batch_size=512", "eval_every_n_steps=null"]
    return [*fixed, "epochs=100", "best_metric=null", f"data_path={data}", f"checkpoint_path={run}", *more]


@pytest.mark.parametrize("arch", TEXT_ARCHS)
def test_every_architecture_trains_and_resumes_bit_for_bit(text: Path, tmp_path: Path, arch: str) -> None:
    """Losses are finite, weights with a gradient change, and a checkpoint holds also open sums."""
    often = ["log_interval=3", "checkpoint_every_n_steps=2"]
    typed = _typed(text, tmp_path / "run", f"arch={arch}", "ema=true", *often)
    begun = begin(typed)
    before = weights_of(begun.state)
    state = begun.fit()
    rows = runs.rows(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 3]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(row["train/loss"] > 0 and row["train/grad_norm"] > 0 for row in rows)
    assert set(state.model.trained_tensors()) - changed(before, weights_of(state)) <= state.model.may_lack_gradient()

    resumed = tmp_path / "resumed"
    train_here([f"resume={tmp_path / 'run' / 'step_00000002'}", f"checkpoint_path={resumed}"])
    assert not changed(runs.tensors(tmp_path / "run", 4), runs.tensors(resumed, 4))
    assert [row["train/loss"] for row in runs.rows(resumed)] == [row["train/loss"] for row in rows]


def test_a_resumed_run_may_take_more_rows_but_no_other_rows(text: Path, tmp_path: Path) -> None:
    train_here(_typed(text, tmp_path / "run", "arch=gpt", "checkpoint_every_n_steps=2"))
    resume = [f"resume={tmp_path / 'run' / 'step_00000002'}", "global_batch_size=1024"]
    state = train_here([*resume, f"checkpoint_path={tmp_path / 'more'}", "rows_per_step=8"])
    assert state.progress.draws == 2 * 4 + 2 * 8
    said = mistake([*resume, f"checkpoint_path={tmp_path / 'other'}"])
    assert "rows of 128 tokens" in said and said.endswith("change both keys alike, such as global_batch_size=512")


def test_microbatches_do_not_change_the_step(text: Path, tmp_path: Path) -> None:
    losses = []
    for parts in (1, 2, 4):
        train_here(_typed(text, tmp_path / str(parts), "arch=hrm_text", f"grad_accumulation={parts}"))
        losses.append([row["train/loss"] for row in runs.rows(tmp_path / str(parts))])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[2] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("target_only", [True, False])
def test_the_loss_is_the_mean_over_the_labels_of_the_step(text: Path, tmp_path: Path, target_only: bool) -> None:
    begun = begin(_typed(text, tmp_path / "run", "arch=gpt", "grad_accumulation=2", f"target_only={target_only}"))
    config, train = begun.start.config, begun.data.train
    plan = Plan.make(config, begun.data, begun.state.progress, SINGLE)
    batch = next(plan.kind.loader(config, train, plan.sampler, None, SINGLE).batches(range(1, 2)))
    assert isinstance(batch, TextBatch) and len(batch.rows) == 2
    narrow = sum(plan.sampler.packed_row(1, slice(0, 4), target_only=True).labels != -100)  # type: ignore[union-attr]
    assert (batch.num_labels == narrow) == target_only
    assert batch.num_labels == sum(int((row.labels_N != -100).sum()) for row in batch.rows)
    settings = StepSettings.at(1, plan, SINGLE).objective
    of_a_rank = TextBatch(batch.rows[:1], batch.num_labels)
    assert begun.state.layout.objective.divisor(of_a_rank, settings) == batch.num_labels, "other ranks have labels too"
    _, outputs, sums = begun.state.layout.forward_backward(None, batch, settings)
    gradient = begun.state.model.get_parameter("lm_head.weight").grad
    assert outputs == [] and gradient is not None
    begun.state.model.zero_grad()
    for row in batch.rows:
        tensors = (row.inputs_N, row.labels_N, row.positions_N, row.packing)
        loss, *_ = begun.state.model(*tensors, grad_calls=settings)
        (loss / batch.num_labels).backward()
    expected = begun.state.model.get_parameter("lm_head.weight").grad
    assert expected is not None
    torch.testing.assert_close(gradient, expected)
    assert float(sums[0]) == batch.num_labels


def test_a_wrong_key_is_named(text: Path, data: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "other", text, sizes={"tokenizer": "ab" * 32})
    for key, said in (
        ("global_batch_size=513", "global_batch_size=513 tokens can't be cut into rows_per_step=4"),
        ("grad_accumulation=3", "grad_accumulation=3 doesn't divide the 4 rows of a rank"),
        ("arch.halt_max_steps=2", "unknown key 'arch.halt_max_steps'"),
        ("augment=online", "augment=online is for puzzles, but arch=gpt reads text"),
        ("parallel.puzzle_table=sharded", "parallel.puzzle_table=sharded is for puzzles, but arch=gpt"),
        (f"init_from={tmp_path / 'other'}", "other reads tokens of abababababab, but those of the data are of"),
        (f"data_path={data}", f"arch=gpt reads text, but {data} holds puzzles; take arch=hrm"),
    ):
        assert said in mistake([*_typed(text, tmp_path / "run", "arch=gpt"), key])
    of_puzzles = ["debug=tiny", "device=cpu", f"checkpoint_path={tmp_path / 'b'}"]
    said = mistake([*of_puzzles, f"data_path={text}"])
    assert said.startswith(f"arch=hrm reads puzzles, but {text} holds text; take arch=gpt")
    said = mistake([*of_puzzles, f"data_path={data}", "target_only=false"])
    assert said.startswith("target_only=False is for text, but arch=hrm reads puzzles; leave it out")
