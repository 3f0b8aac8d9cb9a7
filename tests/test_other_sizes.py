"""A model that is free of sizes reads puzzles of other sizes."""

from pathlib import Path

import pytest

from dataset.schema import open_split
from tests.in_process import SINGLE, begin, changed, train_here, weights_of
from tests.test_family import _typed
from training.trained import open_trained

SE_RRM = ["arch=se_rrm", "arch.add_tokens=2", "arch.dropout=0.1", "arch.head_dim=8", "arch.head_dim_t=8"]


@pytest.fixture
def larger(boards: dict[str, Path]) -> Path:
    """Return Sudokus of 6x6 cells. Those of `data` have 4x4."""
    return boards["2x3"]


def test_a_run_is_evaluated_and_trained_further_on_another_size(data: Path, larger: Path, tmp_path: Path) -> None:
    train_here(_typed(data, tmp_path / "run", *SE_RRM))
    trained = open_trained(tmp_path / "run", SINGLE)
    on_larger, _ = trained.with_test_split(str(larger), SINGLE)
    model = on_larger.load_puzzle_model(SINGLE)
    metadata = open_split(larger, "test").metadata
    assert (model.seq_len, model.vocab_size) == (metadata.seq_len, metadata.vocab_size) == (36, 8)
    own = trained.load_puzzle_model(SINGLE)
    assert (own.seq_len, own.vocab_size) == (16, 6)
    assert not changed(own.state_dict(), model.state_dict())

    begun = begin(_typed(larger, tmp_path / "further", f"init_from={tmp_path / 'run'}", *SE_RRM))
    assert not changed(own.state_dict(), weights_of(begun.state))
    begun.fit()
