"""The page of --dry-run says what a run takes, what would fit, and what it lacks to say so."""

import itertools
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from pretrain import read_overrides
from tests.in_process import SINGLE, begin, pretrain_config
from tests.runs import command, settings
from training import dry_run as of_dry_run
from training.data import AnySizes, Sizes, TextSizes
from training.dry_run import Variants
from training.footprint import PARTS, Footprints
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TINY = ["debug=tiny", "arch.hidden_size=64"]
SIZES = ["seq_len=81", "vocab_size=11", "num_puzzle_identifiers=1001"]


def dry_run(typed: list[str], num_ranks: int = 1) -> str:
    return "\n".join(of_dry_run.dry_run(typed, num_ranks))


def _values(page: str, head: str) -> list[str]:
    (line,) = [line for line in page.splitlines() if line.strip().startswith(head)]
    return line.strip().removeprefix(head).split()


def _of_model(typed: list[str], num_ranks: int = 1) -> list[str]:
    """Return the lines on the model: what follows takes seconds."""
    return list(itertools.takewhile(lambda line: not line.startswith("\nmemory"), of_dry_run.dry_run(typed, num_ranks)))


def test_a_rate_gives_the_hours() -> None:
    head, _, weights, flops, time = _of_model([*TINY, *SIZES, "tflops=0.5", "max_steps=7200"], 4)
    assert head == "arch=hrm parallel=ddp on 4 ranks, 16 slots, 4 on a rank"
    assert weights.endswith("; 64,064 in the puzzle table")
    assert flops == "FLOPs: 389 M for a segment of a slot, 4.8 M for each of its tokens; 6.22 G for a step"
    assert time == "time: 0.00311 s for a step, 0.00622 hours for 7,200 steps without evaluations"
    assert "for 1,000 steps" in _of_model([*TINY, *SIZES, "tflops=0.5", "max_steps=null"])[-1]


