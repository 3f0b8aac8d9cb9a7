"""Measure how much a checkpoint slows training down.

python -m benchmarks.checkpoint [--batch-size 768] [--seq-len 81] [--optim adam_atan2]
                                [--device auto] [--folder DIR] [--step-batch-size 2]
                                [--num-saves 3] [--num-steps 3] [--json FILE] [OVERRIDE...]

Saving costs time twice: training stands still while tensors are copied, and its steps are slower
while a thread writes the copies.

The published HRM (27 M parameters) with its optimizer, a moving average and the carry of the whole
batch is saved --num-saves times. The first save also allocates memory for the copies. Between saves
the model trains on --step-batch-size slots, and the time of a step of the whole batch is scaled
from that. On CUDA, make --step-batch-size equal to --batch-size.

A plain copy of the same tensors to the host, to memory that is there already, takes turns with the
saves. It is what a standstill can't be shorter than.

Times of steps are relative to an undisturbed step. "The whole step that saves" is the standstill
and a step that is as slow as the steps that were measured while the thread wrote. The program
prints a table and, with --json, writes it.
"""
# B = slots, S = tokens

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from models import build_puzzle_arch
from models.act import ActSettings, initial_carry
from models.carry import Carry
from models.parallel.layout import Layout
from optim.build import build_optimizers
from optim.ema import EMA
from training.config import PretrainConfig
from utils.checkpoint.format import RunState, step_folders
from utils.checkpoint.reader import Checkpoint
from utils.checkpoint.writer import Checkpointer, Snapshot
from utils.command_line import read_config, validate
from utils.ranks.setup import connect_devices
from utils.ranks.world import World

VOCAB_SIZE = 11


def main() -> None:
    options = _options()
    config = validate(PretrainConfig, read_config("pretrain", [*options.overrides, f"optim={options.optim}"]))
    world = connect_devices(World.single(), options.device)
    training = _Training(config, options, world)
    training.step()  # the first step is slower because it allocates
    step_s = statistics.median(_timed(training.step, world) for _ in range(options.num_steps))
    scale = options.batch_size / options.step_batch_size
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        checkpointer = Checkpointer(Path(folder), world, keep_last_k=1)
        rows = [_save(training, checkpointer, number, step_s, scale) for number in range(1, options.num_saves + 1)]
        published = Checkpoint.open(step_folders(Path(folder))[-1])
        num_bytes = sum((published.path / name).stat().st_size for name in published.files)
    about = {
        "num_parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "optim": options.optim,
        "batch_size": options.batch_size,
        "seq_len": options.seq_len,
        "gb": num_bytes / 1e9,
        "step_s": step_s * scale,
        "step_scaled_from_batch_of": options.step_batch_size,
        "machine": platform.processor() or platform.machine(),
        "device": torch.cuda.get_device_name() if world.device.type == "cuda" else str(world.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print("  ".join(f"{name} {value}" for name, value in about.items()), file=sys.stderr)
    print("| save | stands still, s | a plain copy, s | a step meanwhile | the whole step that saves | published, s |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['save']} | {row['stall_s']:.3f} | {row['copy_s']:.3f} | {row['step_while_writing']:.2f} | "
            f"{row['step_that_saves']:.3f} | {row['until_published_s']:.2f} |"
        )
    if options.json:
        options.json.write_text(json.dumps({**about, "rows": rows}, indent=2) + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=768)
    parser.add_argument("--step-batch-size", type=int, default=2)
    parser.add_argument("--seq-len", type=int, default=81)
    parser.add_argument("--optim", default="adam_atan2", choices=["adam_atan2", "adamw", "muon"])
    parser.add_argument("--num-saves", type=int, default=3)
    parser.add_argument("--num-steps", type=int, default=3, help="steps for the median time of an undisturbed step")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "mps", "cpu"])
    parser.add_argument(
        "--folder", type=Path, help="a folder on the disk to measure (default: the folder of temporary files)"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("overrides", nargs="*", help="overrides of pretrain.py, such as arch=trm")
    return parser.parse_args()


class _Training:
    """The tensors that a step changes and that a checkpoint saves.

    A step takes few slots, and a checkpoint saves the whole batch.
    """

    def __init__(self, config: PretrainConfig, options: argparse.Namespace, world: World) -> None:
        self._config, self._options, self.world = config, options, world
        self._generator = torch.Generator().manual_seed(0)
        self.model = build_puzzle_arch(
            config.arch, seq_len=options.seq_len, vocab_size=VOCAB_SIZE, num_puzzle_identifiers=1
        )
        self.model.init_weights(self._generator)
        self.model.to(world.device)
        self._optimizers = build_optimizers(
            self.model, self.model.block_weights(), config.optim, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1
        )
        self._ema = EMA(self.model.trained_tensors())
        self._layout: Layout = Layout(self.model, world)
        self._batch = self._batch_of(options.step_batch_size)
        self._carry = initial_carry(self.model, self._batch, training=True)
        self._whole = initial_carry(self.model, self._batch_of(options.batch_size), training=True)
        # Where a plain copy goes. It is written once, because the first use of memory takes longer.
        self.room = [
            torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=world.device.type == "cuda")
            for tensor in _tensors(self.snapshot(0))
        ]

    def _batch_of(self, num_slots: int) -> dict[str, torch.Tensor]:
        tokens_BS = torch.randint(1, VOCAB_SIZE, (num_slots, self._options.seq_len), generator=self._generator).int()
        tokens_BS = tokens_BS.to(self.world.device)
        ids_B = torch.zeros(num_slots, dtype=torch.int32, device=self.world.device)
        return {"inputs": tokens_BS, "labels": tokens_BS.clone(), "puzzle_identifiers": ids_B}

    def step(self) -> None:
        carry, _, _ = self._layout.forward_backward(
            self._carry,
            self._batch,
            ActSettings(
                depth=self._config.puzzle_arch.depth_at(1, 2),
                loss=self._config.puzzle_arch.loss,
                ignore_label=0,
                global_batch_size=self._options.step_batch_size,
                min_halt_steps_B=None,
            ),
        )
        assert carry is not None
        self._carry = carry
        self._optimizers.step(1.0)
        self._ema.update(0.999)
        self._optimizers.zero_grad()

    def snapshot(self, number: int) -> Snapshot:
        return Snapshot(
            weights=self.model.state_dict(),
            shared={
                **{f"optimizer.{name}": tensor for name, tensor in self._optimizers.export_state(self.model).items()},
                **{f"ema.{name}": tensor for name, tensor in self._ema.tensors().items()},
            },
            slots=slice(0, self._options.batch_size),
            by_slot=_unshared(self._whole),
            by_rank={},
            state=_state(number),
        )


