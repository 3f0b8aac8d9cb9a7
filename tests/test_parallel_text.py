"""The strategy does not change the result of a run of text, and a run may resume under another."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from models.text import losses
from tests.dataset.text.samples import write_split
from tests.runs import Row, rows
from tests.spawn import run_ranks
from tests.test_parallel import _train_all, require_the_same
from utils.ranks.world import World

pytestmark = pytest.mark.invariance

LAST_STEP, HALF = 4, 2
NUM_TEST_SAMPLES = 21  # an odd number, so that ranks evaluate different numbers of samples
COMMON: dict[str, object] = {
    "device": "cpu",
    "max_steps": LAST_STEP,
    "log_interval": 1,
    "eval_every_n_steps": LAST_STEP,
    "checkpoint_every_n_steps": HALF,
    "global_batch_size": 256,
    "rows_per_step": 4,
    "grad_clip": 1.0,
    "ema": "true",
    "ema_rate": 0.8,
    "lr": 1e-3,
    "lr_warmup_steps": 2,
    "best_metric": None,
    "perf_every_n_steps": LAST_STEP,
    "check_replicas_every_n_steps": HALF,  # replicated tensors must be equal bit for bit
    "dist.timeout_s": 60,
    "arch.hidden_size": 32,
    "arch.num_heads": 8,
    "arch.num_layers": 4,
    "arch.width_multiple": 8,
    "arch.forward_dtype": "float32",
}
ARCHS: dict[str, dict[str, object]] = {
    "gpt": {"arch": "gpt", "arch.num_kv_heads": 4},
    # In the first steps no gradient reaches the embedding.
    "hrm_text": {"arch": "hrm_text", "arch.bp_warmup_ratio": 1.0, "arch.num_layers": 2},
    "gpt_tied": {"arch": "gpt", "arch.tie_head": True, "arch.mlp": "gelu"},
    "trm_text": {"arch": "trm_text", "arch.num_layers": 2},
}
_ACCUMULATING = {"grad_accumulation": 2, "arch.activation_checkpointing": "block"}
# By number of ranks: the strategy with further options, and the architecture.
CASES: dict[int, dict[str, tuple[str, dict[str, object]]]] = {
    2: {
        "ddp": ("hrm_text", {"parallel": "ddp"}),
        "fsdp_tied": ("gpt_tied", {"parallel": "fsdp"}),
        "fsdp_accumulating": ("trm_text", {"parallel": "fsdp", **_ACCUMULATING}),
        "tp": ("hrm_text", {"parallel": "tp"}),
        "pipeline": ("gpt", {"parallel": "pipeline", "parallel.microbatches": 4}),
    },
    4: {
        "hsdp": ("gpt", {"parallel": "hsdp", "parallel.replicate": 2}),
        "fsdp_tp": ("hrm_text", {"parallel": "fsdp_tp", "parallel.tensor": 2, **_ACCUMULATING}),
        "pipelines_sharded": ("gpt", {"parallel": "pipeline", "parallel.shard": 2, "parallel.microbatches": 2}),
    },
}
# These runs are resumed from their middle and must end with the same bits.
RESUMED = {2: ("ddp", "tp", "pipeline"), 4: ("fsdp_tp", "pipelines_sharded")}
# The second half of these runs is done under another strategy.
CONTINUED = {"pipeline": "tp"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write samples of an instruction and a response, in which tokens follow from one another."""
    folder, rng = tmp_path_factory.mktemp("text"), np.random.default_rng(0)
    for name, num in (("train", 200), ("test", NUM_TEST_SAMPLES)):
        prefixes, responses = rng.integers(1, 8, num), rng.integers(1, 6, num)
        ends = np.cumsum(prefixes + responses)
        table = np.stack([ends - prefixes - responses, prefixes, responses, rng.integers(0, 2, num)], axis=1)
        write_split(folder / name, (np.arange(ends[-1]) % 7).astype(np.uint16), table, max_len=16)
    return folder


def _train_in_chunks(world: World, commands: list[tuple[str, list[str]]]) -> dict[str, str]:
    """As `_train_all`, with four chunks of the loss of a row. One process has one chunk."""
    losses.MOST_LOGITS = 16 * 256
    return _train_all(world, commands)


def _arguments(data: Path, run: Path, arch: str, changes: Mapping[str, object]) -> list[str]:
    values: dict[str, object] = {"data_path": data, "checkpoint_path": run} | COMMON | ARCHS[arch] | dict(changes)
    return [f"{key}={'null' if value is None else value}" for key, value in values.items()]


@pytest.fixture(scope="module")
def alone(text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Row]]:
    folder = tmp_path_factory.mktemp("alone")
    assert run_ranks(_train_all, 1, [(arch, _arguments(text, folder / arch, arch, {})) for arch in ARCHS]) == [{}]
    found = {arch: rows(folder / arch) for arch in ARCHS}
    for of_run in found.values():  # otherwise equal losses would prove little
        assert of_run[-1]["train/loss"] < of_run[0]["train/loss"]
        assert of_run[-1]["eval/all/num_answers"] > NUM_TEST_SAMPLES / 2
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_strategy_has_the_losses_of_one_process(
    text: Path, alone: dict[str, list[Row]], tmp_path: Path, num_ranks: int
) -> None:
    commands = []
    for name, (arch, changes) in CASES[num_ranks].items():
        commands.append((name, _arguments(text, tmp_path / name, arch, changes)))
        half = {"resume": tmp_path / name / f"step_{HALF:08d}"}
        if name in RESUMED[num_ranks]:
            commands.append((f"{name}-resumed", _arguments(text, tmp_path / f"{name}-resumed", arch, changes | half)))
        if name in CONTINUED:
            other = half | {"parallel": CONTINUED[name]}
            commands.append((f"{name}-continued", _arguments(text, tmp_path / f"{name}-continued", arch, other)))
    failures = run_ranks(_train_in_chunks, num_ranks, commands, timeout_s=600)[0]
    runs = {name: name.removesuffix("-resumed").removesuffix("-continued") for name, _ in commands}
    expected = {name: alone[CASES[num_ranks][of_run][0]] for name, of_run in runs.items()}
    require_the_same(failures, tmp_path, expected, RESUMED[num_ranks], LAST_STEP)
    row = json.loads((tmp_path / commands[0][0] / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["perf/tokens_per_second/rank_0"] > row["perf/tokens_per_second"] / 16, "a rank counts rows, not tokens"
