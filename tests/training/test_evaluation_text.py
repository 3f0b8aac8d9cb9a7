"""Evaluation of text gives for any batches and number of ranks what samples give one by one."""

import json
import math
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dataset.text.schema import TextSplit, open_text_split
from models.parallel.fsdp import FSDPConfig, shard_weights
from models.text.config import GPTConfig, HRMTextConfig
from models.text.generation import Decoder
from models.text.model import TextModel
from models.text.packing import Packing
from tests.dataset.text.samples import write_split
from tests.models.parallel.helpers import DIST, config_of
from tests.models.text.helpers import greedy, make_config
from tests.spawn import run_ranks
from training.evaluation import EvalOptions
from training.evaluation_text import evaluate_text, text_eval_metrics
from training.laps import Interrupts
from training.samples import TextAnswer, TextSample
from utils.errors import UserError
from utils.perf.clocks import Deadline
from utils.ranks.setup import connect_devices
from utils.ranks.world import World
from utils.stop import StopSignal

SINGLE = World.single()
VOCAB_SIZE = 259
END = 258
NUM = 23
TASKS = ["adding", "sorting"]


def _model() -> TextModel:
    model = TextModel(make_config(HRMTextConfig), vocab_size=VOCAB_SIZE)
    model.init_weights(torch.Generator().manual_seed(0))
    return model


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> TextSplit:
    """Return problems to a third of which the model gives the right answer."""
    path = tmp_path_factory.mktemp("problems")
    rng, model = np.random.default_rng(0), _model()
    tokens, table = list[int](), list[tuple[int, int, int, int]]()
    for number in range(NUM):
        prompt = rng.integers(0, VOCAB_SIZE, rng.integers(2, 9)).tolist()
        num = int(rng.integers(1, 7))
        response = greedy(model, [prompt], num)[0][0].tolist() if number % 3 == 0 else [*rng.integers(0, 256, num), END]
        table.append((len(tokens), len(prompt), len(response), number % 2))
        tokens += [*prompt, *response]
    write_split(path / "test", np.array(tokens, np.uint16), np.array(table), tasks=TASKS)
    return open_text_split(path, "test")


def _write_text(path: Path) -> TextSplit:
    text = np.random.default_rng(0).integers(97, 123, 61).astype(np.uint16)
    write_split(path / "test", text, np.array([(12 * n, 1, 12, 0) for n in range(5)]), tasks=["text"])
    return open_text_split(path, "test")


@pytest.fixture(scope="module")
def all_alone(problems: TextSplit) -> dict[str, float]:
    return _one_by_one(_model(), problems, list(range(NUM)))


@torch.no_grad()
def _one_by_one(model: TextModel, split: TextSplit, rows: list[int]) -> dict[str, float]:
    """Return the metrics from the logits of each sample alone, and from its answer alone.

    If the rows are of several tasks, each task has metrics of its own.
    """
    found = _of_rows(model, split, rows)
    tasks = split.samples(0).take(np.array(rows))[:, 4]
    for task in set(tasks.tolist()) if len(set(tasks.tolist())) > 1 else ():
        own = _of_rows(model, split, [row for row, each in zip(rows, tasks, strict=True) if each == task])
        for name in ("loss", "bits_per_byte", "exact_accuracy", "num_answers"):
            if name in own:
                found[f"{name}/{TASKS[task]}"] = own[name]
    return {f"eval/all/{name}": value for name, value in found.items()}


