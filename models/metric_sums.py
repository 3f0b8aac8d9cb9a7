"""Sums of metrics, kept on the device until the host reads all of them at once."""

# B = slots of this rank, N = sequences that leave, T = segments, S = tokens, V = vocabulary

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from models.carry import Outputs
from models.losses import LOSS_SUMS, METRICS, TokenLossConfig, act_loss, correctness, widest_float
from models.objective import SLOTS, SumsSpec
from utils.errors import UserError
from utils.ranks.world import World

EVAL_METRICS = (*(name for name in METRICS if name not in ("count", "q_continue_loss")), "halt_step")
"""What every evaluation measures. The value of going on is learned, and never evaluated."""


NUM_BINS = 10
"""Bins of equal width for the confidence, from 0 to 1."""


def reliability_sums(q_halt_N: Tensor, right_N: Tensor, counted_N: Tensor) -> Tensor:
    """Return for each bin its answers, their confidence, and how many are right, (3, NUM_BINS)."""
    confidence_N = q_halt_N.sigmoid().to(widest_float(q_halt_N.device))
    bins_N = (confidence_N.nan_to_num() * NUM_BINS).long().clamp(max=NUM_BINS - 1)
    terms_3N = counted_N * torch.stack([torch.ones_like(confidence_N), confidence_N, right_N.to(confidence_N.dtype)])
    return torch.zeros(3, NUM_BINS, dtype=terms_3N.dtype, device=terms_3N.device).index_add_(1, bins_N, terms_3N)


