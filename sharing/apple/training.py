"""One training step of HRM and TRM in MLX, as models/act.py and optim/ define it."""

# B = slots of the batch, S = tokens, V = vocabulary, E = puzzle embedding size

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import ArrayLike

from models.losses import LossConfig
from sharing.apple.model import Model, Weights, checked, require_options
from utils.batch import IGNORE_LABEL

Carry = dict[str, Any]
"""state, steps (B,), halted (B,), and current: the batch whose examples the slots hold."""
Outputs = dict[str, mx.array]

_ROWS = "rows of the puzzle table"  # beside the names of weights


@dataclass(frozen=True)
class Rates:
    """The keys of a run that its optimizers read. The names are those of config/pretrain.yaml."""

    lr: float
    puzzle_emb_lr: float
    weight_decay: float
    puzzle_emb_weight_decay: float
    beta1: float = 0.9
    beta2: float = 0.95


class Trainer:
    """Trains a model in place, with Adam-atan2 (arXiv 2407.05872) and sign SGD of puzzle rows.

    There is no clipping of gradients and no average of the weights.
    """

    def __init__(self, model: Model, rates: Rates, batch_size: int) -> None:
        """Start with slots that have all halted, so that the first batch fills them."""
        require_options(model.arch, {"depth_curriculum": ([],), "backprop_warmup_steps": (0,)}, "the model to train")
        self.model, self.rates, self.num_steps = model, rates, 0
        zeros = {name: mx.zeros_like(weight) for name, weight in model.weights.items()}
        self._moments = zeros, dict(zeros)
        tokens_BS = mx.zeros((batch_size, model.described.seq_len), dtype=mx.int32)
        self.carry: Carry = {
            "state": model.blank_state(batch_size),
            "steps": tokens_BS[:, 0],
            "halted": mx.ones(batch_size, dtype=mx.bool_),
            "current": {"inputs": tokens_BS, "labels": tokens_BS, "puzzles": tokens_BS[:, 0]},
        }
        self._compiled = mx.compile(self._step)

    def step(
        self, batch: Mapping[str, ArrayLike], lr_multiplier: float, min_halt_steps_B: ArrayLike | None = None
    ) -> Outputs:
        """Run one segment of every slot, and update the model once, as `pretrain.train_step` does.

        Args:
            batch: inputs (B, S), labels (B, S) and puzzle_identifiers (B,). Slots that halted take
                their examples.
            lr_multiplier: the value of the schedule, which multiplies both learning rates.
            min_halt_steps_B: exploration: a slot can't halt before so many steps
                (`models.act.draw_min_halt_steps`); None: no minimum.

        Returns:
            loss, divided by B; lm_loss, q_halt_loss and q_continue_loss, summed over the slots;
            grad_norm; and of each slot logits (B, S, V), q_halt, q_continue, and target (B,) where
            the model values going on, all before the update.
        """
        model, rates, size = self.model, self.rates, len(self.carry["steps"])
        sizes = model.described
        limit, shape_BS = sizes.vocab_size, (size, sizes.seq_len)
        given = {
            "inputs": checked("inputs", batch["inputs"], shape_BS, limit),
            "labels": checked("labels", batch["labels"], shape_BS, limit, ignored=IGNORE_LABEL),
            "puzzles": checked("puzzles", batch["puzzle_identifiers"], (size,), sizes.num_puzzle_identifiers),
        }
        old, fresh_B = self.carry["current"], self.carry["halted"]
        current = {
            name: mx.where(fresh_B if new.ndim == 1 else fresh_B[:, None], new, old[name])
            for name, new in given.items()
        }
        self.num_steps += 1
        lr, puzzle_lr = rates.lr * lr_multiplier, rates.puzzle_emb_lr * lr_multiplier
        numbers = {
            "decay": 1 - lr * rates.weight_decay,
            "correction": 1 - rates.beta2**self.num_steps,
            "rate": lr / (1 - rates.beta1**self.num_steps),
            "puzzle_decay": 1 - puzzle_lr * rates.puzzle_emb_weight_decay,
            "puzzle_rate": puzzle_lr,
        }
        minimum_B = mx.array(np.zeros(size) if min_halt_steps_B is None else np.asarray(min_halt_steps_B))
        leaves, table_PE = dict(model.weights), model.table_PE
        if table_PE is not None:
            leaves[_ROWS] = table_PE[current["puzzles"]]
        weights, self._moments, self.carry, outputs = self._compiled(
            leaves,
            self._moments,
            self.carry | {"current": current},
            minimum_B.astype(mx.int32),
            {name: mx.array(number) for name, number in numbers.items()},
        )
        if table_PE is not None:  # not in the compiled function, which would copy the whole table
            table_PE[current["puzzles"]] = weights.pop(_ROWS)
        model.weights = weights
        model.described = model.described.model_copy(update={"step": model.described.step + 1})
        mx.eval(weights, self._moments, self.carry, outputs, table_PE)
        found: Outputs = outputs
        return found

    def _step(
        self,
        leaves: Weights,
        moments: tuple[Weights, Weights],
        carry: Carry,
        min_halt_steps_B: mx.array,
        numbers: dict[str, mx.array],
    ) -> tuple[Weights, tuple[Weights, Weights], Carry, Outputs]:
        """Return the updated weights and puzzle rows, moments, carry and outputs."""
        model, means, squares = self.model, *map(dict, moments)
        current, steps_B = carry["current"], mx.where(carry["halted"], 0, carry["steps"]) + 1
        last_B = steps_B >= model.arch.halt_max_steps
        start = model.reset(carry["state"], carry["halted"])

        def loss_of(leaves: Weights) -> tuple[mx.array, Any, Outputs]:
            rows_BE = leaves.get(_ROWS)
            state, logits_BSV, q_halt_B, q_continue_B = model.forward(leaves, start, current["inputs"], rows_BE)
            outputs = {"logits": logits_BSV, "q_halt": q_halt_B, "q_continue": q_continue_B}
            if model.arch.has_target_pass:
                # One more segment of the same example says what going on is worth.
                _, _, halt_B, continue_B = model.forward(leaves, state, current["inputs"], rows_BE)
                best_B = mx.where(last_B, halt_B, mx.maximum(halt_B, continue_B))
                outputs["target"] = mx.stop_gradient(mx.sigmoid(best_B))
            loss, sums = act_loss(outputs, current["labels"], config=model.arch.loss)
            return loss / len(steps_B), state, outputs | sums

        (loss, state, outputs), gradients = mx.value_and_grad(loss_of)(leaves)
        rows_gradient_BE = gradients.pop(_ROWS, None)
        outputs |= {
            "loss": loss,
            "grad_norm": mx.sqrt(mx.stack([mx.square(g).sum() for g in gradients.values()]).sum()),
        }
        updated, beta1, beta2 = {}, self.rates.beta1, self.rates.beta2
        for name, gradient in gradients.items():
            means[name] = means[name] + (1 - beta1) * (gradient - means[name])
            squares[name] = beta2 * squares[name] + (1 - beta2) * mx.square(gradient)
            direction = mx.arctan2(means[name], mx.sqrt(squares[name] / numbers["correction"]))
            updated[name] = leaves[name] * numbers["decay"] - numbers["rate"] * direction
        if rows_gradient_BE is not None:
            signs_BE = mx.sign(_sums_of_rows(rows_gradient_BE, current["puzzles"]))
            updated[_ROWS] = leaves[_ROWS] * numbers["puzzle_decay"] - numbers["puzzle_rate"] * signs_BE
        wants_B = model.wants_to_halt(outputs["q_halt"], outputs["q_continue"])
        halted_B = last_B | (wants_B & (steps_B >= min_halt_steps_B))
        carry = {"state": state, "steps": steps_B, "halted": halted_B, "current": current}
        return updated, (means, squares), carry, outputs


