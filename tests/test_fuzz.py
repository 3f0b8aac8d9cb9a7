"""A stranger's files can't run code, write outside their place, take all memory, or never end."""

import gzip
import json
import os
import re
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

import view
from dataset import boards
from dataset.arc import read_tasks
from dataset.schema import open_array, read_metadata
from records.checkpoint.reader import Checkpoint
from sharing.weights_file import open_weights
from tests import fuzz, runs
from tests.in_process import SINGLE, load_run, mistake, train_here
from tests.records.checkpoint.helpers import fix_manifest
from tests.viewer.samples import write_run
from training.resume import _config_of
from training.saved_outputs import OutputWriter
from utils.errors import UserError
from utils.files import write_atomically

pytestmark = [pytest.mark.faults, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

LAST = "step_00000012"


# ---- altered files, by chance ------------------------------------------------------------------


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_some_altered_files(kind: str, tmp_path: Path) -> None:
    """`python -m tests.fuzz` reads more altered files."""
    outcomes = fuzz.fuzz(kind, range(10 if kind in ("checkpoint", "config", "weights") else 25), 0, tmp_path)
    assert not fuzz.failures(outcomes)
    refused = [outcome for outcome in outcomes.values() if outcome.how == "refused"]
    assert len(refused) > 3, "too few altered files were refused"


# ---- what has no end, or says that it is larger than it is -------------------------------------


def _refused(read: Callable[[], object]) -> str:
    """Return the one line of the refusal. It must come within 5 seconds."""
    began = time.monotonic()
    with pytest.raises(UserError) as caught, SINGLE.shared_errors():
        read()
    assert time.monotonic() - began < 5
    return str(caught.value)


@pytest.mark.parametrize("how", ["pipe", "device"])
def test_files_that_are_not_regular_are_refused(copied: Path, data: Path, tmp_path: Path, how: str) -> None:
    def instead_of(file: Path) -> Path:
        file.unlink(missing_ok=True)
        if how == "pipe":
            os.mkfifo(file)
        else:
            file.symlink_to("/dev/zero")
        return file

    folder = Path(shutil.copytree(data, tmp_path / "data"))
    array = instead_of(folder / "test" / "all__inputs.npy")
    assert "inputs.npy: cannot be mapped" in _refused(lambda: open_array(array, 2))
    instead_of(folder / "test" / "dataset.json")
    assert "dataset.json: cannot be read" in _refused(lambda: read_metadata(folder / "test"))
    instead_of(copied / LAST / "manifest.json")
    assert "manifest.json can't be read" in _refused(lambda: Checkpoint.open(copied / LAST))
    run = write_run(tmp_path / "viewed", None)
    for name in ("eval_outputs/step_00000500/all_rank0_0000.safetensors", "metrics.jsonl", "config.yaml"):
        instead_of(run / name)
        assert name.split("/")[-1] in _refused(lambda: view.view([str(run), "-o", str(tmp_path / "page.html")]))


def _bomb(text: bytes, times: int) -> bytes:
    return gzip.compress(text * (1 << 20), 1) * times


def test_a_gzip_bomb_is_read_up_to_a_limit(tmp_path: Path) -> None:
    (tmp_path / "tasks.json.gz").write_bytes(_bomb(b" ", 16) + _bomb(b"[", 64))
    assert "holds more than 32 MiB of JSON" in _refused(lambda: read_tasks(tmp_path / "tasks.json.gz"))
    file = tmp_path / "train.csv.gz"
    file.write_bytes(gzip.compress(b"source,question,answer,rating\n") + _bomb(b"1", 64))
    message = _refused(lambda: list(boards.read_rows(file)))
    assert f"train.csv.gz:2: the line has {boards.MOST_CHARACTERS:,} bytes or more" in message


@pytest.mark.parametrize("shape", ["-" * 9000 + "1", "(1000000000000000, 16)"])
def test_malicious_headers_of_arrays_are_refused(tmp_path: Path, shape: str) -> None:
    written = f"{{'descr': '<i4', 'fortran_order': False, 'shape': {shape}}}".encode()
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(written).to_bytes(2, "little") + written + bytes(64))
    message = _refused(lambda: open_array(tmp_path / "a.npy", 2))
    assert "a.npy: cannot be mapped as a plain array" in message and len(message) < 500


def _zip_bomb(file: Path) -> None:
    torch.save({"a": torch.ones(2)}, file)
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, contents in parts.items():
            archive.writestr(name, contents + bytes(64 << 20) * name.endswith("data.pkl"))


WEIGHTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "compressed": (_zip_bomb, "is compressed"),
    "header of an exabyte": (
        lambda file: file.write_bytes((2**60).to_bytes(8, "little") + b'{"a":{}}'),
        "is no whole safetensors file",
    ),
    "one element, a trillion times": (
        lambda file: torch.save({"a": torch.zeros(1).expand(10**6, 10**6)}, file),
        "holds no elements of a, or not all",
    ),
    "of no elements at all": (
        lambda file: torch.save({"a": torch.empty(10**6, 10**6, device="meta")}, file),
        "holds no elements of a, or not all",
    ),
    "quantised": (
        lambda file: save_file({"a": torch.zeros(3, dtype=torch.float8_e4m3fn)}, file),
        "a is torch.float8_e4m3fn; give weights that were not quantised",
    ),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_malicious_files_of_weights_are_refused(tmp_path: Path, case: str) -> None:
    write, expected = WEIGHTS[case]
    write(tmp_path / "weights.pt")
    assert expected in _refused(lambda: open_weights(str(tmp_path / "weights.pt")).read())


def test_a_model_too_large_for_any_machine_is_refused(copied: Path, data: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(data, tmp_path / "data"))
    for split in ("train", "test"):
        file = own / split / "dataset.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"num_puzzle_identifiers": 2**31}))
    message = mistake(runs.settings(own, tmp_path / "new", arch__puzzle_emb_ndim=512))
    assert "num_puzzle_identifiers 2147483648" in message and "takes 4,096 GB, but this machine has" in message
    _forge(copied, task={"seq_len": 16, "vocab_size": 10**12, "num_puzzle_identifiers": 1})
    assert "takes 238,419 GB, but this machine has" in _refused(lambda: load_run(copied, SINGLE))


# ---- YAML --------------------------------------------------------------------------------------

YAMLS = {
    "laughs": fuzz.LAUGHS + "lr: *a12\n",
    "deep": "a: " + "[" * 100_000,
    "long": "a: 1\n" * 100_000,
    "code": "lr: !!python/object/apply:os.mkdir [the_trap_was_sprung]\n",
    "a date that there is not": "lr: 2000-13-45\n",
}


@pytest.mark.parametrize("case", YAMLS)
def test_malicious_yaml_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "run", None)
    (run / "config.yaml").write_text(YAMLS[case])
    if case != "a date that there is not":  # OmegaConf does not parse dates
        assert re.search(r"config.yaml(:\d+:)? can't be read as YAML", _refused(lambda: _config_of(run)))
    assert "config.yaml: cannot be read" in _refused(lambda: view.view([str(run)]))
    assert not (tmp_path / "the_trap_was_sprung").exists()


def _forge(run: Path, **changes: Any) -> None:
    """Change values in the newest step's state.json, and the manifest with them.

    A key that the state lacks is a key of the config in the state.
    """
    file = run / LAST / "state.json"
    state = json.loads(file.read_text())
    for key, value in changes.items():
        (state if key in state else state["config"])[key] = value
    file.write_text(json.dumps(state))
    fix_manifest(run / LAST)


@pytest.mark.parametrize("value", ["${oc.env:HOME}", "${"])
def test_a_stored_config_interpolates_nothing(copied: Path, value: str) -> None:
    file = copied / "config.yaml"
    file.write_text(file.read_text().replace("best_metric: auto", f"best_metric: '{value}'"))
    _forge(copied, best_metric=value)
    expected = f"the stored config is no run's: best_metric is '{value}'"
    assert expected in _refused(lambda: load_run(copied, SINGLE))
    assert expected in mistake([f"checkpoint_path={copied}", "resume=auto"])
    for step in copied.glob("step_*"):
        shutil.rmtree(step)
    message = mistake([f"checkpoint_path={copied}", "resume=auto"])  # by config.yaml
    assert expected in message or "can't be read as YAML" in message


