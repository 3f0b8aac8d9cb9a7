"""Evaluation of text: the loss of every sample once, and the greedy answers to problems."""
# N = samples, or tokens of a row, K = samples of a row, T = tasks, M = sums, B = prompts, V =
# vocabulary

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Union

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
from training.laps import Interrupts, run_lap
from utils.errors import UserError
from utils.files import write_atomically
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
_NO_GRAD_CALLS = CallCounts(H=0, L=0)


@dataclass(frozen=True)
class TextAnswer:
    """The model's greedy answer to a sample, as text.

    Attributes:
        row: the number of the sample.
        is_problem: the prompt is an instruction, and `right` its response. Otherwise they are the
            beginning of a text, and how the text goes on.
    """

    row: int
    task: str
    is_problem: bool
    prompt: str
    answer: str
    right: str


@dataclass
class TextSample:
    """Takes the answers to a few samples, evenly spread, to show them. All ranks get the same."""

    most: int
    answers: list[TextAnswer] = field(default_factory=list)

    def write(self, run: Path, step: int) -> None:
        """Write the answers into the folder of a run, for people and for view.py.

        Raises:
            OSError: They can't be written.
        """
        folder = run / "samples"
        folder.mkdir(exist_ok=True)
        told = json.dumps([asdict(answer) for answer in self.answers], indent=2, ensure_ascii=False)
        write_atomically(folder / f"step_{step:08d}.json", f"{told}\n")


@dataclass(frozen=True)
class TextEvalOptions:
    """How a split of text is evaluated.

    Attributes:
        batch_size: tokens over all ranks together. Only speed and memory depend on this number.
        target_only: the loss is that of responses; otherwise that of all tokens but the first.
        max_examples: if there are more samples, only so many, evenly spread.
        sample: takes a few answers. All ranks have one, or none.
    """

    batch_size: int
    target_only: bool
    max_examples: int | None = None
    sample: TextSample | None = None


def text_eval_metrics(split: TextSplit, max_examples: int | None = None) -> list[str]:
    """Return the names of what `evaluate_text` measures on a split, without the set.

    Raises:
        UserError: The tokenizer of the split can't be read.
    """
    _, places_N5 = _chosen(split, max_examples)
    names = ["loss", "perplexity", "accuracy"]
    if _tokenizer(split) is not None:
        names.append("bits_per_byte")
    if _is_problem(places_N5).any():
        names.append("exact_accuracy")
    if (tasks := np.unique(places_N5[:, 4])).size > 1:
        of_problems = np.unique(places_N5[_is_problem(places_N5), 4])
        for task in tasks.tolist():
            measured = [name for name in names if name != "exact_accuracy" or task in of_problems]
            names += [f"{name}/{split.metadata.tasks[task]}" for name in measured if name in _BY_TASK]
    return names


@torch.no_grad()
def evaluate_text(
    model: TextModel,
    split: TextSplit,
    world: World,
    options: TextEvalOptions,
    *,
    interrupts: Interrupts | None = None,
) -> dict[str, float] | None:
    """Evaluate each sample once. All ranks get the same metrics. Every rank.

    An answer is exact if greedy decoding gives the response with its end token. Samples without an
    instruction have no answer.

    Args:
        interrupts: loss and answers share the time of its deadline.

    Returns:
        eval/all/<name> for `text_eval_metrics`, num_examples and num_answers. bits_per_byte is the
        loss for each byte of the labelled text, where special tokens have no bytes. If there are
        several tasks, each has a loss of its own. None if the evaluation was abandoned.
    """
    evaluation = _Evaluation(model, split, world, options, interrupts or Interrupts())
    if not evaluation.run():
        return None
    return {f"eval/{SET_NAME}/{name}": value for name, value in evaluation.metrics().items()}


_Lap = Union["_Row", "_Decoding"]
"""The forward passes of one batch of this rank. `count` adds what they found to the sums."""


