"""ARC as a task."""
# S = cells of the canvas, L = its side, hw = rows and columns of a grid

import numpy as np

from dataset import arc
from dataset.tasks.base import GREY, BoardTask, Cell, Verdict, count

# Of the 256 colours of a terminal the nearest to those in which ARC is usually shown: background, then text.
_ARC_COLORS = (
    *((16, 240), (26, 231), (160, 231), (34, 16), (220, 16)),
    *((246, 16), (163, 231), (208, 16), (117, 16), (88, 231)),
)


class ArcTask(BoardTask):
    """Tokens are those of dataset/arc.py. What counts of an answer is the grid that is cropped from it."""

    kind = "arc"
    shapes = f"ARC: {arc.SEQ_LEN} of {arc.VOCAB_SIZE}"
    name, side = "arc", arc.SIDE
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
