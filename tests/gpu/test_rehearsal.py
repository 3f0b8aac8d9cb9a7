"""The tests of this folder that any device can pass do pass on the CPU.

So on the day a GPU is there, a failure says something about the GPU.
"""

import os
import subprocess
import sys

import pytest

from tests.runs import REPOSITORY


@pytest.mark.slow
def test_the_tests_of_options_pass_on_the_cpu() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "tests/gpu/test_options.py", "-k", "not compile"]
    environment = {**os.environ, "GPU_TESTS_ON": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout
