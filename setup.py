"""What pyproject.toml can't say: the package is converted from the modules of this repository."""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from setuptools import setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from release.build import NAME, BuildPackage, NoEditableWheel, requirements  # noqa: E402
from release.commands import COMMANDS  # noqa: E402
from utils.programs import VERSION  # noqa: E402

_NO_EXTRAS = ("dev", "audit")
_EXTRAS = (file.stem.removeprefix("requirements-") for file in ROOT.glob("requirements-*.txt"))
# Not in the clone, where tools would take it for sources.
_BUILD = TemporaryDirectory(prefix="hrm_trainer_")

setup(
    version=VERSION,
    packages=[NAME],
    package_dir={NAME: "release"},
    install_requires=requirements("requirements.txt"),
    extras_require={extra: requirements(f"requirements-{extra}.txt") for extra in _EXTRAS if extra not in _NO_EXTRAS},
    entry_points={
        "console_scripts": [f"{name} = {NAME}.commands:{name.replace('-', '_')}" for name in COMMANDS],
    },
    cmdclass={"build_py": BuildPackage, "editable_wheel": NoEditableWheel},
    options={"build": {"build_base": _BUILD.name}, "egg_info": {"egg_base": _BUILD.name}},
)
