"""Write a run's metrics to metrics.jsonl, to the terminal and to Weights & Biases.

Rank 0 writes. On other ranks every call does nothing.
"""

import json
import math
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, TextIO

from tqdm import tqdm

from utils.config import StrictModel
from utils.dist.world import World
from utils.errors import UserError
from utils.files import plain, without_following, write_atomically, writing

Row = dict[str, float]

# The shortest time between two lines in a redirected log. A log of a whole night stays readable,
# and someone who follows the log sees that the run goes on.
_LINE_EVERY_S = 10.0


class WandbConfig(StrictModel):
    mode: Literal["auto", "online", "offline", "disabled"]
    entity: str | None
    group: str | None
    tags: list[str]


class Metrics:
    """Writes rows of scalars, one row for each logged step.

    A line of `metrics.jsonl` has the step, `time_s` and the row. `time_s` counts the seconds since
    the run began. A resumed run and a branch go on from the `time_s` of the last line that they
    keep, so that neither the pause nor the steps that are repeated count.

    Args:
        run: the run's folder. Rows of `metrics.jsonl` after `first_step` are removed, because the
            run repeats those steps.
        wandb_run_id: lets a resumed run continue the same W&B run.
        config: the resolved config, for W&B.
    """

    def __init__(
        self,
        world: World,
        run: Path,
        wandb: WandbConfig,
        wandb_run_id: str,
        config: dict[str, Any],
        first_step: int,
        last_step: int,
    ) -> None:
        self._wandb: Any = None
        self._bar: _Progress | None = None
        if not world.is_main:
            return
        self._path = run / "metrics.jsonl"
        with writing(self._path):
            self._before_s = _drop_rows_after(self._path, first_step)
        self._began = time.monotonic()
        self._bar = _Progress(first_step, last_step)
        self._wandb = _start_wandb(wandb, wandb_run_id, run, config, say=self.say)

    def write(self, step: int, row: Row) -> None:
        """Write the row of a step, which holds all its metrics.

        Raises:
            UserError: The row can't be written to metrics.jsonl.
        """
        if self._bar is None:
            return
        time_s = round(self._before_s + time.monotonic() - self._began, 3)
        with writing(self._path), open(self._path, "a", opener=without_following) as file:
            file.write(json.dumps({"step": step, "time_s": time_s, **row}) + "\n")
        self._bar.show(step, row)
        if self._wandb is not None:
            try:
                # The step is given because an offline run of W&B counts from zero after a resume.
                self._wandb.log(row, step=step)
            except Exception as error:  # no failure of W&B or the network may end the run
                self.say(f"W&B fails at step {step} ({type(error).__name__}: {error}); metrics.jsonl goes on alone")
                self._wandb = None

    def advance(self, step: int) -> None:
        """Move the progress bar: this step is done."""
        if self._bar is not None:
            self._bar.advance(step)

    def say(self, text: str) -> None:
        """Show a line of text above the progress bar."""
        if self._bar is not None:
            self._bar.say(text)

    def close(self, *, failed: bool = False, at_most_s: float | None = None) -> None:
        """Close the progress bar and finish the W&B run. Not called after a fault.

        Args:
            failed: the run ends with a mistake.
            at_most_s: how long to wait for W&B, whose server may be slow while the other ranks
                wait; None: as long as it takes.
        """
        if self._bar is not None:
            self._bar.close()
        if self._wandb is not None:
            finish = threading.Thread(target=self._wandb.finish, kwargs={"exit_code": int(failed)}, daemon=True)
            finish.start()
            finish.join(at_most_s)


