"""Find questions that a dataset answers in two ways, also after the symmetries of training."""
# N = examples, S = tokens of an example, K = images of examples

import hashlib
from collections.abc import Callable, Iterable

import numpy as np

from dataset.tasks.base import BoardTask

Example = Callable[[int], tuple[np.ndarray, np.ndarray, np.ndarray]]
"""A function from an example's number to its input, labels, and which labels count, (S,) each."""


def digests(texts: Iterable[bytes]) -> np.ndarray:
    """Return a key for each text, (N,) uint64."""
    return np.frombuffer(b"".join(hashlib.blake2b(text, digest_size=8).digest() for text in texts), np.uint64)


def row_texts(array: np.ndarray) -> list[bytes]:
    """Return the bytes of each row."""
    rows = np.ascontiguousarray(array).reshape(len(array), -1)
    texts: list[bytes] = rows.view(f"V{rows[0].nbytes}").ravel().tolist()
    return texts


class Answers:
    """Keys of the questions and answers of a dataset without puzzle identifiers.

    Args:
        task: the task, whose symmetries count; None: only equal inputs are the same question.
    """

    def __init__(self, task: BoardTask | None) -> None:
        self._task = task
        self._num_examples = 0
        # For some images of examples: the kind of the image, the number of the example, and the
        # keys of the question and of the answer.
        self._images: list[tuple[np.ndarray, ...]] = []

    def add(self, inputs_NS: np.ndarray, labels_NS: np.ndarray, labelled_NS: np.ndarray) -> None:
        """Add the next examples. An ignored label is 0, and not in `labelled_NS`."""
        first, self._num_examples = self._num_examples, self._num_examples + len(inputs_NS)
        some_N, all_N = labelled_NS.any(axis=1), labelled_NS.all(axis=1)
        itself = [(inputs_NS, labels_NS, some_N)]
        for kind, (questions, answers, allowed_N) in enumerate(
            self._task.images(inputs_NS, labels_NS) if self._task else itself
        ):
            (rows_K,) = np.nonzero(allowed_N & (all_N if kind else some_N))
            if len(rows_K):
                chosen = (array[rows_K] for array in (questions, answers))
                keys = (digests(row_texts(array)) if array.ndim > 1 else array for array in chosen)
                self._images.append((np.full(len(rows_K), kind, np.uint8), (first + rows_K).astype(np.int32), *keys))

    def contradictions(self, example: Example) -> list[tuple[int, int]]:
        """Return two examples of each question that has several answers, by their numbers.

        Args:
            example: a function that returns the example with a number.
        """
        if not self._images:
            return []
        kind_K, number_K, question_K, answer_K = map(np.concatenate, zip(*self._images, strict=True))
        order_K = np.lexsort((answer_K, question_K))
        question_K, answer_K = question_K[order_K], answer_K[order_K]
        is_next_K = np.concatenate([[True], (np.diff(question_K) != 0) | (np.diff(answer_K) != 0)])
        order_K, question_K = order_K[is_next_K], question_K[is_next_K]  # one example of each answer
        starts = np.flatnonzero(np.concatenate([[True], np.diff(question_K) != 0]))
        counts = np.diff(np.append(starts, len(question_K)))
        found: set[tuple[int, int]] = set()
        of_images: list[tuple[int, int]] = []
        for start, count in zip(starts[counts > 1], counts[counts > 1], strict=True):
            same = order_K[start : start + count]
            pair = _disagreeing([example(int(n)) for n in number_K[same[kind_K[same] == 0]]])
            if pair is not None:
                first, second = (int(number_K[same[kind_K[same] == 0][n]]) for n in pair)
                found.add((min(first, second), max(first, second)))
            elif pair := self._images_with_other_answers(same, kind_K, number_K, example):
                of_images.append(pair)
        # The keys of images are nearly always right. They are wrong if there is only one answer.
        if self._task is not None and of_images:
            questions_NS = np.stack([example(one)[0] for one, _ in of_images])
            several_N = self._task.may_have_several_answers(questions_NS)
            found |= {pair for pair, several in zip(of_images, several_N, strict=True) if several}
        return sorted(found)

    @staticmethod
    def _images_with_other_answers(
        same: np.ndarray, kind_K: np.ndarray, number_K: np.ndarray, example: Example
    ) -> tuple[int, int] | None:
        """Return two examples, labelled completely, whose images are equal, or None."""
        image = next((at for at in same if kind_K[at]), None)
        for other in same if image is not None else ():
            if other != image and (kind_K[other] or example(int(number_K[other]))[2].all()):
                one, two = sorted((int(number_K[image]), int(number_K[other])))
                return one, two
        return None


def _disagreeing(examples: list[tuple[np.ndarray, np.ndarray, np.ndarray]]) -> tuple[int, int] | None:
    """Return two examples whose labels disagree in a cell that both label, or None."""
    if len(examples) < 2:
        return None
    labels_NS, labelled_NS = (np.stack([each[part] for each in examples]) for part in (1, 2))
    first_S = labelled_NS.argmax(axis=0)  # the first example that labels a cell
    disagrees_NS = labelled_NS & (labels_NS != np.take_along_axis(labels_NS, first_S[None], axis=0))
    if not disagrees_NS.any():
        return None
    second, cell = np.argwhere(disagrees_NS)[0]
    return int(first_S[cell]), int(second)
