"""More accuracy for the same training: the options, trajectories and restarts, and what they cost.

The votes of symmetries in an evaluation are in training/evaluation.py.
"""
# N = sequences that leave, S = tokens of a puzzle, R = examples of this rank, K = trajectories of
# an example, C = flags, B = puzzles of a batch, T = segments

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from pydantic import Field, model_validator

from dataset.evaluators import Evaluators
from dataset.loader import EvalLoader
from dataset.schema import IGNORE_LABEL, Split
from dataset.tta import Variations, winner
from models.base import RecursiveModel
from models.inference import Finished, Slots, Trace, trace
from models.losses import correctness, widest_float
from models.metric_sums import reliability, reliability_sums
from models.trajectories import Trajectories
from training.evaluation import EvalOptions, answers_of, cropped, evaluate_votes
from utils.batch import Batch
from utils.config import Float, Int, StrictModel
from utils.errors import UserError
from utils.ranks.world import World


class MoreCompute(StrictModel):
    """The keys that spend more segments on a puzzle; config/evaluate.yaml says what each means."""

    num_steps: Int | None = Field(gt=0)
    trajectories: Int = Field(ge=1, le=10**6)
    restarts: Int = Field(ge=0, lt=10**6)
    noise: Float = Field(ge=0)
    tta: Int | None = Field(ge=2)
    seed: Int = Field(ge=0)

    @model_validator(mode="after")
    def _noise_needs_several_passes(self) -> "MoreCompute":
        if self.noise and self.trajectories == 1 and not self.restarts:
            raise ValueError(
                f"noise={self.noise} moves every trajectory but the first, and there is only one; give trajectories=8, "
                "restarts=8, or leave noise out"
            )
        return self

    def require_noise_for_seed(self) -> None:
        """Raise UserError if a seed is given that changes nothing."""
        if self.seed and not self.noise:
            raise UserError(f"seed={self.seed} is that of the noise, but there is no noise; leave it out")

    def require_different_passes(self, model: RecursiveModel) -> None:
        """Raise UserError if several passes would be the same."""
        num_states = model.config.num_states
        for key, count in (("trajectories", self.trajectories), ("restarts", self.restarts + 1)):
            if count > num_states and not self.noise:
                has = f", as the model has {num_states} initial states" if num_states > 1 else ""
                raise UserError(
                    f"{key}={getattr(self, key)} without noise repeats the same pass{has}; give noise=0.5 as well"
                )
        if self.noise and not has_state(model):
            raise UserError(
                f"noise={self.noise} moves the recurrent state, but arch={model.config.name} has none; leave it out"
            )

    @property
    def chooses_among_passes(self) -> bool:
        return self.trajectories > 1 or self.restarts > 0 or self.tta is not None

    @property
    def side_by_side(self) -> Trajectories | None:
        """The trajectories of which the most confident one answers; None: only one pass."""
        return Trajectories(self.trajectories, self.noise, self.seed) if self.trajectories > 1 else None

    @property
    def one_by_one(self) -> Trajectories | None:
        """The trajectories of which the first that settles answers; None: no restarts."""
        return Trajectories(self.restarts + 1, self.noise, self.seed) if self.restarts else None

    @property
    def num_passes(self) -> int:
        """The most passes over a puzzle that run side by side."""
        return self.tta or self.trajectories


def has_state(model: RecursiveModel) -> bool:
    """Return whether a model hands a state from segment to segment."""
    return bool(model.initial_state(1, torch.device("cpu")))


@dataclass(frozen=True)
class Cost:
    """A row of the table of accuracy against compute."""

    set_name: str
    method: str  # the keys that ask for it, such as "trajectories=8 noise=0.5"
    segments: float  # the mean of an example
    exact_accuracy: float


