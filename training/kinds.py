"""The table of kinds: everything that differs between models of puzzles and models of text.

What trains, evaluates and describes a model asks the kind of its architecture, and never asks which
kind it is.
"""
# B = slots of this rank

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from dataset.evaluators import NO_EVALUATORS, Evaluators, training_evaluators
from dataset.loader import TrainLoader
from dataset.online import OnlineAugmentation
from dataset.sampler import Sampler
from dataset.schema import Split, SplitName, check_contents, open_datasets, open_split
from dataset.tasks import task_of_set
from dataset.tasks.arc import ArcTask
from dataset.text.sampler import FileOrderSampler, ShuffledSampler, TextSampler
from dataset.text.schema import TextSplit, check_text_contents, open_text_split, require_same_tokens
from models import ARCHS, ArchConfig
from models.act import (
    ActSettings,
    draw_min_halt_steps,
    draw_own_answers,
    draw_random_halts,
    draw_seeds,
    empty_batch,
    initial_carry,
)
from models.base import CommonConfig, RecursiveModel
from models.carry import Carry
from models.depth import Depth
from models.losses import ACT_SUMS
from models.metric_sums import EVAL_METRICS
from models.objective import SumsSpec
from models.text.config import LONGEST_RUN, CallCounts
from models.text.losses import TEXT_SUMS
from models.text.model import TextModel
from models.text.objective import TextBatch, TextRow
from models.text.packing import Packing
from records.checkpoint.format import Progress
from training.config import PretrainConfig
from training.data import VOCAB_MULTIPLE, Sizes, TextSizes, require_same_sizes, with_tokens_of
from training.evaluation import EvalOptions, evaluate
from training.evaluation_text import evaluate_text, text_eval_metrics
from training.laps import Interrupts
from training.samples import AnswerSample, TextSample
from training.text_loader import TextLoader
from utils.config import Container, name_of
from utils.config_files import CONFIG_DIR
from utils.errors import UserError
from utils.ranks.world import World

_LONGEST_QUESTION = 144  # cells of a puzzle on a command line


@dataclass
class Kind:
    """What a kind of model reads, and how it is trained and evaluated.

    Whatever takes data raises UserError if they are missing, damaged or of other sizes.
    """

    name: str  # as `kind` of an architecture has it
    unit: str  # what global_batch_size counts
    archs: str  # some architectures, for messages
    batch_size: int  # of an evaluation of a file of weights, which names none
    keys: Mapping[str, tuple[str, ...]]  # those of config/<page>.yaml that only this kind reads

    # Open a split by itself, or a split of some datasets. The last paths number its puzzles.
    open: Callable[[str, SplitName], Any]
    open_all: Callable[[ArchConfig, Sequence[str], SplitName, Sequence[str]], Any]
    check: Callable[[Any], str]  # read the contents once, and return their fingerprint
    require_fit: Callable[[PretrainConfig, Any, Any], None]  # of a model of the first split to the second

    sizes: type[Any]  # of data, for which a model is built
    # The sizes of a trained model for a split, which it must be able to read. The text names the
    # training data.
    sizes_on: Callable[[ArchConfig, Any, Any, str], Any]
    needed_sizes: Mapping[str, int]  # those that are typed for --dry-run without data, with examples
    # The sizes of a dry run: typed, and for the others those of data. None: all needed are typed.
    typed_sizes: Callable[[PretrainConfig, Mapping[str, int], Any], Any]

    sums: SumsSpec  # of a training step
    size_of_epoch: Callable[[Any], float]  # about how many units of the global batch
    # What decides about the data of each step from a progress on, and what reads a rank's part.
    sampler: Callable[[PretrainConfig, Any, Progress], Sampler | TextSampler]
    loader: Callable[[PretrainConfig, Any, Any, OnlineAugmentation | None, World], TrainLoader | TextLoader]
    # What the objective of the model needs to know at a step, of so many.
    settings: Callable[[PretrainConfig, int, int, World], ActSettings | CallCounts]
    # In words: what the data of a run are, and what a step takes of them.
    description: Callable[[PretrainConfig, Any, Any, Any], tuple[str, str]]
    question: Callable[[Any], str]  # for solve.py about such data, as key=value

    # Carry, batch and settings of so many slots (rows of text), for `Layout.forward_backward`.
    example_step: Callable[[Any, PretrainConfig, Any, int, torch.device], tuple[Any, Any, Any]]
    usual_depth: Callable[[PretrainConfig], Depth | CallCounts]  # when all warm-ups are over
    parts_of_batch: Callable[[PretrainConfig, Any], dict[str, int]]  # in words, and their number

    evaluators: Callable[[PretrainConfig, Any], Evaluators]  # of the test split
    # The names of what evaluation measures, without the set: the main ones, others.
    eval_metrics: Callable[[PretrainConfig, Any, Evaluators], tuple[list[str], list[str]]]
    # Every rank. A sample takes some answers, of which so many pictures are wanted.
    evaluate: Callable[[Any, Any, World, EvalOptions, Evaluators, Interrupts, Any], dict[str, float] | None]
    sample: Callable[[int], Any]


