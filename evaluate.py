"""Score a checkpoint on every example of a test split, with any batch size, device and number of ranks.

python evaluate.py checkpoint=checkpoints/<project>/<run> [data_path=...]
"""

import sys
import time
from pathlib import Path

from pydantic import Field

from dataset.schema import check_contents, open_split
from pretrain import evaluate, load_run, require_same_task
from utils.command_line import CommandLine, read_config, validate
from utils.config import Int, StrictModel
from utils.dist import DeviceName, DistConfig, World, run

USAGE = """
evaluate.py: score a checkpoint.

  python evaluate.py checkpoint=checkpoints/<project>/<run>                 the newest step, on the data of its training
  python evaluate.py checkpoint=<run>/step_00001000 data_path=data/other    one step, on other data
  torchrun --nproc-per-node 8 evaluate.py checkpoint=... batch_size=4096    on eight devices
"""


class EvaluateConfig(StrictModel):
    """config/evaluate.yaml says what each key means."""

    checkpoint: str
    data_path: str | None
    batch_size: Int | None = Field(gt=0)
    device: DeviceName
    dist: DistConfig


def main(world: World) -> None:
    """Every rank."""
    config: EvaluateConfig | None = None
    with world.agree():
        if world.is_main:
            command = CommandLine.parse(sys.argv[1:], "evaluate", USAGE)
            if command.page:
                print(command.page)
            else:
                config = validate(EvaluateConfig, read_config("evaluate", command.overrides))
    config = world.broadcast_object(config)
    if config is None:
        return
    world = world.use_device(config.device, timeout_s=config.dist.timeout_s)
    trained, model, checkpoint = load_run(Path(config.checkpoint), world)

    with world.agree():
        split = open_split(Path(config.data_path or trained.data_path), "test")
        require_same_task(checkpoint.state.task, split, trained.arch)
        if world.is_main:
            check_contents(split)
    began = time.perf_counter()
    metrics = evaluate(
        model,
        split,
        world,
        batch_size=config.batch_size or trained.eval_batch_size or trained.global_batch_size,
        loss_type=trained.arch.loss.loss_type,
    )
    assert metrics is not None
    if world.is_main:
        num_examples = sum(len(puzzle_set.inputs) for puzzle_set in split.sets.values())
        print(f"{checkpoint.path} on {split.path}: {num_examples:,} examples in {time.perf_counter() - began:.1f} s")
        for name, value in metrics.items():
            print(f"  {name:<44}{value:.4f}")
        first_set = next(iter(split.sets))
        print(f"exact_accuracy={metrics.get(f'eval/{first_set}/exact_accuracy', float('nan')):.4f}")


if __name__ == "__main__":
    run(main)
