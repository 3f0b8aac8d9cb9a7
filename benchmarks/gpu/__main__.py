"""Measure what a CUDA card does with this project, and write what was found.

python -m benchmarks.gpu [--minutes 25] [--data-path DIR | --source-dir DIR] [--published DIR]
                         [--only NAME ...] [--output DIR] [--rehearse]
e.g. python -m benchmarks.gpu --minutes 10 --source-dir sudoku-csv --published ../clones
     python -m benchmarks.gpu --minutes 5 --only trm trm_published trm_graph_off
     python -m benchmarks.gpu --rehearse --only hrm mixer

The tests of the card and all programs start and compile side by side, which costs CPU time only.
When they are warm, they are timed in turn, while the others only hold memory: the recipes beside
the published code, steps without CUDA graphs, levers, and models of text. Then they measure the
card's peak and record their kernels. A single program looks at checkpoints. The rest of the time is
for the accuracy of sudoku_extreme_10min.

Sudoku-Extreme is a built dataset (--data-path), or the folder with train.csv and test.csv or
.csv.gz (--source-dir). Without it, generated boards take its place, and no accuracy is measured.
Text is drawn tokens. --published names a folder with clones of HRM and TinyRecursiveModels.

<output>/result.json has all figures. It is written after each step, so a machine that is taken away
costs only the step that runs. <output>/<name>.txt is what a program printed to standard error.
"""

import os
import signal
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import REPOSITORY, build_sudoku, machine, parser_of, spread, table, write
from benchmarks.on_request import Asked, Ended
from dataset.text.tokenizer import ByteTokenizer
from dataset.text.writer import TextSplitWriter
from records.history import METRICS_FILE, History

# The shares of the time by which programs have to be warm, and the time in turn has to be over.
READY_BY, TIMED_BY = 0.45, 0.75
_STEPS, _ROUNDS = 20, 3
_ANSWER_S = 60.0  # for some steps
_GRACE_S = 20.0  # a run saves a checkpoint in this time

RECIPES = {
    "hrm": ["experiment=sudoku_extreme_1k_single_gpu"],
    "trm_mlp": ["experiment=trm_sudoku_extreme", "global_batch_size=192"],
    "trm": ["experiment=trm_sudoku_extreme_attention", "global_batch_size=192"],
    "mixer": ["experiment=sudoku_extreme_mixer_gpu", "arch.noise=none", "arch.num_states=1"],
    "fast": ["experiment=sudoku_extreme_fast"],
    "fast_10min": ["experiment=sudoku_extreme_10min"],
}
# Fewer tokens than the recipes have on a GPU, because all programs share the card's memory.
TEXT_RECIPES = {
    "gpt_small": ["experiment=gpt_small", "global_batch_size=16384", "rows_per_step=8"],
    "hrm_text_l": ["experiment=hrm_text_l", "global_batch_size=8192", "arch.activation_checkpointing=block"],
}
# The published code beside which a recipe is timed: a clone, its architecture, and its slots.
PUBLISHED = {"hrm": ("HRM", "hrm", 384), "trm_mlp": ("TinyRecursiveModels", "trm_mlp", 192)}
PUBLISHED |= {"trm": ("TinyRecursiveModels", "trm", 192)}
# What may change the time of a step: the recipe and overrides.
LEVERS = {f"{recipe}_graph_off": (recipe, ["cuda_graph=false"]) for recipe in ("mixer", "trm", "hrm")}
LEVERS |= {f"{recipe}_kernel": (recipe, ["swiglu_kernel=true"]) for recipe in ("fast", "fast_10min", "trm")}
LEVERS |= {f"{recipe}_segment": (recipe, ["cuda_graph=false", "compile=segment"]) for recipe in ("trm", "hrm")}
# What a rehearsal on the CPU makes of every recipe. The code is the same, and the sizes are tiny.
TINY = ["arch.hidden_size=32", "arch.forward_dtype=float32", "compile=false", "device=cpu"]
_TINY_PUZZLES = ["global_batch_size=8", "arch.H_cycles=1", "arch.L_cycles=1"]
_TINY_TEXT = ["global_batch_size=256", "rows_per_step=2"]
Programs = dict[str, list[str]]


