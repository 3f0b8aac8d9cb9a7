"""Score a checkpoint on every example of a test split, with any batch size, device and number of ranks.

python evaluate.py checkpoint=checkpoints/<project>/<run> [data_path=...]
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field, model_validator

from dataset.evaluators import EvaluatorName, build_evaluators
from dataset.schema import Split, check_contents, open_datasets, open_split
from models import ArchConfig
from models.base import RecursiveModel
from models.published import PuzzleTable
from pretrain import build_model, evaluate, init_weights_from, load_run, require_same_task, task_of
from utils.command_line import CommandLine, read_config, validate
from utils.config import Int, StrictModel
from utils.dist import DeviceName, DistConfig, World, run

USAGE = """
evaluate.py: score a checkpoint.

  python evaluate.py checkpoint=checkpoints/<project>/<run>                 the newest step, on the data of its training
  python evaluate.py checkpoint=<run>/step_00001000 data_path=data/other    one step, on other data
  torchrun --nproc-per-node 8 evaluate.py checkpoint=... batch_size=4096    on eight devices
  python evaluate.py checkpoint=hf://owner/repo/file arch=trm_mlp data_path=data/sudoku-extreme-1k-aug-1000    published
"""


class EvaluateConfig(StrictModel):
    """config/evaluate.yaml says what each key means."""

    checkpoint: str
    arch: ArchConfig | None
    puzzle_table: PuzzleTable | None
    data_path: str | None
    evaluators: list[EvaluatorName]
    batch_size: Int | None = Field(gt=0)
    max_examples: Int | None = Field(gt=0)
    device: DeviceName
    dist: DistConfig

    @property
    def is_run(self) -> bool:
        """Whether the checkpoint is a folder, which knows its architecture and its data, or a file of weights."""
        return not (self.checkpoint.startswith("hf://") or Path(self.checkpoint).is_file())

    @model_validator(mode="after")
    def _a_file_needs_what_a_run_knows(self) -> "EvaluateConfig":
        if self.is_run and (self.arch or self.puzzle_table):
            given = "arch" if self.arch else "puzzle_table"
            raise ValueError(f"{given} is given, but {self.checkpoint} is a run, which knows its own; leave it out")
        if not self.is_run and not (self.arch and self.data_path):
            raise ValueError(
                f"{self.checkpoint} is a file of weights, which says neither its architecture nor its data; "
                "give arch=... (with the options that it was trained with) and data_path=..."
            )
        return self


@dataclass
class Loaded:
    """What is to be scored on what."""

    name: str
    model: RecursiveModel
    split: Split
    batch_size: int


def load(config: EvaluateConfig, world: World) -> Loaded:
    """Every rank. Raises UserError."""
    if config.is_run:
        trained, model, checkpoint = load_run(Path(config.checkpoint), world)
        batch_size = trained.eval_batch_size or trained.global_batch_size
        with world.agree():
            same_folder = {Path(path).resolve(): path for path in trained.train_paths}
            if config.data_path is None:
                split = open_datasets(trained.test_paths, "test", numbered_by=trained.train_paths)
            elif trained_on := same_folder.get(Path(config.data_path).resolve()):
                split = open_datasets([trained_on], "test", numbered_by=trained.train_paths)
            else:  # whoever names other data says that its puzzles are numbered alike
                split = open_split(config.data_path, "test")
            require_same_task(checkpoint.state.task, split, trained.arch)
        return Loaded(str(checkpoint.path), model, split, batch_size)
    assert config.arch is not None and config.data_path is not None
    with world.agree():
        split = open_split(Path(config.data_path), "test")
    model = build_model(config.arch, task_of(split), world, seed=0)
    init_weights_from(config.checkpoint, model, config.puzzle_table, world)
    return Loaded(config.checkpoint, model, split, batch_size=768)


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
    loaded = load(config, world)
    split = loaded.split
    with world.agree():
        evaluators = build_evaluators(config.evaluators, split)
        if world.is_main:
            check_contents(split)
    began = time.perf_counter()
    metrics = evaluate(
        loaded.model,
        split,
        world,
        batch_size=config.batch_size or loaded.batch_size,
        max_examples=config.max_examples,
        evaluators=evaluators,
    )
    assert metrics is not None
    if world.is_main:
        sizes = [len(puzzle_set.inputs) for puzzle_set in split.sets.values()]
        num_examples = sum(min(size, config.max_examples or size) for size in sizes)
        print(f"{loaded.name} on {split.path}: {num_examples:,} examples in {time.perf_counter() - began:.1f} s")
        for name, value in metrics.items():
            print(f"  {name:<44}{value:.4f}")
        first_set = next(iter(split.sets))
        print(f"exact_accuracy={metrics.get(f'eval/{first_set}/exact_accuracy', float('nan')):.4f}")


if __name__ == "__main__":
    run(main)
