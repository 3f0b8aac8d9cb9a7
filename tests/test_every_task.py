"""Every task of the table keeps the promises of BoardTask: a new entry is tested by being there."""
# N = examples, S = tokens of an example, V = vocabulary

import numpy as np
import pytest
import torch

from dataset.evaluators import build_evaluators, fitting_evaluators
from dataset.online import OnlineAugmentation
from dataset.pictures import board_of, draw_answers
from dataset.puzzle_input import Puzzle
from dataset.schema import Split
from dataset.tasks import TASKS, task_of_shape
from dataset.tasks.base import BoardTask, TextTask
from dataset.tta import Variations
from solve import describe_steps
from tests.dataset.samples import samples_of
from training.solver import Solution, Step


@pytest.fixture(params=TASKS, ids=lambda task: task.kind)
def sample(request: pytest.FixtureRequest) -> tuple[BoardTask, Split]:
    return samples_of(request.param)


def _arrays(split: Split) -> tuple[np.ndarray, np.ndarray]:
    (puzzle_set,) = split.sets.values()
    return puzzle_set.inputs, puzzle_set.labels


def _num_faulty(task: BoardTask, inputs_NS: np.ndarray, labels_NS: np.ndarray) -> int:
    found = task.faults(inputs_NS, labels_NS, labels_NS != 0)
    return int(np.any([np.zeros(len(inputs_NS), bool), *found.values()], axis=0).sum())


def test_the_class_says_all_that_messages_need(sample: tuple[BoardTask, Split]) -> None:
    task, split = sample
    assert task.rows * task.columns == split.metadata.seq_len
    assert {len(task.tokens), len(task.symbols)} <= {0, split.metadata.vocab_size}, "of every token, or of none"
    found = task_of_shape(split.metadata.seq_len, split.metadata.vocab_size)
    assert type(found) is type(task), f"an earlier task of the table takes this shape: {found and found.kind}"
    others = [other for other in TASKS if other is not type(task)]
    assert not any(set(task.metrics) & set(other.metrics) for other in others), "metrics must differ by their names"


def test_correct_examples_are_right_and_without_faults(sample: tuple[BoardTask, Split]) -> None:
    task, split = sample
    inputs_NS, labels_NS = _arrays(split)
    assert _num_faulty(task, inputs_NS, labels_NS) == 0
    assert _num_faulty(task, inputs_NS, 0 * labels_NS) == 0, "an unknown label cannot be wrong"
    for question_S, label_S in zip(inputs_NS, labels_NS, strict=True):
        verdict = task.verdict(question_S, label_S, label_S)
        assert verdict.valid and verdict.solved and verdict.reason
    if not task.lets_vote:
        judged = task.judge(torch.from_numpy(inputs_NS).long(), torch.from_numpy(labels_NS).long())
        assert {name: values.all().item() for name, values in judged.items()} == dict.fromkeys(task.metrics, True)
        assert all(values.dtype == torch.bool for values in judged.values())
        assert _num_faulty(task, inputs_NS, labels_NS * (np.arange(labels_NS.shape[1]) > 0).astype(np.uint8)) == 0
        fitting = fitting_evaluators(split)
        assert build_evaluators(fitting, split).metrics == (task.metrics if fitting else ())


def test_a_text_can_be_read_back(sample: tuple[BoardTask, Split]) -> None:
    task, split = sample
    if not isinstance(task, TextTask):
        pytest.skip("the boards are no texts")
    for question_S, label_S in zip(*_arrays(split), strict=True):
        question, answer = str(task.plain(question_S)), str(task.plain(label_S))
        rows = [question[first : first + task.columns] for first in range(0, len(question), task.columns)]
        ((place, cells),) = task.split(task.lines_in("\n".join(rows) + "\n"), "here")
        assert (place, cells) == ("here:1", question)
        assert task.parse(cells, "here").tolist() == question_S.tolist()
        assert task.parse_solution(answer, "here", question_S).tolist() == label_S.tolist()


