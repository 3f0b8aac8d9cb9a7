"""Draw the pictures of view.py --png: the curves and a puzzle of a run, or examples of a dataset.

The pictures are drawn from the data of the page. To draw a new kind of board, write a function from
a token to a `Cell`, and add it to `KINDS`.
"""
# S = cells of a board, R = rows, C = columns, T = reasoning steps

import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from utils.drawing import pyplot
from utils.errors import UserError
from utils.files import refuse_links
from utils.text import one_line
from viewer.pages import Page, from_text, spread

_BLACK, _BLUE, _RED, _GREY = "#1d2127", "#1f6feb", "#c2410c", "#8a8f98"
_WHITE, _WRONG_GROUND, _OUTSIDE, _LINE = "#ffffff", "#fde4d6", "#eeeeee", "#cfd2d6"
_DPI = 130
# Inches: the width of a figure, the smallest board and cells, the gap between boards, the title.
_MOST_WIDTH, _LEAST_BOARD, _TEXT_CELL, _COLOUR_CELL = 13.0, 2.3, 0.26, 0.1
_GAP, _HEAD = 0.15, 0.35
# Inches: the width of a character of the note below the boards.
_NOTE_CHARACTER = 0.07
_MOST_CHANGES = 5
_NUM_EXAMPLES = 4


