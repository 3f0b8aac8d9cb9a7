"""Draw boards: examples of a dataset, and answers of a model beside them.

To draw a new kind of board, write a function from a token to a `Cell`, and add it to `KINDS`.
"""
# S = cells of a board, R = rows, C = columns, T = answers, such as those after each reasoning step

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dataset.sudoku import DIGITS
from dataset.tasks.base import BoardTask
from utils.drawing import BLACK, BLUE, GREY, RED, pyplot, save_figure

Drawing = dict[str, Any]
"""How a board is drawn, as JSON: kind, rows, columns, tokens, and where they apply box, wrapped."""

_WHITE, _WRONG_GROUND, _OUTSIDE, _LINE = "#ffffff", "#fde4d6", "#eeeeee", "#cfd2d6"
# Inches: the width of a figure, the smallest board and cells, the gap between boards, a line of
# text, and a character of the note below the boards.
_MOST_WIDTH, _LEAST_BOARD, _TEXT_CELL, _COLOUR_CELL = 13.0, 2.3, 0.26, 0.1
_GAP, _TEXT_LINE, _NOTE_CHARACTER = 0.15, 0.2, 0.07
_MOST_CHANGES = 5
# At least so many tokens stand in a line if their number is no square: a phone has room for them.
_LINE_COLUMNS = 16
# No screen shows the cells of a wider board.
_MOST_COLUMNS = 64


def board_of(task: BoardTask | None, seq_len: int) -> Drawing:
    """Return how an example is drawn: as its task says, or as a board of its tokens.

    If the number of tokens is no square, or a row of the task's board is too long for a screen, the
    tokens stand in lines. The key "wrapped" then says that rows and columns mean nothing.
    """
    unknown: Drawing = {"kind": "numbers", "rows": 0, "columns": 0, "tokens": []}
    drawing = unknown if task is None else task.drawing
    rows, columns = drawing["rows"], drawing["columns"]
    if rows * columns == seq_len and columns <= (_MOST_COLUMNS if rows > 1 else _LINE_COLUMNS):
        return drawing
    side = math.isqrt(seq_len)
    if rows * columns != seq_len and side * side == seq_len:
        return drawing | {"rows": side, "columns": side}
    columns = min(seq_len, max(_LINE_COLUMNS, side))
    return drawing | {"kind": "numbers", "rows": math.ceil(seq_len / columns), "columns": columns, "wrapped": True}


# ---- cells, by kind of board ---------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """The look of a cell."""

    text: str = ""
    ground: str = _WHITE  # a colour
    is_given: bool = False  # whether the puzzle has the same text in this cell
    is_outside: bool = False  # whether the cell does not belong to the board, which is cropped to the others


_MAZE_GROUNDS = {0: _LINE, 1: "#3a4250", 2: _WHITE, 3: "#0b7a55", 4: "#8a3ffc", 5: "#7db4f5"}
_ARC_GROUNDS = (
    *("#000000", "#0074d9", "#ff4136", "#2ecc40", "#ffdc00"),
    *("#aaaaaa", "#f012be", "#ff851b", "#7fdbff", "#870c25"),
)

KINDS: dict[str, tuple[Callable[[int, int], Cell], str]] = {
    "sudoku": (
        lambda token, question: Cell(DIGITS[token - 2] if token > 1 else "", is_given=question > 1),
        "bold: given, blue: the model's, red: wrong",
    ),
    "maze": (
        lambda token, question: Cell(ground=_MAZE_GROUNDS.get(token, GREY)),
        "green: start, violet: goal, blue: path, ×: wrong",
    ),
    "lights_out": (
        lambda token, question: Cell("●" if token == 4 else "", "#f8d68a" if question == 2 else _WHITE),
        "yellow: lit, ●: press, red: wrong",
    ),
    "arc": (  # padding and the end of the grid lie outside
        lambda token, question: (
            Cell(ground=_ARC_GROUNDS[token - 2]) if 1 < token < 2 + len(_ARC_GROUNDS) else Cell(is_outside=True)
        ),
        "×: wrong",
    ),
    "numbers": (
        lambda token, question: Cell(str(token) if token >= 0 else "", is_given=token == question),
        "bold: as in the puzzle, blue: the model's, red: wrong",
    ),
}
"""For each kind of board, the look of a cell (from its token, and the puzzle's), and a legend."""


