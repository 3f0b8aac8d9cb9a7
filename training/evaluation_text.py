"""Evaluation of text: the loss of every sample once, and the greedy answers to problems."""
# N = samples, or tokens of a row, K = samples of a row, T = tasks, M = sums, B = prompts, V =
# vocabulary

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from dataset.schema import unchanged
from dataset.text.packing import packed_row, published_steps
from dataset.text.schema import SET_NAME, UNKNOWN, TextSplit
from dataset.text.tokenizer import Tokenizer, open_tokenizer
from models.losses import widest_float
from models.text.config import CallCounts
from models.text.generation import Decoder
from models.text.model import TextModel
from training.evaluation import EvalOptions
from training.laps import Interrupts, Lap, run_laps
from training.samples import TextAnswer, TextSample
from training.text_loader import row_of
from utils.batch import IGNORE_LABEL
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
    """Return the names of what `evaluate_text` measures on a split, without set and counts."""
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

    Returns:
        eval/all/<name> for `text_eval_metrics`, num_examples and num_answers. bits_per_byte is the
        loss for each byte of the labelled text, where special tokens have no bytes. If there are
        several tasks, each has a loss of its own. None if the evaluation was abandoned.
    """
    interrupts, of = interrupts or Interrupts(), _Evaluation(model, split, world, options)
    parts = {"loss": (of.rows, of.row), "answers": (of.answers, of.decode_nothing)}
    for name, deadline in interrupts.deadline.shared_by(list(parts) if of.problems_N.size else ["loss"]):
        laps, nothing = parts[name]
        if not run_laps(laps(spread=deadline.is_set), partial(_one_pass, nothing), world, interrupts, deadline):
            return None
    (late,) = world.any_of(world.is_main and interrupts.deadline.is_near)
    if sample is not None and not late:
        # All ranks decode alike.
        shown = iter([of.shown(sample)])
        if not run_laps(shown, partial(_one_pass, of.decode_nothing), world, interrupts, Deadline()):
            return None
    found = _metrics(split.metadata.tasks, world.sum_(of.sums_TM))
    return {f"eval/{SET_NAME}/{name}": value for name, value in found.items()}


def _one_pass(lap: Callable[[], Lap]) -> None:
    list(islice(lap(), 2))


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
        num = len(self.places_N5)
        order_N = _spread(num) if spread else np.arange(num)
        lengths_N = (self.places_N5[:, 1] + self.places_N5[:, 3] - 1)[order_N]
        rows = list(published_steps(lengths_N, self.num_tokens, 1, drop_last_batch=False))
        for (row,) in rows[self.world.data_rank :: self.world.data_size]:
            yield self.row(order_N[row])

    def row(self, samples_K: Sequence[int] | np.ndarray = ()) -> Lap:
        """Find the loss of one packed row of samples. All rows have the same length."""
        places_K5 = self.places_N5[np.asarray(samples_K, np.int64)]
        with unchanged(self.split.files):
            packed = packed_row(self.split.tokens, places_K5, self.num_tokens, target_only=self.target_only)
        lengths_K = packed.prefix_lens + packed.response_lens
        # Padding may be of any task, because it has no label.
        tasks_N = np.zeros(self.num_tokens, np.int64)
        tasks_N[: lengths_K.sum()] = np.repeat(packed.tasks, lengths_K)
        row = row_of(packed).apply(self.world.to_device)
        yield True
        grad_calls = CallCounts(H=0, L=0)
        tokens = (row.inputs_N, row.labels_N, row.positions_N)
        _, loss_N, right_N = self.model(*tokens, row.packing, grad_calls=grad_calls)
        yield False
        is_label_N = packed.labels != IGNORE_LABEL
        self._count("num_examples", packed.tasks)
        self._count("labels", tasks_N[is_label_N])
        self._count("bytes", tasks_N[is_label_N], self.bytes_V[packed.labels[is_label_N]])
        for name, values_N in (("loss", loss_N), ("accuracy", right_N)):
            sums_T = self.sums_TM[:, _SUMS.index(name)]
            sums_T.index_add_(0, self.world.to_device(torch.from_numpy(tasks_N)), values_N.to(sums_T.dtype))

    def answers(self, *, spread: bool) -> Iterator[Lap]:
        """Yield the answers to this rank's batches of problems, each with room in the cache."""
        places_N5 = self.places_N5[self.problems_N]
        # Prompts of similar length waste little of the cache. But if some batches may be left out,
        # each should be a fair share of the problems.
        by_length_N = np.argsort(-places_N5[:, [1, 3]].sum(1), kind="stable")
        order_N = _spread(len(places_N5)) if spread else by_length_N
        batches, first, longest = list[np.ndarray](), 0, np.zeros(2, np.int64)
        for at, lengths in enumerate(places_N5[order_N][:, [1, 3]]):
            longest = np.maximum(longest, lengths)
            if at > first and (at + 1 - first) * longest.sum() > self.num_tokens:
                batches.append(order_N[first:at])
                first, longest = at, lengths
        batches.append(order_N[first:])
        for batch_B in batches[self.world.data_rank :: self.world.data_size]:
            yield self._scored(places_N5[batch_B])

    def _scored(self, places_B5: np.ndarray) -> Lap:
        prompts, responses = self._read(places_B5)
        answers = yield from self._decode(prompts, responses, to_first_mistake=True)
        yield False
        right = [answer == response for answer, response in zip(answers, responses, strict=True)]
        self._count("num_answers", places_B5[:, 4])
        self._count("exact_accuracy", places_B5[:, 4], np.array(right))

    def shown(self, sample: TextSample) -> Lap:
        """Answer a few samples, and go on with texts after their first half."""
        num = min(sample.most, len(self.places_N5))
        samples_B = np.arange(num) * len(self.places_N5) // num
        places_B5 = self.places_N5[samples_B]
        prompts, responses = self._read(places_B5)
        prefix_lens, is_problem_B = [len(prompt) for prompt in prompts], _is_problem(places_B5).tolist()
        for n, is_problem in enumerate(is_problem_B):
            if not is_problem:
                given = min(len(responses[n]) // 2, _MOST_GIVEN)
                prompts[n] += responses[n][:given]
                responses[n] = responses[n][given : given + _MOST_CONTINUED]
        answers = yield from self._decode(prompts, responses, prefix_lens=prefix_lens)
        yield False
        show = self.tokenizer.decode if self.tokenizer is not None else lambda tokens: " ".join(map(str, tokens))
        for n, found in enumerate(zip(prompts, answers, responses, strict=True)):
            task = self.split.metadata.tasks[places_B5[n, 4]]
            sample.answers.append(
                TextAnswer(int(self.numbers_N[samples_B[n]]), task, is_problem_B[n], *map(show, found))
            )

    def decode_nothing(self) -> Lap:
        yield from self._decode([[0]], [[0]])

    def _read(self, places_B5: np.ndarray) -> tuple[list[list[int]], list[list[int]]]:
        """Return the tokens of the instructions and of the responses."""
        with unchanged(self.split.files):
            prompts, responses = (
                [self.split.tokens[start : start + length].tolist() for start, length in places_B5[:, which].tolist()]
                for which in ([0, 1], [2, 3])
            )
        return prompts, responses

    def _decode(
        self,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        *,
        prefix_lens: Sequence[int] | None = None,
        to_first_mistake: bool = False,
    ) -> Generator[bool, None, list[list[int]]]:
        """Yield True before each forward pass, and return greedy answers to some prompts.

        Args:
            responses: the right answers, with the end token. No answer gets longer.
            prefix_lens: as for `Decoder`.
            to_first_mistake: an answer also ends with its first wrong token.
        """
        longest, device = max(map(len, responses)) - 1, self.world.device
        decoder = Decoder(self.model, prompts, most_new_tokens=longest, prefix_lens=prefix_lens, device=device)
        special = self.split.metadata.special_tokens
        stop_tokens = () if special is None else (special.end,)
        answers, going_on = [list[int]() for _ in prompts], list(range(len(prompts)))

        def goes_on(n: int) -> bool:
            answer, response = answers[n], responses[n]
            is_whole = len(answer) == len(response) or answer[-1] in stop_tokens
            return not is_whole and (answer[-1] == response[len(answer) - 1] or not to_first_mistake)

        while going_on:
            yield True
            if any(answers):
                last = [answers[n][-1] for n in going_on]
                logits_BV = decoder.next_logits(torch.tensor(last, device=device))
            else:
                logits_BV = decoder.read_prompts()
            # The vocabulary of the model may be rounded up.
            tokens = logits_BV[:, : self.split.metadata.vocab_size].argmax(-1).tolist()
            for n, token in zip(going_on, tokens, strict=True):
                answers[n].append(token)
            kept = [place for place, n in enumerate(going_on) if goes_on(n)]
            if 0 < len(kept) < len(going_on):
                decoder.keep(kept)
            going_on = [going_on[place] for place in kept]
        return answers

    def _count(self, name: str, tasks: np.ndarray, numbers: np.ndarray | None = None) -> None:
        """Add numbers of samples, tokens or answers of these tasks to a sum; None: ones."""
        found_T = np.bincount(tasks, numbers, minlength=len(self.sums_TM))
        self.sums_TM[:, _SUMS.index(name)] += torch.from_numpy(found_T).to(self.sums_TM)


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
    with unchanged(split.files):
        return numbers_N, samples.take(numbers_N)


def _is_problem(places_N5: np.ndarray) -> np.ndarray:
    """Return which samples have an instruction. The prefix of plain text is one token."""
    return np.greater(places_N5[:, 1], 1)


def _spread(num: int) -> np.ndarray:
    """Return the numbers below `num` in an order whose first ones, however many, lie evenly."""
    return np.argsort(np.arange(num) * _GOLDEN_RATIO % 1, kind="stable")


def _tokenizer(split: TextSplit) -> Tokenizer | None:
    """Return the tokenizer of a split; None if nobody knows it."""
    return None if split.metadata.tokenizer == UNKNOWN else open_tokenizer(split)