def overrides_of(recipe: str, data: Path, *, rehearse: bool) -> list[str]:
    """Return the overrides of a recipe."""
    size, is_text = ["compile=true", "device=cuda"], recipe in TEXT_RECIPES
    if rehearse:
        size = [*TINY, *(_TINY_TEXT if is_text else _TINY_PUZZLES), *["arch.num_heads=2"] * (recipe != "mixer")]
    path = [f"data_path={data}", *["epochs=1000", "eval_interval=null", "eval_every_n_steps=null"] * is_text]
    return [*(RECIPES | TEXT_RECIPES)[recipe], *path, "wandb.mode=disabled", *size]


def programs(data: Path, text: Path, published: Path | None, *, rehearse: bool) -> Programs:
    """Return the command of each program, in the order of their worth."""
    found: Programs = {}

    def add(name: str, recipe: str, *more: str) -> None:
        path = text if recipe in TEXT_RECIPES else data
        found[name] = ["benchmarks.our_steps", *overrides_of(recipe, path, rehearse=rehearse), *more]

    for name in RECIPES:
        add(name, name)
        if published is not None and name in PUBLISHED:
            clone, arch, num_slots = PUBLISHED[name]
            words = ["benchmarks.published_steps", str(published / clone), "--arch", arch]
            tiny = ["--eager", "--dtype", "float32", "hidden_size=32", "num_heads=2", "batch_size=8"]
            found[f"{name}_published"] = [*words, *(tiny if rehearse else [f"batch_size={num_slots}"])]
    add("hrm_eager", "hrm", "compile=false", "cuda_graph=false")
    for name, (recipe, more) in LEVERS.items():
        add(name, recipe, *more)
    for name in TEXT_RECIPES:
        add(name, name)
    return {name: [sys.executable, "-m", *command] for name, command in found.items()}


def draw_text(folder: Path, vocab_size: int, sample_len: int) -> None:
    """Write a dataset of drawn tokens."""
    tokenizer = ByteTokenizer()
    tokenizer.vocab_size = vocab_size
    folder.mkdir()
    with TextSplitWriter(folder / "train", tokenizer, sample_len, ["text"]) as writer:
        writer.add_text(np.random.default_rng(0).integers(vocab_size, size=2**20), task=0)


def singles(*, rehearse: bool) -> dict[str, list[str]]:
    """Return the modules and arguments of the programs that run alone, one after another."""
    slots = ["8", "--step-batch-size", "2", "--num-saves", "1"] if rehearse else ["768", "--step-batch-size", "768"]
    tiny = ["arch.hidden_size=32", "arch.num_heads=2"] if rehearse else []
    device = ["--device", "cpu" if rehearse else "cuda"]
    return {
        "checkpoint": ["benchmarks.checkpoint", *device, "--batch-size", *slots, *tiny],
    }


