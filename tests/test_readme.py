"""Run the commands of the README and of the pages that continue it as written and in their order.

They run in a folder that looks like a clone. The test appends options that make them small: a few
steps of a tiny model, and puzzles from a folder instead of the network. It fills in what stands in
angle brackets. Each command starts fewer processes, and the processes are forked, which saves the
seconds that importing PyTorch takes. Only the published command goes through bash and torchrun.
"""

import csv
import os
import re
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from dataset.augment import BOXES, draw_symmetries
from tests import runs
from tests.dataset.builders import write_small_arc_tasks
from tests.hub_stand_in import hub
from tests.pages import blocks, commands
from tests.runs import REPOSITORY

pytestmark = pytest.mark.docs

PAGES = (
    *("README.md", "docs/training.md", "docs/evaluation.md", "docs/solving.md"),
    *("docs/watching.md", "docs/sweeps.md"),
)

QUESTION = "53..7....6..195....98....6.8...6...34..8.3..17...2...6.6....28....419..5....8..79"
ANSWER = "534678912672195348198342567859761423426853791713924856961537284287419635345286179"
TINY = "debug=tiny device=cpu max_steps=3 eval_every_n_steps=null best_metric=null project_name=p compile=false"
TINY += " arch.halt_max_steps=2"

# The dataset that an early command builds.
DATA = "data/sudoku-extreme-1k-aug-1000"

# The architecture of debug=tiny.
TINY_ARCH = "arch.hidden_size=32 arch.num_heads=2 arch.H_cycles=1 arch.L_cycles=1 arch.forward_dtype=float32"


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder that looks like a clone, with 1,000 puzzles as the source of datasets."""
    folder = tmp_path_factory.mktemp("readme")
    for path in REPOSITORY.iterdir():
        if path.name not in ("data", "checkpoints", ".venv", ".git"):
            (folder / path.name).symlink_to(path)
    digits = np.array([[int(c) if c != "." else 0 for c in text] for text in (QUESTION, ANSWER)], np.uint8)
    for split, num in (("train", 1000), ("test", 20)):
        symmetries = draw_symmetries(np.random.default_rng(num), num, BOXES["3x3"])
        questions, answers = (symmetries.apply(np.repeat(row[None], num, axis=0)) for row in digits)
        (folder / "csv").mkdir(exist_ok=True)
        with open(folder / "csv" / f"{split}.csv", "w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["source", "question", "answer", "rating"])
            for question, answer in zip(questions, answers, strict=True):
                writer.writerow(["x", *("".join(str(d) if d else "." for d in row) for row in (question, answer)), 1])
    write_small_arc_tasks(folder / "kaggle" / "combined")
    return folder


def _made_small(command: str) -> str:
    command = command.replace("<project>/<run>", "p/run").replace("<project>", "p")
    command = command.replace("step_00001000", "step_00000003").replace("data/other", DATA)
    # With eight threads for each rank, the ranks would compete for the cores of a small machine.
    command = command.replace("--nproc-per-node 8", "--nproc-per-node 2").replace("_THREADS=8", "_THREADS=1")
    if "sweep.py" in command:
        if command.split()[2] in ("status", "best", "plot", "export"):
            return command
        small = f"debug=tiny device=cpu max_steps=3 arch.halt_max_steps=2 data_path={DATA} sweep.trials=1"
        # Variations of a sweep that has run only print their command lines, which is quicker.
        variation = " --dry-run" if "sweep.name=" in command or "interval" in command else ""
        return f"{command.replace('seed=0,1,2', 'seed=0')} {small}{variation}"
    if "--generate 1000" in command:
        return command.replace("--generate 1000 --generate-test 500", "--generate 30 --generate-test 20")
    if "build_sudoku_dataset" in command:
        return f"{command} --source-dir csv --num-aug 10"
    if "build_maze_dataset" in command:
        return f"{command} --generate 10 --size 8"
    if "build_arc_dataset" in command:
        return f"{command} --num-aug 2"
    if any(program in command for program in ("sharing.export", "dataset.validate", "view.py", "watch.py")):
        return command
    if "dataset.show" in command:
        return f"{command} --num 1"
    if any(program in command for program in ("evaluate.py", "solve.py")):
        steps = " num_steps=2" if "tta=" in command else ""
        return f"{command} device=cpu{steps}" + (f" {TINY_ARCH}" if " arch=" in command else "")
    if "resume=" in command:  # the run has done 3 steps; its branch goes on after the resumed run has ended
        return f"{command} max_steps={4 if 'resume=auto' in command else 5}"
    if "run_name=trm" in command:  # a run that the next command evaluates
        return f"{command} data_path={DATA} {TINY} checkpoint_path=checkpoints/sudoku-6x6/trm"
    # Later commands name the first run.
    name = "run" if "experiment=sudoku_extreme_1k_single_gpu" in command else f"run{zlib.crc32(command.encode())}"
    return f"{command} {TINY} run_name={name}"


COMMANDS = [command for command in commands(*PAGES) if not command.startswith("make ")]
OF_README = commands("README.md")  # tests/test_docs.py gives the others to their programs, which don't run them
PUBLISHED = next(command for command in COMMANDS if "torchrun" in command)


def _through_bash(clone: Path, command: str) -> runs.Ended:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    words = ["bash", "-c", _made_small(command)]
    done = subprocess.run(words, cwd=clone, env=environment, capture_output=True, text=True, timeout=180)
    return runs.Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.parametrize(
    "command",
    [pytest.param(command, marks=[] if command in OF_README else pytest.mark.slow) for command in COMMANDS],
)
def test_command(clone: Path, command: str) -> None:
    if command == PUBLISHED:
        done = _through_bash(clone, command)
    elif "--push" in command:
        with hub() as served:
            environment = " ".join(f"{name}={value}" for name, value in served.environment.items())
            done = runs.command(f"{environment} {_made_small(command)}", clone)
    else:
        done = runs.command(_made_small(command), clone)
    # After three steps of training no puzzle is solved, so that solve.py exits with 1.
    expected = 1 if "solve.py" in command and "examples/" not in command else 0
    assert done.status == expected, f"{command}\n{done.stdout}\n{done.stderr}"
    if "pretrain.py" in command:
        assert "steps of" in done.stderr, "pretrain.py did not train"
    if "evaluate.py" in command:
        assert re.fullmatch(r"exact_accuracy=[01]\.\d{4}", done.stdout.splitlines()[-1]), done.stdout
    if "sweep.py" in command:
        shown = ("trial 0", "complete", "plots.html", "experiment=", "program: pretrain.py", "checkpoint_path=")
        assert any(words in done.stdout for words in shown), f"the command shows no sweep:\n{done}"
    if "view.py" in command:
        assert "<html" in (clone / "view.html").read_text()
    if "watch.py" in command and "--plot" not in command:
        assert "finished" in done.stdout, "watch.py shows no run"
    if "--plot" in command:
        assert (clone / command.split("--plot ")[1].split()[0]).stat().st_size > 0
    if "--png" in command:
        assert (clone / "checkpoints/p/run/curve.png").exists() and (clone / "checkpoints/p/run/puzzle.png").exists()


def test_the_python_example(clone: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = blocks(REPOSITORY / "README.md", "python")
    monkeypatch.chdir(clone)
    exec(example.replace("<project>/<run>", "p/run"), {})
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Solution('puzzle 1', not solved: ") and len(line) < 300
