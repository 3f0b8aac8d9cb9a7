"""The plan of a run: what is known before its first step, and what is due after each."""

import math
from dataclasses import dataclass

from dataset.evaluators import NO_EVALUATORS, Evaluators
from dataset.online import OnlineAugmentation
from dataset.sampler import Sampler
from dataset.schema import Split
from dataset.text.sampler import TextSampler
from optim.schedule import batch_scale, lr_multiplier
from records.checkpoint.format import Progress
from training.config import PretrainConfig
from training.data import Data
from training.kinds import Kind, kind_of_arch
from utils.errors import UserError
from utils.ranks.world import World

_LOWER_IS_BETTER = ("loss", "perplexity", "bits_per_byte")  # of text


@dataclass(frozen=True)
class Plan:
    """What a run will do, and what is due after each of its steps. It never changes."""

    config: PretrainConfig
    sampler: Sampler | TextSampler
    last_step: int
    evaluators: Evaluators
    best_metric: str  # with its set; empty for none
    augmentation: OnlineAugmentation | None

    @staticmethod
    def make(config: PretrainConfig, data: Data, progress: Progress, world: World) -> "Plan":
        """Plan the rest of a run that has come so far. Every rank."""
        with world.shared_errors():
            kind = kind_of_arch(config.arch)
            sampler = kind.sampler(config, data.train, progress)
            last_step = min(sampler.last_step, config.max_steps or sampler.last_step)
            if last_step < 1:
                raise UserError(
                    f"{config.epochs} epochs don't fill one global batch of {config.global_batch_size} {kind.unit}; "
                    "raise epochs or lower global_batch_size"
                )
            evaluators = NO_EVALUATORS if data.test is None else kind.evaluators(config, data.test)
            best_metric = full_best_metric(config, data, evaluators)
            augmentation = online_augmentation(config, data, world)
        return Plan(config, sampler, last_step, evaluators, best_metric, augmentation)

    # ---- rates of a step ----

    def lr_multiplier(self, step: int) -> float:
        """Return what the schedule makes of every learning rate at a step, counted from 1."""
        config, counted = self.config, step - 1 + self.config.first_lr_step
        return lr_multiplier(counted, self.last_step, config.lr_warmup_steps, config.lr_min_ratio)

    @property
    def lr_scale(self) -> float:
        """Return the factor of the learning rate for this global batch size (lr_scaling)."""
        config = self.config
        return batch_scale(config.lr_scaling, config.global_batch_size, config.lr_scaling_reference)

    def ema_rate(self, step: int) -> float:
        """Return the rate of the moving average: 0, a copy of the weights, until ema_start."""
        return self.config.ema_rate if step / self.last_step > self.config.ema_start else 0.0

    @property
    def kind(self) -> Kind:
        """What differs between puzzles and text."""
        return kind_of_arch(self.config.arch)

    # ---- what is due after a step ----

    def log_due(self, step: int) -> bool:
        return step == 1 or step % self.config.log_interval == 0

    def evaluation_due(self, step: int) -> bool:
        """Return whether the step is the last, or the first after an interval."""
        config, sampler = self.config, self.sampler
        return config.evaluates and (
            step >= self.last_step
            or self._interval_ends(config.eval_every_n_steps, step, step - 1)
            or self._interval_ends(config.eval_interval, sampler.epochs_done(step), sampler.epochs_done(step - 1))
        )

    def _interval_ends(self, interval: int | None, done: int, before: int) -> bool:
        return interval is not None and done // interval > max(before // interval, self.config.min_eval_interval)

    def checkpoint_due(self, step: int, *, evaluated: bool) -> bool:
        every = self.config.checkpoint_every_n_steps
        by_steps = isinstance(every, int) and step % every == 0
        return by_steps or (evaluated and self.config.checkpoint_every_eval) or step >= self.last_step

    def replicas_check_due(self, step: int) -> bool:
        every = self.config.check_replicas_every_n_steps
        return every is not None and step % every == 0

    # ---- the best evaluation ----

    def update_best(self, metrics: dict[str, float], progress: Progress) -> bool:
        """Note whether an evaluation is the best so far, which NaN never is, and return that."""
        value = metrics.get(self.best_metric, math.nan)
        if math.isnan(value) or not self._beats(value, progress.best):
            progress.evaluations_since_best += 1
            return False
        progress.best, progress.evaluations_since_best = value, 0
        return True

    def _beats(self, value: float, best: float | None) -> bool:
        if best is None or math.isnan(best):  # older versions stored NaN
            return True
        mode = self.config.best_mode
        if mode == "auto":
            _, _, name, *_ = self.best_metric.split("/")  # eval, the set, the metric, and of a text its task
            mode = "min" if name in _LOWER_IS_BETTER else "max"
        return value < best if mode == "min" else value > best

    def out_of_patience(self, progress: Progress) -> bool:
        patience = self.config.early_stop_patience
        return patience is not None and progress.evaluations_since_best >= patience

    def is_finished(self, progress: Progress) -> bool:
        """Return whether nothing is left to do, not even an evaluation that a stop interrupted."""
        ended = progress.step >= self.last_step or self.out_of_patience(progress)
        return ended and progress.pending_row is None


def full_best_metric(config: PretrainConfig, data: Data, evaluators: Evaluators) -> str:
    """Return the metric that `best` follows, with its set. It is empty if the run follows none."""
    if config.best_metric is None or data.test is None:
        return ""
    sets = list(data.test.num_examples(None))
    metrics, more = kind_of_arch(config.arch).eval_metrics(config, data.test, evaluators)
    name = config.best_metric
    if name == "auto":
        name = "exact_accuracy" if "exact_accuracy" in metrics else "loss"
    if "/" not in name:
        name = f"eval/{sets[0]}/{name}"
    if name not in [f"eval/{each}/{metric}" for each in sets for metric in (*metrics, *more)]:
        possible = ", ".join(f"eval/{each}/{metric}" for each in sets for metric in metrics)
        raise UserError(f"best_metric={config.best_metric} is no metric of this data; take one of {possible}")
    return name


def online_augmentation(config: PretrainConfig, data: Data, world: World) -> OnlineAugmentation | None:
    """Return the augmentation of this rank's slots that the config asks for; None for none."""
    if config.augment == "none" or not isinstance(data.train, Split):
        return None
    return OnlineAugmentation(
        data.train,
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        slots=world.slice_of(config.global_batch_size),
        most_clues=config.augment_clues,
    )
