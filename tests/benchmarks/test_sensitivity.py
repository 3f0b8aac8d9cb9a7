"""The derivatives are those of the answer's log probabilities."""

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.sensitivity import main, sensitivity
from models.se_mixer import SEMixer
from training.solver import Solver

MODEL = str(Path(__file__).parents[2] / "examples" / "sudoku")


def test_a_small_change_of_a_clue_changes_the_confidence_as_told() -> None:
    solver = Solver.from_checkpoint(MODEL, device="cpu")
    model = solver.model_of(16)
    assert isinstance(model, SEMixer)
    tokens_S = torch.tensor(solver.reader.of_text("1.3....24..1..4.", "")[0].question_S.astype("int32"))
    with mock.patch.object(model, "forward", wraps=model.forward) as forward:
        answer_S, least, sum_S, row_S = sensitivity(model, tokens_S)
    embed, clue, change = model.embed, 2, 0.01

    def confidence(w: float) -> Tensor:
        """Return the log probabilities of the answer after the last segment."""

        def scaled(*arguments: Any) -> Tensor:
            x = embed(*arguments).clone()
            x[:, clue] *= w
            return x

        state, inputs_BS, rows_BE, depth = forward.call_args.args
        with mock.patch.object(model, "embed", scaled), torch.no_grad():
            logits_SV = model(state, inputs_BS, rows_BE, depth)[1][0]
        return logits_SV.log_softmax(-1).gather(-1, answer_S[:, None]).squeeze(-1)

    slope_S = (confidence(1 + change) - confidence(1 - change)) / (2 * change)
    np.testing.assert_allclose(float(sum_S[clue]), float(slope_S.sum()), rtol=0.05, atol=1e-4)
    np.testing.assert_allclose(float(row_S[clue]), float(slope_S[least]), rtol=0.05, atol=1e-4)


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    main([MODEL, "1.3....24..1..4.", "-o", str(tmp_path / "board.png")])
    assert (tmp_path / "board.png").stat().st_size > 5000