class _Progress:
    """Shows a bar on a terminal, and plain lines where the output goes to a file.

    Errors of the output, such as a closed terminal or a full disk, are ignored: they must not end
    rank 0.
    """

    def __init__(self, first_step: int, last_step: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._first_step, self._last_step = first_step, last_step
        self._started, self._last_line = time.monotonic(), float("-inf")
        self._bar: tqdm[Any] | None = None
        if self._stream.isatty():
            self._bar = tqdm(total=last_step, initial=first_step, unit="step", file=self._stream, dynamic_ncols=True)

    def advance(self, step: int) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.update(step - self._bar.n)

    def show(self, step: int, row: Row) -> None:
        text = _summary(row)
        evaluated = any(name.startswith("eval/") for name in row)
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
        if evaluated:
            self.say(f"step {step}/{self._last_step}  {_summary(row, evaluation=True)}")
        if self._bar is None and text:
            now = time.monotonic()
            if now - self._last_line >= _LINE_EVERY_S or step == self._last_step:
                self._last_line = now
                done = max(1, step - self._first_step)
                left = (now - self._started) / done * (self._last_step - step)
                self.say(f"step {step}/{self._last_step}  {text}  ETA {tqdm.format_interval(left)}")

    def say(self, text: str) -> None:
        with suppress(OSError):
            if self._bar is not None:
                self._bar.write(text, file=self._stream)
            else:
                print(text, file=self._stream, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            with suppress(OSError):
                self._bar.close()


def _summary(row: Row, *, evaluation: bool = False) -> str:
    """Return the most important metrics of a row as text."""
    if evaluation:
        names = [
            name
            for name in row
            if name.startswith("eval/") and name.rsplit("/", 1)[-1] in ("exact_accuracy", "accuracy")
        ]
        return "  ".join(f"{name} {row[name]:.4f}" for name in sorted(names, reverse=True))
    shown = [
        ("loss", "train/lm_loss", ".4f"),
        ("acc", "train/accuracy", ".3f"),
        ("exact", "train/exact_accuracy", ".3f"),
    ]
    shown += [("ex/s", "perf/examples_per_second", ".0f")]
    return "  ".join(f"{label} {row[name]:{form}}" for label, name, form in shown if name in row)


def _drop_rows_after(path: Path, step: int) -> float:
    """Keep the rows up to a step. Lines that are no whole row are removed too.

    Returns:
        The last `time_s` that is kept; 0 if there is none, as in rows of older versions.
    """
    if not plain(path).exists():
        return 0.0
    kept, last_s = [], 0.0
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        logged = row.get("step") if isinstance(row, dict) else None
        if isinstance(logged, int) and logged <= step:
            kept.append(line + "\n")
            time_s = row.get("time_s")
            if isinstance(time_s, float) and 0 <= time_s < math.inf:  # the file may be forged
                last_s = time_s
    write_atomically(path, "".join(kept))
    return last_s


def _start_wandb(config: WandbConfig, run_id: str, run: Path, resolved: dict[str, Any], *, say: Any) -> Any:
    """Start the W&B run and return it, or None.

    The mode `auto` never prompts. It does not fail either if the account, the package or the
    network is missing.
    """
    if config.mode == "disabled":
        return None
    quiet_hint = "metrics go to metrics.jsonl only (wandb.mode=offline keeps files for `wandb sync`)"
    try:
        import wandb
    except ImportError as error:
        if config.mode == "auto":
            say(f"W&B: not installed; {quiet_hint}")
            return None
        raise UserError(
            f"wandb.mode={config.mode}, but wandb isn't installed; pip install wandb, or wandb.mode=disabled"
        ) from error
    if config.mode == "auto" and not _has_account(wandb):
        say(f"W&B: no account found; {quiet_hint}")
        return None
    options = {
        "project": resolved["project_name"],
        "name": resolved["run_name"],
        "id": run_id,
        "resume": None if config.mode == "offline" else "allow",
        "entity": config.entity,
        "group": config.group,
        "tags": config.tags,
        "dir": str(run),
        "config": resolved,
    }
    try:
        return wandb.init(mode="offline" if config.mode == "offline" else "online", **options)
    except (wandb.Error, ValueError, OSError) as error:  # ValueError: what pydantic says of a tag
        reason = " ".join(str(error).split())
        if config.mode != "auto":
            raise UserError(
                f"wandb.mode={config.mode} failed: {reason}; wandb.mode=offline needs no account"
            ) from error
        say(f"W&B can't be reached ({reason}); going on offline, `wandb sync` uploads later")
        return wandb.init(mode="offline", **(options | {"resume": None}))


def _has_account(wandb: Any) -> bool:
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except wandb.Error:
        return False