def act_loss(outputs: Outputs, labels_BS: mx.array, *, config: LossConfig) -> tuple[mx.array, Outputs]:
    """Return the loss of one segment, summed over its slots, and its parts (models/losses.py).

    Stablemax is computed in float32, because Apple's GPUs have no float64.
    """
    logits_BSV, is_label_BS = outputs["logits"], labels_BS != IGNORE_LABEL
    targets_BS, smoothing = mx.where(is_label_BS, labels_BS, 0), config.label_smoothing
    scores_BSV = logits_BSV
    if config.loss_type == "stablemax_cross_entropy":
        # The minimum keeps the branch that is not taken finite, and so its gradient.
        scores_BSV = mx.log(mx.where(logits_BSV >= 0, logits_BSV + 1, 1 / (1 - mx.minimum(logits_BSV, 0))))
    score_BS = mx.take_along_axis(scores_BSV, targets_BS[..., None], axis=-1).squeeze(-1)
    if smoothing:
        score_BS = (1 - smoothing) * score_BS + smoothing * scores_BSV.mean(-1)
    token_loss_BS = mx.where(is_label_BS, mx.logsumexp(scores_BSV, axis=-1) - score_BS, 0)
    is_exact_B = ((mx.argmax(logits_BSV, axis=-1) == labels_BS) | ~is_label_BS).all(-1)
    sums = {
        "lm_loss": (token_loss_BS.sum(-1) / mx.maximum(is_label_BS.sum(-1), 1)).sum(),
        "q_halt_loss": _binary_cross_entropy(outputs["q_halt"], is_exact_B).sum(),
        "q_continue_loss": mx.array(0.0),
    }
    if "target" in outputs:
        sums["q_continue_loss"] = _binary_cross_entropy(outputs["q_continue"], outputs["target"]).sum()
    return sums["lm_loss"] + config.halt_weight * (sums["q_halt_loss"] + sums["q_continue_loss"]), sums


def _binary_cross_entropy(logits_B: mx.array, targets_B: mx.array) -> mx.array:
    return mx.logaddexp(logits_B, 0) - logits_B * targets_B


def _sums_of_rows(gradient_BE: mx.array, ids_B: mx.array) -> mx.array:
    """Return for each slot the sum of the gradients of all slots that name its row."""
    first_B = mx.argmax(ids_B[:, None] == ids_B, axis=1)
    return mx.zeros_like(gradient_BE).at[first_B].add(gradient_BE)[first_B]
