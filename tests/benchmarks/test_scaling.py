"""The bytes in theory equal sums written out by hand, for an HRM of width 64.

A step of this model makes 48 calls of blocks, of which 8 carry gradient.
"""

import json
from pathlib import Path

import pytest

from benchmarks.scaling import bytes_in_theory

BATCH = 8
BLOCK = 4 * (64 * 3 * 64 + 64 * 64 + 64 * 2 * 256 + 256 * 64)  # float32 weights: qkv, output, gate and up, down
STATE = 4 * (1 + 16) * 64  # the position of the puzzle row and the 16 cells of a board
ROWS = BATCH * 4 * (64 + 1)  # gradients of puzzle rows with their numbers


@pytest.mark.parametrize(("strategy", "num_ranks"), [("ddp", 1), ("ddp", 4), ("fsdp", 4), ("tp", 2), ("fsdp_tp", 4)])
def test_bytes_of_each_strategy(strategy: str, num_ranks: int, data: Path, tmp_path: Path) -> None:
    vocab_size = json.loads((data / "train" / "dataset.json").read_text())["vocab_size"]
    others = 4 * (2 * vocab_size * 64 + 2 * 64 + 2)  # the token embedding, the token head and the Q head
    # The last block of the target pass returns only the first position.
    activations = ((47 + 8) * STATE + STATE // (1 + 16)) * BATCH
    expected = {
        ("ddp", 1): 0,
        ("ddp", 4): 2 * 3 / 4 * (8 * BLOCK + others) + 3 / 4 * ROWS,
        # Blocks are gathered for 48 calls, and again for 8 backward passes, which also scatter. The
        # other weights are gathered for two forward passes and a backward pass, which also
        # scatters.
        ("fsdp", 4): 3 / 4 * ((48 + 8 + 8) * BLOCK + (2 + 1 + 1) * others) + 3 / 4 * ROWS,
        ("tp", 2): 2 * 1 / 2 * 2 * activations,  # two sums for each call; every rank has the gradients of all rows
        # On 2 x 2 ranks, FSDP shards half of each block, and tensor parallelism sums half of the
        # slots.
        ("fsdp_tp", 4): 1 / 2 * (64 * BLOCK / 2 + 4 * others) + 2 * 1 / 2 * 2 * activations / 2 + 1 / 2 * ROWS,
    }
    settings = [f"parallel={strategy}", f"data_path={data}", f"checkpoint_path={tmp_path}", "wandb.mode=disabled"]
    settings += [f"global_batch_size={BATCH}", "arch.hidden_size=64", "arch.num_heads=2", "arch.forward_dtype=float32"]
    assert bytes_in_theory(settings, num_ranks) == pytest.approx(expected[strategy, num_ranks])
