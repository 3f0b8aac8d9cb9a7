"""Measure how fast pretrain.py trains, and how much of what the machine can do that is.

python -m benchmarks.throughput [--steps 20] [--rounds 5] [--nproc-per-node N] [--json FILE]
                                [--against COMMAND] OVERRIDE...
e.g. python -m benchmarks.throughput experiment=sudoku_extreme_1k_single_gpu compile=true
     python -m benchmarks.throughput experiment=sudoku_extreme_1k_single_gpu \\
         --against "python -m benchmarks.published_steps ../HRM"

Both programs start and warm up side by side, and then train in turn, --steps steps in each of
--rounds rounds. No step waits for the device, as in a run between two logs. COMMAND is any program
that answers the requests of benchmarks/on_request.py, also `python -m benchmarks.our_steps
OVERRIDE...`.

utilization is model_tflops / peak_tflops. model_tflops counts the products that the model needs,
and nothing twice. peak_tflops is what this machine reaches with the same matrices and nothing else,
in arch.forward_dtype, also where arch.fp8_no_grad computes some of the products in FP8.
"""

import shlex
import statistics
import sys
from contextlib import ExitStack
from typing import Any

from benchmarks.harness import machine, parser_of, spread, table, write
from benchmarks.on_request import Asked

_PART_STEPS = 3
Row = dict[str, float]


def measure(commands: list[list[str]], num_steps: int, num_rounds: int) -> list[dict[str, Any]]:
    """Return for each command what it is, the figures of each round, and the parts of a step."""
    with ExitStack() as stack:
        programs = [stack.enter_context(Asked(command)) for command in commands]
        results: list[dict[str, Any]] = [{**program.description, "rounds": []} for program in programs]
        for program, result in zip(programs, results, strict=True):
            if "flops" in result:
                result["peak_tflops"] = program.ask("peak")["peak_tflops"]
        for _ in range(num_rounds):
            for program, result in zip(programs, results, strict=True):
                result["rounds"].append(figures(result, program.ask(f"steps {num_steps}")))
        # The parts are measured last, because a recording may slow down what follows it.
        for program, result in zip(programs, results, strict=True):
            result["parts"] = program.ask(f"parts {_PART_STEPS}") if "flops" in result else {}
        return results


def figures(about: dict[str, Any], row: Row) -> Row:
    """Return the figures of a round, from what a program says of itself and of the round."""
    found = {"examples_per_second": 1e3 * about["batch_size"] / row["step_ms"], "step_ms": row["step_ms"]}
    if "flops" in about:
        found["model_tflops"] = about["flops"] / row["step_ms"] / 1e9
        found["peak_tflops"] = about["peak_tflops"]
        found["utilization"] = found["model_tflops"] / found["peak_tflops"]
    return found | {name: row[name] for name in ("cpu_ms", "max_memory_gb") if name in row}


def tables(result: dict[str, Any]) -> str:
    """Return the figures of a program as Markdown."""
    words = (str(result[key]) for key in ("what", "device", "torch", "threads") if key in result)
    rows = []
    for name in result["rounds"][0]:
        values = [row[name] for row in result["rounds"]]
        rows.append([name, *(f"{each:.4g}" for each in (statistics.median(values), min(values), max(values)))])
    blocks = [f"{'; '.join(words)}; batch {result['batch_size']}"]
    blocks.append(table(["figure", "median", "lowest", "highest"], rows))
    if result["parts"]:
        step_ms = result["parts"]["step"]
        rows = [[name, f"{ms:.4g}", f"{ms / step_ms:.1%}"] for name, ms in result["parts"].items()]
        blocks.append(table(["part of a step", "ms", "share"], rows))
    return "\n\n".join(blocks)


def comparison(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Return how many times as fast the first program is. Its rounds are compared one by one."""
    ratios = [
        mine["examples_per_second"] / other["examples_per_second"]
        for mine, other in zip(ours["rounds"], theirs["rounds"], strict=True)
    ]
    return f"examples per second, the first divided by the second: {spread(ratios, '{:.3f}'.format)}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps of a round (default: 20)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--against", metavar="COMMAND", help="a program to compare with")
    args = parser.parse_intermixed_args()

    launcher = ["torch.distributed.run", "--nproc-per-node", str(args.nproc_per_node), "-m"]
    module = [*(launcher if args.nproc_per_node > 1 else []), "benchmarks.our_steps"]
    commands = [[sys.executable, "-m", *module, *args.overrides]]
    if args.against:
        program, *arguments = shlex.split(args.against)
        commands.append([sys.executable if program == "python" else program, *arguments])
    machine()
    results = measure(commands, args.steps, args.rounds)
    write(args.json, results)
    print("\n\n".join(map(tables, results)))
    if args.against:
        print(f"\n{comparison(*results)}")


if __name__ == "__main__":
    main()
