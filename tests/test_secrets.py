"""Keys and passwords of the environment appear in no file, log, config or W&B record of a run."""

import os
import subprocess
from pathlib import Path

import pytest

from tests import runs
from utils.secrets import secret_in

SECRETS = {
    "WANDB_API_KEY": "1b5a" * 10,
    "HF_TOKEN": "hf_qZxWvUtSrQpOnMlKj",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIbPxRfiCY",
    "MY_PASSWORD": "correct horse battery",
}
REMOTE_TOKEN = "ghp_aBcDeFgHiJkLmNoPq"
VISIBLE = "a-name-that-may-be-seen"


def _with_secrets(home: str, rank: int) -> None:
    """Set up an environment and a git repository with secrets, without a W&B account."""
    os.environ.update(SECRETS, HOME=home, WANDB_CONFIG_DIR=home, WANDB_CACHE_DIR=home, WANDB_DATA_DIR=home)
    os.chdir(home)


def _with_secrets_and_a_fault(home: str, rank: int) -> None:
    _with_secrets(home, rank)
    runs.raises(3, 0, rank)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    remote = f"https://someone:{REMOTE_TOKEN}@example.com/someone/{VISIBLE}.git"
    for arguments in (["init", "--quiet", str(home)], ["-C", str(home), "remote", "add", "origin", remote]):
        subprocess.run(["git", *arguments], check=True, capture_output=True, timeout=60)
    return home


def _files_with(text: str, folder: Path) -> set[str]:
    """Return the names of the files in a folder that contain the text. Links are not followed."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    return {path.name for path in files if text.encode() in path.read_bytes()}


@pytest.mark.parametrize("hook", [_with_secrets, _with_secrets_and_a_fault])
def test_no_file_of_a_run_has_a_secret(data: Path, tmp_path: Path, home: Path, hook: runs.Hook) -> None:
    left = tmp_path / "left"
    left.mkdir()
    options = {"wandb__mode": "offline", "max_steps": 4, "run_name": VISIBLE, "eval_save_outputs": "[inputs]"}
    arguments = runs.settings(data, left / "run", **options)
    ended = runs.train(arguments, left / "log", ranks=2, hook=runs.with_arguments(hook, str(home)))
    assert ended.status == (0 if hook is _with_secrets else 1), ended.output
    # The visible name is found in the places where a secret would be. After a fault W&B does not
    # write its record.
    (record,) = (left / "run").glob("wandb/offline-run-*/*.wandb")
    assert {"config.yaml", "state.json", "debug.log"} <= _files_with(VISIBLE, left)
    if hook is _with_secrets:
        content = record.read_bytes()
        assert VISIBLE.encode() in content and b"WANDB_API_KEY" not in content
        assert f"@example.com/someone/{VISIBLE}.git".encode() in content, "the W&B record names another repository"
    for name, secret in {**SECRETS, "the remote's token": REMOTE_TOKEN}.items():
        assert not _files_with(secret, left), f"{name} is in files of the run"


@pytest.mark.parametrize("name", ["DB_PASS", "MYSQL_PWD", "GITHUB_PAT", "secret_1", "APIKEY", "GOOGLE_CREDENTIALS"])
def test_a_variable_with_the_name_of_a_secret_is_a_secret(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "my horse")
    assert secret_in("here my horse runs") == name
