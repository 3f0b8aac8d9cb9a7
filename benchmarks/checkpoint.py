"""Measure how much a checkpoint slows training down.

python -m benchmarks.checkpoint [--batch-size 768] [--step-batch-size 2] [OPTION...] [OVERRIDE...]

Saving costs time twice: training stands still while tensors are copied, and its steps are slower
while a thread writes the copies.

The published HRM (27 M parameters) with its optimizer, a moving average and the carry of the whole
batch is saved --num-saves times. The first save also allocates memory for the copies. Between saves
the model trains on --step-batch-size slots, and the time of a step of the whole batch is scaled
from that. On CUDA, make --step-batch-size equal to --batch-size.

A plain copy of the same tensors to the host, to memory that is there already, takes turns with the
saves. It is what a standstill can't be shorter than.

Times of steps are relative to an undisturbed step. "The whole step that saves" is the standstill
and a step that is as slow as the steps that were measured while the thread wrote.
"""

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.harness import build_sudoku, machine, parser_of, table, write
from benchmarks.on_request import timed
from benchmarks.our_steps import OurTrainer
from records.checkpoint.format import step_folders
from records.checkpoint.reader import Checkpoint
from records.checkpoint.writer import Checkpointer, Snapshot

FIGURES = {
    "stall_s": "stands still, s",
    "copy_s": "a plain copy, s",
    "step_while_writing": "a step meanwhile",
    "step_that_saves": "the whole step that saves",
    "until_published_s": "published, s",
}


class _Training:
    """A run whose steps take few slots, and whose checkpoints have those of the whole batch."""

    def __init__(self, overrides: list[str], num_slots: int) -> None:
        self.trainer, self._num_slots = OurTrainer(overrides), num_slots
        self.step_s()  # the first step is slower because it allocates
        # Where a plain copy goes. It is written once, because the first use of memory takes longer.
        pinned = self.trainer.world.device.type == "cuda"
        self._room = [torch.zeros(tensor.shape, pin_memory=pinned) for tensor in _tensors(self.snapshot(0))]

    def step_s(self) -> float:
        return self.trainer.steps(1)["step_ms"] / 1e3

    def snapshot(self, number: int) -> Snapshot:
        """Return the state of a step, with the slots of the step repeated for the whole batch."""
        saved = self.trainer.snapshot()
        rows = torch.arange(self._num_slots) % (saved.slots.stop - saved.slots.start)
        return replace(
            saved,
            slots=slice(0, self._num_slots),
            by_slot={name: tensor[rows.to(tensor.device)] for name, tensor in saved.by_slot.items()},
            state=saved.state.model_copy(update={"step": number}),
        )

    @torch.no_grad()
    def copy(self, snapshot: Snapshot) -> None:
        for place, tensor in zip(self._room, _tensors(snapshot), strict=True):
            place.copy_(tensor, non_blocking=True)

    def save(self, checkpointer: Checkpointer, number: int, step_s: float, scale: float) -> dict[str, float]:
        """Save once and train on while the thread writes. Return the durations.

        Args:
            step_s: seconds of an undisturbed step of few slots.
            scale: how many times more slots a whole step has.
        """
        device, snapshot = self.trainer.world.device, self.snapshot(number)
        copy_s = timed(lambda: self.copy(snapshot), 1, device)["step_ms"] / 1e3
        stall_s = timed(lambda: checkpointer.save(snapshot, is_best=False), 1, device)["step_ms"] / 1e3
        meanwhile = [self.step_s()]  # steps while the thread writes
        while step_folders(checkpointer.run)[-1:] != [checkpointer.run / f"step_{number:08d}"]:
            meanwhile.append(self.step_s())
        checkpointer.wait()
        written_s = stall_s + sum(meanwhile)
        slowdown, whole_step_s = statistics.median(meanwhile) / step_s, step_s * scale
        whole = 1 + stall_s / whole_step_s + (slowdown - 1) * min(1, written_s / whole_step_s)
        return dict(zip(FIGURES, (stall_s, copy_s, slowdown, whole, written_s), strict=True))


def _tensors(snapshot: Snapshot) -> list[torch.Tensor]:
    return [*snapshot.weights.values(), *snapshot.shared.values(), *snapshot.by_slot.values()]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--batch-size", type=int, default=768)
    parser.add_argument("--step-batch-size", type=int, default=2)
    parser.add_argument("--num-saves", type=int, default=3)
    parser.add_argument("--num-steps", type=int, default=3, help="steps for the median time of an undisturbed step")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "mps", "cpu"])
    parser.add_argument("--folder", type=Path, help="a folder on the disk to measure (default: of temporary files)")
    options = parser.parse_intermixed_args()
    scale = options.batch_size / options.step_batch_size
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        data = build_sudoku(Path(folder) / "data", "--generate", "100", "--num-aug", "0")
        overrides = [f"data_path={data}", f"device={options.device}", "ema=true", "eval_interval=null"]
        overrides += [f"global_batch_size={options.step_batch_size}", "compile=false"]
        training = _Training([*overrides, *options.overrides], options.batch_size)
        step_s = statistics.median(training.step_s() for _ in range(options.num_steps))
        (run := Path(folder) / "run").mkdir()
        checkpointer = Checkpointer(run, training.trainer.world, keep_last_k=1)
        rows = [training.save(checkpointer, number, step_s, scale) for number in range(1, options.num_saves + 1)]
        published = Checkpoint.open(step_folders(run)[-1])
        gb = sum((published.path / name).stat().st_size for name in published.files) / 1e9
    about = {"gb": gb, "step_s": step_s * scale, "step_scaled_from_batch_of": options.step_batch_size, **machine()}
    print(f"{gb:.2f} GB, a step takes {step_s * scale:.3f} s")
    print(table(list(FIGURES.values()), ([f"{row[name]:.3f}" for name in FIGURES] for row in rows)))
    write(options.json, {**about, "rows": rows})


if __name__ == "__main__":
    main()
