"""Find questions that a dataset answers in two ways, also after the symmetries of training."""
# N = examples, S = tokens of an example, K = images of examples

import hashlib
from collections.abc import Callable, Iterable
from itertools import combinations

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
        # For some images of examples: the kind of the image (0: the example itself), the number of
        # the example, and the keys of the question and of the answer.
        self._images: list[tuple[np.ndarray, ...]] = []

    def add(self, inputs_NS: np.ndarray, labels_NS: np.ndarray, labelled_NS: np.ndarray) -> None:
        """Add the next examples. An ignored label is 0, and not in `labelled_NS`."""
        first, self._num_examples = self._num_examples, self._num_examples + len(inputs_NS)
        some_N, all_N = labelled_NS.any(axis=1), labelled_NS.all(axis=1)
        images = self._task.images(inputs_NS, labels_NS) if self._task else [(inputs_NS, labels_NS, some_N)]
        for kind, (*question_and_answer, allowed_N) in enumerate(images):
            (rows_K,) = np.nonzero(allowed_N & (all_N if kind else some_N))
            if len(rows_K):
                chosen = [array[rows_K] for array in question_and_answer]
                keys = [digests(row_texts(array)) if array.ndim > 1 else array for array in chosen]
                self._images.append((np.full(len(rows_K), kind, np.uint8), (first + rows_K).astype(np.int32), *keys))

    def contradictions(self, example: Example) -> list[tuple[int, int]]:
        """Return two examples of each question that has several answers, by their numbers."""
        if not self._images:
            return []
        kind_K, number_K, question_K, answer_K = map(np.concatenate, zip(*self._images, strict=True))
        order_K = np.lexsort((kind_K, answer_K, question_K))
        question_K, answer_K = question_K[order_K], answer_K[order_K]
        is_new_K = np.concatenate([[True], (np.diff(question_K) != 0) | (np.diff(answer_K) != 0)])
        order_K, question_K = order_K[is_new_K], question_K[is_new_K]  # one example of each answer
        starts = np.flatnonzero(np.concatenate([[True], np.diff(question_K) != 0]))
        counts = np.diff(np.append(starts, len(question_K)))
        found, of_images = list[tuple[int, int]](), list[tuple[int, int]]()
        for start, count in zip(starts[counts > 1], counts[counts > 1], strict=True):
            for one, other in combinations(order_K[start : start + count], 2):
                first, second = sorted((int(number_K[one]), int(number_K[other])))
                (_, labels_S, labelled_S), (_, others_S, other_labelled_S) = example(first), example(second)
                both_S = labelled_S & other_labelled_S
                are_images = bool(kind_K[one] or kind_K[other])
                if both_S.all() if are_images else (both_S & (labels_S != others_S)).any():
                    (of_images if are_images else found).append((first, second))
                    break
        # The keys of images are nearly always right. They are wrong if there is only one answer.
        if self._task is not None and of_images:
            questions_NS = np.stack([example(first)[0] for first, _ in of_images])
            several_N = self._task.may_have_several_answers(questions_NS)
            found += [pair for pair, several in zip(of_images, several_N, strict=True) if several]
        return sorted(set(found))
