"""What is typed after sweep.py: files, values of a key, ranges, and keys of all trials."""

from pathlib import Path
from typing import Any

import pytest

from search.sweep import Sweep
from utils.errors import UserError

FILE = """
overrides: [debug=tiny, lr_min_ratio=0.5]
parameters:
  arch: [hrm, trm]
  arch.mlp_t: {values: [true, false], when: {arch: trm}}
  lr: {log_range: [1e-4, 1e-2]}
trials: 7
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "mine.yaml").write_text(FILE)
    return f"sweep={tmp_path / 'mine.yaml'}"


def _entries(sweep: Sweep) -> dict[str, Any]:
    return {
        key: [entry.model_dump(exclude_defaults=True) for entry in entries]
        for key, entries in sweep.config.parameters.items()
    }


def test_what_is_typed_changes_the_file(file: str) -> None:
    plain = Sweep.read([file])
    assert (plain.name, plain.path) == ("mine", Path("checkpoints/sweeps/mine"))
    assert plain.config.overrides == ["debug=tiny", "lr_min_ratio=0.5"]
    assert (plain.config.trials, plain.config.sampler.name) == (7, "tpe")
    assert _entries(plain)["lr"] == [{"log_range": (1e-4, 1e-2)}]
    sweep = Sweep.read([file, "lr_min_ratio=0.1", "lr=1e-3", "sweep.trials=3", "beta1=0.8,0.9", "sweep.name=other"])
    assert sweep.config.overrides == ["debug=tiny", "lr_min_ratio=0.1", "lr=1e-3"]
    assert _entries(sweep).keys() == {"arch", "arch.mlp_t", "beta1"}
    assert (sweep.config.trials, sweep.name) == (3, "other")
    assert Sweep.read(["lr=1,2", "sweep.sampler.name=random"]).config.sampler.name == "random"


def test_a_typed_choice_decides_the_conditions_on_it(tmp_path: Path, file: str) -> None:
    for typed, left in (("arch=trm", {"arch.mlp_t", "lr"}), ("arch=hrm", {"lr"})):
        entries = _entries(Sweep.read([file, typed]))
        assert entries.keys() == left and "when" not in str(entries)
    conditional = "parameters: {ema: [false, true], ema_rate: {values: [0.9, 0.97], when: {ema: true}}}"
    (tmp_path / "mine.yaml").write_text(conditional)
    assert _entries(Sweep.read([file, "ema=TRUE"])).keys() == {"ema_rate"}, "however it is spelled"


def test_a_narrower_choice_drops_what_can_no_longer_be(tmp_path: Path) -> None:
    (tmp_path / "n.yaml").write_text(
        """
parameters:
  arch: [hrm, trm, urm]
  max_steps: [{values: [1], when: {arch: [hrm, trm]}}, {values: [2], when: {arch: urm}}]
"""
    )
    assert _entries(Sweep.read([f"sweep={tmp_path / 'n.yaml'}", "arch=hrm,trm_mlp"])) == {
        "max_steps": [{"values": [1], "when": {"arch": ["hrm"]}}],
        "arch": [{"values": ["hrm", "trm_mlp"]}],
    }


def test_several_values_need_no_file() -> None:
    sweep = Sweep.read(["lr=1e-4,2e-4", "arch=hrm,trm", "ema=true,false", "seed=range(3)", "max_steps=5"])
    assert _entries(sweep) == {
        "lr": [{"values": [1e-4, 2e-4]}],
        "arch": [{"values": ["hrm", "trm"]}],
        "ema": [{"values": [True, False]}],
    }
    assert (sweep.config.seeds, sweep.config.sampler.name, sweep.name) == ([0, 1, 2], "grid", "lr+arch+ema")
    assert sweep.config.overrides == ["max_steps=5"]
    seeds = Sweep.read(["lr=1e-3", "seed=4,5"])
    assert (seeds.config.seeds, seeds.name, seeds.config.parameters) == ([4, 5], "seed", {})
    assert [point for _, point in seeds.space.grid()] == [{}], "seeds alone are a sweep of one trial"


@pytest.mark.parametrize(
    ("typed", "entry"),
    [
        ("lr=interval(0,1)", {"range": (0.0, 1.0)}),
        ("lr=tag(log,interval(1e-5,1e-2))", {"log_range": (1e-5, 1e-2)}),
        ("lr=int(interval(1,4))", {"int_range": (1, 4)}),
        ("lr=choice(1,2)", {"values": [1, 2]}),
        ("lr=range(1,10,3)", {"values": [1, 4, 7]}),
        ("lr=[1,2],[3,4]", {"values": ["[1,2]", "[3,4]"]}),
        ("lr=null,1", {"values": [None, 1]}),
        ("lr='a b',c", {"values": ["a b", "c"]}),
    ],
)
def test_the_forms_of_several_values(typed: str, entry: dict[str, Any]) -> None:
    sweep = Sweep.read([typed])
    assert _entries(sweep) == {"lr": [entry]}
    assert sweep.config.sampler.name == ("grid" if "values" in entry else "tpe"), "a range has no grid"


def test_a_point_replaces_what_all_trials_have_in_common(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("overrides: [arch=trm, lr=1e-3]\npoints: [{}, {arch: hrm, ema: true}]\n")
    sweep = Sweep.read([f"sweep={tmp_path / 'p.yaml'}"])
    points = [point for _, point in sweep.space.grid()]
    assert [sweep.overrides(point, 0) for point in points] == [
        ["arch=trm", "lr=1e-3", "seed=0"],
        ["lr=1e-3", "arch=hrm", "ema=true", "seed=0"],
    ]
    typed = Sweep.read([f"sweep={tmp_path / 'p.yaml'}", "arch=urm"])
    assert [point for _, point in typed.space.grid()] == [{}, {"ema": True}], "what is typed holds for all points"


def test_a_stored_sweep_opens_as_it_was(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sweep = Sweep.read([file, "seed=range(2)"])
    sweep.path.mkdir(parents=True)
    sweep.write()
    for named in ("mine", "checkpoints/sweeps/mine"):
        opened = Sweep.open(named)
        assert opened.identity == sweep.identity and opened.path == sweep.path
    moved = sweep.path.rename(tmp_path / "moved")
    assert Sweep.open(str(moved)).path == moved, "a folder that was moved is opened where it is"
    (moved / "sweep.yaml").write_text("seeds: [0]\n")
    assert Sweep.open(str(moved)).config.metric == "exact_accuracy", "keys that were added since have their defaults"


def test_a_password_is_refused_and_never_shown() -> None:
    for url in ("postgresql://me:p@ss@host/db", "postgresql://host/db?user=me&password=p@ss"):
        with pytest.raises(UserError, match="has a password") as caught:
            Sweep.read(["lr=1,2", f"sweep.storage='{url}'"])
        assert "p@ss" not in str(caught.value) and "***" in str(caught.value)


def test_a_database_file_does_not_depend_on_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert Sweep.read(["lr=1,2", "sweep.storage=sqlite:///a.db"]).config.storage == f"sqlite:///{tmp_path}/a.db"
    stored = Sweep.read(["lr=1,2", "sweep.storage='sqlite:///a.db?timeout=5'"]).config.storage
    assert stored == f"sqlite:///{tmp_path}/a.db?timeout=5"
