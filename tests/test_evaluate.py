"""evaluate.py from end to end, and its numbers against those of puzzles answered one by one."""
# N = examples, T = segments, S = cells, K = variations of an example

import errno
import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import evaluate as program
from dataset import build_sudoku_dataset
from dataset.augment import BOXES
from dataset.evaluators import able_evaluators
from dataset.schema import Split, open_split
from dataset.tta import Variations
from models.base import RecursiveModel
from models.inference import Trace, trace
from sharing import export
from tests import runs
from tests.dataset.shapes import is_valid_sudoku, split_of
from tests.in_process import SINGLE, load_run, pretrain_config, train_here, with_identifiers
from training.kinds import PUZZLES
from training.results import is_own, wilson_interval
from utils.errors import UserError
from viewer import curve_pictures

NUM_TEST = 40
TRAINED_STEPS = 4
NUM_VARIATIONS = 4
LAST = "step_00000044"


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "s4"
    sizes = ["--generate", "200", "--generate-test", str(NUM_TEST), "--box", "2x2", "--num-aug", "0"]
    assert build_sudoku_dataset.main(["--output-dir", str(path), *sizes]) == 0
    return path


@pytest.fixture(scope="module")
def run(puzzles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run that solves most of the test puzzles, but not all, and whose sequences halt."""
    folder = tmp_path_factory.mktemp("run") / "run"
    arch = {"arch": "trm_mlp", "arch__hidden_size": 64, "arch__L_cycles": 1, "arch__halt_max_steps": TRAINED_STEPS}
    recipe = {"optim": "adamw", "lr": "4e-3", "weight_decay": 0.1, "augment": "online", "global_batch_size": 32}
    length = {"epochs": 1000, "max_steps": 44, "eval_every_n_steps": 44, "checkpoint_every_n_steps": 22}
    train_here(runs.settings(puzzles, folder, **{**arch, **recipe, **length, "log_interval": 44}))
    return folder


def _typed_arch(*sizes: str) -> list[str]:
    """Return the architecture of a file of weights that does not describe its model."""
    common = ["num_heads=2", "H_cycles=1", "L_layers=1", "forward_dtype=float32", *sizes]
    return ["arch=trm_mlp", *(f"arch.{size}" for size in common)]


TYPED_ARCH = _typed_arch("hidden_size=64", "L_cycles=1", f"halt_max_steps={TRAINED_STEPS}")


@dataclass
class Printed:
    """The output of evaluate.py."""

    head: str
    metrics: dict[str, str]
    intervals: dict[str, tuple[str, str]]
    tail: list[str]  # without the lines of further tables
    tables: list[str]  # all lines after the first table

    def value(self, name: str) -> float:
        return float(self.metrics[f"eval/all/{name}"].replace(",", ""))


Evaluate = Callable[..., Printed]


@pytest.fixture
def evaluated(evaluate_here: Callable[..., list[str]]) -> Evaluate:
    def evaluate(*typed: str) -> Printed:
        head, *lines = evaluate_here(*typed)
        table = [line.split() for line in takewhile(lambda line: line.startswith("  "), lines)]
        intervals = {name: (rest[0], rest[2]) for name, _, *rest in table if rest}
        of_tables = ("  ", "confidence against accuracy", "accuracy of the set")
        tail = [line for line in lines[len(table) :] if not line.startswith(of_tables)]
        return Printed(head, {name: value for name, value, *_ in table}, intervals, tail, lines[len(table) :])

    return evaluate


def _results(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())


@dataclass
class Known:
    """The test split, and a model that answers one board at a time."""

    split: Split
    model: RecursiveModel

    def ask(self, board_S: torch.Tensor, num_steps: int = TRAINED_STEPS) -> Trace:
        identifiers = torch.zeros(1, dtype=torch.int32)
        batch = {"inputs": board_S[None].int(), "labels": board_S[None].int(), "puzzle_identifiers": identifiers}
        return trace(self.model, batch, num_steps)

    def board(self, row: int) -> torch.Tensor:
        return torch.from_numpy(self.split.sets["all"].inputs[row].astype(np.int64))

    def solution(self, row: int) -> list[int]:
        return [int(token) for token in self.split.sets["all"].labels[row]]


@pytest.fixture(scope="module")
def known(run: Path, puzzles: Path) -> Known:
    _, model, _ = load_run(run, SINGLE)
    return Known(open_split(puzzles, "test"), model)


def _shares(known: Known, answers: dict[int, list[int]]) -> dict[str, float]:
    judged = {
        "exact_accuracy": [answer == known.solution(row) for row, answer in answers.items()],
        "valid_boards": [is_valid_sudoku(np.array(answer) - 1, BOXES["2x2"]) for answer in answers.values()],
        "clues_kept": [
            all(clue in (1, cell) for clue, cell in zip(known.board(row).tolist(), answer, strict=True))
            for row, answer in answers.items()
        ],
    }
    return {name: sum(hits) / len(hits) for name, hits in judged.items()}


def _voted(known: Known, rows: range, num_steps: int, *, adaptive: bool) -> dict[int, list[int]]:
    """Return the winning answer of each puzzle, whose variations are answered alone."""
    variations = Variations.of(known.split, NUM_VARIATIONS)
    winners = {}
    for row in rows:
        cast: list[tuple[list[int], float]] = []
        for k in range(NUM_VARIATIONS):
            number = np.array([row * NUM_VARIATIONS + k])
            seen = known.ask(variations.vary(number, known.board(row)[None])[0], num_steps)
            t = int(seen.settled_at_N) - 1 if adaptive else num_steps - 1
            answer = variations.undo(number, seen.predictions_TNS[t])[0].tolist()
            cast.append((answer, float(seen.confidence_TN[t, 0])))
        best = (0, 0.0)
        for answer, _ in cast:
            confidences = [confidence for other, confidence in cast if other == answer]
            standing = len(confidences), sum(confidences) / len(confidences)
            if standing > best:
                best, winners[row] = standing, answer
    return winners


@pytest.mark.parametrize("adaptive, batch_size, num_steps", [(True, 10, TRAINED_STEPS), (False, 1, 2)])
def test_the_variations_of_a_puzzle_vote(
    known: Known, run: Path, tmp_path: Path, evaluated: Evaluate, adaptive: bool, batch_size: int, num_steps: int
) -> None:
    """Every second puzzle is scored. A batch may be smaller than the variations of one puzzle."""
    rows = range(0, NUM_TEST, 2)
    options = [f"tta={NUM_VARIATIONS}", f"adaptive={str(adaptive).lower()}", f"batch_size={batch_size}"]
    options += [f"num_steps={num_steps}"]
    printed = evaluated(f"checkpoint={run}", *options, f"max_examples={len(rows)}", f"out={tmp_path}")
    results = _results(tmp_path)
    expected = _shares(known, _voted(known, rows, num_steps, adaptive=adaptive))
    metrics = results["metrics"]
    segments = metrics.pop("eval/all/tta/segments")
    if adaptive:
        assert NUM_VARIATIONS < segments < NUM_VARIATIONS * num_steps
    else:
        assert segments == NUM_VARIATIONS * num_steps
    found = {name: value for name, value in metrics.items() if "/tta/" in name}
    assert found == pytest.approx({f"eval/all/tta/{name}": share for name, share in expected.items()})
    assert found.keys() <= results["intervals"].keys() and found.keys() <= printed.metrics.keys()
    # The scores of the votes are added to those of the single pass, and do not change them.
    assert metrics["eval/all/num_examples"] == len(rows)
    assert any(value != metrics[name.replace("/tta/", "/")] for name, value in found.items()), "votes change nothing"


def test_a_compiled_evaluation_answers_the_same(
    run: Path, tmp_path: Path, evaluated: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def keep(graph: object, inputs: object) -> object:
        graphs.append(graph)
        return graph

    options, graphs = [f"checkpoint={run}", "restarts=2", "noise=0.7", f"out={tmp_path}"], list[object]()
    expected = evaluated(*options).metrics
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=keep))
    assert evaluated(*options, "compile=true").metrics == expected and len(graphs) > 1, "it was not compiled"


@pytest.mark.invariance
def test_the_number_of_ranks_changes_no_result(run: Path, tmp_path: Path, evaluated: Evaluate, log: Path) -> None:
    more = [f"tta={NUM_VARIATIONS}", "trajectories=3", "restarts=2", "noise=0.7", "num_steps=5"]
    typed = [f"checkpoint={run}", *more, "batch_size=13", "save_outputs=[predictions]"]
    evaluated(*typed, f"out={tmp_path / 'one'}")
    output = runs.train([*typed, "device=cpu", f"out={tmp_path / 'two'}"], log, ranks=2, program="evaluate").ok()
    assert len([line for line in output.splitlines() if line.startswith("exact_accuracy=")]) == 1
    one, two = _results(tmp_path / "one"), _results(tmp_path / "two")
    assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-5)
    rows, noisy = {row["method"]: row for row in one["compute"]}, ("trajectories=2", "trajectories=3", "restarts=1")
    methods = ["single pass of 4 steps", "single pass of 5 steps", *noisy, "restarts=2", f"tta={NUM_VARIATIONS}"]
    assert two["compute"] == one["compute"] and [name.removesuffix(" noise=0.7") for name in rows] == methods
    segments = one["metrics"]["eval/all/steps"]
    assert rows["single pass of 5 steps"]["segments"] == segments
    assert rows["trajectories=3 noise=0.7"]["segments"] > 2 * segments > rows["restarts=2 noise=0.7"]["segments"]
    evaluated(f"checkpoint={run}", f"out={tmp_path / 'usual'}")
    usual, single = _results(tmp_path / "usual"), rows["single pass of 4 steps"]
    evaluated(f"checkpoint={run}", "num_steps=5", f"out={tmp_path / 'longer'}")
    assert [row["method"] for row in _results(tmp_path / "longer")["compute"]] == methods[:2]
    assert usual["compute"] == [] and not any("loop_deltas" in name for name in usual["metrics"])
    assert single["exact_accuracy"] == usual["metrics"]["eval/all/exact_accuracy"]
    assert single["segments"] == pytest.approx(usual["metrics"]["eval/all/steps"])
    for name in one["metrics"].keys() - {f"eval/all/{mean}" for mean in ("lm_loss", "q_halt_loss", "accuracy")}:
        if "loop_deltas" in name or "calibration_error" in name:  # sums of numbers that are not whole
            continue
        assert two["metrics"][name] == one["metrics"][name], name
    assert two["num_examples"] == one["num_examples"] and one["intervals"].keys() == two["intervals"].keys()
    assert {f"eval/all/{each}/any_exact_accuracy" for each in ("trajectories", "restarts")} <= one["intervals"].keys()
    files = sorted((tmp_path / "two").glob("*.safetensors"))
    assert [file.name for file in files] == ["all_rank0_0000.safetensors", "all_rank1_0000.safetensors"]
    answers: dict[int, list[int]] = {}
    for saved in map(load_file, files):
        answers |= dict(zip(saved["rows"].tolist(), saved["predictions"].tolist(), strict=True))
    saved = load_file(tmp_path / "one" / "all_rank0_0000.safetensors")
    assert answers == dict(zip(saved["rows"].tolist(), saved["predictions"].tolist(), strict=True))
    assert len(answers) == NUM_TEST


def test_the_results_file_equals_the_printed_table_and_the_pictures(
    run: Path, puzzles: Path, tmp_path: Path, evaluated: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = dict[Path, Any]()
    monkeypatch.setattr(curve_pictures, "save_figure", lambda figure, path: figures.update({path: figure}))
    printed = evaluated(f"checkpoint={run}", "tta=2", "max_examples=30", "plot=true")
    folder = run / "eval_outputs" / LAST
    results = _results(folder)
    metrics, settings, exact = results["metrics"], results["settings"], results["metrics"]["eval/all/exact_accuracy"]
    assert (results["checkpoint"], results["data"]) == (str(run / LAST), str(puzzles / "test"))
    assert results["num_examples"] == {"all": 30} and results["seconds"] > 0
    assert (settings["checkpoint"], settings["tta"], settings["max_examples"]) == (str(run), 2, 30)

    count = "eval/all/num_examples"
    shown = {name: f"{value:.0f}" if name == count else f"{value:.4f}" for name, value in metrics.items()}
    assert printed.metrics == shown and list(printed.metrics) == list(metrics)
    assert printed.intervals == {
        name: (f"{low:.4f}", f"{high:.4f}") for name, (low, high) in results["intervals"].items()
    }
    assert printed.tail[0] == f"written to {folder}" and printed.tail[-1] == f"exact_accuracy={exact:.4f}"
    bins = results["reliability"]["all"]
    assert sum(each["count"] for each in bins) == 30
    assert all(each["low"] <= each["confidence"] <= each["high"] == pytest.approx(each["low"] + 0.1) for each in bins)
    (single, votes) = results["compute"]
    assert votes["method"] == "tta=2"
    assert (single["segments"], single["exact_accuracy"]) == (metrics["eval/all/steps"], exact)
    rows = [f"  {each['low']:.1f} .. {each['high']:.1f} " for each in bins] + ["  single pass of 4 steps ", "  tta=2 "]
    for row in rows:
        assert len([line for line in printed.tables if line.startswith(row)]) == 1, row

    judged = {"exact_accuracy", "valid_boards", "clues_kept"}
    at_step = {f"exact_accuracy_at_step/{n}" for n in range(1, TRAINED_STEPS + 1)}
    are_shares = judged | {f"tta/{name}" for name in judged} | at_step | {"q_halt_accuracy"}
    assert {name.removeprefix("eval/all/") for name in results["intervals"]} == are_shares
    for name, (low, high) in results["intervals"].items():
        assert (low, high) == pytest.approx(wilson_interval(metrics[name], 30), abs=2e-5)

    (curve,), (above, below) = (figures[folder / f"{name}.png"].axes for name in ("accuracy_over_steps", "reliability"))
    over_steps = [value for name, value in metrics.items() if "_at_step/" in name]
    assert curve.lines[0].get_xydata().tolist() == [[n + 1, value] for n, value in enumerate(over_steps)]
    assert above.lines[1].get_xydata().tolist() == [[each["confidence"], each["accuracy"]] for each in bins]
    assert [bar.get_height() for bar in below.patches] == [each["count"] for each in bins]


def test_intervals_are_those_of_wilson() -> None:
    known = {(0, 1): (0, 0.7934507), (1, 1): (0.2065493, 1), (2, 7): (0.0822189, 0.6410656), (10**6, 10**6): (1, 1)}
    for (hits, num), interval in known.items():
        low, high = wilson_interval(hits / num, num)
        assert (low, high) == pytest.approx(interval, abs=1e-5) and low >= 0 and high <= 1


def test_other_data_have_a_folder_of_their_own(run: Path, puzzles: Path, tmp_path: Path, evaluated: Evaluate) -> None:
    """Data of the same name share no folder. The own data by another path are not other data."""
    step = f"checkpoint={run}/step_00000022"
    folder = run / "eval_outputs" / "step_00000022_t"
    second, third = (folder.with_name(f"{folder.name}_{number}") for number in (2, 3))
    for place, expected in (("o1", folder), ("o2", second), ("o3", third), ("o2", second)):
        copy = shutil.copytree(puzzles, tmp_path / place / "t", dirs_exist_ok=True)
        printed = evaluated(step, f"data_path={copy}", "max_examples=7", "evaluators=[]")
        assert printed.tail[0] == f"written to {expected}" and "eval/all/valid_boards" not in printed.metrics
        assert _results(expected)["data"] == str(copy / "test")
    own = run / "eval_outputs" / "step_00000022"
    assert not own.exists()
    evaluated(step, f"data_path={puzzles}/../{puzzles.name}", "max_examples=1")
    assert _results(own)["num_examples"] == {"all": 1}


def test_a_part_of_the_own_data_has_a_folder_of_its_own() -> None:
    def found(data_path: str, **paths: list[str]) -> bool:
        typed = [f"{key}=[{','.join(values)}]" for key, values in paths.items()]
        return is_own(data_path, pretrain_config("data_path=a", *typed))

    assert found("a") and found("./a/") and not found("b")
    assert not found("a", data_paths=["a", "b"]), "the own test split is that of a and b together"
    assert not found("a", data_paths_test=["b"]) and found("b", data_paths_test=["b"])


def test_results_of_a_file_of_weights_are_written_only_if_asked(
    run: Path, puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, evaluated: Evaluate
) -> None:
    def everything() -> set[Path]:
        return {path for folder in (run, puzzles, tmp_path) for path in folder.rglob("*")}

    monkeypatch.chdir(tmp_path)
    before = everything()
    typed = [f"checkpoint={run / LAST / 'model.safetensors'}", f"data_path={puzzles}", *TYPED_ARCH]
    printed = evaluated(*typed)
    assert everything() == before
    assert len(printed.tail) == 1 and printed.tail[0].startswith("exact_accuracy=")
    assert printed.metrics == evaluated(f"checkpoint={run}", f"out={tmp_path / 'run'}").metrics
    assert evaluated(*typed, "out=out").tail[0] == "written to out"
    assert _results(tmp_path / "out")["settings"]["arch"]["hidden_size"] == 64


def test_a_smaller_evaluation_replaces_no_larger_one(
    run: Path, tmp_path: Path, evaluated: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quick look must not cost the results of hours, nor the answers that view.py shows."""
    copy = Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("eval_outputs")))
    folder, saves = copy / "eval_outputs" / LAST, "save_outputs=[inputs,predictions]"
    answers = folder / "all_rank0_0000.safetensors"
    evaluated(f"checkpoint={copy}", saves, "max_examples=10")
    saved = answers.read_bytes()
    said: list[str] = []
    monkeypatch.setattr("training.results.tell", said.append)
    drawn = list[tuple[object, ...]]()
    monkeypatch.setattr(program, "draw_accuracy_over_steps", lambda _, *drawn_with: drawn.append(drawn_with))

    for more, num, kept, is_told, keeps_answers in (
        ([], 5, 10, True, True),
        ([], 12, 12, False, True),
        ([saves, f"out={tmp_path / 'else'}"], 5, 12, False, True),
        (["plot=true", "num_steps=6"], 6, 12, True, True),
        ([saves], 6, 12, True, False),
    ):
        evaluated(f"checkpoint={copy}", *more, f"max_examples={num}")
        assert _results(folder)["num_examples"] == {"all": kept}, f"{more} cost the results of more examples"
        assert (answers.read_bytes() == saved) == keeps_answers, more
        assert [f"keeps its results of {kept} examples; give out=" in line for line in said] == [True] * is_told
        said.clear()
    assert drawn == [(TRAINED_STEPS, folder / "accuracy_over_steps.png")], "the picture was asked for"
    evaluated(f"checkpoint={copy}", "max_examples=5", f"out={folder}")
    assert _results(folder)["num_examples"] == {"all": 5} and not answers.exists(), "answers of other results are left"