def _of_rows(model: TextModel, split: TextSplit, rows: list[int]) -> dict[str, float]:
    loss, num_labels, num_right, num_bytes = 0.0, 0, 0, 0
    answers = list[bool]()
    for start, prefix_len, response_start, response_len, _ in split.samples(0).take(np.array(rows)).tolist():
        prompt = split.tokens[start : start + prefix_len].tolist()
        response = split.tokens[response_start : response_start + response_len].tolist()
        inputs_N = torch.tensor(prompt + response[:-1])
        packing = Packing([(prefix_len, response_len - 1)], len(inputs_N))
        y_ND = model.hidden(inputs_N, torch.arange(len(inputs_N)), packing, model.config.num_calls)
        logits, labels = model.logits(y_ND)[prefix_len - 1 :], torch.tensor(response)
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        num_labels, num_bytes = num_labels + response_len, num_bytes + sum(token < 256 for token in response)
        num_right += int((logits.argmax(-1) == labels).sum())
        if prefix_len > 1:
            answer = greedy(model, [prompt], response_len)[0][0].tolist()
            answers.append(answer == response)
    found = {
        "loss": loss / num_labels,
        "perplexity": math.exp(loss / num_labels),
        "bits_per_byte": loss / math.log(2) / num_bytes,
        "accuracy": num_right / num_labels,
        "num_examples": len(rows),
    }
    if answers:
        found |= {"exact_accuracy": sum(answers) / len(answers), "num_answers": len(answers)}
    return found


