"""Let the newest checkpoint of a run answer test puzzles, if its answers are not saved yet."""

import subprocess
from pathlib import Path

from records.history import read_run_config
from utils.overrides import as_override
from utils.programs import started
from utils.terminal import tell
from utils.text import for_shell
from viewer.outputs import SAVING, holds_answers, is_text_run, newest_checkpoint, shards_of, step_of
from viewer.pages import Settings


def save_missing_answers(run: Path, settings: Settings) -> list[str]:
    """Save the answers of the chosen step, or of the newest checkpoint, unless it has some.

    Saved outputs that lack the answers may be the work of hours, and are not replaced.

    Returns:
        Lines that say why there are no answers. The page shows those of an older step, if any.
    """
    if is_text_run(read_run_config(run)):
        return []  # its evaluations write answers
    step = newest_checkpoint(run) if settings.step is None else run / f"step_{settings.step:08d}"
    if step is None or not step.is_dir():
        return []
    outputs = run / "eval_outputs"
    # The first folder of a step is the one for the run's own data.
    saved = next((each for each in sorted(outputs.glob("step_*")) if step_of(each) == step_of(step)), None)
    if saved is not None and holds_answers(saved):
        return []
    typed = [f"checkpoint={as_override(str(step))}", SAVING, f"max_examples={settings.max_examples}"]
    command = f"python evaluate.py {for_shell(typed)}"
    nothing = f"{run} has no saved answers of step {step_of(step)}"
    elsewhere = f"this saves answers in another folder, for view.py: {command} out=answers"
    if shards_of(outputs / step.name):
        return [f"{nothing}: {outputs / step.name} holds outputs without the puzzles or the answers; {elsewhere}"]
    tell(f"{nothing}; its model answers up to {settings.max_examples} puzzles of each test set now")
    tell(f"(Ctrl-C leaves them out): {command}")
    try:
        # In a process of its own: the page itself needs no PyTorch, whose import takes seconds.
        status = subprocess.run([*started("hrm-evaluate"), *typed], stdout=subprocess.DEVNULL).returncode
    except KeyboardInterrupt:  # the process has got the signal too
        return [f"{nothing}: interrupted"]
    return [f"{nothing}: evaluate.py ended with status {status}, and said why; {elsewhere}"] if status else []
