"""DDP: every rank has the whole model and slots of its own, and gradients are summed."""

import warnings
import weakref
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed import GradBucket, get_debug_level  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from models.base import CommonConfig
from models.model import Model
from models.parallel.dtensor import DTensorLayout
from models.parallel.layout import LayoutConfig
from models.parallel.requirements import can_sum, require_gradients
from utils.config import Bool, Float, Int
from utils.errors import UserError
from utils.ranks.config import Axes
from utils.ranks.world import World

# The dtypes that compression rounds gradients to.
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class DDPConfig(LayoutConfig):
    """Every rank has the whole model. config/parallel/ddp.yaml explains the keys."""

    name: Literal["ddp"]
    bucket_cap_mb: Float = Field(gt=0)
    gradient_as_bucket_view: Bool
    static_graph: Bool
    find_unused_parameters: Bool
    compression: Literal["none", "fp16", "bf16", "powersgd"]
    powersgd_rank: Int = Field(ge=1)
    powersgd_start_step: Int = Field(ge=2)  # torch's bound

    def axes(self, num_ranks: int) -> Axes | None:
        return Axes(replicate=num_ranks) if num_ranks > 1 else None

    def num_parts(self, num_ranks: int) -> int:
        """Return 1: every rank has the whole model."""
        return 1

    def require_support(self, model: Model, world: World) -> None:
        """As in the base class.

        A static graph must not change, the backend must sum compressed gradients, and PyTorch must
        not check each collective on gloo.
        """
        arch = model.config
        if (
            self.static_graph
            and isinstance(arch, CommonConfig)
            and (arch.depth_curriculum or arch.backprop_warmup_steps)
        ):
            raise UserError(
                "parallel.static_graph promises the same graph at every step, but arch.depth_curriculum and "
                "arch.backprop_warmup_steps change it; set static_graph to false"
            )
        if self.static_graph and model.may_lack_gradient():
            raise UserError(
                "parallel.static_graph promises the same graph at every step, but the number of calls with gradient "
                f"of arch={arch.name} decides whether the embedding has one; set static_graph to false"
            )
        if get_debug_level().name == "DETAIL" and world.backend.endswith("gloo"):
            raise UserError(
                "TORCH_DISTRIBUTED_DEBUG=DETAIL makes this version of PyTorch crash under DDP on gloo (SIGSEGV); set "
                "it to INFO, or take parallel=fsdp"
            )
        if self.compression == "powersgd" and model.config.forward_dtype == "float16":
            raise UserError(
                "parallel.compression=powersgd keeps what it leaves out for the next step, and with "
                "arch.forward_dtype=float16 steps have scales of their own and some are skipped; take "
                "parallel.compression=fp16 or none, or arch.forward_dtype=bfloat16"
            )
        if self.compression in _DTYPES and not can_sum(_DTYPES[self.compression], world):
            able = [name for name, dtype in _DTYPES.items() if can_sum(dtype, world)]
            raise UserError(
                f"parallel.compression is {self.compression}, which this backend can't sum; "
                f"take one of {', '.join(['none', *able, 'powersgd'])}, or set dist.backend to another"
            )


def _sum_of_bucket(layout: "weakref.ref[DDPLayout]", bucket: GradBucket) -> torch.futures.Future[Tensor]:
    alive = layout()
    assert alive is not None
    return alive._sum(bucket)


