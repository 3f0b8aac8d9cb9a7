"""Let the newest checkpoint of a run answer test puzzles, if its answers are not saved yet."""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from records.history import read_run_config
from utils.overrides import as_override
from utils.programs import started
from utils.terminal import tell
from utils.text import for_shell
from viewer.outputs import (
    SAVING,
    holds_answers,
    newest_checkpoint,
    outputs_folder,
    shards_of,
    step_of,
)
from viewer.pages import Settings, read_json
from viewer.text_page import is_text_run


def save_missing_answers(run: Path, settings: Settings) -> list[str]:
    """Save the answers of the chosen step, or of the newest checkpoint, unless it has some.

    Saved outputs that lack the answers may be the work of hours, and are not replaced.

    Returns:
        Lines that say why there are no answers. The page shows those of an older step, if any.
    """
    if is_text_run(read_run_config(run)):
        return []  # its evaluations write answers
    step = newest_checkpoint(run) if settings.step is None else run / f"step_{settings.step:08d}"
    outputs = run / "eval_outputs"
    if step is None or not step.is_dir():
        return []
    if any(step_of(each) == step_of(step) for each in outputs.glob("step_*")):
        saved = outputs_folder(run, step_of(step))
        if saved is not None and holds_answers(saved):
            return []
    typed = [
        f"checkpoint={as_override(str(run if settings.step is None else step))}",
        SAVING,
        f"max_examples={settings.max_examples}",
    ]
    command = f"python evaluate.py {for_shell(typed)}"
    nothing = f"{run} has no saved answers of step {step_of(step)}"
    elsewhere = f"this saves answers in another folder, for view.py: {command} out=answers"
    kept = outputs / step.name
    if shards_of(kept):
        return [f"{nothing}: {kept} holds outputs without the puzzles or without the answers; {elsewhere}"]
    to = kept if kept.is_dir() else outputs  # asked before the work: the folder of a step may be read-only, too
    try:
        outputs.mkdir(exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=to, prefix=".view-")
    except OSError as error:
        return [f"{nothing}: {to} can't be written ({error.strerror}); {elsewhere}"]
    tell(f"{nothing}; its model answers up to {settings.max_examples} puzzles of each test set now")
    tell(f"(Ctrl-C leaves them out): {command}")
    with temporary as folder:
        if failed := _evaluate([*typed, f"out={as_override(str(folder))}"]):
            return [f"{nothing}: {failed}"]
        target = outputs / Path(read_json(Path(folder) / "results.json")["checkpoint"]).name
        target.mkdir(exist_ok=True)
        for file in Path(folder).iterdir():
            if file.suffix == ".safetensors" or not (target / file.name).exists():  # results of a whole evaluation stay
                os.replace(file, target / file.name)
    return []


def _evaluate(typed: Sequence[str]) -> str | None:
    """Run evaluate.py, and return why it failed; None if it did not.

    In a process of its own, because the page itself needs no PyTorch, whose import takes seconds.
    """
    try:
        status = subprocess.run([*started("evaluate"), *typed], stdout=subprocess.DEVNULL).returncode
    except KeyboardInterrupt:  # the process has got the signal too
        return "interrupted"
    return f"evaluate.py ended with status {status}, and said why" if status else None
