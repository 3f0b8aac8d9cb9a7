"""Replay trajectories of published code with this project's training step and evaluation.

`python -m tests.parity` replays the recordings of tests/reference/, and `python -m tests.parity
DIR...` those of other folders, of puzzles or of text. The program prints the largest error of each
quantity and ends with `max_relative_error=<x>`. The exit status is 0 if everything that was
recorded was compared and is within 1e-4, and 1 if not. It is 2, with one line `error: ...`, if a
folder can't be replayed.
"""

# B = slots of the batch, S = tokens

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from models.act import ActSettings, initial_carry, segment
from models.base import CommonConfig
from models.carry import Carry, Outputs
from models.hrm import HRMConfig
from models.layers import RMS_EPS
from models.losses import ACT_SUMS, METRICS, act_loss, correctness
from models.metric_sums import OpenSums
from models.parallel.layout import Layout
from models.se_rrm import SERRMConfig
from models.trm import TRMConfig
from models.urm import URMConfig
from optim.build import AdamATan2Config, MuonConfig, OptimizerConfig, build_optimizers
from pretrain import train_step
from records.checkpoint.format import Progress
from sharing.published import fit_one_by_one, to_ours
from tests import parity_text
from tests.models.helpers import build_puzzle_arch
from tests.recordings import TOLERANCE, Report, expect_keys, number, read_json, read_tensors, take
from training.number_watch import NumberWatch
from training.state import TrainState
from training.step import StepSettings
from utils.batch import Batch
from utils.command_line import validate
from utils.ranks.world import World

REFERENCE = Path(__file__).parent / "reference"
QUANTITIES = (
    "logits",
    "q",
    "targets",
    "loss",
    "metrics",
    "gradient norm",
    "halting",
    "final weights",
    "evaluation",
)
# METRICS may have more.
PUBLISHED_METRICS = (
    *("count", "accuracy", "exact_accuracy", "q_halt_accuracy", "steps"),
    *("lm_loss", "q_halt_loss", "q_continue_loss"),
)
COUNTS = ("count", "exact_accuracy", "q_halt_accuracy", "steps")  # the metrics that are sums of integers

# The halting weight of the published losses.
HALT_WEIGHT = 0.5

