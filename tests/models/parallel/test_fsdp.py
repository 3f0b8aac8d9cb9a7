"""Which options FSDP gives to the blocks of a model, and which to the rest."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy

from models.parallel import fsdp
from tests.models.parallel.helpers import config_of, model_of

MESH: Any = {"shard": "a row of ranks", ("replicate", "shard"): "all ranks"}


@pytest.mark.parametrize(("name", "mesh"), [("fsdp", MESH["shard"]), ("hsdp", MESH["replicate", "shard"])])
def test_the_options_reach_every_unit(name: str, mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU can neither sum bfloat16 nor offload, so that no run here would show them."""
    given = list[tuple[Any, Any, Any]]()
    monkeypatch.setattr(fsdp, "shard_unit", lambda module, mesh, **options: given.append((module, mesh, options)))
    changes = {"reshard_after_forward": False, "param_dtype": "forward_dtype", "cpu_offload": True}
    config: Any = config_of(name, reduce_dtype="bfloat16", **changes)
    world: Any = SimpleNamespace(mesh=MESH)
    model = model_of("hrm", forward_dtype="bfloat16")
    fsdp.shard_weights(model, config, world)

    assert [module for module, *_ in given] == [*model.blocks(), model]
    assert {of for _, of, _ in given} == {mesh}
    options = [options for *_, options in given]
    assert {each["precision"].reduce_dtype for each in options} == {torch.bfloat16}
    assert all(isinstance(each["offload"], CPUOffloadPolicy) for each in options)
    of_rest = options.pop()
    assert of_rest["reshards"] and of_rest["precision"].param_dtype is None
    assert {(each["reshards"], each["precision"].param_dtype) for each in options} == {(False, torch.bfloat16)}