def test_without_labels_there_is_nothing_to_draw(run: Path, puzzles: Path, tmp_path: Path, evaluated: Evaluate) -> None:
    """The puzzles of a competition have no labels, so that only the losses are known."""
    hidden = Path(shutil.copytree(puzzles, tmp_path / "hidden", ignore=shutil.ignore_patterns("fingerprint.json")))
    labels = hidden / "test" / "all__labels.npy"
    np.save(labels, np.zeros_like(np.load(labels)))
    typed = [f"data_path={hidden}", "plot=true", "tta=2", f"out={tmp_path / 'out'}", "save_outputs=[predictions]"]
    printed = evaluated(f"checkpoint={run}", *typed)
    assert printed.tail[0] == "nothing is drawn: no example has a label" and printed.tail[-1] == "exact_accuracy=nan"
    assert printed.metrics.keys() == {"eval/all/lm_loss", "eval/all/q_halt_loss"} and printed.intervals == {}
    assert len(load_file(tmp_path / "out" / "all_rank0_0000.safetensors")["predictions"]) == NUM_TEST
    assert not list((tmp_path / "out").glob("*.png"))


def test_mistakes_are_noticed_before_any_work(
    run: Path, puzzles: Path, tmp_path: Path, evaluated: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that can't be written needs out. The tests may run as root, whom no mode hinders."""
    monkeypatch.setattr(PUZZLES, "evaluate", None)
    monkeypatch.setattr(program, "evaluate_more", None)
    copy = Path(shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("eval_outputs")))
    out = f"out={tmp_path / 'out'}"
    of_file = [f"checkpoint={run / LAST / 'model.safetensors'}", f"data_path={puzzles}", *TYPED_ARCH]
    for typed, expected in (
        ([f"checkpoint={run}", out, f"vote_with=[{run}]"], "but only answers of ARC vote; leave it out"),
        ([f"checkpoint={run}", out, "evaluators=[arc]"], "has 16 tokens of 6 kinds"),
        ([f"checkpoint={run}", out, "tta=1"], "tta: "),
        ([f"checkpoint={run}", out, "trajectories=4"], "trajectories=4 without noise"),
        ([f"checkpoint={run}", out, "noise=0.5"], "noise=0.5"),
        ([*of_file, "plot=true"], "give out="),
        ([*of_file, "save_outputs=[steps]"], "give out="),
        ([f"checkpoint={copy}"], f"{copy}/eval_outputs/{LAST} can't be written"),
    ):
        if typed[0] == f"checkpoint={copy}":
            refused = PermissionError(errno.EACCES, "Permission denied")
            monkeypatch.setattr("tempfile.TemporaryFile", Mock(side_effect=refused))
        with pytest.raises(UserError, match=re.escape(expected)) as caught:
            evaluated(*typed)
        assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="drawing needs matplotlib"):
        evaluated(f"checkpoint={run}", out, "plot=true")


