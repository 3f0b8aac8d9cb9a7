"""Programs answer `--help` soon after torch is loaded: they import other heavy libraries later."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ("pretrain", "evaluate", "solve", "view", "watch", "sweep")
# Each takes a tenth of a second or more. Torch itself is needed to read a config.
HEAVY = (
    *("torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "torch.distributed.fsdp"),
    *("torch.distributed.pipelining", "torch.distributed.tensor", "sympy"),
    *("huggingface_hub", "matplotlib", "pandas", "plotly", "ray", "scipy", "tensorboard", "wandb"),
)
# Prints, for each program, the heavy libraries that it imports before it has printed its help, and
# the line of this project that imports each.
SCRIPT = """
import contextlib, importlib, io, json, sys, traceback

heavy, programs, root, found, program = *json.loads(sys.argv[1]), {}, ""

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in heavy and name not in found:
            own = [f for f in traceback.extract_stack() if f.filename.startswith(root)]
            found[name] = f"{program}: {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else program

sys.meta_path.insert(0, Watch())
from utils.command_line import CommandLine
for program in programs:
    module = importlib.import_module(program)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        if program in ("pretrain", "evaluate", "solve"):
            assert CommandLine.parse(["--help"], program, module.USAGE).page
print(json.dumps({name: line for name, line in found.items() if name in sys.modules}))  # others were only looked for
"""


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """Return for each heavy library that a program imports the line that imports it."""
    about = json.dumps([HEAVY, PROGRAMS, str(ROOT)])
    done = subprocess.run([sys.executable, "-c", SCRIPT, about], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines: dict[str, str] = json.loads(done.stdout)
    return lines


@pytest.mark.parametrize("library", HEAVY)
def test_help_needs_no_heavy_library(library: str, found: dict[str, str]) -> None:
    assert library not in found, f"{found[library]}; import {library} in the function that uses it"


def test_pages_and_checks_of_datasets_need_no_pytorch() -> None:
    """Its import would take longer than most of their work."""
    code = "import sys, dataset.validate, dataset.show, view; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
