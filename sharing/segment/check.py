"""Compare an exported file with PyTorch on real puzzles, before anybody gets it."""

# N = puzzles, S = cells, T = tokens of a text

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from dataset.canvas import PADDING, Corner
from dataset.loader import EvalLoader
from dataset.schema import open_split
from dataset.text.schema import open_text_split
from models.act import initial_carry, segment
from models.base import CommonConfig, RecursiveModel
from models.carry import Carry, Outputs
from sharing.exported import ExportedPuzzles, ExportedText
from sharing.segment.function import TextFunction
from sharing.segment.host import HostConfig
from sharing.segment.model import ExportedModel, Run
from utils.batch import IGNORE_LABEL, Batch
from utils.errors import UserError
from utils.ranks.world import World

NUM_PUZZLES = 200
_AT_A_TIME = 50
_LONGEST_TEXT = 128
# Float32 adds up in another order. More than this share of the largest number is a mistake.
_TOLERANCE = 1e-3

ModelOfSize = Callable[[int, int], RecursiveModel]
"""Returns the model in PyTorch for boards of so many cells and kinds of tokens."""


def real_puzzles(data_path: str, described: ExportedPuzzles, *, any_size: bool) -> tuple[list[Batch], int]:
    """Return puzzles of the test split of a dataset, and its number of kinds of tokens."""
    arch = described.arch
    assert isinstance(arch, CommonConfig)
    split = open_split(data_path, "test")
    seq_len, vocab_size = split.metadata.shape
    fits = any_size or (seq_len, vocab_size) == (described.seq_len, described.vocab_size)
    on_canvas = not fits and arch.reads_boards_of_any_size and seq_len < described.seq_len
    if not fits and not on_canvas:
        raise UserError(
            f"{data_path} has boards of {seq_len} cells and {vocab_size} kinds of tokens, but the file would read "
            f"{described.seq_len} and {described.vocab_size}; give --data a dataset like that of its training"
        )
    if split.metadata.num_puzzle_identifiers > described.num_puzzle_identifiers and arch.puzzle_emb_ndim:
        raise UserError(f"{data_path} has more puzzles than the model has rows for; give --data its training data")
    batches = list[Batch]()
    for name in split.sets:
        loader = EvalLoader(split, name, _AT_A_TIME, -(-NUM_PUZZLES // len(split.sets)))
        batches += [batch for _, batch in loader.batches(World.single())]
        loader.require_all_read()
    if on_canvas:
        corner = Corner(int(seq_len**0.5), int(described.seq_len**0.5))
        filled = {"inputs": PADDING, "labels": IGNORE_LABEL}
        batches = [
            batch | {name: corner.place(batch[name], outside) for name, outside in filled.items()} for batch in batches
        ]
        vocab_size = described.vocab_size
    return batches, vocab_size


def real_texts(data_path: str, described: ExportedText) -> torch.Tensor:
    """Return as many pieces of the test split of a dataset of text, (N, T) int64."""
    tokens = open_text_split(data_path, "test").tokens
    length = min(_LONGEST_TEXT, described.max_len, len(tokens))
    starts = np.linspace(0, len(tokens) - length, NUM_PUZZLES).astype(np.int64)
    return torch.from_numpy(np.stack([tokens[start : start + length] for start in starts]).astype(np.int64))


@dataclass
class Comparison:
    """What a file and PyTorch made of the same puzzles.

    Attributes:
        largest: the largest difference of a logit.
        other_tokens: how many cells had another token in any segment, which are ties.
        exact, exact_float32: how many answers of the last segment are exactly right, of the file
            and of PyTorch with float32 weights, each going on from its own states.
    """

    num: int = 0
    segments: int = 0
    largest: float = 0.0
    other_tokens: int = 0
    exact: int = 0
    exact_float32: int = 0
    has_labels: bool = True

    def __str__(self) -> str:
        found = f"compared with PyTorch on {self.num} puzzles, {self.segments} segments each: "
        answers = (
            f"{self.other_tokens} tokens differ where two are equally likely" if self.other_tokens else "equal answers"
        )
        found += f"{answers}, largest difference of a logit {self.largest:.1e}"
        if self.has_labels:
            found += f"; {self.exact} answers exactly right, of PyTorch in float32 {self.exact_float32}"
        return found


def compare(
    host: HostConfig, run: Run, rounded: ModelOfSize, float32: ModelOfSize, puzzles: tuple[list[Batch], int]
) -> Comparison:
    """Let a file and PyTorch answer the same puzzles, and raise UserError if they differ.

    Args:
        rounded: the model with the weights that the file stores, whose segments start from the
            file's states.
        puzzles: those of `real_puzzles`.
    """
    batches, vocab_size = puzzles
    seq_len = batches[0]["inputs"].shape[1]
    file = ExportedModel(host, run, seq_len=seq_len, vocab_size=vocab_size)
    same, original = rounded(seq_len, vocab_size), float32(seq_len, vocab_size)
    found = Comparison(segments=host.segments)
    first = batches[0]
    # One puzzle alone as well: exporters make special cases of a batch of one.
    alone, others = ({name: each[part] for name, each in first.items()} for part in (slice(1), slice(1, None)))
    for batch in (alone, others, *batches[1:]):
        labels_NS = batch["labels"]
        if not len(labels_NS):  # a dataset of a single puzzle
            continue
        found.num += len(labels_NS)
        found.has_labels &= bool((labels_NS != IGNORE_LABEL).any())
        for of_file, of_torch in _segments(file, same, batch, host.segments):
            _require_equal(of_file, of_torch, found, host.file)
        found.exact += _num_exact(of_file[0], labels_NS)
        *_, (free, _) = _segments(original, original, batch, host.segments)
        found.exact_float32 += _num_exact(free[0], labels_NS)
    return found


Seen = list[torch.Tensor]
"""What a segment returned: logits, Q values and states."""


@torch.no_grad()
def _segments(
    model: RecursiveModel, other: RecursiveModel, batch: Batch, num_steps: int
) -> Iterator[tuple[Seen, Seen]]:
    """Yield what each segment of a model returns, and of another that starts from its states."""

    def seen(carry: Carry, outputs: Outputs) -> Seen:
        return [outputs.logits_BSV, outputs.q_halt_B, outputs.q_continue_B, *carry.state.values()]

    carry = initial_carry(model, batch)
    for _ in range(num_steps):
        before = carry
        carry, outputs = segment(model, before, batch)
        found = seen(carry, outputs)
        expected = found if other is model else seen(*segment(other, before, batch))
        carry.halted_B = torch.zeros_like(carry.halted_B)
        yield found, expected


def _require_equal(of_file: Seen, of_torch: Seen, found: Comparison, name: str) -> None:
    for number, (ours, theirs) in enumerate(zip(of_file, of_torch, strict=True)):
        difference = (ours - theirs).abs().amax().item()
        if not difference <= _TOLERANCE * max(1.0, theirs.abs().amax().item()):  # also NaN
            what = ("a logit", "q_halt", "q_continue")[number] if number < 3 else "a state"
            raise UserError(
                f"{name} computes otherwise than PyTorch: {what} differs by {difference:.2g}; nothing was written. "
                "Report this with the config of the run"
            )
        if number == 0:
            found.largest = max(found.largest, difference)
            found.other_tokens += int((ours.argmax(-1) != theirs.argmax(-1)).sum())


def _num_exact(logits: torch.Tensor, labels_NS: torch.Tensor) -> int:
    is_label_NS = labels_NS != IGNORE_LABEL
    return int(((logits.argmax(-1) == labels_NS) | ~is_label_NS).all(-1).sum())


@torch.no_grad()
def compare_texts(host: HostConfig, run: Run, function: TextFunction, texts_NT: torch.Tensor) -> Comparison:
    """As `compare`, for the next tokens of texts."""
    found = Comparison(segments=1, has_labels=False)
    for tokens_NT in texts_NT.split(_AT_A_TIME):
        _require_equal([*run([tokens_NT])], [*function(tokens_NT)], found, host.file)
        found.num += len(tokens_NT)
    return found
