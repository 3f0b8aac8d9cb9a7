"""The first lines of a log name the command, the code, the ranks and the folder."""

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from records.heading import _on_host, _Seat, heading
from tests.spawn import run_ranks
from utils.ranks.world import World


def test_a_single_process(tmp_path: Path) -> None:
    typed = ["/somewhere/pretrain.py", "lr=1e-4", "eval_save_outputs=[a, b]"]
    command, code, ranks, _, folder = heading(typed, tmp_path, World.single())
    assert command == "command: pretrain.py lr=1e-4 'eval_save_outputs=[a, b]'"
    assert f"torch {torch.__version__}" in code and code.startswith(("code: commit ", "code: not under git"))
    assert (ranks, folder) == ("ranks: 1", f"folder: {tmp_path}")


def _of_two_hosts(world: World) -> list[str]:
    """Return the lines about ranks, of which every other one is on another host."""
    torch.set_num_threads(1 + (world.rank == 3))
    places = tuple(replace(place, host="ab"[rank % 2]) for rank, place in enumerate(world.places))
    launch = replace(world.launch, launcher="slurm", host="a", port=29500)
    lines = heading(["pretrain.py"], Path("/run"), replace(world, places=places, launch=launch, backend="gloo"))
    return lines[2:-1]


def test_each_host_has_one_line() -> None:
    assert run_ranks(_of_two_hosts, 4)[0] == [
        "ranks: 4, as told by slurm, met at a:29500, connected by gloo",
        "  a: ranks 0,2 on cpu, 1 thread each",
        "  b: rank 1 on cpu, 1 thread; rank 3 on cpu, 2 threads",
    ]


def test_gpus_are_named_once() -> None:
    seats = [_Seat(rank, "a", "NVIDIA H100", rank % 8, 4) for rank in range(8, 16)]
    assert _on_host(seats) == "ranks 8-15 on cuda:0-7 (NVIDIA H100), 4 threads each"


def test_the_code_outside_of_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Dockerfile writes the file COMMIT. It is empty if nobody named the commit."""
    monkeypatch.setattr("records.heading.ROOT", tmp_path)
    for noted, told in (("", "not under git;"), ("1a2b3c4-dirty\n", "commit 1a2b3c4-dirty;")):
        (tmp_path / "COMMIT").write_text(noted)
        assert heading(["pretrain.py"], tmp_path, World.single())[1].startswith(f"code: {told}")


def test_changed_and_new_code_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file of code may matter as much as a changed one. Data and results are no code."""

    def git(*typed: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(tmp_path), *who, *typed], check=True, capture_output=True)

    monkeypatch.setattr("records.heading.ROOT", tmp_path)
    for counted, names in (
        ("", ("train.py", "models/one.py")),
        ("", ("data/one.yaml", "runs/one/config.yaml", "models/notes.txt")),
        (", 3 new", ("models/three.yaml", "models/two.py", "mine.py")),
        (", 1 changed, 3 new", ("train.py",)),
    ):
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{name}{counted}")
        if not (tmp_path / ".git").exists():
            for words in ("init -q", "add .", "commit -q -m first"):
                git(*words.split())
        told = heading(["pretrain.py"], tmp_path, World.single())[1].partition(";")[0]
        assert re.fullmatch(r"code: commit [0-9a-f]+ of \d{4}-\d\d-\d\d" + counted, told), told
    monkeypatch.setattr("records.heading.ROOT", tmp_path / "models")
    assert heading(["pretrain.py"], tmp_path, World.single())[1].startswith("code: not under git"), "of another project"
