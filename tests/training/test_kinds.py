"""The table of kinds: each kind follows the config where it trains and evaluates."""

from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import yaml

from dataset.evaluators import NO_EVALUATORS
from models.act import ActSettings
from records.checkpoint.format import Progress
from tests.in_process import SINGLE, pretrain_config
from tests.spawn import world_of
from training.kinds import KINDS
from utils.config_files import CONFIG_DIR
from utils.ranks.world import World


@pytest.mark.parametrize(("page", "num"), [("pretrain", 12), ("evaluate", 12), ("solve", 16)])
def test_the_keys_of_kinds_are_keys_of_the_page(page: str, num: int) -> None:
    known = yaml.safe_load((CONFIG_DIR / f"{page}.yaml").read_text())
    own = [key for kind in KINDS.values() for key in kind.keys[page]]
    assert set(own) <= known.keys() and len(own) == len(set(own)) == num


def test_the_table_follows_the_config_where_it_reads_data(monkeypatch: pytest.MonkeyPatch) -> None:
    made, named = Mock(), Mock(return_value=["loss"])
    monkeypatch.setattr("training.kinds.TrainLoader", made)
    KINDS["puzzles"].loader(pretrain_config("data_on=device"), "train", "sampler", drawn := Mock(), SINGLE)
    made.assert_called_once_with("train", "sampler", SINGLE, augmentation=drawn, data_on="device")
    monkeypatch.setattr("training.kinds.text_eval_metrics", named)
    text = pretrain_config("arch=gpt", "eval_max_examples=3")
    assert KINDS["text"].eval_metrics(text, "test", NO_EVALUATORS) == (["loss"], [])
    named.assert_called_once_with("test", 3)
    of_data = {"total_groups": 6, "mean_puzzle_examples": 2.5, "num_tokens": 40, "num_samples": 8}
    split = SimpleNamespace(metadata=SimpleNamespace(**of_data))
    assert [KINDS[kind].size_of_epoch(split) for kind in ("puzzles", "text")] == [15, 40]
    assert "12.5 % padding" in KINDS["text"].description(text, split, Mock(waste=0.125), None)[1]


@pytest.mark.parametrize("arch", ["trm", "se_rrm arch.dropout=0.1"])
def test_what_is_drawn_for_a_step_follows_the_seed_the_step_and_the_rank(arch: str) -> None:
    def drawn(step: int, world: World = SINGLE, seed: int = 0) -> list[list[int]]:
        typed = [*f"arch={arch}".split(), "global_batch_size=256", "arch.halt_exploration_prob=0.5", f"seed={seed}"]
        settings = KINDS["puzzles"].settings(pretrain_config(*typed), step, 100, world)
        assert isinstance(settings, ActSettings) and settings.min_halt_steps_B is not None
        assert (settings.seeds_B is not None) == ("dropout" in arch), "only dropout draws in the forward pass"
        return [each.tolist() for each in (settings.min_halt_steps_B, settings.seeds_B) if each is not None]

    whole = drawn(1)
    assert drawn(1) == whole
    for another in (drawn(2), drawn(1, seed=1)):
        assert all(now != before for now, before in zip(another, whole, strict=True)), "a draw repeats"
    halves = (drawn(1, world_of(rank, 2)) for rank in range(2))
    assert [one + other for one, other in zip(*halves, strict=True)] == whole


@pytest.mark.parametrize(
    ("kind", "published", "sampler", "expected"),
    [
        ("puzzles", False, "Sampler", {"global_batch_size": 256, "first_step": 4, "first_draw": 24, "seed": 5}),
        (
            *("text", False, "ShuffledSampler"),
            {"capacity": 32, "rows_per_step": 8, "first_step": 4, "first_row": 24, "seed": 5},
        ),
        ("text", True, "FileOrderSampler", {"capacity": 32, "rows_per_step": 8, "drop_last_batch": True}),
    ],
)
def test_the_sampler_follows_the_config(
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    published: bool,
    sampler: str,
    expected: dict[str, object],
) -> None:
    given: dict[str, object] = {}
    monkeypatch.setattr(f"training.kinds.{sampler}", lambda split, **options: given.update(options))
    typed = ["overfit_one_batch=true", "seed=5", "epochs=7", "global_batch_size=256"]
    typed += ["arch=gpt", "rows_per_step=8"] if kind == "text" else []
    split = SimpleNamespace(is_published_form=published, path=tmp_path, sets={})
    KINDS[kind].sampler(pretrain_config(*typed), split, Progress(step=3, draws=24))
    assert given == expected | {"epochs": 7, "repeat_first_batch": True}
