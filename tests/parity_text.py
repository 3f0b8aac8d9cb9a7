"""Replay trajectories of the published HRM-Text code with this project's models and optimizer.

tests/parity.py calls this module for the folders whose trajectory.json describes a text model.
"""

# N = tokens of the row

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from models.metric_sums import OpenSums
from models.parallel.layout import Layout
from models.text.config import (
    HRMTextConfig,
    RINSTextConfig,
    TextConfig,
    TransformerTextConfig,
    TRMTextConfig,
    UTTextConfig,
)
from models.text.losses import TEXT_METRICS, TEXT_SUMS, text_sums
from models.text.model import TextModel
from models.text.objective import TextBatch, TextRow
from models.text.packing import Packing
from optim.build import AdamATan2Config, build_optimizers
from optim.ema import EMA
from optim.schedule import lr_multiplier
from pretrain import train_step
from records.checkpoint.format import Progress
from sharing.published import fit_one_by_one, to_ours, to_published
from tests.models.text.helpers import greedy
from tests.recordings import Report, expect_keys, number, read_json, read_tensors
from training.number_watch import NumberWatch
from training.state import TrainState
from training.step import StepSettings
from utils.batch import IGNORE_LABEL
from utils.command_line import validate
from utils.ranks.world import World

QUANTITIES = (
    *("logits", "loss", "metrics", "gradient norm", "no gradient", "schedule"),
    *("final weights", "average", "generation"),
)
NETS: dict[str, type[TextConfig]] = {
    "hrm": HRMTextConfig,
    "transformer": TransformerTextConfig,
    "trm": TRMTextConfig,
    "ut": UTTextConfig,
    "rins": RINSTextConfig,
}
# The published names of options, where ours differ.
RENAMED = {"n_layers": "num_layers", "attn_type": "attention", "pos_emb_type": "pos_encodings"}
# The published defaults.
OPTION_DEFAULTS: dict[str, Any] = {
    "attention": "prefixlm",
    "rope_theta": 10000.0,
    "init_std": None,
    "half_layers": False,
    "H_override": {},
    "bp_warmup_ratio": 0.0,
    "bp_min_steps": 2,
    "bp_max_steps": 5,
}
# What this project added, with the values that give the published model.
ADDED_OPTIONS = {
    "width_multiple": 256,
    "activation_checkpointing": "none",
    "attention_kernel": "sdpa",
    "forward_dtype": "float32",
}
OPTIM_KEYS = ("lr", "lr_min_ratio", "lr_warmup_steps", "total_steps", "weight_decay", "beta1", "beta2", "ema")
STEP_KEYS = (
    *("step", "lr", "bp_steps", "loss", "loss_divisor", "grad_norm", "without_gradient", "metrics", "sequences"),
    "total",
)
NOTES = {"noise", "noise_float64", "smallest_argmax_margin"}  # about the recording itself
# The numerator and the denominator of each recorded metric. The first metric is a sum of floats.
METRICS = {
    "loss": ("loss", "labels"),
    "accuracy": ("accuracy", "labels"),
    "exact_accuracy": ("exact_accuracy", "sequences"),
}

Tensors = dict[str, torch.Tensor]


@dataclass
class Recording:
    """The contents of a recorded folder. `recorded` has the values to compare, by name."""

    config: TextConfig
    vocab_size: int
    optim: dict[str, float]
    initial: Tensors
    batches: list[Tensors]
    sequences: list[list[tuple[int, int]]]
    prompts: list[list[int]]
    num_new_tokens: int
    row_stride: dict[str, int]
    recorded: dict[str, Any]


def is_text(description: Any) -> bool:
    """Whether a trajectory.json describes a text model. Only those tell how rows were packed."""
    return isinstance(description, dict) and "data" in description


