"""A training on the fake accelerator: a model of any config, its optimizers, and its batches."""

# B = slots, S = tokens

import torch

from models import ARCHS
from models.act import ActSettings, empty_batch, initial_carry
from models.base import RecursiveModel
from models.losses import ACT_SUMS
from models.metric_sums import OpenSums
from models.parallel.layout import Layout
from optim.ema import EMA
from pretrain import train_step
from records.checkpoint.format import Progress
from training.config import PretrainConfig
from training.data import Sizes
from training.number_watch import NumberWatch
from training.state import TrainState, optimizers_of
from training.step import StepSettings
from utils.batch import Batch
from utils.ranks.world import World

SEQ_LEN = 81
# Those of Sudoku, with a thousand puzzles and the row of unknown ones.
SIZES = Sizes(seq_len=SEQ_LEN, vocab_size=11, num_puzzle_identifiers=1001)


class FakeTraining:
    """Takes the steps of a config inside `fake_accelerator`, as pretrain.py does."""

    def __init__(self, config: PretrainConfig, device: torch.device, sizes: Sizes = SIZES) -> None:
        self._config, self.world = config, World(device=device)
        with device:  # without build_arch, because fake tensors can't move to the device with `.to`
            model = ARCHS[type(config.arch)](config.arch, **sizes.as_dict())
        assert isinstance(model, RecursiveModel)
        self.model = model
        self.batch: Batch = empty_batch(config.global_batch_size, sizes.seq_len, device)
        self.state = TrainState(
            Layout(self.model, self.world),
            optimizers_of(config, self.model),
            EMA(self.model.trained_tensors()) if config.ema else None,
            None,
            initial_carry(self.model, self.batch),
            OpenSums(ACT_SUMS, self.world),
            NumberWatch(ACT_SUMS, self.world, config.loss_spike),
            Progress(),
        )
        self.state.layout.num_microbatches = config.grad_accumulation

    def step(self) -> None:
        config, progress = self._config, self.state.progress
        progress.step += 1
        num_slots = config.global_batch_size
        settings = StepSettings(
            objective=ActSettings(
                depth=config.puzzle_arch.depth_at(progress.step, 100),
                global_batch_size=num_slots,
                min_halt_steps_B=self.world.to_device(torch.zeros(num_slots, dtype=torch.int32, device="cpu")),
            ),
            lr_factor=1.0,
            puzzle_emb_lr=config.puzzle_emb_lr,
            puzzle_emb_weight_decay=config.puzzle_emb_weight_decay,
            grad_clip=config.grad_clip,
            ema_rate=config.ema_rate,
        )
        result = train_step(self.state, self.batch, settings, self.world)
        self.state.sums.add(result.sums, result.grad_norm)
        self.state.watch.add(progress.step, num_slots, result.sums, result.grad_norm)
