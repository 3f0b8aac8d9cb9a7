"""Counted operations equal those of a formula that is written out for a tiny HRM and a tiny TRM."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from models.act import ActSettings, empty_batch, initial_carry
from models.carry import Carry
from models.depth import Depth
from models.parallel.layout import Layout
from tests.in_process import pretrain_config
from tests.models.helpers import ARCH_NAMES, build_puzzle_arch
from training.config import PretrainConfig
from training.data import Sizes
from training.flops import FlopsGauge, FlopsOfRun, flops_of_step, flops_until
from utils.batch import Batch
from utils.command_line import validate
from utils.errors import UserError
from utils.ranks.world import World

SIZES = Sizes(seq_len=16, vocab_size=6, num_puzzle_identifiers=3)
BATCH, HIDDEN, WIDTH = 4, 32, 256  # 256: 2/3 of 4 * 32, rounded up
POSITIONS = 16 + 1  # tokens and one position of the puzzle row
TINY = ["debug=tiny", "device=cpu", f"global_batch_size={BATCH}", "arch.H_cycles=2", "arch.L_cycles=3"]


def _config(*overrides: str) -> PretrainConfig:
    return pretrain_config(*TINY, *overrides)


def _count(*overrides: str) -> int:
    config = _config(*overrides)
    return flops_of_step(config, SIZES, config.puzzle_arch.depth)


def _linear(rows: int, num_in: int, num_out: int) -> int:
    return 2 * rows * num_in * num_out


def _block() -> int:
    """Return the forward operations of a block on the global batch."""
    rows = BATCH * POSITIONS
    attention = 2 * BATCH * 2 * POSITIONS * POSITIONS * HIDDEN  # q k^T, and the weighted sum of v
    projections = _linear(rows, HIDDEN, 3 * HIDDEN) + _linear(rows, HIDDEN, HIDDEN)
    return attention + projections + _linear(rows, HIDDEN, 2 * WIDTH) + _linear(rows, WIDTH, HIDDEN)


def _left_out_for_q_values() -> int:
    """Return the operations that a block saves if it computes only its first position."""
    rows = BATCH * (POSITIONS - 1)
    attention = 2 * BATCH * 2 * (POSITIONS - 1) * POSITIONS * HIDDEN
    return attention + _linear(rows, HIDDEN, HIDDEN) + _linear(rows, HIDDEN, 2 * WIDTH) + _linear(rows, WIDTH, HIDDEN)


def _heads() -> int:
    return _linear(BATCH * SIZES.seq_len, HIDDEN, SIZES.vocab_size) + _linear(BATCH, HIDDEN, 2)


def test_an_hrm() -> None:
    """Gradient flows through the last call of each network and into the embedding of the input.

    A backward pass costs twice its forward pass: one product for the input, one for the weight.
    """
    L_layers, H_layers = 2, 3
    calls = 2 * (3 * L_layers + H_layers) * _block()
    with_gradient = (L_layers + H_layers) * _block() + _heads()
    # The target of q_continue: one more segment without gradient, of which only the Q values count.
    target = calls - _left_out_for_q_values() + _linear(BATCH, HIDDEN, 2)
    expected = calls + _heads() + 2 * with_gradient + target
    counted = _count("arch=hrm", f"arch.L_layers={L_layers}", f"arch.H_layers={H_layers}")
    assert counted == expected
    assert _count("arch=hrm", "arch.L_layers=2", "arch.H_layers=3", "arch.halt_max_steps=1") == expected - target


# The transformer refuses cycles where it has no recursion.
TYPED = {"transformer": ["transformer arch.H_cycles=1 arch.L_cycles=1", "transformer arch.recurrent=true"]}
SE_RRM = ["se_rrm", "se_rrm arch.dropout=0.1 arch.add_tokens=2", "se_rrm arch.equivariant_symbols=false"]
SE_MIXER = ["se_mixer", "se_mixer arch.cells=attention", "se_mixer arch.cells=mlp"]
EVERY_ARCH = [*(typed for name in ARCH_NAMES for typed in TYPED.get(name, [name])), *SE_RRM, *SE_MIXER]


@pytest.mark.parametrize("arch", EVERY_ARCH)
def test_a_real_step_has_as_many_operations(arch: str) -> None:
    """torch's own counter watches a step on the CPU, with attention written out as products."""
    config = _config(*f"arch={arch}".split())
    model = build_puzzle_arch(config.arch, **SIZES.as_dict())
    model.init_weights(torch.Generator().manual_seed(0))
    batch = empty_batch(BATCH, SIZES.seq_len, torch.device("cpu"))
    options = config.puzzle_arch
    seeds_B = torch.arange(BATCH) if options.is_random else None
    settings = ActSettings(options.depth, BATCH, seeds_B=seeds_B)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        Layout[Carry, Batch, ActSettings](model, World.single()).forward_backward(
            initial_carry(model, batch), batch, settings
        )
    assert flops_of_step(config, SIZES, config.puzzle_arch.depth) == counter.get_total_flops() > 0


