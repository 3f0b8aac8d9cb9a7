"""launch.json: the plan and the machine of a run's last start."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from utils.files import plain, write_atomically, writing
from utils.ranks.launch import Launch

LAUNCH_FILE = "launch.json"


class Launched(BaseModel):
    """What rank 0 knows when training begins. Keys of other versions are ignored."""

    model_config = ConfigDict(frozen=True, strict=True)
    last_step: int = Field(ge=1, lt=2**53)  # the planned end; early_stop_patience may end the run before it
    finished_at: int | None = None  # a later start with a shorter plan found the run finished at this step
    ranks: int = Field(ge=1)
    device: str  # cuda, mps or cpu
    host: str  # of rank 0
    launch: str | None = None  # what all attempts of this launch have in common

    def write(self, run: Path) -> None:
        with writing(run / LAUNCH_FILE):
            write_atomically(run / LAUNCH_FILE, self.model_dump_json(indent=1) + "\n")

    @staticmethod
    def read(run: Path) -> "Launched | None":
        """Return what the run noted; None if the file is missing or holds something else."""
        try:
            return Launched.model_validate_json(plain(run / LAUNCH_FILE).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, ValidationError):
            return None

    @staticmethod
    def began(run: Path, launch: Launch) -> bool:
        """Return whether an earlier attempt of this launch began to train in the folder.

        A job of Slurm that was requeued before may find another run there.
        """
        before = Launched.read(run) if launch.requeues else None
        return launch.restarts > 0 or (before is not None and before.launch == launch.identity)

    @staticmethod
    def note_finished(run: Path, step: int, last_step: int) -> None:
        """Note that a run is finished at this step, if its file plans another last step."""
        before = Launched.read(run)  # the plan stays: the depths of the steps that were done follow it
        if before is not None and before.last_step != last_step:
            before.model_copy(update={"finished_at": step}).write(run)
