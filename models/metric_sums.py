"""Sums of METRICS that stay on the device until the host reads them all at once: one collective, one wait."""

# B = slots of this rank, N = sequences that leave, T = segments, S = tokens, V = vocabulary

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch
from torch import Tensor

from models.losses import LOSS_SUMS, METRICS, LossConfig, Outputs, act_loss, correctness, widest_float
from utils.dist.world import World
from utils.errors import UserError

EVAL_METRICS = ("exact_accuracy", "accuracy", "q_halt_accuracy", "steps", "halt_step", "lm_loss", "q_halt_loss")


# A spike is one against the median of so many steps before it, and of at least so many.
_SPIKE_WINDOW, _SPIKE_LEAST = 100, 10


class NotFinite(UserError):
    """A step that went wrong: gradients that are NaN or infinite, or a spike of the loss."""

    def __init__(self, step: int, what: str, last_good: str) -> None:
        super().__init__(
            f"{what}; {last_good}; go on with a lower lr or more lr_warmup_steps, or with on_nonfinite=rewind"
        )
        self.step, self.what, self.last_good = step, what, last_good


def _zeros(size: int, world: World) -> Tensor:
    return torch.zeros(size, dtype=widest_float(world.device), device=world.device)


class OpenSums:
    """What training has summed up since the last log; part of a checkpoint.

    `first_bad_step` is the first step whose gradients were not finite. Gradients are summed over ranks before their
    norm is taken, so every rank holds the same, unless its own memory fails; hence the ranks agree on it.
    """

    def __init__(self, world: World, loss_spike: float | None = None) -> None:
        """Args: loss_spike: how many times the median of the steps before it a step's lm_loss may be; None: any."""
        self._world, self._loss_spike = world, loss_spike
        self._unread: list[tuple[int, Tensor]] = []  # steps whose loss (per slot, this rank's share) nobody looked at
        self._losses: deque[float] = deque(maxlen=_SPIKE_WINDOW)  # of the steps before those, the whole batch's
        self._values = _zeros(len(METRICS) + 1, world)  # METRICS, then the norm of the gradients
        self._first_bad_step = torch.zeros((), dtype=torch.int32, device=world.device)
        self.num_steps = self.num_slots = 0  # of the global batches

    def add(self, step: int, global_batch_size: int, metric_sums: Tensor, grad_norm: Tensor) -> None:
        """Count a step: this rank's sums in the order of METRICS, and the norm that all ranks agree on."""
        share = (grad_norm / self._world.data_size).to(metric_sums.dtype)  # the sum over ranks makes it whole again
        self._values += torch.cat([metric_sums, share.view(1)])
        self.num_steps += 1
        self.num_slots += global_batch_size
        bad = (self._first_bad_step == 0) & ~grad_norm.isfinite()
        self._first_bad_step = torch.where(bad, step, self._first_bad_step)
        if self._loss_spike is not None:
            self._unread.append((step, metric_sums[METRICS.index("lm_loss")] / global_batch_size))

    def require_finite(self, last_good: Callable[[], str]) -> None:
        """The host waits for the device here. Every rank. Raises NotFinite, on every rank.

        Args: last_good: says where the run can be taken up again; asked only where that is needed.
        """
        self._world.await_peers()
        found = list[tuple[int, str]]()
        if (spike := self._first_spike()) is not None:
            step, loss, usual = spike
            many = f"{loss / usual:.3g} times the {usual:.4g} of the steps before it (loss_spike={self._loss_spike:g})"
            found.append((step, f"lm_loss is {loss:.4g} at step {step}, {many}"))
        if step := int(self._first_bad_step):
            found.append((step, f"the gradients are not finite (NaN or infinite) since step {step}"))
        if self._world.any(bool(found)):
            # Ranks that went back to different steps would leave out different batches, and wait for one another.
            step, what = min(bad for of_rank in self._world.gather_objects(found) for bad in of_rank)
            raise NotFinite(step, what, last_good())

    def _first_spike(self) -> tuple[int, float, float] | None:
        """Of the steps since the last look: step, loss, and the median of the steps before. Every rank, which all look
        at the same steps: the verdict on a step is the same whenever it is asked for.
        """
        if not self._unread or self._loss_spike is None:
            return None
        steps, shares = zip(*self._unread, strict=True)
        self._unread = []
        for step, loss in zip(steps, self._world.sum_(torch.stack(shares)).tolist(), strict=True):
            if not math.isfinite(loss):  # of a float16 step that wasn't taken; elsewhere the gradients tell
                continue
            if len(self._losses) >= _SPIKE_LEAST and loss > self._loss_spike * (usual := median(self._losses)):
                return step, loss, usual
            self._losses.append(loss)
        return None

    def reduce(self) -> dict[str, float]:
        """The train metrics, complete on rank 0, and zero again. Every rank.

        Losses are per slot and step; the others are means over the sequences that halted, left out if there were none.
        """
        if not self.num_steps:  # all were left out
            return {}
        *sums, grad_norm = self._world.sum_to_main_(self._values).tolist()
        named = dict(zip(METRICS, sums, strict=True))
        count = named.pop("count")
        row = {f"train/{name}": named.pop(name) / self.num_slots for name in LOSS_SUMS}
        row["train/grad_norm"] = grad_norm / self.num_steps
        if count > 0:
            row |= {f"train/{name}": value / count for name, value in named.items()}
        self._values.zero_()
        self.num_steps = self.num_slots = 0
        return row

    def tensors(self) -> dict[str, Tensor]:
        """For a checkpoint, after `require_finite`: the sums of each share of the slots (shares, values), and the
        losses that the next ones are compared with. Every rank.
        """
        losses = {"losses": torch.tensor(self._losses, dtype=torch.float64)} if self._losses else {}
        return {"open_sums": self._world.gather_rows(self._values[None]), **losses}

    def restore(self, tensors: Mapping[str, Tensor], num_steps: int, num_slots: int) -> None:
        """Each share its own where there are as many as before, so that the sums round alike; else all to the first."""
        by_rank = tensors["open_sums"]
        if "losses" in tensors:
            self._losses.extend(tensors["losses"].tolist())
        if by_rank.shape[1:] != self._values.shape:
            raise ValueError(
                f"the checkpoint has {tuple(by_rank.shape)} open sums; it is damaged or of another version"
            )
        if len(by_rank) == self._world.data_size:
            self._values.copy_(by_rank[self._world.data_rank])
        elif self._world.data_rank == 0:
            self._values.copy_(by_rank.sum(0))
        self.num_steps, self.num_slots = num_steps, num_slots


