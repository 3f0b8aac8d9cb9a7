"""Alter valid files of each kind that the programs read, at random and with malice, and read them.

    python -m tests.fuzz --files 10000
    python -m tests.fuzz --kind weights --only 17      # one file again, with the traceback

The reader must accept a file, or refuse it as it refuses a user's mistake. Everything else fails:

- crash: any other exception, the end of the process, a change to a file outside, or code of the
  file that ran
- hang: more than LIMIT_S seconds
- memory: more than LIMIT_MIB beyond the memory for the valid file
"""

import argparse
import contextlib
import gzip
import hashlib
import io
import json
import multiprocessing as mp
import os
import pickle
import resource
import shutil
import struct
import sys
import tempfile
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil
import torch
import yaml

from dataset import boards, build_arc_dataset, build_maze_dataset, build_sudoku_dataset, maze, show
from dataset.arc import read_tasks
from dataset.arc_votes import ArcVotes
from dataset.augment import BOXES
from dataset.loader import EvalLoader
from dataset.puzzle_input import PuzzleReader, PuzzleTable
from dataset.schema import check_contents, open_datasets
from dataset.tasks.maze import MazeTask
from dataset.tasks.sudoku import SudokuTask
from dataset.validate import validate as validate_dataset
from models import build_on_meta
from records.lock import RunLock
from records.metrics.row_file import keep_rows
from sharing.export import main as export
from sharing.exported import ExportedPuzzles
from sharing.weights_file import write_weights
from tests import runs
from tests.dataset.builders import write_arc_tasks
from tests.in_process import SINGLE, begin, load_run, pretrain_config
from tests.records.checkpoint.helpers import Trap, fix_manifest
from tests.viewer.samples import write_arc, write_run
from training.data import Sizes
from training.resume import prepare, read_start
from training.solver import Solver
from training.trained import weights_from
from utils.errors import UserError
from utils.ranks.launch import Launch
from view import view

LIMIT_S = 5
LIMIT_MIB = 256
_ADDRESS_SPACE = 3 << 30  # bytes beyond those at the start; protects the machine if another limit fails

Reader = Callable[[Path, Random], None]

# ---- kinds: a valid example, and its reader -----------------------------------------------------


def _sudoku(folder: Path) -> Path:
    options = ["--generate", "12", "--generate-test", "6", "--box", "2x2", "--num-aug", "1"]
    assert build_sudoku_dataset.main(["--output-dir", str(folder), *options]) == 0
    return folder


def _settings(data: Path, run: Path) -> list[str]:
    return runs.settings(data, run, max_steps=2, ema="true", arch__puzzle_emb_ndim=32)


def _write_checkpoint(folder: Path) -> None:
    begin(_settings(_sudoku(folder.parent / "data of checkpoint"), folder / "run")).fit()


def _read_checkpoint(folder: Path, rng: Random) -> None:
    run = folder / "run"
    if rng.random() < 0.5:
        load_run(run, SINGLE)
        return
    begun = begin([f"checkpoint_path={run}", "resume=auto", "device=cpu"])
    assert begun.start.config.run_path == run, "the run would go on in another folder"
    with begun.lock:
        prepare(begun.start, begun.lock, Launch())


def _write_config(folder: Path) -> None:
    overrides = _settings(_sudoku(folder.parent / "data of config"), folder / "run")
    with RunLock() as lock:
        prepare(read_start(overrides, lock, Launch()), lock, Launch())


def _read_config(folder: Path, rng: Random) -> None:
    run = folder / "run"
    with RunLock() as lock:
        start = read_start([f"checkpoint_path={run}", "resume=auto", "device=cpu"], lock, Launch())
        assert start.config.run_path == run, "the run would go on in another folder"
        prepare(start, lock, Launch())


def _write_weights(folder: Path) -> None:
    begun = begin(_settings(_sudoku(folder.parent / "data of weights"), folder.parent / "never written"))
    weights = begun.state.model.state_dict()
    write_weights(folder / "weights.safetensors", weights)
    write_weights(folder / "weights.pt", weights)
    torch.save({"model": weights}, folder / "legacy.pt", _use_new_zipfile_serialization=False)


