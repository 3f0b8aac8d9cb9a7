"""An export equals a published file bit for bit. A mistake is one line and leaves no file."""

import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from safetensors.torch import save_file
from torch import Tensor

from models import ArchConfig
from models.tokens import TokenConfig
from records.checkpoint.writer import Checkpointer, Snapshot
from sharing.export import main, overrides_of
from sharing.exported import open_model
from sharing.published import to_ours
from sharing.weights_file import open_weights
from tests.records.checkpoint.helpers import state_at
from tests.sharing.test_published import FOLDERS, build, reference
from utils.command_line import read_config
from utils.ranks.world import World

GENERATED = ("hrm", "trm", "trm_mlp", "urm")


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype and ours[name].shape == tensor.shape, name
        # Compare bits, also of NaN and -0.0.
        assert torch.equal(ours[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


def save_step(
    run: Path,
    step: int,
    arch: dict[str, Any],
    model: dict[str, Tensor],
    ema: dict[str, Tensor] | None = None,
    config: dict[str, Any] | None = None,
    task: dict[str, Any] | None = None,
) -> Path:
    run.mkdir(exist_ok=True)
    of_run = {"arch": arch, "data_path": "/a/sudoku"} | (config or {})
    sizes = task or {"seq_len": 6, "vocab_size": 7, "num_puzzle_identifiers": 5}
    snapshot = Snapshot(
        weights=model,
        shared={f"ema.{name}": tensor for name, tensor in (ema or {}).items()},
        slots=slice(0, 1),
        by_slot={"steps": torch.zeros(1)},
        state=state_at(step).model_copy(update={"config": of_run, "task": sizes}),
    )
    checkpointer = Checkpointer(run, World.single(), None)
    checkpointer.save(snapshot, is_best=False)
    checkpointer.wait()
    return run / f"step_{step:08d}"


def _generated(arch: str) -> dict[str, Tensor]:
    """Return weights with values that a detour over another dtype would lose."""
    weights = {name: tensor.detach().clone() for name, tensor in build(arch).state_dict().items()}
    starts = [name for name in weights if name.endswith("_init")]
    # URM's code has its convolution in bfloat16 as well.
    for name in (*starts, *(name for name in weights if ".conv_" in name)):
        weights[name] = weights[name].bfloat16()
    weights["q_head.bias"] = torch.tensor([-0.0, 1e-42])
    return weights


def _export(*arguments: object, to: str = "hrm") -> int:
    return main(["--format", to, *map(str, arguments)])


def mistake(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([*map(str, arguments)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("error: ") and said.err.count("\n") == 1
    return said.err


# ---- round trips -------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [*FOLDERS, *(f"generated {arch}" for arch in GENERATED)])
def test_published_weights_survive_the_conversion_to_our_names_and_back(source: str, tmp_path: Path) -> None:
    compiled = source.startswith("generated")
    output = "out.safetensors" if compiled else "step_5"
    prefix, to = "_orig_mod." if compiled else "", "urm" if "urm" in source else "hrm"
    if compiled:
        ours = _generated(source.split()[1])
        save_file(ours, tmp_path / "ours")
        assert _export(tmp_path / "ours", "-o", tmp_path / "published", to=to) == 0
        published = {prefix + name: tensor for name, tensor in open_weights(str(tmp_path / "published")).read().items()}
        assert published[f"{prefix}model.inner.{'init_hidden' if to == 'urm' else 'H_init'}"].dtype == torch.bfloat16
    else:
        published = {prefix + name: tensor for name, tensor in reference(source).items()}
    save_file(to_ours(published), tmp_path / "ours.safetensors")
    flags = ["--compiled"] if compiled else []
    assert _export(tmp_path / "ours.safetensors", "-o", tmp_path / output, *flags, to=to) == 0
    assert_same(open_weights(str(tmp_path / output)).read(), published)
    if not compiled:
        assert type(torch.load(tmp_path / output, map_location="cpu")) is dict, "the published code loads it so"


def test_a_checkpoint_of_urm_is_read_and_written_back(tmp_path: Path) -> None:
    published = {f"_orig_mod.{name}": tensor for name, tensor in reference("urm_adam").items()}
    states = [{"state": {0: {"step": 3.0, "exp_avg": torch.ones(2)}}, "param_groups": [{"lr": 1e-4, "params": [0]}]}]
    whole = {"step": 518050, "model_state_dict": published, "optimizer_states": states}
    theirs = tmp_path / "step_518050.pt"
    torch.save(whole | {"rng_state": torch.get_rng_state(), "cuda_rng_state": [torch.get_rng_state()]}, theirs)
    assert_same(open_weights(str(theirs)).read(), published)
    assert _export(theirs, "-o", tmp_path / "back.pt", "--compiled", to="urm") == 0
    back = torch.load(tmp_path / "back.pt", weights_only=True)
    assert back.keys() == {"step", "model_state_dict"} and back["step"] == 518050
    assert_same(back["model_state_dict"], published)


def test_a_run_of_urm_is_written_as_its_program_needs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = {
        name: tensor.detach().clone() for name, tensor in build("urm", "forward_dtype=bfloat16").state_dict().items()
    }
    arch = {"name": "urm", "hidden_size": 32, "num_heads": 2, "puzzle_emb_ndim": 32, "halt_max_steps": 8}
    arch |= {"rope_theta": 5e4, "conv_bias": True, "loss": {"loss_type": "softmax_cross_entropy"}}
    save_step(tmp_path / "run", 7, arch, model=weights)
    assert _export(tmp_path / "run", "-o", tmp_path / "out.pt", to="urm") == 0
    typed = "arch=urm loops=8 H_cycles=2 L_cycles=6 num_layers=4 hidden_size=32 puzzle_emb_ndim=32"
    expected = f"{typed} loss.loss_type=softmax_cross_entropy num_heads=2 rope_theta=50000.0".replace(" ", " ++arch.")
    assert capsys.readouterr().out.endswith(
        f"code: DISABLE_COMPILE=1 python pretrain.py ++load_checkpoint={tmp_path}/out.pt {expected}\n"
    )
    assert _export(tmp_path / "run", "-o", tmp_path / "as_compiled.pt", "--compiled", to="urm") == 0
    assert f"code: python pretrain.py ++load_checkpoint={tmp_path}/as_compiled.pt" in capsys.readouterr().out
    written = torch.load(tmp_path / "out.pt", weights_only=True)
    assert written["step"] == 7
    for name, tensor in to_ours(written["model_state_dict"]).items():
        # In another dtype than the activations, the convolution would change theirs.
        dtype = torch.bfloat16 if ".conv_" in name or name == "z_init" else torch.float32
        assert tensor.dtype == dtype and torch.equal(tensor, weights[name].to(dtype)), name


# ---- checkpoints of runs -----------------------------------------------------------------------


def test_a_run_or_a_step_can_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The moving average is exported by default. H_init and L_init have none."""
    run, weights = tmp_path / "run", _generated("hrm")
    average = {name: tensor + 1 for name, tensor in weights.items() if tensor.dtype == torch.float32}
    zeros = {name: tensor * 0 for name, tensor in weights.items()}
    first = save_step(run, 1, {"name": "hrm"}, model=zeros)
    newest = save_step(run, 2, {"name": "hrm", "rope_theta": 5e4}, model=weights, ema=average)
    for checkpoint, flags, expected in (
        (run, [], weights | average),
        (run, ["--raw"], weights),
        (newest, [], weights | average),
        (first, [], zeros),
    ):
        assert _export(checkpoint, "-o", tmp_path / "out", *flags) == 0
        assert_same(to_ours(open_weights(str(tmp_path / "out")).read()), expected)
    printed = capsys.readouterr()
    assert printed.err == "" and "beside it: arch=hrm_v1 arch.rope_theta=50000.0\n" in printed.out
    (newest / "model.safetensors").write_bytes(b"")
    assert _export(run, "-o", tmp_path / "out") == 0
    assert "warning: " in (said := capsys.readouterr().err) and "going back to step_00000001" in said


@pytest.mark.parametrize(
    "arch, match",
    [
        ({"name": "transformer"}, "arch.name=transformer"),
        ({"name": "trm", "mlp": "swiglu", "pos_encodings": "rope_2d"}, "arch.pos_encodings=rope_2d"),
        ({"name": "urm", "num_registers": 2}, "arch.num_registers=2"),
        ({"conv_2d": True, "puzzle_emb_ndim": 0}, "arch.conv_2d=True"),
        ({"name": "hrm", "puzzle_emb_len": 4}, "arch.puzzle_emb_len=4"),
        ({"name": "hrm", "width_multiple": 64}, "arch.width_multiple=64"),
        ({"name": "urm", "mlp_t": True}, "arch.mlp_t=True"),
    ],
)
def test_models_that_the_published_code_lacks_are_refused(
    arch: dict[str, Any], match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_step(tmp_path / "run", 1, arch, model=_generated("hrm"))
    assert match in mistake(capsys, "--format", "hrm", tmp_path / "run", "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- files that describe their model -----------------------------------------------------------


def test_a_file_describes_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Models that the published code lacks are written as well. Such a file is a source, too."""
    weights = _generated("hrm")
    run = tmp_path / "demo" / "happy otter"
    run.parent.mkdir()
    (data := tmp_path / "sudoku").mkdir()
    arch = {"name": "hrm", "mlp": "normalized_swiglu", "hidden_size": 32, "num_heads": 2}
    save_step(run, 7, arch, model=weights, config={"started_in": str(tmp_path), "data_path": "sudoku"})
    file, again = tmp_path / "a, model.safetensors", tmp_path / "again.safetensors"
    assert main([str(run), "-o", str(file)]) == 0
    assert_same(open_weights(str(file)).read(), weights)
    described = open_model(str(file)).described
    assert described is not None and isinstance(described.arch, TokenConfig)
    assert described.arch.mlp == "normalized_swiglu" and described.arch.hidden_size == 32
    assert (described.run, described.step, described.data) == ("demo/happy otter", 7, ["sudoku"])
    assert described.sizes == {"seq_len": 6, "vocab_size": 7, "num_puzzle_identifiers": 5}
    printed = [shlex.split(line)[1:] for line in capsys.readouterr().out.splitlines()[1:]]
    assert printed == [
        ["evaluate.py", f"checkpoint='{file}'", f"data_path={data}"],
        ["solve.py", f"checkpoint='{file}'", "puzzle=..."],
        ["pretrain.py", f"init_from='{file}'", f"data_path={data}"],
    ]
    assert main([str(file), "-o", str(again)]) == 0
    assert again.read_bytes() == file.read_bytes()
    capsys.readouterr()
    assert "arch.mlp=normalized_swiglu" in mistake(capsys, "--format", "hrm", file, "-o", tmp_path / "out")
    assert "export the run that wrote it" in mistake(capsys, file, "-o", tmp_path / "folder"), "it has no recipe"


def test_a_file_without_its_architecture_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(_generated("hrm"), tmp_path / "ours")
    assert "export the run that wrote it" in mistake(capsys, tmp_path / "ours", "-o", tmp_path / "out.safetensors")
    step = tmp_path / "run" / "step_00000004"
    step.mkdir(parents=True)
    (step / "state.json").write_text("{}")
    shutil.move(tmp_path / "ours", step / "model.safetensors")
    message = mistake(capsys, step / "model.safetensors", "-o", tmp_path / "out.safetensors")
    assert message.rstrip().endswith(f", {step}"), message


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        (["arch=trm", "arch.mlp_t=true", "arch.pos_encodings=none"], ["arch=trm_mlp"]),
        (["arch=trm", "arch.hidden_size=64", "arch.num_heads=4"], None),
        (["arch=urm", "arch.depth_curriculum=[{until:0.3,H_cycles:1,L_cycles:2}]", "arch.backprop=3"], None),
    ],
)
def test_the_printed_options_are_those_that_differ(typed: list[str], expected: list[str] | None) -> None:
    def arch(overrides: list[str]) -> Any:
        options = read_config("evaluate", ["checkpoint=_", *overrides])["arch"]
        return TypeAdapter(ArchConfig).validate_python(options)

    printed = overrides_of(arch(typed))
    assert arch(printed) == arch(typed)
    if expected is not None:
        assert printed == expected
    for option in printed[1:]:
        assert arch([typed for typed in printed if typed != option]) != arch(typed), f"{option} is not needed"


# ---- mistakes ----------------------------------------------------------------------------------


def test_wrong_paths_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_file(_generated("hrm"), tmp_path / "ours")
    (tmp_path / "folder").mkdir()

    def said(checkpoint: str, output: str, *more: str) -> str:
        return mistake(capsys, "--format", "hrm", tmp_path / checkpoint, "-o", tmp_path / output, *more)

    assert "there is no checkpoint at" in said("nowhere", "out")
    assert "is a model of HRM; give --format hrm" in mistake(capsys, "--format", "urm", tmp_path / "ours", "-o", "x.pt")
    assert "can't write" in said("ours", "nowhere/out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "ours"]
