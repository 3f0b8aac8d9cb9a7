"""The strategy does not change the result of a run: the losses and the evaluation stay the same.

A run may also resume under another strategy.
"""

import contextlib
import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pretrain
from tests.models.helpers import PUZZLE_ARCHS
from tests.runs import Row, rows, settings, stopped_after, tensors, train, with_arguments
from tests.spawn import run_ranks
from utils.config import name_of
from utils.errors import UserError
from utils.ranks.world import World

pytestmark = pytest.mark.invariance

LAST_STEP = 4
TOLERANCE = 1e-4
NUM_TEST_EXAMPLES = 20

# The runs have every kind of step: sequences that go on, exploration, a moving average, clipping,
# and evaluation of the averaged weights.
COMMON: dict[str, object] = {
    "max_steps": LAST_STEP,
    "log_interval": 1,
    "eval_every_n_steps": LAST_STEP,
    "eval_batch_size": 9,  # 20 examples: in the last batch some rank has none, but must compute too
    "eval_save_outputs": "[predictions_at_step]",
    "checkpoint_every_n_steps": None,  # only at the end
    "grad_clip": 1.0,
    "ema": "true",
    "ema_rate": 0.8,
    "lr": 1e-3,
    # If a gradient is almost 0, its rounding decides the sign. Sign SGD then makes a step of this
    # size.
    "puzzle_emb_lr": 1e-4,
    "arch.hidden_size": 64,
    "arch.num_heads": 4,
    "arch.L_cycles": 1,
    "dist.timeout_s": 60,
    "check_replicas_every_n_steps": LAST_STEP // 2,  # replicated tensors must be equal bit for bit
}
OWN: dict[str, dict[str, object]] = {
    "hrm": {},
    "trm": {"arch": "trm", "optim": "muon", "arch.H_layers": 0},
    # With dropout, because its masks must not depend on the ranks.
    "se_rrm": {
        **{"arch": "se_rrm", "arch.H_layers": "", "arch.L_layers": 1, "arch.head_dim": 16, "arch.head_dim_t": 16},
        **{"arch.add_tokens": 2, "arch.puzzle_emb_ndim": 1, "arch.dropout": 0.2},
    },
    "transformer": {
        **{"arch": "transformer", "arch.num_layers": 4, "arch.halt_max_steps": 1, "arch.halt_exploration_prob": 0},
        **{"arch.H_cycles": 1, "arch.L_cycles": 1, "arch.H_layers": "", "arch.L_layers": ""},
    },
}
# Every other architecture has one block in each of its networks.
ARCHS = {
    name_of(config): OWN.get(
        name_of(config),
        {"arch.H_layers": "", "arch.L_layers": ""}
        | {f"arch.{key}": 1 for key in config.model_fields if key.endswith("_layers")}
        | {"arch": name_of(config)},
    )
    for config in PUZZLE_ARCHS
}
# The architectures of each strategy by the number of ranks. Further options of a strategy do not
# depend on the recursion, so that one architecture is enough. Runs on 4 ranks take the longest:
# tests/models/test_parallel.py compares the gradients of what 2 ranks show, too.
STRATEGIES: dict[str, tuple[dict[int, list[str]], dict[str, object]]] = {
    "ddp": ({2: ["se_rrm", "se_mixer"]}, {}),
    "ddp_sharded_table": (
        {2: ["hrm"]},
        {"parallel.puzzle_table": "sharded", "parallel.gradient_as_bucket_view": "true"},
    ),
    "ddp_unequal": ({2: ["hrm"]}, {"dist.rank_weights": "[1,3]"}),
    "fsdp": ({1: ["trm"], 2: ["trm", "urm"]}, {"parallel": "fsdp"}),
    "fsdp_accumulating": (
        {2: ["hrm"]},
        {
            **{"parallel": "fsdp", "grad_accumulation": 2, "arch.activation_checkpointing": "cycle"},
            **{"parallel.reshard_after_forward": "false", "parallel.puzzle_table": "sharded"},
        },
    ),
    "hsdp": ({4: ["trm"]}, {"parallel": "hsdp", "parallel.replicate": 2}),
    "tp": ({1: ["hrm"], 2: ["trm", "transformer"]}, {"parallel": "tp"}),
    "fsdp_tp": ({4: ["hrm"]}, {"parallel": "fsdp_tp", "parallel.tensor": 2, "parallel.puzzle_table": "sharded"}),
    "pipeline_1f1b": ({2: ["transformer"]}, {"parallel": "pipeline", "parallel.schedule": "1f1b"}),
    "pipeline_interleaved": ({2: ["transformer"]}, {"parallel": "pipeline", "parallel.schedule": "interleaved"}),
    # Two pipelines. The second batch of an evaluation has one example, so that a pipeline has none.
    "pipelines_interleaved": (
        {4: ["transformer"]},
        {
            **{"parallel": "pipeline", "parallel.stages": 2, "parallel.schedule": "interleaved", "eval_batch_size": 19},
            **{"grad_accumulation": 2, "parallel.microbatches": 2, "dist.rank_weights": "[1,3]"},
        },
    ),
    "pipelines_sharded": (
        {4: ["transformer"]},
        {
            **{"parallel": "pipeline", "parallel.stages": 2, "parallel.shard": 2, "eval_batch_size": 19},
            **{"grad_accumulation": 2, "parallel.microbatches": 4, "parallel.schedule": "gpipe"},
        },
    ),
}
# These runs are resumed from their middle and must end with the same bits.
RESUMED = {
    2: ("ddp_sharded_table-hrm", "fsdp_accumulating-hrm", "tp-trm", "pipeline_interleaved-transformer"),
    4: ("fsdp_tp-hrm", "pipelines_interleaved-transformer", "pipelines_sharded-transformer"),
}


def _arguments(data: Path, run: Path, arch: str, changes: dict[str, object]) -> list[str]:
    values = COMMON | ARCHS[arch] | changes
    typed = settings(data, run, **values)
    return [word for word in typed if not word.endswith("=")]  # keys that the architecture lacks


def _train_all(world: World, cases: list[tuple[str, list[str]]]) -> dict[str, str]:
    """Run the program once for every case in these processes. Return what went wrong by case."""
    failures = {}
    for name, arguments in cases:
        sys.argv = ["pretrain.py", *arguments]
        log = io.StringIO()
        try:
            with contextlib.redirect_stderr(log):
                pretrain.main(world)
        except UserError as error:  # all ranks raise it, so that they can go on with the next case
            failures[name] = f"{error}\n{log.getvalue()}"
    return failures


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Row]]:
    folder = tmp_path_factory.mktemp("alone")
    cases = [(arch, _arguments(data, folder / arch, arch, {})) for arch in ARCHS]
    assert run_ranks(_train_all, 1, cases, timeout_s=300) == [{}]
    return {arch: rows(folder / arch) for arch in ARCHS}


# These metrics are counts over examples, which do not depend on the order of summation.
COUNTED = ("exact_accuracy", "q_halt_accuracy", "steps", "halt_step")


def _differences(expected: list[Row], found: list[Row]) -> list[str]:
    if [row["step"] for row in found] != [row["step"] for row in expected]:
        return [f"steps {[row['step'] for row in found]}"]
    said = []
    for there, here in zip(expected, found, strict=True):
        for name, value in there.items():
            if name.startswith("perf/"):
                continue
            exact = name.startswith("eval/") and (name.split("/")[-1] in COUNTED or "_at_step/" in name)
            tolerance = 0.0 if exact else 10 * TOLERANCE if name == "train/grad_norm" else TOLERANCE
            if name not in here or not abs(here[name] - value) <= tolerance * max(1.0, abs(value)):  # also true for NaN
                said.append(f"{name} at step {there['step']:.0f}: {here.get(name)}, not {value}")
    return said


