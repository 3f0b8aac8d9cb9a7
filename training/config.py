"""The config of a training run."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dataset.evaluators import EvaluatorName
from dataset.loader import DataOn
from models import ArchConfig
from models.base import CommonConfig
from models.parallel import ParallelConfig
from models.text.config import TextConfig
from optim.build import OptimConfig
from optim.schedule import BatchScaling
from records.metrics import WandbConfig
from sharing.published import PuzzleTable
from training.run_config import RunConfig
from training.saved_outputs import SavedOutput
from training.synonyms import aliases
from utils.config import Bool, Float, Int, page
from utils.perf.trace import ProfileConfig
from utils.ranks.config import DeviceName, DistConfig

Positive = Field(gt=0)
NotNegative = Field(ge=0)
_MOST_SLOTS = 10**6  # slots take memory, and the config may be forged


# What the ranks share of a step: the key that counts it, and what it is.
_SLOTS = {"puzzles": ("global_batch_size", "slots"), "text": ("rows_per_step", "rows")}


@page("pretrain", bare="data_path", aliases=aliases(batch_size="eval_batch_size"))
class PretrainConfig(RunConfig):
    """All keys of a run. config/pretrain.yaml holds the defaults and says what each key means."""

    arch: ArchConfig
    optim: OptimConfig
    parallel: ParallelConfig

    data_paths_test: list[str]
    data_on: DataOn
    augment: Literal["none", "online"]
    augment_clues: Float = Field(ge=0, lt=1)
    global_batch_size: Int = Positive
    rows_per_step: Int = Positive
    target_only: Bool
    grad_accumulation: Int = Positive
    epochs: Int = Field(gt=0, le=10**7)  # the sampler keeps the end of each epoch in memory
    max_steps: Int | None = Field(gt=0)
    seed: Int = Field(ge=0, lt=2**63)
    overfit_one_batch: Bool

    lr: Float = NotNegative
    lr_min_ratio: Float = Field(ge=0, le=1)
    lr_warmup_steps: Int = NotNegative
    lr_counts_from: Literal["auto", 0, 1]
    lr_scaling: BatchScaling
    lr_scaling_reference: Int = Positive
    beta1: Float = Field(ge=0, lt=1)
    beta2: Float = Field(ge=0, lt=1)
    weight_decay: Float = NotNegative
    puzzle_emb_lr: Float = NotNegative
    puzzle_emb_weight_decay: Float = NotNegative
    grad_clip: Float | None = Field(gt=0)
    ema: Bool
    ema_rate: Float = Field(ge=0, lt=1)
    ema_start: Float = Field(ge=0, lt=1)

    init_from: str | None = Field(min_length=1)
    load_checkpoint: str | None = Field(min_length=1)
    puzzle_table: PuzzleTable | None
    freeze: Literal["none", "blocks", "puzzle_table"]
    freeze_weights: Bool

    eval_interval: Int | None = Field(gt=0)
    eval_every_n_steps: Int | None = Field(gt=0)
    min_eval_interval: Int = NotNegative
    eval_batch_size: Int | None = Field(gt=0)
    eval_max_examples: Int | None = Field(gt=0)
    eval_adaptive: Bool
    eval_max_share: Float | None = Field(gt=0, lt=1)
    eval_save_outputs: list[SavedOutput]
    evaluators: list[EvaluatorName] | None
    early_stop_patience: Int | None = Field(gt=0)

    on_nonfinite: Literal["stop", "rewind"]
    max_rewinds: Int = Positive
    loss_spike: Float | None = Field(gt=1)
    check_replicas_every_n_steps: Int | None = Field(gt=0)
    on_save_error: Literal["stop", "continue"]
    max_failed_saves: Int = Positive

    checkpoint_every_eval: Bool
    checkpoint_every_n_steps: Literal["auto"] | Annotated[Int, Positive] | None
    checkpoint_file_gb: Float = Field(gt=0)
    keep_last_k: Int | None = Field(gt=0)
    best_metric: str | None
    best_mode: Literal["auto", "max", "min"]

    log_interval: Int = Positive
    wandb: WandbConfig
    tensorboard: Bool
    trackio: Bool
    profile: ProfileConfig
    perf_every_n_steps: Int | None = Field(gt=0)
    perf_max_share: Float | None = Field(gt=0, lt=1)

    device: DeviceName
    compile: Literal["auto", "segment"] | Bool
    cuda_graph: Literal["auto"] | Bool
    swiglu_kernel: Literal["auto"] | Bool
    deterministic: Bool
    dist: DistConfig

    @model_validator(mode="after")
    def _keys_fit_together(self) -> "PretrainConfig":
        has_table = isinstance(self.arch, CommonConfig) and self.arch.puzzle_emb_ndim > 0
        frozen = "freeze_weights" if self.freeze_weights else f"freeze={self.freeze}"
        if self.freeze_weights and self.freeze != "none":
            raise ValueError(f"freeze_weights and freeze={self.freeze} exclude each other; give one of them")
        if (self.freeze_weights or self.freeze == "puzzle_table") and not has_table:
            raise ValueError(
                f"{frozen} is about the puzzle table, but arch.puzzle_emb_ndim is 0: there is none; leave it out"
            )
        if self.overfit_one_batch and self.augment != "none":
            raise ValueError(
                f"overfit_one_batch repeats a batch, and augment={self.augment} varies it; give augment=none"
            )
        if self.augment_clues and self.augment == "none":
            raise ValueError(
                f"augment_clues={self.augment_clues} is part of augment=online; give that too, or augment_clues=0"
            )
        if self.init_from and self.load_checkpoint:
            raise ValueError(
                f"init_from={self.init_from} and load_checkpoint={self.load_checkpoint} mean the same; give one"
            )
        if self.load_checkpoint == "latest":
            raise ValueError("load_checkpoint=latest: give resume=auto and the checkpoint_path of the run instead")
        if self.puzzle_table and not self.initial_weights:
            raise ValueError(
                f"puzzle_table={self.puzzle_table} says what becomes of the table of init_from; give that too"
            )
        if self.checkpoint_every_n_steps == "auto" and self.keep_last_k is None:
            raise ValueError("checkpoint_every_n_steps=auto saves often; give keep_last_k as well, such as 3")
        if self.early_stop_patience and not (self.best_metric and self.evaluates):
            raise ValueError(
                f"early_stop_patience={self.early_stop_patience} counts evaluations without a better best_metric; "
                "give that, and eval_interval or eval_every_n_steps"
            )
        if self.num_slots > _MOST_SLOTS:
            raise ValueError(f"{self.slots_key[0]} is {self.num_slots}, and must be at most {_MOST_SLOTS}")
        if self.global_batch_size % self.num_slots:
            capacity = -(-self.global_batch_size // self.num_slots)
            raise ValueError(
                f"global_batch_size={self.global_batch_size} tokens can't be cut into rows_per_step={self.num_slots} "
                f"equal rows; take {capacity * self.num_slots}, or another number of rows"
            )
        return self

    @property
    def puzzle_arch(self) -> CommonConfig:
        """The architecture, in code that knows that it is one of puzzles."""
        assert isinstance(self.arch, CommonConfig)
        return self.arch

    @property
    def text_arch(self) -> TextConfig:
        """The architecture, in code that knows that it is one of text."""
        assert isinstance(self.arch, TextConfig)
        return self.arch

    @property
    def num_slots(self) -> int:
        """What the ranks share of a step: slots of puzzles, or rows of text."""
        num: int = getattr(self, self.slots_key[0])
        return num

    @property
    def units_per_slot(self) -> int:
        """The units of global_batch_size in a slot: one example, or the tokens of a row of text."""
        return self.global_batch_size // self.num_slots

    @property
    def slots_key(self) -> tuple[str, str]:
        """The key that says how many slots or rows a step has, and what they are."""
        return _SLOTS[self.arch.kind]

    @property
    def first_lr_step(self) -> int:
        """The number that the schedule of the learning rate gives to the first step: 0 or 1."""
        if self.lr_counts_from == "auto":
            return 0 if self.arch.name == "urm" else 1
        return self.lr_counts_from

    @property
    def initial_weights(self) -> str | None:
        given = self.init_from or self.load_checkpoint
        return self.located(given) if given else None

    @property
    def test_paths(self) -> list[str]:
        return [self.located(path) for path in self.data_paths_test] or self.train_paths

    @property
    def evaluates(self) -> bool:
        return self.eval_interval is not None or self.eval_every_n_steps is not None
