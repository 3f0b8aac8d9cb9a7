"""A split of which only the sizes matter."""

from pathlib import Path

from dataset.schema import DatasetMetadata, Split


def split_of(seq_len: int, vocab_size: int) -> Split:
    metadata = DatasetMetadata(
        pad_id=0,
        ignore_label_id=0,
        blank_identifier_id=0,
        vocab_size=vocab_size,
        seq_len=seq_len,
        num_puzzle_identifiers=1,
        total_groups=1,
        mean_puzzle_examples=1.0,
        sets=["all"],
    )
    return Split(Path("data/test"), metadata, {})
