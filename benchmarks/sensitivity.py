"""Draw on which clues a model's confidence in its answer to a puzzle depends.

    python -m benchmarks.sensitivity CHECKPOINT PUZZLE -o sensitivity.png

The embedding of clue j is multiplied by w_j, which is 1. The Jacobian J_ij is the derivative of the
log probability of the answer in cell i by w_j, through the last of as many segments as in training.
(Through all of them it explodes where the answers still change.) The first board shows its sum over
all cells i, the second its row of the least sure cell: green clues make the model surer, pink ones
less sure.
"""

# S = cells of the board

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.func import vjp

from models.act import initial_carry, segment
from models.carry import SegmentOutput
from models.se_mixer import SEMixer
from models.tokens import TokenModel
from training.solver import Solver
from utils.arguments import Parser, typed_path
from utils.drawing import BLACK, BLUE, pyplot, save_figure
from utils.errors import UserError
from utils.shell import run_command


def sensitivity(model: SEMixer | TokenModel, tokens_S: Tensor) -> tuple[Tensor, int, Tensor, Tensor]:
    """Return the answer (S,), its least sure cell i, the sum of J over all i, and row i (S,)."""
    inputs_1S = tokens_S[None]
    batch = {"inputs": inputs_1S, "labels": inputs_1S, "puzzle_identifiers": torch.zeros(1, dtype=torch.int32)}
    taken: list[tuple[Any, ...]] = []

    def forward(*arguments: Any) -> SegmentOutput:
        taken.append(arguments)
        return model(*arguments)

    carry = initial_carry(model, batch)
    with torch.no_grad():
        for _ in range(model.config.halt_max_steps):
            carry, _ = segment(model, carry, batch, forward=forward)
            carry.halted_B = torch.zeros_like(carry.halted_B)
    state, _, rows_BE, depth = taken[-1]
    depth = replace(depth, num_grad_calls=depth.num_calls)
    ones_P = torch.ones(model.prefix_len if isinstance(model, TokenModel) else 0)
    embed = model.embed

    def confidence(w_S: Tensor) -> tuple[Tensor, Tensor]:
        def scaled(*arguments: Any) -> Tensor:
            x = embed(*arguments)
            return x * torch.cat([ones_P, w_S]).view(-1, *[1] * (x.ndim - 2))

        with mock.patch.object(model, "embed", scaled):
            _, logits_BSV, _, _ = model(state, inputs_1S, rows_BE, depth)
        best = logits_BSV[0].log_softmax(-1).max(-1)
        return best.values, best.indices

    values_S, times_J, answer_S = vjp(confidence, torch.ones(len(tokens_S)), has_aux=True)  # type: ignore[misc]
    least = int(values_S.argmin())
    (sum_S,), (row_S,) = (times_J(each_S) for each_S in (torch.ones_like(values_S), torch.eye(len(values_S))[least]))
    return answer_S, least, sum_S.detach(), row_S.detach()


def main(argv: list[str] | None = None) -> str:
    parser = Parser("python -m benchmarks.sensitivity", "Draw on which clues a model's confidence depends.")
    parser.add_argument("checkpoint", help="as for solve.py: a mixer, or a model of tokens")
    parser.add_argument("puzzle", help="a board, row by row")
    parser.add_argument("-o", "--output", type=typed_path, default=Path("sensitivity.png"), help="default: %(default)s")
    typed = parser.parse_args(argv)
    solver = Solver.from_checkpoint(typed.checkpoint, device="cpu")
    own = solver.board
    if not own.symbols:
        raise UserError(f"{typed.checkpoint} has no boards that are texts; give another one")
    (puzzle,) = solver.reader.of_text(typed.puzzle, "the puzzle")
    num_cells = len(puzzle.question_S)
    model = solver.model_of(num_cells)
    board = own if num_cells == own.rows * own.columns else own.of_other_size(num_cells)
    if not isinstance(model, SEMixer | TokenModel) or board is None:
        raise UserError(f"{typed.checkpoint} is no mixer and no model of tokens; give another one")
    tokens_S = torch.from_numpy(puzzle.question_S.astype("int32"))
    answer_S, least, sum_S, row_S = sensitivity(model.float(), tokens_S)
    is_clue_S = torch.from_numpy(puzzle.question_S != board.blank)
    figure, axes = pyplot().subplots(1, 2, figsize=(11, 5.6), layout="constrained")
    for axis, title, shown_S in (
        (axes[0], "the whole answer", sum_S),
        (axes[1], "the least sure cell (outlined)", row_S),
    ):
        shown = torch.where(is_clue_S, shown_S, torch.nan).view(board.rows, board.columns)
        most = float(shown.nan_to_num().abs().max()) or 1.0
        picture = axis.imshow(shown, cmap="PiYG", vmin=-most, vmax=most)
        figure.colorbar(picture, ax=axis, shrink=0.8, label="d log p / d w")
        for s in range(len(tokens_S)):
            of_clue = bool(is_clue_S[s])
            text, look = (
                board.symbols[answer_S[s]],
                {"color": BLACK if of_clue else BLUE, "alpha": 1 if of_clue else 0.6},
            )
            row, column = divmod(s, board.columns)
            axis.text(column, row, text, ha="center", va="center", fontweight="bold" if of_clue else "normal", **look)
        axis.set(title=title, xticks=[], yticks=[])
    row, column = divmod(least, board.columns)
    axes[1].add_patch(pyplot().Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor=BLUE, linewidth=2))
    save_figure(figure, typed.output)
    return f"wrote {typed.output}: the least sure cell is in row {row + 1}, column {column + 1}"


if __name__ == "__main__":
    sys.exit(run_command(main, None))