class _Evaluation:
    """The evaluation of a split, lap by lap. In a lap, each rank has one batch or none."""

    def __init__(
        self,
        model: TextModel,
        split: TextSplit,
        world: World,
        options: TextEvalOptions,
        interrupts: Interrupts,
    ) -> None:
        self.model, self.split, self.world, self.options = model, split, world, options
        self._interrupts = interrupts
        with world.shared_errors():
            self._tokenizer = _tokenizer(split)
            self._rows_N, self.places_N5 = _chosen(split, options.max_examples)
        # dataset.json may name more tokens than the tokenizer has.
        self.bytes_V = np.zeros(split.metadata.vocab_size, np.int64)
        if self._tokenizer is not None:
            of_tokens = self._tokenizer.bytes_of_tokens()[: len(self.bytes_V)]
            self.bytes_V[: len(of_tokens)] = of_tokens
        self.num_tokens = max(options.batch_size // world.data_size, int(self.places_N5[:, [1, 3]].sum(1).max()))
        shape, dtype = (len(split.metadata.tasks), len(_SUMS)), widest_float(world.device)
        self.sums_TM = torch.zeros(shape, dtype=dtype, device=world.device)

    def run(self) -> bool:
        """Return False if any rank was asked to stop. Every rank."""
        deadline = self._interrupts.deadline
        problems_N = np.flatnonzero(_is_problem(self.places_N5))
        phases: dict[str, Callable[[Deadline], bool]] = {"loss": self._measure_loss}
        if problems_N.size:
            phases["answers"] = lambda deadline: self._answer(problems_N, deadline)
        for name, part in deadline.shared_by(list(phases)):
            if not phases[name](part):
                return False
        (late,) = self.world.any_of(self.world.is_main and deadline.is_near)
        return True if late or self.options.sample is None else self._show(self.options.sample)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of all ranks together. Every rank."""
        sums_TM = self.world.sum_(self.sums_TM)
        found = _means(sums_TM.sum(0).tolist())
        of_tasks = zip(self.split.metadata.tasks, sums_TM.tolist(), strict=True)
        by_task = {task: means for task, sums_M in of_tasks if (means := _means(sums_M))}
        if len(by_task) > 1:
            for task, means in by_task.items():
                found |= {f"{name}/{task}": means[name] for name in _BY_TASK if name in means}
        return found

    # ---- the loss ----

    def _measure_loss(self, deadline: Deadline) -> bool:
        order_N = _order(len(self.places_N5), spread=deadline.is_set)
        lengths_N = (self.places_N5[:, 1] + self.places_N5[:, 3] - 1)[order_N]
        rows = published_steps(lengths_N, self.num_tokens, 1, drop_last_batch=False)
        return self._run_laps([order_N[row] for (row,) in rows], partial(_Row, self), deadline)

    # ---- the answers ----

    def _answer(self, problems_N: np.ndarray, deadline: Deadline) -> bool:
        # Prompts of similar length waste little of the cache. But if some batches may be left out,
        # each should be a fair share of the problems.
        order_N = _order(len(problems_N), spread=deadline.is_set)
        if not deadline.is_set:
            order_N = np.argsort(-self.places_N5[problems_N][:, [1, 3]].sum(1), kind="stable")
        batches = list(_batches_of_prompts(problems_N[order_N], self.places_N5, self.num_tokens))
        return self._run_laps(batches, self._decoding, deadline)

    def _decoding(self, samples_B: np.ndarray) -> "_Decoding":
        """Return the lap that answers these problems. Without a problem it reads one token."""
        prompts, responses = self._read(samples_B) if len(samples_B) else ([[0]], [[0]])
        return _Decoding(self, prompts, responses, tasks=self.places_N5[samples_B, 4].tolist())

    def _read(self, samples_B: np.ndarray) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens of the instructions and of the responses."""
        tokens, places_B5 = self.split.tokens, self.places_N5[samples_B]
        with unchanged([self.split]):
            prompts, responses = (
                [tokens[start : start + length].tolist() for start, length in places_B5[:, which].tolist()]
                for which in ([0, 1], [2, 3])
            )
        return prompts, responses

    # ---- laps ----

    def _run_laps(self, batches: Sequence[np.ndarray], begin: Callable[[np.ndarray], _Lap], deadline: Deadline) -> bool:
        """Take the batches, in each lap one for each rank. Every rank.

        Args:
            begin: returns the lap of a batch, and for an empty batch one that counts nothing.

        Returns:
            False if any rank was asked to stop.

        Raises:
            UserError: A file changed since it was opened.
        """
        world = self.world
        for first in range(0, len(batches), world.data_size):
            lap, mistake = None, None
            try:
                if first + world.data_rank < len(batches):
                    lap = begin(batches[first + world.data_rank])
            except UserError as error:
                mistake = error
            late, failed = world.any_of(world.is_main and deadline.is_near, mistake is not None)
            if failed:
                with world.shared_errors():
                    if mistake is not None:
                        raise mistake
            ended = "late" if late else self._run_lap(lap, begin, deadline)
            if ended == "stopped":
                return False
            if ended == "late":
                deadline.was_met = False
                break
        return True

    def _run_lap(
        self, lap: _Lap | None, begin: Callable[[np.ndarray], _Lap], deadline: Deadline
    ) -> Literal["done", "stopped", "late"]:
        """Make all forward passes of a lap, and count it unless it ends too late. Every rank."""
        ended = run_lap(
            self.world,
            self._interrupts,
            deadline,
            is_busy=lambda: lap is not None and lap.busy,
            advance=lambda: None if lap is None else lap.advance(),
            idle=lambda: begin(np.zeros(0, np.int64)).advance(),
        )
        if ended == "done":
            deadline.end_lap()
            if lap is not None:
                lap.count()
        return ended

    # ---- answers to show ----

    def _show(self, sample: TextSample) -> bool:
        """Answer a few samples on all ranks alike. Return False if any rank was asked to stop."""
        num, world = min(sample.most, len(self.places_N5)), self.world
        samples_B = np.arange(num) * len(self.places_N5) // num
        with world.shared_errors():
            prompts, responses = self._read(samples_B)
        prefix_lens = [len(prompt) for prompt in prompts]
        is_problem_B = _is_problem(self.places_N5[samples_B]).tolist()
        for n, is_problem in enumerate(is_problem_B):
            if not is_problem:  # the model reads the first half of a text
                given = min(len(responses[n]) // 2, _MOST_GIVEN)
                prompts[n] += responses[n][:given]
                responses[n] = responses[n][given : given + _MOST_CONTINUED]
        lap = _Decoding(self, prompts, responses, prefix_lens=prefix_lens)
        if self._run_lap(lap, self._decoding, Deadline()) == "stopped":
            return False
        for n, found in enumerate(zip(prompts, lap.answers, responses, strict=True)):
            texts = [_text(self._tokenizer, tokens) for tokens in found]
            task = self.split.metadata.tasks[self.places_N5[samples_B[n], 4]]
            sample.answers.append(TextAnswer(int(self._rows_N[samples_B[n]]), task, is_problem_B[n], *texts))
        return True


class _Row:
    """The loss of one packed row, which holds some samples. All rows have the same length."""

    def __init__(self, of: _Evaluation, samples_K: np.ndarray) -> None:
        places_K5, num_tokens = of.places_N5[samples_K], of.num_tokens
        with unchanged([of.split]):
            row = packed_row(of.split.tokens, places_K5, num_tokens, target_only=of.options.target_only)
        lengths_K, tasks_K = row.prefix_lens + row.response_lens, places_K5[:, 4]
        # Padding may be of any task, because it has no label.
        tasks_N = np.append(np.repeat(tasks_K, lengths_K), np.zeros(num_tokens - lengths_K.sum(), np.int64))
        is_label_N = row.labels != IGNORE_LABEL
        self._counts_TM = np.zeros(of.sums_TM.shape)  # what is known before the model has read the row
        for name, tasks, numbers in (
            ("num_examples", tasks_K, None),
            ("labels", tasks_N[is_label_N], None),
            ("bytes", tasks_N[is_label_N], of.bytes_V[row.labels[is_label_N]]),
        ):
            self._counts_TM[:, _SUMS.index(name)] = np.bincount(tasks, numbers, minlength=len(self._counts_TM))
        arrays = (row.inputs, row.labels, row.position_ids, tasks_N)
        *self._tokens, self._tasks_N = (of.world.to_device(torch.from_numpy(array)) for array in arrays)
        sequences = list(zip(row.prefix_lens.tolist(), row.response_lens.tolist(), strict=True))
        self._packing = Packing(sequences, num_tokens, of.world.device)
        self._model, self._sums_TM = of.model, of.sums_TM
        self._found: tuple[Tensor, Tensor] | None = None

    @property
    def busy(self) -> bool:
        return self._found is None

    def advance(self) -> None:
        _, *found = self._model(*self._tokens, self._packing, grad_calls=_NO_GRAD_CALLS, ignore_label=IGNORE_LABEL)
        self._found = (found[0], found[1])

    def count(self) -> None:
        assert self._found is not None
        self._sums_TM += torch.from_numpy(self._counts_TM).to(self._sums_TM)
        for name, values_N in zip(("loss", "accuracy"), self._found, strict=True):
            self._sums_TM[:, _SUMS.index(name)].index_add_(0, self._tasks_N, values_N.to(self._sums_TM.dtype))


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
        tasks: Sequence[int] | None = None,
    ) -> None:
        self._device, metadata = of.world.device, of.split.metadata
        most_new_tokens = max(map(len, responses)) - 1
        self._decoder = Decoder(
            of.model, prompts, most_new_tokens=most_new_tokens, prefix_lens=prefix_lens, device=self._device
        )
        self._stop_tokens = () if metadata.special_tokens is None else (metadata.special_tokens.end,)
        self._vocab_size = metadata.vocab_size  # that of the model may be rounded up
        self._responses, self._tasks, self._sums_TM = responses, tasks, of.sums_TM
        self._going_on = list(range(len(prompts)))
        self.answers = [list[int]() for _ in prompts]

    @property
    def busy(self) -> bool:
        return bool(self._going_on)

    def advance(self) -> None:
        if any(self.answers):
            last = [self.answers[number][-1] for number in self._going_on]
            logits_BV = self._decoder.next_logits(torch.tensor(last, device=self._device))
        else:
            logits_BV = self._decoder.read_prompts()
        tokens = logits_BV[:, : self._vocab_size].argmax(-1).tolist()
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
        if self._tasks is None:
            return
        counts_TM = np.zeros(self._sums_TM.shape)
        columns = [_SUMS.index("num_answers"), _SUMS.index("exact_accuracy")]
        for task, answer, response in zip(self._tasks, self.answers, self._responses, strict=True):
            counts_TM[task, columns] += 1, answer == response
        self._sums_TM += torch.from_numpy(counts_TM).to(self._sums_TM)


def _means(sums_M: Sequence[float]) -> dict[str, float]:
    """Return the metrics of sums in the order of _SUMS; nothing that was not measured."""
    sums, found = dict(zip(_SUMS, sums_M, strict=True)), dict[str, float]()
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
    rows_N = np.arange(num) * len(samples) // num
    with unchanged([split]):
        return rows_N, samples.take(rows_N)


def _is_problem(places_N5: np.ndarray) -> np.ndarray:
    """Return which samples have an instruction. The prefix of plain text is one token."""
    is_problem_N: np.ndarray = places_N5[:, 1] > 1
    return is_problem_N


def _order(num: int, *, spread: bool) -> np.ndarray:
    """Return an order of the numbers below `num`.

    Args:
        spread: the first numbers of the order, however many, are evenly spread.
    """
    numbers = np.arange(num)
    return np.argsort(numbers * _GOLDEN_RATIO % 1, kind="stable") if spread else numbers


def _batches_of_prompts(order_N: np.ndarray, places_N5: np.ndarray, num_tokens: int) -> Iterator[np.ndarray]:
    """Cut the samples into batches, each with room for `num_tokens` tokens in the cache."""
    first = longest_prompt = longest_response = 0
    for at, (_, prompt_len, _, response_len, _) in enumerate(places_N5[order_N].tolist()):
        longest_prompt, longest_response = max(longest_prompt, prompt_len), max(longest_response, response_len)
        if at > first and (at + 1 - first) * (longest_prompt + longest_response) > num_tokens:
            yield order_N[first:at]
            first, longest_prompt, longest_response = at, prompt_len, response_len
    yield order_N[first:]


def _tokenizer(split: TextSplit) -> Tokenizer | None:
    """Return the tokenizer of a split; None if nobody knows it."""
    return None if split.metadata.tokenizer == UNKNOWN else open_tokenizer(split)


def _text(tokenizer: Tokenizer | None, tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens)) if tokenizer is None else tokenizer.decode(tokens)
