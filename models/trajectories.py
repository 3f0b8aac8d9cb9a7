"""Trajectories: passes over one example that begin elsewhere, or that noise moves elsewhere.

Trajectory 0 is the plain pass. A model that was trained with K initial states (models/winner.py)
begins trajectory k with the state k modulo K. Before each segment of every trajectory but the
first, Gaussian noise is added to the state (Probabilistic TRM, arXiv 2605.19943). A model that
reads noise reads other noise in each trajectory.
"""

# B = slots, N = trajectories of examples, K = trajectories of an example

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from models.base import RecursiveModel
from models.carry import NOISY, State
from models.dropout import derived
from models.noise import full_strength
from models.winner import start_at
from utils.batch import Batch

# Tells the noise's random stream from other streams made of a seed.
_NOISE_STREAM = 0x2605


@dataclass(frozen=True)
class Trajectories:
    """How the trajectories of an example differ.

    Trajectory k of the example with the number r has the number r * count + k. The noise of a
    segment depends only on the seed and on the numbers of trajectory and segment.
    """

    count: int
    noise: float
    seed: int

    def spread(self, examples: Iterator[tuple[np.ndarray, Batch]], chosen: range) -> Iterator[tuple[np.ndarray, Batch]]:
        """Yield the numbers (N,) and a batch of all trajectories of each batch of examples."""
        for rows, batch in examples:
            numbers_N = (rows[:, None] * self.count + np.array(chosen)).ravel()
            yield numbers_N, {name: tensor.repeat_interleave(len(chosen), 0) for name, tensor in batch.items()}

    def at(self, model: RecursiveModel, numbers_B: np.ndarray, segments_B: np.ndarray) -> Callable[[State], State]:
        """Return what changes the state of all slots at the start of a segment, from 1."""

        def change(state: State) -> State:
            if model.config.num_states > 1:
                device = next(iter(state.values())).device
                which_B = torch.from_numpy(numbers_B % self.count % model.config.num_states).to(device)
                fresh_B = torch.from_numpy(segments_B == 1).to(device)
                state = start_at(model, state, fresh_B, which_B)
            state = self._add_noise(state, numbers_B, segments_B)
            if model.config.noise != "none":
                state = state | {NOISY: self._read(model, numbers_B, segments_B, next(iter(state.values())).device)}
            return state

        return change

    def _read(
        self, model: RecursiveModel, numbers_B: np.ndarray, segments_B: np.ndarray, device: torch.device
    ) -> torch.Tensor:
        """Return the noise that the segments read (models/noise.py), of each trajectory its own."""
        which_B, steps_B = (torch.from_numpy(each).to(device) for each in (numbers_B % self.count, segments_B))
        seeds_B = derived(torch.where(which_B > 0, self.seed, 0), which_B)
        return full_strength(model.config.noise, derived(seeds_B, steps_B), model.seq_len, model.vocab_size)

    def _add_noise(self, state: State, numbers_B: np.ndarray, segments_B: np.ndarray) -> State:
        rows_B, trajectories_B = np.divmod(numbers_B, self.count)
        noisy = np.flatnonzero(trajectories_B)
        if not self.noise or not len(noisy):
            return state
        device = next(iter(state.values())).device
        generator = torch.Generator(device)
        drawn: dict[str, list[torch.Tensor]] = {name: [] for name in state}
        for slot in noisy.tolist():
            origin = [_NOISE_STREAM, self.seed, rows_B[slot], trajectories_B[slot], segments_B[slot]]
            generator.manual_seed(int(np.random.SeedSequence(origin).generate_state(1, np.uint64)[0] >> 1))
            for name, z in state.items():
                drawn[name].append(torch.randn(z.shape[1:], generator=generator, device=device))
        slots = torch.from_numpy(noisy).to(device)
        return {
            name: z.index_add(0, slots, (self.noise * torch.stack(drawn[name])).to(z.dtype))
            for name, z in state.items()
        }