def reliability(sums: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return whether the confidence is the accuracy, from the totals of `reliability_sums`.

    calibration_error is the expected calibration error (arXiv 1706.04599, equation 3).
    """
    counts, confidences, rights = sums
    total, error = sum(counts), 0.0
    row: dict[str, float] = {}
    for n, (count, confidence, right) in enumerate(zip(counts, confidences, rights, strict=True), start=1):
        if count:
            error += abs(right - confidence) / total
            values = {"count": count, "confidence": confidence / count, "accuracy": right / count}
            row |= {f"reliability/{n}/{name}": value for name, value in values.items()}
    return {"calibration_error": error} | row


def _zeros(size: int, world: World) -> Tensor:
    return torch.zeros(size, dtype=widest_float(world.device), device=world.device)


class OpenSums:
    """What training has summed up since the last log. A checkpoint holds these sums."""

    def __init__(self, spec: SumsSpec, world: World) -> None:
        self._spec, self._world = spec, world
        self._values = _zeros(len(spec.names) + 1, world)  # the sums, then the norm of the gradients

    def add(self, metric_sums: Tensor, grad_norm: Tensor) -> None:
        """Count a step: this rank's sums in the order of `SumsSpec.names`, and the scalar norm."""
        share = (grad_norm / self._world.data_size).to(metric_sums.dtype)  # the sum over ranks makes it whole again
        self._values += torch.cat([metric_sums, share.view(1)])

    def reduce(self, num_steps: int, num_slots: int) -> dict[str, float]:
        """Return the train metrics, and set the sums to zero. Every rank.

        A metric whose divisor is 0 is left out, such as the accuracy if no sequence halted.
        """
        if not num_steps:
            return {}
        *sums, grad_norm = self._world.sum_(self._values).tolist()
        spec, named = self._spec, {SLOTS: num_slots, **dict(zip(self._spec.names, sums, strict=True))}
        means = {name: named[name] / named[by] for name, by in spec.means.items() if named[by] > 0}
        row = {f"train/{name}": means.pop(name) for name in spec.losses if name in means}
        row["train/grad_norm"] = grad_norm / num_steps
        row |= {f"train/{name}": mean for name, mean in means.items()}
        self._values.zero_()
        return row

    def tensors(self) -> dict[str, Tensor]:
        """Return the sums of all shares for a checkpoint, (shares, values). Every rank."""
        return {"open_sums": self._world.gather_rows(self._values[None])}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the sums of a checkpoint.

        With as many shares as before, each takes its own, so that the sums round alike. Otherwise
        the first share takes them all. At a logged step nothing is open.
        """
        by_rank = tensors["open_sums"]
        if by_rank.shape[1:] != self._values.shape:
            if not by_rank.any():
                return
            raise UserError(
                f"the checkpoint holds open sums of {by_rank.shape[-1] - 1} metrics, but this model has "
                f"{len(self._spec.names)}; resume from a step that was logged, or start a new run with init_from=<run>"
            )
        if len(by_rank) == self._world.data_size:
            self._values.copy_(by_rank[self._world.data_rank])
        elif self._world.data_rank == 0:
            self._values.copy_(by_rank.sum(0))


class EvalSums:
    def __init__(self, num_segments: int, checks: Sequence[str], world: World) -> None:
        """Start all sums at zero. `checks` are names of what `add_last` counts beside METRICS."""
        self._world, self._checks = world, checks
        self._sizes = [len(METRICS) + len(checks), num_segments, 1, 1, 3 * NUM_BINS, num_segments, num_segments]
        self._all = _zeros(sum(self._sizes), world)
        # Views, so that what they are added is added to the whole.
        (self._last, self._exact_after, self._halt_steps, self._num_sequences, *more) = self._all.split(self._sizes)
        self._reliability, self._deltas, self._num_deltas = more

    def add_segment(
        self,
        outputs: Outputs,
        labels_BS: Tensor,
        steps_B: Tensor,
        halted_before_B: Tensor,
        deltas_B: Tensor | None = None,
    ) -> None:
        """Count one segment.

        Args:
            steps_B: the number of the segment in each slot's sequence, from 1.
            halted_before_B: whether the Q head wanted to halt the sequence earlier.
        """
        labelled_B, _, exact_B = correctness(outputs.logits_BSV, labels_BS)
        right_B = (labelled_B & exact_B).to(self._exact_after.dtype)
        self._exact_after.index_add_(0, steps_B - 1, right_B)
        self._halt_steps += (labelled_B & ~halted_before_B).sum()
        if deltas_B is not None:
            self._deltas.index_add_(0, steps_B - 1, deltas_B.to(right_B.dtype).where(labelled_B, 0))
            self._num_deltas.index_add_(0, steps_B - 1, labelled_B.to(right_B.dtype))

    def add_last(
        self,
        outputs: Outputs,
        labels_NS: Tensor,
        steps_N: Tensor,
        checks: Mapping[str, Tensor],
        *,
        config: TokenLossConfig,
    ) -> None:
        """Count the last segment of N sequences, and a bool (N,) for each name of the checks."""
        halted_N = torch.ones_like(steps_N, dtype=torch.bool)
        _, sums = act_loss(outputs, labels_NS, halted_B=halted_N, steps_B=steps_N, config=config)
        self._num_sequences += len(steps_N)
        labelled_N, _, exact_N = correctness(outputs.logits_BSV, labels_NS)
        # A sequence that left early keeps its answer for all later segments.
        segments_T = torch.arange(1, len(self._exact_after) + 1, device=steps_N.device)
        left_NT = segments_T > steps_N[:, None]
        self._exact_after += (left_NT & (labelled_N & exact_N)[:, None]).sum(0)
        self._reliability += reliability_sums(outputs.q_halt_B, exact_N, labelled_N).flatten()
        self._last += torch.stack([*sums, *((labelled_N & checks[name]).sum() for name in self._checks)])

    def add(self, other: "EvalSums") -> None:
        self._all += other._all

    def reduce(self, *, calibration: bool = False) -> dict[str, float]:
        """Return the metrics of the evaluation, the same on all ranks. Every rank.

        Losses are means over all sequences. The other metrics are means over the num_examples
        sequences that have labels; they are left out if no sequence has labels.
        """
        totals = self._world.sum_(self._all.clone()).split(self._sizes)
        last, exact_after, (halt_step,), (num_sequences,), bins, deltas, num_deltas = map(Tensor.tolist, totals)
        named = {"halt_step": halt_step, **dict(zip((*METRICS, *self._checks), last, strict=True))}
        count = named["count"]
        row: dict[str, float] = {}
        if num_sequences > 0:
            row |= {name: named[name] / num_sequences for name in EVAL_METRICS if name in LOSS_SUMS}
        if count > 0:
            row["num_examples"] = count
            means = (*(name for name in EVAL_METRICS if name not in LOSS_SUMS), *self._checks)
            row |= {name: named[name] / count for name in means}
            row |= {f"exact_accuracy_at_step/{n}": value / count for n, value in enumerate(exact_after, start=1)}
        for n, (total, num) in enumerate(zip(deltas, num_deltas, strict=True), start=1):
            if num:
                row |= {f"loop_deltas/{n}": total / num, f"running/{n}": num / count}
        if calibration and count > 0:
            row |= reliability([bins[start : start + NUM_BINS] for start in range(0, len(bins), NUM_BINS)])
        return row
