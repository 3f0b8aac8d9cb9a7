"""Measure how long a run takes to save its checkpoint and to end after SIGTERM.

python -m benchmarks.preemption [--trials 5] [--ranks 1] [--batch-size 2] [OPTION...] [OVERRIDE...]

The published HRM (27 M parameters, with a moving average) trains on generated 9x9 Sudokus and gets
SIGTERM at a random moment of a step. Each trial resumes the run of the trial before. On a CPU a
step of the published 768 slots takes minutes, so the run trains on --batch-size slots. A checkpoint
with 768 slots is 0.2 GB larger; python -m benchmarks.checkpoint measures that one.
"""

import random
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks.harness import REPOSITORY, build_sudoku, machine, parser_of, pretrain_command, spread, table, write
from records.checkpoint.format import read_name

FIGURES = {
    "step_s": "a step, s",
    "until_checkpoint_s": "from SIGTERM to the checkpoint, s",
    "until_gone_s": "to the end, s",
    "num_bytes": "bytes",
}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "mps", "cpu"])
    options = parser.parse_intermixed_args()
    draw, about = random.Random(0), machine()
    with tempfile.TemporaryDirectory() as folder:
        data, run = build_sudoku(Path(folder) / "data", "--generate", "100", "--num-aug", "0"), Path(folder) / "run"
        typed = [f"data_path={data}", f"checkpoint_path={run}", "resume=auto", f"device={options.device}"]
        typed += [f"global_batch_size={options.batch_size}", "eval_interval=null", "ema=true", "log_interval=1"]
        typed += ["arch.forward_dtype=float32", "keep_last_k=1", *options.overrides]
        command = pretrain_command(options.ranks, *typed)
        rows = [_preempted(command, run, draw) for _ in range(options.trials)]
    cells = [spread([row[name] for row in rows], "{:.4g}".format) for name in FIGURES]
    print(table(list(FIGURES.values()), [cells]))
    write(options.json, {**about, "rows": rows})


def _preempted(command: list[str], run: Path, draw: random.Random) -> dict[str, float]:
    """Start or resume the run, let it make at least two steps, and stop it within a step."""
    before, log = _num_rows(run), run.parent / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT)
    while _num_rows(run) < before + 2:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        time.sleep(0.01)
    began = time.monotonic()
    while _num_rows(run) < before + 3:
        time.sleep(0.01)
    step_s = time.monotonic() - began
    time.sleep(draw.uniform(0, step_s))
    old = read_name(run / "latest")
    told = time.monotonic()
    process.send_signal(signal.SIGTERM)
    while read_name(run / "latest") == old:
        assert process.poll() is None, log.read_text(encoding="utf-8")
        time.sleep(0.01)
    until_checkpoint_s = time.monotonic() - told
    process.wait()
    assert (run / "stopped").exists(), log.read_text(encoding="utf-8")
    until_gone_s = time.monotonic() - told
    step = run / read_name(run / "latest")
    num_bytes = sum(file.stat().st_size for file in step.rglob("*") if file.is_file())
    return dict(zip(FIGURES, (step_s, until_checkpoint_s, until_gone_s, num_bytes), strict=True))


def _num_rows(run: Path) -> int:
    file = run / "metrics.jsonl"
    return len(file.read_text(encoding="utf-8").splitlines()) if file.exists() else 0


if __name__ == "__main__":
    main()
