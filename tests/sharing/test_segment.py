"""Exported segments answer as PyTorch does, of every architecture and in every format."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from dataset.build_sudoku_dataset import main as build_sudoku
from models import ArchConfig, build_arch
from sharing.export import main
from sharing.exported import ExportedPuzzles, ExportedText
from sharing.segment.model import Run
from sharing.weights_file import write_weights
from training.solver import Solver
from utils.command_line import read_config
from utils.errors import UserError

pytestmark = pytest.mark.export
# One size of test puzzles for all models. The mixer was built for another one.
SMALL = "arch.hidden_size=32 arch.H_cycles=2 arch.L_cycles=2 arch.halt_max_steps=3"
ARCHS = {
    "hrm": f"arch=hrm {SMALL} arch.num_heads=2 arch.puzzle_emb_ndim=32",
    "trm": f"arch=trm {SMALL} arch.num_heads=2 arch.num_states=2",
    "trm_mlp": f"arch=trm_mlp {SMALL} arch.noise=fresh arch.puzzle_emb_ndim=0",
    "trm_mlp_plain": f"arch=trm_mlp {SMALL}",
    "trm_conv": f"arch=trm_conv {SMALL} arch.H_cycles=1 arch.num_registers=1",
    "urm": f"arch=urm {SMALL} arch.num_heads=2",
    "se_rrm": f"arch=se_rrm {SMALL} arch.add_tokens=2",
    "transformer": "arch=transformer arch.hidden_size=32 arch.num_heads=2",
    "se_mixer": f"arch=se_mixer {SMALL} arch.noise=annealed",
    "se_mixer_attention": f"arch=se_mixer {SMALL} arch.cells=attention arch.num_heads=2",
    "gpt": "arch=gpt arch.hidden_size=32 arch.num_heads=2 arch.num_layers=2",
}
MIXER_SIZE = 36, 8
RUNTIME = Path(__file__).parents[2] / "viewer/solver/node_modules/onnxruntime-web"
needs_runtime = pytest.mark.skipif(
    not RUNTIME.is_dir(), reason="onnxruntime-web isn't installed (npm ci --prefix viewer/solver)"
)


@pytest.fixture(scope="module")
def puzzles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "sudoku-4x4"
    assert build_sudoku(f"--output-dir {folder} --generate 20 --generate-test 60 --box 2x2".split()) == 0
    return folder


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return what writes a model with random weights, which describe it."""

    def write(name: str) -> Path:
        file = tmp_path_factory.mktemp("weights") / f"{name}.safetensors"
        config = read_config("pretrain", [*ARCHS[name].split(), "arch.forward_dtype=float32"])["arch"]
        arch: ArchConfig = TypeAdapter(ArchConfig).validate_python(config)
        of_all: dict[str, Any] = {"format": 1, "arch": arch, "data": [], "run": "", "step": 0}
        described: ExportedPuzzles | ExportedText
        if name == "gpt":
            sizes: dict[str, Any] = {"vocab_size": 320}
            described = ExportedText(
                **of_all, kind="text", max_len=64, mean_context=20, tokenizer="bytes", special_tokens={}, **sizes
            )
        else:
            seq_len, vocab_size = MIXER_SIZE if name == "se_mixer" else (16, 6)
            sizes = {"seq_len": seq_len, "vocab_size": vocab_size, "num_puzzle_identifiers": 2}
            described = ExportedPuzzles(**of_all, **sizes)
        model = build_arch(arch, **sizes)
        model.init_weights(torch.Generator().manual_seed(1))
        state = model.state_dict()
        for tensor in state.values():  # no weight is zero, as those of Q heads are at the start
            tensor += 0.02 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(2))
        write_weights(file, state, described.as_metadata())
        return file

    return write


def export(words: Sequence[object]) -> None:
    assert main([str(word) for word in words]) == 0


