"""More accuracy for the same training: trajectories, restarts and votes, and what they cost."""
# N = sequences that leave, S = tokens of a puzzle, R = examples of this rank, K = trajectories of
# an example, C = flags, B = puzzles of a batch, T = segments

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from dataset.evaluators import Evaluators
from dataset.loader import EvalLoader
from dataset.schema import Split
from dataset.tta import Ballots, Variations, winner
from models.base import RecursiveModel
from models.inference import Examples, Finished, Slots, Trace, trace
from models.losses import widest_float
from models.metric_sums import reliability, reliability_sums
from models.trajectories import Trajectories
from training.evaluation import EvalOptions, on_boards
from utils.batch import IGNORE_LABEL, Batch
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

    def require_different_passes(self, model: RecursiveModel) -> None:
        """Raise UserError if several passes would be the same, or a seed changes nothing."""
        num_states, has_noise = model.config.num_states, self.noise or model.config.noise != "none"
        if self.seed and not has_noise:
            raise UserError(f"seed={self.seed} is that of the noise, but there is no noise; leave it out")
        for key, count in self.methods.items():
            if key != "tta" and count > num_states and not has_noise:
                has = f", as the model has {num_states} initial states" if num_states > 1 else ""
                raise UserError(
                    f"{key}={getattr(self, key)} without noise repeats the same pass{has}; give noise=0.5 as well"
                )
        if self.noise and not has_state(model):
            raise UserError(
                f"noise={self.noise} moves the recurrent state, but arch={model.config.name} has none; leave it out"
            )

    @property
    def methods(self) -> dict[str, int]:
        """The keys that let several passes answer a puzzle, and the most passes of each."""
        counts = {"trajectories": self.trajectories, "restarts": self.restarts + 1, "tta": self.tta or 1}
        return {key: count for key, count in counts.items() if count > 1}


def has_state(model: RecursiveModel) -> bool:
    """Return whether a model hands a state from segment to segment."""
    return bool(model.initial_state(1, torch.device("cpu")))


def costs(config: MoreCompute, metrics: Mapping[str, float], set_name: str, trained_steps: int) -> list[dict[str, Any]]:
    """Return the accuracy of a set against compute: of the single pass, and of what was asked for.

    A method is called as it is typed, and segments are the mean of an example. A set without labels
    has no rows.
    """
    of_set, found = f"eval/{set_name}", list[tuple[str, float, float]]()
    if f"{of_set}/exact_accuracy" not in metrics:
        return []
    num_steps = config.num_steps or trained_steps
    if num_steps > trained_steps and f"{of_set}/running/1" in metrics:
        segments = sum(metrics.get(f"{of_set}/running/{n}", 0.0) for n in range(1, trained_steps + 1))
        accuracy = metrics[f"{of_set}/exact_accuracy_at_step/{trained_steps}"]
        found.append((f"single pass of {trained_steps} steps", segments, accuracy))
    single = metrics[f"{of_set}/steps"], metrics[f"{of_set}/exact_accuracy"]
    found.append((f"single pass of {num_steps} steps", *single))
    for key, count in config.methods.items():
        for k in [count] if key == "tta" else [*(k for k in _powers_below(count) if k > 1), count]:
            method = f"{key}={k - 1 if key == 'restarts' else k}"  # the first pass is no restart
            noise = f" noise={config.noise}" if config.noise and key != "tta" else ""
            of = "" if k == count else f"_of/{k}"
            segments, accuracy = (metrics[f"{of_set}/{key}/{each}{of}"] for each in ("segments", "exact_accuracy"))
            found.append((method + noise, segments, accuracy))
    return [
        {"set_name": set_name, "method": method, "segments": segments, "exact_accuracy": accuracy}
        for method, segments, accuracy in found
    ]


def _powers_below(count: int) -> list[int]:
    return [2**power for power in range(count.bit_length()) if 2**power < count]


@torch.no_grad()
def evaluate_more(
    config: MoreCompute,
    model: RecursiveModel,
    split: Split,
    world: World,
    options: EvalOptions,
    evaluators: Evaluators,
) -> dict[str, float]:
    """Let several passes answer each example. All ranks get the same metrics. Every rank.

    Returns:
        eval/<set>/<trajectories, restarts or tta>/<name>. The means are over the examples with
        labels: exact_accuracy, what the evaluators judge, and segments, those of all passes of an
        example together. Not of votes: calibration_error; any_exact_accuracy, the share of examples
        that at least one pass solves; exact_accuracy_of/<k> and segments_of/<k> of the first k =
        1, 2, 4, ... passes alone.
    """
    metrics: dict[str, float] = {}
    for method, count in config.methods.items():
        for set_name in split.sets:
            passes = _Passes(model, split, set_name, world, options, evaluators, count)
            if method == "tta":
                found = passes.vote(Variations.of(split, count).of_set(split, set_name))
            else:
                trajectories = Trajectories(count, config.noise, config.seed)
                found = passes.race(trajectories, one_by_one=method == "restarts")
            metrics |= {f"eval/{set_name}/{method}/{name}": value for name, value in found.items()}
    return metrics


