"""Measure the host's part of a step: ours beside the published code, in turn, in one thread.

python -m benchmarks.host_time --published DIR [--compile {true,segment}] [--only hrm trm trm_mlp]
                               [--steps 5] [--rounds 21] [--json FILE]

The models have the paper's depth, but 2 slots, width 64, and the 16 cells of Sudokus of side 4. So
most of a step is Python and PyTorch's dispatch, as where a GPU waits for the host. Products of
matrices are a fifth of an eager step in float32. In bfloat16 they would be most of it.

DIR holds clones of HRM and TinyRecursiveModels. The latter needs the package einops. A figure is
CPU time, which other programs of the machine change least. Rounds are compared one by one.
"""

import os
import sys
from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.gpu.__main__ import PUBLISHED, RECIPES
from benchmarks.harness import build_sudoku, machine, parser_of, spread, table, write
from benchmarks.throughput import measure


def commands(name: str, data: Path, args: Namespace) -> list[list[str]]:
    """Return our program and the published one."""
    clone, arch, _ = PUBLISHED[name]
    ours = ["benchmarks.our_steps", *RECIPES[name], f"data_path={data}", "wandb.mode=disabled", "device=cpu"]
    ours += ["arch.hidden_size=64", "arch.num_heads=2", "global_batch_size=2", "arch.forward_dtype=float32"]
    theirs = ["benchmarks.published_steps", str(args.published.absolute() / clone), "--arch", arch]
    theirs += ["hidden_size=64", "num_heads=2", "batch_size=2", "seq_len=16", "--dtype", "float32"]
    theirs += [] if args.compile else ["--eager"]
    return [[sys.executable, "-m", *words] for words in ([*ours, f"compile={args.compile or False}"], theirs)]


def main() -> None:
    parser = parser_of(__doc__, overrides=False)
    parser.add_argument("--published", type=Path, metavar="DIR", required=True, help="a folder with both clones")
    parser.add_argument("--compile", choices=("true", "segment"), help="compile both programs, ours as this key says")
    parser.add_argument("--only", nargs="+", choices=PUBLISHED, default=PUBLISHED)
    parser.add_argument("--steps", type=int, default=5, help="steps of a round (default: 5)")
    parser.add_argument("--rounds", type=int, default=21)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    about, found, rows = machine(), {}, []
    with TemporaryDirectory() as folder:
        data = build_sudoku(Path(folder) / "data", "--box", "2x2", "--generate", "100")
        for name in args.only:
            found[name] = measure(commands(name, data, args), args.steps, args.rounds)
            ours, theirs = ([row["cpu_ms"] for row in result["rounds"]] for result in found[name])
            ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
            rows.append([name, *(spread(each, "{:.3g}".format) for each in (ours, theirs, ratios))])
    write(args.json, {**about, "compiled": args.compile, "models": found})
    print(table(["CPU time of a step", "ours, ms", "published, ms", "ours / published"], rows))


if __name__ == "__main__":
    main()
