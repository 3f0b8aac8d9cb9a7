"""Files of weights: every format is read unchanged, and no code of a file is executed."""

import io
import os
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from sharing.weights_file import open_weights, write_weights
from tests.records.checkpoint.helpers import Trap
from tests.sharing.test_export import assert_same


def _weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model.inner.lm_head.weight": torch.randn(5, 3, generator=generator),
        "model.inner.H_init": torch.randn(4, generator=generator).to(torch.bfloat16),
        "count": torch.arange(3),
        "scalar": torch.tensor(2.5),
    }


def _saved(contents: object, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(contents, buffer, **options)
    return buffer.getvalue()


def _legacy(contents: object, **options: Any) -> bytes:
    return _saved(contents, _use_new_zipfile_serialization=False, **options)


def _one_line(path: Path | str, match: str) -> str:
    # A warning would be a second line.
    with warnings.catch_warnings(action="error"), pytest.raises(ValueError, match=match) as caught:
        open_weights(str(path)).read()
    message = str(caught.value)
    assert "\n" not in message and str(path) in message
    assert "weights_only" not in message, "the message repeats torch's advice to load the file without the check"
    return message


# ---- what is read ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["step_21700", "checkpoint.pt", "model.safetensors"])
@pytest.mark.parametrize("kind", [save, _saved, _legacy])
def test_the_contents_decide_the_format_not_the_name(kind: Callable[..., bytes], name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(kind(_weights()))
    assert_same(open_weights(str(path)).read(), _weights())


def test_nested_weights_are_unwrapped(tmp_path: Path) -> None:
    path = tmp_path / "step_5"
    torch.save({"model": OrderedDict(_weights()), "step": 5, "optimizers": [{"lr": 0.1}]}, path)
    assert_same(open_weights(str(path)).read(), _weights())


# ---- what is refused ---------------------------------------------------------------------------


PAYLOADS: dict[str, Callable[[Path], object]] = {
    "alone": Trap,
    "beside weights": lambda mark: {**_weights(), "more": Trap(mark)},
    "in the nested dict": lambda mark: {"model": _weights(), "optimizer": Trap(mark)},
}
KINDS: dict[str, Callable[[object, int], bytes]] = {
    "raw": lambda contents, protocol: pickle.dumps(contents, protocol=protocol),
    "zip": lambda contents, protocol: _saved(contents, pickle_protocol=protocol),
    "legacy": lambda contents, protocol: _legacy(contents, pickle_protocol=protocol),
}


@pytest.mark.parametrize("protocol", [0, 5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_pickle_with_code_is_refused_and_does_not_run(payload: str, kind: str, protocol: int, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    pickle.loads(pickle.dumps(PAYLOADS[payload](mark)))
    mark.rmdir()  # the payload works
    for name in ("step_21700", "model.safetensors"):
        (tmp_path / name).write_bytes(KINDS[kind](PAYLOADS[payload](mark), protocol))
        _one_line(tmp_path / name, "loading it would run code: refused|no file of weights")
        assert not mark.exists()


@pytest.mark.parametrize("kind", [save, _saved, _legacy])
def test_truncated_files_are_refused(kind: Callable[..., bytes], tmp_path: Path) -> None:
    contents = kind(_weights())
    path = tmp_path / "step_5"
    for size in range(1, len(contents), max(1, len(contents) // 60)):
        path.write_bytes(contents[:size])
        _one_line(path, "whole|refused|no file of weights")
    path.write_bytes(contents[:-1])
    _one_line(path, "whole.*; copy or download it again")


def test_paths_without_a_file_of_weights_are_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "pipe"):
        _one_line(path, "there is no file at")
    for contents in (b"", b'{"a": 1}', b"PK\x03\x04"):
        (tmp_path / "README.md").write_bytes(contents)
        _one_line(tmp_path / "README.md", "no file of weights|neither a whole")


def test_contents_other_than_tensors_are_refused(tmp_path: Path) -> None:
    contents: dict[str, object] = {
        "no weights by name": torch.ones(2),
        "no weights by name.*": {"model": {}},
        "'step', which is no plain tensor": {**_weights(), "step": 5},
        "5, which is no plain tensor under a name": {5: torch.ones(2)},
        "'w', which is no plain tensor": {"w": torch.ones(2).to_sparse()},
    }
    for message, wrong in contents.items():
        torch.save(wrong, tmp_path / "step_5")
        _one_line(tmp_path / "step_5", message)


# ---- the hub -----------------------------------------------------------------------------------


def test_a_file_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    save_file(_weights(), tmp_path / "file")
    asked: list[tuple[str, str, str | None]] = []

    def hf_hub_download(repo: str, file: str, *, revision: str | None) -> str:
        if repo == "owner/gone":
            raise OSError("no\nnetwork")
        asked.append((repo, file, revision))
        return str(tmp_path / "file")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", hf_hub_download)
    expected = {
        "hf://owner/repo/checkpoint": ("owner/repo", "checkpoint", None),
        "hf://owner/repo@v1.0/some/folder/step_5": ("owner/repo", "some/folder/step_5", "v1.0"),
        "hf://owner/repo/odd@name": ("owner/repo", "odd@name", None),
        "hf://owner/repo": ("owner/repo", "model.safetensors", None),
        "hf://owner/repo@v1.0/": ("owner/repo", "model.safetensors", "v1.0"),
    }
    for address in expected:
        assert_same(open_weights(address).read(), _weights())
    assert asked == list(expected.values())
    _one_line("hf://owner/gone/file", r"can't be downloaded \(no network\)")
    for address in ("hf://owner", "hf://owner/repo@/x"):
        _one_line(address, "names no file.*; give hf://owner/repo, or hf://owner/repo/path")


# ---- writing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["model.safetensors", "step_5"])
def test_weights_are_written_unchanged(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    base = torch.arange(1000.0)
    weights = {**_weights(), "part": base[:3], "transposed": base[:6].view(2, 3).T, "again": base[:3]}
    write_weights(path, weights)
    assert_same(open_weights(str(path)).read(), weights)
    assert (path.read_bytes()[8:9] == b"{") == (name == "model.safetensors")
    assert path.stat().st_size < 3500, "the file holds the whole memory of a view"
    write_weights(path, open_weights(str(path)).read())  # those that were read may be mapped to the old file
    assert_same(open_weights(str(path)).read(), weights)
    assert list(tmp_path.iterdir()) == [path]