# ---- cells, by kind of board ---------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """The look of a cell.

    Attributes:
        text: the text in the cell.
        ground: the colour of the cell.
        is_given: whether the puzzle has the same text in this cell.
        is_outside: whether the cell does not belong to the board. A board is cropped to its other
            cells.
    """

    text: str = ""
    ground: str = _WHITE
    is_given: bool = False
    is_outside: bool = False


def _sudoku_cell(token: int, question: int) -> Cell:
    return Cell(text=str(token - 1) if token > 1 else "", is_given=question > 1)


_MAZE_GROUNDS = {0: _LINE, 1: "#3a4250", 2: _WHITE, 3: "#0b7a55", 4: "#8a3ffc", 5: "#7db4f5"}


def _maze_cell(token: int, question: int) -> Cell:
    return Cell(ground=_MAZE_GROUNDS.get(token, _GREY))


def _lights_out_cell(token: int, question: int) -> Cell:
    """Return the lamp as the puzzle has it, with a dot for a press."""
    return Cell(text="●" if token == 4 else "", ground="#f8d68a" if question == 2 else _WHITE)


_ARC_GROUNDS = (
    *("#000000", "#0074d9", "#ff4136", "#2ecc40", "#ffdc00"),
    *("#aaaaaa", "#f012be", "#ff851b", "#7fdbff", "#870c25"),
)


def _arc_cell(token: int, question: int) -> Cell:
    """Return a coloured cell; padding and the end of the grid lie outside."""
    if 2 <= token < 2 + len(_ARC_GROUNDS):
        return Cell(ground=_ARC_GROUNDS[token - 2])
    return Cell(is_outside=True)


def _number_cell(token: int, question: int) -> Cell:
    return Cell(text=str(token) if token >= 0 else "", is_given=token == question)


KINDS: dict[str, tuple[Callable[[int, int], Cell], str]] = {
    "sudoku": (_sudoku_cell, "bold: given, blue: the model's, red: wrong"),
    "maze": (_maze_cell, "green: start, violet: goal, blue: path, ×: wrong"),
    "lights_out": (_lights_out_cell, "yellow: lit, ●: press, red: wrong"),
    "arc": (_arc_cell, "×: wrong"),
    "numbers": (_number_cell, "bold: as in the puzzle, blue: the model's, red: wrong"),
}
"""For each kind of board, the look of a cell (from its token, and the puzzle's), and a legend."""


# ---- boards --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Window:
    """The part of a board that is shown."""

    top: int
    left: int
    num_rows: int
    num_columns: int


@dataclass(frozen=True)
class _Board:
    """A board as it is drawn.

    Attributes:
        title: the lines above the board.
        cells: the looks of the cells, row by row.
        wrong_S: the cells to mark as wrong, bool; None if the board is no answer of the model.
        window: the part that is shown.
    """

    title: str
    cells: list[Cell]
    wrong_S: np.ndarray | None
    window: _Window


def _cells_of(shape: Page, tokens_S: np.ndarray, question_S: np.ndarray) -> list[Cell]:
    cell_of, _ = KINDS.get(shape["kind"], KINDS["numbers"])
    return [cell_of(int(token), int(given)) for token, given in zip(tokens_S, question_S, strict=True)]


def _names_of_tokens(shape: Page) -> str:
    """Return the names of the tokens; empty if the board shows no numbers, or has no names."""
    if shape["kind"] in KINDS and shape["kind"] != "numbers":
        return ""
    return ", ".join(f"{token}: {name}" for token, name in enumerate(shape["tokens"]))


def _inside(cells: list[Cell]) -> np.ndarray:
    """Return which cells belong to the board, bool (S,)."""
    return np.array([not cell.is_outside for cell in cells])


def _window_of(shape: Page, shown_S: np.ndarray) -> _Window:
    """Return the smallest part with all cells to show, or the whole board if there are none."""
    rows_N, columns_N = np.divmod(np.flatnonzero(shown_S), shape["columns"])
    if not len(rows_N):
        return _Window(0, 0, shape["rows"], shape["columns"])
    top, left = int(rows_N.min()), int(columns_N.min())
    return _Window(top, left, int(rows_N.max()) - top + 1, int(columns_N.max()) - left + 1)


def _draw_board(axis: Any, shape: Page, board: _Board, cell_points: float) -> None:
    """Draw the window of a board from the axis' origin, with lines, texts and marks.

    Args:
        cell_points: the side of a cell in points.
    """
    rows, columns = board.window.num_rows, board.window.num_columns
    has_text = any(cell.text for cell in board.cells)
    grounds_RC3 = np.full((rows, columns, 3), 255, dtype=np.uint8)
    for s, cell in enumerate(board.cells):
        row, column = s // shape["columns"] - board.window.top, s % shape["columns"] - board.window.left
        if not (0 <= row < rows and 0 <= column < columns):
            continue
        is_wrong = board.wrong_S is not None and bool(board.wrong_S[s])
        ground = _WRONG_GROUND if is_wrong and has_text else _OUTSIDE if cell.is_outside else cell.ground
        grounds_RC3[row, column] = list(bytes.fromhex(ground[1:]))
        if cell.text:
            is_models = board.wrong_S is not None and not cell.is_given
            axis.text(
                column + 0.5,
                row + 0.5,
                cell.text,
                color=_RED if is_wrong else _BLUE if is_models else _BLACK,
                weight="bold" if cell.is_given else "normal",
                fontsize=cell_points * min(0.55, 1.2 / len(cell.text)),
                ha="center",
                va="center_baseline",
                parse_math=False,
            )
        elif is_wrong and not has_text:
            # A light cross under the red one keeps it visible on every ground.
            for colour, width in ((_WHITE, 0.24), (_RED, 0.11)):
                style = {"color": colour, "markersize": cell_points * 0.45, "markeredgewidth": cell_points * width}
                axis.plot([column + 0.5], [row + 0.5], "x", **style)
    axis.imshow(grounds_RC3, extent=(0, columns, rows, 0), interpolation="nearest")
    # The edges of the board and of its boxes are strong, and lie above the other lines.
    box_rows, box_columns = shape.get("box") or (rows, columns)
    across = {row: row % box_rows == 0 or row == rows for row in range(rows + 1)}
    down = {column: column % box_columns == 0 or column == columns for column in range(columns + 1)}
    for strong in (False, True):
        style = {"colors": _BLACK if strong else _LINE, "linewidth": 1.6 if strong else 0.5, "clip_on": False}
        axis.hlines([place for place, is_strong in across.items() if is_strong == strong], 0, columns, **style)
        axis.vlines([place for place, is_strong in down.items() if is_strong == strong], 0, rows, **style)


def _draw_boards(shape: Page, boards: list[_Board], title: str, note: str, path: Path, *, in_pairs: bool) -> None:
    """Draw boards side by side in as few rows as fit, with cells of one size, and save them."""
    plt = pyplot()
    rows = max(board.window.num_rows for board in boards)
    columns = max(board.window.num_columns for board in boards)
    has_text = any(cell.text for board in boards for cell in board.cells)
    smallest = _TEXT_CELL if has_text else _COLOUR_CELL
    longest = max(rows, columns)
    cell = min(max(smallest, _LEAST_BOARD / longest), _MOST_WIDTH / longest)  # inches
    width, height = max(cell * columns, 1.9), cell * rows
    most = max(1, int(_MOST_WIDTH / (width + _GAP)))
    if in_pairs:
        most = max(2, most - most % 2)
    num_rows = -(-len(boards) // most)
    num_columns = -(-len(boards) // num_rows)
    if in_pairs:
        num_columns += num_columns % 2
    above = 0.15 + 0.2 * max(board.title.count("\n") + 1 for board in boards)
    total_width = num_columns * (width + _GAP) + _GAP
    lines = [part for line in note.splitlines() for part in textwrap.wrap(line, int(total_width / _NOTE_CHARACTER))]
    below = 0.25 + 0.15 * len(lines) if lines else 0.15
    total_height = _HEAD + num_rows * (above + height) + below
    figure = plt.figure(figsize=(total_width, total_height))
    for number, board in enumerate(boards):
        row, column = divmod(number, num_columns)
        left, bottom = _GAP + column * (width + _GAP), total_height - _HEAD - (row + 1) * (above + height)
        axis = figure.add_axes(
            (left / total_width, bottom / total_height, width / total_width, height / total_height), frame_on=False
        )
        _draw_board(axis, shape, board, 72 * cell)
        middle = board.window.num_columns / 2
        half = width / cell / 2
        axis.set(xlim=(middle - half, middle + half), ylim=(rows, 0), xticks=[], yticks=[], aspect="auto")
        axis.set_title(board.title, fontsize=10, parse_math=False)
    figure.text(0.5, 1 - 0.12 / total_height, title, fontsize=11, ha="center", va="top", parse_math=False)
    note = "\n".join(lines)
    figure.text(0.5, 0.1 / total_height, note, fontsize=9, color="#626973", ha="center", va="bottom")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    """Save and close a figure.

    Raises:
        UserError: the path is a link or cannot be written.
    """
    refuse_links([path])
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        raise UserError(f"cannot write {path} ({one_line(error)}); make the folder writable") from None
    finally:
        pyplot().close(figure)


# ---- the pictures --------------------------------------------------------------------------------


def draw_curves(page: Page, path: Path) -> bool:
    """Draw cross-entropy and exact accuracy over training steps.

    Returns:
        Whether the run logged one of them, so that there is a picture.
    """
    plt = pyplot()
    titles = {"lm_loss": "cross-entropy per token", "exact_accuracy": "puzzles solved exactly"}
    panels = [(titles[one["metric"]], one) for one in page["curves"] if one["metric"] in titles]
    panels.sort(key=lambda panel: list(titles.values()).index(panel[0]))
    if not panels:
        return False
    figure, axes = plt.subplots(
        1, len(panels), figsize=(4.5 * len(panels), 3.2), squeeze=False, constrained_layout=True
    )
    for axis, (title, curve) in zip(axes.flat, panels, strict=True):
        tests = [series["name"] for series in curve["series"] if series["name"] != "train"]
        for series in curve["series"]:
            if series["name"] == "train":
                label, style = "training (sequences that halted)", {"color": _GREY, "linewidth": 1}
            else:
                label = "test" if len(tests) == 1 else series["name"].removeprefix("eval ")
                style = {"linewidth": 2, "marker": "o", "markersize": 4}
                if len(tests) == 1:
                    style["color"] = _BLUE
            values = [float("nan") if value is None else value for value in series["values"]]
            axis.plot(series["steps"], values, label=label, **style)
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        if curve["metric"] == "lm_loss":
            axis.set_yscale("log")
        else:
            axis.set_ylim(-0.02, 1.02)
    axes.flat[-1].legend(frameon=False, loc="best")
    _save(figure, path)
    return True


def draw_puzzle(page: Page, path: Path) -> None:
    """Draw the most telling puzzle of a run, and the answer after each step that changed something.

    The most telling puzzle is the solved puzzle whose answers had the most wrong cells in total. If
    no puzzle is solved, the first one is drawn.
    """
    shape = page["board"]
    example = max(page["examples"], key=_how_telling)
    question_S, label_S = from_text(example["input"]), _label_of(example)
    answers_TS = [from_text(answer) for answer in example["answers"]]
    wrong_TS = np.stack([_wrong(answer_S, label_S) for answer_S in answers_TS])
    cells_T = [_cells_of(shape, answer_S, question_S) for answer_S in answers_TS]
    solution, num_labels = _cells_of(shape, label_S, question_S), int((label_S >= 0).sum())
    # Cells without a label are not scored, so the window may leave their colours out.
    shown_S = _inside(solution) if num_labels else np.any([_inside(cells) for cells in cells_T], axis=0)
    window = _window_of(shape, shown_S | wrong_TS.any(0))
    boards = [_whole_board(shape, "puzzle", question_S, question_S)]
    changed = [t for t in range(1, len(answers_TS)) if not np.array_equal(answers_TS[t], answers_TS[t - 1])]
    for t in sorted({0, *changed[:_MOST_CHANGES], len(answers_TS) - 1}):
        title = f"step {t + 1}" if len(answers_TS) > 1 else "answer"
        if num_labels:
            title += f": {num_labels - wrong_TS[t].sum()} of {num_labels} right"
        if "confidence" in example:
            title += f"\nhalting confidence {example['confidence'][t] or 0:.0%}"
        boards.append(_Board(title, cells_T[t], wrong_TS[t], window))
    if wrong_TS[-1].any():
        boards.append(_Board("solution", solution, None, window))
    _, marks = KINDS.get(shape["kind"], KINDS["numbers"])
    note = "\n".join(filter(None, [marks, _names_of_tokens(shape)]))
    title = f"{page['title']}: row {example['row']} of {example['set']}"
    _draw_boards(shape, boards, title, note, path, in_pairs=False)


def _whole_board(shape: Page, title: str, tokens_S: np.ndarray, question_S: np.ndarray) -> _Board:
    """Return a board that is no answer, cropped to the cells that belong to it."""
    cells = _cells_of(shape, tokens_S, question_S)
    return _Board(title, cells, None, _window_of(shape, _inside(cells)))


def _label_of(example: Page) -> np.ndarray:
    """Return the solution (S,), -1 where none is known."""
    return from_text(example["label"]) if "label" in example else np.full(len(example["input"]), -1)


def _wrong(answer_S: np.ndarray, label_S: np.ndarray) -> np.ndarray:
    return (label_S >= 0) & (answer_S != label_S)


def _how_telling(example: Page) -> int:
    """Return how many cells were wrong over all steps; -1 if the last answer is wrong."""
    label_S = _label_of(example)
    num_wrong_T = [int(_wrong(from_text(answer), label_S).sum()) for answer in example["answers"]]
    return sum(num_wrong_T) if num_wrong_T[-1] == 0 and (label_S >= 0).any() else -1


def draw_examples(page: Page, path: Path) -> None:
    """Draw the first example of a few groups of a dataset, each question beside its solution."""
    shape = page["board"]
    firsts: dict[tuple[str, int], Page] = {}
    for example in page["examples"]:
        firsts.setdefault((example["set"], example["group"]), example)
    groups = list(firsts.values())
    boards: list[_Board] = []
    for place in spread(len(groups), _NUM_EXAMPLES):
        example = groups[place]
        question_S = from_text(example["input"])
        boards.append(_whole_board(shape, f"{example['set']}, row {example['row']}", question_S, question_S))
        boards.append(_whole_board(shape, "solution", _label_of(example), question_S))
    _draw_boards(shape, boards, page["title"], _names_of_tokens(shape), path, in_pairs=True)
