"""Send a run to Weights & Biases: its metrics, evaluations, pictures of puzzles and checkpoints."""

import queue
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from utils.config import Int, StrictModel
from utils.drawing import pyplot
from utils.errors import UserError
from utils.metrics.sink import Picture, Row, Sink
from utils.text import one_line

Say = Callable[[str], None]

# The table of evaluations is sent anew at each evaluation. Its last lines are enough: the curves
# have all evaluations.
_MOST_LINES = 1000


class WandbConfig(StrictModel):
    mode: Literal["auto", "online", "offline", "disabled"]
    entity: str | None
    group: str | None
    tags: list[str]
    pictures: Int = Field(ge=0, le=64)
    artifacts: Literal["none", "best", "all"]


def start_wandb(
    config: WandbConfig,
    run_id: str,
    run: Path,
    resolved: dict[str, Any],
    rows: Sequence[dict[str, Any]],
    *,
    say: Say,
) -> "Wandb | None":
    """Start the W&B run, or return None if the config or the surroundings rule it out.

    Args:
        run: the run's folder.
        resolved: the run's whole config.
        rows: what a resumed run has logged already.

    Raises:
        UserError: The mode is online or offline, and W&B can't be started in it.
    """
    if config.mode == "disabled":
        return None
    opened = _open(config, run_id, run, resolved, say)
    return None if opened is None else Wandb(opened, config, rows, say)


class Wandb(Sink):
    """Sends metrics, the table of evaluations, pictures of puzzles and checkpoints to a W&B run."""

    name = "W&B"

    def __init__(self, run: Any, config: WandbConfig, rows: Sequence[dict[str, Any]], say: Say) -> None:
        self._run, self._artifacts, self._say = run, config.artifacts, say
        self._evaluations = [line for row in rows for line in _evaluations_in(row["step"], row)][-_MOST_LINES:]
        self.num_pictures = config.pictures
        self._uploads = _Uploads(run, say)
        if config.pictures:
            try:
                pyplot()
            except UserError as error:
                say(f"W&B gets no pictures of puzzles: {error}")
                self.num_pictures = 0

    def write(self, step: int, row: Row) -> None:
        sent: dict[str, Any] = dict(row)
        if lines := _evaluations_in(step, row):
            self._evaluations = [*self._evaluations, *lines][-_MOST_LINES:]
            sent["evaluations"] = _table(self._evaluations)
        # The step is given because an offline run of W&B counts from zero after a resume.
        self._run.log(sent, step=step)

    def show(self, step: int, pictures: Sequence[Picture]) -> None:
        if not pictures:
            return
        import wandb

        with tempfile.TemporaryDirectory() as folder:
            images = []
            for number, picture in enumerate(pictures):
                file = Path(folder) / f"{number}.png"
                picture.draw(file)
                images.append(wandb.Image(str(file), caption=picture.caption))
            self._run.log({"puzzles": images}, step=step)  # which copies the files

    def add_checkpoint(self, folder: Path, *, is_best: bool) -> None:
        if self._artifacts == "all" or (self._artifacts == "best" and is_best):
            self._uploads.add(folder, is_best=is_best)

    def close(self, *, failed: bool, at_most_s: float | None) -> None:
        finish = threading.Thread(target=self._finish, args=(failed,), daemon=True)
        finish.start()
        finish.join(at_most_s)

    def _finish(self, failed: bool) -> None:
        self._uploads.wait()
        try:
            self._run.finish(exit_code=int(failed))
        except Exception as error:  # no failure of W&B or the network may end the run
            self._say(f"W&B does not take the end of the run ({type(error).__name__}: {error})")


class _Uploads:
    """Uploads checkpoints one after another, in a thread for which training does not wait.

    A checkpoint that can't be uploaded is named in the log, and the run goes on.
    """

    def __init__(self, run: Any, say: Say) -> None:
        self._run, self._say = run, say
        self._queue: queue.Queue[tuple[Any, list[str]]] = queue.Queue()
        self._thread: threading.Thread | None = None

    def add(self, folder: Path, *, is_best: bool) -> None:
        """Copy the files of a step folder into W&B's staging folder, and have them uploaded."""
        import wandb

        step = int(folder.name.removeprefix("step_"))
        artifact = wandb.Artifact(f"checkpoint-{self._run.id}", type="checkpoint", metadata={"step": step})
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            # The copy stays until it is uploaded, also if keep_last_k removes the folder before.
            artifact.add_file(str(file), name=file.relative_to(folder).as_posix(), skip_cache=True)
        self._queue.put((artifact, ["latest", folder.name, *(["best"] if is_best else [])]))
        if self._thread is None:
            self._thread = threading.Thread(target=self._upload, name="wandb-checkpoints", daemon=True)
            self._thread.start()

    def _upload(self) -> None:
        while True:
            artifact, aliases = self._queue.get()
            try:
                self._run.log_artifact(artifact, aliases=aliases)
            except Exception as error:  # no failure of W&B or the network may end the run
                self._say(f"W&B does not take {aliases[1]} ({type(error).__name__}: {error})")
            finally:
                self._queue.task_done()

    def wait(self) -> None:
        """Wait until W&B has taken all that was added."""
        self._queue.join()


def _evaluations_in(step: int, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a line of the table for each set that a row scores."""
    lines: dict[str, dict[str, Any]] = {}
    for name, value in row.items():
        kind, _, rest = name.partition("/")
        set_name, _, metric = rest.partition("/")
        if kind == "eval" and metric:
            lines.setdefault(set_name, {"step": step, "set": set_name})[metric] = value
    return list(lines.values())


def _table(lines: Sequence[dict[str, Any]]) -> Any:
    """Return a table of W&B with a column for each metric that a line has."""
    import wandb

    columns = list(dict.fromkeys(name for line in lines for name in line))
    return wandb.Table(columns=[*columns], data=[[line.get(name) for name in columns] for line in lines])


def _open(config: WandbConfig, run_id: str, run: Path, resolved: dict[str, Any], say: Say) -> Any:
    """Open the W&B run and return it, or None.

    The mode `auto` never prompts. It does not fail either if the account, the package or the
    network is missing.
    """

    def give_up(reason: str, fix: str, error: Exception | None = None) -> None:
        if config.mode != "auto":
            raise UserError(f"wandb.mode={config.mode} failed: {reason}; {fix}") from error
        say(f"W&B: {reason}; metrics go to metrics.jsonl only (wandb.mode=offline keeps files for `wandb sync`)")

    try:
        import wandb

        settings = wandb.setup().settings
    except ImportError as error:
        return give_up("not installed", "pip install wandb, or wandb.mode=disabled", error)
    except (wandb.Error, ValidationError) as error:  # such as a malformed WANDB_BASE_URL
        return give_up(one_line(error), "correct W&B's settings, or wandb.mode=disabled", error)
    if config.mode == "auto" and not _has_account(wandb):
        return give_up("no account found", "")
    # A W&B agent waits for the run that it has named. With another id, it would miss its run.
    has_agent = settings.sweep_id is not None
    options = {
        "project": resolved["project_name"],
        "name": resolved["run_name"],
        "id": None if has_agent else run_id,
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
        if config.mode != "auto":
            return give_up(one_line(error), "wandb.mode=offline needs no account", error)
        say(f"W&B can't be reached ({one_line(error)}); going on offline, `wandb sync` uploads later")
        return wandb.init(mode="offline", **(options | {"resume": None}))


def _has_account(wandb: Any) -> bool:
    try:
        return bool(wandb.login(prompt=False, verify=False))
    except wandb.Error:
        return False