def _metrics(printed: Printed) -> dict[str, float]:
    metrics = {name: float(value.replace(",", "")) for name, value in printed.metrics.items()}
    assert 0 <= metrics.pop("eval/all/calibration_error") <= 1  # which no run logs
    return metrics


def _logged(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name.startswith("eval/")}


def test_the_program_gives_the_scores_of_training(quiet: Path, data: Path, evaluated: Evaluate) -> None:
    """Both find the evaluators of the task by themselves."""
    *_, last = runs.rows(quiet)
    for typed in (["batch_size=7"], ["batch_size=1000"]):
        scored = _metrics(evaluated(f"checkpoint={quiet}", *typed))
        assert scored == pytest.approx(_logged(last), abs=1e-4) and "eval/all/valid_boards" in scored
    best = evaluated(f"checkpoint={quiet}/best", "batch_size=7").value("exact_accuracy")
    assert best == max(row.get("eval/all/exact_accuracy", 0) for row in runs.rows(quiet))
    (older,) = [row for row in runs.rows(quiet) if row["step"] == 10]
    typed = [f"checkpoint={quiet}/step_00000010", f"data_path={data}", "evaluators=[]"]
    scored = _metrics(evaluated(*typed))
    assert scored == pytest.approx({name: older[name] for name in scored}, abs=1e-4)


