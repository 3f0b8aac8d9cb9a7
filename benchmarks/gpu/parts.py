"""What python -m benchmarks.gpu measures, in the order of importance."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.origin import REPOSITORY
from utils.run.history import METRICS_FILE, History

RESULT, LOG = "result.json", "log.txt"
ACCURACY = "accuracy"
EXACT = "eval/all/exact_accuracy"

RECIPES = {
    "hrm": ("HRM of the paper", ["experiment=sudoku_extreme_1k"]),
    "trm": ("TRM of the paper", ["experiment=trm_sudoku_extreme"]),
    "fast": ("fast recipe, Sudoku", ["experiment=sudoku_extreme_fast"]),
    "maze": ("fast recipe, mazes", ["experiment=maze_hard_fast"]),
}
# What might make a compiled step faster, and nobody has tried on a card: what it is called, the
# recipe, and the arguments of benchmarks.gpu.levers. The most is expected of the first ones.
_CUDA_GRAPHS = "TORCHINDUCTOR_CUDAGRAPHS=1"
_WITH_CUDA_GRAPHS = ["--set", _CUDA_GRAPHS, "--set", "TORCH_LOGS=perf_hints"]  # which say where it is left out
_SLOTS_OF_A_GPU = "global_batch_size=96"  # of the eight GPUs of the paper; launches matter most there
_MARKED = "benchmarks.gpu.marked_steps"
_SWITCHED = "benchmarks.gpu.switched_steps"
LEVERS = {
    "shape-pad": ("force_shape_pad", "fast", ["--program", f"{_SWITCHED} shape-pad"]),
    "fp8": (
        "arch.fp8_no_grad=true",
        "hrm",
        ["--lever", "arch.fp8_no_grad=true", "--capability", "9.0"],
    ),
    "graphs-marked": (
        f"{_CUDA_GRAPHS}, each step marked",
        "hrm",
        [*_WITH_CUDA_GRAPHS, "--program", _MARKED, _SLOTS_OF_A_GPU],
    ),
    "no-cudnn-attention": ("attention without cuDNN", "hrm", ["--program", f"{_SWITCHED} no-cudnn-attention"]),
    "autotune": ("TORCHINDUCTOR_MAX_AUTOTUNE=1", "fast", ["--set", "TORCHINDUCTOR_MAX_AUTOTUNE=1"]),
    "graphs": (_CUDA_GRAPHS, "hrm", [*_WITH_CUDA_GRAPHS, _SLOTS_OF_A_GPU]),
}
# Slots and positions for the backends of attention: Sudoku, and grids of 16, 30 and 50.
_ATTENTION = ["768x82", "256x256", "72x900", "24x2500"]
# Tokens of a packed row of text, and of its longest sequence.
_PACKING = ["32768x1024", "32768x4096"]
# What a rehearsal on the CPU makes of every recipe. The code is the same, and the sizes are tiny.
TINY = [
    *("device=cpu", "global_batch_size=8", "arch.hidden_size=32", "arch.num_heads=2"),
    *("arch.forward_dtype=float32", "arch.H_cycles=1", "arch.L_cycles=1"),
]
_TINY_LAYERS = {"hrm": ["arch.H_layers=1", "arch.L_layers=1"]}
TINY_HRM = [*TINY, *_TINY_LAYERS["hrm"]]


@dataclass(frozen=True)
class Settings:
    """What the command line asks for.

    Attributes:
        output: the folder of the results.
        sudoku: a built dataset; None: build one from `source_dir`, or from generated boards.
        source_dir: a folder with train.csv and test.csv of Sudoku-Extreme.
        rehearse: whether everything is tiny and runs on the CPU.
    """

    output: Path
    minutes: float
    sudoku: Path | None
    source_dir: Path | None
    rehearse: bool

    @property
    def has_real_sudoku(self) -> bool:
        return self.sudoku is not None or self.source_dir is not None

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"


def read_result(folder: Path) -> Any:
    """Return what a part has written so far; None if that is nothing, or half a file."""
    try:
        return json.loads((folder / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class Part:
    """A measurement, which is a process of its own.

    Attributes:
        kind: which table of the report shows the result.
        share: of the time for all measurements, how much this one may take. None: the time that
            all others leave.
        least_s: a shorter time is of no use for it.
        needs: the part without which this one cannot run.
        may_split: whether grad_accumulation helps if memory runs out.
    """

    key: str
    kind: str
    title: str
    command: list[str]
    share: float | None
    least_s: float
    needs: str | None = None
    may_split: bool = False
    environment: dict[str, str] = field(default_factory=dict)
    read: Callable[[Path], Any] = read_result


def all_parts(settings: Settings) -> list[Part]:
    """Return the parts in the order in which they run."""
    return [
        _program("environment", "environment", "environment", [], settings, share=0.15, least_s=60),
        *_sudoku(settings),
        _tests(settings),
        _steps("hrm", True, settings),
        _steps("fast", True, settings),
        _of_recipe("kernels", "fast", settings, 0.25, 60),
        _of_recipe("waits", "fast", settings, 0.2, 40),
        _steps("trm", True, settings),
        _steps("hrm", False, settings),
        _steps("fast", False, settings),
        _of_recipe("kernels", "hrm", settings, 0.25, 60),
        _of_recipe("peak", "hrm", settings, 0.08, 20),
        _ranks(settings),
        _checkpoint(settings),
        _of_recipe("waits", "hrm", settings, 0.2, 40),
        _steps("trm", False, settings),
        _mazes(settings),
        _steps("maze", True, settings),
        _steps("maze", False, settings),
        _of_recipe("peak", "fast", settings, 0.08, 20),
        _packing(settings),
        _attention(settings),
        *(_lever(key, settings) for key in LEVERS),
        *([_accuracy(settings)] if settings.has_real_sudoku else []),
    ]


def _sudoku_folder(settings: Settings) -> Path:
    return settings.sudoku or settings.output / ("sudoku-extreme-1k" if settings.source_dir else "sudoku-generated")


def _sudoku(settings: Settings) -> list[Part]:
    if settings.sudoku is not None:
        return []
    source = ["--source-dir", str(settings.source_dir), "--subsample-size", "1000"]
    arguments = source if settings.source_dir is not None else ["--generate", "100", "--generate-test", "20"]
    title = "build Sudoku-Extreme" if settings.source_dir is not None else "generate Sudokus"
    return [_builder(_key_of_sudoku(settings), title, "sudoku", arguments, _sudoku_folder(settings))]


def _key_of_sudoku(settings: Settings) -> str:
    """Return another key for each dataset: a later call may bring what an earlier one lacked."""
    return "data-sudoku" if settings.source_dir is not None else "data-sudoku-generated"


def _mazes(settings: Settings) -> Part:
    return _builder("data-maze", "generate mazes", "maze", ["--generate", "100"], settings.output / "mazes-generated")


def _builder(key: str, title: str, task: str, arguments: list[str], folder: Path) -> Part:
    script = str(REPOSITORY / f"dataset/build_{task}_dataset.py")
    return Part(key, "data", title, [sys.executable, script, "--output-dir", str(folder), *arguments], 0.15, 20)


def overrides(recipe: str, settings: Settings) -> list[str]:
    """Return what pretrain.py gets for a recipe, without compile."""
    data = settings.output / "mazes-generated" if recipe == "maze" else _sudoku_folder(settings)
    tiny = [*TINY, *_TINY_LAYERS.get(recipe, [])] if settings.rehearse else ["device=cuda"]
    return [*RECIPES[recipe][1], f"data_path={data}", "wandb.mode=disabled", *tiny]


def _data_of(recipe: str, settings: Settings) -> str | None:
    return "data-maze" if recipe == "maze" else None if settings.sudoku is not None else _key_of_sudoku(settings)


def _program(key: str, kind: str, title: str, arguments: list[str], settings: Settings, **more: Any) -> Part:
    """Return a part that a program of this package measures."""
    command = [sys.executable, "-m", f"benchmarks.gpu.{kind}", "--json", str(settings.output / key / RESULT)]
    return Part(key, kind, title, [*command, *arguments], **more)


def _of_recipe(kind: str, recipe: str, settings: Settings, share: float, least_s: float) -> Part:
    """Return a part that looks at the training steps of a recipe."""
    mode = {
        "peak": [],
        "waits": ["compile=true"],
        "kernels": ["compile=true", "--steps", "1" if settings.rehearse else "3"],
    }
    titles = {"peak": "products of matrices", "waits": "waits of the host", "kernels": "kernels"}
    return _program(
        f"{kind}-{recipe}",
        kind,
        f"{titles[kind]}: {RECIPES[recipe][0]}",
        [*overrides(recipe, settings), *mode[kind]],
        settings,
        share=share,
        least_s=least_s,
        needs=_data_of(recipe, settings),
        may_split=True,
    )


def _tests(settings: Settings) -> Part:
    rehearsed = ["tests/gpu/test_options.py", "-k", "(urm or muon) and not compile"]
    wanted = rehearsed if settings.rehearse else ["tests/gpu"]
    # A test that hangs must not take the time of all others.
    command = [sys.executable, "-m", "pytest", "-v", "--color=no", "-m", "gpu", "-o", "timeout=120", *wanted]
    environment = {"GPU_TESTS_ON": settings.device, "PYTHONUNBUFFERED": "1"}
    return Part("tests", "tests", "tests on the card", command, 0.25, 60, environment=environment, read=_read_tests)


def _read_tests(folder: Path) -> dict[str, Any] | None:
    """Count the tests in the log, also of a run that was cut off."""
    try:
        lines = (folder / LOG).read_text(errors="replace").splitlines()
    except OSError:
        return None
    found: dict[str, Any] = {"passed": 0, "failed": [], "skipped": 0}
    for line in lines:
        words = line.split()
        # A line of pytest -v: the test, its outcome, and how far the tests are.
        outcome = next((word for word in words[1:] if word in ("PASSED", "FAILED", "ERROR", "SKIPPED")), None)
        if not words or "::" not in words[0] or outcome is None:
            continue
        if outcome in ("FAILED", "ERROR"):
            found["failed"].append(line.split(f" {outcome}")[0])
        else:
            found[outcome.lower()] += 1
    return found if any(found.values()) else None


def _steps(recipe: str, compiled: bool, settings: Settings) -> Part:
    mode = "compiled" if compiled else "eager"
    key = f"steps-{recipe}-{mode}"
    num_steps, num_rounds = (2, 2) if settings.rehearse else (20, 5 if settings.minutes >= 15 else 3)
    command = [sys.executable, "-m", "benchmarks.throughput", "--json", str(settings.output / key / RESULT)]
    command += ["--steps", str(num_steps), "--rounds", str(num_rounds), f"compile={str(compiled).lower()}"]
    return Part(
        key,
        "steps",
        f"steps: {RECIPES[recipe][0]}, {mode}",
        [*command, *overrides(recipe, settings)],
        0.3,
        120 if compiled else 40,
        needs=_data_of(recipe, settings),
        may_split=True,
    )


def _ranks(settings: Settings) -> Part:
    # In float32, because only there the losses of one and two ranks can agree closely. Without the
    # warm-up, because steps that change nothing would agree with any gradients.
    size = ["arch.forward_dtype=float32", "global_batch_size=96"] if not settings.rehearse else []
    changes = [*size, "lr_warmup_steps=0"]
    return _program(
        "ranks",
        "ranks",
        "two ranks on one card",
        [*overrides("hrm", settings), *changes],
        settings,
        share=0.3,
        least_s=60,
        needs=_data_of("hrm", settings),
    )


def _attention(settings: Settings) -> Part:
    shapes = ["2x82", "1x256"] if settings.rehearse else _ATTENTION
    arguments = ["--device", settings.device, *shapes]
    return _program("attention", "attention", "backends of attention", arguments, settings, share=0.1, least_s=30)


def _packing(settings: Settings) -> Part:
    shapes = ["64x16"] if settings.rehearse else _PACKING
    arguments = ["--device", settings.device, *shapes]
    return _program("packing", "packing", "attention in rows of text", arguments, settings, share=0.1, least_s=30)


def _lever(key: str, settings: Settings) -> Part:
    title, recipe, lever = LEVERS[key]
    size = ["--steps", "2", "--rounds", "2"] if settings.rehearse else ["--steps", "20", "--rounds", "3"]
    tiny = ["global_batch_size=8"] if settings.rehearse else []
    return _program(
        f"lever-{key}",
        "levers",
        f"lever: {title}; {RECIPES[recipe][0]}",
        [*size, "compile=true", *overrides(recipe, settings), *lever, *tiny],
        settings,
        share=0.3,
        least_s=100,  # two programs start, and one of them compiles anew
        needs=_data_of(recipe, settings),
        may_split=_MARKED not in lever,  # its mark needs a step of one microbatch
    )


def _checkpoint(settings: Settings) -> Part:
    folder = settings.output / "checkpoint"
    command = [sys.executable, "-m", "benchmarks.checkpoint", "--json", str(folder / RESULT), "--folder", str(folder)]
    size = ["--batch-size", "768", "--step-batch-size", "768", "--device", "cuda"]
    tiny = ["--batch-size", "8", "--step-batch-size", "2", "--device", "cpu", "--num-saves", "2", *TINY_HRM]
    arguments = tiny if settings.rehearse else size
    return Part("checkpoint", "checkpoint", "checkpoints", [*command, *arguments], 0.15, 30)


def _accuracy(settings: Settings) -> Part:
    run = settings.output / ACCURACY / "run"
    often = ["max_steps=40", "eval_every_n_steps=20", "eval_max_examples=20", "log_interval=10"]
    normal = ["log_interval=50", "checkpoint_every_n_steps=500", "keep_last_k=1"]
    command = [sys.executable, "pretrain.py", *overrides("fast", settings), "resume=auto", f"checkpoint_path={run}"]
    return Part(
        ACCURACY,
        ACCURACY,
        "accuracy over time: fast recipe, Sudoku",
        [*command, *(often if settings.rehearse else normal)],
        None,
        60,
        needs=_data_of("fast", settings),
        read=_read_accuracy,
    )


def _read_accuracy(folder: Path) -> dict[str, Any] | None:
    """Return the evaluations of the run so far, and its last step."""
    history = History(folder / "run" / METRICS_FILE)
    history.refresh()
    if not history.rows:
        return None
    last = history.rows[-1]
    rows = [
        {
            "step": row["step"],
            "minutes": row["time_s"] / 60,
            "exact_accuracy": row[EXACT],
            "examples": row["eval/all/num_examples"],
        }
        for row in history.rows
        if EXACT in row
    ]
    step_ms = [row["perf/step_ms"] for row in history.rows[1:] if "perf/step_ms" in row]
    return {"last_step": last["step"], "minutes": last["time_s"] / 60, "step_ms": step_ms, "evaluations": rows}
