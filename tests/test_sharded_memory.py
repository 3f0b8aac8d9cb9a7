"""Under fsdp and tp no rank ever holds the whole model: not to begin, to save or to resume."""

import ctypes
import gc
import re
import sys
import threading
from pathlib import Path
from typing import Self

import pytest
from safetensors.torch import load_file

import pretrain
from tests.runs import settings
from tests.spawn import run_ranks
from utils.ranks.world import World

pytestmark = [pytest.mark.invariance, pytest.mark.slow]

NUM_RANKS = 4
# A step keeps no gradients and moments, so that weights are nearly all that takes memory. The
# weights of this model are 191 MB: fourteen blocks of 13.6 MB. What else a rank takes, such as the
# buffers of matrix products, differs by processor: with ten blocks it once made up for the rest.
MODEL: dict[str, object] = {
    "arch": "transformer",
    "arch.hidden_size": 512,
    "arch.num_heads": 8,
    "arch.num_layers": 14,
    "arch.halt_max_steps": 1,
    "arch.halt_exploration_prob": 0,
    "arch.puzzle_emb_ndim": 8,
    "arch.H_cycles": 1,
    "arch.L_cycles": 1,
    "arch.L_layers": "",
    "arch.H_layers": "",
    "freeze_weights": "true",
    "max_steps": 1,
    "global_batch_size": 4,
    "eval_every_n_steps": None,
    "checkpoint_every_n_steps": 1,
    "check_replicas_every_n_steps": None,
    "best_metric": None,
    "ema": "false",
}


class _Peak:
    """The largest memory of this process inside a context, without files that are mapped, in MB."""

    def __enter__(self) -> Self:
        self.mb = _anonymous_mb()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.004):
            self.mb = max(self.mb, _anonymous_mb())


def _anonymous_mb() -> float:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1000


def _peaks(world: World, cases: list[list[str]]) -> list[float]:
    """Run the program for each case in these processes. Return how much memory each takes, in MB.

    The first case takes little more than what the program and its libraries need.
    """
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once
    peaks = []
    for arguments in cases:
        sys.argv = ["pretrain.py", *arguments]
        gc.collect()
        with _Peak() as peak:
            pretrain.main(world)
        peaks.append(peak.mb)
    return [mb - peaks[0] for mb in peaks[1:]]


@pytest.mark.timeout(300)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
def test_no_rank_ever_holds_the_whole_model(data: Path, tmp_path: Path) -> None:
    def case(name: str, **changes: object) -> list[str]:
        typed = settings(data, tmp_path / name, **(MODEL | changes))
        return [word for word in typed if not word.endswith("=")]

    small: dict[str, object] = {"arch.hidden_size": 64, "arch.num_layers": 1}
    cases = {
        "small": case("small", parallel="fsdp_tp", **small),
        "fsdp_tp": case("fsdp_tp", parallel="fsdp_tp"),
        "fsdp_tp, resumed": case("resumed", parallel="fsdp_tp", resume=tmp_path / "fsdp_tp", max_steps=2),
        "tp, from a run": case("tp", parallel="tp", init_from=tmp_path / "fsdp_tp"),
        "fsdp, from a run": case("fsdp", parallel="fsdp", init_from=tmp_path / "fsdp_tp"),
    }
    by_rank = run_ranks(_peaks, NUM_RANKS, list(cases.values()), timeout_s=250)
    peaks = {name: max(peaks[n] for peaks in by_rank) for n, name in enumerate([*cases][1:])}
    weights = load_file(tmp_path / "tp/step_00000001/model.safetensors")
    whole = sum(tensor.nbytes for tensor in weights.values()) / 1e6
    assert whole > 100
    assert max(peaks.values()) < whole, f"peaks in MB: {peaks}, and the model has {whole:.0f} MB"
    assert min(peaks.values()) > whole / NUM_RANKS, "the test does not see the memory"