@dataclass
class _Passes:
    """Several passes over each of this rank's examples of a set.

    The arrays say of each pass how many segments it took (0 if it did not run), whether it settled,
    its q_halt, and its flags: whether the example has labels, and whether the answer is exactly
    right and passes each of the evaluators' checks.
    """

    model: RecursiveModel
    split: Split
    set_name: str
    world: World
    options: EvalOptions
    evaluators: Evaluators
    count: int

    def __post_init__(self) -> None:
        options, self._corner = self.options, self.split.sets[self.set_name].corner
        self._loader = EvalLoader(self.split, self.set_name, options.batch_size, options.max_examples)
        self._rows_R = np.concatenate([np.zeros(0, np.int64), *self._loader.shares(self.world)])
        shape = len(self._rows_R), self.count
        self._steps_RK, self._settled_RK = np.zeros(shape, np.int64), np.zeros(shape, bool)
        self._q_halt_RK = np.full(shape, -np.inf, np.float32)
        self._flags_RKC = np.zeros((*shape, 2 + len(self.evaluators.checks)), bool)

    def race(self, trajectories: Trajectories, *, one_by_one: bool) -> dict[str, float]:
        """Let one of several trajectories answer each example, and return the metrics. Every rank.

        Args:
            one_by_one: run a trajectory only if all earlier ones did not settle. The trajectory
                that settled answers. Otherwise, and if none settled, the one with the largest
                q_halt does; the earlier one wins a tie.
        """
        for chosen in [range(k, k + 1) for k in range(self.count)] if one_by_one else [range(self.count)]:
            for done, places in self._run(chosen, partial(trajectories.spread, chosen=chosen), trajectories):
                done, answers_NS = on_boards(done, self._corner)
                self._flags_RKC[places] = self._flags(done.batch["inputs"], answers_NS, done.batch["labels"])

        def answers(k: int) -> tuple[np.ndarray, np.ndarray]:
            """Return flags and q_halt of the answers that the first k trajectories give."""
            ranks_RK = _ranks(torch.from_numpy(self._q_halt_RK[:, :k])).numpy()
            if one_by_one:
                ranks_RK = np.where(self._settled_RK[:, :k], np.inf, ranks_RK)
            winner_R1 = ranks_RK.argmax(1)[:, None]
            flags_RC = np.take_along_axis(self._flags_RKC[:, :k], winner_R1[..., None], 1)[:, 0]
            return flags_RC, np.take_along_axis(self._q_halt_RK, winner_R1, 1)[:, 0]

        flags_RC, q_halt_R = answers(self.count)
        labelled_R, right_R = flags_RC[:, 0], flags_RC[:, 1]
        more = {"any_exact_accuracy": (labelled_R & self._flags_RKC[:, :, 1].any(1)).sum()}
        for k in _powers_below(self.count):
            more[f"exact_accuracy_of/{k}"] = (labelled_R & answers(k)[0][:, 1]).sum()
            more[f"segments_of/{k}"] = self._steps_RK[labelled_R, :k].sum()
        found = self._means(flags_RC, more)
        bins = reliability_sums(*map(torch.from_numpy, (q_halt_R, right_R, labelled_R)))
        total = self.world.sum_(bins.to(self.world.device, widest_float(self.world.device)))
        if found:
            found["calibration_error"] = reliability(total.tolist())["calibration_error"]
        return found

    def vote(self, variations: Variations) -> dict[str, float]:
        """Let the variations of each example vote, and return the metrics. Every rank."""
        ballots = Ballots(self.count)
        for done, (places_N, _) in self._run(range(self.count), variations.spread):
            answers_NS = variations.undo(done.rows_N, done.outputs.logits_BSV.argmax(-1)).cpu().numpy()
            confidence_N = done.outputs.q_halt_B.sigmoid().float().cpu().numpy()
            if decided := ballots.cast(done.rows_N, answers_NS, confidence_N):
                # The last variation to come in says which puzzle it is, turned back as answers are.
                last = [index for index, _ in decided]
                voted_BS = torch.from_numpy(np.stack([answer_S for _, answer_S in decided]))
                inputs_BS = variations.undo(done.rows_N[last], done.batch["inputs"][last]).cpu()
                labels_BS = done.batch["labels"][last].cpu()
                if self._corner is not None:
                    labels_BS = self._corner.crop(labels_BS)
                self._flags_RKC[places_N[last]] = self._flags(inputs_BS, voted_BS, labels_BS)[:, None]
        return self._means(self._flags_RKC[:, 0], {})

    def _run(
        self,
        chosen: range,
        spread: Callable[[Iterator[Examples]], Iterator[Examples]],
        trajectories: Trajectories | None = None,
    ) -> Iterator[tuple[Finished, tuple[np.ndarray, np.ndarray]]]:
        """Run these passes over the examples of which none has settled yet. Every rank.

        Yield passes that have ended, and their places in the arrays.
        """
        world, options = self.world, self.options
        rows_R = self._rows_R[~self._settled_RK.any(1)]
        at_once = max(1, options.batch_size // world.size // len(chosen))
        shares = (rows_R[start : start + at_once] for start in range(0, len(rows_R), at_once))
        slots = Slots(
            self.model,
            spread(self._loader.read(shares, world)),
            num_steps=options.num_steps or self.model.config.halt_max_steps,
            adaptive=options.adaptive,
            trajectories=trajectories,
        )
        while any(world.any_of(slots.busy)):  # together, so that no rank waits longer than its groups allow
            if slots.busy and (done := slots.advance().finished) is not None:
                rows_N, passes_N = np.divmod(done.rows_N, self.count)
                places = np.searchsorted(self._rows_R, rows_N), passes_N  # the loader reads in order
                self._steps_RK[places] = done.steps_N.cpu().numpy()
                self._settled_RK[places] = done.settled_N.cpu().numpy()
                self._q_halt_RK[places] = done.outputs.q_halt_B.float().cpu().numpy()
                yield done, places
        with world.shared_errors():
            self._loader.require_all_read()

    def _flags(self, inputs_NS: Tensor, answers_NS: Tensor, labels_NS: Tensor) -> np.ndarray:
        is_label_NS = labels_NS != IGNORE_LABEL
        exact_N = (~is_label_NS | (answers_NS == labels_NS)).all(1)
        judged = self.evaluators.judge(inputs_NS, answers_NS, self.set_name)
        flags = [is_label_NS.any(1), exact_N, *(judged[name] for name in self.evaluators.checks)]
        return np.stack([flag_N.cpu().numpy() for flag_N in flags], -1)

    def _means(self, flags_RC: np.ndarray, more: Mapping[str, Any]) -> dict[str, float]:
        """Return the means of the answers, of the segments and of `more` sums. Every rank."""
        labelled_R, device = flags_RC[:, 0], self.world.device
        names = ("exact_accuracy", *self.evaluators.checks)
        sums = {name: (labelled_R & flags_RC[:, 1 + n]).sum() for n, name in enumerate(names)}
        sums |= {"segments": self._steps_RK[labelled_R].sum(), **more}
        mine = torch.tensor([int(value) for value in (labelled_R.sum(), *sums.values())])
        count, *values = self.world.sum_(mine.to(device, widest_float(device))).tolist()
        return {name: value / count for name, value in zip(sums, values, strict=True)} if count else {}


def _ranks(q_halt: Tensor) -> Tensor:
    """Return by what trajectories are compared: q_halt, where NaN is the lowest value.

    Its sigmoid would not do: it is 1 from 17 on.
    """
    return q_halt.float().nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


# ---- answers to puzzles of a user --------------------------------------------------------------


def trace_with_more(
    model: RecursiveModel, batch: Batch, rows_B: np.ndarray, config: MoreCompute, variations: Variations | None
) -> Trace:
    """Answer puzzles as `trace` does, but let trajectories, restarts or votes choose among passes.

    Every pass runs all of its segments. Return the pass whose answer won; of votes, the first such
    variation, turned back. Noise and symmetries depend on `rows_B`, the numbers of the puzzles.
    """
    if variations is not None:
        return _trace_of_votes(model, batch, rows_B, config.num_steps, variations)
    if not config.methods:
        return trace(model, batch, config.num_steps)
    ((method, count),) = config.methods.items()
    trajectories = Trajectories(count, config.noise, config.seed)

    def traced(batch: Batch, rows: np.ndarray, chosen: range) -> Trace:
        ((numbers_N, spread),) = trajectories.spread(iter([(rows, batch)]), chosen)
        return trace(model, spread, config.num_steps, trajectories=trajectories, numbers_N=numbers_N)

    if method == "trajectories":
        seen = traced(batch, rows_B, range(count))
        last_BK = _ranks(seen.q_halt_TN[-1]).view(len(rows_B), -1)
        return _chosen(seen, torch.arange(len(rows_B), device=last_BK.device) * last_BK.shape[1] + last_BK.argmax(1))
    best = traced(batch, rows_B, range(1))
    for k in range(1, count):
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


def _chosen(seen: Trace, places: Tensor) -> Trace:
    return Trace(
        seen.predictions_TNS[:, places],
        seen.q_halt_TN[:, places],
        seen.settled_at_N[places],
        seen.settled_N[places],
    )
