"""Importing this module before torch tells OpenMP's threads not to wait busily for one another.

GNU's OpenMP lets threads spin for 300,000 rounds by default. If other programs use the cores,
threads spin while the one that they wait for has no core. A step of the demo then took 14 times as
long (docs/lab/benchmarks.md, "Busy cores"). OpenMP reads the variable once, when torch loads it.
"""

import os

SPINS = "3000"
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():  # what the user says counts
    os.environ["GOMP_SPINCOUNT"] = SPINS