def costs(config: MoreCompute, metrics: Mapping[str, float], set_name: str, trained_steps: int) -> list[Cost]:
    """Return the accuracy of a set against compute for the single pass and whatever was asked for.

    Args:
        trained_steps: the segments of an example in training.
    """
    of_set = f"eval/{set_name}"
    if f"{of_set}/exact_accuracy" not in metrics:  # no labels
        return []
    num_steps, found = config.num_steps or trained_steps, list[tuple[str, float, float]]()
    if num_steps > trained_steps and f"{of_set}/running/1" in metrics:
        segments = sum(metrics.get(f"{of_set}/running/{n}", 0.0) for n in range(1, trained_steps + 1))
        accuracy = metrics[f"{of_set}/exact_accuracy_at_step/{trained_steps}"]
        found.append((f"single pass of {trained_steps} steps", segments, accuracy))
    single = metrics[f"{of_set}/steps"], metrics[f"{of_set}/exact_accuracy"]
    found.append((f"single pass of {num_steps} steps", *single))
    methods = list[tuple[str, str, str]]()
    noise = f" noise={config.noise}" if config.noise else ""
    for name, count in (("trajectories", config.trajectories), ("restarts", config.restarts + 1)):
        less = 0 if name == "trajectories" else 1  # the first pass is no restart
        methods += [(f"{name}={k - less}{noise}", name, f"_of/{k}") for k in _powers_below(count) if k > 1]
        if count > 1:
            methods.append((f"{name}={count - less}{noise}", name, ""))
    if config.tta is not None:
        methods.append((f"tta={config.tta}", "tta", ""))
    for method, name, suffix in methods:
        segments, accuracy = (metrics[f"{of_set}/{name}/{each}{suffix}"] for each in ("segments", "exact_accuracy"))
        found.append((method, segments, accuracy))
    return [Cost(set_name, *each) for each in found]


def _powers_below(count: int) -> list[int]:
    return [2**power for power in range(count.bit_length()) if 2**power < count]


def evaluate_more(
    config: MoreCompute,
    model: RecursiveModel,
    split: Split,
    world: World,
    options: EvalOptions,
    evaluators: Evaluators,
    variations: Variations | None,
) -> dict[str, float]:
    """Return the metrics of trajectories, restarts and votes, as far as asked. Every rank."""
    given = model, split, world, options
    metrics: dict[str, float] = {}
    for trajectories, one_by_one in ((config.side_by_side, False), (config.one_by_one, True)):
        if trajectories is not None:
            metrics |= evaluate_trajectories(
                *given, evaluators=evaluators, trajectories=trajectories, one_by_one=one_by_one
            )
    if variations is not None:
        metrics |= evaluate_votes(*given, evaluators=evaluators, variations=variations)
    return metrics


@torch.no_grad()
def evaluate_trajectories(
    model: RecursiveModel,
    split: Split,
    world: World,
    options: EvalOptions,
    *,
    evaluators: Evaluators,
    trajectories: Trajectories,
    one_by_one: bool,
) -> dict[str, float]:
    """Let one of several trajectories answer each example. All ranks get the same metrics. Every
    rank.

    Args:
        one_by_one: run a trajectory only if all earlier ones did not settle. The trajectory that
            settled answers. Otherwise, and if none settled, the one with the largest q_halt does;
            the earlier one wins a tie.

    Returns:
        eval/<set>/<trajectories or restarts>/<name>. The means are over the examples with labels:
        exact_accuracy, what the evaluators judge, segments (of all trajectories of an example
        together), calibration_error, and any_exact_accuracy, the share of examples that at least
        one trajectory solves. exact_accuracy_of/<k> and segments_of/<k> are those of the first
        k = 1, 2, 4, ... trajectories alone.
    """
    prefix, count = "restarts" if one_by_one else "trajectories", trajectories.count
    metrics: dict[str, float] = {}
    for set_name in split.sets:
        race = _Race(model, split, set_name, world, options, evaluators, trajectories)
        for chosen in [range(k, k + 1) for k in range(count)] if one_by_one else [range(count)]:
            race.run(chosen)
        found = race.metrics(one_by_one=one_by_one)
        metrics |= {f"eval/{set_name}/{prefix}/{name}": value for name, value in found.items()}
    return metrics