@pytest.mark.parametrize("batch_size", [1, 40, 10**4])
def test_problems(problems: TextSplit, all_alone: dict[str, float], batch_size: int) -> None:
    model = _model()
    found = evaluate_text(model, problems, SINGLE, EvalOptions(batch_size))
    assert found == pytest.approx(all_alone, rel=1e-5)
    assert found is not None and 0 < found["eval/all/exact_accuracy"] < 1
    names = {name.removeprefix("eval/all/") for name in found}
    assert {name for name in names if not name.startswith("num_")} == set(text_eval_metrics(problems))
    found = evaluate_text(model, problems, SINGLE, EvalOptions(batch_size, max_examples=7))
    assert found == pytest.approx(_one_by_one(model, problems, [n * NUM // 7 for n in range(7)]), rel=1e-5)


def test_text_has_no_answers(tmp_path: Path) -> None:
    split, model = _write_text(tmp_path), _model()
    found = evaluate_text(model, split, SINGLE, EvalOptions(30))
    assert found == pytest.approx(_one_by_one(model, split, list(range(5))), rel=1e-5)
    assert text_eval_metrics(split) == ["loss", "perplexity", "bits_per_byte", "accuracy"]


def test_all_tokens_may_count(tmp_path: Path) -> None:
    """The labels of the instruction have bytes, too."""
    write_split(tmp_path / "test", np.array([256, 97, 97, 257, 98, 258], np.uint16), np.array([(0, 4, 2, 0)]))
    split, model = open_text_split(tmp_path, "test"), _model()
    narrow, wide = (
        evaluate_text(model, split, SINGLE, EvalOptions(8, target_only=target_only)) for target_only in (True, False)
    )
    assert narrow is not None and wide is not None
    for found, num_labels, num_bytes in ((narrow, 2, 1), (wide, 5, 3)):
        total = found["eval/all/loss"] * num_labels
        assert found["eval/all/bits_per_byte"] == pytest.approx(total / math.log(2) / num_bytes)
    model.get_parameter("lm_head.weight").data *= 1e6
    diverged = evaluate_text(model, split, SINGLE, EvalOptions(8))
    assert diverged is not None and diverged["eval/all/perplexity"] == math.exp(700), "a larger one has no float"


def test_unknown_tokens_have_no_bytes(tmp_path: Path) -> None:
    tokens, table = np.array([1, 2, 3, 4], np.uint16), np.array([(0, 2, 2, 0)])
    write_split(tmp_path / "test", tokens, table, tokenizer="unknown", special_tokens=None)
    sample, split = TextSample(3), open_text_split(tmp_path, "test")
    found = evaluate_text(_model(), split, SINGLE, EvalOptions(8), sample=sample)
    assert found is not None and "eval/all/bits_per_byte" not in found
    assert "bits_per_byte" not in text_eval_metrics(split)
    assert [(answer.prompt, answer.right) for answer in sample.answers] == [("1 2", "3 4")]


def test_answers_are_shown_as_text(problems: TextSplit, tmp_path: Path) -> None:
    model, sample = _model(), TextSample(2)
    evaluate_text(model, problems, SINGLE, EvalOptions(40, max_examples=5), sample=sample)
    assert sample.show(problems, tmp_path, step=7) == []
    written = json.loads((tmp_path / "samples" / "step_00000007.json").read_text())
    assert [TextAnswer(**answer) for answer in written] == sample.answers
    first, second = sample.answers
    assert (first.row, first.task, second.row, second.task) == (0, "adding", 9, "sorting")
    assert first.answer == first.right and first.is_problem  # the model gave it
    start, prefix_len, _, response_len, _ = problems.samples(0).take(np.array([9]))[0].tolist()
    prompt = problems.tokens[start : start + prefix_len].tolist()
    answer = greedy(model, [prompt], response_len)[0][0].tolist()
    answer = answer[: answer.index(END)] if END in answer else answer
    assert second.prompt == bytes(token for token in prompt if token < 256).decode(errors="replace")
    assert second.answer == bytes(token for token in answer if token < 256).decode(errors="replace")


@pytest.mark.parametrize(("given", "continued"), [(6, 6), (4, 5)])
def test_a_text_goes_on_after_its_first_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: int, continued: int
) -> None:
    """The half is no prefix, as in training, where the prefix is one token. A long text is cut."""
    if given < 6:
        monkeypatch.setattr("training.evaluation_text._MOST_GIVEN", given)
        monkeypatch.setattr("training.evaluation_text._MOST_CONTINUED", continued)
    split, model, sample = _write_text(tmp_path), _model(), TextSample(1)
    evaluate_text(model, split, SINGLE, EvalOptions(40), sample=sample)
    decoder = Decoder(model, [split.tokens[:1].tolist()], most_new_tokens=12)
    logits_BV = decoder.read_prompts()
    new = list[int]()
    for place in range(given + continued):
        new.append(int(split.tokens[1 + place]) if place < given else int(logits_BV.argmax(-1)))
        logits_BV = decoder.next_logits(torch.tensor(new[-1:]))
    text = split.tokens[:13].astype(np.uint8).tobytes().decode()
    answer = bytes(token for token in new[given:] if token < 256).decode(errors="replace")
    assert sample.answers == [TextAnswer(0, "text", False, text[: given + 1], answer, text[given + 1 :][:continued])]


@torch.no_grad()
def test_answers_have_no_token_that_the_dataset_lacks(problems: TextSplit, all_alone: dict[str, float]) -> None:
    """The vocabulary of a model is rounded up. Here its further tokens are the likeliest ones."""
    small, padded = _model(), TextModel(make_config(HRMTextConfig), vocab_size=512)
    for name, tensor in padded.state_dict().items():
        own = small.state_dict()[name]
        tensor.copy_(own if own.shape == tensor.shape else torch.cat([own, 3 * own])[:512])
    padded.fill_constants()
    right = all_alone["eval/all/exact_accuracy"]
    found = evaluate_text(padded, problems, SINGLE, EvalOptions(60))
    assert found is not None and found["eval/all/exact_accuracy"] == pytest.approx(right) and right > 0


def _on_a_rank(world: World, path: str, batch_size: int) -> tuple[dict[str, float] | None, list[TextAnswer]]:
    """The forward pass is a collective, so that ranks with unlike numbers of them would hang."""
    config = config_of("fsdp")
    world = connect_devices(world, "cpu", DIST, axes=config.axes(world.size))
    assert isinstance(config, FSDPConfig)
    model = _model()
    shard_weights(model, config, world)
    sample, split = TextSample(3), open_text_split(path, "test")
    found = evaluate_text(
        model, split, world, EvalOptions(batch_size), sample=sample, interrupts=Interrupts(lockstep=True)
    )
    return found, sample.answers


@pytest.mark.invariance
def test_ranks_that_share_the_weights_find_the_same(problems: TextSplit) -> None:
    sample = TextSample(3)
    alone = evaluate_text(_model(), problems, SINGLE, EvalOptions(60), sample=sample)
    (found, shown), other = run_ranks(_on_a_rank, 2, str(problems.path.parent), 60)
    assert other == (found, shown)
    assert found == pytest.approx(alone, rel=1e-5) and shown == sample.answers


def test_a_stop_abandons_it(problems: TextSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    stop = StopSignal()
    for num_calls in (0, 1, 9, 25, 10**6):  # in the loss, in the answers, and after the end
        monkeypatch.setattr(stop, "requested", Mock(side_effect=[False] * num_calls + [True]))
        found = evaluate_text(_model(), problems, SINGLE, EvalOptions(40), interrupts=Interrupts(stop=stop))
        assert (found is None) == (num_calls < 10**6)


def test_without_time_there_are_no_metrics_and_enough_time_changes_nothing(
    problems: TextSplit, all_alone: dict[str, float]
) -> None:
    deadline, sample, model = Deadline(0.0), TextSample(2), _model()
    given: dict[str, Any] = {"sample": sample, "interrupts": Interrupts(deadline=deadline)}
    assert evaluate_text(model, problems, SINGLE, EvalOptions(40), **given) == {}
    assert not deadline.was_met and not sample.answers
    deadline = Deadline(600.0)
    found = evaluate_text(model, problems, SINGLE, EvalOptions(40), interrupts=Interrupts(deadline=deadline))
    assert found == pytest.approx(all_alone, rel=1e-5)
    assert deadline.was_met


def test_some_time_gives_evenly_spread_samples(problems: TextSplit, monkeypatch: pytest.MonkeyPatch) -> None:
    """With time for two rows, the samples come from the whole file."""
    laps = count(1)
    monkeypatch.setattr(Deadline, "is_over", property(lambda _: next(laps) > 4))
    deadline, model = Deadline(600.0), _model()
    seen = list[int]()
    forward = model.forward

    def watched(inputs_N: torch.Tensor, *args: Any, **options: Any) -> Any:
        seen.extend(inputs_N.tolist())
        return forward(inputs_N, *args, **options)

    model.forward = watched  # type: ignore[method-assign]
    found = evaluate_text(model, problems, SINGLE, EvalOptions(40), interrupts=Interrupts(deadline=deadline))
    assert found is not None and 0 < found["eval/all/num_examples"] < NUM and not deadline.was_met
    starts = problems.samples(0).take(np.arange(NUM))[:, 0]
    firsts = {tuple(problems.tokens[start : start + 2].tolist()): n for n, start in enumerate(starts.tolist())}
    rows = {firsts[pair] for pair in pairwise(seen) if pair in firsts}
    assert min(rows) < NUM // 3 and max(rows) > 2 * NUM // 3


def test_a_file_that_changes_is_named(tmp_path: Path) -> None:
    problems, model, forward = _write_text(tmp_path), _model(), _model().forward

    def change(*args: Any, **options: Any) -> Any:
        with (problems.path / "tokens.npy").open("ab") as file:
            file.write(b"more")
        return forward(*args, **options)

    model.forward = change  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"tokens.npy .* it was changed while the run reads it"):
        evaluate_text(model, problems, SINGLE, EvalOptions(40))


@pytest.mark.parametrize("arch", [HRMTextConfig, GPTConfig])
def test_answers_compile_nothing(problems: TextSplit, tmp_path: Path, arch: Any) -> None:
    """Rows of one length need the same code, and answers, of any length, need none."""
    text = _write_text(tmp_path / "text")
    model = TextModel(make_config(arch), vocab_size=VOCAB_SIZE)
    model.init_weights(torch.Generator().manual_seed(0))
    num_graphs = 0

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    torch._dynamo.reset()
    model.is_compiled = True  # as compile_levels does, with another compiler
    for stack in model.stacks().values():
        stack.compile(backend=backend)
    evaluate_text(model, text, SINGLE, EvalOptions(60))
    of_rows = num_graphs
    assert of_rows > 0
    evaluate_text(model, problems, SINGLE, EvalOptions(60), sample=TextSample(3))
    assert num_graphs == of_rows
