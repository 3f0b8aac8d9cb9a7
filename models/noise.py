"""What segments read of the answer: noise, or a noisy copy with noise that falls.

`fresh`: every segment reads new noise of standard deviation 1 and nothing else, in training and at
test time. A model that treats all symbols and cells alike can't guess between equals without noise.
With several states (models/winner.py) the trajectories of a slot read different noise, and only the
best one trains.

`annealed` ("Thinking with Looped Flows", arXiv 2609.11801): in training the copy is I_t = (1 - t)
x_0 + t x_1, of noise x_0 and the answer x_1 (equation 3). The times t of a sequence are drawn once
and sorted, so that the noise falls from segment to segment, and all of them share x_0 (section
3.1). Each segment has a loss of its own, so that the early ones learn to hand on a state that helps
the later ones. At test time every segment reads new noise of full strength, as with `fresh`. That
needs no schedule, so that a sequence may have any number of segments and leave when it is settled
(arXiv 2609.01449).
"""

# B = slots, S = tokens, V = vocabulary, K = segments of a sequence

import math

import torch

from models.dropout import derived

# Tell apart what follows from the seed of a sequence.
_TIMES, _NOISE = 0, 1


def full_strength(kind: str, seeds_B: torch.Tensor, seq_len: int, vocab_size: int) -> torch.Tensor:
    """Return what a segment reads without a copy of the answer, float32 (B, S, V).

    Args:
        kind: arch.noise. The standard deviation of `annealed` is 1 / sqrt(V) (table 6).
    """
    places_SV = torch.arange(seq_len * vocab_size, device=seeds_B.device).view(seq_len, vocab_size)
    uniform_BSV = uniform(derived(derived(seeds_B, _NOISE)[:, None, None], places_SV))
    return torch.erfinv(2 * uniform_BSV - 1) * math.sqrt(2 / vocab_size if kind == "annealed" else 2)


def annealed(
    seeds_B: torch.Tensor,
    steps_B: torch.Tensor,
    labels_BS: torch.Tensor,
    answers_BSV: torch.Tensor,
    own_answers_B: torch.Tensor,
    *,
    num_steps: int,
) -> torch.Tensor:
    """Return the noisy copy that a segment of training reads, float32 (B, S, V).

    Args:
        seeds_B: of each sequence, 32 bits as int64.
        steps_B: which segment of its sequence comes, counted from 1.
        labels_BS: the answers. Tokens without a label, which is negative, have only noise.
        answers_BSV: the probabilities that the segment before gave.
        own_answers_B: where answers_BSV take the place of the labels, but in the first segment
            (pseudo-targets, appendix D). Without them a model learns to read labels that it has
            seen.
        num_steps: the most segments of a sequence, K.
    """
    draws_BK = uniform(derived(derived(seeds_B, _TIMES)[:, None], torch.arange(num_steps + 1, device=seeds_B.device)))
    # A resume with a lower halt_max_steps may find a slot beyond it.
    nth_B = steps_B.long().clamp(max=num_steps + 1) - 1
    t_B = draws_BK.sort(1).values.gather(1, nth_B[:, None])
    is_own_B = own_answers_B & (steps_B > 1)
    vocab_size = answers_BSV.shape[-1]
    labels_BSV = labels_BS[..., None] == torch.arange(vocab_size, device=labels_BS.device)
    x1_BSV = torch.where(is_own_B[:, None, None], answers_BSV, labels_BSV.to(answers_BSV.dtype))
    x0_BSV = full_strength("annealed", seeds_B, labels_BS.shape[1], vocab_size)
    return torch.lerp(x0_BSV, x1_BSV, t_B[..., None])


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """Return numbers of 32 bits each, above 0 and below 1, so that erfinv(2 u - 1) is finite."""
    return ((bits >> 9).float() + 0.5) / 2**23  # float32 has no halves above 2^23
