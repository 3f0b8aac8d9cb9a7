"""The change that is named where memory ran out fits into the memory that there is."""

import re
from pathlib import Path

import pytest

from tests.in_process import SINGLE, begin
from tests.runs import settings
from training import less_memory
from training.footprint import Footprints
from training.less_memory import smaller_step


@pytest.mark.parametrize("share", [0.05, 0.5, 2.0, 1e-6])
def test_the_named_change_of_a_step_fits(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    begun = begin(settings(data, tmp_path / "run", global_batch_size=1024, epochs=100_000))
    config, of_data = begun.start.config, begun.data
    footprints = Footprints(of_data.sizes, 1)
    asked = footprints.of(config).peak
    monkeypatch.setattr(less_memory, "room_for", lambda world: share * asked / less_memory._USABLE_SHARES["cpu"])
    said = smaller_step(begun.start, of_data, SINGLE)
    if share < 0.01:
        assert f"arch.hidden_size={config.arch.hidden_size // 2}" in said and "parallel=fsdp" in said
        return
    parts = re.search(r"grad_accumulation=(\d+)", said)
    checkpointing = re.search(r"arch.activation_checkpointing=(\w+)", said)
    assert parts or checkpointing, said
    kept = checkpointing[1] if checkpointing else "none"
    arch = config.arch.model_copy(update={"activation_checkpointing": kept})
    changed = config.model_copy(update={"arch": arch, "grad_accumulation": int(parts[1]) if parts else 1})
    assert footprints.of(changed).peak <= min(share, 0.5) * asked, said
