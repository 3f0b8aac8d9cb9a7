"""Under fsdp and tp no rank ever holds the whole model: not to begin, to save or to resume."""

import ctypes
import gc
import re
import sys
import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import pretrain
from tests.runs import settings
from tests.spawn import run_ranks
from utils.ranks.world import World

pytestmark = pytest.mark.invariance

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

    def __enter__(self) -> "_Peak":
        self.mb = _anonymous_mb()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.mb = max(self.mb, _anonymous_mb())


def _anonymous_mb() -> float:
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1000


def _peaks(world: World, small: list[str], cases: list[list[str]]) -> list[float]:
    """Run the program for each case in these processes. Return how much memory each takes, in MB.

    Args:
        small: a case that takes little more than what the program and its libraries need.
    """
    ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: what is freed goes back to the system at once
    peaks = []
    for arguments in (small, *cases):
        sys.argv = ["pretrain.py", *arguments]
        gc.collect()
        with _Peak() as peak:
            pretrain.main(world)
        peaks.append(peak.mb)
    return [mb - peaks[0] for mb in peaks[1:]]


@pytest.mark.timeout(700)
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
def test_no_rank_ever_holds_the_whole_model(data: Path, tmp_path: Path) -> None:
    def case(name: str, **changes: object) -> list[str]:
        typed = settings(data, tmp_path / name, **(MODEL | changes))
        return [word for word in typed if not word.endswith("=")]

    def begun(name: str, source: Path) -> list[str]:
        return case(name, init_from=source, parallel="fsdp")

    def worst(cases: dict[str, list[str]]) -> dict[str, float]:
        sizes: dict[str, object] = {"arch.hidden_size": 64, "arch.num_layers": 1}
        small = case(f"small-beside-{len(cases)}", parallel="fsdp_tp", **sizes)
        by_rank = run_ranks(_peaks, NUM_RANKS, small, list(cases.values()), timeout_s=600)
        return {name: max(peaks[n] for peaks in by_rank) for n, name in enumerate(cases)}

    cases = {"init_from": begun("begun", tmp_path / "fsdp")}
    for strategy in ("fsdp_tp", "tp", "fsdp"):
        of_both = {"parallel": strategy, "resume": tmp_path / strategy, "max_steps": 2}
        cases = {
            strategy: case(strategy, parallel=strategy),
            f"{strategy}, resumed": case(f"{strategy}-resumed", **of_both),
            **cases,
        }
    # A run that keeps an average takes twice as much memory, so that its own peak says nothing.
    cases["averaged"] = case("averaged", parallel="fsdp", ema="true")
    peaks = worst(cases)
    assert peaks.pop("averaged") > peaks["fsdp"]

    weights = load_file(tmp_path / "tp/step_00000001/model.safetensors")
    whole = sum(tensor.nbytes for tensor in weights.values()) / 1e6
    assert whole > 100
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, tmp_path / "bfloat16.safetensors")
    cases = {
        "init_from, bfloat16": begun("begun-bfloat16", tmp_path / "bfloat16.safetensors"),
        "init_from, averages": begun("begun-averages", tmp_path / "averaged"),
    }
    peaks |= worst(cases)
    assert max(peaks.values()) < whole, f"peaks in MB: {peaks}, and the model has {whole:.0f} MB"
    assert min(peaks.values()) > whole / NUM_RANKS, "the test does not see the memory"
