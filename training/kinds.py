"""The table of kinds: everything that differs between models of puzzles and models of text.

What trains, evaluates and describes a model asks the kind of its architecture, and never asks which
kind it is.
"""
# B = slots of this rank

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from dataset.evaluators import NO_EVALUATORS, Evaluators, training_evaluators
from dataset.loader import TrainLoader
from dataset.online import OnlineAugmentation
from dataset.pictures import board_of, draw_answers
from dataset.sampler import Sampler
from dataset.schema import IGNORE_LABEL, Split, SplitName, check_contents, open_datasets, open_split
from dataset.tasks import task_of_set, task_of_shape
from dataset.tasks.arc import ArcTask
from dataset.text.sampler import FileOrderSampler, ShuffledSampler, TextSampler
from dataset.text.schema import TextSplit, check_text_contents, open_text_split, require_same_tokens
from models import ARCHS, ArchConfig
from models.act import ActSettings, draw_min_halt_steps, draw_random_halts, draw_seeds, empty_batch, initial_carry
from models.base import CommonConfig, RecursiveModel
from models.carry import Carry
from models.depth import Depth
from models.losses import ACT_SUMS
from models.metric_sums import EVAL_METRICS
from models.objective import SumsSpec
from models.text.config import LONGEST_RUN, CallCounts
from models.text.losses import TEXT_SUMS
from models.text.model import TextModel
from models.text.objective import TextBatch, TextRow, TextSettings
from models.text.packing import Packing
from training.config import PretrainConfig
from training.data import VOCAB_MULTIPLE, Sizes, TextSizes, require_same_sizes, with_tokens_of
from training.evaluation import AnswerSample, EvalOptions, evaluate
from training.evaluation_text import TextEvalOptions, TextSample, evaluate_text, text_eval_metrics
from training.laps import Interrupts
from training.text_loader import TextLoader
from utils.checkpoint.format import Progress
from utils.config import Container, name_of
from utils.config_files import CONFIG_DIR
from utils.errors import UserError
from utils.metrics import Picture
from utils.ranks.world import World

_LONGEST_QUESTION = 144  # cells of a puzzle on a command line
_NUM_TEXTS = 8  # of which an evaluation of text writes the answers

M = TypeVar("M", RecursiveModel, TextModel)
S = TypeVar("S", Split, TextSplit)
Z = TypeVar("Z", Sizes, TextSizes)
P = TypeVar("P", Sampler, TextSampler)
Loader = TrainLoader | TextLoader
Drawn = OnlineAugmentation | None


@dataclass(frozen=True)
class Asked:
    """What the evaluation of a step of a run is about.

    Attributes:
        num_pictures: how many answers to draw.
        say: takes a line for the log.
    """

    config: PretrainConfig
    step: int
    world: World
    evaluators: Evaluators
    num_pictures: int
    interrupts: Interrupts
    say: Callable[[str], None]

    @property
    def batch_size(self) -> int:
        return self.config.eval_batch_size or self.config.global_batch_size


Evaluated = tuple[dict[str, float] | None, list[Picture]]
"""The metrics, None if a stop interrupted the evaluation; and pictures of some answers."""


