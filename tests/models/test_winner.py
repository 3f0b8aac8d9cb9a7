"""Winner takes all: the trajectory with the lowest token loss is the slot's, and trains alone."""

# B = slots, K = initial states

from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from models.act import ActObjective, ActSettings, loss_of_slots, segment
from models.base import RecursiveModel
from models.carry import Carry, State
from models.losses import mean_token_loss
from tests.models.helpers import blank_model, random_batch, seed_with, small_model, small_symbol_model
from utils.batch import Batch
from utils.errors import UserError

NUM_SLOTS, NUM_STATES, IGNORED = 4, 3, -100
CPU = torch.device("cpu")


def _model(name: str, seed: int = 0, **changes: Any) -> RecursiveModel:
    build = small_symbol_model if name.startswith("se_") else small_model
    return build(name, seed=seed, **{"num_states": NUM_STATES, "halt_max_steps": 3, **changes})


def _settings(model: RecursiveModel) -> ActSettings:
    return ActSettings(model.config.depth, NUM_SLOTS)


class Alone:
    def __init__(self, model: RecursiveModel) -> None:
        self._model = copy(model)  # with the same weights, but one trajectory
        self._model.config = model.config.model_copy(update={"num_states": 1})
        self._starts = model.starts()
        self.halted, self.steps = True, 0
        self.states: list[State] = []
        self.winner = -1

    def step(self, one: Batch) -> Tensor:
        """Run a segment, and return the loss of the winner, with its gradient."""
        model = self._model
        if self.halted:
            start = model.reset(model.initial_state(1, CPU), torch.tensor([True]))
            last = list(start)[-1]
            self.states = [start | {last: self._starts[k].expand_as(start[last])} for k in range(NUM_STATES)]
            self.steps, self.current = 0, one
        self.steps += 1
        labels = self.current["labels"]
        found, losses = [], []
        for state in self.states:
            carry = Carry(state, torch.tensor([self.steps - 1]), torch.tensor([False]), self.current)
            carry, outputs = segment(model, carry, self.current, _settings(model))
            found.append((carry, outputs))
            token_loss = mean_token_loss(outputs.logits_BSV, labels, config=model.config.loss)
            losses.append(token_loss.detach())
        self.winner = int(torch.stack(losses).argmin(0))
        carry, self.outputs = found[self.winner]
        self.halted = bool(carry.halted_B)
        last = list(carry.state)[-1]
        self.states = [carry.state | {last: own.state[last]} for own, _ in found]
        loss, self.sums = loss_of_slots(self.outputs, carry, _settings(model), model.config.loss)
        return loss


def _batches(num: int, **sizes: int) -> list[Batch]:
    batches = [random_batch(NUM_SLOTS, seed=seed, **sizes) for seed in range(num)]
    batches[0]["labels"][1] = IGNORED  # a slot without labels
    return batches


def _one(batch: Batch, slot: int) -> Batch:
    return {name: tensor[slot : slot + 1] for name, tensor in batch.items()}


@pytest.mark.parametrize("name", ["hrm", "trm", "urm", "se_mixer"])
def test_each_slot_is_trained_by_its_best_trajectory(name: str) -> None:
    def varied(seed: int) -> bool:
        model, winners = _model(name, seed), set()
        slots = [Alone(model) for _ in range(NUM_SLOTS)]
        for batch in _batches(4, vocab_size=model.vocab_size):
            for slot, alone in enumerate(slots):
                alone.step(_one(batch, slot))
                winners.add(alone.winner)
        return len(winners) > 1 and len({alone.steps for alone in slots}) > 1

    model = _model(name, seed_with(varied, "winners and halts of different kinds"))
    objective, settings = ActObjective(model), _settings(model)
    carry: Carry = objective.fresh_carry(NUM_SLOTS, CPU)
    slots = [Alone(model) for _ in range(NUM_SLOTS)]
    for batch in _batches(4, vocab_size=model.vocab_size):
        model.zero_grad()
        expected = torch.stack([alone.step(_one(batch, slot)) for slot, alone in enumerate(slots)]).sum()
        expected.backward()
        gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}
        model.zero_grad()
        result = objective.run(carry, batch, settings)
        result.loss.backward()
        assert float(result.loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
        torch.testing.assert_close(
            result.sums, torch.stack([alone.sums for alone in slots]).sum(0), rtol=1e-5, atol=1e-5
        )
        assert gradients
        for weight_name, weight in model.named_parameters():
            if weight_name in gradients:
                torch.testing.assert_close(weight.grad, gradients[weight_name], rtol=1e-3, atol=1e-5, msg=weight_name)
        assert result.carry is not None
        carry = result.carry
        assert carry.halted_B.tolist() == [alone.halted for alone in slots]
        assert carry.steps_B.tolist() == [alone.steps for alone in slots]
        for slot, alone in enumerate(slots):
            for k, state in enumerate(alone.states):
                for of, z in state.items():
                    torch.testing.assert_close(carry.state[of][slot, k], z[0], rtol=1e-4, atol=1e-4)


def test_more_states_change_neither_the_weights_nor_the_evaluation() -> None:
    """A model of one state reads the weights of a model of three, and gives the same answers."""
    one, three = small_model("trm", num_states=1), small_model("trm", num_states=NUM_STATES)
    assert one.state_dict().keys() == three.state_dict().keys()
    assert all(torch.equal(tensor, three.state_dict()[name]) for name, tensor in one.state_dict().items())
    batch = random_batch(NUM_SLOTS)
    starts_KD = three.starts()
    assert len({tuple(start_D.tolist()) for start_D in starts_KD}) == NUM_STATES
    assert torch.equal(starts_KD[:1], one.starts())
    assert torch.equal(small_model("trm", num_states=2, seed=5).starts()[1], starts_KD[1])
    # A model whose weights come from a file is not initialised.
    assert torch.equal(blank_model("trm", num_states=NUM_STATES).starts()[1:], starts_KD[1:])
    carry = ActObjective(one).fresh_carry(NUM_SLOTS, CPU)
    with torch.no_grad():
        outputs = [segment(model, replace(carry), batch)[1] for model in (one, three)]
    assert torch.equal(outputs[0].logits_BSV, outputs[1].logits_BSV)


def test_a_model_without_a_state_is_refused() -> None:
    with pytest.raises(UserError, match="num_states is 2, but arch=transformer has no state; set it to 1"):
        blank_model("transformer", num_states=2)
    with pytest.raises(UserError, match="noise is fresh, but arch=transformer has no state; set it to none"):
        blank_model("transformer", noise="fresh")
