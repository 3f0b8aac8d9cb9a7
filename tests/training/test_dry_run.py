"""The page of --dry-run says what a run takes, what would fit, and what it lacks to say so."""

import shutil
from pathlib import Path

import pytest

from tests.runs import command
from training.dry_run import dry_run
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
TINY = ["debug=tiny", "arch.hidden_size=64"]
SIZES = ["seq_len=81", "vocab_size=11", "num_puzzle_identifiers=1001"]


def _values(page: str, head: str) -> list[str]:
    (line,) = [line for line in page.splitlines() if line.strip().startswith(head)]
    return line.strip().removeprefix(head).split()


def test_the_page_tells_of_64_ranks_that_are_not_there() -> None:
    options = ["experiment=sudoku_extreme_1k", "parallel=fsdp", "ranks=64", "ema=true", *SIZES]
    page = dry_run(options, 1)
    assert page.startswith("arch=hrm parallel=fsdp on 64 ranks, 768 slots, 12 on a rank\n")
    assert "parameters: 27,275,266" in page and "512,512 in the puzzle table" in page
    assert "FLOPs: 36.2 G for a segment of a slot, 447 M for each of its tokens" in page
    none, block, cycle = (float(value) for value in _values(page, "activations"))
    assert none > block > cycle
    for head in ("weights", "gradients", "optimizer's moments", "average (ema)", "carry and batch", "most at a time"):
        assert len(_values(page, head)) == 3, head
    assert "the run fits: " in page
    assert max(map(len, page.splitlines())) <= 140


def test_the_page_says_what_makes_a_run_fit() -> None:
    page = dry_run([*TINY, *SIZES, "ranks=2", "global_batch_size=4096", "memory_gb=0.3"], 1)
    (line,) = [line for line in page.splitlines() if line.startswith("the run does not fit")]
    changes = line.partition("; it would with ")[2].split()
    assert changes and {change.partition("=")[0] for change in changes} <= {
        "parallel",
        "arch.activation_checkpointing",
        "grad_accumulation",
    }
    changed = dry_run([*TINY, *SIZES, "ranks=2", "global_batch_size=4096", "memory_gb=0.3", *changes], 1)
    assert "the run fits: " in changed
    nothing = dry_run([*TINY, *SIZES, "ranks=2", "memory_gb=0.001"], 1)
    assert "take more ranks, a smaller global_batch_size or model" in nothing


def test_the_sizes_are_those_of_the_data_if_they_are_there(data: Path, tmp_path: Path) -> None:
    assert "seq_len 16, vocab_size" in dry_run([*TINY, f"data_path={data}", "ranks=2"], 1)
    (tmp_path / "train").mkdir()
    shutil.copy(data / "train" / "dataset.json", tmp_path / "train")
    with pytest.raises(UserError, match=r"can't be opened \(.*give data_path=.*seq_len=81 vocab_size=11"):
        dry_run([*TINY, f"data_path={tmp_path}"], 1)
    with pytest.raises(UserError, match=r"such as num_puzzle_identifiers=1001"):
        dry_run([*TINY, "data_path=nowhere", *SIZES[:2]], 1)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["ranks=many"], "ranks=many: give a whole number from 1"),
        (["ranks=0"], "ranks=0: give a whole number from 1"),
        (["ranks=1.5"], "ranks=1.5: give a whole number from 1"),
        (["memory_gb=-1"], "memory_gb=-1: give a number above 0"),
        (["rank=8"], "unknown key 'rank'|rank"),
        (["resume=auto"], "resume=auto: --dry-run tells of a new run; leave resume out"),
        (["ranks=7"], "can't be split over 7 ranks"),
    ],
)
def test_a_slip_is_named(typed: list[str], message: str) -> None:
    with pytest.raises((UserError, ValueError), match=message):
        dry_run([*TINY, *SIZES, *typed], 1)


def test_the_command_prints_the_page_and_leaves_nothing_behind(tmp_path: Path) -> None:
    done = command(f"python {ROOT / 'pretrain.py'} --dry-run {' '.join([*TINY, *SIZES])} ranks=2", tmp_path)
    assert done.status == 0, done.stderr
    assert "on 2 ranks" in done.stdout and not done.stderr
    assert not list(tmp_path.iterdir())