SIZES = ("batch_size", "seq_len", "vocab_size", "num_puzzle_identifiers")
_REQUIRED = ("hidden_size", "num_heads", "expansion", "H_cycles", "L_cycles", "pos_encodings")
_OF_TWO_LEVELS = (*_REQUIRED, "H_layers", "L_layers", "halt_max_steps")
REQUIRED_OPTIONS = {"hrm": _OF_TWO_LEVELS, "trm": _OF_TWO_LEVELS, "urm": (*_REQUIRED, "num_layers", "loops")}
# The published defaults, but in float32, like the trajectories.
OPTION_DEFAULTS: dict[str, Any] = {
    "puzzle_emb_ndim": 0,
    "halt_exploration_prob": 0.0,
    "rope_theta": 10000.0,
    "forward_dtype": "float32",
    "mlp_t": False,
}
# Options of the published code that have only one value in this project.
FIXED_OPTIONS: dict[str, Any] = {"rms_norm_eps": RMS_EPS, "causal": False}
# The options of each architecture, and the options that this project added, with the values that
# give the published model.
HRM_FIXED_OPTIONS: dict[str, Any] = {"puzzle_emb_len": 0, "no_ACT_continue": False}
TRM_OPTIONS: dict[str, Any] = {"puzzle_emb_len": 0, "no_ACT_continue": True}
# URM always turns by rotary positions and halts at q_halt > 0.
URM_FIXED_OPTIONS: dict[str, Any] = {
    **{"puzzle_emb_len": 0, "no_ACT_continue": True, "mlp_t": False, "pos_encodings": "rope"},
    **{"mlp": "conv_swiglu", "attn_dropout": 0.0, "mlp_dropout": 0.0},
}
ADDED_OPTIONS: dict[str, Any] = {
    "mlp": "swiglu",
    "conv_bias": True,
    "conv_2d": False,
    "width_multiple": 256,
    "num_registers": 0,
    "backprop_warmup_steps": 0,
    "activation_checkpointing": "none",
    "depth_curriculum": [],
    "num_states": 1,
    "noise": "none",
    "pseudo_target_steps": 0,
    "fp8_no_grad": False,
}
SE_RRM_OPTIONS = (
    *("hidden_size", "num_heads", "num_heads_t", "head_dim", "head_dim_t", "expansion", "H_cycles", "L_cycles"),
    *("L_layers", "halt_max_steps", "halt_exploration_prob", "pos_encodings", "equivariant_symbols", "add_tokens"),
    *("puzzle_emb_ndim", "dropout", "forward_dtype"),
)
SE_RRM_DEFAULTS: dict[str, Any] = {"rope_theta": 10000.0}
# Its class ignores the first.
SE_RRM_FIXED_OPTIONS: dict[str, Any] = {"H_layers": 0, "rms_norm_eps": RMS_EPS, "dropout": 0.0}
_OF_TOKENS = ("mlp", "conv_bias", "conv_2d", "num_registers")
SE_RRM_ADDED_OPTIONS = {key: value for key, value in ADDED_OPTIONS.items() if key not in _OF_TOKENS}
OPTIM_KEYS = ("lr", "puzzle_emb_lr", "weight_decay", "puzzle_emb_weight_decay", "beta1", "beta2")
# What URM's code gives to Muon and to the AdamW beside it, whatever the keys above say.
URM_MUON: dict[str, Any] = {
    **{"name": "muon", "muon_lr": None, "muon_momentum": 0.95, "muon_weight_decay": 0.1, "muon_iterations": 5},
    **{"muon_coefficients": "urm", "muon_scale": "rms", "muon_matrices": "all", "rest": "adamw", "eps": 1e-8},
}
URM_ADAMW = {"beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1}


ARCHS = ("hrm", "trm", "urm", "se_rrm")


@dataclass
class Recording:
    """The contents of a recorded folder. `recorded` has the values to compare, by name."""

    config: CommonConfig
    sizes: dict[str, int]
    optim: dict[str, float]
    optimizer: OptimizerConfig
    initial: dict[str, torch.Tensor]
    batches: list[Batch]
    min_halt_steps: list[torch.Tensor]  # of each step, int32 (B,)
    lr_multipliers: list[float]
    recorded: dict[str, torch.Tensor | float]


def recordings_in(folder: Path) -> list[Path]:
    return sorted(path.parent for arch in ARCHS for path in folder.glob(f"{arch}_*/trajectory.json"))


def read_recording(folder: Path) -> Recording:
    """Read a folder. Raise ValueError if it is damaged or needs something that is not here."""
    description = read_json(folder / "trajectory.json")
    expect_keys(description, {"arch", "model", "loss_type", "optim", "train", "eval"}, {"noise"}, "trajectory.json")
    if description["arch"] not in ARCHS:
        raise ValueError(f"arch is {description['arch']!r}; {', '.join(ARCHS)} can be replayed")
    config, sizes = _read_model(description["arch"], description["model"], description["loss_type"])
    optim, optimizer = _read_optim(description["optim"], description["arch"])

    train, tensors = description["train"], read_tensors(folder / "trajectory.safetensors")
    recorded: dict[str, torch.Tensor | float] = {}
    for prefix, scalars in [*((f"train[{t}]", train[t]) for t in range(len(train))), ("eval", description["eval"])]:
        recorded |= {f"{prefix}.{key}": number(value, f"{prefix}.{key}") for key, value in scalars.items()}
    lr_multipliers = [
        number(recorded.pop(f"train[{t}].lr_multiplier", None), f"train[{t}].lr_multiplier") for t in range(len(train))
    ]
    batches = [_take_batch(tensors, t, sizes) for t in range(len(train))]
    min_halt_steps = [_take_halting(tensors, t, config, sizes) for t in range(len(train))]
    recorded |= tensors
    recorded |= {
        f"final.{name}": tensor for name, tensor in to_ours(read_tensors(folder / "final.safetensors")).items()
    }
    initial = to_ours(read_tensors(folder / "initial.safetensors"))
    return Recording(config, sizes, optim, optimizer, initial, batches, min_halt_steps, lr_multipliers, recorded)


def replay(recording: Recording) -> Report:
    """Train and evaluate as in the recording, and compare all values."""
    report = Report(dict(recording.recorded), QUANTITIES)
    config, optim = recording.config, recording.optim
    model = build_puzzle_arch(config, **{name: recording.sizes[name] for name in SIZES if name != "batch_size"})
    model.load_state_dict(dict(fit_one_by_one(recording.initial, model.state_dict(), None, "initial.safetensors")))
    world = World.single()
    layout: Layout = Layout(model, world)
    optimizers = build_optimizers(
        model,
        model.block_weights(),
        recording.optimizer,
        lr=optim["lr"],
        betas=(optim["beta1"], optim["beta2"]),
        weight_decay=optim["weight_decay"],
    )

    carry = initial_carry(model, recording.batches[0])
    state = TrainState(
        layout, optimizers, None, None, carry, OpenSums(ACT_SUMS, world), NumberWatch(ACT_SUMS, world), Progress()
    )
    steps = zip(recording.batches, recording.min_halt_steps, recording.lr_multipliers, strict=True)
    for t, (batch, min_halt_steps_B, lr_multiplier) in enumerate(steps):
        settings = StepSettings(
            objective=ActSettings(
                depth=config.depth,
                global_batch_size=recording.sizes["batch_size"],
                min_halt_steps_B=min_halt_steps_B,
            ),
            lr_factor=lr_multiplier,
            puzzle_emb_lr=optim["puzzle_emb_lr"] * lr_multiplier,
            puzzle_emb_weight_decay=optim["puzzle_emb_weight_decay"],
            grad_clip=None,
            ema_rate=0.0,
        )
        result = train_step(state, batch, settings, world)
        assert state.carry is not None
        carry = state.carry
        (outputs,) = result.outputs
        report.compare("logits", f"train.{t:02d}.out.logits", outputs.logits_BSV.detach())
        report.compare("q", f"train.{t:02d}.out.q_halt_logits", _published_q_halt(outputs, config))
        if not config.halts_at_random:
            report.compare("q", f"train.{t:02d}.out.q_continue_logits", outputs.q_continue_B.detach())
        if outputs.target_q_continue_B is not None:
            report.compare("targets", f"train.{t:02d}.out.target_q_continue", outputs.target_q_continue_B)
        report.compare("halting", f"train.{t:02d}.carry.halted", carry.halted_B, exact=True)
        report.compare("halting", f"train.{t:02d}.carry.steps", carry.steps_B, exact=True)
        metrics = _published_metrics(result.sums, outputs, carry, config)
        report.compare("loss", f"train[{t}].loss", _loss(metrics))
        report.compare("gradient norm", f"train[{t}].grad_norm", float(result.grad_norm))
        _compare_metrics(report, "metrics", f"train[{t}]", metrics, with_q_continue=config.has_target_pass)

    for name, tensor in model.state_dict().items():
        report.compare("final weights", f"final.{name}", tensor)

    batch = recording.batches[0]
    with torch.inference_mode():
        carry = initial_carry(model, batch)
        for _ in range(config.halt_max_steps):
            carry, outputs = segment(model, carry, batch)
        _, sums = act_loss(
            outputs,
            carry.current["labels"],
            halted_B=carry.halted_B,
            steps_B=carry.steps_B,
            config=config.loss,
        )
    report.compare("evaluation", "eval.out.logits", outputs.logits_BSV)
    report.compare("evaluation", "eval.out.q_halt_logits", _published_q_halt(outputs, config))
    metrics = _published_metrics(sums, outputs, carry, config)
    report.compare("evaluation", "eval.loss", _loss(metrics))
    _compare_metrics(report, "evaluation", "eval", metrics, with_q_continue=False)
    report.close()
    return report


def main(arguments: list[str]) -> int:
    reports = []
    for folder in [Path(argument) for argument in arguments] or recordings_in(REFERENCE):
        try:
            if parity_text.is_text(read_json(folder / "trajectory.json")):
                reports.append(parity_text.replay(parity_text.read_recording(folder)))
            else:
                reports.append(replay(read_recording(folder)))
        except (ValueError, OSError) as error:
            print("error:", f"{folder}:", " ".join(str(error).split()), file=sys.stderr)
            return 2
        reports[-1].print(folder)
    max_error = max(report.max_error for report in reports)
    print(f"max_relative_error={max_error:.3g}")
    return 0 if max_error <= TOLERANCE and not any(report.failures for report in reports) else 1


def _published_q_halt(outputs: Outputs, config: CommonConfig) -> torch.Tensor:
    """Return what the published code calls q_halt_logits: a probability in the SE-RRM."""
    q_halt_B = outputs.q_halt_B.detach()
    return q_halt_B.sigmoid() if config.halts_at_random else q_halt_B


def _published_metrics(sums: torch.Tensor, outputs: Outputs, carry: Carry, config: CommonConfig) -> dict[str, float]:
    """Return the metric sums as the published code has them, by name.

    The loss of the SE-RRM takes its confidence for a logit (docs/parity.md).
    """
    metrics = dict(zip(METRICS, sums.tolist(), strict=True))
    if config.halts_at_random:
        _, _, exact_B = correctness(outputs.logits_BSV, carry.current["labels"])
        confidence_B = _published_q_halt(outputs, config)
        loss = F.binary_cross_entropy_with_logits(confidence_B, exact_B.float(), reduction="sum")
        # No confidence is below 0, so that it counts every answer as one that is held for right.
        metrics |= {"q_halt_loss": loss.item(), "q_halt_accuracy": metrics["exact_accuracy"]}
    return metrics


def _loss(metrics: dict[str, float]) -> float:
    return metrics["lm_loss"] + HALT_WEIGHT * (metrics["q_halt_loss"] + metrics["q_continue_loss"])


def _compare_metrics(
    report: Report, quantity: str, prefix: str, metrics: dict[str, float], *, with_q_continue: bool
) -> None:
    for name in PUBLISHED_METRICS:
        if name != "q_continue_loss" or with_q_continue:
            report.compare(quantity, f"{prefix}.{name}", metrics[name], exact=name in COUNTS)


def _read_optim(values: Any, arch: str) -> tuple[dict[str, float], OptimizerConfig]:
    expect_keys(values, set(OPTIM_KEYS), {"use_muon"} if arch == "urm" else set(), "optim")
    optim = {key: number(values[key], f"optim.{key}") for key in OPTIM_KEYS}
    if values.get("use_muon", False):
        return optim | URM_ADAMW, MuonConfig(**URM_MUON)
    return optim, AdamATan2Config(name="adam_atan2")


def _read_model(arch: str, options: Any, loss_type: Any) -> tuple[CommonConfig, dict[str, int]]:
    required: tuple[str, ...]
    if arch == "se_rrm":
        required, defaults, fixed = SE_RRM_OPTIONS, SE_RRM_DEFAULTS, SE_RRM_FIXED_OPTIONS
    else:
        required, defaults = REQUIRED_OPTIONS[arch], OPTION_DEFAULTS | (TRM_OPTIONS if arch == "trm" else {})
        fixed = FIXED_OPTIONS | {"hrm": HRM_FIXED_OPTIONS, "trm": {}, "urm": URM_FIXED_OPTIONS}[arch]
    expect_keys(options, {*SIZES, *required}, defaults.keys() | fixed.keys(), "model")
    for key, value in fixed.items():
        if options.get(key, value) != value:
            raise ValueError(f"model.{key} is {options[key]!r}, but an {arch.upper()} only does {value!r}")
    values = {key: options[key] for key in required}
    values |= {key: options.get(key, default) for key, default in defaults.items()}
    values |= SE_RRM_ADDED_OPTIONS if arch == "se_rrm" else ADDED_OPTIONS
    loss = {"loss_type": loss_type, "label_smoothing": 0.0}
    values["loss"] = loss if arch == "se_rrm" else loss | {"halt_weight": HALT_WEIGHT}
    config: CommonConfig
    if arch == "se_rrm":
        config = validate(SERRMConfig, {"name": arch, **values, "backprop": "last_H_cycle"})
    elif arch == "urm":
        values |= URM_FIXED_OPTIONS | {"halt_max_steps": values.pop("loops"), "backprop": "last_H_cycle"}
        unused = ("attn_dropout", "mlp_dropout")
        config = validate(URMConfig, {"name": arch, **{k: v for k, v in values.items() if k not in unused}})
    elif arch == "hrm":
        config = validate(HRMConfig, {"name": arch, **values, **HRM_FIXED_OPTIONS, "backprop": "one_step"})
    else:
        config = validate(TRMConfig, {"name": arch, **values, "backprop": "last_H_cycle"})
    if config.halt_exploration_prob and not config.halts_at_random:
        raise ValueError(f"halt_exploration_prob is {config.halt_exploration_prob}; exploration can't be replayed")
    return config, {key: options[key] for key in SIZES}


def _take_halting(
    tensors: dict[str, torch.Tensor], t: int, config: CommonConfig, sizes: dict[str, int]
) -> torch.Tensor:
    """Move the draws of step t out of the recorded tensors, and return the earliest halts, (B,).

    A slot of the SE-RRM halts if its draw from 0 to 1 is less than halt_exploration_prob.
    """
    if not config.halts_at_random:
        return torch.zeros(sizes["batch_size"], dtype=torch.int32)
    draw_B = take(tensors, f"train.{t:02d}.draw", (sizes["batch_size"],))
    return torch.where(draw_B < config.halt_exploration_prob, 0, config.halt_max_steps).int()


def _take_batch(tensors: dict[str, torch.Tensor], t: int, sizes: dict[str, int]) -> Batch:
    """Move the batch of step t out of the recorded tensors."""
    shape_BS = (sizes["batch_size"], sizes["seq_len"])
    shapes = {"inputs": shape_BS, "labels": shape_BS, "puzzle_identifiers": shape_BS[:1]}
    return {key: take(tensors, f"train.{t:02d}.batch.{key}", shape).int() for key, shape in shapes.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