def _timed(action: Callable[[], None], world: World) -> float:
    """Return the duration in seconds, including the device's work."""
    world.wait_for_device()
    began = time.perf_counter()
    action()
    world.wait_for_device()
    return time.perf_counter() - began


def _save(
    training: _Training, checkpointer: Checkpointer, number: int, step_s: float, scale: float
) -> dict[str, float]:
    """Save once and train on while the thread writes. Return the durations.

    Args:
        step_s: seconds of an undisturbed step of few slots.
        scale: how many times more slots a whole step has.
    """
    world, run, snapshot = training.world, checkpointer.run, training.snapshot(number)
    copy_s = _timed(partial(_copy, snapshot, training.room), world)
    began = time.perf_counter()
    stall_s = _timed(lambda: checkpointer.save(snapshot, is_best=False), world)
    meanwhile = [_timed(training.step, world)]  # steps while the thread writes
    while step_folders(run)[-1:] != [run / f"step_{number:08d}"]:
        meanwhile.append(_timed(training.step, world))
    checkpointer.wait()
    written_s = time.perf_counter() - began
    slowdown, whole_step_s = statistics.median(meanwhile) / step_s, step_s * scale
    return {
        "save": number,
        "stall_s": stall_s,
        "copy_s": copy_s,
        "step_while_writing": slowdown,
        "step_that_saves": 1 + stall_s / whole_step_s + (slowdown - 1) * min(1, written_s / whole_step_s),
        "num_steps_while_writing": len(meanwhile),
        "until_published_s": written_s,
    }


def _tensors(snapshot: Snapshot) -> list[torch.Tensor]:
    return [*snapshot.weights.values(), *snapshot.shared.values(), *snapshot.by_slot.values()]


@torch.no_grad()
def _copy(snapshot: Snapshot, room: list[torch.Tensor]) -> None:
    for place, tensor in zip(room, _tensors(snapshot), strict=True):
        place.copy_(tensor, non_blocking=True)


def _unshared(carry: Carry) -> dict[str, torch.Tensor]:
    """Return the carry's tensors with memory for every slot.

    An initial state is one row that is expanded to B slots. Copying it would be faster than copying
    a real state.
    """
    return {name: tensor.contiguous() for name, tensor in carry.tensors().items()}


def _state(step: int) -> RunState:
    return RunState(
        step=step,
        draws=0,
        open_steps=0,
        open_slots=0,
        best=None,
        evaluations_since_best=0,
        pending_row=None,
        wandb_run_id="",
        fingerprint={},
        task={},
        config={},
    )


if __name__ == "__main__":
    main()
