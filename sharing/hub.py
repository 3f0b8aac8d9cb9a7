"""Get files from the Hugging Face Hub, and upload folders to it."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from utils.errors import UserError
from utils.safetensors_files import FILE
from utils.text import one_line

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_ADDRESS = re.compile(r"hf://(?P<repo>[^/@]+/[^/@]+)(@(?P<revision>[^/]+))?/(?P<file>.+)")
_WITHOUT_FILE = re.compile(r"hf://[^/@]+/[^/@]+(@[^/]+)?/?")
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_address(where: str) -> bool:
    return where.startswith("hf://")


def with_file(address: str) -> str:
    """Return the address of a file. That of a repository means its model.safetensors."""
    return f"{address.rstrip('/')}/{FILE}" if _WITHOUT_FILE.fullmatch(address) else address


def path_of(where: str) -> Path:
    """Return the path of a file. A file on the Hub is downloaded, unless it is here.

    Args:
        where: a path, or hf://owner/repo[@revision]/path/in/repo.

    Raises:
        UserError: The file can't be downloaded.
    """
    if not is_address(where):
        return Path(where)
    parts = _ADDRESS.fullmatch(where)
    if parts is None:
        raise UserError(f"{where} names no file on the Hugging Face Hub; give hf://owner/repo, or hf://owner/repo/path")
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.utils import logging
    except ImportError:
        raise UserError(f"{where} needs huggingface_hub, which is missing; pip install it, or give a file") from None
    logging.set_verbosity_error()  # otherwise each retry prints two lines of warnings
    try:
        return Path(hf_hub_download(parts["repo"], parts["file"], revision=parts["revision"]))
    except Exception as error:  # the hub's errors (network, name, access) have no class in common
        raise UserError(
            f"{where} can't be downloaded ({one_line(error)}); check the name and the connection, or give a file"
        ) from error


def require_account(repo: str) -> "HfApi":
    """Return the Hub's interface for `upload`, without asking the Hub.

    Args:
        repo: owner/repo.

    Raises:
        UserError: It is no name of a repository, or nobody is logged in.
    """
    if not _REPO.fullmatch(repo):
        raise UserError(f"{repo} names no repository of the Hugging Face Hub; give owner/repo")
    try:
        from huggingface_hub import HfApi, get_token
    except ImportError:
        raise UserError("an upload needs huggingface_hub, which is missing; pip install it") from None
    if get_token() is None:
        raise UserError("nobody is logged in at the Hugging Face Hub; type hf auth login, or set HF_TOKEN")
    return HfApi()


def upload(api: "HfApi", folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Upload the files of a folder as one commit, and return the repository's address.

    Args:
        private: the repository must be private; one that is made is.

    Raises:
        UserError: The Hub refuses it or can't be reached, or the repository should be private and
            is public.
    """
    try:
        url = api.create_repo(repo, private=private, exist_ok=True)
        if private and not api.repo_info(repo).private:
            raise UserError(f"{repo} exists and is public; leave --private out, or give another name")
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except UserError:
        raise
    except Exception as error:  # the hub's errors (network, name, access) have no class in common
        raise UserError(
            f"{repo} can't be uploaded ({one_line(error)}); check the name, the connection, and that your token may "
            "write there"
        ) from error
    return str(url)