def test_the_ranks_of_a_launcher_count(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Mock(return_value=[])
    monkeypatch.setattr("pretrain.dry_run", shown)
    assert read_overrides(["--dry-run", "lr=1"], 3) is None
    shown.assert_called_once_with(["lr=1"], 3)


def test_the_dtype_is_that_of_most_devices_unless_the_run_asks_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Mock(return_value=[])
    monkeypatch.setattr(of_dry_run, "_of_model", shown)
    monkeypatch.setattr("training.precision.multiplies_bfloat16", lambda device: False)
    for dtype, device, expected in (("auto", "auto", "bfloat16"), ("auto", "cpu", "float32")):
        _of_model([*TINY, *SIZES, f"arch.forward_dtype={dtype}", f"device={device}"])
        assert shown.call_args.args[0].arch.forward_dtype == expected


@pytest.mark.slow  # each page tries every strategy, which takes seconds
def test_the_page_says_what_makes_a_run_fit() -> None:
    options = [*TINY, *SIZES, "ranks=2", "global_batch_size=32", "memory_gb=0.03"]
    (line,) = [line for line in dry_run(options).splitlines() if line.startswith("the run does not fit")]
    changes = line.partition("; it would with ")[2].split()
    keys = {"parallel", "arch.activation_checkpointing", "grad_accumulation"}
    assert changes and {change.partition("=")[0] for change in changes} <= keys
    assert "the run fits: " in dry_run([*options, *changes])


def _variants(typed: list[str], sizes: AnySizes, num_ranks: int) -> Variants:
    config = pretrain_config("arch.forward_dtype=float32", *typed)
    return Variants(config, sizes, num_ranks, 72e9)


def test_the_smallest_change_keeps_what_was_asked_for() -> None:
    typed = [*TINY, "global_batch_size=32", "arch.activation_checkpointing=block"]
    variants = _variants(typed, Sizes(81, 11, 1001), 2)
    variants.limit = sum(variants.asked.values()) - 1
    best = variants.smallest_change(variants.row("ddp"))
    assert best is not None and best.typed == ["grad_accumulation=2"]


def test_other_degrees_are_tried_where_the_defaults_do_not_suit_the_model() -> None:
    """Tensor parallelism over 4 of 8 ranks does not divide 6 heads, and over 2 it does."""
    typed = ["debug=tiny_text", "arch=hrm_text", "arch.hidden_size=48", "arch.num_heads=6", "arch.num_layers=2"]
    sizes = TextSizes(256, 64, 64, "unknown", {})
    variants = _variants([*typed, "rows_per_step=8", "global_batch_size=512"], sizes, 8)
    assert "parallel.tensor=2" in variants.row("fsdp_tp")[-1].typed
    with pytest.raises(UserError, match="needs a stack that is gone through once"):
        variants.row("pipeline")
    variants = _variants([*typed, "arch=gpt", "rows_per_step=64", "global_batch_size=512"], sizes, 8)
    assert "parallel.stages=2" in variants.row("pipeline")[-1].typed


def test_the_sizes_are_those_of_the_data_if_they_are_there(data: Path, tmp_path: Path) -> None:
    assert "seq_len 16, vocab_size" in _of_model([*TINY, f"data_path={data}"])[1]
    (tmp_path / "train").mkdir()
    shutil.copy(data / "train" / "dataset.json", tmp_path / "train")
    with pytest.raises(UserError, match=r"can't be opened \(.*give data_path=.*seq_len=81 vocab_size=11"):
        dry_run([*TINY, f"data_path={tmp_path}"], 1)
    with pytest.raises(UserError, match=r"such as num_puzzle_identifiers=1001"):
        dry_run([*TINY, "data_path=nowhere", *SIZES[:2]], 1)


def test_the_page_counts_tokens_of_text() -> None:
    options = ["parallel=fsdp", "global_batch_size=65536", "rows_per_step=16", "ranks=8", "vocab_size=32000"]
    lines = "\n".join(_of_model(["arch=llama2_7b", *options]))
    assert lines.startswith("arch=gpt parallel=fsdp on 8 ranks, 65,536 tokens in 16 rows, 2 on a rank\n")
    assert "vocab_size 32,000, sequences of 4,096 tokens" in lines and "parameters: 6,738,415,616" in lines
    # 6 operations for each weight but the embedding's, and attention to 4,096 places in 32 layers.
    of_token = 6 * (6_738_415_616 - 32_000 * 4_096) + 12 * 32 * 4_096 * 4_096
    assert f"FLOPs: {of_token / 1e9:.3g} G for a token" in lines

    small = ["arch=hrm_text", "arch.num_layers=2", "arch.hidden_size=64", "arch.num_heads=8"]
    small += ["global_batch_size=8192", "rows_per_step=2", "ranks=2"]
    page = dry_run([*small, "vocab_size=500", "seq_len=100", "memory_gb=0.01"])
    assert "vocab_size 512, sequences of 100 tokens" in page and "take more ranks" in page
    parts = [float(_values(page, f"{part} ")[-1]) for part in PARTS if f"\n  {part} " in page]
    assert float(_values(page, "most at a time")[-1]) == pytest.approx(sum(parts), abs=0.003)
    for wrong, message in (
        ("data_path=nowhere", "such as vocab_size=32000"),
        ("vocab_size=32000 seq_len=5000", "seq_len=5,000 does not fit into a row of 4,096 tokens"),
        ("vocab_size=32000 num_puzzle_identifiers=3", "text has no puzzles"),
    ):
        with pytest.raises(UserError, match=message):
            dry_run([*small, *wrong.split()])


def test_a_slip_is_named() -> None:
    for typed, message in (
        ("memory_gb=-1", "memory_gb.*-1"),
        ("resume=auto", "leave resume out"),
        ("ranks=7", "7 ranks"),
    ):
        with pytest.raises(UserError, match=message):
            dry_run([*TINY, *SIZES, typed])


def test_the_command_prints_the_page_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = command(f"python {ROOT / 'pretrain.py'} --dry-run {' '.join([*TINY, *SIZES])} ranks=2", tmp_path)
    assert done.status == 0, done.stderr
    assert "on 2 ranks" in done.stdout and "the run fits: " in done.stdout and not done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("share", [pytest.param(0.05, marks=pytest.mark.slow), 2.0, 1e-6])
def test_the_named_change_of_a_step_fits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    begun = begin(settings(data, tmp_path / "run", global_batch_size=1024, epochs=100_000))
    config, footprints = begun.start.config, Footprints(begun.data.sizes, 1)
    asked = sum(footprints.of(config).values())
    monkeypatch.setattr(of_dry_run, "room_for", lambda world: share * asked / of_dry_run._USABLE_SHARES["cpu"])
    said = of_dry_run.smaller_step(begun.start, begun.data, SINGLE)
    if share < 0.01:
        assert f"arch.hidden_size={config.arch.hidden_size // 2}" in said and "parallel=fsdp" in said
        return
    named = dict(re.findall(r"(grad_accumulation|arch.activation_checkpointing)=(\w+)", said))
    assert named, said
    arch = {"activation_checkpointing": named.get("arch.activation_checkpointing", "none")}
    parts = int(named.get("grad_accumulation", 1))
    changed = config.model_copy(update={"arch": config.arch.model_copy(update=arch), "grad_accumulation": parts})
    assert sum(footprints.of(changed).values()) <= min(share, 0.5) * asked, said
