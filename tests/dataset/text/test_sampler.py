"""What each step trains on: the same for all numbers of ranks, known beforehand, and resumable."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataset.text.sampler import FileOrderSampler, ShuffledSampler
from dataset.text.schema import TextSplit, open_text_split
from tests.dataset.text.samples import random_split, write_hrm_text
from tests.dataset.text.test_packing import RECORDED, recorded
from utils.errors import UserError


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> TextSplit:
    return random_split(tmp_path_factory.mktemp("text"), num=500, longest=60)


def _shuffled(split: TextSplit, **changed: Any) -> ShuffledSampler:
    return ShuffledSampler(split, **{"seed": 0, "epochs": 3, "capacity": 64, "rows_per_step": 4, **changed})


def _sequences(sampler: ShuffledSampler | FileOrderSampler, step: int, num_ranks: int) -> list[list[int]]:
    """Return inputs and labels of each sequence of a step, over all ranks."""
    found = []
    for rank in range(num_ranks):
        size = 4 // num_ranks
        row = sampler.packed_row(step, slice(rank * size, (rank + 1) * size), target_only=True)
        assert len(row.inputs) == len(row.labels) == 4 // num_ranks * 64
        ends = np.cumsum(row.prefix_lens + row.response_lens)
        assert (row.labels[ends[-1] :] == -100).all() and not row.inputs[ends[-1] :].any()
        parts = zip(np.split(row.inputs, ends), np.split(row.labels, ends), strict=True)
        found += [[*inputs.tolist(), *labels.tolist()] for inputs, labels in list(parts)[:-1]]
    return found


def test_every_number_of_ranks_trains_on_the_same_sequences(split: TextSplit) -> None:
    sampler = _shuffled(split)
    for step in range(1, sampler.last_step + 1):
        one = _sequences(sampler, step, 1)
        assert _sequences(sampler, step, 2) == one and _sequences(sampler, step, 4) == one


def test_a_resumed_run_goes_on_with_the_same_steps(split: TextSplit) -> None:
    """With more rows in a step, the stream goes on where it was, as with puzzles."""
    whole = _shuffled(split)
    resumed = _shuffled(split, first_step=30, first_row=whole.draws_before(30))
    assert resumed.last_step == whole.last_step > 60
    for step in (30, 31, whole.last_step):
        assert (resumed.places(step, slice(0, 4)) == whole.places(step, slice(0, 4))).all()
        assert resumed.epoch(step) == whole.epoch(step)
    larger = _shuffled(split, first_step=11, first_row=40, rows_per_step=8)
    expected = np.concatenate([whole.places(step, slice(0, 4)) for step in (11, 12)])
    assert (larger.places(11, slice(0, 8)) == expected).all()
    assert larger.last_step == 10 + (3 * whole._shapes.num_rows - 40) // 8
    assert _shuffled(split, first_step=30, first_row=10**6).last_step == 29, "a run that has drawn more is at its end"


def test_an_epoch_visits_every_sample_once_in_an_order_of_its_own(split: TextSplit) -> None:
    sampler, other = _shuffled(split, rows_per_step=1), _shuffled(split, rows_per_step=1, seed=1)
    per_epoch = sampler.last_step // 3

    def starts(of: ShuffledSampler, first: int) -> list[list[int]]:
        return [of.places(step, slice(0, 1))[:, 0].tolist() for step in range(first, first + per_epoch)]

    first, second, third = starts(sampler, 1), starts(sampler, 1 + per_epoch), starts(other, 1)
    assert first != second and first != third
    assert [*map(len, first)] != [*map(len, second)], "the rows must not come in the same order"
    for epoch in (first, second, third):
        assert sorted(start for row in epoch for start in row) == split.epochs[0].instruction_start.tolist()
    assert sampler.epoch(per_epoch) == 1.0 and starts(_shuffled(split, rows_per_step=1), 1) == first
    shared = {tuple(sorted(row)) for row in first} & {tuple(sorted(row)) for row in second}
    assert len(shared) < per_epoch / 2, "the same samples must not share a row in each epoch"


def test_the_share_of_padding_is_that_of_the_rows(split: TextSplit) -> None:
    in_order = FileOrderSampler(split, epochs=1, capacity=64, rows_per_step=4, drop_last_batch=False)
    for sampler in (_shuffled(split, epochs=1, rows_per_step=1), in_order):
        rows = [(step, n) for step in range(1, sampler.last_step + 1) for n in range(sampler.rows_per_step)]
        held = sum(int(sampler.places(step, slice(n, n + 1))[:, [1, 3]].sum()) for step, n in rows)
        num_samples = sum(len(sampler.places(step, slice(n, n + 1))) for step, n in rows)
        assert sampler.waste == pytest.approx(1 - (held - num_samples) / (len(rows) * sampler.capacity))


def test_a_sample_longer_than_a_row_is_named(split: TextSplit) -> None:
    longest = int(split.epochs[0].lengths().max())
    _shuffled(split, capacity=longest)
    with pytest.raises(UserError, match=rf"samples.npy: sample \d+ reads {longest} tokens, but a row holds 40;.*"):
        _shuffled(split, capacity=40)
    with pytest.raises(UserError, match=rf"raise global_batch_size to {4 * longest}.*--max-len 40"):
        FileOrderSampler(split, epochs=1, capacity=40, rows_per_step=4, drop_last_batch=True)


def test_the_labels_of_a_step_are_known_without_its_tokens(split: TextSplit) -> None:
    sampler = _shuffled(split)
    for target_only in (True, False):
        rows = [sampler.packed_row(3, slice(n, n + 1), target_only=target_only) for n in range(4)]
        assert sampler.num_labels(3, target_only=target_only) == sum(int((row.labels != -100).sum()) for row in rows)


def test_the_first_batch_is_repeated_after_a_resume_too(split: TextSplit) -> None:
    in_order: dict[str, Any] = {"epochs": 1, "capacity": 64, "rows_per_step": 4, "drop_last_batch": True}
    first, first_in_order = (
        of.places(1, slice(0, 4)) for of in (_shuffled(split), FileOrderSampler(split, **in_order))
    )
    for sampler, steps, expected in (
        (_shuffled(split, repeat_first_batch=True), (1, 2, 5), first),
        (_shuffled(split, repeat_first_batch=True, first_step=5, first_row=16), (5, 6, 30), first),
        (FileOrderSampler(split, **in_order, repeat_first_batch=True), (1, 2, 5), first_in_order),
    ):
        assert all((sampler.places(step, slice(0, 4)) == expected).all() for step in steps)


def test_the_published_order_of_a_split(split: TextSplit) -> None:
    sampler = FileOrderSampler(split, epochs=2, capacity=64, rows_per_step=4, drop_last_batch=True)
    per_epoch = sampler.last_step // 2
    assert _sequences(sampler, 1, 1) == _sequences(sampler, 1 + per_epoch, 4)
    assert sampler.epoch(per_epoch) == 1.0 and sampler.epoch(per_epoch + 1) == 1 + 1 / per_epoch
    assert (sampler.epoch(0), sampler.draws_before(1), sampler.draws_before(1 + per_epoch)) == (0, 0, 4 * per_epoch)
    seen = np.sort(np.concatenate([sampler.places(step, slice(0, 4))[:, 0] for step in range(1, per_epoch + 1)]))
    assert (seen == split.epochs[0].instruction_start[: len(seen)]).all(), "samples come in the order of the file"


def test_each_epoch_of_a_split_is_packed_by_its_own_lengths(split: TextSplit) -> None:
    (epoch,) = split.epochs
    arrays = ("instruction_start", "instruction_len", "response_len", "task")
    turned = replace(epoch, **{name: getattr(epoch, name)[:200:-1] for name in arrays})
    two = replace(split, epochs=(epoch, turned))
    sampler = FileOrderSampler(two, epochs=3, capacity=64, rows_per_step=1, drop_last_batch=True)
    assert sampler.last_step == sum(len(sampler._steps(number)) for number in (0, 1, 0))
    rows = [sampler.places(step, slice(0, 1)) for step in range(1, sampler.last_step + 1)]
    assert max(int((row[:, 1] + row[:, 3] - 1).sum()) for row in rows) <= 64
    longer = replace(split, epochs=(epoch, replace(epoch, response_len=epoch.response_len + 40)))
    with pytest.raises(UserError, match="tokens, but a row holds 64"):
        FileOrderSampler(longer, epochs=2, capacity=64, rows_per_step=1, drop_last_batch=True)


@recorded
def test_the_recorded_cases_of_the_loader_from_a_folder_in_its_format(tmp_path: Path) -> None:
    data = json.loads((RECORDED / "loader.json").read_text())
    names = ("inst_start", "inst_len", "resp_start", "resp_len")
    write_hrm_text(
        tmp_path / "data", np.array(data["tokens"], np.int32), [{name: np.array(data[name]) for name in names}]
    )
    split = open_text_split(tmp_path / "data", "train")
    for case in data["cases"]:
        ranks = case["num_replicas"]
        capacity, drop = case["batch_max_length"], case["drop_last_batch"]
        sampler = FileOrderSampler(split, epochs=1, capacity=capacity, rows_per_step=ranks, drop_last_batch=drop)
        for step, expected in enumerate(case["steps"], 1):
            for rank in range(ranks):
                row = sampler.packed_row(step, slice(rank, rank + 1), target_only=case["target_only"])
                for name in ("inputs", "labels", "position_ids"):
                    assert getattr(row, name).tolist() == expected[rank][name]