def test_the_evaluators_of_the_run_join_those_that_fit() -> None:
    """An evaluator that the run named and that can't score the data is told, and left out."""
    for split, of_run, expected, told in (
        (split_of(81, 11), ["sudoku", "maze"], ("valid_boards", "clues_kept"), "without the evaluator maze: "),
        (split_of(900, 12), ["arc"], (), "without the evaluator arc: "),
    ):
        said = list[str]()
        assert able_evaluators(of_run, split, said.append).metrics == expected
        assert "".join(said).startswith(told)


@pytest.fixture(scope="module")
def trm(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run whose moving average is far from its weights."""
    run = tmp_path_factory.mktemp("trm") / "run"
    train_here(runs.settings(data, run, arch="trm_mlp", ema="true", ema_rate=0.98, lr=1e-2, eval_every_n_steps=12))
    return run


def test_an_exported_file_has_the_scores_of_its_run(
    trm: Path, data: Path, tmp_path: Path, evaluated: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    """The export has the average. The weights without the average have other scores."""
    file, raw = tmp_path / "published.pt", tmp_path / "raw.pt"
    arch = _typed_arch("hidden_size=32", "L_cycles=2", "halt_max_steps=3")
    assert export.main(["--format", "hrm", str(trm), "-o", str(file), "--compiled"]) == 0
    _, program_name, *printed = shlex.split(capsys.readouterr().out.splitlines()[1])
    assert program_name == "evaluate.py" and {*printed[2:]} >= {*arch}
    scored = evaluated(*printed)
    assert _metrics(scored) == pytest.approx(_logged(runs.rows(trm)[-1]), abs=1e-4)
    assert export.main(["--format", "hrm", str(trm), "-o", str(raw), "--raw"]) == 0
    of_raw = evaluated(f"checkpoint={raw}", f"data_path={data}", *arch)
    assert abs(of_raw.value("lm_loss") - scored.value("lm_loss")) > 1e-2


def test_a_file_that_describes_its_model_needs_no_arch(
    trm: Path, data: Path, tmp_path: Path, evaluated: Evaluate, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.safetensors"
    assert export.main([str(trm), "-o", str(file)]) == 0
    _, program_name, *printed = shlex.split(capsys.readouterr().out.splitlines()[1])
    assert [program_name, *printed] == ["evaluate.py", f"checkpoint={file}", f"data_path={data}"]
    assert evaluated(*printed).metrics == evaluated(f"checkpoint={trm}").metrics
    more = with_identifiers(data, tmp_path / "more", 3)
    evaluated(f"checkpoint={file}", f"data_path={more}", "puzzle_table=zero")
    another = _typed_arch("hidden_size=32", "L_cycles=3", "halt_max_steps=3")
    for typed, expected in (
        ([], f"{file} was trained on {data.name} and holds no data; give data_path=..."),
        ([f"data_path={more}"], f"3 puzzle identifiers, but the model's table only 1 rows, of {data.name};"),
        ([f"data_path={data}", *another], "and arch differs in L_cycles: 2 -> 3"),
        (["puzzle_table=zero"], "puzzle_table=zero fits the puzzle rows to other data; give data_path=..."),
    ):
        with pytest.raises(UserError, match=re.escape(expected)):
            evaluated(f"checkpoint={file}", *typed)
