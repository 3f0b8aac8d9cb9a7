"""Measure what a CUDA card does with this project, and write one report.

python -m benchmarks.gpu [--minutes 25] [--data-path DIR | --source-dir DIR] [--output DIR]
                         [--from PART] [--list] [--rehearse]
e.g. python -m benchmarks.gpu --minutes 25 --source-dir sudoku-csv
     python -m benchmarks.gpu --minutes 10 --from kernels-hrm
     python -m benchmarks.gpu --rehearse

Each part is a process of its own with a time limit. The most important ones come first, and what a
failing part has found until then counts. The same command goes on where it was cut off, also in
another time: three calls of 10 minutes do what one of 30 does. All measurements take 60 % of the
time at most. In the rest the fast recipe trains on Sudoku-Extreme.

After a change of the code, what failed is tried again, and what is done stays. The report names the
commits. On another card, or with another PyTorch, everything is measured anew, and the results so
far move to a folder beside theirs.

Sudoku-Extreme is a built dataset (--data-path), or the folder with train.csv and test.csv or
.csv.gz (--source-dir). Without it, generated boards take its place, and no accuracy is measured.

The report is <output>/report.md, with all figures in <output>/report.json. A part's own output is
in <output>/<part>/log.txt.
"""

import argparse
import os
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType

from benchmarks.gpu.driver import CUT_OFF, FAILED, NO_TIME, TOO_LONG, WITHOUT_DATA, Driver, Stopped, set_aside
from benchmarks.gpu.origin import Origin
from benchmarks.gpu.parts import LOG, Settings, all_parts
from benchmarks.gpu.report import write_report

_DEFAULT_DATA = Path("data/sudoku-extreme-1k")


def _options(argv: list[str]) -> tuple[Settings, argparse.Namespace]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=25)
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--data-path", type=Path, metavar="DIR", help=f"default: {_DEFAULT_DATA}, if it is there")
    data.add_argument("--source-dir", type=Path, metavar="DIR")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: checkpoints/gpu")
    parser.add_argument("--from", dest="first", metavar="PART", help="begin with this part, and measure it again")
    parser.add_argument("--list", action="store_true", help="show the parts, and measure nothing")
    parser.add_argument("--rehearse", action="store_true", help="every part in a tiny size on the CPU")
    args = parser.parse_args(argv)
    for folder, name in ((args.data_path, "train/dataset.json"), (args.source_dir, "train.csv*")):
        if folder is not None and not list(folder.glob(name)):
            parser.error(f"{folder} holds no {name}; give another folder, or none to measure on generated boards")
    output = args.output or Path("checkpoints/gpu-rehearsal" if args.rehearse else "checkpoints/gpu")
    sudoku = args.data_path or (_DEFAULT_DATA if not args.source_dir and _DEFAULT_DATA.is_dir() else None)
    settings = Settings(
        output.absolute(),
        args.minutes,
        sudoku and sudoku.absolute(),
        args.source_dir and args.source_dir.absolute(),
        args.rehearse,
    )
    keys = [part.key for part in all_parts(settings)]
    if args.first is not None and args.first not in keys:
        parser.error(f"--from {args.first}: there is no such part; give one of {', '.join(keys)}")
    if not args.rehearse and not args.list:
        import torch

        try:
            import pretrain  # noqa: F401  every part needs what it imports
        except ImportError as error:
            parser.error(f"nothing can be measured: {error}; install what requirements.txt names")
        if not torch.cuda.is_available():
            parser.error("PyTorch finds no CUDA device here; --rehearse runs every part in a tiny size on the CPU")
    return settings, args


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(signal.Signals(number).name)


def main(argv: list[str]) -> int:
    settings, args = _options(argv)
    parts = all_parts(settings)
    if args.list:
        print("\n".join(f"{part.key:22} {part.title}" for part in parts))
        return 0
    if not settings.has_real_sudoku:
        print(
            f"no Sudoku-Extreme here ({_DEFAULT_DATA} is missing, and neither --data-path nor --source-dir is given): "
            "steps are measured on generated boards, and no accuracy",
            flush=True,
        )
    command = shlex.join(["python", "-m", "benchmarks.gpu", *argv])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    origin = Origin.here(rehearse=settings.rehearse)
    if aside := set_aside(settings.output, origin):
        print(
            f"this is {origin.machine}: the results of another machine are now in {os.path.relpath(aside)}", flush=True
        )
    driver = Driver(
        parts,
        settings.output,
        origin,
        lambda line: print(line, flush=True),
        lambda driver: write_report(driver, settings, command),
    )
    shown = os.path.relpath(settings.output / "report.md")
    try:
        driver.run(60 * settings.minutes, args.first)
    except Stopped as stopped:
        print(f"stopped by {stopped}; the same command{' without --from' * bool(args.first)} goes on; so far: {shown}")
        return 130
    states = {part.key: driver.records[part.key].status for part in parts if part.key in driver.records}
    print(f"{shown} has the report")
    measured = {key: driver.records[key].commit for key in states}
    others = [key for key, commit in measured.items() if commit and not commit.endswith(origin.commit)]
    if others:
        print(f"other commits have measured {len(others)} parts, see the report; --from PART measures again from there")
    if any(state in (NO_TIME, CUT_OFF) for state in states.values()):
        print(f"not everything had time; the same command{' without --from' * bool(args.first)} goes on")
    wrong = [key for key, state in states.items() if state in (FAILED, TOO_LONG, WITHOUT_DATA)]
    if wrong:
        print(f"no whole result: {', '.join(wrong)}; look at <part>/{LOG} beside it; --from PART tries again")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
