"""DDP: every rank has the whole model and slots of its own, and gradients are summed."""

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor
from torch.distributed import GradBucket, get_debug_level  # type: ignore[attr-defined]
from torch.nn.parallel import DistributedDataParallel

from models.model import Model
from models.objective import BatchT, CarryT, SettingsT
from models.parallel.dtensor import DTensorLayout
from models.parallel.layout import Compiled, LayoutConfig
from models.parallel.requirements import require_gradients
from utils.config import Bool, Float
from utils.errors import UserError
from utils.ranks.config import Axes
from utils.ranks.world import World


class DDPConfig(LayoutConfig):
    """Every rank has the whole model. config/parallel/ddp.yaml explains the keys."""

    name: Literal["ddp"]
    bucket_cap_mb: Float = Field(gt=0)
    gradient_as_bucket_view: Bool

    def axes(self, num_ranks: int) -> Axes | None:
        return Axes(replicate=num_ranks) if num_ranks > 1 else None

    def num_parts(self, num_ranks: int) -> int:
        return 1

    def require_support(self, model: Model, world: World) -> None:
        if get_debug_level().name == "DETAIL" and world.backend.endswith("gloo"):
            raise UserError(
                "TORCH_DISTRIBUTED_DEBUG=DETAIL makes this version of PyTorch crash under DDP on gloo (SIGSEGV); set "
                "it to INFO, or take parallel=fsdp"
            )


def _sum(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Sum a bucket over the ranks. This is DDP's hook, in place of its own, which is a mean."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class DDPLayout(DTensorLayout[CarryT, BatchT, SettingsT]):
    """The whole model on every rank. Gradients are summed while the backward pass still runs."""

    def __init__(self, model: Model, config: DDPConfig, world: World, *, sharded_table: bool) -> None:
        super().__init__(model, world)
        self.lockstep = sharded_table
        self._ddp: DistributedDataParallel | None = None
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
                find_unused_parameters=bool(model.may_lack_gradient()),
            )
        self._called = self._ddp
        # DDP makes its buckets anew after its first backward pass, in the order in which gradients
        # came. Without this step, the first one of a resumed run would sum in another order.
        self.objective.smallest_loss(self._ddp, world.device).backward()
        require_gradients(model)  # DDP would end the next step with a message of torch's
        model.zero_grad()
        self._ddp.register_comm_hook(world.data_group, _sum)

    def compile(self, what: Compiled) -> None:
        super().compile(what)
        if what == "segment" and self._ddp is not None:
            # The base class has put the compiled model into _called. DDP has to wrap it.
            self._ddp.module = self._called
            self._called = self._ddp

    def _part(self, *, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext() if is_last or self._ddp is None else self._ddp.no_sync()
