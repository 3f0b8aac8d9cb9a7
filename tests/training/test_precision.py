"""arch.forward_dtype=auto is decided once by rank 0."""

from pathlib import Path

import pytest
import torch
import yaml

from tests import runs
from tests.runs import settings, train, with_arguments
from training import precision


def _cpu_with(bfloat16: bool, rank: int) -> None:
    """Pretend that the CPU of rank 0 multiplies bfloat16, and those of other ranks don't."""
    precision.multiplies_bfloat16 = lambda device: bfloat16 == (rank == 0)


@pytest.mark.parametrize(("ranks", "bfloat16", "expected"), [(1, True, "bfloat16"), (2, False, "float32")])
def test_auto_is_decided_by_rank_0_and_stored(
    data: Path, tmp_path: Path, log: Path, ranks: int, bfloat16: bool, expected: str
) -> None:
    run = tmp_path / "run"
    typed = settings(data, run, arch__forward_dtype="auto", max_steps=2, eval_every_n_steps=None)
    train(typed, log, ranks=ranks, hook=with_arguments(_cpu_with, bfloat16)).ok()
    assert yaml.safe_load((run / "config.yaml").read_text())["arch"]["forward_dtype"] == expected
    z_H = next(tensor for name, tensor in runs.tensors(run, 2).items() if name.endswith(".state.z_H"))
    assert z_H.dtype == getattr(torch, expected), "the model computed in another dtype than that of the config"
    # A resumed run keeps the dtype on a CPU of the other kind.
    done = train([f"resume={run}", "max_steps=3"], log, ranks=ranks, hook=with_arguments(_cpu_with, not bfloat16))
    # On a CPU that emulates bfloat16 another line advises against it.
    assert not [line for line in done.ok().splitlines() if "forward_dtype" in line and "emulates" not in line]
    assert yaml.safe_load((run / "config.yaml").read_text())["arch"]["forward_dtype"] == expected


def test_the_capabilities_of_the_cpu_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    for able in (False, True):
        found = {"avx2": True, "avx512_bf16": able}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=found: found, raising=False)
        assert precision.multiplies_bfloat16(torch.device("cpu")) == able
    assert not precision.multiplies_bfloat16(torch.device("mps"))
