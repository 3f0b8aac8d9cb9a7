"""Say what machine this is: python -m benchmarks.gpu.environment --json FILE"""

import argparse
import json
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.origin import REPOSITORY, said_by

_ASKED = "name,driver_version,memory.total,power.limit,clocks.max.sm,mig.mode.current,utilization.gpu,memory.used"


def environment() -> dict[str, Any]:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _version("triton"),
        "numpy": _version("numpy"),
        "system": platform.platform(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "other_versions": _differing(),
        "cards": [],
    }
    if torch.cuda.is_available():
        found["cuda"], found["cudnn"] = torch.version.cuda, torch.backends.cudnn.version()
        properties = torch.cuda.get_device_properties(0)
        found["cards"] = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        found["memory_gb"] = properties.total_memory / 1e9
        found["multiprocessors"] = properties.multi_processor_count
        found["capability"] = f"{properties.major}.{properties.minor}"
        lines = (said_by("nvidia-smi", f"--query-gpu={_ASKED}", "--format=csv,noheader") or "").splitlines()
        found["nvidia_smi"] = (
            dict(zip(_ASKED.split(","), map(str.strip, lines[0].split(",")), strict=False)) if lines else {}
        )
    return found


def _differing() -> dict[str, str]:
    """Return the packages of requirements.txt that are missing or of another version."""
    found = {}
    for line in (REPOSITORY / "requirements.txt").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"([\w.-]+)==(\S+)", line):
            name, wanted = match.groups()
            has = _version(name)
            if has is None or has.split("+")[0] != wanted:
                found[name] = has or "missing"
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    found = environment()
    args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
