"""Find out whether PyTorch can compile on this machine, and keep compiled code for later runs."""

import hashlib
import os
import platform
import subprocess
from contextlib import suppress
from pathlib import Path

import torch

from utils.text import one_line


def why_compiling_fails(device: torch.device) -> str:
    """Return why PyTorch can't compile for a device of this machine; empty if it can."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        if device.type == "cpu":
            get_cpp_compiler()  # the next line finds in the cache what it needs
        torch.compile(torch.sin)(torch.ones(8, device=device))
    except (RuntimeError, OSError, ImportError, subprocess.SubprocessError) as error:  # Triton raises the last two
        return one_line(error).split(" Set TORCH")[0][:200]  # without advice to those who mend PyTorch
    return ""


def is_of_compiler(error: BaseException) -> bool:
    """Return whether torch.compile raised an error. Its modules need not be imported for that."""
    return any(base.__module__.startswith("torch._dynamo") for base in type(error).__mro__)


def keep_compiled_code() -> None:
    """Tell PyTorch to keep compiled code in the user's cache instead of the temporary folder.

    A reboot empties the temporary folder, and other users can write there.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ:  # what the user says counts
        return
    # Without a home, or where it can't be written, PyTorch's own folder serves as well.
    with suppress(OSError, RuntimeError):
        own = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hrm-compiled"
        folder = own / _processor()
        for made in (own, folder):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)
        # What lies there is executed, so nobody else may write there.
        is_private = all(of.st_uid == os.getuid() and not of.st_mode & 0o022 for of in (own.stat(), folder.stat()))
        if is_private and os.access(folder, os.W_OK | os.X_OK):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def _processor() -> str:
    """Name this processor. Machines of other processors may share the home directory."""
    names, file = platform.processor(), Path("/proc/cpuinfo")
    if file.exists():
        lines = file.read_text(encoding="utf-8").splitlines()
        names = "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
    return f"{platform.machine()}-{hashlib.sha256(names.encode()).hexdigest()[:8]}"