class Measurement:
    """What was found so far, and how much time is left."""

    def __init__(self, output: Path, seconds: float) -> None:
        self.output, self._seconds, self._began = output, seconds, time.monotonic()
        self.found: dict[str, Any] = {"machine": machine(), "programs": {}, "ended": {}}

    def left_s(self, share: float = 1.0) -> float:
        """Return the seconds until a share of the time is over."""
        return share * self._seconds - (time.monotonic() - self._began)

    def note(self, what: str) -> None:
        """Write what was found, and show a line of progress."""
        write(self.output / "result.json", self.found)
        print(f"{self._seconds - self.left_s():7.1f} s  {what}", flush=True)

    def run(self, name: str, command: list[str], environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        """Start a program, whose output goes to a file."""
        with open(self.output / f"{name}.txt", "w", encoding="utf-8") as log:
            return subprocess.Popen(
                command, cwd=REPOSITORY, env=os.environ | (environment or {}), stdout=log, stderr=log
            )

    def end_of(self, name: str, process: "subprocess.Popen[bytes]", limit_s: float) -> int | None:
        """Wait for a program, and ask it to end if it takes longer. None: it had to be ended."""
        try:
            return process.wait(max(0.0, limit_s))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self.found["ended"][name] = "its time was over"
            return None

    def last_line(self, name: str) -> str:
        lines = (self.output / f"{name}.txt").read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def time_in_turn(measurement: Measurement, chosen: Programs, tests: "subprocess.Popen[bytes] | None") -> None:
    """Start programs side by side, wait until they are warm, and time them in turn.

    Args:
        tests: those of the card, which run while programs start; None for none.
    """
    found = measurement.found["programs"]
    with ExitStack() as stack:

        def start(name: str, command: list[str]) -> Asked:
            log = stack.enter_context(open(measurement.output / f"{name}.txt", "w", encoding="utf-8"))
            return stack.enter_context(Asked(command, log))

        def ask(name: str, request: str) -> dict[str, Any] | None:
            """Return the answer of a program. One that doesn't answer is left out from then on."""
            if measurement.left_s(TIMED_BY) < 0:
                return None
            try:
                return warm[name].ask(request, _ANSWER_S) | {"idle_programs": len(warm) - 1}
            except Ended:
                drop(name, f"{request}: {measurement.last_line(name)}")
                return None

        def drop(name: str, why: str) -> None:
            warm.pop(name).kill()
            measurement.found["ended"][name] = why
            measurement.note(f"{name} ended: {why}")

        warm = {name: start(name, command) for name, command in chosen.items()}
        for name in list(warm):
            try:
                warm[name].await_ready(measurement.left_s(READY_BY))
            except Ended:
                drop(name, f"not warm in time: {measurement.last_line(name)}")
                continue
            found[name] = warm[name].description | {"rounds": []}
            measurement.note(f"{name} is warm")
        if tests is not None:
            measurement.end_of("tests", tests, measurement.left_s(READY_BY))
            measurement.found["tests"] = f"{measurement.last_line('tests')}, beside {len(chosen)} programs that started"
            measurement.note(f"tests: {measurement.found['tests']}")
        for number in range(_ROUNDS):
            for name in list(warm):
                if row := ask(name, f"steps {_STEPS}"):
                    found[name]["rounds"].append(row)
            measurement.note(f"round {number + 1} of {_ROUNDS}")
        # The losses tell whether a lever computes the same. Recordings slow down what follows them.
        # That of kernels says how long the card is busy.
        for request in ("metrics", "peak", "kernels 2", "parts 3"):
            for name in [each for each in warm if not each.endswith("_published")]:
                if answer := ask(name, request):
                    found[name][request.split()[0]] = answer
            measurement.note(request)
        for program in warm.values():
            program.kill()


def train(measurement: Measurement, data: Path, *, rehearse: bool) -> None:
    """Train the recipe of ten minutes in the rest of the time, and note its evaluations."""
    run = measurement.output / "accuracy"
    often = ["max_steps=4", "eval_every_n_steps=2", "eval_max_examples=8"]
    normal = ["log_interval=50", "checkpoint_every_n_steps=500", "keep_last_k=1"]
    words = [*overrides_of("fast_10min", data, rehearse=rehearse), *(often if rehearse else normal)]
    command = [sys.executable, "pretrain.py", *words, "resume=auto", f"checkpoint_path={run}"]
    measurement.end_of("train", measurement.run("train", command), measurement.left_s() - _GRACE_S)
    history = History(run / METRICS_FILE)
    history.refresh()
    exact = "eval/all/exact_accuracy"
    measurement.found["accuracy"] = [
        {"step": row["step"], "seconds": row["time_s"], "exact_accuracy": row[exact], "beside": "nothing"}
        for row in history.rows
        if exact in row
    ]
    measurement.note(measurement.last_line("train"))


def summary(found: dict[str, Any]) -> str:
    """Return the time of each program's steps as Markdown, beside that of its recipe."""
    rounds = {name: each["rounds"] for name, each in found["programs"].items() if each["rounds"]}
    ms = {name: statistics.median(row["step_ms"] for row in each) for name, each in rounds.items()}
    rows = []
    for name, about in found["programs"].items():
        row: dict[str, Any] = {"program": name, "batch": about["batch_size"]}
        if name in ms:
            recipe = LEVERS[name][0] if name in LEVERS else name.removesuffix("_published").removesuffix("_eager")
            row["step, ms"] = spread([each["step_ms"] for each in rounds[name]], "{:.1f}".format)
            if recipe != name and recipe in ms:
                row["of its recipe's"] = f"{ms[name] / ms[recipe]:.3f}"
            row["a second"] = f"{1e3 * about['batch_size'] / ms[name]:,.0f} {about.get('unit', 'examples')}"
            row["idle beside"] = rounds[name][-1]["idle_programs"]
            if "cpu_ms" in rounds[name][-1]:
                row["the host computes, ms"] = f"{statistics.median(each['cpu_ms'] for each in rounds[name]):.1f}"
            if "flops" in about:
                row["TFLOP/s"] = f"{about['flops'] / ms[name] / 1e9:.0f}"
                if "peak" in about:
                    row["of the peak"] = f"{about['flops'] / ms[name] / 1e9 / about['peak']['best']['tflops']:.1%}"
        if "kernels" in about:
            row["the card is busy, ms"] = f"{about['kernels']['busy_ms']:.1f}"
        if "metrics" in about:
            row["loss"] = f"{next(iter(about['metrics'].values())):.4f}"  # losses come first
        rows.append(row)
    titles = ["program", "batch", "step, ms", "of its recipe's", "the host computes, ms", "the card is busy, ms"]
    titles += ["a second", "TFLOP/s", "of the peak", "loss", "idle beside"]
    return table(titles, [[row.get(title, "") for title in titles] for row in rows])


def _options(argv: list[str] | None) -> Namespace:
    parser = parser_of(__doc__, overrides=False)
    parser.prog = "python -m benchmarks.gpu"
    parser.add_argument("--minutes", type=float, default=25)
    data = parser.add_mutually_exclusive_group()
    data.add_argument("--data-path", type=Path, metavar="DIR")
    data.add_argument("--source-dir", type=Path, metavar="DIR")
    parser.add_argument("--published", type=Path, metavar="DIR", help="a folder with clones of the published code")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="time these programs, and nothing else")
    parser.add_argument("--output", type=Path, metavar="DIR", default=Path("checkpoints/gpu"))
    parser.add_argument("--rehearse", action="store_true", help="everything in a tiny size on the CPU")
    options = parser.parse_args(argv)
    known = programs(Path(), Path(), options.published, rehearse=options.rehearse)
    if wrong := set(options.only or ()) - set(known):
        parser.error(f"--only {' '.join(sorted(wrong))}: there is no such program; give some of {', '.join(known)}")
    return options


