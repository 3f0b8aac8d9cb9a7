"""Draw a Sudoku run, into its folder: curve.png (loss and accuracy over steps), puzzle.png (answer after answer).

python draw.py checkpoint=checkpoints/<project>/<run>
"""
# N = examples looked at, T = segments, S = cells

import json
import math
import sys
from pathlib import Path
from typing import Any

import torch

from dataset.augment import box_of
from dataset.loader import EvalLoader
from dataset.schema import open_split
from models.base import RecursiveModel
from models.inference import trace
from training.data import require_same_sizes
from training.trained import open_trained
from utils.command_line import CommandLine, read_config, validate
from utils.config import StrictModel
from utils.dist.config import DeviceName
from utils.dist.setup import use_device
from utils.dist.world import World
from utils.drawing import pyplot
from utils.errors import UserError
from utils.files import plain, refuse_links
from utils.program import run
from utils.run.folder import run_folder_of

USAGE = """
draw.py: pictures of a Sudoku run, saved in its folder as curve.png and puzzle.png.

  python draw.py checkpoint=checkpoints/<project>/<run>
"""

_NUM_LOOKED_AT = 500
_TRAIN, _TEST, _RIGHT, _WRONG = "#8a8f98", "#1f6feb", "#1f6feb", "#d1242f"


class DrawConfig(StrictModel):
    """config/draw.yaml says what each key means."""

    checkpoint: str
    data_path: str | None
    device: DeviceName


def main(world: World) -> None:
    with world.agree():
        if world.size > 1:
            raise UserError(f"draw.py is one process, not {world.size}; start it without torchrun")
        command = CommandLine.parse(sys.argv[1:], "draw", USAGE)
        config = None if command.page else validate(DrawConfig, read_config("draw", command.overrides))
    if config is None:
        print(command.page)
        return
    world = use_device(world, config.device)
    trained = open_trained(config.checkpoint, world)
    assert trained.config is not None and trained.checkpoint is not None
    model = trained.load_model(world)
    run_folder = run_folder_of(trained.checkpoint.path)
    with world.agree():
        split = open_split(Path(config.data_path or trained.config.test_paths[0]), "test")
        require_same_sizes(trained.sizes, split, trained.arch)
        loader = EvalLoader(split, next(iter(split.sets)), _NUM_LOOKED_AT)
        seq_len, vocab_size = split.metadata.seq_len, split.metadata.vocab_size
        box = box_of(seq_len, vocab_size)
        if box is None:
            raise UserError(
                f"draw.py draws Sudoku boards, and {seq_len} tokens of {vocab_size} kinds are none; take Sudoku data"
            )
        refuse_links([run_folder / "curve.png", run_folder / "puzzle.png"])
        rows = read_rows(run_folder / "metrics.jsonl")
    _, batch = next(loader.batches(world))
    question_S, label_S, answers_TS, halting_T = most_telling(model, batch)

    with world.agree():
        draw_curve(rows, run_folder / "curve.png")
        draw_puzzle(question_S, label_S, answers_TS, halting_T, box, run_folder / "puzzle.png")
    print(f"drew {run_folder / 'curve.png'} and {run_folder / 'puzzle.png'}")


def read_rows(file: Path) -> list[dict[str, float]]:
    """Raises UserError for what isn't rows of numbers."""
    try:
        rows = [json.loads(line) for line in plain(file).read_text().splitlines()]
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file}: holds a line that is no JSON ({error}); remove it") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict) or "step" not in row or not all(isinstance(v, int | float) for v in row.values()):
            raise UserError(f"{file}:{number}: is no row of numbers with a step; correct or remove the line")
    return rows


