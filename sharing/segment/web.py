"""Write a model as an HTML page that solves puzzles: weights, recursion and player in one file."""

import base64
import html
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dataset.augment import BOXES, Box
from dataset.canvas import PADDING
from dataset.pictures import board_of
from dataset.sudoku import LARGEST_SEARCHED_SIDE, dig, generate, random_solution
from dataset.tasks import task_of_shape
from dataset.tasks.sudoku import SudokuTask
from sharing.exported import ExportedPuzzles
from sharing.segment.formats import FILES, WRITERS
from sharing.segment.function import Function, stored_weights
from sharing.segment.host import HostConfig
from sharing.segment.model import Run
from utils.batch import Batch
from utils.errors import UserError
from utils.html_page import base64_of, fill, packed, script_of

_VIEWER = Path(__file__).parents[2] / "viewer"
_PAGE, _SOLVER = _VIEWER / "page", _VIEWER / "solver"
RUNTIME = _SOLVER / "node_modules" / "onnxruntime-web"
# Boards of 16x16 take half a minute a puzzle, and generating one takes as long.
_LARGEST_EXAMPLE = 144
_NUM_EXAMPLES = 3
_NUM_REAL = 12


def write_web(host: HostConfig, function: Function, examples: Sequence[Batch], file: Path) -> Run:
    """Write the page, and return what runs a segment of it.

    The JavaScript of the page computes mixers with units. Other models are files of ONNX inside,
    which onnxruntime-web runs, from a file beside the page.

    Args:
        examples: puzzles to begin with; a mixer with units gets generated ones of every size.

    Raises:
        UserError: Node.js or onnxruntime-web is not installed, or the boards do not fill the page.
    """
    node = shutil.which("node", path=os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path()]))
    if node is None:
        raise UserError("the page is compared with PyTorch in Node.js; run pip install -r requirements-export.txt")
    weights, described = stored_weights(function.model), host.described
    assert isinstance(described, ExportedPuzzles)
    task = None if host.any_size else task_of_shape(described.seq_len, described.vocab_size)
    noun = "Sudoku" if host.any_size else "puzzle" if task is None else task.title
    title = f"{noun[0].upper()}{noun[1:]} solver: {described.title}"
    data: dict[str, Any] = {
        "title": title,
        "parameters": sum(weight.numel() for weight, *_ in weights.values()),
        "host": host.model_dump(mode="json"),
    }
    if host.any_size:
        boards = {box.num_cells: SudokuTask(box).drawing for box in BOXES.values()}
        shown = _generated()
        data["weights"] = {name: _matrix(weight) for name, weight in weights.items()}
    else:
        boards = {described.seq_len: board_of(task, described.seq_len)}
        shown = _real(examples)
        if isinstance(task, SudokuTask) and any(PADDING in example["tokens"] for example in shown):
            raise UserError(f"the page shows boards of {described.seq_len} cells; give --data a dataset of such boards")
        beside = _write_runtime(file.parent)
        model = file.with_name(FILES["onnx"])
        batched = WRITERS["onnx"](function, function.example(3), model)
        data |= {"model": base64_of(model.read_bytes()), "runtime": beside}
        model.unlink()
    data |= {"boards": boards, "examples": shown}
    style = "".join(
        (folder / name).read_text("utf-8") for folder, name in ((_PAGE, "page.css"), (_SOLVER, "solver.css"))
    )
    texts = {
        "TITLE": html.escape(title),
        "DATA": packed(json.dumps(data, separators=(",", ":")).encode()),
        "STAGE": (_PAGE / "stage.html").read_text("utf-8"),
        "WORKER": script_of(_SOLVER / "worker.mjs"),
        "SOURCES": "" if host.any_size else " 'self' file: blob: 'wasm-unsafe-eval'",
        "RUNTIME": "" if host.any_size else f'<script src="{beside}"></script>\n',
    }
    script = script_of(_SOLVER / "main.mjs")
    file.write_text(fill(_SOLVER / "page.html", script=script, style=style, texts=texts), encoding="utf-8")
    in_node = _runner(host, file, node)
    # WebAssembly on one thread would take hours for all puzzles of a published model.
    return in_node if host.any_size else lambda given: (in_node if len(given[0]) == 1 else batched)(given)


