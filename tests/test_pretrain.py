"""The training loop in this process: what it logs, that it learns, that its losses are right."""

import gzip
import itertools
import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dataset.loader import TrainLoader
from dataset.sampler import Sampler
from dataset.schema import IGNORE_LABEL
from models import build_puzzle_arch
from models.act import ActSettings, draw_min_halt_steps, initial_carry, segment
from models.base import RecursiveModel
from models.losses import act_loss
from optim.adam_atan2 import AdamATan2
from optim.schedule import lr_multiplier
from pretrain import StepResult, StepSettings, after_step, build_state, train, train_step
from tests import runs
from tests.in_process import LOSS_SCALE_GROWS_AFTER, LOSS_SCALE_START, begin
from training.plan import Plan
from training.resume import read_start
from training.session import Evaluation
from training.splits import open_data
from training.state import TrainState
from utils.checkpoint.format import Progress
from utils.checkpoint.reader import Checkpoint
from utils.errors import UserError
from utils.ranks.launch import Launch
from utils.ranks.world import World
from utils.run.lock import RunLock
from utils.run.stop import StopSignal

SINGLE = World.single()
Row = dict[str, float]


def _run(data: Path, run: Path, **changes: object) -> tuple[TrainState, list[Row]]:
    """Train a whole run. Return its state and the rows that it logged."""
    with RunLock() as lock:
        start = read_start(runs.settings(data, run, **changes), lock, Launch())
        opened = open_data(start.config, SINGLE)
        state = build_state(start, opened, SINGLE)
        train(start, opened, state, StopSignal(), lock, SINGLE)
    return state, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def every_step(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """Return the rows of a run that logs each of its 12 steps."""
    return _run(data, tmp_path_factory.mktemp("loop") / "run", log_interval=1)[1]


# ---- what is logged ----------------------------------------------------------------------------


def test_step_1_and_every_interval_are_logged(quiet: Path) -> None:
    """Evaluations are logged at any step. A step has only one row."""
    rows = runs.rows(quiet)
    assert [row["step"] for row in rows] == [1, 5, 10, 12]
    assert [row["step"] for row in rows if "train/lm_loss" in row] == [1, 5, 10]
    assert [row["step"] for row in rows if "eval/all/exact_accuracy" in row] == [5, 10, 12]


def test_rows_have_the_documented_names(every_step: list[Row]) -> None:
    last = every_step[-1]
    assert all(isinstance(value, int | float) for row in every_step for value in row.values())
    for name in ("lm_loss", "q_halt_loss", "q_continue_loss", "grad_norm", "lr"):
        assert f"train/{name}" in last
    for name in ("examples_per_second", "step_ms", "data_ms", "max_memory_gb"):
        assert last[f"perf/{name}"] > 0
    for name in ("exact_accuracy", "accuracy", "q_halt_accuracy", "steps", "lm_loss", "exact_accuracy_at_step/3"):
        assert f"eval/all/{name}" in last
    for name in ("valid_boards", "clues_kept"):  # the evaluator of the data is there without being named
        assert f"eval/all/{name}" in last
    halted = [row for row in every_step if "train/exact_accuracy" in row]
    assert halted and all({"train/accuracy", "train/q_halt_accuracy", "train/steps"} <= row.keys() for row in halted)


def test_a_row_has_means_over_the_steps_since_the_last_log(quiet: Path, every_step: list[Row]) -> None:
    """A row every 5 steps has the mean of the rows of these steps."""
    by_step = {row["step"]: row for row in every_step}
    (sparse,) = [row for row in runs.rows(quiet) if row["step"] == 10]
    for name in ("lm_loss", "q_halt_loss", "q_continue_loss", "grad_norm"):
        mean = sum(by_step[step][f"train/{name}"] for step in range(6, 11)) / 5
        assert sparse[f"train/{name}"] == pytest.approx(mean, rel=1e-9)


def test_losses_and_rates_equal_those_of_a_loop_written_out(data: Path, tmp_path: Path, every_step: list[Row]) -> None:
    """The loop of the test has no sums over steps, no log and no checkpoints."""
    typed = runs.settings(data, tmp_path / "run", log_interval=1)
    config = read_start(typed, RunLock(), Launch()).config
    opened = open_data(config, SINGLE)
    model = build_puzzle_arch(config.arch, **opened.sizes.of_model())
    model.init_weights(torch.Generator().manual_seed(config.seed))
    optimizer = AdamATan2(
        model.parameters(), lr=config.lr, betas=(config.beta1, config.beta2), weight_decay=config.weight_decay
    )
    sampler = Sampler(
        list(opened.puzzles("train").sets.values()), seed=config.seed, epochs=config.epochs, global_batch_size=16
    )
    assert isinstance(model, RecursiveModel)
    carry = None
    for step, batch in enumerate(TrainLoader(opened.puzzles("train"), sampler, SINGLE).batches(range(1, 13)), start=1):
        minimum_B = draw_min_halt_steps(config.seed, step, 16, 0.5, 3)
        carry, outputs = segment(
            model, carry or initial_carry(model, batch), batch, training=True, min_halt_steps_B=minimum_B
        )
        labels_BS = carry.current["labels"]
        loss, sums = act_loss(
            outputs,
            labels_BS,
            halted_B=carry.halted_B,
            steps_B=carry.steps_B,
            config=config.puzzle_arch.loss,
            ignore_label=IGNORE_LABEL,
        )
        (loss / 16).backward()
        multiplier = lr_multiplier(step, 12, config.lr_warmup_steps, config.lr_min_ratio)
        row = every_step[step - 1]
        count, accuracy, exact, _, steps, lm_loss, q_halt_loss, q_continue_loss = sums.tolist()
        assert row["train/lm_loss"] == pytest.approx(lm_loss / 16, rel=1e-9)
        assert row["train/q_halt_loss"] == pytest.approx(q_halt_loss / 16, rel=1e-9)
        assert row["train/q_continue_loss"] == pytest.approx(q_continue_loss / 16, rel=1e-9)
        assert row["train/lr"] == pytest.approx(config.lr * multiplier)
        assert ("train/accuracy" in row) == (count > 0)
        if count > 0:
            expected = [accuracy / count, exact / count, steps / count]
            assert [row[f"train/{name}"] for name in ("accuracy", "exact_accuracy", "steps")] == pytest.approx(expected)
        norm = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
        assert row["train/grad_norm"] == pytest.approx(float(norm), rel=1e-5)

        # All slots name the only puzzle of these data, so that their gradients are summed before
        # the sign.
        assert model.puzzle_embedding is not None and outputs.puzzle_rows_BE is not None
        assert outputs.puzzle_rows_BE.grad is not None
        (identifier,) = set(carry.current["puzzle_identifiers"].tolist())
        table_PE, rate = model.puzzle_embedding.weight, config.puzzle_emb_lr * multiplier
        update_E = rate * outputs.puzzle_rows_BE.grad.sum(0).sign()
        table_PE[identifier] = table_PE[identifier] * (1 - rate * config.puzzle_emb_weight_decay) - update_E
        for group in optimizer.param_groups:
            group["lr"] = config.lr * multiplier
        optimizer.step()
        optimizer.zero_grad()


# ---- where it ends -----------------------------------------------------------------------------


@pytest.mark.parametrize("max_steps", [None, 1000])
def test_the_epochs_decide_the_number_of_steps(data: Path, tmp_path: Path, max_steps: int | None) -> None:
    """Three epochs of 30 draws are 90 draws: 5 batches of 16, and 10 draws over.

    max_steps adds no steps.
    """
    options = {"epochs": 3, "max_steps": max_steps, "eval_every_n_steps": None, "log_interval": 100}
    state, rows = _run(data, tmp_path / "run", **options)
    assert state.progress.step == 5
    # Without evaluations there is no row at the end. The open sums are in the checkpoint.
    assert [row["step"] for row in rows] == [1]
    assert runs.latest(tmp_path / "run") == 5


def test_evaluations_do_not_change_training(data: Path, tmp_path: Path, every_step: list[Row]) -> None:
    """With evaluations after every step, the losses are the same as with few evaluations."""
    _, rows = _run(data, tmp_path / "run", log_interval=1, eval_every_n_steps=1, checkpoint_every_eval=False)
    assert [row["train/lm_loss"] for row in rows] == [row["train/lm_loss"] for row in every_step]
    assert all("eval/all/exact_accuracy" in row for row in rows)


def test_eval_max_share_limits_and_reports_the_time_of_evaluations(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """With hardly any time no evaluation ends.

    With almost all time every evaluation is complete.
    """
    rows = {}
    for share in (1e-9, 0.999999):
        run = tmp_path / str(share)
        _, rows[share] = _run(data, run, eval_max_share=share, eval_batch_size=4, checkpoint_every_n_steps=None)
        said = capfd.readouterr().err
        assert ("evaluation took " in said) and ("% of the time" in said)
        assert ("no time for all of the evaluation" in said) == (share == 1e-9)
        rows[share] = [row for row in rows[share] if "perf/eval_share" in row]
        assert [row["step"] for row in rows[share]] == [5, 10, 12]
        assert all(0 < row["perf/eval_share"] < 1 for row in rows[share])
    assert all(row["eval/all/num_examples"] == 20 for row in rows[0.999999])
    assert not [name for row in rows[1e-9] for name in row if name.startswith("eval/")]
    # A checkpoint is due after an evaluation even if there was no time for the evaluation.
    assert (tmp_path / "1e-09" / "step_00000010").is_dir() and not (tmp_path / "1e-09" / "best").exists()


# ---- halting -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eager(quiet: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of weights whose Q head always wants to halt.

    The Q head of a new model never wants to halt. The blocks change the state only a little, so
    that the answers settle after different numbers of segments.
    """
    weights = load_file(quiet / f"step_{runs.LAST_STEP:08d}" / "model.safetensors")
    for name in weights:
        if "o_proj" in name or "down_proj" in name:
            weights[name] *= 0.1
    weights["q_head.weight"].zero_()
    weights["q_head.bias"] = torch.tensor([5.0, -5.0])
    file = tmp_path_factory.mktemp("eager") / "model.safetensors"
    save_file(weights, file)
    return file


@pytest.mark.parametrize("ranks", [1, 2])
def test_exploration_delays_halting(data: Path, tmp_path: Path, eager: Path, log: Path, ranks: int) -> None:
    """A slot halts after the minimum number of segments that is drawn for the step and the slot."""
    run, num_slots, halt_max_steps = tmp_path / "run", 16, 4
    options = {
        "init_from": eager,
        "arch__halt_max_steps": halt_max_steps,
        "arch__halt_exploration_prob": 0.5,
        "seed": 3,
    }
    often = {"log_interval": 1, "eval_every_n_steps": None, "checkpoint_every_n_steps": 1}
    if ranks == 1:
        _run(data, run, **options, **often)
    else:
        runs.train(runs.settings(data, run, **options, **often), log, ranks=ranks).ok()
    steps_B, halted_B = torch.zeros(num_slots, dtype=torch.int32), torch.ones(num_slots, dtype=torch.bool)
    for row in runs.rows(run):
        step = int(row["step"])
        minimum_B = draw_min_halt_steps(3, step, num_slots, 0.5, halt_max_steps)
        steps_B = torch.where(halted_B, 0, steps_B) + 1
        halted_B = steps_B >= minimum_B  # the minimum is halt_max_steps at most
        slots = Checkpoint.open(run / f"step_{step:08d}").load_slots(slice(0, num_slots))
        assert slots["steps"].tolist() == steps_B.tolist(), f"wrong numbers of segments in the slots after step {step}"
        assert slots["halted"].tolist() == halted_B.tolist(), f"the wrong slots have halted after step {step}"
        assert row["train/steps"] == pytest.approx(float(steps_B[halted_B].double().mean())), f"step {step}"


# ---- that it learns ----------------------------------------------------------------------------


def test_bfloat16_on_the_cpu(data: Path, tmp_path: Path, every_step: list[Row]) -> None:
    state, rows = _run(data, tmp_path / "run", arch__forward_dtype="bfloat16", max_steps=3, log_interval=1)
    assert all(parameter.dtype == torch.float32 for parameter in state.model.parameters())
    assert rows[0]["train/lm_loss"] == pytest.approx(every_step[0]["train/lm_loss"], rel=0.03)


def test_float16_scales_the_loss_and_skips_steps_that_overflow(
    data: Path, tmp_path: Path, every_step: list[Row], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A skipped step changes no trained tensor. The losses fall as in float32."""
    taken = []

    def noting(state: TrainState, *args: Any) -> StepResult:
        before = {name: tensor.clone() for name, tensor in state.model.trained_tensors().items()}
        result = train_step(state, *args)
        after = state.model.trained_tensors()
        taken.append(result.was_taken)
        assert all(torch.equal(before[name], after[name]) for name in before) != result.was_taken
        return result

    monkeypatch.setattr("pretrain.train_step", noting)
    # The scale is so large that the first steps overflow. Each of them halves the scale.
    monkeypatch.setattr(LOSS_SCALE_START, 2.0**22)
    _, rows = _run(data, tmp_path / "run", arch__forward_dtype="float16", log_interval=1)
    assert taken[0] is False and taken[-1] is True
    scales = [row["train/loss_scale"] for row in rows]
    expected, scale = [], 2.0**22
    for was_taken in taken:
        scale = scale if was_taken else scale / 2
        expected.append(scale)
    assert scales == expected
    assert rows[0]["train/lm_loss"] == pytest.approx(every_step[0]["train/lm_loss"], rel=1e-2)
    assert rows[-1]["train/lm_loss"] < rows[0]["train/lm_loss"]


def test_the_average_ignores_skipped_steps(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A float16 step that overflows changes neither the weights nor their average."""
    # The scale doubles after each step that was taken, so that steps overflow again and again.
    monkeypatch.setattr(LOSS_SCALE_START, 2.0**20)
    monkeypatch.setattr(LOSS_SCALE_GROWS_AFTER, 1)
    run, steps = tmp_path / "run", range(2, 9)
    settings = {"arch__forward_dtype": "float16", "ema": True, "ema_rate": 0.5, "lr": 1e-2, "lr_warmup_steps": 0}
    often = {"log_interval": 1, "checkpoint_every_n_steps": 1, "eval_every_n_steps": None}
    _, rows = _run(data, run, **settings, **often, max_steps=8)
    scale = {int(row["step"]): row["train/loss_scale"] for row in rows}
    skipped = [step for step in steps if scale[step] < scale[step - 1]]
    taken = [step for step in steps if step not in skipped]
    assert skipped and taken and min(taken) < max(skipped), (
        "this test needs a step that is skipped after one that is not"
    )
    for step in steps:
        now, before = runs.tensors(run, step), runs.tensors(run, step - 1)
        averages = [name for name in now if ":ema." in name]
        changed = [name for name in averages if not torch.equal(now[name], before[name])]
        if step in skipped:
            assert not changed, f"step {step} was skipped, but the average of {changed} changed"
        else:
            assert changed, f"step {step} was taken, but the average did not change"


def test_another_seed_gives_another_order_of_the_data(data: Path, tmp_path: Path, eager: Path) -> None:
    """The weights come from a file here, so only the order of the data can differ."""
    first = []
    for seed in (1, 2):
        state, _ = _run(data, tmp_path / str(seed), seed=seed, init_from=eager, max_steps=1, eval_every_n_steps=None)
        assert state.carry is not None
        first.append(state.carry.current["inputs"].tolist())
    assert first[0] != first[1], "both seeds begin with the same batch"


def test_the_puzzle_table_has_its_own_rate_and_decay(data: Path, tmp_path: Path, eager: Path) -> None:
    """If the rate of the table or of the weights is 0, a step changes only the other."""
    weights = load_file(eager)
    weights["puzzle_embedding.weight"].fill_(1)
    file = tmp_path / "weights.safetensors"
    save_file(weights, file)
    once = {"init_from": file, "max_steps": 1, "lr_warmup_steps": 0, "eval_every_n_steps": None}
    of_table = {"puzzle_emb_lr": 0.5, "puzzle_emb_weight_decay": 0.25, "lr": 0, "weight_decay": 0.5}
    found = _run(data, tmp_path / "table", **once, **of_table)[0].model.state_dict()
    rows = found.pop("puzzle_embedding.weight")
    decayed = 1 * (1 - 0.5 * 0.25)  # the step of puzzle_emb_lr up or down follows
    assert set(rows.unique().tolist()) <= {decayed - 0.5, decayed, decayed + 0.5}, "wrong rate or decay of the table"
    assert all(torch.equal(tensor, weights[name]) for name, tensor in found.items()), (
        "a weight changed although lr is 0"
    )
    of_weights = {"puzzle_emb_lr": 0, "puzzle_emb_weight_decay": 0.25, "lr": 0.01, "weight_decay": 0.5}
    found = _run(data, tmp_path / "weights", **once, **of_weights)[0].model.state_dict()
    assert (found.pop("puzzle_embedding.weight") == 1).all(), "the table changed although puzzle_emb_lr is 0"
    bias = found["q_head.bias"] - weights["q_head.bias"] * (1 - 0.01 * 0.5)
    assert bias.abs().max() <= 0.01 * 1.6 and (bias != 0).all(), (
        "the bias did not change, or changed by more than lr * pi / 2"
    )


# ---- what a person sees ------------------------------------------------------------------------


def test_the_log_begins_with_the_run_and_its_sizes(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state, _ = _run(data, tmp_path / "run", max_steps=2)
    stdout, stderr = capfd.readouterr()
    head, num_parameters = stderr.splitlines()[0], sum(p.numel() for p in state.model.parameters())
    assert f"{tmp_path / 'run'}: hrm, {num_parameters:,} parameters and 32 in the puzzle table; 30 groups" in head
    assert stdout == "" and "\r" not in stderr


def test_a_profile_is_a_trace_and_two_tables(data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _run(data, tmp_path / "run", profile=True, max_steps=8, eval_every_n_steps=None, checkpoint_every_n_steps=None)
    (file,) = (tmp_path / "run" / "profile").glob("rank_0.*.pt.trace.json.gz")
    trace = json.loads(gzip.decompress(file.read_bytes()))
    assert len({event["name"] for event in trace["traceEvents"]}) > 20
    lines = capfd.readouterr().err.splitlines()
    heads = [line for line in lines if "Self CPU %" in line]
    assert len(heads) == 2, "there must be one table by time and one by memory"
    assert any("3 steps: " in line and "trace.json" in line and "rank_0.txt" in line for line in lines)
    assert (tmp_path / "run" / "profile" / "rank_0.txt").stat().st_size > 0


# ---- what the config says about a step ---------------------------------------------------------


def test_the_settings_of_a_step_follow_the_config(data: Path, tmp_path: Path) -> None:
    """Depth and rates depend on the last step, here max_steps and not the end of the data."""
    options = {
        "arch__depth_curriculum": "[{until:0.5,H_cycles:1,L_cycles:1}]",
        "lr_warmup_steps": 4,
        "lr_scaling": "linear",
        "lr_scaling_reference": 8,
        "puzzle_emb_lr": 0.5,
        "puzzle_emb_weight_decay": 0.25,
        "grad_clip": 2.0,
        "ema": "true",
        "ema_rate": 0.75,
        "ema_start": 0.5,
        "seed": 3,
    }
    begun = begin(runs.settings(data, tmp_path / "run", **options))
    plan = Plan.make(begun.start.config, begun.data, begun.state.progress, SINGLE)
    assert plan.last_step == 12 < plan.sampler.last_step
    arch = begun.start.config.puzzle_arch
    for step in range(1, 13):
        found = StepSettings.at(step, plan, SINGLE)
        assert isinstance(found.objective, ActSettings)
        depth = found.objective.depth
        assert (depth.H_cycles, depth.L_cycles) == ((1, 1) if step <= 6 else (2, 2)), step
        assert (found.objective.loss, found.objective.global_batch_size, found.grad_clip) == (arch.loss, 16, 2.0)
        multiplier = lr_multiplier(step, 12, 4, begun.start.config.lr_min_ratio)
        assert found.lr_factor == pytest.approx(2 * multiplier)
        assert (found.puzzle_emb_lr, found.puzzle_emb_weight_decay) == (pytest.approx(0.5 * multiplier), 0.25)
        assert found.ema_rate == (0.75 if step > 6 else 0.0)
        assert found.objective.min_halt_steps_B is not None
        assert torch.equal(found.objective.min_halt_steps_B, draw_min_halt_steps(3, step, 16, 0.5, arch.halt_max_steps))


# ---- what follows a step -----------------------------------------------------------------------

LAST = 9


class Followed:
    """A session that records its calls. The evaluation, the votes and the due dates are given."""

    def __init__(
        self, step: int, evaluation: str | None, was_pending: bool, votes: tuple[bool, bool], worn_out: bool, due: bool
    ) -> None:
        self.done: list[str] = []
        self._ends_as, self._is_paused = evaluation, False
        self.vote_to_end = lambda: votes
        self.progress = Progress(step=step, pending_row={"train/lr": 1.0} if was_pending else None)
        self.state = SimpleNamespace(progress=self.progress)
        self.clock = SimpleNamespace(paused=self._paused)
        self.plan = SimpleNamespace(
            last_step=LAST,
            best_metric="eval/all/accuracy",
            evaluation_due=lambda step: evaluation is not None,
            out_of_patience=lambda progress: worn_out,
            checkpoint_due=lambda step, *, evaluated: due or (evaluated and step == LAST),
            replicas_check_due=lambda step: True,
        )
        self.check_replicas, self.mark_stopped = partial(self._note, "check"), partial(self._note, "mark")
        self.say = lambda text: self._note("say")
        self.log = lambda row: self._note(f"log {', '.join(sorted(row))}")

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._is_paused = True
        yield
        self._is_paused = False

    def _note(self, what: str) -> None:
        assert self._is_paused, f"{what} is counted as time of a step"
        self.done.append(what)

    def evaluate(self, row: Row, *, limited: bool) -> Evaluation:
        self._note(f"evaluate limited={limited}")
        if self._ends_as == "stopped":
            self.progress.pending_row = row
            return Evaluation(row, is_done=False)
        return Evaluation(row | {"eval/all/accuracy": 1.0}, is_done=True, is_best=self._ends_as == "best")

    def save(self, *, is_best: bool, is_last: bool = False) -> None:
        self._note("save" + " best" * is_best + " last" * is_last)

    def raise_data_error(self) -> None:
        self._note("raise")
        raise UserError("no data")


@pytest.mark.parametrize("evaluation", [None, "done", "best", "stopped"])
@pytest.mark.parametrize("step", [4, LAST])
def test_what_follows_a_step(evaluation: str | None, step: int) -> None:
    """For every combination of due tasks, check what is done in which order and if the run ends."""
    for flags in itertools.product((False, True), repeat=6):
        was_pending, has_row, stopping, unreadable, is_worn_out, checkpoint = flags
        session = Followed(step, evaluation, was_pending, (stopping, unreadable), is_worn_out, checkpoint)
        is_evaluated, is_interrupted = evaluation in ("done", "best"), evaluation == "stopped"
        ends_early = is_evaluated and is_worn_out
        expected = []
        if evaluation is not None:  # a pending evaluation has no time limit, because the process has just started
            expected.append(f"evaluate limited={not was_pending}")
        names = (["eval/all/accuracy"] if is_evaluated else []) + (["train/lr"] if has_row else [])
        if names and not is_interrupted:  # the row of an interrupted evaluation is pending
            expected.append(f"log {', '.join(names)}")
        is_due = checkpoint or (is_evaluated and step == LAST)
        if stopping or unreadable or ends_early or evaluation == "best" or is_due:
            is_last = stopping or unreadable or ends_early or step == LAST
            expected.append("save" + " best" * (evaluation == "best") + " last" * is_last)
        else:
            expected.append("check")
        if unreadable:
            expected.append("raise")
        elif ends_early:
            expected.append("say")
        elif stopping and (step < LAST or is_interrupted):  # a finished run must not be queued again
            expected.append("mark")
        row = {"train/lr": 1.0} if has_row else {}
        with pytest.raises(UserError) if unreadable else nullcontext():
            assert after_step(session, row) == (stopping or ends_early)  # type: ignore[arg-type]
        assert session.done == expected
        assert session.progress.pending_row == (row if is_interrupted else None)
