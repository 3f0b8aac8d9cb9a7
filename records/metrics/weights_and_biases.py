"""Send a run to Weights & Biases: its metrics, evaluations, pictures of puzzles and checkpoints."""

import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from records.metrics.sink import Picture, Row, Sink
from utils.config import Int, StrictModel
from utils.drawing import pyplot
from utils.errors import UserError
from utils.text import one_line

Rows = Sequence[dict[str, Any]]
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


def start_wandb(config: WandbConfig, named: dict[str, Any], folder: Path, rows: Rows, say: Say) -> "Wandb | None":
    """Start the W&B run, or return None if the config or the surroundings rule it out.

    The mode `auto` never prompts or fails.

    Args:
        named: the id, name, project and config of the W&B run.
        rows: what a resumed run has logged already.
    """
    is_auto = config.mode == "auto"

    def give_up(error: Exception, fix: str) -> "Wandb | None":
        if not is_auto:
            raise UserError(f"wandb.mode={config.mode} failed: {one_line(error)}; {fix}") from error
        instead = "metrics go to metrics.jsonl only (wandb.mode=offline keeps files for `wandb sync`)"
        say(f"W&B: {one_line(error)}; {instead}")
        return None

    if config.mode == "disabled":
        return None
    try:
        import wandb
    except ImportError:
        return give_up(ImportError("not installed"), "pip install wandb, or wandb.mode=disabled")
    try:
        settings = wandb.setup().settings
        if is_auto and not wandb.login(prompt=False, verify=False):
            raise wandb.Error("no account found")
    except (wandb.Error, ValidationError) as error:  # such as a malformed WANDB_BASE_URL
        return give_up(error, "correct W&B's settings, or wandb.mode=disabled")
    options = named | {"entity": config.entity, "group": config.group, "tags": config.tags, "dir": str(folder)}
    if settings.sweep_id is not None:  # a W&B agent waits for the run that it has named
        options["id"] = None
    options["resume"] = None if config.mode == "offline" else "allow"
    try:
        run = wandb.init(mode="offline" if config.mode == "offline" else "online", **options)
    except (wandb.Error, ValueError, OSError) as error:  # ValueError: what pydantic says of a tag
        if not is_auto:
            return give_up(error, "wandb.mode=offline needs no account")
        say(f"W&B can't be reached ({one_line(error)}); going on offline, `wandb sync` uploads later")
        run = wandb.init(mode="offline", **(options | {"resume": None}))
    return Wandb(run, config, rows, say)


class Wandb(Sink):
    """Sends metrics, the table of evaluations, pictures of puzzles and checkpoints to a W&B run."""

    name = "W&B"

    def __init__(self, run: Any, config: WandbConfig, rows: Rows, say: Say) -> None:
        import wandb

        self._wandb, self._run, self._artifacts, self._say = wandb, run, config.artifacts, say
        self._evaluations = [line for row in rows for line in _evaluations_in(row["step"], row)]
        self._upload: threading.Thread | None = None  # the last one, which waits for those before
        self.num_pictures = config.pictures
        try:
            if config.pictures:
                pyplot()
        except UserError as error:
            say(f"W&B gets no pictures of puzzles: {error}")
            self.num_pictures = 0

    def write(self, step: int, row: Row) -> None:
        sent: dict[str, Any] = dict(row)
        if lines := _evaluations_in(step, row):
            self._evaluations = [*self._evaluations, *lines][-_MOST_LINES:]
            columns = list(dict.fromkeys(name for line in self._evaluations for name in line))
            cells = [[line.get(name) for name in columns] for line in self._evaluations]
            sent["evaluations"] = self._wandb.Table(columns=[*columns], data=cells)
        # The step is given because an offline run of W&B counts from zero after a resume.
        self._run.log(sent, step=step)

    def show(self, step: int, pictures: Sequence[Picture]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            images = []
            for number, picture in enumerate(pictures):
                file = Path(folder) / f"{number}.png"
                picture.draw(file)
                images.append(self._wandb.Image(str(file), caption=picture.caption))
            self._run.log({"puzzles": images}, step=step)  # which copies the files

    def add_checkpoint(self, folder: Path, *, is_best: bool) -> None:
        """Copy a step folder into the staging folder of W&B, and upload it in a thread."""
        if not (self._artifacts == "all" or (self._artifacts == "best" and is_best)):
            return
        step = int(folder.name.removeprefix("step_"))
        artifact = self._wandb.Artifact(f"checkpoint-{self._run.id}", type="checkpoint", metadata={"step": step})
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            # The copy stays until it is uploaded, also if keep_last_k removes the folder before.
            artifact.add_file(str(file), name=file.relative_to(folder).as_posix(), skip_cache=True)
        before, aliases = self._upload, ["latest", folder.name, *(["best"] if is_best else [])]

        def upload() -> None:
            if before is not None:
                before.join()
            self._try(lambda: self._run.log_artifact(artifact, aliases=aliases), folder.name)

        self._upload = threading.Thread(target=upload, name="wandb-checkpoints", daemon=True)
        self._upload.start()

    def close(self, *, failed: bool, at_most_s: float | None) -> None:
        def finish() -> None:
            if self._upload is not None:
                self._upload.join()
            self._try(lambda: self._run.finish(exit_code=int(failed)), "the end of the run")

        thread = threading.Thread(target=finish, daemon=True)
        thread.start()
        thread.join(at_most_s)

    def _try(self, do: Callable[[], None], what: str) -> None:
        try:
            do()
        except Exception as error:  # no failure of W&B or the network may end the run
            self._say(f"W&B does not take {what} ({type(error).__name__}: {error})")


def _evaluations_in(step: int, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a line of the table for each set that a row scores."""
    lines: dict[str, dict[str, Any]] = {}
    for name, value in row.items():
        kind, _, rest = name.partition("/")
        set_name, _, metric = rest.partition("/")
        if kind == "eval" and metric:
            lines.setdefault(set_name, {"step": step, "set": set_name})[metric] = value
    return list(lines.values())