def most_telling(
    model: RecursiveModel, batch: dict[str, torch.Tensor]
) -> tuple[list[int], list[int], list[list[int]], list[float]]:
    """The solved puzzle that took the most changes (the first puzzle, if none is solved).

    Returns its question and solution, the answer after each segment, and the halting confidence there.
    """
    said = trace(model, batch)
    answers_TNS, halting_TN = said.predictions_TNS, said.confidence_TN
    solved_N = (answers_TNS[-1] == batch["labels"]).all(-1)
    num_wrong_N = (answers_TNS != batch["labels"]).sum((0, 2))
    chosen = int(num_wrong_N.where(solved_N, -1).argmax())
    return (
        batch["inputs"][chosen].tolist(),
        batch["labels"][chosen].tolist(),
        answers_TNS[:, chosen].tolist(),
        halting_TN[:, chosen].tolist(),
    )


def draw_curve(rows: list[dict[str, float]], path: Path) -> None:
    """Cross-entropy and exact accuracy over steps, in training and on the test split."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), constrained_layout=True)
    panels = [("lm_loss", "cross-entropy per token"), ("exact_accuracy", "puzzles solved exactly")]
    for axis, (metric, title) in zip(axes, panels, strict=True):
        for name in sorted({key for row in rows for key in row if key.split("/")[0] in ("train", "eval")}):
            if name.rsplit("/", 1)[-1] != metric:
                continue
            points = [(row["step"], row[name]) for row in rows if name in row]
            is_train = name.startswith("train/")
            label = "training (sequences that halted)" if is_train else "test"
            style = {"color": _TRAIN, "linewidth": 1} if is_train else {"color": _TEST, "linewidth": 2, "marker": "o"}
            axis.plot(*zip(*points, strict=True), label=label, markersize=4, **style)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_yscale("log")
    axes[1].set_ylim(-0.02, 1.02)
    axes[1].legend(frameon=False, loc="best")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_puzzle(
    question_S: list[int],
    label_S: list[int],
    answers_TS: list[list[int]],
    halting_T: list[float],
    box: tuple[int, int],
    path: Path,
) -> None:
    """The puzzle, and the model's whole answer after each segment that changed something and after the last."""
    plt = pyplot()
    changed = [t for t in range(1, len(answers_TS)) if answers_TS[t] != answers_TS[t - 1]]
    shown = sorted({0, *changed[:5], len(answers_TS) - 1})
    boards: list[tuple[str, list[int], list[int] | None]] = [("puzzle", question_S, None)]
    for t in shown:
        right = sum(a == b for a, b in zip(answers_TS[t], label_S, strict=True))
        title = f"segment {t + 1}: {right}/{len(label_S)} right\nhalting confidence {halting_T[t]:.0%}"
        boards.append((title, answers_TS[t], label_S))
    figure, axes = plt.subplots(1, len(boards), figsize=(2.4 * len(boards), 2.9), constrained_layout=True)
    for axis, (title, tokens, truth) in zip(axes, boards, strict=True):
        _draw_board(axis, tokens, question_S, truth, box)
        axis.set_title(title, fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_board(
    axis: Any, tokens: list[int], question: list[int], truth: list[int] | None, box: tuple[int, int]
) -> None:
    side = math.isqrt(len(tokens))
    for line in range(side + 1):
        axis.axhline(line, color="black", linewidth=1.8 if line % box[0] == 0 else 0.4)
        axis.axvline(line, color="black", linewidth=1.8 if line % box[1] == 0 else 0.4)
    for cell, token in enumerate(tokens):
        if token <= 1:  # blank
            continue
        row, column = divmod(cell, side)
        given = question[cell] > 1
        color = (
            "black" if truth is None or (given and token == truth[cell]) else _RIGHT if token == truth[cell] else _WRONG
        )
        weight = "bold" if given else "normal"
        axis.text(
            column + 0.5,
            row + 0.53,
            str(token - 1),
            ha="center",
            va="center",
            color=color,
            weight=weight,
            fontsize=54 / side,
        )
    axis.set(xlim=(0, side), ylim=(side, 0), aspect="equal", xticks=[], yticks=[])
    axis.set_frame_on(False)


if __name__ == "__main__":
    run(main)