# ---- puzzles -----------------------------------------------------------------------------------


def _open_puzzles(arch: ArchConfig, paths: Sequence[str], name: SplitName, numbered_by: Sequence[str]) -> Split:
    assert isinstance(arch, CommonConfig)
    return open_datasets(paths, name, numbered_by=numbered_by, any_size=arch.reads_boards_of_any_size)


def _require_fit_of_puzzles(config: PretrainConfig, train: Split, split: Split) -> None:
    require_same_sizes(Sizes.of(train), split, config.puzzle_arch, " + ".join(config.train_paths))
    smoothing = config.puzzle_arch.loss.label_smoothing
    if smoothing and any(puzzle_set.corner is not None for puzzle_set in split.sets.values()):
        raise UserError(
            f"arch.loss.label_smoothing is {smoothing:g}, which would ask small boards for symbols that they lack; "
            "set it to 0"
        )


def _sizes_on_puzzles(arch: ArchConfig, sizes: Sizes, split: Split, trained_on: str) -> Sizes:
    # A model that is free of the number of tokens reads splits with as many kinds of tokens.
    assert isinstance(arch, CommonConfig)
    of_split = Sizes.of(split)
    if arch.weights_fit(same_vocabulary=of_split.vocab_size == sizes.vocab_size):
        return of_split
    require_same_sizes(sizes, split, arch, trained_on)
    return sizes


def _sampler_of_puzzles(config: PretrainConfig, train: Split, progress: Progress) -> Sampler:
    return Sampler(
        list(train.sets.values()),
        seed=config.seed,
        epochs=config.epochs,
        global_batch_size=config.global_batch_size,
        first_step=progress.step + 1,
        first_draw=progress.draws,
        repeat_first_batch=config.overfit_one_batch,
    )


def _settings_of_puzzles(config: PretrainConfig, step: int, last_step: int, world: World) -> ActSettings:
    arch, batch_size = config.puzzle_arch, config.global_batch_size
    mine = world.slice_of(batch_size)
    draw = draw_random_halts if arch.halts_at_random else draw_min_halt_steps
    min_halt_steps = draw(config.seed, step, batch_size, arch.halt_exploration_prob, arch.halt_max_steps)
    seeds_B = world.to_device(draw_seeds(config.seed, step, batch_size)[mine]) if arch.takes_seeds else None
    own_answers_B = None
    if arch.noise == "annealed":
        own_answers = draw_own_answers(config.seed, step, batch_size, arch.pseudo_target_steps)
        own_answers_B = world.to_device(own_answers[mine])
    return ActSettings(
        depth=arch.depth_at(step, last_step),
        global_batch_size=batch_size,
        min_halt_steps_B=world.to_device(min_halt_steps[mine]),
        seeds_B=seeds_B,
        own_answers_B=own_answers_B,
    )


def _description_of_puzzles(
    config: PretrainConfig, train: Split, sampler: Sampler, model: RecursiveModel
) -> tuple[str, str]:
    table = model.puzzle_embedding
    rows = f"{table.weight.numel():,} in the puzzle table" if table is not None else "no puzzle table"
    return f" and {rows}; {train.metadata.total_groups:,} groups", f"{config.global_batch_size} sequences"


def _question_of_puzzles(split: Split) -> str:
    """Return the first example, if it is short and fills its board."""
    name, puzzles = next(iter(split.sets.items()))
    task, question_S = task_of_set(split, name), puzzles.inputs[0]
    plain = task and task.plain(question_S)
    if isinstance(plain, str) and len(question_S) <= _LONGEST_QUESTION and question_S.all():
        return f"puzzle={plain}"
    return "task=TASK.json" if isinstance(task, ArcTask) else "puzzle=..."


