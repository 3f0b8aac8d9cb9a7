"""Evaluation of text: the loss of every sample once, and the greedy answers to problems."""
# N = samples, or tokens of a row, K = samples of a row, T = tasks, M = sums, B = prompts, V =
# vocabulary

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from dataset.schema import IGNORE_LABEL, unchanged
from dataset.text.packing import packed_row, published_steps
from dataset.text.schema import SET_NAME, UNKNOWN, TextSplit
from dataset.text.tokenizer import Tokenizer, open_tokenizer
from models.losses import widest_float
from models.text.config import CallCounts
from models.text.generation import Decoder
from models.text.model import TextModel
from models.text.packing import Packing
from training.evaluation import EvalOptions
from training.laps import Interrupts, Lap, run_laps
from training.samples import TextAnswer, TextSample
from utils.perf.clocks import Deadline
from utils.ranks.world import World

# Of a text that is shown, the model reads at most so many tokens, and continues for so many.
_MOST_GIVEN, _MOST_CONTINUED = 64, 128
_MOST_EXPONENT = 700.0  # math.exp has no result beyond
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2
# What is summed for each task: over labelled tokens, samples, bytes of labels, and answers.
_SUMS = ("labels", "accuracy", "loss", "num_examples", "bytes", "num_answers", "exact_accuracy")
# What each task has of its own, where there are several.
_BY_TASK = ("loss", "bits_per_byte", "exact_accuracy", "num_answers")


def text_eval_metrics(split: TextSplit, max_examples: int | None = None) -> list[str]:
    """Return the names of what `evaluate_text` measures on a split, without the set and the counts.

    Raises:
        UserError: The tokenizer of the split can't be read.
    """
    _, places_N5 = _chosen(split, max_examples)
    num_TM = np.zeros((len(split.metadata.tasks), len(_SUMS)))
    num_TM[:, 0] = np.bincount(places_N5[:, 4], minlength=len(num_TM))
    if _tokenizer(split) is not None:
        num_TM[:, _SUMS.index("bytes")] = num_TM[:, 0]
    problems_N5 = places_N5[_is_problem(places_N5)]
    num_TM[:, _SUMS.index("num_answers")] = np.bincount(problems_N5[:, 4], minlength=len(num_TM))
    names = _metrics(split.metadata.tasks, torch.from_numpy(num_TM))
    return [name for name in names if name.split("/")[0] not in ("num_examples", "num_answers")]


@torch.no_grad()
def evaluate_text(
    model: TextModel,
    split: TextSplit,
    world: World,
    options: EvalOptions,
    interrupts: Interrupts | None = None,
    sample: TextSample | None = None,
) -> dict[str, float] | None:
    """Evaluate each sample once. All ranks get the same metrics. Every rank.

    An answer is exact if greedy decoding gives the response with its end token. Samples without an
    instruction have no answer.

    Args:
        interrupts: loss and answers share the time of its deadline.
        sample: takes a few answers. All ranks have one, or none.

    Returns:
        eval/all/<name> for `text_eval_metrics`, num_examples and num_answers. bits_per_byte is the
        loss for each byte of the labelled text, where special tokens have no bytes. If there are
        several tasks, each has a loss of its own. None if the evaluation was abandoned.
    """
    interrupts, of = interrupts or Interrupts(), _Evaluation(model, split, world, options)
    parts = {"loss": (of.rows, lambda: _Row(of, []).advance()), "answers": (of.answers, of.decode_nothing)}
    for name, deadline in interrupts.deadline.shared_by(list(parts) if of.problems_N.size else ["loss"]):
        laps, idle = parts[name]
        if not run_laps(laps(spread=deadline.is_set), idle, world, interrupts, deadline):
            return None
    (late,) = world.any_of(world.is_main and interrupts.deadline.is_near)
    if sample is not None and not late:
        with world.shared_errors():
            shown = _Shown(of, sample.most)
        # All ranks decode alike.
        if not run_laps(iter([shown]), of.decode_nothing, world, replace(interrupts, deadline=Deadline()), Deadline()):
            return None
        sample.answers += shown.texts()
    found = _metrics(split.metadata.tasks, world.sum_(of.sums_TM))
    return {f"eval/{SET_NAME}/{name}": value for name, value in found.items()}