def _read_weights(folder: Path, rng: Random) -> None:
    data = folder.parent.parent / "examples" / "data of weights"
    config = pretrain_config(*_settings(data, folder / "run"))
    (altered,) = _altered(folder) or [rng.choice(sorted(folder.iterdir()))]
    sizes = Sizes.of(open_datasets([str(data)], "train", numbered_by=[str(data)]))
    own = build_on_meta(config.arch, **sizes.as_dict()).state_dict()
    for _ in weights_from(str(altered), own, "keep", SINGLE):
        pass


def _write_onnx(folder: Path) -> None:
    data = _sudoku(folder.parent / "data of onnx")
    begun = begin(_settings(data, folder.parent / "never written either"))
    arch = begun.start.config.arch.model_copy(update={"forward_dtype": "float32"})
    described: dict[str, Any] = {"format": 1, "arch": arch, "data": [], "run": "", "step": 0}
    model = ExportedPuzzles(
        **described, **Sizes.of(open_datasets([str(data)], "train", numbered_by=[str(data)])).as_dict()
    )
    weights = folder.parent / "weights of onnx.safetensors"
    write_weights(weights, begun.state.model.state_dict(), model.as_metadata())
    assert export([str(weights), "--format", "onnx", "-o", str(folder / "model"), "--data", str(data)]) == 0