# ---- boards --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Board:
    """A board as it is drawn."""

    title: str
    cells_RC: np.ndarray  # of `Cell`
    wrong_RC: np.ndarray | None = None  # the cells to mark as wrong; None: the board is no answer of the model


def _cells_of(drawing: Drawing, tokens_S: np.ndarray, question_S: np.ndarray) -> list[Cell]:
    cell_of, _ = KINDS.get(drawing["kind"], KINDS["numbers"])
    return [cell_of(int(token), int(given)) for token, given in zip(tokens_S, question_S, strict=True)]


def names_of_tokens(drawing: Drawing) -> str:
    """Return the names of the tokens; empty if the board shows no numbers, or has no names."""
    if drawing["kind"] in KINDS and drawing["kind"] != "numbers":
        return ""
    return ", ".join(f"{token}: {name}" for token, name in enumerate(drawing["tokens"]))


def _board(
    drawing: Drawing, title: str, cells: list[Cell], shown_S: np.ndarray, wrong_S: np.ndarray | None = None
) -> Board:
    """Return a board, cropped to the smallest part with all cells to show if there are any."""
    shape = drawing["rows"], drawing["columns"]

    def grid(values: Any, empty: Any) -> np.ndarray:
        values_RC = np.full(shape, empty)
        values_RC.reshape(-1)[: len(values)] = values  # a board in lines may end within a line
        if not shown_S.any():
            return values_RC
        places = np.divmod(np.flatnonzero(shown_S), shape[1])
        return values_RC[tuple(slice(axis.min(), axis.max() + 1) for axis in places)]

    return Board(title, grid(cells, Cell()), None if wrong_S is None else grid(wrong_S, False))


def whole_board(drawing: Drawing, title: str, tokens_S: np.ndarray, question_S: np.ndarray) -> Board:
    """Return a board that is no answer, cropped to the cells that belong to it."""
    cells = _cells_of(drawing, tokens_S, question_S)
    return _board(drawing, title, cells, np.array([not cell.is_outside for cell in cells]))


def _draw_board(axis: Any, drawing: Drawing, board: Board, has_text: bool, cell_points: float) -> None:
    """Draw a board, with cells of so many points, from the axis' origin."""
    rows, columns = board.cells_RC.shape
    wrong_RC = board.wrong_RC if board.wrong_RC is not None else np.zeros((rows, columns), bool)
    grounds_RC3 = np.full((rows, columns, 3), 255, dtype=np.uint8)
    for (row, column), cell in np.ndenumerate(board.cells_RC):
        is_wrong = bool(wrong_RC[row, column])
        ground = _WRONG_GROUND if is_wrong and has_text else _OUTSIDE if cell.is_outside else cell.ground
        grounds_RC3[row, column] = list(bytes.fromhex(ground[1:]))
        if cell.text:
            colour = RED if is_wrong else BLACK if board.wrong_RC is None or cell.is_given else BLUE
            style: dict[str, Any] = {"color": colour, "weight": "bold" if cell.is_given else "normal"}
            size = cell_points * min(0.55, 1.2 / len(cell.text))
            style |= {"fontsize": size, "ha": "center", "va": "center_baseline", "parse_math": False}
            axis.text(column + 0.5, row + 0.5, cell.text, **style)
    axis.imshow(grounds_RC3, extent=(0, columns, rows, 0), interpolation="nearest")
    # A light cross under the red one keeps it visible on every ground.
    for colour, width in () if has_text else ((_WHITE, 0.24), (RED, 0.11)):
        style = {"color": colour, "markersize": cell_points * 0.45, "markeredgewidth": cell_points * width}
        axis.plot(*(np.argwhere(wrong_RC)[:, ::-1].T + 0.5), "x", **style)
    # The edges of the board and of its boxes are strong, and lie above the other lines.
    for strong, (down, across) in ((False, (1, 1)), (True, drawing.get("box") or (rows, columns))):
        style = {"colors": BLACK if strong else _LINE, "linewidth": 1.6 if strong else 0.5, "clip_on": False}
        axis.hlines([*range(0, rows, down), rows], 0, columns, **style)
        axis.vlines([*range(0, columns, across), columns], 0, rows, **style)


