"""Train with one rank and with two ranks on one card, and compare losses and times.

python -m benchmarks.gpu.ranks --json FILE [--steps 10] OVERRIDE...

NCCL refuses two ranks on one card, so gloo carries the gradients through the host. The ranks share
the card: two of them are no faster than one. What counts is that they train the same.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.gpu.arguments import read_arguments
from benchmarks.on_request import REPOSITORY
from utils.run.history import METRICS_FILE, History


def train(num_ranks: int, run: Path, overrides: list[str]) -> dict[str, list[float]]:
    """Train in processes of their own, and return the loss and the time of each step."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    command = [sys.executable, *(launcher if num_ranks > 1 else []), "pretrain.py", *overrides]
    done = subprocess.run([*command, "dist.backend=gloo", f"checkpoint_path={run}"], cwd=REPOSITORY)
    if done.returncode != 0:
        sys.exit(f"{num_ranks} ranks ended with status {done.returncode}")
    history = History(run / METRICS_FILE)
    history.refresh()
    return {
        "losses": [row["train/lm_loss"] for row in history.rows],
        "step_ms": [row["perf/step_ms"] for row in history.rows],
    }


def main() -> None:
    args = read_arguments(__doc__, num_steps=10)
    short = [f"max_steps={args.steps}", "log_interval=1", "eval_interval=null", "best_metric=null"]
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for num_ranks in (1, 2):
            found[str(num_ranks)] = train(num_ranks, Path(folder, str(num_ranks)), [*args.overrides, *short])
            args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
