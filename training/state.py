"""The state of a run: everything that a step changes, and how a checkpoint takes and gives it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from models.carry import Carry
from models.metric_sums import OpenSums
from models.model import Model
from models.parallel.layout import Layout
from optim.build import Optimizers, build_optimizers, require_same_state
from optim.ema import EMA, require_same_average
from optim.loss_scale import LossScale
from records.checkpoint.format import Progress, RunState
from records.checkpoint.reader import Checkpoint
from records.checkpoint.writer import Snapshot
from sharing.stored_config import how_arch_differs
from training.config import PretrainConfig
from training.data import Data
from training.number_watch import NumberWatch
from utils.errors import UserError
from utils.ranks.world import World, local_part
from utils.shapes import compare_shapes, shapes_of

T = TypeVar("T")


@dataclass(frozen=True)
class HostCopy:
    """A copy of one rank's state in host memory, for another process that goes on from there."""

    tensors: dict[str, Tensor]
    progress: Progress
    place: tuple[int, int, str]  # the rank, the number of ranks and the strategy


@dataclass
class TrainState:
    """Everything that a training step changes, and so everything that a checkpoint holds."""

    layout: Layout  # the model, and how it lies over the ranks
    optimizers: Optimizers
    ema: EMA | None
    loss_scale: LossScale | None  # of float16 only
    carry: Carry | None  # the slots of this rank; text has none
    sums: OpenSums
    watch: NumberWatch
    progress: Progress
    is_replayed: bool = False  # whether its steps are a CUDA graph (training/step_graph.py)

    @property
    def model(self) -> Model:
        return self.layout.model

    def replicated_tensors(self) -> dict[str, Tensor]:
        """Return by name the tensors that ranks with the same part of the model hold alike."""
        return self.model.state_dict() | {key: tensor for key, (_, tensor) in _live_tensors(self).items()}

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside, the model has its averaged weights, if the run keeps an average. Every rank."""
        try:
            with self.ema.swapped() if self.ema is not None else nullcontext():
                self.layout.values_changed()
                yield
        finally:
            self.layout.values_changed()

    def snapshot(self, config: PretrainConfig, data: Data, world: World) -> Snapshot:
        """Return everything that a run needs to go on as if nothing had happened. Every rank."""
        progress_tensors = self.sums.tensors() | self.watch.tensors()
        return Snapshot(
            weights=self.layout.portable_weights(),
            shared=_portable(self) | {f"progress.{name}": tensor for name, tensor in progress_tensors.items()},
            slots=world.slice_of(config.num_slots),
            by_slot=_tensors_of(self.carry),
            state=RunState(
                **self.progress.model_dump(),
                fingerprint=data.fingerprint,
                task=data.sizes.as_dict(),
                config=config.model_dump(),
            ),
        )

    def restore(self, checkpoint: Checkpoint, config: PretrainConfig, world: World) -> None:
        """Overwrite everything but the weights with a checkpoint's state. Every rank."""
        saved, live, tensors = checkpoint.state, _live_tensors(self), _portable(self)
        own = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        own = {key: shape for part in world.gather_objects(own) for key, shape in part.items()}  # of all stages
        with world.shared_errors():
            require_same_state(checkpoint.sizes("optimizer"), _without_prefix("optimizer.", own))
            kept = [prefix for prefix in ("ema", "loss_scale") if checkpoint.sizes(prefix)]  # others begin here
            if "ema" in kept and self.ema is not None:
                require_same_average(checkpoint.sizes("ema"), _without_prefix("ema.", own))
            tensors = {key: tensor for key, tensor in tensors.items() if key.split(".")[0] in ("optimizer", *kept)}
            checkpoint.load_into(tensors)
        for key, tensor in tensors.items():
            self.layout.from_portable(live[key][0], tensor, live[key][1])
        self.progress = saved.progress()
        if (saved.config["best_metric"], saved.config["best_mode"]) != (config.best_metric, config.best_mode):
            self.progress.best, self.progress.evaluations_since_best = None, 0  # of another metric
        with world.shared_errors():
            progress_tensors = checkpoint.load("progress")
            self.sums.restore(progress_tensors)
            self.watch.restore(progress_tensors)
            # With another batch size there are other slots: sequences start anew, and the draws go
            # on.
            if self.carry is not None and saved.config["global_batch_size"] == config.global_batch_size:
                slots, fresh = checkpoint.load_slots(world.slice_of(config.global_batch_size)), self.carry.tensors()
                found = compare_shapes(shapes_of(slots), shapes_of(fresh))
                if found.missing or found.reshaped:
                    hint = how_arch_differs(saved.config, config.arch.model_dump()) or "its data or version is another"
                    raise UserError(f"the slots of {checkpoint.path} don't fit this model: {hint}")
                self.carry = Carry.from_tensors(
                    {name: slots[name].to(world.device, fresh[name].dtype) for name in fresh}
                )

    def local_tensors(self) -> dict[str, Tensor]:
        """Return the tensors on this rank that a step changes, but for open sums and losses."""
        live = {name: tensor for name, (_, tensor) in _live_tensors(self).items()}
        named = {"model": self.model.state_dict(), "live": live, "carry": _tensors_of(self.carry)}
        return {f"{group}.{name}": local_part(named[group][name]) for group in named for name in named[group]}

    def host_copy(self, config: PretrainConfig, world: World) -> HostCopy:
        """Return a copy of everything that a step of this rank changes. Every rank."""
        shared = self.sums.tensors() | self.watch.tensors()
        tensors = self.local_tensors() | {f"shared.{name}": tensor for name, tensor in shared.items()}
        return HostCopy(
            {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()},
            self.progress.model_copy(deep=True),
            (world.rank, world.size, config.parallel.name),
        )

    @torch.no_grad()
    def take_host_copy(self, copy: HostCopy, config: PretrainConfig, world: World) -> None:
        """Go on where another state was when `copy` was made, bit for bit. Every rank."""
        own, shared = self.local_tensors(), _without_prefix("shared.", copy.tensors)
        given = {name: tensor for name, tensor in copy.tensors.items() if not name.startswith("shared.")}
        place = (world.rank, world.size, config.parallel.name)
        with world.shared_errors():
            if copy.place != place:
                there, here = ("rank {} of {} with parallel={}".format(*of) for of in (copy.place, place))
                raise UserError(f"the state is that of {there}, here is {here}; give each rank the state of its own")
            if (name := compare_shapes(shapes_of(given), shapes_of(own)).first) is not None:
                raise UserError(
                    f"the state has another {name} than this run; give the state of a run with this model, optimizer, "
                    "strategy and batch size"
                )
        for name, tensor in own.items():
            tensor.copy_(given[name])
        self.layout.values_changed()
        self.sums.restore(shared)
        self.watch = NumberWatch(self.layout.objective.sums, world, config.loss_spike)
        self.watch.restore(shared)
        # In place, because others hold this object. What describes this run's folder stays.
        of_folder = {"wandb_run_id", "best", "evaluations_since_best", "failed_saves", "pending_row"}
        of_folder |= {"spent_s", "spent_until"}
        for name, value in copy.progress.model_copy(deep=True):
            if name not in of_folder:
                setattr(self.progress, name, value)


