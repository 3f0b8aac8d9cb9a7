"""Say what fits where memory ran out in a step: the smallest change."""

from training.data import Data
from training.dry_run import FREE_SHARE, Variants, gb
from training.resume import Start
from utils.perf.devices import room_for
from utils.ranks.world import World

# The share of the memory that the calculation may fill. Gaps in the heap of the host (glibc) may
# take more than the tensors of small microbatches: 2.9 GB in all, where 1.3 were calculated.
_USABLE_SHARES = {"cuda": 1 - FREE_SHARE, "cpu": 0.25}


def smaller_step(start: Start, data: Data, world: World) -> str:
    """Return the overrides with which a step of training fits, by the calculation of --dry-run.

    The strategy stays, and so does what the run learns.
    """
    config = start.config
    limit = _USABLE_SHARES["cuda" if world.device.type == "cuda" else "cpu"] * room_for(world)
    variants = Variants(config, data.sizes, world.size, limit)
    asked = variants.asked().peak
    if asked <= limit:  # something that is not counted did not fit beside it
        variants.limit = asked / 2
    possible = variants.row(config.parallel.name)
    if best := variants.smallest_change(possible):
        return (
            f"it should fit with {' '.join(variants.overrides(best.config))}: {gb(best.footprint.peak)} GB instead of "
            f"{gb(asked)} by calculation, and the same result"
        )
    least = min(variant.footprint.peak for variant in possible)
    return (
        f"no grad_accumulation and no activation_checkpointing is enough ({gb(least)} GB by calculation); take more "
        f"ranks with parallel=fsdp, or a smaller model, such as arch.hidden_size={config.arch.hidden_size // 2}"
    )
