"""Keys and passwords of the environment appear in no file, log, config or W&B record of a run."""

import os
import subprocess
from pathlib import Path

import pytest

from tests import runs
from tests.in_process import mistake
from utils.command_line import CommandLine, read_config
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


# Overrides that contain a secret, and the place that the message names.
LEAKS = {
    "interpolated": ("run_name=${oc.env:MY_PASSWORD}", "run_name"),
    "amid text": ("data_path=data/${oc.env:HF_TOKEN}/x", "data_path"),
    "in a list": ("wandb.tags=[a,'${oc.env:HF_TOKEN}']", "wandb.tags"),
    "in a group": ("arch.forward_dtype=${oc.env:WANDB_API_KEY}", "arch.forward_dtype"),
    "where a number belongs": ("epochs=${oc.env:AWS_SECRET_ACCESS_KEY}", "epochs"),
    "as a group": ("arch=${oc.env:HF_TOKEN}", "what is wrong with the config"),
    "as an experiment": ("experiment=${oc.env:HF_TOKEN}", "what is wrong with the config"),
    "as a name": ("run_name='${oc.env:${oc.env:HF_TOKEN}}'", "what is wrong with the config"),
    "as a key of its own": ("run_name='${${oc.env:HF_TOKEN}}'", "what is wrong with the config"),
    "as a resolver": ("run_name='${${oc.env:HF_TOKEN}:1}'", "what is wrong with the config"),
    "by the shell": (f"run_name={SECRETS['HF_TOKEN']}", "the command line"),
    "by the shell, as a key": (f"{SECRETS['HF_TOKEN']}=1", "the command line"),
    "by the shell, alone": (SECRETS["MY_PASSWORD"], "the command line"),
}


@pytest.mark.parametrize("case", LEAKS)
def test_a_config_with_a_secret_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    override, where = LEAKS[case]
    for name, secret in SECRETS.items():
        monkeypatch.setenv(name, secret)
    overrides = ["debug=tiny", f"checkpoint_path={tmp_path / 'run'}", override]
    message = mistake(overrides)
    assert message.startswith(f"{where} holds the value of the environment variable ")
    assert any(name in message for name in SECRETS)
    assert not [secret for secret in SECRETS.values() if secret in message]
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="looks like a secret"):  # --cfg job does not show the secret either
        CommandLine.parse(["--cfg", "job", *overrides], "pretrain", "")


def test_other_environment_variables_may_be_used_in_a_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH_FOLDER", "/scratch/some/where")
    monkeypatch.setenv("SORT_KEY", "data")  # an ordinary word, which many values contain
    for name in ("KEYCLOAK_HOME", "MONKEYPATCH_DIR", "TOKENIZER_DIR", "CREDENTIALS_DIRECTORY", "PWD"):
        monkeypatch.setenv(name, "/scratch/some")
    config = read_config("pretrain", ["data_path=${oc.env:SCRATCH_FOLDER}/data"])
    assert config["data_path"] == "/scratch/some/where/data"


@pytest.mark.parametrize("name", ["DB_PASS", "MYSQL_PWD", "GITHUB_PAT", "secret_1", "APIKEY", "GOOGLE_CREDENTIALS"])
def test_a_variable_with_the_name_of_a_secret_is_a_secret(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "correct horse")
    assert secret_in("the correct horse runs") == name
