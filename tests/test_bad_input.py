"""A user's mistake gives one line with the value and the correction, and leaves no file behind."""

import os
import runpy
import shlex
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests import runs
from tests.spawn import free_port
from utils import program, terminal
from utils.errors import UserError
from utils.shell import tell_mistake


def test_a_mistake_is_one_line_with_status_2_and_leaves_no_file(data: Path, tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("no weights")
    for arguments, message in (
        (f"pretrain.py data_path={data} epoch=3", "error: unknown key 'epoch'; did you mean epochs"),
        (f"evaluate.py checkpoint=a_file data_path={data}", "error: a_file is no file of weights"),
    ):
        ended = runs.command(f"CUDA_VISIBLE_DEVICES= python {runs.REPOSITORY}/{arguments}", tmp_path)
        assert ended.status == 2, ended.stderr
        assert ended.stderr.startswith(message)
        assert ended.stderr.count("\n") == 1 and ended.stderr.endswith("\n")
        assert ended.stdout == ""
        assert [path.name for path in tmp_path.rglob("*")] == ["a_file"]


def test_all_ranks_together_give_one_line(tmp_path: Path) -> None:
    """torchrun adds its own report, without a traceback of this project, and exits with 1."""
    (folder := tmp_path / "folder").mkdir()
    typed, port = ["data_path=data/nowhere", "device=cpu"], str(free_port())
    ended = runs.Torchrun(["--master-port", port], runs.slowly, typed, tmp_path / "log", folder).wait()
    assert ended.status == 1
    (error,) = [line for line in ended.output.splitlines() if "no dataset" in line]
    assert error.startswith("error: no dataset at data/nowhere: ")
    assert "exitcode  : 2" in ended.output
    assert "agree" not in ended.output and "UserError" not in ended.output
    assert not list(folder.iterdir())


def _print_help(output: str, errors: str) -> None:
    runs._redirect("/dev/full", errors)
    if output == "Ctrl-C":
        terminal.show = Mock(side_effect=KeyboardInterrupt)
    if output == "pipe":  # that nobody reads any more
        reader, writer = os.pipe()
        os.close(reader)
        os.dup2(writer, 1)
    sys.argv = ["pretrain.py", "--help"]
    runpy.run_path(str(runs.REPOSITORY / "pretrain.py"), run_name="__main__")


@pytest.mark.parametrize(("output", "status"), [("full disk", 2), ("pipe", 0), ("Ctrl-C", 130)])
def test_a_page_that_cannot_be_printed(output: str, status: int, log: Path) -> None:
    """A reader that leaves early, as in `python pretrain.py --help | head -1`, is no fault."""
    ended = runs.Running([runs.fork(_print_help, output, str(log))], log).wait()
    full = "error: the output can't be written (No space left on device); free its disk, or send it elsewhere\n"
    assert (ended.status, ended.output) == (status, {2: full, 130: "error: interrupted\n"}.get(status, ""))


def test_a_page_for_a_closed_output() -> None:
    """Python then starts without sys.stdout."""
    command = f"{shlex.quote(sys.executable)} pretrain.py --help >&-"
    ended = subprocess.run(["bash", "-c", command], cwd=runs.REPOSITORY, capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")


def _rank_0_speaks_slowly(rank: int) -> None:
    def slowly(error: UserError) -> None:
        time.sleep(1)
        tell_mistake(error)

    if rank == 0:
        program.tell_mistake = slowly  # type: ignore[attr-defined]


def test_no_rank_exits_before_the_line_is_printed(log: Path) -> None:
    """torchrun kills the other ranks as soon as one rank has exited."""
    typed = ["data_path=data/nowhere", "device=cpu"]
    running = runs.start(typed, log, ranks=2, hook=_rank_0_speaks_slowly)
    running.processes[1].join(60)
    said = running.output
    assert running.wait().error().startswith("error: no dataset at data/nowhere")
    assert said.startswith("error: no dataset"), "rank 1 exited before rank 0 had printed the error"