@pytest.mark.parametrize(
    "override",
    ["activation_checkpointing=block", "activation_checkpointing=cycle", "forward_dtype=bfloat16", "fp8_no_grad=true"],
)
def test_an_option_that_adds_no_product_changes_no_count(override: str) -> None:
    assert _count("arch=trm", f"arch.{override}") == _count("arch=trm")


def test_frozen_weights_need_no_gradient() -> None:
    assert _count("arch=trm", "freeze_weights=true") < _count("arch=trm", "freeze=blocks") < _count("arch=trm")


def _gauge(config: PretrainConfig, *, step: int, last_step: int, peak: float | None = None) -> FlopsGauge:
    gauge = FlopsGauge(FlopsOfRun(config, SIZES, last_step), torch.float32, step, World.single())
    gauge._peak_tflops, gauge._counts_from = peak, 0.0
    return gauge


def test_the_speed_counts_the_steps_since_the_last_row() -> None:
    config = _config("arch=trm")
    tflops = flops_of_step(config, SIZES, config.puzzle_arch.depth) / 1e12
    gauge = _gauge(config, step=3, last_step=100, peak=8 * tflops)
    # Five steps of 250 ms are four steps a second, and half of a peak of eight.
    assert gauge.row(8, [], 250.0) == {"perf/model_tflops": pytest.approx(4 * tflops), "perf/mfu": pytest.approx(0.5)}
    # A rewind leaves out the steps 8, 9 and 10, of which two are among these four.
    assert gauge.row(12, [10, 9, 8], 250.0)["perf/model_tflops"] == pytest.approx(2 * tflops)


def test_the_first_seconds_and_other_ranks_count_nothing_and_no_peak_gives_no_share() -> None:
    gauge = FlopsGauge(FlopsOfRun(_config("arch=trm"), SIZES, 9), torch.float32, 0, World.single())
    assert gauge.row(1, [], 1.0) == {}, "the count would take a large share of the time of a short run"
    gauge._counts_from = 0.0
    assert gauge.row(2, [], 1.0).keys() == {"perf/model_tflops"}
    gauge._is_main = False
    assert gauge.row(3, [], 1.0) == {}


def test_steps_that_were_left_out_do_not_count(copied: Path) -> None:
    first, fifth = flops_until(copied, [1, 5])
    assert fifth == 5 * first > 0
    state = max(copied.glob("step_*")) / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"skipped_steps": [4, 3]}))
    assert flops_until(copied, [2, 3, 4, 9]) == [2 * first, 2 * first, 2 * first, 7 * first]


def test_a_run_whose_depth_changes(copied: Path) -> None:
    """Half of the steps have half of the cycles, and backprop warms up over the first four."""
    sizes = Sizes(**json.loads((max(copied.glob("step_*")) / "state.json").read_text())["task"])
    typed = yaml.safe_load((copied / "config.yaml").read_text())
    stages = [{"until": 0.5, "H_cycles": 1, "L_cycles": 2}]
    typed["arch"] |= {"H_cycles": 2, "depth_curriculum": stages, "backprop": "all", "backprop_warmup_steps": 4}
    (copied / "config.yaml").write_text(yaml.safe_dump(typed))
    config = validate(PretrainConfig, typed)
    depths = [Depth(1, 2, 3, 2)] * 3 + [Depth(1, 2, 3, 3)] * 3 + [Depth(2, 2, 6, 6)] * 6
    assert [config.puzzle_arch.depth_at(step, 12) for step in range(1, 13)] == depths
    of = {depth: flops_of_step(config, sizes, depth) for depth in set(depths)}
    counts = [of[depth] for depth in depths]
    assert flops_until(copied, [1, 5, 12]) == [counts[0], sum(counts[:5]), sum(counts)]
    arch = config.arch.model_copy(update={"depth_curriculum": []})
    warming_up = FlopsOfRun(config.model_copy(update={"arch": arch}), sizes, 12)
    assert warming_up.of_steps(1, 12) == sum(map(warming_up.of, range(1, 13))) != 12 * warming_up.of(1)
    (copied / "launch.json").unlink()
    with pytest.raises(UserError, match=r"whose planned last step is not known \(no launch.json, .* give another --x"):
        flops_until(copied, [1])


def test_the_sizes_come_from_a_checkpoint_or_the_data(copied: Path) -> None:
    counted = flops_until(copied, [7])
    for step in copied.glob("step_*"):
        shutil.rmtree(step)
    assert flops_until(copied, [7]) == counted, "the data serve"
    file = copied / "config.yaml"
    file.write_text(file.read_text().replace("data_path: ", "data_path: gone"))
    with pytest.raises(UserError, match="gone"):
        flops_until(copied, [7])