@pytest.mark.parametrize(
    ("name", "format"),
    [(name, "onnx") for name in ARCHS if name != "trm_mlp_plain"]
    + [(name, "torchscript") for name in ARCHS if name != "trm_mlp_plain"]
    + [("hrm", "aoti"), ("se_mixer", "aoti"), pytest.param("trm", "aoti", marks=pytest.mark.slow)]
    + [(name, "mlx") for name in ("hrm", "trm_mlp_plain")]
    + [("se_mixer", "web")]
    # In these pages onnxruntime-web runs in Node.js.
    + [pytest.param(name, "web", marks=needs_runtime) for name in ("hrm", "trm", "se_mixer_attention")],
)
def test_a_file_answers_as_pytorch_does(
    name: str,
    format: str,
    weights: Callable[[str], Path],
    puzzles: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The export itself compares them, and ends with a mistake if they differ."""
    data = build_text(tmp_path) if name == "gpt" else puzzles
    output = tmp_path / ("out.html" if format == "web" else "out")
    export([weights(name), "--format", format, "-o", output, "--data", data])
    assert output.is_file() or (output / "config.json").is_file()
    assert "equal answers" in capsys.readouterr().out


def test_one_puzzle_is_enough_for_the_comparison(weights: Callable[[str], Path], tmp_path: Path) -> None:
    assert build_sudoku(f"--output-dir {tmp_path}/data --generate 1 --generate-test 1 --box 2x2".split()) == 0
    export([weights("trm"), "--format", "torchscript", "-o", tmp_path / "out", "--data", tmp_path / "data"])


def build_text(folder: Path) -> Path:
    from dataset.build_text_dataset import main as build

    for name in ("a", "b"):
        (folder / f"{name}.txt").write_text(f"the quick brown fox {name} jumps over the lazy dog\n" * 50)
    sources = f"--source {folder}/a.txt --test-source {folder}/b.txt".split()
    assert build(["--output-dir", str(folder / "text"), *sources]) == 0
    return folder / "text"


@pytest.mark.parametrize("name", ["hrm", "trm", "trm_mlp", "se_mixer"])
def test_a_solver_from_a_file_is_that_of_the_checkpoint(
    name: str, weights: Callable[[str], Path], puzzles: Path, tmp_path: Path
) -> None:
    """With several trajectories, which begin with other states and read other noise."""
    checkpoint, folder = weights(name), tmp_path / "out"
    export([checkpoint, "--format", "onnx", "-o", folder, "--data", puzzles])
    texts = ["1.3....24..1..4.", "4..1.2...3..2..."]
    if name == "se_mixer":
        texts.append("123456456123231............5......6.")
    reads_noise = "noise" in ARCHS[name]
    options = ["trajectories=3", f"noise={0.0 if reads_noise else 0.5}"]
    ours = Solver.from_checkpoint(checkpoint, options, device="cpu").solve(texts)
    theirs = Solver.from_file(folder / "model.onnx", options).solve(texts)
    for one, other in zip(ours, theirs, strict=True):
        assert [step.answer for step in one.steps] == [step.answer for step in other.steps]
        np.testing.assert_allclose(
            [step.confidence for step in one.steps], [step.confidence for step in other.steps], atol=1e-4
        )


def test_fewer_bits_make_a_smaller_file(weights: Callable[[str], Path], puzzles: Path, tmp_path: Path) -> None:
    num_weights, sizes = sum(tensor.numel() for tensor in build_trm().parameters()), dict[str, int]()
    for dtype, per_weight in (("float32", 4), ("bfloat16", 2), ("int8", 1)):
        export([weights("trm"), "--format", "onnx", "-o", tmp_path / dtype, "--data", puzzles, "--weights", dtype])
        sizes[dtype] = (tmp_path / dtype / "model.onnx").stat().st_size
        # The scales, and what makes float32 of the weights again, take some bytes.
        saved = sizes["float32"] - sizes[dtype]
        assert saved >= 0.9 * (4 - per_weight) * num_weights - 8000 * (dtype != "float32"), sizes


def build_trm() -> torch.nn.Module:
    config = read_config("pretrain", [*ARCHS["trm"].split(), "arch.forward_dtype=float32"])["arch"]
    return build_arch(
        TypeAdapter(ArchConfig).validate_python(config), seq_len=16, vocab_size=6, num_puzzle_identifiers=2
    )


@pytest.mark.parametrize("output", [0, 1, 3])  # logits, q_halt, a state
def test_a_file_that_computes_otherwise_is_not_published(
    output: int, weights: Callable[[str], Path], puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sharing.segment import formats

    write = formats.WRITERS["torchscript"]

    def wrong(*arguments: Any) -> Run:
        run = write(*arguments)
        return lambda given: [tensor + (number == output) * 0.1 for number, tensor in enumerate(run(given))]

    monkeypatch.setitem(formats.WRITERS, "torchscript", wrong)
    words = [weights("trm"), "--format", "torchscript", "-o", tmp_path / "out", "--data", puzzles]
    assert main([str(word) for word in words]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_can_not_be_written_leaves_nothing(
    weights: Callable[[str], Path], puzzles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sharing.segment import web

    def refused(name: str, data: Path) -> None:
        words = [weights(name), "--format", "web", "-o", tmp_path / "out" / "page.html", "--data", data]
        assert main([str(word) for word in words]) == 2
        assert list((tmp_path / "out").iterdir()) == []

    (tmp_path / "out").mkdir()
    refused("gpt", build_text(tmp_path))
    monkeypatch.setattr(web, "RUNTIME", tmp_path / "missing")
    refused("trm", puzzles)


def test_damaged_files_are_refused_in_one_line(weights: Callable[[str], Path], puzzles: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    export([weights("trm"), "--format", "onnx", "-o", folder, "--data", puzzles])
    file, config = folder / "model.onnx", folder / "config.json"
    whole, text = file.read_bytes(), config.read_text()
    described = json.loads(text)

    def refused(contents: bytes = whole, **changes: object) -> None:
        file.write_bytes(contents)
        config.write_text(json.dumps(described | changes))
        with pytest.raises(UserError):
            Solver.from_file(file)

    refused(whole[: len(whole) // 2])
    refused(whole[:-1] + b"x")
    refused(format=2)
    refused(starts={"z_H": [[0.0]]})
    refused(inputs=["tokens", "z_H"])
    refused(inputs=["tokens", "other", "z_L"])
    refused(state_shape=[16, 33])
    refused(segments=2)
    refused(noise="fresh")
    refused(symbols="x")
    refused(outputs=["logits", "q_continue", "q_halt", "next_z_H", "next_z_L"])
    refused(inputs=["tokens", "z_L", "z_H"])
    refused(starts={"z_H": [[0.0] * 32], "z_L": [[0.0] * 32, [0.0]]})
    refused(outputs=["logits", "q_halt", "q_continue", "next_z_H", "other"])
    refused(model=described["model"] | {"vocab_size": 7})
    refused(model=described["model"] | {"arch": {"name": "other"}})
    file.write_bytes(whole)
    config.unlink()
    with pytest.raises(UserError):
        Solver.from_file(file)
