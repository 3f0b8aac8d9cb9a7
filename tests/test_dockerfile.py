"""The Dockerfile passes hadolint, and its targets are as the pages say. No image is built here."""

import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from launch.kubernetes import parse

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "Dockerfile").read_text()


def _lint(text: str) -> str:
    hadolint = Path(sys.executable).with_name("hadolint")
    return subprocess.run([str(hadolint), "-"], input=text, capture_output=True, text=True, timeout=60).stdout


def _stages() -> dict[str, str]:
    """Return the instructions of each stage by its name."""
    parts = re.split(r"^FROM (\S+) AS (\S+)$", TEXT, flags=re.MULTILINE)
    return dict(zip(parts[2::3], parts[3::3], strict=True))


def test_the_linter_has_nothing_to_say() -> None:
    assert _lint(TEXT) == ""
    assert "DL3007" in _lint(TEXT.replace(":3.11.14-slim-bookworm", ":latest")), "the linter finds nothing at all"


def test_images_are_pinned_and_not_run_by_root() -> None:
    bases = re.findall(r"^FROM (\S+) AS", TEXT, flags=re.MULTILINE)
    assert [base for base in bases if base not in _stages()] == ["python:3.11.14-slim-bookworm"]
    for target in ("cpu", "cuda"):
        users = re.findall(r"^USER (.+)$", _stages()[target], flags=re.MULTILINE)
        assert users == ["1000"], "Kubernetes checks runAsNonRoot by the number"


def test_a_job_takes_the_image_of_its_target_by_default() -> None:
    for gpus, target in (("0", "cpu"), ("8", "cuda")):
        image = parse(["--gpus", gpus]).image
        assert target in _stages() and f" --target {target} --tag {image} ." in TEXT


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_the_image_notes_its_commit(target: str) -> None:
    """The noted commit is that of the code, and changes no layer below the code."""
    _, after = _stages()[target].split("COPY . .")
    assert 'ARG COMMIT\nRUN echo "$COMMIT" > COMMIT\n' in after and "--build-arg COMMIT=" in TEXT


def test_only_one_argument_names_a_package_host() -> None:
    hosts = re.findall(r"^.*https?://.*$", TEXT, flags=re.MULTILINE)
    assert hosts == ["ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu"]


def test_the_context_has_the_sources_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*", "a new folder would be sent"
    named = [line.removeprefix("!") for line in lines if line.startswith("!")]
    assert not [name for name in named if not list(ROOT.glob(name))], "a name that is in .dockerignore is gone"
    needed = {"pretrain.py", "evaluate.py", "requirements.txt", "config"}
    # A sweep needs optuna, which the image does not have.
    assert "sweep.py" in lines[lines.index("!*.py") :] and "search" not in named
    needed |= {path.parent.name for path in ROOT.glob("*/*.py")} - {"tests", "benchmarks", "search", "release"}
    assert not {name for name in needed if not any(fnmatch(name, pattern) for pattern in named)}
