"""ARC as a task."""
# N = examples, S = cells of the canvas, L = its side, hw = rows and columns of a grid

import numpy as np

from dataset import arc
from dataset.tasks.base import GREY, BoardTask, Cell, Fault, Verdict, count

_WITHOUT_ENDS = bytes(arc.PADDING if token == arc.END else token for token in range(256))

# Of the 256 colours of a terminal the nearest to those in which ARC is usually shown: background, then text.
_ARC_COLORS = (
    *((16, 240), (26, 231), (160, 231), (34, 16), (220, 16)),
    *((246, 16), (163, 231), (208, 16), (117, 16), (88, 231)),
)


class ArcTask(BoardTask):
    """Tokens are those of dataset/arc.py. What counts of an answer is the grid that is cropped from it."""

    kind = "arc"
    plural = "ARC"
    shapes = f"ARC: {arc.SEQ_LEN} of {arc.VOCAB_SIZE}"
    checked = "ARC: what is no rectangle of colours with end markers, or input and label in different places."
    same_examples = "in ARC wherever on the canvas the grids stand"
    name, title, side = "arc", "ARC", arc.SIDE
    _colors_are_marks = False

    @classmethod
    def of_shape(cls, seq_len: int, vocab_size: int) -> "ArcTask | None":
        return cls() if (seq_len, vocab_size) == (arc.SEQ_LEN, arc.VOCAB_SIZE) else None

    def plain(self, tokens_S: np.ndarray) -> list[list[int]]:
        return arc.crop(tokens_S[None])[0].tolist()

    def verdict(self, question_S: np.ndarray, answer_S: np.ndarray, solution_S: np.ndarray | None = None) -> Verdict:
        (answer_hw,) = arc.crop(answer_S[None])
        if answer_hw.size == 0:
            return Verdict(False, False, "the answer is no grid")
        if solution_S is None:
            return Verdict(True, None, "not checked, since the task gives no output")
        (solution_hw,) = arc.crop(solution_S[None])
        if answer_hw.shape != solution_hw.shape:
            shapes = [f"{height}x{width}" for height, width in (answer_hw.shape, solution_hw.shape)]
            return Verdict(True, False, f"the grid is {shapes[0]}, the output {shapes[1]}")
        if num_wrong := int((answer_hw != solution_hw).sum()):
            return Verdict(True, False, f"{num_wrong} of {count(answer_hw.size, 'cell')} not as in the output")
        return Verdict(True, True, "the output that the task gives")

    def _against_rules(self, question_S: np.ndarray, answer_S: np.ndarray) -> np.ndarray:
        return np.zeros(len(answer_S), dtype=bool)

    def _lines(self, tokens_S: np.ndarray, cell: Cell) -> list[str]:
        """The cropped grid; of a canvas whose grid begins elsewhere, as in training, the part that has colours."""
        canvas_LL = tokens_S.reshape(self.side, self.side)
        height, width = arc.crop(tokens_S[None])[0].shape
        rows, columns = range(height), range(width)
        if not height:
            colored = np.nonzero(canvas_LL >= arc.FIRST_COLOUR)
            if len(colored[0]) == 0:
                return ["(no grid)"]
            rows, columns = (range(axis.min(), axis.max() + 1) for axis in colored)
        lines = []
        for row in rows:
            cells = []
            for column in columns:
                color = int(canvas_LL[row, column]) - arc.FIRST_COLOUR
                number = row * self.side + column
                if color < 0:
                    cells.append(cell(number, "· ", GREY))
                else:
                    background, text = _ARC_COLORS[color]
                    cells.append(cell(number, f"{color} ", f"48;5;{background};38;5;{text}"))
            lines.append("".join(cells).rstrip())
        return lines

    def faults(self, inputs_NS: np.ndarray, labels_NS: np.ndarray, labelled_NS: np.ndarray) -> dict[Fault, np.ndarray]:
        labelled_N = labelled_NS.any(axis=1)
        inputs_right_N, inputs_corner_N = _grids(inputs_NS)
        labels_right_N, labels_corner_N = _grids(labels_NS)
        elsewhere_N = labelled_N & inputs_right_N & labels_right_N & (inputs_corner_N != labels_corner_N)
        what = "is no rectangle of colours with end markers below and right of it"
        return {
            ("inputs", what): ~inputs_right_N,
            ("labels", what): labelled_N & ~labels_right_N,
            ("labels", "has its grid elsewhere on the canvas than its input"): elsewhere_N,
        }

    def identity(self, tokens: bytes) -> bytes:
        # From its first cell to its last, a grid is the same wherever it stands. Its end markers are not, because they
        # are left out where the canvas ends.
        return tokens.translate(_WITHOUT_ENDS).strip(bytes([arc.PADDING]))


def _grids(tokens_NS: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return whether each canvas holds one grid with its end markers, (N,) bool, and the grid's first cell, (N,)."""
    tokens_NLL = tokens_NS.reshape(-1, arc.SIDE, arc.SIDE)
    is_grid_NLL = tokens_NLL >= arc.FIRST_COLOUR
    rows_NL, columns_NL = (np.logical_or.reduce(is_grid_NLL, axis=axis) for axis in (2, 1))
    below_NL, right_NL = _line_after(rows_NL), _line_after(columns_NL)
    # Without gaps there is one line after the grid, or none where it ends with the canvas.
    right_N = (_num_runs(rows_NL) == 1) & (_num_runs(columns_NL) == 1)
    right_N &= (is_grid_NLL == (rows_NL[:, :, None] & columns_NL[:, None, :])).all(axis=(1, 2))
    ends_NLL = (below_NL[:, :, None] & columns_NL[:, None, :]) | (rows_NL[:, :, None] & right_NL[:, None, :])
    right_N &= ((tokens_NLL == arc.END) == ends_NLL).all(axis=(1, 2))
    return right_N, rows_NL.argmax(axis=1) * arc.SIDE + columns_NL.argmax(axis=1)


def _line_after(lines_NL: np.ndarray) -> np.ndarray:
    """Return the lines that come right after one of `lines_NL` and are not among them, (N, L) bool."""
    after_NL = np.zeros_like(lines_NL)
    after_NL[:, 1:] = lines_NL[:, :-1] & ~lines_NL[:, 1:]
    return after_NL


def _num_runs(lines_NL: np.ndarray) -> np.ndarray:
    return lines_NL[:, 0] + (lines_NL[:, 1:] & ~lines_NL[:, :-1]).sum(axis=1)