def optimizers_of(config: PretrainConfig, model: Model) -> Optimizers:
    """Build the optimizers of a run."""
    betas = (config.beta1, config.beta2)
    return build_optimizers(
        model, model.block_weights(), config.optim, lr=config.lr, betas=betas, weight_decay=config.weight_decay
    )


def require_same_run(checkpoint: Checkpoint, config: PretrainConfig, data: Data) -> list[str]:
    """Refuse other data, rows of text or first weights than the checkpoint's. Return notes."""
    saved, stored = checkpoint.state, checkpoint.state.config
    sources = filter(None, (stored["init_from"], stored["load_checkpoint"]))
    if config.initial_weights and config.initial_weights not in map(config.located, sources):
        raise UserError(
            f"init_from={config.initial_weights} is where a run begins, but {checkpoint.path} goes on; "
            "give another run_name and no resume to begin there"
        )
    before = stored["global_batch_size"] // stored[config.slots_key[0]]
    if before != config.units_per_slot:  # only rows of text hold more than one unit of the batch
        raise UserError(
            f"{checkpoint.path} was trained on rows of {before:,} tokens, and global_batch_size="
            f"{config.global_batch_size} in {config.rows_per_step} rows makes rows of {config.units_per_slot:,}, which "
            f"hold other samples; change both keys alike, such as global_batch_size={before * config.rows_per_step}"
        )
    shared = saved.fingerprint.keys() & data.fingerprint.keys()  # a run that doesn't evaluate opens no test split
    changed = sorted(split for split in shared if saved.fingerprint[split] != data.fingerprint[split])
    if changed and not config.allow_changed_data:
        raise UserError(
            f"{checkpoint.path} was trained on other data than {', '.join(config.train_paths)} holds now "
            f"({' and '.join(changed)} changed); give the data_path of that, or allow_changed_data=true to go on "
            "with these"
        )
    return [
        f"{split} data are others than before: {saved.fingerprint[split][:12]} -> {data.fingerprint[split][:12]}"
        for split in changed
    ]


def _tensors_of(carry: Carry | None) -> dict[str, Tensor]:
    return {} if carry is None else carry.tensors()


def _live_tensors(state: TrainState) -> dict[str, tuple[str, Tensor]]:
    """Return the state of the optimizers, the average and the loss scale, by names in a checkpoint.

    Each tensor comes with the name of the parameter as which it lies over the ranks. That name is
    empty for a tensor that lies whole on all ranks.
    """
    tensors = {
        f"optimizer.{name}": (name.split(".", 2)[2], tensor)
        for name, tensor in state.optimizers.export_state(state.model).items()
    }
    if state.ema is not None:
        tensors |= {f"ema.{name}": (name, tensor) for name, tensor in state.ema.tensors().items()}
    if state.loss_scale is not None:
        tensors |= {f"loss_scale.{name}": ("", tensor) for name, tensor in state.loss_scale.tensors().items()}
    return tensors


def _portable(state: TrainState) -> dict[str, Tensor]:
    """Return the live tensors in the form that any strategy can read. Every rank."""
    return {key: state.layout.to_portable(name, tensor) for key, (name, tensor) in _live_tensors(state).items()}


def _without_prefix(prefix: str, values: Mapping[str, T]) -> dict[str, T]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
