"""Under a real Slurm of two nodes, runs and sweeps train as elsewhere, and go on after faults."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.runs import REPOSITORY, assert_same_run, latest, settings
from tests.slurm import Cluster, cluster, why_no_slurm

pytestmark = pytest.mark.slurm

SCRIPT = REPOSITORY / "launch/slurm.sbatch"
# The program in the folder where jobs are submitted. In the first attempt of a job its steps take
# so long that a test can disturb it.
PROGRAM = f"""
import os, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from tests import runs
if "SLURM_RESTART_COUNT" not in os.environ:
    runs.each_step_takes(float(os.environ.get("STEP_S", "0")), 0)
import pretrain
from utils.program import run
run(pretrain.main)
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if (reason := why_no_slurm()) is not None:
        pytest.skip(reason)
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        (made.folder / "pretrain.py").write_text(PROGRAM)
        yield made


def _submit(slurm: Cluster, options: str, overrides: list[str], log: Path, **variables: object) -> str:
    line = f"sbatch --parsable --output={log} {options} {SCRIPT} {shlex.join(overrides)}"
    return slurm.run(line, **variables)


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_warned_and_then_killed_job_ends_like_an_undisturbed_run(
    slurm: Cluster, data: Path, quiet_2: Path, tmp_path: Path, log: Path, launcher: str
) -> None:
    run = tmp_path / "a run"
    overrides = [*settings(data, None), f"checkpoint_path='{run}'", "data_paths=[]"]
    job = _submit(slurm, "--nodes=2", overrides, log, LAUNCHER=launcher, STEP_S=0.3)
    slurm.until(lambda: latest(run) >= 2, log)
    slurm.run(f"scancel --batch --signal=USR1 {job}")
    slurm.until(lambda: "goes back into the queue" in log.read_text(), log)
    assert (run / "stopped").read_text() == "SIGUSR1\n"
    stopped_at = latest(run)
    assert stopped_at < 11, "the warning came too late to be tested"
    slurm.start_requeued(job, log)
    slurm.until(lambda: latest(run) > stopped_at, log)
    _ranks(slurm)[-1].kill()
    slurm.start_requeued(job, log)
    assert slurm.end(job, log) == "COMPLETED", log.read_text()
    output = log.read_text()
    assert output.count("resuming ") == 2 and output.count("goes back into the queue") == 2, output
    assert_same_run(run, quiet_2)


def _ranks(slurm: Cluster) -> list[psutil.Process]:
    """Return the processes of the ranks, those with the highest rank last."""
    ranks = [each for each in slurm.processes() if "pretrain.py" in each.cmdline() and "python" in each.cmdline()[0]]
    ranks = [each for each in ranks if "torch.distributed.run" not in each.cmdline()]
    return sorted(ranks, key=lambda each: int(each.environ()["SLURM_PROCID"]))


def test_the_time_limit_ends_no_run(slurm: Cluster, data: Path, quiet_2: Path, tmp_path: Path, log: Path) -> None:
    """Slurm may warn up to a minute earlier than asked: it looks at the limits now and then."""
    run = tmp_path / "run"
    options = "--nodes=2 --time=1 --signal=B:USR1@20"
    job = _submit(slurm, options, settings(data, run), log, STEP_S=5)
    assert slurm.end(job, log) == "COMPLETED", log.read_text()
    assert "before the time limit; " in log.read_text()
    assert_same_run(run, quiet_2)


PAGE = (REPOSITORY / "docs" / "launching.md").read_text()
COMMANDS = re.findall(
    r"^(?:sbatch|srun) .*?(?=\s+#|$)", "".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)), re.M
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page(
    command: str, slurm: Cluster, data: Path, quiet: Path, quiet_2: Path, tmp_path: Path, log: Path
) -> None:
    """A command for many nodes and cores takes those that there are."""
    small = command.replace("--nodes=4", "--nodes=2").replace("--cpus-per-task=32", "--cpus-per-task=1")
    small = small.replace(" python ", f" {sys.executable} ").replace("launch/slurm.sbatch", str(SCRIPT))
    small = re.sub("^sbatch", f"sbatch --wait --output={log}", small).replace(" data_path=data/sudoku-6x6", "")
    slurm.run(f"{small} {shlex.join(settings(data, tmp_path / 'run'))}")
    assert_same_run(tmp_path / "run", quiet_2 if "--nodes=2" in small else quiet)


# ---- sweeps ------------------------------------------------------------------------------------

SILENT_S = 6
SWEEP = f"""
import sys
from search import study
study.HEARTBEAT_S, study.SILENT_S = 1, {SILENT_S}
import sweep
sys.exit(sweep.main())
"""


def _sweep(slurm: Cluster, data: Path, folder: Path) -> subprocess.Popen[str]:
    typed = ["lr=1e-4,2e-4", "arch.L_cycles=1,2", f"data_path={data}", "debug=tiny", "device=cpu", "max_steps=400"]
    typed += ["eval_every_n_steps=100", f"sweep.path={folder}", "sweep.launcher.name=slurm"]
    typed += ["sweep.launcher.slurm={time: 10}"]
    words = [sys.executable, "-c", SWEEP, *typed]
    return subprocess.Popen(
        words, cwd=slurm.folder, env=slurm.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def _jobs(folder: Path) -> list[str]:
    return sorted(file.read_text().strip() for file in (folder / "logs").glob("trial_000[0-3].job"))


def test_a_sweep_is_an_array_that_outlives_its_process(slurm: Cluster, data: Path, tmp_path: Path, log: Path) -> None:
    """The sweep is killed, finds its jobs again, is stopped, and goes on from the checkpoints."""
    folder = tmp_path / "sweep"
    first = _sweep(slurm, data, folder)
    slurm.until(lambda: len(_jobs(folder)) == 4, log)
    first.kill()
    first.wait()
    time.sleep(SILENT_S + 1)
    jobs = _jobs(folder)
    array = jobs[0].split("_")[0]
    assert jobs == [f"{array}_{number}" for number in range(4)], "the trials are one job array"

    second = _sweep(slurm, data, folder)
    slurm.until(lambda: all((folder / f"trial_000{number}/latest").exists() for number in range(4)), log)
    assert _jobs(folder) == jobs, "the second process has submitted the trials again"
    second.send_signal(signal.SIGTERM)
    told, _ = second.communicate(timeout=120)
    assert "stopping 4 runs" in told, told
    assert slurm.run("squeue --noheader") == "", "the runs go on without their sweep"
    assert (folder / "trial_0003/stopped").read_text() == "SIGTERM\n"

    third = _sweep(slurm, data, folder)
    told, _ = third.communicate(timeout=300)
    assert third.returncode == 0 and "[4/4, " in told, told
    assert all("resuming " in file.read_text() for file in (folder / "logs").glob("*.log"))
    steps = [json.loads(line)["step"] for line in (folder / "trial_0000/metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(set(steps)) and steps[-1] == 400, "each step is logged once"
