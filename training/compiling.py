"""Decide for compile=auto whether torch.compile pays."""

import torch

from models.base import CommonConfig, RecursiveModel
from models.model import Model
from models.parallel.layout import Compiled
from models.text.config import LONGEST_RUN
from models.text.model import TextModel
from training.config import PretrainConfig
from training.data import AnySizes, Data, TextSizes
from training.kinds import kind_of_arch
from utils.compiled_code import keep_compiled_code, why_compiling_fails
from utils.errors import UserError
from utils.ranks.world import World

# Compiling pays for a run with more floating-point operations than this for each thread of a CPU or
# each GPU. docs/lab/log.md has the measurements for CPUs ("compiling"). The number for CUDA is an
# estimate: about 50 s of work.
LEAST_FLOPS = {"cpu": 6e13, "cuda": 1e16}
# Strategies whose compiled training was compared with eager training (tests/test_compiled.py).
_TESTED_STRATEGIES = ("ddp", "fsdp", "tp")


def with_compile(
    config: PretrainConfig, model: Model, data: Data, world: World, *, before: Compiled | None = None
) -> tuple[PretrainConfig, list[str]]:
    """Replace compile=auto by what is compiled, and check that the ranks can compile. Every rank.

    Args:
        before: what the checkpoint says. The run keeps it, because compiled blocks round otherwise
            than eager ones.
    """
    is_auto, notes, why = config.compile == "auto", list[str](), ""
    chosen: Compiled = False if config.compile == "auto" else config.compile
    if is_auto and before is not None:
        chosen, why = before, "as before in this run"
    elif is_auto:
        chosen, why = world.broadcast_object(_decide(config, model, data, world))
    if chosen == "segment":
        with world.shared_errors():
            _require_segments(config)
    if why:  # nobody waits for a line about a small run
        notes.append(f"compile=auto: {'on' if chosen else 'off'}, {why}")
    if chosen:
        keep_compiled_code()
        failures = [why for why in world.gather_objects(why_compiling_fails(world.device)) if why]
        if failures and is_auto and before is None:
            chosen, notes = False, [f"compile=auto: off, because PyTorch can't compile here: {failures[0]}"]
        elif failures:
            with world.shared_errors():
                raise UserError(
                    f"this run is compiled, but PyTorch can't compile here: {failures[0]}; mend that, or give "
                    "compile=false"
                )
        else:
            notes.append("the first step compiles: a minute or more, or seconds if an earlier run left the same code")
    return config.model_copy(update={"compile": chosen}), notes


def _require_segments(config: PretrainConfig) -> None:
    arch = config.arch
    # Each depth would be compiled anew, and PyTorch keeps a limited number of graphs.
    has_one_depth = isinstance(arch, CommonConfig) and not (arch.depth_curriculum or arch.backprop_warmup_steps)
    if not has_one_depth or config.parallel.name != "ddp":
        raise UserError(
            "compile=segment is for puzzles with parallel=ddp, without arch.depth_curriculum and "
            "arch.backprop_warmup_steps; give compile=true"
        )


def _decide(config: PretrainConfig, model: Model, data: Data, world: World) -> tuple[bool, str]:
    """Return whether to compile a new run, and why. A run that is too short has no reason."""
    device, strategy = world.device.type, config.parallel.name
    num_units, unit = (torch.get_num_threads(), "CPU thread") if device == "cpu" else (1, "GPU")
    num_steps = config.epochs * kind_of_arch(config.arch).size_of_epoch(data.train) / config.global_batch_size
    num_steps = min(num_steps, config.max_steps or num_steps)
    # Counting exactly would take a second or more.
    flops = num_steps * estimated_flops_of_step(config, model, data.sizes) / (num_units * world.size)
    least = LEAST_FLOPS.get(device, LEAST_FLOPS["cpu"])
    if flops < least:
        return False, ""
    if device not in LEAST_FLOPS:
        return False, f"because compiling was never tried on {device}"
    if config.deterministic:
        return False, "because deterministic=true, and a compiler may choose other kernels at the next start"
    if strategy not in _TESTED_STRATEGIES:
        return False, f"because compiling was never tested with parallel={strategy}"
    return True, f"because {flops:.0e} operations for each {unit} are more than the {least:.0e} where compiling pays"


def estimated_flops_of_step(config: PretrainConfig, model: Model, sizes: AnySizes) -> float:
    """Return about how many floating-point operations a step has, over all ranks."""
    if isinstance(model, RecursiveModel):
        arch = config.puzzle_arch
        weights = sum(weight.numel() for weight in model.block_weights()) / max(1, len(model.levels()))
        passes = 2 if arch.values_going_on else 1  # q_continue needs a segment more
        calls = passes * arch.depth.num_calls + 2 * arch.depth.num_grad_calls
        return 2.0 * weights * model.positions_per_slot * config.global_batch_size * calls
    assert isinstance(model, TextModel) and isinstance(sizes, TextSizes)
    options, stacks = model.config, model.stacks()
    weights = sum(weight.numel() for stack in stacks.values() for weight in stack.parameters()) / len(stacks)
    num_layers = sum(shape.num_layers for shape in options.stacks.values()) / len(stacks)
    attention = 2 * num_layers * options.hidden_size * sizes.mean_context
    num, num_grad = options.num_calls, options.grad_calls_at(LONGEST_RUN, LONGEST_RUN)
    products = (weights + attention) * (num.H + num.L + 2 * (num_grad.H + num_grad.L))
    return 2.0 * (products + 3 * options.hidden_size * sizes.vocab_size) * config.global_batch_size