def main(argv: list[str] | None = None) -> None:
    options = _options(argv)
    output, rehearse = options.output.absolute(), options.rehearse
    output.mkdir(parents=True, exist_ok=True)
    measurement = Measurement(output, 60 * options.minutes)
    data = (options.data_path or output / ("sudoku-extreme" if options.source_dir else "generated")).absolute()
    if not data.exists():
        source = ["--source-dir", str(options.source_dir), "--subsample-size", "1000", "--num-aug", "0"]
        build_sudoku(data, *(source if options.source_dir else ["--generate", "100", "--generate-test", "20"]))
    if not (text := output / ("tiny-text" if rehearse else "text")).exists():
        draw_text(text, *((512, 128) if rehearse else (32_000, 1_024)))
    tests = None
    if options.only is None:
        wanted = ["tests/gpu/test_options.py", "-k", "urm and not compile"] if rehearse else ["tests/gpu"]
        command = [sys.executable, "-m", "pytest", "-q", "-n", "4", "-m", "gpu", "-o", "timeout=120", *wanted]
        tests = measurement.run("tests", command, {"GPU_TESTS_ON": "cpu" if rehearse else "cuda"})
    known = programs(data, text, options.published and options.published.absolute(), rehearse=rehearse)
    time_in_turn(measurement, {name: known[name] for name in options.only or known}, tests)
    if options.only is None:
        for name, words in singles(rehearse=rehearse).items():
            command = [sys.executable, "-m", *words, "--json", str(output / f"{name}.json")]
            status = measurement.end_of(name, measurement.run(name, command), measurement.left_s(0.9))
            measurement.note(f"{name}: {measurement.last_line(name) if status else 'done, beside nothing'}")
        if options.data_path or options.source_dir:
            train(measurement, data, rehearse=rehearse)
    print(summary(measurement.found))


if __name__ == "__main__":
    main()