class DDPLayout(DTensorLayout):
    """The whole model on every rank. Gradients are summed while the backward pass still runs."""

    def __init__(
        self, model: Model, config: DDPConfig, world: World, *, num_microbatches: int, sharded_table: bool
    ) -> None:
        super().__init__(model, world, num_microbatches=num_microbatches, lockstep=sharded_table)
        self._config = config
        self._ddp: DistributedDataParallel | None = None
        self._powersgd: PowerSGDState | None = None
        if world.data_size == 1 or not self._trained:
            return
        with warnings.catch_warnings():
            # What torch 2.13 offers in place of broadcast_buffers still sends the buffers once.
            warnings.filterwarnings("ignore", message="`broadcast_buffers` is deprecated", category=FutureWarning)
            self._ddp = DistributedDataParallel(
                model,
                process_group=world.data_group,
                broadcast_buffers=False,  # the puzzle table is one, and may be sharded
                init_sync=False,
                bucket_cap_mb=config.bucket_cap_mb,
                gradient_as_bucket_view=config.gradient_as_bucket_view,
                static_graph=config.static_graph,
                find_unused_parameters=config.find_unused_parameters or bool(model.may_lack_gradient()),
            )
        self._called = self._ddp
        self._settle_buckets()
        if config.compression == "powersgd":
            self._powersgd = PowerSGDState(
                world.data_group,
                matrix_approximation_rank=config.powersgd_rank,
                start_powerSGD_iter=config.powersgd_start_step,
            )
        # A weak reference, because this object holds DDP, and DDP holds the hook's state where
        # Python's garbage collector doesn't see it.
        self._ddp.register_comm_hook(weakref.ref(self), _sum_of_bucket)

    def _settle_buckets(self) -> None:
        """Make one step and drop its gradients, so that DDP's buckets have their final order.

        After its first backward pass DDP makes its buckets anew, in the order in which gradients
        came. Without this step, the first step of a resumed run would sum in another order than the
        same step of an uninterrupted run.
        """
        assert self._ddp is not None
        self.objective.smallest_loss(self._ddp, self._world.device).backward()
        if not self._config.find_unused_parameters:  # DDP would end the next step with a message of torch's
            require_gradients(self.model)
        self.model.zero_grad()

    def require_gradients(self) -> None:
        if not self._config.find_unused_parameters:
            super().require_gradients()

    def _sum(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Sum a bucket over the ranks, compressed as the config says. This is DDP's hook.

        torch's own hooks compute means, which are multiplied by the number of ranks here.
        """
        group = self._world.data_group
        assert group is not None
        if self._config.compression == "none":
            work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
            return work.get_future().then(lambda future: future.value()[0])
        if self._powersgd is not None:
            mean = powerSGD_hook(self._powersgd, bucket)
            if dist.get_backend(group) != "nccl":
                # Callbacks ask for the second and third collective, and gloo runs callbacks in
                # threads as soon as the collective before ends. With two buckets under way, ranks
                # would ask in different orders and wait for ever.
                mean.wait()
        elif self._config.compression == "fp16":
            mean = fp16_compress_hook(group, bucket)
        else:
            mean = bf16_compress_hook(group, bucket)
        return mean.then(lambda future: future.value().mul_(self._world.data_size))

    def _part(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last or self._ddp is None else self._ddp.no_sync()

    def compression_state(self) -> dict[str, Tensor]:
        state = self._powersgd
        if state is None:
            return {}
        tensors = {"powersgd.step": torch.tensor(state.iter), "powersgd.settings": self._powersgd_settings()}
        for name, by_bucket in self._powersgd_tensors(state).items():
            tensors |= {f"powersgd.{name}.{bucket}": tensor for bucket, tensor in by_bucket.items()}
        return tensors

    def load_compression_state(self, tensors: dict[str, Tensor]) -> None:
        state = self._powersgd
        if state is None or not tensors:  # compression has ended, or begins here
            return
        if not torch.equal(tensors["powersgd.settings"].cpu(), self._powersgd_settings()):
            raise UserError(
                "the checkpoint's PowerSGD state is of other buckets; resume with the parallel.bucket_cap_mb, "
                "parallel.powersgd_rank and frozen weights that it was saved with, or with another compression"
            )
        state.iter = int(tensors["powersgd.step"])
        for name, by_bucket in self._powersgd_tensors(state).items():
            prefix = f"powersgd.{name}."
            for key, tensor in tensors.items():
                if key.startswith(prefix):
                    by_bucket[int(key.removeprefix(prefix))] = tensor.to(self._world.device, copy=True)

    def _powersgd_tensors(self, state: PowerSGDState) -> dict[str, dict[int, Tensor]]:
        return {"error": state.error_dict, "p": state.p_memory_dict, "q": state.q_memory_dict}

    def _powersgd_settings(self) -> Tensor:
        """Return the numbers that decide the sizes of PowerSGD's tensors."""
        num_weights = sum(parameter.numel() for parameter in self._trained)
        return torch.tensor([num_weights, round(self._config.bucket_cap_mb * 1024), self._config.powersgd_rank])
