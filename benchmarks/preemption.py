"""Measure how long a run takes to save its checkpoint and to end after SIGTERM.

python -m benchmarks.preemption [--trials 5] [--ranks 1] [--batch-size 2] [--device auto]
                                [--json FILE] [OVERRIDE...]

The published HRM (27 M parameters, with a moving average) trains on generated 9x9 Sudokus and gets
SIGTERM at a random moment of a step. Each trial resumes the run of the trial before. On a CPU a
step of the published 768 slots takes minutes, so the run trains on --batch-size slots. A checkpoint
with 768 slots is 0.2 GB larger; python -m benchmarks.checkpoint measures that one. The program
prints a table and, with --json, writes it.
"""

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "mps", "cpu"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="overrides of pretrain.py, such as arch=trm")
    options = parser.parse_args()
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        data, run = Path(folder) / "data", Path(folder) / "run"
        builder = [sys.executable, str(REPOSITORY / "dataset/build_sudoku_dataset.py"), "--output-dir", str(data)]
        subprocess.run([*builder, "--generate", "100", "--num-aug", "0"], check=True, capture_output=True)
        command = [sys.executable, str(REPOSITORY / "pretrain.py")]
        if options.ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
            command[1:1] = launcher
        command += [f"data_path={data}", f"checkpoint_path={run}", "resume=auto", f"device={options.device}"]
        command += [f"global_batch_size={options.batch_size}", "eval_interval=null", "ema=true", "log_interval=1"]
        command += ["arch.forward_dtype=float32", "keep_last_k=1", *options.overrides]
        for trial in range(1, options.trials + 1):
            rows.append({"trial": trial, **_preempted(command, run, draw)})
    columns = ("step_s", "until_checkpoint_s", "until_gone_s")
    print(f"seconds of a step, from SIGTERM to the checkpoint of {rows[-1]['num_bytes'] / 1e9:.2f} GB, and to the end")
    medians = {name: statistics.median(row[name] for row in rows) for name in columns}
    for row in [*rows, {"trial": "median", **medians}]:
        print(f"{row['trial']:>7}", *(f"{row[name]:>8.2f}" for name in columns))
    if options.json:
        machine = {"torch": torch.__version__, "machine": platform.machine(), "cpus": os.cpu_count()}
        asked = {name: value for name, value in vars(options).items() if name != "json"}
        options.json.write_text(json.dumps({**asked, **machine, "rows": rows}) + "\n")


def _preempted(command: list[str], run: Path, draw: random.Random) -> dict[str, float]:
    """Start or resume the run, let it make at least two steps, and stop it within a step."""
    before, log = _num_rows(run), run.parent / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    while _num_rows(run) < before + 2:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        time.sleep(0.01)
    began = time.monotonic()
    while _num_rows(run) < before + 3:
        time.sleep(0.01)
    step_s = time.monotonic() - began
    time.sleep(draw.uniform(0, step_s))
    old = (run / "latest").read_text(encoding="utf-8") if (run / "latest").exists() else ""
    told = time.monotonic()
    process.send_signal(signal.SIGTERM)
    while not (run / "latest").exists() or (run / "latest").read_text(encoding="utf-8") == old:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        time.sleep(0.01)
    until_checkpoint_s = time.monotonic() - told
    process.wait()
    assert (run / "stopped").exists(), log.read_text(encoding="utf-8")
    step = run / (run / "latest").read_text(encoding="utf-8").strip()
    num_bytes = sum(file.stat().st_size for file in step.rglob("*") if file.is_file())
    until_gone_s = time.monotonic() - told
    return {
        "step_s": step_s,
        "until_checkpoint_s": until_checkpoint_s,
        "until_gone_s": until_gone_s,
        "num_bytes": num_bytes,
    }


def _num_rows(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0


if __name__ == "__main__":
    main()