class _Evaluation:
    """What the laps of an evaluation share. In a lap, each rank has one batch or none."""

    def __init__(self, model: TextModel, split: TextSplit, world: World, options: EvalOptions) -> None:
        self.model, self.split, self.world, self.target_only = model, split, world, options.target_only
        with world.shared_errors():
            self.tokenizer = _tokenizer(split)
            self.numbers_N, self.places_N5 = _chosen(split, options.max_examples)
        self.problems_N = np.flatnonzero(_is_problem(self.places_N5))
        # dataset.json may name more tokens than the tokenizer has.
        self.bytes_V = np.zeros(split.metadata.vocab_size, np.int64)
        if self.tokenizer is not None:
            of_tokens = self.tokenizer.bytes_of_tokens()[: len(self.bytes_V)]
            self.bytes_V[: len(of_tokens)] = of_tokens
        self.num_tokens = max(options.batch_size // world.data_size, int(self.places_N5[:, [1, 3]].sum(1).max()))
        shape, dtype = (len(split.metadata.tasks), len(_SUMS)), widest_float(world.device)
        self.sums_TM = torch.zeros(shape, dtype=dtype, device=world.device)

    def rows(self, *, spread: bool) -> Iterator[Lap]:
        """Yield the losses of this rank's rows."""
        order_N = _order(len(self.places_N5), spread=spread)
        lengths_N = (self.places_N5[:, 1] + self.places_N5[:, 3] - 1)[order_N]
        rows = list(published_steps(lengths_N, self.num_tokens, 1, drop_last_batch=False))
        for (row,) in rows[self.world.data_rank :: self.world.data_size]:
            yield _Row(self, order_N[row])

    def answers(self, *, spread: bool) -> Iterator[Lap]:
        """Yield the answers to this rank's batches of problems, each with room in the cache."""
        places_N5 = self.places_N5[self.problems_N]
        # Prompts of similar length waste little of the cache. But if some batches may be left out,
        # each should be a fair share of the problems.
        by_length_N = np.argsort(-places_N5[:, [1, 3]].sum(1), kind="stable")
        order_N = _order(len(places_N5), spread=True) if spread else by_length_N
        batches, first, longest = list[np.ndarray](), 0, np.zeros(2, np.int64)
        for at, lengths in enumerate(places_N5[order_N][:, [1, 3]]):
            longest = np.maximum(longest, lengths)
            if at > first and (at + 1 - first) * longest.sum() > self.num_tokens:
                batches.append(order_N[first:at])
                first, longest = at, lengths
        batches.append(order_N[first:])
        for batch_B in batches[self.world.data_rank :: self.world.data_size]:
            prompts, responses = self.read(places_N5[batch_B])
            yield _Decoding(self, prompts, responses, tasks=places_N5[batch_B, 4])

    def decode_nothing(self) -> None:
        _Decoding(self, [[0]], [[0]]).advance()

    def read(self, places_B5: np.ndarray) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens of the instructions and of the responses."""
        with unchanged([self.split]):
            prompts, responses = (
                [self.split.tokens[start : start + length].tolist() for start, length in places_B5[:, which].tolist()]
                for which in ([0, 1], [2, 3])
            )
        return prompts, responses

    def count(self, name: str, tasks: np.ndarray, numbers: np.ndarray | None = None) -> None:
        """Add numbers of samples, tokens or answers of these tasks to a sum; None: ones."""
        found_T = np.bincount(tasks, numbers, minlength=len(self.sums_TM))
        self.sums_TM[:, _SUMS.index(name)] += torch.from_numpy(found_T).to(self.sums_TM)


class _Row:
    """The loss of one packed row, which holds some samples. All rows have the same length."""

    def __init__(self, of: _Evaluation, samples_K: Sequence[int] | np.ndarray) -> None:
        self._of, places_K5 = of, of.places_N5[np.asarray(samples_K, np.int64)]
        with unchanged([of.split]):
            row = packed_row(of.split.tokens, places_K5, of.num_tokens, target_only=of.target_only)
        lengths_K, self._tasks_K, self._labels_N = row.prefix_lens + row.response_lens, places_K5[:, 4], row.labels
        # Padding may be of any task, because it has no label.
        self._tasks_N = np.zeros(of.num_tokens, np.int64)
        self._tasks_N[: lengths_K.sum()] = np.repeat(self._tasks_K, lengths_K)
        arrays = (row.inputs, row.labels, row.position_ids)
        self._tokens = [of.world.to_device(torch.from_numpy(array)) for array in arrays]
        sequences = list(zip(row.prefix_lens.tolist(), row.response_lens.tolist(), strict=True))
        self._packing = Packing(sequences, of.num_tokens, of.world.device)
        self._found: tuple[Tensor, Tensor] | None = None

    @property
    def busy(self) -> bool:
        return self._found is None

    def advance(self) -> None:
        no_grad_calls = CallCounts(H=0, L=0)
        _, loss_N, right_N = self._of.model(
            *self._tokens, self._packing, grad_calls=no_grad_calls, ignore_label=IGNORE_LABEL
        )
        self._found = loss_N, right_N

    def count(self) -> None:
        assert self._found is not None
        of, is_label_N = self._of, self._labels_N != IGNORE_LABEL
        of.count("num_examples", self._tasks_K)
        of.count("labels", self._tasks_N[is_label_N])
        of.count("bytes", self._tasks_N[is_label_N], of.bytes_V[self._labels_N[is_label_N]])
        tasks_N = of.world.to_device(torch.from_numpy(self._tasks_N))
        for name, values_N in zip(("loss", "accuracy"), self._found, strict=True):
            of.sums_TM[:, _SUMS.index(name)].index_add_(0, tasks_N, values_N.to(of.sums_TM.dtype))


class _Decoding:
    """Greedy answers to some prompts, which are at most as long as the right answers.

    Args:
        responses: the right answers, with the end token.
        prefix_lens: as for `Decoder`.
        tasks: of the prompts. Then the answers count, and also end with their first wrong token.
    """

    def __init__(
        self,
        of: _Evaluation,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        *,
        prefix_lens: Sequence[int] | None = None,
        tasks: np.ndarray | None = None,
    ) -> None:
        self._of, self._responses, self._tasks = of, responses, tasks
        self._decoder = Decoder(
            of.model,
            prompts,
            most_new_tokens=max(map(len, responses)) - 1,
            prefix_lens=prefix_lens,
            device=of.world.device,
        )
        special = of.split.metadata.special_tokens
        self._stop_tokens = () if special is None else (special.end,)
        self._going_on = list(range(len(prompts)))
        self.answers = [list[int]() for _ in prompts]

    @property
    def busy(self) -> bool:
        return bool(self._going_on)

    def advance(self) -> None:
        if any(self.answers):
            last = [self.answers[number][-1] for number in self._going_on]
            logits_BV = self._decoder.next_logits(torch.tensor(last, device=self._of.world.device))
        else:
            logits_BV = self._decoder.read_prompts()
        # The vocabulary of the model may be rounded up.
        tokens = logits_BV[:, : self._of.split.metadata.vocab_size].argmax(-1).tolist()
        for number, token in zip(self._going_on, tokens, strict=True):
            self.answers[number].append(token)
        kept = [place for place, number in enumerate(self._going_on) if not self._has_ended(number)]
        if 0 < len(kept) < len(self._going_on):
            self._decoder.keep(kept)
        self._going_on = [self._going_on[place] for place in kept]

    def _has_ended(self, number: int) -> bool:
        answer, response = self.answers[number], self._responses[number]
        is_wrong = answer[-1] != response[len(answer) - 1]
        is_whole = len(answer) == len(response) or answer[-1] in self._stop_tokens
        return is_whole or (is_wrong and self._tasks is not None)

    def count(self) -> None:
        if self._tasks is not None:
            right = [answer == response for answer, response in zip(self.answers, self._responses, strict=True)]
            self._of.count("num_answers", self._tasks)
            self._of.count("exact_accuracy", self._tasks, np.array(right))


class _Shown(_Decoding):
    """The answers to a few samples, and how texts go on after their first half."""

    def __init__(self, of: _Evaluation, most: int) -> None:
        num = min(most, len(of.places_N5))
        self._samples_B = np.arange(num) * len(of.places_N5) // num
        places_B5 = of.places_N5[self._samples_B]
        self._prompts, responses = of.read(places_B5)
        prefix_lens = [len(prompt) for prompt in self._prompts]
        self._is_problem_B = _is_problem(places_B5).tolist()
        for n, is_problem in enumerate(self._is_problem_B):
            if not is_problem:
                given = min(len(responses[n]) // 2, _MOST_GIVEN)
                self._prompts[n] += responses[n][:given]
                responses[n] = responses[n][given : given + _MOST_CONTINUED]
        super().__init__(of, self._prompts, responses, prefix_lens=prefix_lens)

    def texts(self) -> Iterator[TextAnswer]:
        of = self._of
        for n, found in enumerate(zip(self._prompts, self.answers, self._responses, strict=True)):
            number = self._samples_B[n]
            texts = (" ".join(map(str, each)) if of.tokenizer is None else of.tokenizer.decode(each) for each in found)
            task = of.split.metadata.tasks[of.places_N5[number, 4]]
            yield TextAnswer(int(of.numbers_N[number]), task, self._is_problem_B[n], *texts)


def _metrics(tasks: Sequence[str], sums_TM: Tensor) -> dict[str, float]:
    """Return the metrics of all tasks together, and of each one if there are several."""
    found = _means(dict(zip(_SUMS, sums_TM.sum(0).tolist(), strict=True)))
    of_tasks = zip(tasks, sums_TM.tolist(), strict=True)
    by_task = {task: means for task, sums_M in of_tasks if (means := _means(dict(zip(_SUMS, sums_M, strict=True))))}
    if len(by_task) > 1:
        for task, means in by_task.items():
            found |= {f"{name}/{task}": means[name] for name in _BY_TASK if name in means}
    return found


def _means(sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of sums by name; nothing that was not measured."""
    found = dict[str, float]()
    if labels := sums["labels"]:
        loss = sums["loss"] / labels
        found = {"loss": loss, "perplexity": math.exp(min(loss, _MOST_EXPONENT))}
        if sums["bytes"]:
            found["bits_per_byte"] = sums["loss"] / (math.log(2) * sums["bytes"])
        found |= {"accuracy": sums["accuracy"] / labels, "num_examples": sums["num_examples"]}
    if num_answers := sums["num_answers"]:
        found |= {"exact_accuracy": sums["exact_accuracy"] / num_answers, "num_answers": num_answers}
    return found


def _chosen(split: TextSplit, max_examples: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers (N,) of the samples to evaluate, and where they lie, (N, 5)."""
    samples = split.samples(0)
    num = len(samples) if max_examples is None else min(len(samples), max_examples)
    numbers_N = np.arange(num) * len(samples) // num
    with unchanged([split]):
        return numbers_N, samples.take(numbers_N)


def _is_problem(places_N5: np.ndarray) -> np.ndarray:
    """Return which samples have an instruction. The prefix of plain text is one token."""
    is_problem_N: np.ndarray = places_N5[:, 1] > 1
    return is_problem_N


def _order(num: int, *, spread: bool) -> np.ndarray:
    """Return the numbers below `num`, spread so that the first ones, however many, lie evenly."""
    numbers = np.arange(num)
    return np.argsort(numbers * _GOLDEN_RATIO % 1, kind="stable") if spread else numbers


def _tokenizer(split: TextSplit) -> Tokenizer | None:
    """Return the tokenizer of a split; None if nobody knows it."""
    return None if split.metadata.tokenizer == UNKNOWN else open_tokenizer(split)
