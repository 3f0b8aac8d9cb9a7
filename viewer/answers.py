"""Let the model of a run answer test puzzles where evaluate.py has not saved any answers yet."""

import os
import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from utils.config_files import quoted
from utils.errors import UserError
from utils.programs import started
from utils.terminal import tell
from utils.text import for_shell
from viewer.pages import Settings, read_json
from viewer.run_page import SAVE_OUTPUTS, outputs_folder
from viewer.saved_examples import shards_of, shows_answers


def save_missing_answers(run: Path, settings: Settings) -> list[str]:
    """Save answers to a run's test puzzles as evaluate.py does, unless the run has some.

    A run without checkpoints keeps its curves only. Ctrl-C leaves the answers out.

    Returns:
        Lines that say why there are no answers.

    Raises:
        UserError: a file of saved outputs is damaged.
    """
    steps = sorted(path for path in run.glob("step_*") if path.is_dir())
    if settings.step is not None:
        steps = [path for path in steps if path.name == f"step_{settings.step:08d}"]
    if not steps or _has_answers(run, settings.step if steps and settings.step is not None else None):
        return []
    checkpoint = run if settings.step is None else steps[0]
    typed = [
        f"checkpoint={_as_typed(checkpoint)}",
        f"save_outputs={SAVE_OUTPUTS}",
        f"max_examples={settings.max_examples}",
    ]
    command = f"python evaluate.py {for_shell(typed)}"
    tell(f"{run} has no saved answers; its model answers up to {settings.max_examples} puzzles of each test set now")
    tell(f"(Ctrl-C leaves them out): {command}")
    outputs = run / "eval_outputs"
    outputs.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=outputs, prefix=".view-") as folder:
        failed = _evaluate([*typed, f"out={_as_typed(folder)}"])
        if failed is None:
            _move(Path(folder), outputs)
            return []
    return [f"{run} has no answers on its page: {failed}"]


def _as_typed(path: str | Path) -> str:
    """Return a path as an override takes it: with blanks or commas it needs quotes."""
    return quoted(str(path)) if re.search(r"[^\w./+-]", str(path)) else str(path)


def _has_answers(run: Path, step: int | None) -> bool:
    try:
        outputs = outputs_folder(run, step)
    except UserError:  # there are outputs, but none of this step
        return False
    return outputs is not None and any(shows_answers(file) for files in shards_of(outputs).values() for file in files)


def _evaluate(typed: Sequence[str]) -> str | None:
    """Run evaluate.py in a process of its own, and return why it failed; None if it did not.

    The page itself needs no PyTorch, whose import takes seconds.
    """
    running = subprocess.Popen(
        [*started("hrm-evaluate"), *typed], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        _, said = running.communicate()
    except KeyboardInterrupt:  # the process has got the signal too
        running.wait()
        return "interrupted"
    lines = said.splitlines() or [f"evaluate.py ended with status {running.returncode}"]
    return lines[-1].removeprefix("error: ") if running.returncode else None


def _move(folder: Path, outputs: Path) -> None:
    """Move what was saved to the folder of its step. Results of a whole evaluation stay there."""
    target = outputs / Path(read_json(folder / "results.json")["checkpoint"]).name
    target.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if file.suffix == ".safetensors" or not (target / file.name).exists():
            os.replace(file, target / file.name)
