"""Compare the training of this tree with the training of another commit, bit for bit.

python -m tests.golden COMMIT [--folder DIR]

Each case trains 60 steps with two evaluations in both trees. Then this tree resumes the other
tree's run from step 20. All logged numbers and the last checkpoint must be the same to the last
bit. The recording of the other commit stays in DIR, so that the next comparison is faster.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests import runs

ROOT = Path(__file__).resolve().parent.parent
NUM_STEPS, RESUMED_STEP = 60, 20
COMMON = {
    "max_steps": NUM_STEPS,
    "log_interval": 1,
    "eval_every_n_steps": 30,
    "checkpoint_every_n_steps": RESUMED_STEP,
    "loss_spike": 50,
    "evaluators": "[sudoku]",
}
# For each case: the number of ranks, and what it changes in tests.runs.settings.
CASES: dict[str, tuple[int, dict[str, object]]] = {
    "hrm": (1, {}),
    "hrm_2": (2, {"check_replicas_every_n_steps": 10}),
    "trm": (1, {"arch": "trm", "ema": "true", "arch.H_layers": 0, "eval_adaptive": "true"}),
    "trm_2": (2, {"arch": "trm", "ema": "true", "arch.H_layers": 0, "optim": "muon", "parallel": "fsdp"}),
}


def train(tree: Path, ranks: int, overrides: list[str]) -> None:
    """Run pretrain.py of a tree. Raises AssertionError with the program's output when it fails."""
    launcher = [sys.executable]
    if ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launcher, "pretrain.py", *overrides]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr}"


def record(commit: str, folder: Path) -> None:
    """Train every case with the code of a commit. Cases that were recorded before are kept."""
    missing = [name for name in CASES if not (folder / name / f"step_{NUM_STEPS:08d}").exists()]
    if not missing:
        return
    if not (folder / "data").exists():
        runs.build_data(folder / "data")
    with tempfile.TemporaryDirectory() as temporary:
        tree = Path(temporary) / "tree"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), commit], cwd=ROOT, check=True)
        try:
            for name in missing:
                shutil.rmtree(folder / name, ignore_errors=True)
                ranks, changes = CASES[name]
                train(tree, ranks, runs.settings(folder / "data", folder / name, **COMMON, **changes))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def compare(name: str, recorded: Path, own: Path) -> None:
    """Train a case with this tree, once from the beginning and once from the recorded run's step 20.

    Raises AssertionError where a number or a bit differs.
    """
    ranks, changes = CASES[name]
    fresh, resumed = own / name, own / f"{name}_resumed"
    train(ROOT, ranks, runs.settings(recorded / "data", fresh, **COMMON, **changes))
    runs.assert_same_run(fresh, recorded / name)
    shutil.copytree(recorded / name, resumed)
    runs.rewind(resumed, RESUMED_STEP)
    train(ROOT, ranks, ["resume=auto", f"checkpoint_path={resumed}"])
    runs.assert_same_run(resumed, recorded / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="the commit whose numbers are the golden ones")
    parser.add_argument("--folder", type=Path, help="where its runs are recorded (default: a temporary folder)")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        recorded = (arguments.folder or Path(temporary) / "recorded").resolve()
        recorded.mkdir(parents=True, exist_ok=True)
        record(arguments.commit, recorded)
        failures = 0
        for name in CASES:
            try:
                compare(name, recorded, Path(temporary) / "own")
                print(f"{name}: the same, and the same after a resume")
            except AssertionError as error:
                failures += 1
                print(f"{name}: DIFFERENT: {error}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
