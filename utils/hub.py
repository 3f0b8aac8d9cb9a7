"""Get files from the Hugging Face Hub, and upload folders to it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from utils.errors import UserError
from utils.safetensors_files import FILE
from utils.text import one_line

_ADDRESS = re.compile(r"hf://(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<file>.+)")
_WITHOUT_FILE = re.compile(r"hf://[^/@]+/[^/@]+(@[^/]+)?/?")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_address(where: str) -> bool:
    return where.startswith("hf://")


def with_file(address: str) -> str:
    """Return the address of a file. That of a repository means its model.safetensors."""
    return f"{address.rstrip('/')}/{FILE}" if _WITHOUT_FILE.fullmatch(address) else address


def path_of(where: str) -> Path:
    """Return the path of a file. A file on the Hub is downloaded, unless it is here."""
    if not is_address(where):
        return Path(where)
    parts = _ADDRESS.fullmatch(where)
    if parts is None:
        raise UserError(f"{where} names no file on the Hugging Face Hub; give hf://owner/repo, or hf://owner/repo/path")
    remedy = "check the name and the connection, or give a file"
    return download(parts["repo"], parts["file"], f"{where} can't be downloaded", remedy, revision=parts["revision"])


def download(repo: str, file: str, failed: str, remedy: str, **options: Any) -> Path:
    """Return the path of a file. A UserError says what failed, the reason and a remedy."""
    with _asking(failed, remedy):
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # otherwise each retry prints two lines of warnings
        return Path(hf_hub_download(repo, file, **options))


@contextmanager
def _asking(failed: str, remedy: str) -> Iterator[None]:
    """Turn the errors of the Hub into a UserError. They have no class in common."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"{failed} ({one_line(error)}); {remedy}") from error


def require_account(repo: str) -> None:
    """Raise UserError if nobody is logged in here, or the repository can't have this name."""
    if not _REPO.fullmatch(repo):
        raise UserError(f"{repo} names no repository of the Hugging Face Hub; give owner/repo")
    with _asking(f"{repo} can't be uploaded", "pip install huggingface_hub again"):
        from huggingface_hub import get_token

        if get_token() is None:
            raise UserError("nobody is logged in at the Hugging Face Hub; type hf auth login, or set HF_TOKEN")


def upload(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Upload the files of a folder as one commit, and return the repository's address."""
    with _asking(f"{repo} can't be uploaded", "check the name, the connection, and that your token may write there"):
        from huggingface_hub import HfApi

        api = HfApi()
        url = api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise UserError(f"{repo} exists and is public; leave --private out, or give another name")
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
        return str(url)