def _write_runtime(folder: Path) -> str:
    """Write onnxruntime-web as a script, because pages that are files may load nothing else."""
    wanted = json.loads((_SOLVER / "package.json").read_text("utf-8"))["dependencies"]["onnxruntime-web"]
    if not RUNTIME.is_dir():
        raise UserError("onnxruntime-web runs this model in the page; run npm ci --prefix viewer/solver")
    module, wasm = (
        packed((RUNTIME / "dist" / name).read_bytes())
        for name in ("ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm")
    )
    name = f"onnxruntime-web-{wanted}.js"
    (folder / name).write_text(f'globalThis.onnxruntimeWeb = {{ module: "{module}", wasm: "{wasm}" }};\n', "utf-8")
    return name


def _real(batches: Sequence[Batch]) -> list[dict[str, Any]]:
    """Return the first puzzles of a dataset, as the page holds examples."""
    first = {name: tensor[:_NUM_REAL].tolist() for name, tensor in batches[0].items()}
    examples = zip(first["inputs"], first["labels"], first["puzzle_identifiers"], strict=True)
    return [
        {"name": f"example {number}", "tokens": tokens_S, "label": label_S, "puzzle": puzzle}
        for number, (tokens_S, label_S, puzzle) in enumerate(examples, start=1)
    ]


def _generated() -> list[dict[str, Any]]:
    """Return puzzles of all sizes, 9x9 first, as the page holds examples."""
    return [
        {"name": f"{box.side}x{box.side}, {number}", "tokens": (puzzle_S + 1).tolist(), "puzzle": 0}
        for box in sorted(BOXES.values(), key=lambda box: box.side != 9)
        for number, puzzle_S in enumerate(_examples(box), start=1)
    ]


def _examples(box: Box) -> Iterable[np.ndarray]:
    """Return puzzles to begin with, (S,), of digits and 0: up to 9x9 without a needless clue."""
    rng = np.random.default_rng(0)
    if box.num_cells > _LARGEST_EXAMPLE:
        return []
    if box.side > LARGEST_SEARCHED_SIDE:
        return [question_S for question_S, _ in generate(_NUM_EXAMPLES, box, rng)]
    return dig(np.stack([random_solution(box, rng) for _ in range(_NUM_EXAMPLES)]), box, rng)


def _matrix(stored: tuple[Tensor, ...]) -> dict[str, Any]:
    weight, *scales = stored
    columns = weight.shape[-1]
    raw = weight.view(torch.int16) if weight.dtype == torch.bfloat16 else weight
    of_rows = {"scales": base64_of(scales[0].numpy().tobytes()), "columns": columns} if scales else {}
    return {"dtype": str(weight.dtype).removeprefix("torch."), "data": base64_of(raw.numpy().tobytes()), **of_rows}


def _runner(host: HostConfig, file: Path, node: str) -> Run:
    """Return what runs a segment of a page, puzzle by puzzle."""

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        given = dict(zip(host.inputs, inputs, strict=True))
        num, num_cells = given["tokens"].shape
        lines = [
            json.dumps(
                {
                    name: base64_of((tensor if name == "units" else tensor[n]).numpy().tobytes())
                    for name, tensor in given.items()
                }
            )
            for n in range(num)
        ]
        done = subprocess.run(
            [node, str(_SOLVER / "check.mjs"), str(file)], input="\n".join(lines), capture_output=True, text=True
        )
        if done.returncode:
            raise UserError(f"Node.js can't run the page ({done.stderr.strip().splitlines()[-1]}); report this")
        answers = [json.loads(line) for line in done.stdout.splitlines()]

        def numbers(name: str) -> Tensor:
            rows = [np.frombuffer(base64.b64decode(answer[name]), np.float32) for answer in answers]
            return torch.from_numpy(np.stack(rows))

        shapes = {"logits": (num, num_cells, -1), "q_halt": (num,), "q_continue": (num,)}
        shapes |= {f"next_{name}": given[name].shape for name in host.starts}
        return [numbers(name).view(shapes[name]) for name in host.outputs]

    return run
