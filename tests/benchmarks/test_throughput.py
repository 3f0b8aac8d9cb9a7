"""The benchmark of steps measures two programs in turn, and says where the time of a step goes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from benchmarks.published_steps import flash_attention
from benchmarks.throughput import comparison
from tests import runs


@pytest.mark.slow
def test_two_programs_are_measured_in_every_round(tmp_path: Path) -> None:
    overrides = ["debug=tiny", "device=cpu", f"data_path={runs.build_data(tmp_path / 'data')}"]
    other = " ".join(["python -m benchmarks.our_steps", *overrides, "global_batch_size=16"])
    command = ["-m", "benchmarks.throughput", *overrides, "global_batch_size=8", "--steps", "2", "--rounds", "3"]
    command += ["--against", other, "--json", str(tmp_path / "json")]
    done = subprocess.run([sys.executable, *command], cwd=runs.REPOSITORY, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "json").read_text())
    assert [(result["batch_size"], len(result["rounds"])) for result in results] == [(8, 3), (16, 3)]
    assert results[1]["flops"] == 2 * results[0]["flops"], "twice the slots are twice the operations"
    for result in results:
        for row in result["rounds"]:
            assert row["examples_per_second"] == pytest.approx(1e3 * result["batch_size"] / row["step_ms"])
            assert 0 < row["utilization"] < 1, "a step can't be faster than its products alone"
        parts = result["parts"]
        model = ("forward without gradient", "forward", "backward", "puzzle table", "optimizer", "average", "metrics")
        names = ("data", *model, "reduction", "rest")
        assert set(parts) == {"step", *names}
        assert sum(parts[name] for name in names) == pytest.approx(parts["step"])
        for name in model:
            assert (parts[name] > 0) == (name != "average"), f"{name}: {parts[name]} ms without ema"
        assert 0 <= parts["rest"] < 0.5 * parts["step"], "most of a step has a name"


def test_rounds_are_compared_one_by_one() -> None:
    ours = {"rounds": [{"examples_per_second": value} for value in (20.0, 10.0, 24.0)]}
    theirs = {"rounds": [{"examples_per_second": value} for value in (10.0, 10.0, 8.0)]}
    assert comparison(ours, theirs).endswith(": 2.000 (1.000 to 3.000)")


def test_attention_of_the_published_code_is_that_of_flash_attn() -> None:
    """flash_attn_func takes (batch, position, head, component), and so must what replaces it."""
    q, k, v = torch.randn(3, 2, 5, 3, 4, generator=torch.Generator().manual_seed(0))
    expected = torch.stack(
        [F.softmax(q[:, :, n] @ k[:, :, n].transpose(1, 2) / 2, dim=-1) @ v[:, :, n] for n in range(3)], dim=2
    )
    torch.testing.assert_close(flash_attention(q, k, v, causal=False), expected)
