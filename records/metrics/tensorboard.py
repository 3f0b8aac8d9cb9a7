"""Write a run's metrics for TensorBoard, an optional package."""

import time
from pathlib import Path

from records.metrics.sink import Row, Sink
from utils.errors import UserError
from utils.files import writing


class TensorBoard(Sink):
    """Writes curves. A resumed run writes a file of its own, which hides repeated steps."""

    name = "TensorBoard"

    def __init__(self, folder: Path, first_step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError(
                "tensorboard=true, but tensorboard isn't installed; pip install -r requirements-tensorboard.txt, "
                "or tensorboard=false"
            ) from error
        with writing(folder):
            # A name has the second and then the process's number. TensorBoard reads files in the
            # order of their names, so a resumed run's file must be of a later second.
            seconds = [path.name.split(".")[3] for path in folder.glob("events.out.tfevents.*")]
            while f"{int(time.time()):010d}" in seconds:
                time.sleep(0.02)
            self._writer = SummaryWriter(str(folder), purge_step=first_step + 1)

    def write(self, step: int, row: Row) -> None:
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()  # after a kill, a resumed run repeats only the steps after its checkpoint

    def close(self, *, failed: bool, at_most_s: float | None) -> None:
        self._writer.close()