def require_the_same(
    failures: dict[str, Any], folder: Path, expected: dict[str, list[Row]], resumed: Iterable[str], last_step: int
) -> None:
    for name, there in expected.items():
        if name not in failures and (said := _differences(there, rows(folder / name))):
            failures[name] = said[:3]
    for name in () if failures else resumed:
        unbroken, again = (tensors(folder / run, last_step) for run in (name, f"{name}-resumed"))
        if different := [key for key in unbroken if key not in again or not torch.equal(unbroken[key], again[key])]:
            failures[f"{name}-resumed"] = f"these tensors differ: {different[:3]}"
    assert not failures, "\n".join(f"{name}: {said}" for name, said in failures.items())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_strategy_has_the_losses_of_one_process(
    data: Path, alone: dict[str, list[Row]], tmp_path: Path, num_ranks: int
) -> None:
    expected, commands, resumed = {}, [], RESUMED.get(num_ranks, ())
    asked = [(name, arch, more) for name, (by, more) in STRATEGIES.items() for arch in by.get(num_ranks, [])]
    for strategy, arch, changes in asked:
        name = f"{strategy}-{arch}"
        expected[name] = alone[arch]
        if name in resumed:
            changes = changes | {"checkpoint_every_n_steps": LAST_STEP // 2}
        commands.append((name, _arguments(data, tmp_path / name, arch, changes)))
        if name in resumed:
            half = {"resume": tmp_path / name / f"step_{LAST_STEP // 2:08d}"}
            commands.append((f"{name}-resumed", _arguments(data, tmp_path / f"{name}-resumed", arch, changes | half)))
    failures: dict[str, Any] = run_ranks(_train_all, num_ranks, commands, timeout_s=600)[0]
    for name in expected.keys() - failures.keys():
        files = (tmp_path / name / "eval_outputs" / f"step_{LAST_STEP:08d}").glob("*.safetensors")
        saved = sorted(int(row) for file in files for row in load_file(file)["rows"])
        if saved != list(range(NUM_TEST_EXAMPLES)):
            failures[name] = f"rows of eval_outputs: {saved}"
    require_the_same(failures, tmp_path, expected, resumed, LAST_STEP)
    assert 0 < alone["hrm"][-1]["eval/all/exact_accuracy"] < 1, (
        "the test proves little if all answers are wrong or all are right"
    )


_TWO_PIPELINES: dict[str, object] = {"parallel": "pipeline", "parallel.stages": 2}
CHAINS: dict[str, list[tuple[int, dict[str, object]]]] = {
    "hrm": [
        (4, {"parallel": "ddp"}),
        (2, {"parallel": "fsdp", "parallel.puzzle_table": "sharded"}),
        (1, {"parallel": "ddp"}),
        (2, {"parallel": "tp"}),
    ],
    "transformer": [
        (2, {"parallel": "ddp"}),
        (4, _TWO_PIPELINES),
        (1, {"parallel": "ddp"}),
        (4, _TWO_PIPELINES | {"parallel.shard": 2, "parallel.schedule": "interleaved"}),
    ],
}


@pytest.mark.parametrize("arch", CHAINS)
def test_a_run_resumes_under_other_strategies(
    data: Path, alone: dict[str, list[Row]], tmp_path: Path, log: Path, arch: str
) -> None:
    """Carry, optimizer state, averages, puzzle table and position in the data must all be kept.

    A pipeline refuses a recurrent model, so the transformer takes another chain.
    """
    run, chain, first_step = tmp_path / "run", CHAINS[arch], 0
    for leg, (num_ranks, changes) in enumerate(chain):
        last_step = LAST_STEP * (leg + 1) // len(chain)
        asked = _arguments(data, run, arch, changes | {"resume": "auto"})
        hook = with_arguments(stopped_after, last_step - first_step) if last_step < LAST_STEP else None
        said = train(asked, log, ranks=num_ranks, hook=hook).ok()
        before, now = (str(chain[n][1]["parallel"]) for n in (max(0, leg - 1), leg))
        assert (f"changed on the command line: parallel: {before} -> {now}" in said) == (before != now)
        first_step = last_step
    assert not (different := _differences(alone[arch], rows(run))), "\n".join(different[:5])
