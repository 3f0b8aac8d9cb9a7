"""Compare the training of this tree with the training of another commit, bit for bit.

python -m tests.golden COMMIT [--folder DIR]

Each case trains 60 steps with two evaluations in both trees. Then this tree goes on from a
checkpoint of the other tree's run. All logged numbers except times, and all tensors of the last
checkpoint, must be the same to the last bit. The recording of the other commit stays in DIR, so
that the next comparison is faster. Use a new DIR when the commit or a case has changed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests import runs

ROOT = Path(__file__).resolve().parent.parent
NUM_STEPS, RESUMED_STEP, BRANCHING_STEP = 60, 20, 40
COMMON = {
    "max_steps": NUM_STEPS,
    "arch.H_cycles": 2,
    "log_interval": 1,
    "eval_every_n_steps": 30,
    "checkpoint_every_n_steps": RESUMED_STEP,
    "loss_spike": 50,
    "evaluators": "[sudoku]",
}
TRM = {"arch": "trm", "ema": "true", "arch.H_layers": 0}
# Several steps are spikes: the run goes back to its start (on one rank), to step 20 and to later
# steps, and some of these more than once. The best evaluation is the first: that of a branch must
# be its own.
SPIKES = {
    "on_nonfinite": "rewind",
    "loss_spike": 1.08,
    "max_rewinds": 10,
    "global_batch_size": 2,
    "lr": 1.5e-2,
    "lr_warmup_steps": 0,
    "best_metric": "lm_loss",
    "best_mode": "max",
}
# The gradients of so heavy a Q loss overflow float16 until the loss scale is 2048.
FLOAT16 = {"arch.forward_dtype": "float16", "arch.loss.halt_weight": 1000}
NUM_TEST_PUZZLES = 20  # of tests.runs.build_data


def rewound(rows: list[runs.Row]) -> bool:
    """Return whether steps were left out, by the last logged step."""
    return [row for row in rows if "train/lr" in row][-1].get("train/skipped_steps", 0) > 0


def overflowed(rows: list[runs.Row]) -> bool:
    """Return whether the loss scale fell, which it does only after an overflow."""
    return rows[-1]["train/loss_scale"] < rows[0]["train/loss_scale"]


def left_examples_out(rows: list[runs.Row]) -> bool:
    """Return whether no evaluation scored all examples."""
    return all(row.get("eval/all/num_examples", 0) < NUM_TEST_PUZZLES for row in rows)


@dataclass(frozen=True)
class Case:
    """A run that both trees train.

    Attributes:
        changes: what the run changes in tests.runs.settings and COMMON.
        ranks: the number of processes.
        stopped_in: SIGTERM comes to the last rank during this evaluation (1 or 2). The run is then
            resumed.
        branch_of: the case from whose step 40 the run goes on in a folder of its own.
        clocked: the clock decides what is evaluated, so that only the training is compared.
        shows: tells from the logged rows whether the run met what the case is about.
    """

    changes: dict[str, object]
    ranks: int = 1
    stopped_in: int | None = None
    branch_of: str | None = None
    clocked: bool = False
    shows: Callable[[list[runs.Row]], bool] = bool


CASES = {
    "hrm": Case({}),
    "hrm_2": Case({"check_replicas_every_n_steps": 10}, ranks=2),
    "trm": Case({**TRM, "eval_adaptive": "true"}),
    "trm_2": Case({**TRM, "optim": "muon", "parallel": "fsdp"}, ranks=2),
    "rewind": Case(SPIKES, shows=rewound),
    "rewind_late": Case({**SPIKES, "log_interval": 7}, shows=rewound),
    "rewind_2": Case({**SPIKES, "check_replicas_every_n_steps": 10}, ranks=2, shows=rewound),
    "pending": Case({}, stopped_in=1),
    "pending_2": Case({**TRM, "optim": "muon", "parallel": "fsdp"}, ranks=2, stopped_in=2),
    "branch": Case({"lr": 2e-2}, branch_of="rewind", shows=rewound),
    "float16": Case({**FLOAT16, "ema": "true"}, shows=overflowed),
    "float16_2": Case({**TRM, **FLOAT16, "parallel": "fsdp"}, ranks=2, shows=overflowed),
    "share": Case({"eval_max_share": 0.99}),  # there is time for every example
    "share_short": Case({"eval_max_share": 0.001}, clocked=True, shows=left_examples_out),
}

# A program that runs pretrain.py of the current folder and gets SIGTERM in an evaluation: always
# before its second batch, so that the moment does not depend on the clock.
STOPPED = """
import os, runpy
from tests import runs
runs.stopped_in_evaluation({number}, {on_rank}, int(os.environ.get("RANK", 0)))
runpy.run_path("pretrain.py", run_name="__main__")
"""


def launch(tree: Path, ranks: int, program: list[str], overrides: list[str]) -> None:
    """Run a Python program in a tree, under torchrun if there are several ranks."""
    launcher = []
    if ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        launcher += ["--nproc-per-node", str(ranks), "--no-python"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [*launcher, sys.executable, *program, *overrides]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr}"


def train(tree: Path, name: str, run: Path, recorded: Path, origins: Path) -> None:
    """Train a case from its beginning with the code of a tree.

    A run that is stopped leaves a copy of its folder, as it was before it is resumed.

    Args:
        run: the folder of the run.
        recorded: the folder of the recording, which holds the data.
        origins: the folder of the runs from which a branch may go on.

    Raises:
        AssertionError: The program failed, or the run did not meet what the case is about.
    """
    case = CASES[name]
    if case.branch_of is None:
        overrides = runs.settings(recorded / "data", run, **{**COMMON, **case.changes})
    else:
        origin = origins / case.branch_of / f"step_{BRANCHING_STEP:08d}"
        changes = [f"{key}={value}" for key, value in case.changes.items()]
        overrides = [f"resume={origin}", f"checkpoint_path={run}", *changes]
    if case.stopped_in is None:
        launch(tree, case.ranks, ["pretrain.py"], overrides)
    else:
        program = STOPPED.format(number=case.stopped_in, on_rank=case.ranks - 1)
        launch(tree, case.ranks, ["-c", program], overrides)
        state = json.loads((run / f"step_{runs.latest(run):08d}" / "state.json").read_text())
        assert state["pending_row"] is not None, f"{name}: the stop left no evaluation pending"
        shutil.copytree(run, stopped(run))
        resume(tree, name, run)
    assert case.shows(runs.rows(run)), f"{name}: the run of {tree} did not meet what the case is about"


def resume(tree: Path, name: str, run: Path) -> None:
    launch(tree, CASES[name].ranks, ["pretrain.py"], ["resume=auto", f"checkpoint_path={run}"])


def stopped(run: Path) -> Path:
    return run.with_name(f"{run.name}_stopped")


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
                for path in (folder / name, stopped(folder / name)):
                    shutil.rmtree(path, ignore_errors=True)
                train(tree, name, folder / name, folder, origins=folder)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)


def go_on(name: str, recorded: Path, run: Path) -> None:
    """Train a case with this tree from a checkpoint of the recorded run.

    The checkpoint is the one where the case branches off or was stopped, else that of step 20.
    """
    if CASES[name].branch_of is not None:
        train(ROOT, name, run, recorded, origins=recorded)
    elif CASES[name].stopped_in is not None:
        shutil.copytree(stopped(recorded / name), run)
        resume(ROOT, name, run)
    else:
        shutil.copytree(recorded / name, run)
        runs.rewind(run, RESUMED_STEP)
        resume(ROOT, name, run)


def assert_same(run: Path, recorded: Path, *, clocked: bool) -> None:
    """Assert that two runs are the same bit for bit; with `clocked`, all but their evaluations."""
    runs.assert_same_run(run, recorded, metrics=not clocked)
    if clocked:
        for row, expected in zip(runs.rows(run), runs.rows(recorded), strict=True):
            different = [key for key in {*row, *expected} if row.get(key) != expected.get(key)]
            different = [key for key in different if not key.startswith("eval/")]
            assert not different, f"step {expected['step']} is logged otherwise: {different}"


def compare(name: str, recorded: Path, own: Path) -> None:
    """Train a case with this tree, once from the beginning and once from the recorded run."""
    fresh, continued, clocked = own / name, own / f"{name}_continued", CASES[name].clocked
    train(ROOT, name, fresh, recorded, origins=own)
    assert_same(fresh, recorded / name, clocked=clocked)
    go_on(name, recorded, continued)
    assert_same(continued, recorded / name, clocked=clocked)


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
                print(f"{name}: the same, and the same from a checkpoint of {arguments.commit}", flush=True)
            except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
                failures += 1
                print(f"{name}: DIFFERENT: {error}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
