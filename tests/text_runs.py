"""Runs of models of text, written without training, and the data that they name."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from dataset.text.schema import Form, open_text_split
from dataset.text.tokenizer import ByteTokenizer
from dataset.text.writer import TextSplitWriter
from models import build_arch
from models.text.model import TextModel
from records.checkpoint.format import RunState
from records.checkpoint.writer import Checkpointer, Snapshot
from tests.in_process import pretrain_config
from training.data import TextSizes
from utils.ranks.world import World

MAX_LEN = 40
SMALL = ("arch.hidden_size=16", "arch.num_layers=2", "arch.num_heads=2", "arch.forward_dtype=float32")


def write_data(folder: Path, form: Form) -> Path:
    """Write a dataset of bytes whose longest sample has MAX_LEN tokens."""
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        with TextSplitWriter(folder / split, ByteTokenizer(), MAX_LEN, [form]) as writer:
            if form == "text":
                writer.add_text(np.full(MAX_LEN - 1, 97), task=0)
            else:
                writer.add_problem(np.full(MAX_LEN - 12, 97), np.full(10, 98), task=0)
    return folder


def write_run(run: Path, data: Path, *overrides: str, sizes: dict[str, Any] | None = None) -> TextModel:
    """Write a run with one checkpoint, and return its model."""
    config = pretrain_config("arch=gpt", *SMALL, *overrides, f"data_path={data}")
    of_data = TextSizes.of(open_text_split(data, "train"))
    model = build_arch(config.arch, **of_data.of_model())
    assert isinstance(model, TextModel)
    model.init_weights(torch.Generator().manual_seed(0))
    run.mkdir(parents=True)
    state = RunState(
        step=1,
        draws=1,
        wandb_run_id="x",
        fingerprint={},
        task=of_data.as_dict() | (sizes or {}),
        config=config.model_dump(mode="json"),
    )
    snapshot = Snapshot(model.state_dict(), {}, slice(0, 1), {}, state)
    checkpointer = Checkpointer(run, World.single(), None)
    checkpointer.save(snapshot, is_best=False)
    checkpointer.wait()
    return model
