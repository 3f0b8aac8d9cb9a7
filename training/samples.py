"""A few answers of an evaluation in training, for people to look at."""
# N = sequences that leave, S = tokens of a puzzle

import json
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
from torch import Tensor

from dataset.pictures import board_of, draw_answers
from dataset.schema import Split
from dataset.tasks import task_of_shape
from dataset.text.schema import TextSplit
from models.inference import Finished
from records.metrics import Picture
from utils.files import write_atomically


class AnswerSample:
    """Keeps the answers to the first few of this rank's examples of the first set.

    Attributes:
        answers: of each row the question, the label, which is negative where it is not known, and
            the answer; tokens on the host.
    """

    def __init__(self, most: int) -> None:
        self.set_name: str | None = None
        self.answers: dict[int, list[np.ndarray]] = {}
        self._most, self._rows = most, np.zeros(0, np.int64)

    def begin(self, set_name: str, share: np.ndarray) -> None:
        """Choose among the rows that this rank evaluates first; only the first set counts."""
        if self.set_name is None:
            self.set_name, self._rows = set_name, share[: self._most]

    def take(self, set_name: str, done: Finished, answers_NS: Tensor) -> None:
        """Keep the answers to the chosen rows."""
        if set_name == self.set_name:
            for n in np.flatnonzero(np.isin(done.rows_N, self._rows)).tolist():
                tokens = (done.batch["inputs"][n], done.batch["labels"][n], answers_NS[n])
                self.answers[int(done.rows_N[n])] = [each_S.cpu().numpy() for each_S in tokens]

    def show(self, split: Split, run: Path, step: int) -> list[Picture]:
        """Return a picture for each answer, in the order of rows."""
        if self.set_name is None:
            return []
        seq_len, vocab_size = split.shape_of(self.set_name)
        board = board_of(task_of_shape(seq_len, vocab_size), seq_len)
        pictures = []
        for row in sorted(self.answers):
            (question_S, label_S, answer_S), title = self.answers[row], f"row {row} of {self.set_name}"
            drawn = partial(draw_answers, board, question_S, label_S, answer_S[None], title)
            pictures.append(Picture(title, drawn))
        return pictures


@dataclass(frozen=True)
class TextAnswer:
    """The model's greedy answer to a sample, as text."""

    row: int  # the number of the sample
    task: str
    # The prompt is an instruction, and `right` its response. Otherwise they are the beginning of a
    # text, and how the text goes on.
    is_problem: bool
    prompt: str
    answer: str
    right: str


@dataclass
class TextSample:
    """Takes the answers to a few samples, evenly spread. All ranks get the same."""

    most: int = 8
    answers: list[TextAnswer] = field(default_factory=list)

    def show(self, split: TextSplit, run: Path, step: int) -> list[Picture]:
        """Write the answers into the folder of a run, for people and for view.py: no pictures.

        Raises:
            OSError: They can't be written.
        """
        folder = run / "samples"
        folder.mkdir(exist_ok=True)
        told = json.dumps([asdict(answer) for answer in self.answers], indent=2, ensure_ascii=False)
        write_atomically(folder / f"step_{step:08d}.json", f"{told}\n")
        return []