def read_recording(folder: Path) -> Recording:
    """Read a folder. Raise ValueError if it is damaged or needs something that is not here."""
    description = read_json(folder / "trajectory.json")
    required = {"arch", "model", "data", "optim", "row_stride", "train", "generate"}
    expect_keys(description, required, NOTES, "trajectory.json")
    config, vocab_size = _read_model(description["arch"], description["model"])
    expect_keys(description["optim"], set(OPTIM_KEYS), set(), "optim")
    optim = {key: number(value, f"optim.{key}") for key, value in description["optim"].items()}
    expect_keys(description["row_stride"], {"final", "ema"}, set(), "row_stride")

    tensors = read_tensors(folder / "trajectory.safetensors")
    recorded: dict[str, Any] = {}
    batches, sequences = list[Tensors](), list[list[tuple[int, int]]]()
    for t, step in enumerate(description["train"]):
        expect_keys(step, set(STEP_KEYS), set(), f"train[{t}]")
        sequences.append([(prefix, response) for prefix, response in step["sequences"]])
        batches.append(_take_batch(tensors, t, sum(map(sum, sequences[-1]))))
        for key in ("lr", "loss", "loss_divisor", "grad_norm"):
            recorded[f"train[{t}].{key}"] = number(step[key], f"train[{t}].{key}")
        recorded |= {f"train[{t}].{key}": step[key] for key in ("step", "bp_steps")}
        recorded[f"train[{t}].without_gradient"] = sorted(step["without_gradient"])
        for name, (numerator, denominator) in step["metrics"].items():
            recorded |= {f"train[{t}].{name}[0]": numerator, f"train[{t}].{name}[1]": denominator}
    generate = description["generate"]
    expect_keys(generate, {"prompts", "new_tokens", "initial", "final", "ema"}, set(), "generate")
    recorded |= {f"generate.{of}.tokens": generate[of]["tokens"] for of in ("initial", "final", "ema")}
    recorded |= tensors
    for file in ("final", "ema"):
        weights = to_ours(read_tensors(folder / f"{file}.safetensors"), config.name)
        recorded |= {f"{file}.{name}": tensor for name, tensor in weights.items()}
    initial = to_ours(read_tensors(folder / "initial.safetensors"), config.name)
    return Recording(
        config,
        vocab_size,
        optim,
        initial,
        batches,
        sequences,
        generate["prompts"],
        generate["new_tokens"],
        description["row_stride"],
        recorded,
    )


def replay(recording: Recording) -> Report:
    """Train and generate as in the recording, and compare all values."""
    report = Report(dict(recording.recorded), QUANTITIES)
    config, optim = recording.config, recording.optim
    model = TextModel(config, vocab_size=recording.vocab_size)
    model.load_state_dict(dict(fit_one_by_one(recording.initial, model.state_dict(), None, "initial.safetensors")))
    optimizers = build_optimizers(
        model,
        model.block_weights(),
        AdamATan2Config(name="adam_atan2"),
        lr=optim["lr"],
        betas=(optim["beta1"], optim["beta2"]),
        weight_decay=optim["weight_decay"],
    )
    average, world = EMA(model.trained_tensors()), World.single()
    layout: Layout = Layout(model, world)
    watch = NumberWatch(TEXT_SUMS, world)
    state = TrainState(layout, optimizers, average, None, None, OpenSums(TEXT_SUMS, world), watch, Progress())
    total_steps, warmup_steps = int(optim["total_steps"]), int(optim["lr_warmup_steps"])
    _generate(model, recording, report, "initial")
    for t in range(len(recording.batches)):
        multiplier = lr_multiplier(t + 1, total_steps, warmup_steps, optim["lr_min_ratio"])
        report.compare_equal("schedule", f"train[{t}].step", t + 1)
        report.compare("schedule", f"train[{t}].lr", optim["lr"] * multiplier)
        bp_steps = config.bp_steps_at(t + 1, total_steps) if isinstance(config, HRMTextConfig) else None
        report.compare_equal("schedule", f"train[{t}].bp_steps", bp_steps)
        _compare_pass(model, recording, report, t, total_steps)
        model.zero_grad()
        settings = StepSettings(
            objective=config.grad_calls_at(t + 1, total_steps),
            lr_factor=multiplier,
            puzzle_emb_lr=0.0,
            puzzle_emb_weight_decay=0.0,
            grad_clip=None,
            ema_rate=optim["ema"],
        )
        result = train_step(state, _batch_of(recording, t), settings, world)
        report.compare("gradient norm", f"train[{t}].grad_norm", float(result.grad_norm))

    _compare_weights(model, report, "final weights", "final", recording.row_stride["final"])
    _generate(model, recording, report, "final")
    with average.swapped():
        _compare_weights(model, report, "average", "ema", recording.row_stride["ema"])
        _generate(model, recording, report, "ema")
    report.close()
    return report


