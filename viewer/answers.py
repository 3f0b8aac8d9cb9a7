"""Let the newest checkpoint of a run answer test puzzles, if its answers are not saved yet."""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from utils.errors import UserError
from utils.overrides import as_override
from utils.programs import started
from utils.run.history import read_run_config
from utils.terminal import tell
from utils.text import for_shell
from viewer.pages import Settings, read_json
from viewer.run_page import SAVE_OUTPUTS, newest_checkpoint, older_answers, outputs_folder, step_of
from viewer.saved_examples import holds_answers, shards_of
from viewer.text_page import is_text_run


def save_missing_answers(run: Path, settings: Settings) -> list[str]:
    """Save the answers of a step as evaluate.py does, unless it has some.

    The step is the newest checkpoint, unless the settings name another one. A run without
    checkpoints keeps what it has. So does a run that is read-only, or whose saved outputs lack the
    answers: they may be the work of hours, and are not replaced. Ctrl-C leaves the answers out.

    Returns:
        Lines that say why there are no answers, or that those of an older step are shown.

    Raises:
        UserError: a file of saved outputs is damaged.
    """
    if is_text_run(read_run_config(run)):
        return []  # its evaluations write answers
    step = newest_checkpoint(run) if settings.step is None else run / f"step_{settings.step:08d}"
    if step is None or not step.is_dir() or _has_answers(run, step_of(step)):
        return []
    checkpoint = run if settings.step is None else step
    typed = [
        f"checkpoint={as_override(str(checkpoint))}",
        f"save_outputs={SAVE_OUTPUTS}",
        f"max_examples={settings.max_examples}",
    ]
    command = f"python evaluate.py {for_shell(typed)}"
    nothing = (older_answers(run) if settings.step is None else None) or f"{run} has no answers on its page"
    elsewhere = f"this saves answers in another folder, for view.py: {command} out=answers"
    outputs = run / "eval_outputs"
    kept = outputs / step.name
    if shards_of(kept):
        return [f"{nothing}: {kept} holds outputs without the puzzles or without the answers; {elsewhere}"]
    to = kept if kept.is_dir() else outputs  # asked before the work: the folder of a step may be read-only, too
    try:
        outputs.mkdir(exist_ok=True)
        temporary = tempfile.TemporaryDirectory(dir=to, prefix=".view-")
    except OSError as error:
        return [f"{nothing}: {to} can't be written ({error.strerror}); {elsewhere}"]
    without = f"{run} has no saved answers of step {step_of(step)}"
    tell(f"{without}; its model answers up to {settings.max_examples} puzzles of each test set now")
    tell(f"(Ctrl-C leaves them out): {command}")
    with temporary as folder:
        failed = _evaluate([*typed, f"out={as_override(str(folder))}"])
        if failed is None:
            _move(Path(folder), outputs)
            return []
    return [f"{nothing}: {failed}"]


def _has_answers(run: Path, step: int | None) -> bool:
    """Return whether the page has answers: the shards of all ranks hold them."""
    try:
        outputs = outputs_folder(run, step)
    except UserError:  # there are outputs, but none of this step
        return False
    return outputs is not None and holds_answers(outputs)


def _evaluate(typed: Sequence[str]) -> str | None:
    """Run evaluate.py in a process of its own, and return why it failed; None if it did not.

    The page itself needs no PyTorch, whose import takes seconds. What evaluate.py says on stderr is
    passed on at once. Its table on stdout is not, because the page holds it.
    """
    command = [*started("hrm-evaluate"), *typed]
    running = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8", errors="replace"
    )
    assert running.stderr is not None
    last = ""
    try:
        for line in running.stderr:
            last = line.rstrip("\n")
            tell(last)
        status = running.wait()
    except KeyboardInterrupt:  # the process has got the signal too
        running.communicate()  # lets it finish what it says about the signal
        return "interrupted"
    return (last.removeprefix("error: ") or f"evaluate.py ended with status {status}") if status else None


def _move(folder: Path, outputs: Path) -> None:
    """Move what was saved to the folder of its step. Results of a whole evaluation stay there."""
    target = outputs / Path(read_json(folder / "results.json")["checkpoint"]).name
    target.mkdir(exist_ok=True)
    for file in folder.iterdir():
        if file.suffix == ".safetensors" or not (target / file.name).exists():
            os.replace(file, target / file.name)