class Kind(ABC, Generic[M, S, Z, P]):
    """What a kind of model reads, and how it is trained and evaluated.

    Attributes:
        name: what the data are, as `kind` of an architecture has it.
        unit: what global_batch_size counts.
        sums: what a training step sums up.
        sizes: the sizes of data for which a model is built.
        sizes_of: the splits that say them, the first that is there.
        keys: the keys of config/<page>.yaml that only this kind of model reads.
        archs: some architectures, for messages.
        batch_size: of an evaluation of a file of weights, which names none.
        needed_sizes: the sizes that are typed for --dry-run without data, with examples.
    """

    name: ClassVar[str]
    unit: ClassVar[str]
    sums: ClassVar[SumsSpec]
    sizes: ClassVar[type[Any]]
    sizes_of: ClassVar[tuple[SplitName, ...]]
    keys: ClassVar[Mapping[str, tuple[str, ...]]]
    archs: ClassVar[str]
    batch_size: ClassVar[int]
    needed_sizes: ClassVar[Mapping[str, int]]

    # ---- data: each raises a UserError where they are missing, damaged or others ----

    @abstractmethod
    def open(self, data_path: str, name: SplitName) -> S:
        """Open a split of a dataset by itself."""

    @abstractmethod
    def open_all(self, arch: ArchConfig, paths: Sequence[str], name: SplitName, numbered_by: Sequence[str]) -> S:
        """Open a split of some datasets, whose puzzles the datasets trained on number."""

    @abstractmethod
    def check(self, split: S) -> str:
        """Read the contents once, check them, and return their fingerprint."""

    @abstractmethod
    def require_fit(self, config: PretrainConfig, train: S, split: S) -> None:
        """Check that a model that trains on one split can read the other split."""

    @abstractmethod
    def sizes_on(self, arch: ArchConfig, sizes: Z, split: S, trained_on: str) -> Z:
        """Return the sizes of a trained model for a split, which it must be able to read.

        Args:
            trained_on: names the training data in messages.
        """

    @abstractmethod
    def typed_sizes(self, config: PretrainConfig, typed: Mapping[str, int], of_data: Z | None) -> Z:
        """Return the sizes of a dry run: those that were typed, and for the others those of data.

        Args:
            of_data: None: all of `needed_sizes` were typed.
        """

    # ---- training ----

    @abstractmethod
    def size_of_epoch(self, train: S) -> float:
        """Return about how many units of the global batch an epoch has."""

    @abstractmethod
    def sampler(self, config: PretrainConfig, train: S, progress: Progress) -> P:
        """Return what decides about the data of each step, from this progress on."""

    @abstractmethod
    def why_no_step(self, config: PretrainConfig, sampler: P) -> str:
        """Say why the data do not fill one global batch, and what to change."""

    @abstractmethod
    def loader(self, config: PretrainConfig, train: S, sampler: P, drawn: Drawn, world: World) -> Loader:
        """Return what reads this rank's part of each batch."""

    @abstractmethod
    def settings(self, config: PretrainConfig, step: int, last_step: int, world: World) -> ActSettings | TextSettings:
        """Return what the objective of the model needs to know at a step."""

    @abstractmethod
    def description(self, config: PretrainConfig, train: S, sampler: P, model: M) -> tuple[str, str]:
        """Say in words what the data of a run are, and what a step takes of them."""

    @abstractmethod
    def question(self, split: S) -> str:
        """Return what solve.py may be asked about data like these, as key=value."""

    # ---- estimates, without data ----

    @abstractmethod
    def example_step(
        self, model: M, config: PretrainConfig, sizes: Z, num_slots: int, device: torch.device
    ) -> tuple[Any, Any, Any]:
        """Return carry, batch and settings, which `Layout.forward_backward` takes.

        Args:
            num_slots: slots of puzzles, or rows of text.
        """

    @abstractmethod
    def usual_depth(self, config: PretrainConfig) -> Depth | CallCounts:
        """Return the depth of a step when all warm-ups are over."""

    @abstractmethod
    def parts_of_batch(self, config: PretrainConfig, sizes: Z) -> dict[str, int]:
        """Return, in words, by what the operations of a step are divided."""

    # ---- evaluation ----

    def evaluators(self, config: PretrainConfig, test: S) -> Evaluators:
        """Return what else to find out about the answers in a run."""
        return NO_EVALUATORS

    @abstractmethod
    def eval_metrics(self, config: PretrainConfig, test: S, evaluators: Evaluators) -> tuple[list[str], list[str]]:
        """Return the names of what evaluation measures, without the set: the main ones, others."""

    @abstractmethod
    def evaluate(self, asked: Asked, model: M, test: S) -> Evaluated:
        """Evaluate the test split at a step of a run. Every rank."""


