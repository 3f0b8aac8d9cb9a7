"""Small splits of text for tests."""

import json
from pathlib import Path

import numpy as np

from dataset.schema import SplitName
from dataset.text.schema import TextSplit, open_text_split


def write_split(folder: Path, tokens: np.ndarray, samples_N4: np.ndarray, **metadata: object) -> None:
    """Write a split of text without the builder."""
    folder.mkdir(parents=True)
    np.save(folder / "tokens.npy", tokens)
    np.save(folder / "samples.npy", samples_N4)
    described = {
        "kind": "text",
        "vocab_size": 259,
        "max_len": int((samples_N4[:, 1] + samples_N4[:, 2]).max()) - 1,
        "num_samples": len(samples_N4),
        "num_tokens": len(tokens),
        "tokenizer": "bytes",
        "special_tokens": {"start": 256, "end_of_instruction": 257, "end": 258},
        "tasks": ["text", "sorting"],
        **metadata,
    }
    (folder / "dataset.json").write_text(json.dumps(described))


def random_split(path: Path, num: int, longest: int, seed: int = 0, name: SplitName = "train") -> TextSplit:
    """Write and open a split of samples of random lengths with random tokens."""
    rng = np.random.default_rng(seed)
    prefixes, responses = rng.integers(1, longest // 2, num), rng.integers(1, longest // 2 + 1, num)
    ends = np.cumsum(prefixes + responses)
    table = np.stack([ends - prefixes - responses, prefixes, responses, rng.integers(0, 2, num)], axis=1)
    write_split(path / name, rng.integers(0, 259, int(ends[-1])).astype(np.uint16), table)
    return open_text_split(path, name)


def write_hrm_text(folder: Path, tokens: np.ndarray, epochs: list[dict[str, np.ndarray]], vocab_size: int = 64) -> None:
    """Write a folder in HRM-Text's own format."""
    folder.mkdir(parents=True)
    np.save(folder / "tokens.npy", tokens)
    longest = max(int((epoch["inst_len"] + epoch["resp_len"]).max()) for epoch in epochs)
    described = {
        "tokenizer_info": {"vocab_size": vocab_size, "boq": "<a>", "eoq": "<b>", "eoa": "<c>"},
        "vocab_size": None,
        "max_seq_len": longest,
        "total_length": len(tokens),
    }
    (folder / "metadata.json").write_text(json.dumps(described))
    for number, epoch in enumerate(epochs):
        (folder / f"epoch_{number}").mkdir()
        for name, array in epoch.items():
            np.save(folder / f"epoch_{number}" / f"{name}.npy", array)


def write_lines(file: Path, *values: object) -> Path:
    """Write a file with a JSON object on each line."""
    file.write_text("".join(f"{json.dumps(value)}\n" for value in values))
    return file


def random_dataset(folder: Path) -> Path:
    """Write 300 problems for training and 20 for testing. Return the folder."""
    random_split(folder, num=300, longest=40)
    random_split(folder, num=20, longest=40, seed=1, name="test")
    return folder
