"""The table of kinds: each kind follows the config where it trains and evaluates."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from dataset.evaluators import NO_EVALUATORS
from models import ARCHS
from training.config import PretrainConfig
from training.kinds import KINDS, Asked
from training.laps import Interrupts
from utils.command_line import read_config, validate
from utils.config_files import CONFIG_DIR
from utils.perf.clocks import Deadline
from utils.ranks.world import World
from utils.run.stop import StopSignal

SINGLE = World.single()


def _config(run: Path, *typed: str) -> PretrainConfig:
    return validate(PretrainConfig, read_config("pretrain", [f"checkpoint_path={run}", *typed]))


def test_every_architecture_has_a_kind() -> None:
    assert {arch.kind for arch in ARCHS} == KINDS.keys() == {kind.name for kind in KINDS.values()}


@pytest.mark.parametrize("page", ["pretrain", "evaluate", "solve"])
def test_the_keys_of_kinds_are_keys_of_the_page(page: str) -> None:
    known = yaml.safe_load((CONFIG_DIR / f"{page}.yaml").read_text())
    own = [key for kind in KINDS.values() for key in kind.keys[page]]
    assert set(own) <= known.keys() and len(own) == len(set(own))


@pytest.mark.parametrize(("kind", "function"), [("puzzles", "evaluate"), ("text", "evaluate_text")])
@pytest.mark.parametrize(("eval_batch_size", "batch_size"), [(77, 77), (None, 1024)])
def test_an_evaluation_in_training_follows_the_config(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    function: str,
    eval_batch_size: int | None,
    batch_size: int,
) -> None:
    given: dict[str, Any] = {}

    def evaluated(model: object, split: object, world: World, options: Any, **others: Any) -> dict[str, float]:
        given.update(others, model=model, split=split, options=options)
        return {"eval/all/loss": 0.5}

    monkeypatch.setattr(f"training.kinds.{function}", evaluated)
    typed = ["eval_max_examples=3", f"eval_batch_size={eval_batch_size or 'null'}", "global_batch_size=1024"]
    typed += ["arch=gpt", "target_only=false"] if kind == "text" else ["eval_adaptive=true"]
    interrupts = Interrupts(lockstep=True, stop=StopSignal(), deadline=Deadline(5.0))
    asked = Asked(_config(tmp_path, *typed), 4, SINGLE, NO_EVALUATORS, 0, interrupts, print)
    assert KINDS[kind].evaluate(asked, "model", "split") == ({"eval/all/loss": 0.5}, [])
    assert (given["model"], given["split"]) == ("model", "split")
    assert given["interrupts"] is interrupts, "neither a stop nor the deadline would end the evaluation"
    options = given["options"]
    assert (options.batch_size, options.max_examples) == (batch_size, 3)
    expected = {"target_only": False} if kind == "text" else {"adaptive": True, "num_steps": None}
    assert expected.items() <= asdict(options).items()
    assert (tmp_path / "samples" / "step_00000004.json").exists() == (kind == "text")
