"""Write a mixer as an HTML page that solves puzzles: weights, recursion and player in one file."""

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
from dataset.sudoku import LARGEST_SEARCHED_SIDE, dig, generate, random_solution
from dataset.tasks.sudoku import SudokuTask
from sharing.segment.function import Function, stored_weights
from sharing.segment.host import HostConfig
from sharing.segment.model import Run
from utils.errors import UserError
from utils.html_page import base64_of, fill, packed, script_of

_VIEWER = Path(__file__).parents[2] / "viewer"
_PAGE, _SOLVER = _VIEWER / "page", _VIEWER / "solver"
# Boards of 16x16 take half a minute a puzzle, and generating one takes as long.
_LARGEST_EXAMPLE = 144
_NUM_EXAMPLES = 3


def write_web(host: HostConfig, function: Function, title: str, file: Path) -> Run:
    """Write the page, and return what runs a segment of it in Node.js."""
    node = shutil.which("node", path=os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path()]))
    if node is None:
        raise UserError("the page is compared with PyTorch in Node.js; run pip install -r requirements-export.txt")
    weights = stored_weights(function.model)
    boards = {box.num_cells: SudokuTask(box) for box in BOXES.values()}
    examples = []
    for box in sorted(BOXES.values(), key=lambda box: box.side != 9):  # 9x9 first
        lines = (boards[box.num_cells].plain(puzzle_S + 1) for puzzle_S in _examples(box))
        examples += [[f"{box.side}x{box.side}, {number}", line] for number, line in enumerate(lines, start=1)]
    data = {
        "title": title,
        "parameters": sum(weight.numel() for weight, *_ in weights.values()),
        "host": host.model_dump(mode="json"),
        "weights": {name: _matrix(weight) for name, weight in weights.items()},
        "boards": {cells: board.drawing for cells, board in boards.items()},
        "examples": examples,
    }
    style = "".join(
        (folder / name).read_text("utf-8") for folder, name in ((_PAGE, "page.css"), (_SOLVER, "solver.css"))
    )
    texts = {
        "TITLE": html.escape(title),
        "DATA": packed(json.dumps(data, separators=(",", ":")).encode()),
        "STAGE": (_PAGE / "stage.html").read_text("utf-8"),
        "WORKER": script_of(_SOLVER / "worker.mjs"),
    }
    script = script_of(_SOLVER / "main.mjs")
    file.write_text(fill(_SOLVER / "page.html", script=script, style=style, texts=texts), encoding="utf-8")
    return _runner(host, file, node)


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