class _Race:
    """The trajectories of the examples of one set.

    The arrays say of each trajectory of this rank's examples how many segments it took (0 if it did
    not run), whether it settled, its q_halt, and its flags: whether the example has labels, and
    whether the answer is exactly right and passes each of the evaluators' checks.
    """

    def __init__(
        self,
        model: RecursiveModel,
        split: Split,
        set_name: str,
        world: World,
        options: EvalOptions,
        evaluators: Evaluators,
        trajectories: Trajectories,
    ) -> None:
        self._model, self._world, self._options = model, world, options
        self._evaluators, self._trajectories = evaluators, trajectories
        self._set_name, self._corner = set_name, split.sets[set_name].corner
        self._loader = EvalLoader(split, set_name, options.batch_size, options.max_examples)
        self._rows_R = np.concatenate([np.zeros(0, np.int64), *self._loader.shares(world)])
        shape = len(self._rows_R), trajectories.count
        self._steps_RK = np.zeros(shape, np.int64)
        self._settled_RK = np.zeros(shape, bool)
        self._q_halt_RK = np.full(shape, -np.inf, np.float32)
        self._flags_RKC = np.zeros((*shape, 2 + len(evaluators.checks)), bool)

    def run(self, chosen: range) -> None:
        """Run these trajectories of the examples of which none has settled yet. Every rank."""
        world, options = self._world, self._options
        rows_R = self._rows_R[~self._settled_RK.any(1)]
        at_once = max(1, options.batch_size // world.size // len(chosen))
        shares = (rows_R[start : start + at_once] for start in range(0, len(rows_R), at_once))
        slots = Slots(
            self._model,
            self._trajectories.spread(self._loader.read(shares, world), chosen),
            num_steps=options.num_steps or self._model.config.halt_max_steps,
            adaptive=options.adaptive,
            trajectories=self._trajectories,
        )
        while any(world.any_of(slots.busy)):  # together, so that no rank waits longer than its groups allow
            if slots.busy and (done := slots.advance().finished) is not None:
                self._note(done)
        with world.shared_errors():
            self._loader.require_all_read()

    def _note(self, done: Finished) -> None:
        if self._corner is not None:
            done = cropped(done, self._corner)
        rows_N, trajectories_N = np.divmod(done.rows_N, self._trajectories.count)
        places = np.searchsorted(self._rows_R, rows_N), trajectories_N  # the loader reads in order
        labelled_N, _, exact_N = correctness(done.outputs.logits_BSV, done.batch["labels"], IGNORE_LABEL)
        judged = self._evaluators.judge(done.batch["inputs"], answers_of(done, self._corner), self._set_name)
        flags_NC = torch.stack([labelled_N, exact_N, *(judged[name] for name in self._evaluators.checks)], -1)
        self._steps_RK[places] = done.steps_N.cpu().numpy()
        self._settled_RK[places] = done.settled_N.cpu().numpy()
        self._q_halt_RK[places] = done.outputs.q_halt_B.float().cpu().numpy()
        self._flags_RKC[places] = flags_NC.cpu().numpy()

    def metrics(self, *, one_by_one: bool) -> dict[str, float]:
        num_trajectories = self._trajectories.count
        flags_RC, q_halt_R = self._answers(num_trajectories, one_by_one=one_by_one)
        labelled_R = flags_RC[:, 0]
        sums = {"count": labelled_R.sum()}
        for k in (num_trajectories, *_powers_below(num_trajectories)):
            suffix = "" if k == num_trajectories else f"_of/{k}"
            right_R = self._answers(k, one_by_one=one_by_one)[0][:, 1]
            sums[f"exact_accuracy{suffix}"] = (labelled_R & right_R).sum()
            sums[f"segments{suffix}"] = self._steps_RK[labelled_R, :k].sum()
        sums["any_exact_accuracy"] = (labelled_R & self._flags_RKC[:, :, 1].any(1)).sum()
        sums |= {name: (labelled_R & flags_RC[:, 2 + n]).sum() for n, name in enumerate(self._evaluators.checks)}
        bins = reliability_sums(torch.from_numpy(q_halt_R), *map(torch.from_numpy, (flags_RC[:, 1], labelled_R)))
        mine = torch.cat([torch.tensor([float(value) for value in sums.values()], dtype=bins.dtype), bins.flatten()])
        total = self._world.sum_(mine.to(self._world.device, widest_float(self._world.device)))
        count, *values = total[: len(sums)].tolist()
        if not count:
            return {}
        row = {name: value / count for name, value in zip(list(sums)[1:], values, strict=True)}
        return row | {"calibration_error": reliability(total[len(sums) :].view(3, -1).tolist())["calibration_error"]}

    def _answers(self, k: int, *, one_by_one: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return flags and q_halt of the answers that the first k trajectories give."""
        ranks_RK = _ranks(torch.from_numpy(self._q_halt_RK[:, :k])).numpy()
        if one_by_one:
            ranks_RK = np.where(self._settled_RK[:, :k], np.inf, ranks_RK)
        winner_R1 = ranks_RK.argmax(1)[:, None]
        flags_RC = np.take_along_axis(self._flags_RKC[:, :k], winner_R1[..., None], 1)[:, 0]
        return flags_RC, np.take_along_axis(self._q_halt_RK, winner_R1, 1)[:, 0]


def _ranks(q_halt: torch.Tensor) -> torch.Tensor:
    """Return by what trajectories are compared: q_halt, where NaN is the lowest value.

    Its sigmoid would not do: it is 1 from 17 on.
    """
    return q_halt.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


# ---- answers to puzzles of a user --------------------------------------------------------------


def trace_with_more(
    model: RecursiveModel, batch: Batch, rows_B: np.ndarray, config: MoreCompute, variations: Variations | None
) -> Trace:
    """Answer puzzles as `trace` does, but let trajectories, restarts or votes choose among passes.

    Every pass runs all of its segments. The last segment says how confident a pass is, and whether
    it settled.

    Args:
        rows_B: the numbers of the puzzles, on which noise and symmetries depend.

    Returns:
        The pass whose answer won; of votes, the first such variation, turned back.
    """
    if variations is not None:
        return _trace_of_votes(model, batch, rows_B, config.num_steps, variations)
    trajectories = config.side_by_side or config.one_by_one
    if trajectories is None:
        return trace(model, batch, config.num_steps)

    def traced(batch: Batch, rows: np.ndarray, chosen: range) -> Trace:
        ((numbers_N, spread),) = trajectories.spread(iter([(rows, batch)]), chosen)
        return trace(model, spread, config.num_steps, trajectories=trajectories, numbers_N=numbers_N)

    if config.side_by_side is not None:
        seen = traced(batch, rows_B, range(trajectories.count))
        last_BK = _ranks(seen.q_halt_TN[-1]).view(len(rows_B), -1)
        return _chosen(seen, torch.arange(len(rows_B), device=last_BK.device) * last_BK.shape[1] + last_BK.argmax(1))
    best = traced(batch, rows_B, range(1))
    for k in range(1, trajectories.count):
        open_N = (~best.settled_N).nonzero()[:, 0]
        if not len(open_N):
            break
        rest = {name: tensor[open_N] for name, tensor in batch.items()}
        seen = traced(rest, rows_B[open_N.cpu().numpy()], range(k, k + 1))
        surer_N = _ranks(seen.q_halt_TN[-1]) > _ranks(best.q_halt_TN[-1, open_N])
        better = (seen.settled_N | surer_N).nonzero()[:, 0]
        places, seen = open_N[better], _chosen(seen, better)
        best.predictions_TNS[:, places], best.q_halt_TN[:, places] = seen.predictions_TNS, seen.q_halt_TN
        best.settled_at_N[places], best.settled_N[places] = seen.settled_at_N, seen.settled_N
    return best


def _trace_of_votes(
    model: RecursiveModel, batch: Batch, rows_B: np.ndarray, num_steps: int | None, variations: Variations
) -> Trace:
    ((numbers_N, spread),) = variations.spread(iter([(rows_B, batch)]))
    seen = trace(model, spread, num_steps)
    turned_back = [variations.undo(numbers_N, predictions_NS) for predictions_NS in seen.predictions_TNS]
    answers_NS, confidence_N = turned_back[-1].cpu().numpy(), seen.confidence_TN[-1].float().cpu().numpy()
    places = []
    for first in range(0, len(numbers_N), variations.count):
        votes = [(answers_NS[n], float(confidence_N[n])) for n in range(first, first + variations.count)]
        won_S = winner(votes)
        places.append(first + next(k for k, (answer_S, _) in enumerate(votes) if np.array_equal(answer_S, won_S)))
    voted = replace(seen, predictions_TNS=torch.stack(turned_back))
    return _chosen(voted, torch.tensor(places, device=seen.settled_N.device))


def _chosen(seen: Trace, places: torch.Tensor) -> Trace:
    return Trace(
        seen.predictions_TNS[:, places],
        seen.q_halt_TN[:, places],
        seen.settled_at_N[places],
        seen.settled_N[places],
    )