# ---- names and links ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../../x", "..", "a" * 201])
def test_names_with_other_folders_are_refused(
    data: Path, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    for key in ("project_name", "run_name"):
        message = mistake([*runs.settings(data, None), f"{key}={name}"])
        assert f"{key}: {name[:80]!r} can't name a folder; give a name without /" in message
    assert set(tmp_path.rglob("*")) == before
    _forge(copied, run_name=name)
    assert f"run_name: {name[:80]!r} can't name a folder" in mistake([f"checkpoint_path={copied}", "resume=auto"])


def test_a_resumed_run_stays_where_it_was_resumed_and_downloads_nothing(
    copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(repo: str, file: str, **_: object) -> str:
        raise AssertionError(f"{repo}/{file} was asked for")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.chdir(tmp_path)
    before = {path.name for path in tmp_path.iterdir()}
    elsewhere = {"checkpoint_path": str(tmp_path / "elsewhere"), "resume": str(tmp_path / "other")}
    _forge(copied, **elsewhere, project_name="p", init_from="hf://owner/repo/file")
    load_run(copied, SINGLE)
    train_here([f"checkpoint_path={copied}", "resume=auto", "max_steps=13"])
    assert (copied / "step_00000013").is_dir()
    assert {path.name for path in tmp_path.iterdir()} == before
    # The test proves something only if a download is noticed.
    with pytest.raises(UserError, match="owner/repo/file was asked for"):
        open_weights("hf://owner/repo/file").read()


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "victim").write_text("untouched")
    return tmp_path / "outside" / "victim"


def test_nothing_is_written_through_a_link(tmp_path: Path, victim: Path) -> None:
    (tmp_path / ".incomplete_latest").symlink_to(victim)
    (tmp_path / "all_rank0_0000.safetensors").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        write_atomically(tmp_path / "latest", "step_00000001\n")
    (tmp_path / "best").symlink_to(victim)
    write_atomically(tmp_path / "best", "step_00000001\n")  # the new file replaces the link
    writer = OutputWriter(tmp_path, "all", SINGLE)
    writer.add({"rows": torch.arange(3)})
    with pytest.raises(UserError, match="symbolic links"):
        writer.close(SINGLE)
    assert victim.read_text() == "untouched" and not (tmp_path / "best").is_symlink()


@pytest.mark.parametrize(
    "link",
    [
        *("metrics.jsonl", ".lock", ".incomplete_latest", ".incomplete_replaced_step_00000010", "step_00000010"),
        *("wandb", "tensorboard/events.out.tfevents.1.host.1.0", "profile/rank_0.txt"),
        "eval_outputs/step_00000013/all_rank0_0000.safetensors",
        # Of an evaluation.
        *("eval_outputs", f"eval_outputs/{LAST}", f"eval_outputs/{LAST}/results.json"),
    ],
)
def test_a_program_follows_no_link_in_a_run(
    copied: Path, victim: Path, evaluate_here: runs.Evaluate, link: str
) -> None:
    place = copied / link
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    is_folder = "step" in place.name or place.name == "eval_outputs"
    place.symlink_to(victim.parent if is_folder else victim)
    if link == "eval_outputs" or LAST in link:
        with pytest.raises(UserError) as caught:
            evaluate_here(f"checkpoint={copied}")
        message = str(caught.value)
    else:
        message = mistake([f"checkpoint_path={copied}", "resume=auto", "max_steps=13"])
    assert f"{place} is a link, and in a run's folder none is followed" in message
    assert victim.read_text() == "untouched" and list(victim.parent.iterdir()) == [victim] and place.is_symlink()


def test_a_branch_reads_through_links_and_keeps_them(copied: Path, data: Path, tmp_path: Path) -> None:
    """In the cache of a hub, the files of a folder are links to blobs. Datasets may be linked."""
    blobs = Path(shutil.copytree(copied, tmp_path / "blobs"))
    for file in copied.rglob("*.*"):
        if file.is_file():
            file.unlink()
            file.symlink_to(blobs / file.relative_to(copied))
    (tmp_path / "linked").symlink_to(copied)
    (tmp_path / "data" / "test").mkdir(parents=True)
    (tmp_path / "data" / "train").symlink_to(data / "train")
    for file in (data / "test").iterdir():
        (tmp_path / "data" / "test" / file.name).symlink_to(file)
    branch = tmp_path / "branch"
    typed = [f"resume={tmp_path / 'linked'}", f"checkpoint_path={branch}", f"data_path={tmp_path / 'data'}"]
    train_here([*typed, "max_steps=13"])
    assert not (branch / "metrics.jsonl").is_symlink() and runs.rows(branch)[-1]["step"] == 13
    assert runs.rows(blobs)[-1]["step"] == 12


def test_messages_have_no_control_characters() -> None:
    with pytest.raises(UserError) as caught, SINGLE.shared_errors():
        raise UserError("names \x1b]0;taken over\x07 twice " + "x" * 100_000)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 2100


def test_view_refuses_a_dtype_that_numpy_does_not_know(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", None)
    shard = run / "eval_outputs" / "step_00000500" / "all_rank0_0000.safetensors"
    rows = torch.zeros(3, dtype=torch.float8_e8m0fnu)
    save_file({"rows": rows, "inputs": torch.zeros(1), "predictions": torch.zeros(1)}, shard)
    assert f"{shard}: cannot be read" in _refused(lambda: view.view([str(run), "-o", str(tmp_path / "page.html")]))