def _example_step_of_puzzles(
    model: RecursiveModel, config: PretrainConfig, sizes: Sizes, num_slots: int, device: torch.device
) -> tuple[Carry, dict[str, Tensor], ActSettings]:
    arch, batch = config.puzzle_arch, empty_batch(num_slots, sizes.seq_len, device)
    seeds_B = torch.zeros(num_slots, dtype=torch.int64, device=device) if arch.takes_seeds else None
    own_answers_B = torch.zeros(num_slots, dtype=torch.bool, device=device)
    settings = ActSettings(arch.depth, num_slots, seeds_B=seeds_B, own_answers_B=own_answers_B)
    return initial_carry(model, batch, training=True), batch, settings


def _eval_metrics_of_puzzles(
    config: PretrainConfig, test: Split, evaluators: Evaluators
) -> tuple[list[str], list[str]]:
    at_steps = [f"exact_accuracy_at_step/{n}" for n in range(1, config.puzzle_arch.halt_max_steps + 1)]
    return [*EVAL_METRICS, *evaluators.metrics], at_steps


PUZZLES = Kind(
    name="puzzles",
    unit="examples",
    archs="arch=hrm or arch=trm",
    batch_size=768,
    keys={
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
    },
    open=open_split,
    open_all=_open_puzzles,
    check=check_contents,
    require_fit=_require_fit_of_puzzles,
    sizes=Sizes,
    sizes_on=_sizes_on_puzzles,
    needed_sizes={"seq_len": 81, "vocab_size": 11, "num_puzzle_identifiers": 1001},
    typed_sizes=lambda config, typed, of_data: Sizes(**typed) if of_data is None else replace(of_data, **typed),
    sums=ACT_SUMS,
    size_of_epoch=lambda train: train.metadata.total_groups * train.metadata.mean_puzzle_examples,
    sampler=_sampler_of_puzzles,
    loader=lambda config, train, sampler, drawn, world: TrainLoader(
        train, sampler, world, augmentation=drawn, data_on=config.data_on
    ),
    settings=_settings_of_puzzles,
    description=_description_of_puzzles,
    question=_question_of_puzzles,
    example_step=_example_step_of_puzzles,
    usual_depth=lambda config: config.puzzle_arch.depth,
    parts_of_batch=lambda config, sizes: {
        "a segment of a slot": config.global_batch_size,
        "each of its tokens": config.global_batch_size * sizes.seq_len,
    },
    evaluators=lambda config, test: training_evaluators(config.evaluators, test),
    eval_metrics=_eval_metrics_of_puzzles,
    evaluate=evaluate,
    sample=AnswerSample,
)


# ---- text --------------------------------------------------------------------------------------


def _open_text(arch: ArchConfig, paths: Sequence[str], name: SplitName, numbered_by: Sequence[str]) -> TextSplit:
    if len(paths) > 1:
        raise UserError(
            f"arch={arch.name} reads one folder of text, but {len(paths)} are given ({', '.join(paths)}); build one "
            "dataset of all sources"
        )
    return open_text_split(paths[0], name)


def _sizes_on_text(arch: ArchConfig, sizes: TextSizes, split: TextSplit, trained_on: str) -> TextSizes:
    with_tokens_of(sizes, TextSizes.of(split), split.path, trained_on)
    return sizes


def _typed_sizes_of_text(config: PretrainConfig, typed: Mapping[str, int], of_data: TextSizes | None) -> TextSizes:
    """Without data and seq_len, a sequence fills a row."""
    if "num_puzzle_identifiers" in typed:
        raise UserError(f"num_puzzle_identifiers={typed['num_puzzle_identifiers']}: text has no puzzles; leave it out")
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


def _sampler_of_text(config: PretrainConfig, train: TextSplit, progress: Progress) -> TextSampler:
    rows_per_step = config.rows_per_step
    common: dict[str, Any] = {
        "epochs": config.epochs,
        "capacity": config.global_batch_size // rows_per_step,
        "rows_per_step": rows_per_step,
        "repeat_first_batch": config.overfit_one_batch,
    }
    if not train.is_published_form:
        next_step = progress.step + 1
        return ShuffledSampler(train, seed=config.seed, first_step=next_step, first_row=progress.draws, **common)
    if progress.draws != progress.step * rows_per_step:
        raise UserError(
            f"{train.path} has its own order, in which a run can't go on with rows_per_step={rows_per_step}; give the "
            "number of before"
        )
    return FileOrderSampler(train, drop_last_batch=True, **common)


