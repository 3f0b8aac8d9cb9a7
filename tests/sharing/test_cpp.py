"""The solver in C++ (cpp/) answers as Solver does, and says in one line what is wrong."""

import fcntl
import hashlib
import json
import math
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dataset.build_sudoku_dataset import main as build_sudoku
from dataset.tasks import task_of_shape
from dataset.tasks.base import TextTask
from models.inference import trace
from models.trajectories import Trajectories
from tests.sharing import test_segment
from training.solver import Solver

pytestmark = pytest.mark.export
REPO = Path(__file__).parents[2]
puzzles, weights, export = test_segment.puzzles, test_segment.weights, test_segment.export
RESTARTS = 3
# How many puzzles of each size, by the rows and columns of their boxes.
COUNTS = {"3x3": 60, "2x3": 20, "2x2": 20}


class Answer(NamedTuple):
    text: str
    confidence: float
    segments: int
    settled: bool


Program = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """Build the program with CMake, and return what runs it."""
    for tool in ("cmake", "g++"):
        if shutil.which(tool) is None:
            pytest.skip(f"needs {tool}")
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base  # one for all processes
    options = [f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}", "-DCMAKE_COMPILE_WARNING_AS_ERROR=ON"]
    with (base / "cpp.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for words in (["-S", str(REPO / "cpp"), "-B", f"{base}/cpp", *options], ["--build", f"{base}/cpp"]):
            done = subprocess.run(["cmake", *words], capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr

    def run(*words: object, lines: str | bytes = "") -> "subprocess.CompletedProcess[bytes]":
        typed = lines.encode() if isinstance(lines, str) else lines
        return subprocess.run([base / "cpp" / "solve", *map(str, words)], input=typed, capture_output=True)

    return run


def answers(program: Program, folder: Path, texts: Sequence[str], *options: object) -> list[Answer]:
    done = program(folder, "--verbose", *options, lines="".join(f"{text}\n" for text in texts))
    assert (done.returncode, done.stderr) == (0, b"")
    rows = [line.split("\t") for line in done.stdout.decode().splitlines()]
    return [Answer(text, float(sure), int(segments), settled == "settled") for text, sure, segments, settled in rows]


def refuse(program: Program, *words: object, says: str, lines: str | bytes = "") -> None:
    done = program(*words, lines=lines)
    assert done.returncode == 2
    assert done.stderr.count(b"\n") == 1 and says in done.stderr.decode()


def texts_of(folder: Path, count: int) -> list[str]:
    """Return test puzzles of a dataset of Sudokus, a line each."""
    inputs_NS = np.load(folder / "test" / "all__inputs.npy")[:count]
    board = task_of_shape(inputs_NS.shape[1], math.isqrt(inputs_NS.shape[1]) + 2)
    assert isinstance(board, TextTask)
    return [board.plain(tokens_S) for tokens_S in inputs_NS]


def until_settled(solver: Solver, text: str, restarts: int = 0, seed: int = 0) -> Answer:
    """Return the answer of passes that end when they settle, as with adaptive=true."""
    (solution,) = solver.solve([text])
    tokens_1S = torch.from_numpy(solution.puzzle.question_S)[None].int()
    zeros = {"labels": torch.zeros_like(tokens_1S), "puzzle_identifiers": torch.zeros(1, dtype=torch.int32)}
    best, segments = Answer("", -1, 0, False), 0
    for k in range(restarts + 1):
        seen = trace(
            solver._models[len(text)],
            {"inputs": tokens_1S, **zeros},
            trajectories=Trajectories(restarts + 1, 0.0, seed),
            numbers_N=np.array([k]),
        )
        at = int(seen.settled_at_N)
        segments += at
        settled = at < len(seen.q_halt_TN) or bool(seen.settled_N)
        sure = seen.confidence_TN[at - 1].item()
        if settled or sure > best.confidence:
            best = Answer(str(solution.board.plain(seen.predictions_TNS[at - 1, 0].numpy())), sure, segments, settled)
        if settled:
            break
    return best._replace(segments=segments)


def require_equal(ours: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for one, other in zip(ours, expected, strict=True):
        assert one._replace(confidence=0) == other._replace(confidence=0)
        assert abs(one.confidence - other.confidence) < 1e-3


def require_equal_to_all_segments(ours: Sequence[Answer], solver: Solver, texts: Sequence[str]) -> None:
    for one, solution in zip(ours, solver.solve(texts), strict=True):
        assert one.text == solution.answer
        assert abs(one.confidence - solution.steps[-1].confidence) < 1e-3


@pytest.mark.parametrize("format", ["torchscript", "aoti"])
def test_the_shipped_model_answers_as_in_python(format: str, program: Program, tmp_path: Path) -> None:
    texts, shipped = list[str](), REPO / "examples" / "sudoku"
    for box, count in COUNTS.items():
        words = f"--output-dir {tmp_path / box} --generate 2 --generate-test {count} --box {box}"
        assert build_sudoku(words.split()) == 0
        texts += texts_of(tmp_path / box, count)
    folder = tmp_path / "model"
    export([shipped, "--format", format, "-o", folder, "--data", tmp_path / "3x3"])
    alone = Solver.from_checkpoint(shipped, ["batch_size=1"], device="cpu")
    expected = [until_settled(alone, text) for text in texts]
    if format == "aoti":
        # It adds up in another order. The difference grows from segment to segment, and may change
        # the answer of a pass that goes on long.
        texts = [text for text, answer in zip(texts, expected, strict=True) if answer.segments <= 4]
        expected = [answer for answer in expected if answer.segments <= 4]
    assert len(texts) >= 90
    require_equal(answers(program, folder, texts), expected)
    if format == "torchscript":
        require_equal_to_all_segments(answers(program, folder, texts, "--all-segments"), alone, texts)
        # Without these clues there are several solutions, among which only the noise decides.
        texts = [text.translate(dict.fromkeys(map(ord, "12"), ".")) for text in texts[::2]]
        overrides = ["batch_size=1", f"restarts={RESTARTS}", "seed=7"]
        several = Solver.from_checkpoint(shipped, overrides, device="cpu")
        expected = [until_settled(alone, text, RESTARTS, 7) for text in texts]
        assert any(answer.settled and answer.segments > several.arch.halt_max_steps for answer in expected)
        options = "--restarts", RESTARTS, "--seed", 7
        require_equal(answers(program, folder, texts, *options), expected)
        require_equal_to_all_segments(answers(program, folder, texts, *options, "--all-segments"), several, texts)
    # Compiled code would read past the end of a state that is too small.
    change(folder, state_shape=["cells", "symbols", 16], starts={"z": [[0.0] * 16]})
    refuse(program, folder, says="doesn't fit config.json")


@pytest.mark.parametrize(("name", "restarts"), [("hrm", 0), ("trm", 1), ("trm_mlp", 2)])
def test_other_architectures_answer_as_in_python(
    name: str, restarts: int, program: Program, weights: Callable[[str], Path], puzzles: Path, tmp_path: Path
) -> None:
    """TRM restarts from its other initial state, and TRM without attention reads other noise."""
    checkpoint, texts = weights(name), texts_of(puzzles, 60)
    export([checkpoint, "--format", "torchscript", "-o", tmp_path / "out", "--data", puzzles])
    solver = Solver.from_checkpoint(checkpoint, ["batch_size=1", f"restarts={restarts}"], device="cpu")
    ours = answers(program, tmp_path / "out", texts, "--restarts", restarts)
    require_equal(ours, [until_settled(solver, text, restarts) for text in texts])
    ours = answers(program, tmp_path / "out", texts, "--restarts", restarts, "--all-segments")
    require_equal_to_all_segments(ours, solver, texts)


def change(folder: Path, contents: bytes | None = None, **changes: object) -> None:
    """Change config.json, and the file, whose new hash config.json then has."""
    config = folder / "config.json"
    described: dict[str, Any] = json.loads(config.read_text())
    if contents is not None:
        (folder / described["file"]).write_bytes(contents)
        described["sha256"] = hashlib.sha256(contents).hexdigest()
    config.write_text(json.dumps(described | changes))


def test_mistakes_are_one_line(program: Program, weights: Callable[[str], Path], puzzles: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    export([weights("trm"), "--format", "torchscript", "-o", folder, "--data", puzzles])
    text = "1.3....24..1..4."
    for lines, says in {
        "\n": "line 1: the puzzle is empty",
        "\r\n": "is empty",
        f"{text}\n\n{text}\n": "line 2: the puzzle is empty",
        f"{text}.\n": "has 17 cells",
        f"{text[1:]}\n": "has 15 cells",
        f"5{text[1:]}\n": "'5' in cell 1",
        f"\x1b{text[1:]}\n": "0x1b in cell 1",
    }.items():
        refuse(program, folder, says=says, lines=lines)
    done = program(folder, lines=f"{text}\r\n{text.replace('.', '0')}\n{text}")
    assert done.returncode == 0 and len(set(done.stdout.split())) == 1

    for words, says in {
        (): "which model",
        (folder, "--restarts"): "whole number",
        (folder, "--restarts", "-1"): "whole number",
        (folder, "--threads", 0): "at least 1",
        (folder, "--other"): "unknown argument",
        (tmp_path,): "has no config.json",
        (folder / "model.pt",): "has no config.json",
    }.items():
        refuse(program, *words, says=says)
    refuse(program, folder, "--restarts", 2, says="only 1 restarts that differ", lines=text)
    refuse(program, folder, "--seed", 2, says="leave it out", lines=text)


def test_damaged_and_forged_folders_are_refused(
    program: Program, weights: Callable[[str], Path], puzzles: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    export([weights("trm"), "--format", "torchscript", "-o", folder, "--data", puzzles])
    file, config = folder / "model.pt", folder / "config.json"
    whole, described = file.read_bytes(), config.read_text()
    starts = json.loads(described)["starts"]

    for changes, says in (
        ({"format": 2}, "not of format 1; update"),
        ({"format": "1"}, "format is not a number"),
        ({"file": "../out/model.pt"}, "another format"),
        ({"file": "model.onnx"}, "another format"),
        ({"file": "model.pt2"}, "can't be read"),
        ({"sha256": "0" * 64}, "not the file"),
        ({"inputs": "tokens"}, "inputs is not a list"),
        ({"inputs": ["tokens", "other", "z_L"]}, "unknown"),
        ({"inputs": ["puzzles", "tokens", "z_H", "z_L"]}, "unknown"),
        ({"outputs": ["logits"]}, "texts, not puzzles"),
        ({"any_size": True}, "any_size"),
        ({"noise": "fresh"}, "noise"),
        ({"segments": 10**30}, "segments is no whole number"),
        ({"segments": 2.5}, "segments is no whole number"),
        ({"symbols": "?.12"}, "symbols"),
        ({"state_shape": [2**20, 2**20, 2**20, 2**20]}, "too large"),
        ({"state_shape": [15, 32]}, "doesn't fit config.json"),
        ({"starts": starts | {"z_H": [[0.0] * 31]}}, "starts and state_shape"),
        ({"starts": starts | {"z_H": [[1e300] * 32]}}, "too large"),
        ({"starts": starts | {"z_H": [["0"] * 32]}}, "starts is not a number"),
        ({"starts": {"z_L": starts["z_L"]}}, "starts and inputs"),
        ({"model": {}}, "seq_len is missing"),
        ({"model": None}, "is not an object"),
    ):
        config.write_text(described)
        change(folder, **changes)
        refuse(program, folder, says=says)

    for text in (
        "",
        described[: len(described) // 2],
        described + "x",
        "[" * 10**6,
        '{"a":' * 10**6,
        '{"format": 1, "format": 1}',
        '{"format": NaN}',
        '{"format": 1e999}',
        '{"format": 01}',
        '{"format": "\\ud8"}',
        '{"format": "\t"}',
        "[1,]",
        " " * (2**24 + 1),
    ):
        config.write_text(text)
        refuse(program, folder, says="config.json")

    for contents in (whole[: len(whole) // 2], whole[:-1] + b"x"):
        config.write_text(described)
        file.write_bytes(contents)
        refuse(program, folder, says="is not the file that config.json describes")
    for contents in (b"", b"garbage" * 100, whole[: len(whole) // 2]):
        config.write_text(described)
        change(folder, contents)
        refuse(program, folder, says="doesn't fit config.json")
    file.unlink()
    refuse(program, folder, says="can't be read")
    config.unlink()
    refuse(program, folder, says="has no config.json")