def _batch_of(recording: Recording, t: int) -> TextBatch:
    batch = recording.batches[t]
    packing = Packing(recording.sequences[t], len(batch["inputs"]))
    row = TextRow(batch["inputs"], batch["labels"], batch["position_ids"], packing)
    return TextBatch([row], int((batch["labels"] != IGNORE_LABEL).sum()))


def _compare_pass(model: TextModel, recording: Recording, report: Report, t: int, total_steps: int) -> None:
    """Compare a forward and a backward pass, whose gradients stay in the parameters."""
    batch = recording.batches[t]
    packing = Packing(recording.sequences[t], len(batch["inputs"]))
    grad_calls = recording.config.grad_calls_at(t + 1, total_steps)
    loss, _, right_N = model(
        *(batch[key] for key in ("inputs", "labels", "position_ids")),
        packing,
        grad_calls=grad_calls,
    )
    sums = text_sums(loss, right_N, batch["labels"], packing)
    named = dict(zip(TEXT_METRICS, sums.tolist(), strict=True))
    (loss / named["labels"]).backward()
    with torch.no_grad():
        y_ND = model.hidden(batch["inputs"], batch["position_ids"], packing, grad_calls)
        report.compare("logits", f"train.{t:02d}.logits", model.logits(y_ND))
    report.compare("loss", f"train[{t}].loss", loss.item() / named["labels"])
    report.compare("metrics", f"train[{t}].loss_divisor", named["labels"], exact=True)
    for name, parts in METRICS.items():
        for index, part in enumerate(parts):
            report.compare("metrics", f"train[{t}].{name}[{index}]", named[part], exact=part != "loss")
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    without = {name: torch.empty(0) for name, grad in gradients.items() if grad is None}
    names = sorted(to_published(without, "training", recording.config.name))
    report.compare_equal("no gradient", f"train[{t}].without_gradient", names)


def _generate(model: TextModel, recording: Recording, report: Report, weights: str) -> None:
    tokens, logits = greedy(model, recording.prompts, recording.num_new_tokens)
    report.compare("generation", f"generate.{weights}.logits", logits)
    report.compare_equal("generation", f"generate.{weights}.tokens", tokens.tolist())


def _compare_weights(model: TextModel, report: Report, quantity: str, file: str, row_stride: int) -> None:
    for name, weight in model.named_parameters():
        report.compare(quantity, f"{file}.{name}", weight.detach()[::row_stride])


def _read_model(arch: Any, options: Any) -> tuple[TextConfig, int]:
    if arch not in NETS:
        raise ValueError(f"arch is {arch!r}; {', '.join(NETS)} can be replayed")
    config_class = NETS[arch]
    # An option that is null or off says nothing.
    given = {key: value for key, value in options.items() if key not in ("vocab_size", "max_seq_len")}
    values = {RENAMED.get(key, key): value for key, value in given.items() if value is not None and value is not False}
    if "H_override" in values:
        values["H_override"] = {RENAMED.get(key, key): value for key, value in values["H_override"].items()}
    known = config_class.model_fields
    values = {key: value for key, value in OPTION_DEFAULTS.items() if key in known} | values
    return validate(config_class, {"name": f"{arch}_text", **values, **ADDED_OPTIONS}), options["vocab_size"]


def _take_batch(tensors: Tensors, t: int, total: int) -> Tensors:
    """Move the batch of step t out of the recorded tensors. Its sequences have `total` tokens."""
    batch = {key: tensors.pop(f"train.{t:02d}.batch.{key}") for key in ("inputs", "labels", "position_ids")}
    if total > len(batch["inputs"]):
        raise ValueError(f"train[{t}].sequences fill {total} places, but the row has {len(batch['inputs'])}")
    return batch