def _read_onnx(folder: Path, rng: Random) -> None:
    file, config = folder / "model/model.onnx", folder / "model/config.json"
    are_whole = all(each.is_file() and not each.is_symlink() and each.stat().st_size < 10**7 for each in (file, config))
    if are_whole and rng.random() < 0.9:  # a stranger makes the checksum right again
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            host = json.loads(config.read_bytes())
            host["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
            config.write_text(json.dumps(host))
    Solver.from_file(file).solve(["1.3....24..1..4."])


def _write_dataset(folder: Path) -> None:
    _sudoku(folder / "data")


def _read_dataset(folder: Path, rng: Random) -> None:
    data = str(folder / "data")
    # With the builder's fingerprint every change would be noticed at once. The fingerprint may be a
    # folder here.
    if rng.random() < 0.7 and (folder / "data" / "fingerprint.json").is_file():
        (folder / "data" / "fingerprint.json").unlink()
    reader = rng.randrange(4)
    if reader == 0:
        for split in (open_datasets([data], split, numbered_by=[data]) for split in ("train", "test")):
            check_contents(split)
            for name in split.sets:
                for _ in EvalLoader(split, name, 5).batches(SINGLE):
                    pass
    elif reader == 1:
        validate_dataset(Path(data))
    elif reader == 2:
        show.describe([data])
    else:
        view([data, "-o", str(folder / "page.html")])


def _some_tasks() -> dict[str, Any]:
    rng = np.random.default_rng(0)

    def pair() -> dict[str, Any]:
        return {name: rng.integers(10, size=(3, 4)).tolist() for name in ("input", "output")}

    return {name: {"train": [pair(), pair()], "test": [pair()]} for name in ("one", "two")}


def _write_tasks(folder: Path) -> None:
    tasks = _some_tasks()
    (folder / "one.json").write_text(json.dumps(tasks["one"]))
    (folder / "all.json").write_text(json.dumps(tasks))
    with gzip.open(folder / "all.json.gz", "wt") as stream:
        json.dump(tasks, stream)
    solutions = {name: [pair["output"] for pair in task["test"]] for name, task in tasks.items()}
    (folder / "solutions.json").write_text(json.dumps(solutions))


def _read_tasks(folder: Path, rng: Random) -> None:
    for name in ("one.json", "all.json", "all.json.gz"):
        read_tasks(folder / name)
    read_tasks(folder / "all.json", folder / "solutions.json")


def _write_arc(folder: Path) -> None:
    tasks = write_arc_tasks(folder / "tasks", evaluation=_some_tasks())
    options = ["--dataset-dirs", str(tasks), "--num-aug", "3"]
    assert build_arc_dataset.main([*options, "--output-dir", str(folder / "data")]) == 0
    shutil.rmtree(tasks)


def _read_arc(folder: Path, rng: Random) -> None:
    data = str(folder / "data")
    reader = rng.randrange(4)
    if reader == 0:
        ArcVotes(open_datasets([data], "test", numbered_by=[data]))
    elif reader == 1:
        _ = PuzzleTable([data], data, 1).rows
    else:
        _read_dataset(folder, rng)


def _write_csv(folder: Path) -> None:
    box = BOXES["2x2"]
    sudoku = open_datasets([str(data := _sudoku(folder.parent / "data of csv"))], "test", numbered_by=[str(data)])
    pairs = list(maze.generate(3, 6, np.random.default_rng(0)))
    tasks = {
        "sudoku": (SudokuTask(box), list(zip(sudoku.sets["all"].inputs, sudoku.sets["all"].labels, strict=True))),
        "maze": (MazeTask(6), pairs),
    }
    for name, (task, pairs_of) in tasks.items():
        rows = [f"source,{task.plain(question)},{task.plain(answer)},3" for question, answer in pairs_of]
        text = "\n".join(["source,question,answer,rating", *rows]) + "\n"
        for split in ("train", "test"):
            (folder / name).mkdir(exist_ok=True)
            (folder / name / f"{split}.csv").write_text(text)
        with gzip.open(folder / name / "puzzles.csv.gz", "wt") as stream:
            stream.write(text)


def _read_csvs(folder: Path, rng: Random) -> None:
    name = rng.choice(["sudoku", "maze"])
    for altered in _altered(folder):
        name = "maze" if "maze" in altered.parts else "sudoku"
    task = SudokuTask(BOXES["2x2"]) if name == "sudoku" else MazeTask(6)
    for file in sorted((folder / name).iterdir()):
        if rng.random() < 0.5:
            PuzzleReader(task, lambda _: task, False, "", PuzzleTable([], "", 0)).of_csv(file)
        else:
            to_boards = build_sudoku_dataset.to_boards if name == "sudoku" else build_maze_dataset.to_mazes
            boards.read_boards(file, to_boards)


def _write_outputs(folder: Path) -> None:
    write_run(folder / "run", None)
    write_arc(folder / "arc")


def _read_outputs(folder: Path, rng: Random) -> None:
    chosen = rng.choice(["run", "arc"])
    for altered in _altered(folder):
        chosen = "arc" if "arc" in altered.relative_to(folder).parts else "run"
        if altered.name == "metrics.jsonl" and rng.random() < 0.5:
            keep_rows(altered, 100)
            return
    runs_there = [path.parent for path in (folder / chosen).rglob("eval_outputs")] or [folder / chosen]
    view([str(runs_there[0]), "-o", str(folder / "page.html")])


@dataclass(frozen=True)
class Kind:
    write: Callable[[Path], None]
    read: Reader
    altered: tuple[str, ...]  # patterns of the files to alter


KINDS = {
    "checkpoint": Kind(_write_checkpoint, _read_checkpoint, ("run/latest", "run/step_*/**/*.*", "run/config.yaml")),
    "config": Kind(_write_config, _read_config, ("run/config.yaml",)),
    "weights": Kind(_write_weights, _read_weights, ("*.*",)),
    "onnx": Kind(_write_onnx, _read_onnx, ("model/*.*",)),
    "dataset": Kind(_write_dataset, _read_dataset, ("data/*.json", "data/*/*.*")),
    "arc": Kind(_write_arc, _read_arc, ("data/*.json", "data/test/*.*")),
    "tasks": Kind(_write_tasks, _read_tasks, ("*.*",)),
    "csv": Kind(_write_csv, _read_csvs, ("*/*.*",)),
    "outputs": Kind(_write_outputs, _read_outputs, ("**/*.json*", "**/*.safetensors", "**/config.yaml")),
}


def _altered(folder: Path) -> list[Path]:
    note = folder.parent / "altered"
    return [Path(line) for line in note.read_text().splitlines()] if note.exists() else []


# ---- alterations -------------------------------------------------------------------------------


NUMBERS = (0, -1, 1, 2, 255, 2**31, -(2**31) - 1, 2**53, 2**63, -(2**63) - 1, 2**64, 10**15, 10**30, 1e308, 0.5)
TEXTS = (
    *("", " ", ".", "..", "../../outside/victim", "/etc/passwd", "/dev/zero", "a\0b", "\ud800", "\x1b[2J", "é" * 300),
    *("x" * 100_000, "hf://owner/repo/file", "${oc.env:HOME}", "${", "${lr}", "step_99999999", "-1", "1e5", "null"),
    *("F64", "<i8", "|O", "train", "__class__", "!!python/object/apply:os.mkdir [sprung]", "9" * 5000),
)
OTHERS: tuple[Any, ...] = (None, True, [], {}, [[]], [0] * 1000, {"a": {}}, [None], float("nan"), float("inf"))


def _hostile(rng: Random) -> Any:
    return rng.choice(rng.choice((NUMBERS, TEXTS, OTHERS)))


def _places(value: Any) -> list[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in _places(value[key])]


def alter_json(value: Any, rng: Random) -> Any:
    places = _places(value)
    if not places or rng.random() < 0.03:
        return _hostile(rng)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        container, key = rng.choice(places)
        if key not in (container if isinstance(container, dict) else range(len(container))):
            continue  # an earlier alteration has removed the key
        what = rng.randrange(6)
        old = container[key]
        if what == 0 and isinstance(old, int | float):
            container[key] = rng.choice((old + 1, old - 1, -old, old * 2, old * 10**9, str(old), float(old)))
        elif what == 1:
            del container[key]
        elif what == 2 and isinstance(container, dict):
            container[str(_hostile(rng))] = old
        elif what == 3:
            other, other_key = rng.choice(places)
            if not (isinstance(other, list) and other_key >= len(other)):
                container[key] = json.loads(
                    json.dumps(other.get(other_key) if isinstance(other, dict) else other[other_key])
                )
        elif what == 4 and isinstance(container, list):
            container.append(old)
        else:
            container[key] = _hostile(rng)
    return value


def alter_bytes(contents: bytes, rng: Random) -> bytes:
    """Flip, insert, remove, cut off, repeat or overwrite bytes."""
    altered = bytearray(contents)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at, length = rng.randrange(len(altered) + 1), rng.choice((1, 1, 4, 64, 1000))
        piece = altered[at : at + length]
        match rng.randrange(6):
            case 0 if piece:
                altered[at] ^= 1 << rng.randrange(8)
            case 1:
                altered[at:at] = rng.randbytes(length)
            case 2:
                del altered[at : at + length]
            case 3:
                del altered[at:]
            case 4:
                altered[at:at] = piece * rng.choice((1, 10))
            case 5:
                altered[at : at + length] = rng.choice((b"\0", b"\xff", b"9", b"[", b'"', b"\r\n", b",")) * len(piece)
    return bytes(altered)


def alter_text(text: str, rng: Random) -> str:
    lines = text.split("\n")
    at = rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            lines[at] = str(_hostile(rng))
        case 1:
            cells = lines[at].split(",")
            cells[rng.randrange(len(cells))] = str(_hostile(rng))
            lines[at] = ",".join(cells)
        case 2:
            lines[at] *= rng.choice((2, 1000))
        case 3:
            lines[at : at + 1] = [lines[at], "", lines[at]]
        case 4:
            bracket = rng.choice('[{("')
            lines[at] = bracket * rng.choice((1, 100, 200_000))
    return "\n".join(lines)


# The "billion laughs" attack.
LAUGHS = "a: &a0 [lol]\n" + "".join(f"b{n}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]\n" for n in range(12))
YAMLS = (
    "seed: !!python/object/apply:os.mkdir [the_trap_was_sprung]",
    *("seed: !!binary =", "seed: &a [*a]", "<<: *x", "? [a]\n: b"),
)


def alter_yaml(text: str, rng: Random) -> str:
    match rng.randrange(8):
        case 0:
            return LAUGHS + text + rng.choice(("lr: *a9\n", "", "arch: {name: *a12}\n"))
        case 1:
            return text.replace("seed: 0", rng.choice(YAMLS))
        case 2 | 3:
            return alter_text(text, rng)
        case _:
            return yaml.safe_dump(alter_json(yaml.safe_load(text), rng))


def alter_safetensors(contents: bytes, rng: Random) -> bytes:
    length = struct.unpack("<Q", contents[:8])[0]
    header, data = json.loads(contents[8 : 8 + length]), contents[8 + length :]
    if rng.random() < 0.1:
        return struct.pack("<Q", rng.choice((0, 1, 2**60, 2**63, 2**64 - 1, len(contents), 10**8))) + contents[8:]
    sharding = header.get("__metadata__", {}).get("DCP_SHARDING_INFO")
    if sharding and rng.random() < 0.5:
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(alter_json(json.loads(sharding), rng))
    elif rng.random() < 0.3:  # a consistent header that describes other tensors
        names = [name for name in header if name != "__metadata__"]
        one, other = header[rng.choice(names)], header[rng.choice(names)]
        one["dtype"] = rng.choice((other["dtype"], "I32", "U32", "F8_E4M3", "F8_E8M0", "F4", "C64", "BF16"))
        one["shape"] = rng.choice((one["shape"][::-1], [1, *one["shape"]], [*one["shape"], 1]))
    else:
        header = alter_json(header, rng)
    written = json.dumps(header).encode(errors="surrogatepass")
    return struct.pack("<Q", len(written)) + written + data


def alter_npy(contents: bytes, rng: Random) -> bytes:
    end = contents.index(b"\n") + 1
    array = np.load(io.BytesIO(contents))
    shape = list(array.shape)
    shape[rng.randrange(len(shape))] = rng.choice((0, -1, 1, 10**15, 2**63, 2**64, shape[0] + 1, 2**40))
    dtype = rng.choice(("<i4", "<i8", "<u8", "|u1", ">i4", "<f4", "|O", "|V4", "<U7", "<M8[s]", "{'a': 'b'}", "<i999"))
    header = rng.choice((
        {"descr": dtype, "fortran_order": False, "shape": array.shape},
        {"descr": array.dtype.str, "fortran_order": rng.random() < 0.5, "shape": tuple(shape)},
        {"descr": array.dtype.str, "fortran_order": True, "shape": array.shape},
        {"descr": [("a", dtype)], "fortran_order": False, "shape": tuple(shape[:1])},
        {"descr": array.dtype.str, "fortran_order": 1, "shape": [2]},
        {},
    ))  # fmt: skip
    text = rng.choice(
        (str(header), str(header), str(header), "(" * 5000, "-" * 9000 + "1", "[" * 150 + "]" * 150, "x" * 10)
    )
    if rng.random() < 0.3:  # change only a value, and keep type and shape
        array = array.copy()
        array.flat[rng.randrange(array.size)] = rng.choice((0, 1, 7, 127))
        stream = io.BytesIO()
        np.save(stream, array)
        return stream.getvalue()
    padded = text.encode() + b"\n"
    version = rng.choice((b"\x01\x00", b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x09"))
    size = struct.pack("<H" if version[0] == 1 else "<I", rng.choice((len(padded), len(padded), 0, 65535)))
    return b"\x93NUMPY" + version + size + padded + contents[end:]


def alter_torch(contents: bytes, rng: Random) -> bytes:
    if not zipfile.is_zipfile(io.BytesIO(contents)) or rng.random() < 0.4:
        if rng.random() < 0.1:
            return rng.choice((pickle.dumps(Trap()), pickle.dumps({"model": Trap()}, protocol=2), _hollow(rng)))
        return alter_bytes(contents, rng)
    written = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(contents)) as old, zipfile.ZipFile(written, "w") as new:
        names = old.namelist()
        chosen = rng.choice(names)
        for name in names:
            data, compression = old.read(name), zipfile.ZIP_STORED
            altered = name == chosen or (name.endswith("data.pkl") and rng.random() < 0.5)
            match rng.randrange(6) if altered else None:
                case 0:
                    data = alter_bytes(data, rng)
                case 1:
                    continue
                case 2:
                    strange = ("/etc/cron.d/x", "../../outside/victim", name + "\0", "x" * 60_000, name + "/")
                    name = rng.choice(strange)
                case 3:
                    data = pickle.dumps(Trap(), protocol=2)
                case 4:  # a zip bomb
                    data, compression = bytes(400 << 20), zipfile.ZIP_DEFLATED
                case 5:
                    new.writestr(name, data)  # the archive has the name twice
            with warnings.catch_warnings(action="ignore"):
                new.writestr(name, data, compression, compresslevel=1)
    return written.getvalue()


def _hollow(rng: Random) -> bytes:
    """Return a file of some hundred bytes that claims to hold terabytes."""
    written = io.BytesIO()
    tensor = rng.choice((torch.zeros(1).expand(10**6, 10**6), torch.empty(10**6, 10**6, device="meta")))
    torch.save({"H_init": tensor}, written, _use_new_zipfile_serialization=rng.random() < 0.5)
    return written.getvalue()


def _replace(file: Path, rng: Random) -> None:
    """Replace a file by an empty file, by something other than a plain file, or by a link."""
    file.unlink()
    targets: list[str | Path] = ["/etc/passwd", file.name, file.parent.parent, "../" * 9 + "etc/passwd"]
    typed = file.suffix in (".csv", ".gz") or file.name.startswith(("one", "all", "solutions"))
    if not typed:  # the user may name a pipe for puzzles
        targets.append("/dev/zero")
    match rng.randrange(5):
        case 0 if not typed:
            os.mkfifo(file)
        case 1:
            file.mkdir()
        case 2 | 3:
            file.symlink_to(rng.choice((*targets, _victim(file))))
        case 4:
            file.write_bytes(b"")


def _victim(file: Path) -> Path:
    return next(folder for folder in file.parents if (folder / "outside").exists()) / "outside" / "victim"


def alter_file(file: Path, rng: Random) -> None:
    if rng.random() < 0.05:
        _replace(file, rng)
        return
    contents = file.read_bytes()
    zipped = file.suffix == ".gz"
    if zipped and rng.random() < 0.7:
        contents = gzip.decompress(contents)
    kind = file.suffixes[0] if file.suffixes else ""
    if rng.random() < 0.3 or (zipped and contents.startswith(b"\x1f\x8b")):
        contents = alter_bytes(contents, rng)
        zipped = False
    elif kind == ".json":
        text = json.dumps(alter_json(json.loads(contents), rng))
        if rng.random() < 0.2:
            text = rng.choice((alter_text(text, rng), "[" * 10**5, '{"a":' * 10**5, text.replace("1", "9" * 5000)))
        contents = text.encode(errors="surrogatepass")
    elif kind == ".jsonl":
        lines = contents.decode().split("\n")
        at = rng.randrange(len(lines) - 1)
        lines[at] = json.dumps(alter_json(json.loads(lines[at]), rng))
        contents = alter_text("\n".join(lines), rng).encode(errors="surrogatepass")
    elif kind == ".yaml":
        contents = alter_yaml(contents.decode(), rng).encode(errors="surrogatepass")
    elif kind == ".safetensors":
        contents = alter_safetensors(contents, rng)
    elif kind == ".npy":
        contents = alter_npy(contents, rng)
    elif kind == ".onnx":
        contents = alter_bytes(contents, rng)
    elif kind == ".pt" and file.suffix != ".gz":
        contents = alter_torch(contents, rng)
    else:
        contents = alter_text(contents.decode(), rng).encode(errors="surrogatepass")
    if zipped:
        contents = _gzip_bomb() if rng.random() < 0.05 else gzip.compress(contents)
    file.write_bytes(contents)


def _gzip_bomb() -> bytes:
    """Return a MiB that holds a GiB of blanks."""
    blanks = gzip.compress(b" " * (64 << 20), compresslevel=1)
    return blanks * 16  # a gzip file may have several members


def alter(folder: Path, kind: Kind, rng: Random) -> None:
    """Alter one file of the example, sometimes two."""
    files = sorted({file for pattern in kind.altered for file in folder.glob(pattern) if file.is_file()})
    chosen = rng.sample(files, min(len(files), rng.choice((1, 1, 1, 2))))
    if kind.read is _read_weights or kind.read is _read_csvs:
        chosen = chosen[:1]
    for file in chosen:
        alter_file(file, rng)
    for step in folder.glob("run/step_*"):
        if rng.random() < 0.9 and not any(file.name == "manifest.json" for file in chosen):
            fix_manifest(step)
    (folder.parent / "altered").write_text("\n".join(map(str, chosen)))


# ---- the process that reads --------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The result for one file. `how`: accepted, refused, crash, hang or memory."""

    how: str
    said: str
    mib: float = 0  # the largest growth of the process since its start


def attempt(name: str, kind: Kind, folder: Path, seed: int, index: int) -> tuple[str, str]:
    """Copy the example, alter it and read it. Return the outcome and the message."""
    case = folder / "case"
    shutil.rmtree(case, ignore_errors=True)
    (folder / "altered").unlink(missing_ok=True)
    shutil.copytree(folder.parent / "examples" / name, case)
    rng = Random(f"{seed} {name} {index}")
    if index >= 0:  # -1 reads the example unaltered
        alter(case, kind, rng)
    how, said = "accepted", ""
    try:
        with SINGLE.shared_errors():
            kind.read(case, rng)
    except UserError as error:
        how, said = "refused", str(error)
    except BaseException as error:  # any other exception is what the program looks for
        how, said = "crash", f"{type(error).__name__}: {' '.join(str(error).split())}\n{traceback.format_exc()}"
    if list(folder.rglob("*sprung*")):
        return "crash", "the file's code ran"
    if (folder / "outside" / "victim").read_text() != "untouched" or len(list((folder / "outside").iterdir())) > 1:
        return "crash", "a file outside was written"
    return how, said


def _work(pipe: Connection, name: str, kind: Kind, folder: str, seed: int) -> None:
    """Read the files whose numbers come through the pipe, in a process of its own."""
    torch.set_num_threads(1)
    place = Path(folder)
    (place / "outside").mkdir(parents=True)
    (place / "outside" / "victim").write_text("untouched")
    os.chdir(place)
    with _quiet():
        warnings.simplefilter("ignore")
        # Use every reader of the kind first, so that memory for imports doesn't count for a file.
        for _ in range(8):
            how, said = attempt(name, kind, place, seed, -1)
            assert how == "accepted", said
        most = psutil.Process().memory_info().vms + _ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        pipe.send("ready")
        while (index := pipe.recv()) is not None:
            how, said = attempt(name, kind, place, seed, index)
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began) / 1024
            pipe.send(Outcome(how, said, grown))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


class Worker:
    """A process that has imported everything and reads files of one kind.

    A new process takes its place after a hang, a death or too much growth.
    """

    def __init__(self, name: str, kind: Kind, folder: Path, seed: int) -> None:
        self._pipe, theirs = mp.Pipe()
        self._process = runs.fork(_work, theirs, name, kind, str(folder), seed)
        theirs.close()
        assert self._pipe.poll(60) and self._pipe.recv() == "ready", f"the valid example of {name} is not accepted"

    def read(self, index: int) -> Outcome:
        self._pipe.send(index)
        try:
            if not self._pipe.poll(LIMIT_S):
                return Outcome("hang", f"no answer in {LIMIT_S} s")
            outcome: Outcome = self._pipe.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            return Outcome("crash", f"the process ended with {self._process.exitcode}")
        if outcome.mib > LIMIT_MIB and outcome.how != "crash":
            return Outcome("memory", f"{outcome.mib:.0f} MiB; {outcome.said}", outcome.mib)
        return outcome

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


# ---- the program -------------------------------------------------------------------------------


def write_example(name: str, folder: Path) -> None:
    (folder / "examples" / name).mkdir(parents=True)
    with _quiet():
        KINDS[name].write(folder / "examples" / name)


def fuzz(name: str, indices: range, seed: int, folder: Path) -> dict[int, Outcome]:
    """Read altered files of a kind. `folder` receives the example and the files."""
    write_example(name, folder)
    outcomes: dict[int, Outcome] = {}
    worker: Worker | None = None
    for index in indices:
        worker = worker or Worker(name, KINDS[name], folder / f"worker_{index}", seed)
        outcome = outcomes[index] = worker.read(index)
        if outcome.how in ("hang", "memory") or "ended with" in outcome.said or index == indices[-1]:
            worker.close()
            worker = None
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--files", type=int, default=10_000, help="files of all kinds together (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--only", type=int, metavar="INDEX", help="read only this file of each kind, and keep it")
    options = parser.parse_args()
    failed = False
    for name in options.kind:
        folder = Path(tempfile.mkdtemp(prefix=f"fuzz_{name}_"))
        indices = range(-(-options.files // len(options.kind)))
        if options.only is not None:
            indices = range(options.only, options.only + 1)
        outcomes = fuzz(name, indices, options.seed, folder)
        print(f"{name:<12}{len(outcomes):>7} files: {dict(Counter(each.how for each in outcomes.values()))}")
        for index, outcome in failures(outcomes).items():
            failed = True
            said = outcome.said if options.only is not None else outcome.said.split("\n")[0][:200]
            print(f"  {outcome.how}: --kind {name} --seed {options.seed} --only {index}: {said}")
        if options.only is not None:
            print(f"  kept in {folder}")
        else:
            shutil.rmtree(folder)
    return 1 if failed else 0


def failures(outcomes: dict[int, Outcome]) -> dict[int, Outcome]:
    return {index: each for index, each in outcomes.items() if each.how not in ("accepted", "refused")}


if __name__ == "__main__":
    sys.exit(main())
