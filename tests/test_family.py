"""Every architecture trains with every optimizer, and so does every option that they share."""

import json
import math
from pathlib import Path
from typing import get_args

import pytest

from dataset.schema import open_split
from models.layers import MlpKind
from tests import runs
from tests.in_process import SINGLE, begin, changed, train_here, weights_of
from tests.models.helpers import WHY_NO_FP8, arch_files
from tests.runs import REPOSITORY, Row
from tests.test_config import COMMANDS
from training.trained import open_trained

ARCHS = arch_files("puzzles")
OPTIMS = sorted(path.stem for path in (REPOSITORY / "config/optim").glob("[!_]*.yaml"))


def _typed(data: Path, run: Path, *more: str) -> list[str]:
    """Return the settings of two steps, both logged, without evaluation."""
    fixed = ["debug=tiny", "device=cpu", "max_steps=2", "eval_every_n_steps=null", "best_metric=null"]
    return [*fixed, f"data_path={data}", f"checkpoint_path={run}", *more]


@pytest.mark.parametrize(
    ("arch", "optim"),
    [(arch, optim) for arch in ARCHS for optim in OPTIMS if arch == "trm" or optim in ("adam_atan2", "muon")],
)
def test_every_architecture_trains_with_every_optimizer(data: Path, tmp_path: Path, arch: str, optim: str) -> None:
    begun = begin(_typed(data, tmp_path / "run", f"arch={arch}", f"optim={optim}"))
    before = weights_of(begun.state)
    state = begun.fit()
    rows = runs.rows(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(row["train/lm_loss"] > 0 and row["train/grad_norm"] > 0 for row in rows)
    assert changed(before, weights_of(state)) == set(state.model.trained_tensors())


# ---- options that cut across -------------------------------------------------------------------


def _rows(data: Path, run: Path, *more: str) -> list[Row]:
    deep = ["arch.H_cycles=2", "arch.L_cycles=2", "arch.L_layers=1"]
    train_here(_typed(data, run, "arch=trm", *deep, *more))
    rows = runs.rows(run)
    assert all(math.isfinite(value) for row in rows for value in row.values())
    return rows


@pytest.fixture(scope="module")
def plain(data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return _rows(data, tmp_path_factory.mktemp("plain") / "run")


OTHER_FORWARD = {
    **{kind: [f"arch.mlp={kind}"] for kind in get_args(MlpKind) if kind != "swiglu"},
    **{f"{kind}, mlp_t": [f"arch.mlp={kind}", "arch.mlp_t=true"] for kind in get_args(MlpKind)},
    "a convolution over the board": ["arch.conv_2d=true", "arch.puzzle_emb_ndim=0"],
    "registers instead of a puzzle": ["arch.num_registers=1", "arch.puzzle_emb_ndim=0"],
    "rope_2d behind registers": ["arch.pos_encodings=rope_2d", "arch.num_registers=3"],
    "learned": ["arch.pos_encodings=learned"],
    **({"FP8": ["arch.fp8_no_grad=true"]} if WHY_NO_FP8 is None else {}),
    "winner takes all": ["arch.num_states=3"],
    "fresh noise": ["arch.noise=fresh"],
    "annealed noise": ["arch.noise=annealed", "arch.pseudo_target_steps=1"],
    "smoothing": ["arch.loss.loss_type=softmax_cross_entropy", "arch.loss.label_smoothing=0.2"],
}
OTHER_GRADIENT = {
    "one_step": ["arch.backprop=one_step"],
    "all": ["arch.backprop=all"],
    "two calls": ["arch.backprop=2"],
    "warm-up": ["arch.backprop=all", "arch.backprop_warmup_steps=100"],
}


@pytest.mark.parametrize("option", [*OTHER_FORWARD, *OTHER_GRADIENT])
def test_an_option_changes_the_first_loss_or_only_the_second(
    data: Path, tmp_path: Path, plain: list[Row], option: str
) -> None:
    """An option of the gradient leaves the first loss, which comes from the same weights."""
    rows = _rows(data, tmp_path / "run", *(OTHER_FORWARD | OTHER_GRADIENT)[option])
    assert (rows[0]["train/lm_loss"] == plain[0]["train/lm_loss"]) == (option in OTHER_GRADIENT)
    assert rows[1]["train/lm_loss"] != plain[1]["train/lm_loss"]


# Copied from the README of the SE-RRM repository: Sudoku-Extreme, ARC-AGI-1 and Maze-Hard.
SE_RRM_COMMANDS = {
    "sudoku": COMMANDS["se_rrm_sudoku_extreme"],
    "arc": "arch=trm_equi data_paths=[data/arc1concept_d] arch.L_layers=2 ema=True global_batch_size=272 "
    "eval_interval=800 arch.pos_encodings=rope2d arch.puzzle_emb_ndim=1 lr=0.0005 puzzle_emb_weight_decay=0.3 "
    "lr_min_ratio=0.1",
    "maze": "arch=trm_equi data_paths=[data/maze-30x30-hard-1k] evaluators=[] epochs=10000 eval_interval=2000 "
    "ema=True arch.equivariant_symbols=False lr=0.0005 weight_decay=1 global_batch_size=64",
}


@pytest.mark.parametrize("name", SE_RRM_COMMANDS)
def test_the_published_commands_of_the_se_rrm_run(data: Path, tmp_path: Path, log: Path, name: str) -> None:
    """Only the sizes are smaller."""
    typed = [part for part in SE_RRM_COMMANDS[name].split() if not part.startswith(("data_paths=", "global_batch"))]
    typed += [f"data_paths=[{data}]", f"checkpoint_path={tmp_path / 'run'}", "global_batch_size=8", "max_steps=2"]
    typed += ["arch.hidden_size=32", "eval_max_examples=2", "device=cpu", "compile=false", "wandb.mode=disabled"]
    runs.train([*typed, "arch.forward_dtype=float32"], log).ok()
    stored = json.loads((tmp_path / "run/step_00000002/state.json").read_text())["config"]["arch"]
    assert (stored["name"], stored["pos_encodings"]) == ("se_rrm", "rope_2d")
    assert stored["equivariant_symbols"] == (name != "maze") and stored["dropout"] == (0.2 if name == "sudoku" else 0)


SE_RRM = ["arch=se_rrm", "arch.add_tokens=2", "arch.dropout=0.1", "arch.head_dim=8", "arch.head_dim_t=8"]


def test_a_run_is_evaluated_and_trained_further_on_another_size(
    data: Path, boards: dict[str, Path], tmp_path: Path
) -> None:
    """A model that is free of sizes goes from Sudokus of 4x4 cells to those of 6x6."""
    larger = boards["2x3"]
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


def test_clipping_changes_only_larger_gradients(data: Path, tmp_path: Path) -> None:
    """The first update does not depend on the size of its gradient, so a third step is needed."""
    norms, thirds = [], []
    for name, clip in (("never", "null"), ("above", "1e3"), ("below", "1e-3")):
        rows = _rows(data, tmp_path / name, f"grad_clip={clip}", "max_steps=3")
        norms.append(rows[0]["train/grad_norm"])
        thirds.append(rows[2]["train/lm_loss"])
    assert 1e-3 < norms[0] < 1e3 and len(set(norms)) == 1  # the logged norm is the norm before clipping
    assert thirds[0] == thirds[1] != thirds[2]