def test_any_answer_can_be_judged_and_shown(sample: tuple[BoardTask, Split]) -> None:
    """A model that has hardly learnt puts any token into any cell."""
    task, split = sample
    inputs_NS, labels_NS = _arrays(split)
    rng = np.random.default_rng(0)
    answers_NS = rng.integers(0, split.metadata.vocab_size, inputs_NS.shape).astype(np.uint8)
    answers_NS[0] = 0
    for question_S, label_S, answer_S in zip(inputs_NS, labels_NS, answers_NS, strict=True):
        assert not task.verdict(question_S, answer_S, label_S).solved
        task.plain(answer_S)
        marks = {"question_S": question_S, "previous_S": label_S, "solution_S": label_S}
        assert "\x1b" not in task.show(answer_S, **marks, color=False)
        task.show(answer_S, **marks, color=True)
    if not task.lets_vote:
        judged = task.judge(torch.from_numpy(inputs_NS).long(), torch.from_numpy(answers_NS).long())
        assert all(values.shape == (len(inputs_NS),) for values in judged.values())
    found = task.faults(answers_NS, answers_NS, np.ones(answers_NS.shape, bool))
    assert not found or np.any([*found.values()]), "boards of random tokens must have faults"


def test_cells_of_another_right_answer_are_not_marked_as_wrong(sample: tuple[BoardTask, Split]) -> None:
    task, split = sample
    question_S, label_S = (array_NS[0] for array_NS in _arrays(split))
    step = Step(1, "", label_S, changed=[0], confidence=1.0)
    shown = [
        [*describe_steps(Solution(task, Puzzle("p", question_S, solution_S), [step], 1, True, True, ""), color=False)]
        for solution_S in (None, np.roll(label_S, 1))
    ]
    assert (shown[0] != shown[1]) == task.has_one_solution


def test_symmetries_keep_examples_correct(sample: tuple[BoardTask, Split]) -> None:
    task, split = sample
    inputs_NS, labels_NS = _arrays(split)
    if task.symmetries(list(split.sets.values())) is None:
        pytest.skip("the task has no symmetries")
    num = len(inputs_NS)
    augmentation = OnlineAugmentation(split, seed=0, global_batch_size=num, slots=slice(0, num))
    batch = {"inputs": torch.from_numpy(inputs_NS).long(), "labels": torch.from_numpy(labels_NS).long()}
    changed = False
    for step in range(4):
        moved = augmentation.apply(batch, augmentation.draw(step, np.arange(num)))
        inputs, labels = (moved[name].numpy().astype(np.uint8) for name in ("inputs", "labels"))
        assert _num_faulty(task, inputs, labels) == 0, "a symmetry has turned an example into a faulty one"
        changed |= not np.array_equal(inputs, inputs_NS)
    assert changed, "no symmetry was drawn"


def test_variations_can_be_undone(sample: tuple[BoardTask, Split]) -> None:
    task, split = sample
    if not task.most_variations:
        pytest.skip("the task has no variations")
    inputs_NS, labels_NS = _arrays(split)
    count = int(min(task.most_variations, 5))
    variations = Variations.of(split, count)
    for k in range(count):
        numbers_N = np.arange(len(inputs_NS)) * count + k
        questions, answers = (variations.vary(numbers_N, torch.from_numpy(each).long()) for each in _arrays(split))
        assert variations.undo(numbers_N, answers).numpy().tolist() == labels_NS.tolist()
        assert k > 0 or questions.numpy().tolist() == inputs_NS.tolist(), "variation 0 must be the example itself"
        for question_S, answer_S in zip(questions.numpy(), answers.numpy(), strict=True):
            assert task.verdict(question_S.astype(np.uint8), answer_S.astype(np.uint8), answer_S).solved


def test_every_board_can_be_drawn(sample: tuple[BoardTask, Split], tmp_path_factory: pytest.TempPathFactory) -> None:
    task, split = sample
    inputs_NS, labels_NS = _arrays(split)
    drawing = board_of(task, split.metadata.seq_len)
    assert drawing["rows"] * drawing["columns"] >= split.metadata.seq_len
    assert len(set(drawing["tokens"])) in (0, split.metadata.vocab_size), "a token has no name, or that of another"
    picture = tmp_path_factory.mktemp("pictures") / "board.png"
    draw_answers(drawing, inputs_NS[0], labels_NS[0], labels_NS[1:3], task.title, picture)
    assert picture.stat().st_size > 1000