def _loader_of_text(
    config: PretrainConfig, train: TextSplit, sampler: TextSampler, drawn: OnlineAugmentation | None, world: World
) -> TextLoader:
    return TextLoader(
        sampler,
        world,
        num_parts=config.parallel.num_microbatches(config.grad_accumulation),
        target_only=config.target_only,
        kernel=config.text_arch.attention_kernel,
    )


def _description_of_text(
    config: PretrainConfig, train: TextSplit, sampler: TextSampler, model: TextModel
) -> tuple[str, str]:
    samples = f"{train.metadata.num_samples:,} samples of {train.metadata.num_tokens:,} tokens"
    rows = f"{config.global_batch_size:,} tokens in {config.rows_per_step} rows"
    return f"; {samples}", f"{rows}, {100 * sampler.waste:.1f} % padding"


def _example_step_of_text(
    model: TextModel, config: PretrainConfig, sizes: TextSizes, num_slots: int, device: torch.device
) -> tuple[None, TextBatch, CallCounts]:
    """Return a step on sequences of the mean length, half of each an instruction."""
    num_tokens = num_slots * config.units_per_slot
    length = min(max(2, sizes.mean_context), num_tokens)
    lengths = [length] * (num_tokens // length) + [num_tokens % length] * (num_tokens % length > 0)
    kernel = config.text_arch.attention_kernel
    packing = Packing([(-(-n // 2), n // 2) for n in lengths], num_tokens, kernel=kernel)
    tokens_N = torch.zeros(num_tokens, dtype=torch.int32)
    row = TextRow(tokens_N, tokens_N.clone(), tokens_N.clone(), packing)
    batch = TextBatch([row.apply(lambda tensor: tensor.to(device))], num_tokens)
    return None, batch, config.text_arch.grad_calls_at(LONGEST_RUN, LONGEST_RUN)


TEXT = Kind(
    name="text",
    unit="tokens",
    archs="arch=gpt or arch=hrm_text",
    batch_size=16384,
    keys={
        "pretrain": ("rows_per_step", "target_only"),
        "evaluate": (),
        "solve": ("prompt_form", "max_new_tokens", "temperature", "top_k", "top_p", "stop", "stop_tokens"),
    },
    open=open_text_split,
    open_all=_open_text,
    check=check_text_contents,
    require_fit=lambda config, train, split: require_same_tokens(train, split),
    sizes=TextSizes,
    sizes_on=_sizes_on_text,
    needed_sizes={"vocab_size": 32000},
    typed_sizes=_typed_sizes_of_text,
    sums=TEXT_SUMS,
    size_of_epoch=lambda train: train.metadata.num_tokens,
    sampler=_sampler_of_text,
    loader=_loader_of_text,
    settings=lambda config, step, last_step, world: config.text_arch.grad_calls_at(step, last_step),
    description=_description_of_text,
    question=lambda split: "prompt=...",
    example_step=_example_step_of_text,
    usual_depth=lambda config: config.text_arch.grad_calls_at(LONGEST_RUN, LONGEST_RUN),
    parts_of_batch=lambda config, sizes: {"a token": config.global_batch_size},
    evaluators=lambda config, test: NO_EVALUATORS,
    eval_metrics=lambda config, test, evaluators: (text_eval_metrics(test, config.eval_max_examples), []),
    evaluate=lambda model, test, world, options, evaluators, interrupts, sample: evaluate_text(
        model, test, world, options, interrupts, sample
    ),
    sample=lambda num_pictures: TextSample(),
)


KINDS = {"puzzles": PUZZLES, "text": TEXT}


def kind_of_arch(arch: ArchConfig) -> Kind:
    return KINDS[arch.kind]


def require_keys_of(kind: str, values: Mapping[str, Any], page: str, reader: str) -> None:
    """Raise UserError if a key of config/<page>.yaml is changed that only another kind reads.

    Args:
        reader: the model, as the message names it.
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
    """As `require_keys_of`, for a config of pretrain.py."""
    name = values["arch"].get("name")
    kinds = {name_of(arch): arch.kind for arch in ARCHS}
    if name not in kinds:
        return  # the validation of the config says what is wrong
    require_keys_of(kinds[name], values, "pretrain", f"arch={name}")
    if kinds[name] != "puzzles" and values["parallel"]["puzzle_table"] == "sharded":
        raise UserError(f"parallel.puzzle_table=sharded is for puzzles, but arch={name} reads text; leave it out")
