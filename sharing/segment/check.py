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
from models.text.model import TextModel
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
# Float32 adds up in another order. A difference of logits beyond this share of the largest one, or
# another answer where PyTorch is surer than that, is a mistake.
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


@dataclass
class Comparison:
    """What a file and PyTorch made of the same puzzles.

    Attributes:
        largest: the largest difference of a logit.
        exact, exact_float32: how many answers of the last segment are exactly right, of the file
            and of PyTorch with float32 weights, each going on from its own states.
    """

    num: int = 0
    segments: int = 0
    largest: float = 0.0
    exact: int = 0
    exact_float32: int = 0
    has_labels: bool = True

    def __str__(self) -> str:
        found = f"compared with PyTorch on {self.num} puzzles, {self.segments} segments each: "
        found += f"equal answers, largest difference of a logit {self.largest:.1e}"
        if self.has_labels:
            found += f"; {self.exact} answers exactly right, of PyTorch in float32 {self.exact_float32}"
        return found


def compare(host: HostConfig, run: Run, rounded: ModelOfSize, float32: ModelOfSize, data_path: str) -> Comparison:
    """Let a file and PyTorch answer the same puzzles, and raise UserError if they differ.

    Args:
        rounded: the model with the weights that the file stores, whose segments start from the
            file's states.
    """
    described = host.described
    assert isinstance(described, ExportedPuzzles)
    batches, vocab_size = real_puzzles(data_path, described, any_size=host.any_size)
    seq_len = batches[0]["inputs"].shape[1]
    file = ExportedModel(host, run, seq_len=seq_len, vocab_size=vocab_size)
    same, original = rounded(seq_len, vocab_size), float32(seq_len, vocab_size)
    found = Comparison(segments=host.segments)
    first = batches[0]
    # One puzzle alone as well: exporters make special cases of a batch of one.
    alone, others = ({name: each[part] for name, each in first.items()} for part in (slice(1), slice(1, None)))
    for batch in (alone, others, *batches[1:]):
        labels_NS = batch["labels"]
        found.num += len(labels_NS)
        found.has_labels &= bool((labels_NS != IGNORE_LABEL).any())
        for of_file, of_torch in _segments(file, same, batch, host.segments):
            _require_equal(of_file, of_torch, found, host.file)
        found.exact += _num_exact(of_file, labels_NS)
        if host.weights == "float32":
            found.exact_float32 += _num_exact(of_torch, labels_NS)
        else:
            *_, (free, _) = _segments(original, original, batch, host.segments)
            found.exact_float32 += _num_exact(free, labels_NS)
    return found


@torch.no_grad()
def _segments(
    model: RecursiveModel, other: RecursiveModel, batch: Batch, num_steps: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the logits of each segment, of a model and of another that starts from its states."""
    carry = initial_carry(model, batch)
    for _ in range(num_steps):
        before = carry
        carry, outputs = segment(model, before, batch)
        expected = outputs if other is model else segment(other, before, batch)[1]
        carry.halted_B = torch.zeros_like(carry.halted_B)
        yield outputs.logits_BSV, expected.logits_BSV


def _require_equal(of_file: torch.Tensor, of_torch: torch.Tensor, found: Comparison, name: str) -> None:
    difference = (of_file - of_torch).abs().amax().item()
    allowed = _TOLERANCE * max(1.0, of_torch.abs().amax().item())
    chosen = of_torch.gather(-1, of_file.argmax(-1, keepdim=True)).squeeze(-1)
    lost = (of_torch.amax(-1) - chosen).amax().item()  # 0 where the answers are equal
    if not max(difference, lost) <= allowed:  # also NaN
        raise UserError(
            f"{name} answers otherwise than PyTorch: a logit differs by {difference:.2g}; nothing was written. "
            "Report this with the config of the run"
        )
    found.largest = max(found.largest, difference)


def _num_exact(logits: torch.Tensor, labels_NS: torch.Tensor) -> int:
    is_label_NS = labels_NS != IGNORE_LABEL
    return int(((logits.argmax(-1) == labels_NS) | ~is_label_NS).all(-1).sum())


@torch.no_grad()
def compare_texts(host: HostConfig, run: Run, model: TextModel, data_path: str) -> Comparison:
    """As `compare`, for the next tokens of texts."""
    described = host.described
    assert isinstance(described, ExportedText)
    tokens = open_text_split(data_path, "test").tokens
    length = min(_LONGEST_TEXT, described.max_len, len(tokens))
    starts = np.linspace(0, len(tokens) - length, NUM_PUZZLES).astype(np.int64)
    found, function = Comparison(segments=1, has_labels=False), TextFunction(model)
    for first in range(0, NUM_PUZZLES, _AT_A_TIME):
        rows = [tokens[start : start + length] for start in starts[first : first + _AT_A_TIME]]
        tokens_NT = torch.from_numpy(np.stack(rows).astype(np.int64))
        _require_equal(run([tokens_NT])[0], function(tokens_NT)[0], found, host.file)
        found.num += len(rows)
    return found