def draw_boards(drawing: Drawing, boards: list[Board], title: str, note: str, path: Path, *, in_pairs: bool) -> None:
    """Draw boards side by side in as few rows as fit, with cells of one size, and save them."""
    rows, columns = (max(board.cells_RC.shape[axis] for board in boards) for axis in (0, 1))
    has_text = any(cell.text for board in boards for cell in board.cells_RC.flat)
    longest = max(rows, columns)
    cell = min(max(_TEXT_CELL if has_text else _COLOUR_CELL, _LEAST_BOARD / longest), _MOST_WIDTH / longest)  # inches
    width, title_lines = max(cell * columns, 1.9), max(board.title.count("\n") + 1 for board in boards)
    most = max(1, int(_MOST_WIDTH / (width + _GAP)))
    if in_pairs:
        most = max(2, most - most % 2)
    num_rows = -(-len(boards) // most)
    num_columns = -(-len(boards) // num_rows)
    num_columns += num_columns % 2 if in_pairs else 0
    total_width = num_columns * (width + _GAP)
    lines = [part for line in note.splitlines() for part in textwrap.wrap(line, int(total_width / _NOTE_CHARACTER))]
    height = num_rows * (cell * rows + _GAP + _TEXT_LINE * title_lines) + _TEXT_LINE * (2 + len(lines))
    figure, axes = pyplot().subplots(
        num_rows, num_columns, squeeze=False, layout="constrained", figsize=(total_width, height)
    )
    for axis, board in zip(axes.flat, boards, strict=False):
        _draw_board(axis, drawing, board, has_text, 72 * cell)
        middle, half = board.cells_RC.shape[1] / 2, width / cell / 2
        axis.set(xlim=(middle - half, middle + half), ylim=(rows, 0), aspect="equal")
        axis.set_title(board.title, fontsize=10, parse_math=False)
    for axis in axes.flat:
        axis.set_axis_off()
    figure.suptitle(title, fontsize=11, parse_math=False)
    figure.supxlabel("\n".join(lines), fontsize=9, color="#626973")
    save_figure(figure, path)


# ---- answers -------------------------------------------------------------------------------------


def wrong_cells(answer_S: np.ndarray, label_S: np.ndarray) -> np.ndarray:
    """Return which cells of an answer are wrong, bool (S,). Cells without a label are not."""
    return (label_S >= 0) & (answer_S != label_S)


def draw_answers(
    drawing: Drawing,
    question_S: np.ndarray,
    label_S: np.ndarray,
    answers_TS: np.ndarray,
    title: str,
    path: Path,
    *,
    confidence_T: Sequence[float | None] | None = None,
) -> None:
    """Draw a puzzle, the answers that changed something, and the solution if the last is wrong.

    Args:
        label_S: the solution, negative where none is known.
        answers_TS: the model's answers, such as those after each reasoning step.
        confidence_T: for each answer, the probability with which the model would halt.
    """
    wrong_TS = np.stack([wrong_cells(answer_S, label_S) for answer_S in answers_TS])
    cells_T = [_cells_of(drawing, answer_S, question_S) for answer_S in answers_TS]
    solution, is_scored_S = _cells_of(drawing, label_S, question_S), label_S >= 0
    # Cells without a label are not scored, so the window may leave their colours out.
    outside_of = [solution] if is_scored_S.any() else cells_T
    inside_S = ~np.all([[cell.is_outside for cell in cells] for cells in outside_of], axis=0)
    shown_S = inside_S | wrong_TS.any(0)
    num_scored = int((is_scored_S & shown_S).sum())  # the end of an ARC grid is scored too, but not shown
    boards = [whole_board(drawing, "puzzle", question_S, question_S)]
    changed = [t for t in range(1, len(answers_TS)) if not np.array_equal(answers_TS[t], answers_TS[t - 1])]
    for t in sorted({0, *changed[:_MOST_CHANGES], len(answers_TS) - 1}):
        heading = f"step {t + 1}" if len(answers_TS) > 1 else "answer"
        if num_scored:
            heading += f": {num_scored - wrong_TS[t].sum()} of {num_scored} right"
        if confidence_T is not None:
            heading += f"\nhalting confidence {confidence_T[t] or 0:.0%}"
        boards.append(_board(drawing, heading, cells_T[t], shown_S, wrong_TS[t]))
    if wrong_TS[-1].any():
        boards.append(_board(drawing, "solution", solution, shown_S))
    _, marks = KINDS.get(drawing["kind"], KINDS["numbers"])
    note = "\n".join(filter(None, [marks, names_of_tokens(drawing)]))
    draw_boards(drawing, boards, title, note, path, in_pairs=False)