class EvalSums:
    """What an evaluation sums up over one set."""

    def __init__(self, num_segments: int, checks: Sequence[str], world: World) -> None:
        """`checks` names what `add_last` is told beside METRICS."""
        self._world, self._check_names = world, checks
        self._checks = _zeros(len(checks), world)
        self._last = _zeros(len(METRICS), world)
        self._exact_after = _zeros(num_segments, world)
        self._halt_steps = _zeros(1, world)
        self._num_sequences = _zeros(1, world)

    def add_segment(
        self, outputs: Outputs, labels_BS: Tensor, steps_B: Tensor, halted_before_B: Tensor, *, ignore_label: int
    ) -> None:
        """Count a segment, the steps_B-th (from 1) of each slot, before which the Q head would have halted some."""
        labelled_B, _, exact_B = correctness(outputs.logits_BSV, labels_BS, ignore_label)
        right_B = (labelled_B & exact_B).to(self._exact_after.dtype)
        self._exact_after.index_add_(0, steps_B - 1, right_B)
        self._halt_steps += (labelled_B & ~halted_before_B).sum()

    def add_last(
        self,
        outputs: Outputs,
        labels_NS: Tensor,
        steps_N: Tensor,
        checks: Mapping[str, Tensor],
        *,
        config: LossConfig,
        ignore_label: int,
    ) -> None:
        """Count the last segment of N sequences, and a bool (N,) for each name of the checks."""
        halted_N = torch.ones_like(steps_N, dtype=torch.bool)
        _, sums = act_loss(
            outputs, labels_NS, halted_B=halted_N, steps_B=steps_N, config=config, ignore_label=ignore_label
        )
        self._last += sums
        self._num_sequences += len(steps_N)
        labelled_N, _, exact_N = correctness(outputs.logits_BSV, labels_NS, ignore_label)
        # One that left early has its answer for all segments to come.
        segments_T = torch.arange(1, len(self._exact_after) + 1, device=steps_N.device)
        left_NT = segments_T > steps_N[:, None]
        self._exact_after += (left_NT & (labelled_N & exact_N)[:, None]).sum(0)
        if checks:
            self._checks += torch.stack([(labelled_N & checks[name]).sum() for name in self._check_names])

    def add(self, other: "EvalSums") -> None:
        """Count what another one counted."""
        for mine, others in zip(self._parts(), other._parts(), strict=True):
            mine += others

    def _parts(self) -> tuple[Tensor, ...]:
        return self._last, self._checks, self._exact_after, self._halt_steps, self._num_sequences

    def reduce(self) -> dict[str, float]:
        """EVAL_METRICS, the checks, exact_accuracy_at_step/<n> and num_examples, the same on all ranks. Every rank.

        Losses are per sequence, the others means over the num_examples that have labels, left out if there are none.
        """
        sums = self._world.sum_(torch.cat(self._parts())).tolist()
        named = dict(zip((*METRICS, *self._check_names), sums, strict=False))
        *exact_after, named["halt_step"], num_sequences = sums[len(named) :]
        count = named["count"]
        row: dict[str, float] = {}
        if num_sequences > 0:
            row |= {name: named[name] / num_sequences for name in EVAL_METRICS if name in LOSS_SUMS}
        if count > 0:
            row["num_examples"] = count
            means = (*(name for name in EVAL_METRICS if name not in LOSS_SUMS), *self._check_names)
            row |= {name: named[name] / count for name in means}
            row |= {f"exact_accuracy_at_step/{n}": value / count for n, value in enumerate(exact_after, start=1)}
        return row
