"""Measure whether a run under torchrun recovers from a fault, and after how many seconds.

python -m benchmarks.elastic [--trials 20] [--hosts 1] [--kind kill] [OPTION...] [OVERRIDE...]

A trial is a small run of two ranks under torchrun. At a random moment after the first checkpoint, a
random rank is killed (kill -9) or made to hang (SIGSTOP), or the cable between two hosts is pulled
for 10 s. If the run ends with an error, the program resumes it and counts the trial as "by hand".
At its end, the run must equal an undisturbed run bit for bit in weights, optimizer, carry and every
logged number.

The kinds hang and network take long unless the overrides have a short timeout, such as
dist.timeout_s=5. Two hosts are network namespaces of this machine, which needs root. The program
exits with 1 if a trial failed.
"""

import json
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.harness import machine, parser_of, spread, table, write
from tests.hosts import Host, Launched, two_hosts, why_no_two_hosts
from tests.runs import assert_same_run, build_data, latest, settings, until

OUTAGE_S = 10.0
TRIAL_S = 180.0  # a run that takes longer hangs
# Long enough for a fault in the middle of training, with checkpoints before and after it.
RUN = {"max_steps": 150, "checkpoint_every_n_steps": 10, "eval_every_n_steps": 50, "log_interval": 1}
FIRST_CHECKPOINT = 10
WELL = ("by itself", "by hand")
RESUMED = re.compile(r"resuming .* at step (\d+)")
SILENT = re.compile(r"rank (\d+) \(process .* says nothing")


@dataclass
class Trial:
    """The outcome of one run. Seconds count from the fault."""

    rank: int  # the rank with the fault; for a network fault, the rank whose cable was pulled
    end: str = ""  # "by itself", "by hand" or what was wrong
    at_step: int = 0  # the last step logged before the fault
    num_restarts: int = 0
    num_steps_again: int | None = None  # steps that were repeated
    until_error_s: float | None = None  # until the first rank reports why it ends
    until_next_step_s: float | None = None
    named: str = ""  # the ranks that other ranks report as silent


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--hosts", type=int, default=1, choices=[1, 2])
    parser.add_argument("--kind", default="kill", choices=["kill", "hang", "network"])
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_intermixed_args()
    if options.kind == "network" and options.hosts == 1:
        parser.error("--kind network pulls the cable between two hosts; give --hosts 2")
    if options.hosts == 2 and (reason := why_no_two_hosts()) is not None:
        parser.error(f"--hosts 2: {reason}")

    draw, trials = random.Random(options.seed), list[Trial]()
    own_hosts = two_hosts() if options.hosts == 2 else nullcontext([Host()])
    with tempfile.TemporaryDirectory() as name, own_hosts as hosts:
        folder = Path(name)
        data = build_data(folder / "data")

        def launch(run: Path, *more: str) -> Launched:
            typed = [*settings(data, run, **RUN), *options.overrides, *more]
            return Launched(hosts, typed, folder / "log", options=["--max-restarts", "3"])

        quiet = folder / "quiet"
        launch(quiet).wait(TRIAL_S).ok()
        for number in range(options.trials):
            trial = strike(options.kind, hosts, launch, folder / f"run-{number}", quiet, draw)
            print(f"{number}: {trial}", file=sys.stderr, flush=True)
            if trial.end not in WELL:
                print((folder / "log").read_text(encoding="utf-8", errors="replace"), file=sys.stderr, flush=True)
            trials.append(trial)
    ends, show = [trial.end for trial in trials], "{:.3g}".format
    columns = {
        "hosts": str(options.hosts),
        "fault": options.kind,
        "same bits by itself": f"{ends.count('by itself')} of {len(ends)}",
        "after a resume by hand": str(ends.count("by hand")),
        "restarts": spread([trial.num_restarts for trial in trials], show),
        "named by others": str(sum(trial.named == str(trial.rank) for trial in trials)),
        "until an error, s": spread([trial.until_error_s for trial in trials], show),
        "until the next step, s": spread([trial.until_next_step_s for trial in trials], show),
        "steps done again": spread([trial.num_steps_again for trial in trials], show),
    }
    print(table(list(columns), [list(columns.values())]))
    write(options.json, {**machine(), "trials": [asdict(trial) for trial in trials]})
    sys.exit(not all(trial.end in WELL for trial in trials))


def strike(
    kind: str, hosts: list[Host], launch: Callable[..., Launched], run: Path, quiet: Path, draw: random.Random
) -> Trial:
    """Start a run, cause the fault, and record what happens."""
    launched, trial = launch(run), Trial(rank=draw.randrange(2))
    try:
        until(lambda: latest(run) >= FIRST_CHECKPOINT, launched)
        time.sleep(draw.uniform(0, 1.5))
        if kind == "network":
            hosts[trial.rank].set_cable("down")
        else:
            launched.worker(trial.rank).send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        struck, trial.at_step = time.monotonic(), _last_step(run)
        is_out = kind == "network"
        while launched.alive and (now := time.monotonic() - struck) < TRIAL_S:
            output, last_step = launched.output, _last_step(run)
            if is_out and now > OUTAGE_S:
                hosts[trial.rank].set_cable("up")
                is_out, trial.at_step = False, last_step
            if trial.until_error_s is None and "fault on rank" in output:
                trial.until_error_s = now
            resumed = RESUMED.findall(output)
            # After a short network fault, ranks that waited long enough go on without a restart.
            goes_on = bool(resumed) or (kind == "network" and not is_out)
            going_on_from = int(resumed[-1]) if resumed else trial.at_step
            if trial.until_next_step_s is None and goes_on and last_step > going_on_from:
                trial.until_next_step_s, trial.num_steps_again = now, trial.at_step - going_on_from
            time.sleep(0.02)
        done = launched.wait(max(1.0, TRIAL_S + struck - time.monotonic()))
        trial.num_restarts = len(RESUMED.findall(done.output))
        trial.named = " ".join(sorted(set(SILENT.findall(done.output))))
        trial.end = "by itself" if done.status == 0 else "by hand"
        if done.status != 0:
            assert "fault on rank" in done.output, "the run ended without a reason"
            launched = launch(run, "resume=auto")
            launched.wait(TRIAL_S).ok()
        assert_same_run(run, quiet)
    except AssertionError as error:
        trial.end = str(error).partition("\n")[0]
    finally:
        launched.kill()
    return trial


def _last_step(run: Path) -> int:
    """Return the step of the last complete line of metrics.jsonl, or 0 if there is none."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").split("\n")[:-1]
    return int(json.loads(lines[-1])["step"]) if lines else 0


if __name__ == "__main__":
    main()
