"""Measure what a CUDA card does with this project: `python -m benchmarks.gpu`."""
