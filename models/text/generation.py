"""The next tokens of prompts, with a cache for keys and values.

Every call of every block has its own part of the cache, because a recursion calls the same block
with other states.
"""

# B = prompts, N = their tokens in one row, A = heads of queries, G = heads of keys and values, H =
# head size, C = tokens that the cache has room for, V = vocabulary

from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from models.attention import attend
from models.text.model import TextModel
from models.text.packing import Packing
from models.text.sampling import GREEDY, Draws, Sampling, sample
from models.text.stack_config import Mask


class _Cache:
    """The keys and values of some sequences: of the prompts, then of one token after another."""

    def __init__(self, lengths: Sequence[int], prefix_lens: Sequence[int], capacity: int, device: torch.device) -> None:
        sequences = [(prefix, length - prefix) for prefix, length in zip(prefix_lens, lengths, strict=True)]
        self._packing = Packing(sequences, sum(lengths), device)
        self._capacity, self._device = capacity, device
        self._keys, self._values = list[Tensor](), list[Tensor]()  # of each call of each block
        self._next = 0
        self.lengths = list(lengths)
        self._is_filled = False
        self._lengths_B = torch.tensor(self.lengths, device=device)
        self._rows_B = torch.arange(len(self.lengths), device=device)

    @property
    def positions_N(self) -> Tensor:
        if self._is_filled:
            return self._lengths_B
        return torch.cat([torch.arange(length, device=self._device) for length in self.lengths])

    def attend(self, q_NAH: Tensor, k_NGH: Tensor, v_NGH: Tensor, mask: Mask) -> Tensor:
        """Store k and v, and return what the tokens see, (N, A, H)."""
        call, self._next = self._next, self._next + 1
        if not self._is_filled:
            shape = (len(self.lengths), k_NGH.shape[1], self._capacity, k_NGH.shape[2])
            for kept, x_NGH in ((self._keys, k_NGH), (self._values, v_NGH)):
                kept.append(x_NGH.new_zeros(shape))
                kept[call][self._packing.sequence_N, :, self.positions_N] = x_NGH
            return self._packing.attend(q_NAH, k_NGH, v_NGH, mask)
        keys_BGCH, values_BGCH = self._keys[call], self._values[call]
        keys_BGCH[self._rows_B, :, self._lengths_B] = k_NGH
        values_BGCH[self._rows_B, :, self._lengths_B] = v_NGH
        used = max(self.lengths) + 1
        visible_B11C = torch.arange(used, device=self._device) <= self._lengths_B[:, None, None, None]
        y_BA1H = attend(q_NAH[:, :, None], keys_BGCH[:, :, :used], values_BGCH[:, :, :used], mask=visible_B11C)
        return y_BA1H[:, :, 0]

    def end_pass(self) -> None:
        if self._is_filled:
            self.lengths = [length + 1 for length in self.lengths]
            self._lengths_B += 1
        self._is_filled, self._next = True, 0

    def keep(self, places: Sequence[int]) -> None:
        assert self._is_filled, "the prompts must have been read"
        places_K = torch.tensor(places, device=self._device)
        for kept in (self._keys, self._values):
            for call, x_BGCH in enumerate(kept):
                kept[call] = x_BGCH[places_K]
        self.lengths = [self.lengths[place] for place in places]
        self._lengths_B = self._lengths_B[places_K]
        self._rows_B = torch.arange(len(places), device=self._device)


class Decoder:
    """Reads prompts, then one token after the other for each of them."""

    def __init__(
        self,
        model: TextModel,
        prompts: Sequence[Sequence[int]],
        *,
        most_new_tokens: int,
        prefix_lens: Sequence[int] | None = None,
        device: torch.device | None = None,
    ) -> None:
        """Allocate nothing yet.

        Args:
            most_new_tokens: how many tokens `next_logits` may be given for each prompt.
            prefix_lens: how many tokens of each prompt see one another if the mask is PrefixLM;
                None: all. It is 1 for the beginning of a text, as in training on text.
        """
        assert all(prompts), "a prompt has at least one token"
        self._model, self._prompts = model, prompts
        self._device = device or model.embed_tokens.weight.device
        lengths = [len(prompt) for prompt in prompts]
        prefix_lens = lengths if prefix_lens is None else prefix_lens
        self._cache = _Cache(lengths, prefix_lens, max(lengths) + most_new_tokens, self._device)

    @torch.no_grad()
    def read_prompts(self) -> Tensor:
        """Return the logits (B, V) of the first token after each prompt."""
        inputs_N = torch.tensor([token for prompt in self._prompts for token in prompt], device=self._device)
        last_B = torch.tensor([len(prompt) for prompt in self._prompts], device=self._device).cumsum(0) - 1
        return self._logits(inputs_N, last_B)

    @torch.no_grad()
    def next_logits(self, tokens_B: Tensor) -> Tensor:
        """Return the logits (B, V) of the token after `tokens_B`, which follow what was read."""
        return self._logits(tokens_B, torch.arange(len(tokens_B), device=self._device))

    def keep(self, places: Sequence[int]) -> None:
        self._cache.keep(places)

    def _logits(self, inputs_N: Tensor, places_B: Tensor) -> Tensor:
        # A compiled model would be compiled again for the other numbers of tokens. Otherwise this
        # would only import the compiler, which takes seconds.
        with torch.compiler.set_stance("force_eager") if self._model.is_compiled else nullcontext():
            logits_BV = self._model.next_logits(inputs_N, self._cache.positions_N, self._cache, places_B)
        self._cache.end_pass()
        return logits_BV


def generate(
    model: TextModel,
    prompts: Sequence[Sequence[int]],
    *,
    stop_tokens: Collection[int],
    most_new_tokens: int,
    vocab_size: int | None = None,
    sampling: Sampling = GREEDY,
    draws: Draws | None = None,
    prefix_lens: Sequence[int] | None = None,
) -> Iterator[list[int | None]]:
    """Yield the next token of each prompt, and None for a prompt that has ended.

    A prompt ends with the first stop token, which is yielded, or after `most_new_tokens`.

    Args:
        vocab_size: only tokens below it are drawn, since the model's may be rounded up; None: all.
    """
    if most_new_tokens < 1:
        return
    decoder = Decoder(model, prompts, most_new_tokens=most_new_tokens - 1, prefix_lens=prefix_lens)
    draws = draws or Draws(0, range(len(prompts)))
    going_on = list(range(len(prompts)))
    logits_BV = decoder.read_prompts()
    for num_left in range(most_new_tokens - 1, -1, -1):
        draws_B = draws.next()[going_on]
        tokens = sample(logits_BV[:, :vocab_size], sampling, draws_B).tolist()
        next_tokens: list[int | None] = [None] * len(prompts)
        for prompt, token in zip(going_on, tokens, strict=True):
            next_tokens[prompt] = token
        yield next_tokens
        kept = [place for place, token in enumerate(tokens) if token not in stop_tokens]
        if not kept or not num_left:
            return
        if len(kept) < len(going_on):
            decoder.keep(kept)
            going_on = [going_on[place] for place in kept]
        logits_BV = decoder.next_logits(torch.tensor([tokens[place] for place in kept], device=logits_BV.device))