class Puzzles(Kind[RecursiveModel, Split, Sizes, Sampler]):
    name, unit, sums, sizes, archs, batch_size = "puzzles", "examples", ACT_SUMS, Sizes, "arch=hrm or arch=trm", 768
    sizes_of = ("test",)
    needed_sizes: ClassVar[Mapping[str, int]] = {"seq_len": 81, "vocab_size": 11, "num_puzzle_identifiers": 1001}
    keys: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "pretrain": (
            *("data_on", "augment", "augment_clues", "puzzle_emb_lr", "puzzle_emb_weight_decay", "puzzle_table"),
            *("freeze_weights", "eval_adaptive", "eval_save_outputs", "evaluators"),
        ),
        "evaluate": (
            *("evaluators", "num_steps", "trajectories", "restarts", "noise", "seed", "tta", "adaptive", "vote_with"),
            *("plot", "save_outputs", "puzzle_table"),
        ),
        "solve": (
            *("num_steps", "trajectories", "restarts", "noise", "tta", "batch_size", "show", "color", "puzzle_table"),
        ),
    }

    def open(self, data_path: str, name: SplitName) -> Split:
        return open_split(data_path, name)

    def open_all(self, arch: ArchConfig, paths: Sequence[str], name: SplitName, numbered_by: Sequence[str]) -> Split:
        assert isinstance(arch, CommonConfig)
        return open_datasets(paths, name, numbered_by=numbered_by, any_size=arch.reads_boards_of_any_size)

    def check(self, split: Split) -> str:
        return check_contents(split)

    def require_fit(self, config: PretrainConfig, train: Split, split: Split) -> None:
        require_same_sizes(Sizes.of(train), split, config.puzzle_arch, " + ".join(config.train_paths))
        smoothing = config.puzzle_arch.loss.label_smoothing
        if smoothing and any(puzzle_set.corner is not None for puzzle_set in split.sets.values()):
            raise UserError(
                f"arch.loss.label_smoothing is {smoothing:g}, which would ask small boards for symbols that they "
                "lack; set it to 0"
            )

    def sizes_on(self, arch: ArchConfig, sizes: Sizes, split: Split, trained_on: str) -> Sizes:
        """As in the base class.

        A model that is free of sizes takes the sizes of the split. A model that is free of the
        number of tokens does if the split has as many kinds of tokens.
        """
        assert isinstance(arch, CommonConfig)
        of_split = Sizes.of(split)
        if arch.weights_fit(same_vocabulary=of_split.vocab_size == sizes.vocab_size):
            return of_split
        require_same_sizes(sizes, split, arch, trained_on)
        return sizes

    def typed_sizes(self, config: PretrainConfig, typed: Mapping[str, int], of_data: Sizes | None) -> Sizes:
        return Sizes(**typed) if of_data is None else replace(of_data, **typed)

    def size_of_epoch(self, train: Split) -> float:
        return train.metadata.total_groups * train.metadata.mean_puzzle_examples

    def sampler(self, config: PretrainConfig, train: Split, progress: Progress) -> Sampler:
        return Sampler(
            list(train.sets.values()),
            seed=config.seed,
            epochs=config.epochs,
            global_batch_size=config.global_batch_size,
            first_step=progress.step + 1,
            first_draw=progress.draws,
            repeat_first_batch=config.overfit_one_batch,
        )

    def why_no_step(self, config: PretrainConfig, sampler: Sampler) -> str:
        return (
            f"{config.epochs} epochs draw {sampler.num_draws} examples, which don't fill one global batch of "
            f"{config.global_batch_size}; raise epochs or lower global_batch_size"
        )

    def loader(self, config: PretrainConfig, train: Split, sampler: Sampler, drawn: Drawn, world: World) -> TrainLoader:
        return TrainLoader(train, sampler, world, augmentation=drawn, data_on=config.data_on)

    def settings(self, config: PretrainConfig, step: int, last_step: int, world: World) -> ActSettings:
        arch = config.puzzle_arch
        mine = world.slice_of(config.global_batch_size)
        seeds_B = draw_seeds(config.seed, step, config.global_batch_size)[mine] if arch.is_random else None
        return ActSettings(
            depth=arch.depth_at(step, last_step),
            loss=arch.loss,
            ignore_label=IGNORE_LABEL,
            global_batch_size=config.global_batch_size,
            min_halt_steps_B=draw_exploration(config, step, world),
            seeds_B=None if seeds_B is None else world.to_device(seeds_B),
        )

    def description(
        self, config: PretrainConfig, train: Split, sampler: Sampler, model: RecursiveModel
    ) -> tuple[str, str]:
        table = model.puzzle_embedding
        rows = f"{table.weight.numel():,} in the puzzle table" if table is not None else "no puzzle table"
        return f" and {rows}; {train.metadata.total_groups:,} groups", f"{config.global_batch_size} sequences"

    def question(self, split: Split) -> str:
        """As in the base class: the first example, if it is short and fills its board."""
        name, puzzles = next(iter(split.sets.items()))
        task, question_S = task_of_set(split, name), puzzles.inputs[0]
        plain = None if task is None else task.plain(question_S)
        if isinstance(plain, str) and len(question_S) <= _LONGEST_QUESTION and question_S.all():
            return f"puzzle={plain}"
        return "task=TASK.json" if isinstance(task, ArcTask) else "puzzle=..."

    def example_step(
        self, model: RecursiveModel, config: PretrainConfig, sizes: Sizes, num_slots: int, device: torch.device
    ) -> tuple[Carry, dict[str, Tensor], ActSettings]:
        """As in the base class, with the depth of `arch.depth`."""
        arch, batch = config.puzzle_arch, empty_batch(num_slots, sizes.seq_len, device)
        seeds_B = torch.zeros(num_slots, dtype=torch.int64, device=device) if arch.is_random else None
        settings = ActSettings(arch.depth, arch.loss, IGNORE_LABEL, num_slots, min_halt_steps_B=None, seeds_B=seeds_B)
        return initial_carry(model, batch, training=True), batch, settings

    def usual_depth(self, config: PretrainConfig) -> Depth:
        return config.puzzle_arch.depth

    def parts_of_batch(self, config: PretrainConfig, sizes: Sizes) -> dict[str, int]:
        num_slots = config.global_batch_size
        return {"a segment of a slot": num_slots, "each of its tokens": num_slots * sizes.seq_len}

    def evaluators(self, config: PretrainConfig, test: Split) -> Evaluators:
        return training_evaluators(config.evaluators, test)

    def eval_metrics(self, config: PretrainConfig, test: Split, evaluators: Evaluators) -> tuple[list[str], list[str]]:
        at_steps = [f"exact_accuracy_at_step/{n}" for n in range(1, config.puzzle_arch.halt_max_steps + 1)]
        return [*EVAL_METRICS, *evaluators.metrics], at_steps

    def evaluate(self, asked: Asked, model: RecursiveModel, test: Split) -> Evaluated:
        config, sample = asked.config, AnswerSample(asked.num_pictures) if asked.num_pictures else None
        options = EvalOptions(
            asked.batch_size,
            adaptive=config.eval_adaptive,
            max_examples=config.eval_max_examples,
            save_outputs=config.eval_save_outputs,
            save_to=config.run_path / "eval_outputs" / f"step_{asked.step:08d}",
            sample=sample,
        )
        metrics = evaluate(model, test, asked.world, options, evaluators=asked.evaluators, interrupts=asked.interrupts)
        return metrics, pictures_of(sample, test) if sample is not None and metrics is not None else []


