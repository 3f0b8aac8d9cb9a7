"""Time training steps with a lever against the same steps without it, in turn.

python -m benchmarks.gpu.levers --json FILE [--steps 20] [--rounds 3] [--set NAME=VALUE]
                                [--lever OVERRIDE] [--program WORDS] [--capability 9.0] OVERRIDE...
e.g. python -m benchmarks.gpu.levers --json found.json --set TORCHINDUCTOR_CUDAGRAPHS=1 compile=true

A lever is a variable of the environment, an override, or another program that answers the requests
of benchmarks/on_request.py, as a module and its first arguments. The steps with it start first. If
they raise an error and the steps without it do not, that error is the result. Memory that runs out
is no result: this program fails then, because both programs hold the card at once. A card of a
smaller capability is left alone.

Both train the same steps on the same data, so the losses say whether the lever computes the same.
What they print on the way is in with.txt and without.txt beside FILE.
"""

import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.arguments import parser_of_part
from benchmarks.gpu.driver import OUT_OF_MEMORY, last_error
from benchmarks.on_request import Asked

WITH, WITHOUT = "with", "without"
_SKIPPING = "skipping cudagraph"
_ABOUT = ("what", "device", "device_type", "batch_size")
_FIGURES = ("step_ms", "max_memory_gb")


class _LeverRaised(Exception):
    """The steps with the lever have ended with an error."""


def measure(
    commands: dict[str, list[str]], environment: dict[str, str], num_steps: int, num_rounds: int, file: Path
) -> dict[str, Any]:
    """Return what was found, and write it to a file after each round.

    Args:
        commands: what trains with the lever, and what trains without it.
        environment: the variables of the lever.

    Raises:
        SystemExit: The steps without the lever have ended, too, or memory has run out.
    """
    found: dict[str, Any] = {}
    programs: dict[str, Asked] = {}
    with ExitStack() as stack:

        def start(arm: str) -> None:
            errors = stack.enter_context(open(_log(file, arm), "w", encoding="utf-8"))
            with _ends_of(arm, file):
                program = Asked(commands[arm], environment if arm == WITH else None, errors)
            programs[arm] = stack.enter_context(program)
            about = {key: program.description[key] for key in _ABOUT}
            found[arm] = {**about, "start_s": program.start_s, "rounds": []}

        def ask(arm: str, request: str) -> dict[str, Any]:
            with _ends_of(arm, file):
                return programs[arm].ask(request)

        try:
            for arm in (WITH, WITHOUT):
                start(arm)
            for _ in range(num_rounds):
                for arm in programs:
                    row = ask(arm, f"steps {num_steps}")
                    found[arm]["rounds"].append({name: row[name] for name in _FIGURES})
                _write(found, file)
            for arm in programs:
                found[arm]["loss"] = ask(arm, "metrics")["train/lm_loss"]
        except _LeverRaised as error:
            # Missing data or a broken card would end the steps without the lever, too.
            if WITHOUT not in programs:
                start(WITHOUT)
            ask(WITHOUT, f"steps {num_steps}")
            found["raised"] = str(error)
    skips = (line for line in _log(file, WITH).read_text(errors="replace").splitlines() if _SKIPPING in line)
    if line := next(skips, ""):  # PyTorch goes on without the lever, and only warns
        found["warned"] = line[line.index(_SKIPPING) :]
    _write(found, file)
    return found


@contextmanager
def _ends_of(arm: str, file: Path) -> Iterator[None]:
    """Tell why the program of an arm has ended. Asked only gives its status."""
    try:
        yield
    except SystemExit as ended:
        log = _log(file, arm).read_text(errors="replace")
        said = last_error(log) or str(ended)
        if OUT_OF_MEMORY.search(log):  # in these words, because the driver looks for them
            raise SystemExit(f"out of memory {arm} the lever: {said}") from None
        if arm == WITHOUT:
            raise SystemExit(f"without the lever: {said}") from None
        raise _LeverRaised(said) from None


def lacks(capability: str) -> str:
    """Return what the first card lacks; empty if nothing, or if there is no card."""
    if not torch.cuda.is_available():
        return ""
    has = torch.cuda.get_device_capability(0)
    wanted = tuple(map(int, capability.split(".")))
    return "" if has >= wanted else f"needs a card of capability {capability}, and this one has {has[0]}.{has[1]}"


def _log(file: Path, arm: str) -> Path:
    return file.with_name(f"{arm}.txt")


def _write(found: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = parser_of_part(__doc__, num_steps=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--lever", action="append", default=[], metavar="OVERRIDE")
    parser.add_argument("--capability", default="0.0", help="what the card needs")
    parser.add_argument("--program", default="benchmarks.our_steps", metavar="WORDS")
    args = parser.parse_intermixed_args()
    if lacking := lacks(args.capability):
        return _write({"skipped": lacking}, args.json)
    ours = [sys.executable, "-m", "benchmarks.our_steps", *args.overrides]
    commands = {WITH: [sys.executable, "-m", *shlex.split(args.program), *args.overrides, *args.lever], WITHOUT: ours}
    environment = dict(each.split("=", 1) for each in args.set)
    print(json.dumps(measure(commands, environment, args.steps, args.rounds, args.json), indent=1))


if __name__ == "__main__":
    main()