class Texts(Kind[TextModel, TextSplit, TextSizes, TextSampler]):
    name, unit, sums, sizes, archs = "text", "tokens", TEXT_SUMS, TextSizes, "arch=gpt or arch=hrm_text"
    sizes_of, batch_size = ("train", "test"), 16384
    needed_sizes: ClassVar[Mapping[str, int]] = {"vocab_size": 32000}
    keys: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "pretrain": ("rows_per_step", "target_only"),
        "evaluate": (),
        "solve": ("prompt_form", "max_new_tokens", "temperature", "top_k", "top_p", "stop", "stop_tokens"),
    }

    def open(self, data_path: str, name: SplitName) -> TextSplit:
        return open_text_split(data_path, name)

    def open_all(
        self, arch: ArchConfig, paths: Sequence[str], name: SplitName, numbered_by: Sequence[str]
    ) -> TextSplit:
        if len(paths) > 1:
            raise UserError(
                f"arch={arch.name} reads one folder of text, but {len(paths)} are given ({', '.join(paths)}); build "
                "one dataset of all sources"
            )
        return self.open(paths[0], name)

    def check(self, split: TextSplit) -> str:
        return check_text_contents(split)

    def require_fit(self, config: PretrainConfig, train: TextSplit, split: TextSplit) -> None:
        require_same_tokens(train, split)

    def sizes_on(self, arch: ArchConfig, sizes: TextSizes, split: TextSplit, trained_on: str) -> TextSizes:
        with_tokens_of(sizes, TextSizes.of(split), split.path, trained_on)
        return sizes

    def typed_sizes(self, config: PretrainConfig, typed: Mapping[str, int], of_data: TextSizes | None) -> TextSizes:
        """As in the base class. Without data and seq_len, a sequence fills a row."""
        if "num_puzzle_identifiers" in typed:
            raise UserError(
                f"num_puzzle_identifiers={typed['num_puzzle_identifiers']}: text has no puzzles; leave it out"
            )
        row = config.units_per_slot
        of_data = of_data or TextSizes(0, row, row, tokenizer="unknown", special_tokens={})
        length = typed.get("seq_len", of_data.mean_context)
        if length > row:
            raise UserError(
                f"seq_len={length:,} does not fit into a row of {row:,} tokens; raise global_batch_size, or lower "
                "rows_per_step"
            )
        vocab_size = -(-typed.get("vocab_size", of_data.vocab_size) // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        return replace(of_data, vocab_size=vocab_size, mean_context=length)

    def size_of_epoch(self, train: TextSplit) -> float:
        return train.metadata.num_tokens

    def sampler(self, config: PretrainConfig, train: TextSplit, progress: Progress) -> TextSampler:
        rows_per_step = config.rows_per_step
        capacity = config.global_batch_size // rows_per_step
        if not train.is_published_form:
            return ShuffledSampler(
                train,
                seed=config.seed,
                epochs=config.epochs,
                capacity=capacity,
                rows_per_step=rows_per_step,
                first_step=progress.step + 1,
                first_row=progress.draws,
                repeat_first_batch=config.overfit_one_batch,
            )
        if progress.draws != progress.step * rows_per_step:
            raise UserError(
                f"{train.path} has its own order, in which a run can't go on with rows_per_step={rows_per_step}; give "
                "the number of before"
            )
        return FileOrderSampler(
            train,
            epochs=config.epochs,
            capacity=capacity,
            rows_per_step=rows_per_step,
            drop_last_batch=True,
            repeat_first_batch=config.overfit_one_batch,
        )

    def why_no_step(self, config: PretrainConfig, sampler: TextSampler) -> str:
        return (
            f"{config.epochs} epochs of {sampler.split.path} don't fill one global batch of {config.global_batch_size} "
            f"tokens in {config.rows_per_step} rows; raise epochs, or lower global_batch_size and rows_per_step"
        )

    def loader(
        self, config: PretrainConfig, train: TextSplit, sampler: TextSampler, drawn: Drawn, world: World
    ) -> TextLoader:
        return TextLoader(
            sampler,
            world,
            num_parts=config.parallel.num_microbatches(config.grad_accumulation),
            target_only=config.target_only,
            kernel=config.text_arch.attention_kernel,
        )

    def settings(self, config: PretrainConfig, step: int, last_step: int, world: World) -> TextSettings:
        return TextSettings(config.text_arch.grad_calls_at(step, last_step), IGNORE_LABEL)

    def description(
        self, config: PretrainConfig, train: TextSplit, sampler: TextSampler, model: TextModel
    ) -> tuple[str, str]:
        samples = f"{train.metadata.num_samples:,} samples of {train.metadata.num_tokens:,} tokens"
        rows = f"{config.global_batch_size:,} tokens in {config.rows_per_step} rows"
        return f"; {samples}", f"{rows}, {100 * sampler.waste:.1f} % padding"

    def question(self, split: TextSplit) -> str:
        return "prompt=..."

    def example_step(
        self, model: TextModel, config: PretrainConfig, sizes: TextSizes, num_slots: int, device: torch.device
    ) -> tuple[None, TextBatch, TextSettings]:
        """As in the base class, with sequences of the mean length, half of each an instruction."""
        num_tokens = num_slots * config.units_per_slot
        length = min(max(2, sizes.mean_context), num_tokens)
        lengths = [length] * (num_tokens // length) + [num_tokens % length] * (num_tokens % length > 0)
        kernel = config.text_arch.attention_kernel
        packing = Packing([(-(-n // 2), n // 2) for n in lengths], num_tokens, kernel=kernel)
        tokens_N = torch.zeros(num_tokens, dtype=torch.int32)
        row = TextRow(tokens_N, tokens_N.clone(), tokens_N.clone(), packing)
        batch = TextBatch([row.apply(lambda tensor: tensor.to(device))], num_tokens)
        return None, batch, TextSettings(self.usual_depth(config), IGNORE_LABEL)

    def usual_depth(self, config: PretrainConfig) -> CallCounts:
        return config.text_arch.grad_calls_at(LONGEST_RUN, LONGEST_RUN)

    def parts_of_batch(self, config: PretrainConfig, sizes: TextSizes) -> dict[str, int]:
        return {"a token": config.global_batch_size}

    def eval_metrics(
        self, config: PretrainConfig, test: TextSplit, evaluators: Evaluators
    ) -> tuple[list[str], list[str]]:
        return text_eval_metrics(test, config.eval_max_examples), []

    def evaluate(self, asked: Asked, model: TextModel, test: TextSplit) -> Evaluated:
        """As in the base class. A few answers are written into the folder of the run."""
        config, sample = asked.config, TextSample(_NUM_TEXTS)
        options = TextEvalOptions(asked.batch_size, config.target_only, config.eval_max_examples, sample)
        metrics = evaluate_text(model, test, asked.world, options, interrupts=asked.interrupts)
        if metrics is not None and asked.world.is_main:
            try:
                sample.write(config.run_path, asked.step)
            except OSError as error:  # the run goes on without them
                asked.say(f"the answers of step {asked.step} can't be written ({error.strerror})")
        return metrics, []


KINDS: dict[str, Kind[Any, Any, Any, Any]] = {"puzzles": Puzzles(), "text": Texts()}


def kind_of_arch(arch: ArchConfig) -> Kind[Any, Any, Any, Any]:
    """Return the kind of an architecture."""
    return KINDS[arch.kind]


def require_keys_of(kind: str, values: Mapping[str, Any], page: str, reader: str) -> None:
    """Check that no key is changed that only another kind of model reads.

    Args:
        values: of the keys of config/<page>.yaml, which holds their defaults.
        reader: the model, as the message names it.

    Raises:
        UserError: A key of another kind differs from its default.
    """
    defaults = OmegaConf.load(CONFIG_DIR / f"{page}.yaml")
    assert isinstance(defaults, DictConfig)
    for other in KINDS.values():
        changed = [key for key in other.keys[page] if values[key] != defaults[key]]
        if other.name != kind and changed:
            raise UserError(
                f"{changed[0]}={values[changed[0]]} is for {other.name}, but {reader} reads {kind}; leave it out"
            )


def require_keys_of_arch(values: Container) -> None:
    """Check that a config of pretrain.py changes no key that its architecture does not read.

    Raises:
        UserError: A key that is for puzzles differs from its default with an architecture of text,
            or the other way round.
    """
    name = values["arch"].get("name")
    kinds = {name_of(arch): arch.kind for arch in ARCHS}
    if name not in kinds:
        return  # the validation of the config says what is wrong
    require_keys_of(kinds[name], values, "pretrain", f"arch={name}")
    if kinds[name] != "puzzles" and values["parallel"]["puzzle_table"] == "sharded":
        raise UserError(f"parallel.puzzle_table=sharded is for puzzles, but arch={name} reads text; leave it out")


def draw_exploration(config: PretrainConfig, step: int, world: World) -> Tensor:
    """Return the minimal halting step of each slot of this rank, drawn for this step; (B,)."""
    arch = config.puzzle_arch
    draw = draw_random_halts if arch.halts_at_random else draw_min_halt_steps
    drawn = draw(config.seed, step, config.global_batch_size, arch.halt_exploration_prob, arch.halt_max_steps)
    return world.to_device(drawn[world.slice_of(config.global_batch_size)])


def pictures_of(sample: AnswerSample, split: Split) -> list[Picture]:
    """Return a picture for each answer of the sample, in the order of rows."""
    if sample.set_name is None:
        return []
    seq_len, vocab_size = split.shape_of(sample.set_name)
    board = board_of(task_of_shape(seq_len, vocab_size), seq_len)
    pictures = []
    for answer in sorted(sample.answers, key=lambda answer: answer.row):
        title = f"row {answer.row} of {sample.set_name}"
        tokens = (answer.question_S, answer.label_S, answer.answer_S[None])
        pictures.append(Picture(title, partial(draw_answers, board, *tokens, title)))
    return pictures
