"""Measure what a CUDA card does with this project, in one command: `python -m benchmarks.gpu`.

__main__.py        the command line
parts.py           what is measured, with which command, in the order of importance
driver.py          run the parts, each as a process with a time limit; keep on disk what they found
arguments.py       the command line of a part
report.py          one Markdown report and one JSON of it
environment.py     a part: the machine and its versions
peak.py            a part: products of matrices, at our shapes and at best
waits.py           a part: how often the host waits for the card
kernels.py         a part: the largest kernels of a step, and what bounds each
ranks.py           a part: two ranks on one card against one
attention.py       a part: attention with each backend of PyTorch
packing.py         a part: attention in a packed row of text, with each kernel for it
levers.py          a part: steps with a lever, such as CUDA graphs, against steps without it
marked_steps.py    the steps of a lever: they say where each step begins
switched_steps.py  the steps of a lever: they set what has no variable

The other parts are programs that exist anyway: the builders of datasets, pytest,
benchmarks.throughput, benchmarks.checkpoint and pretrain.py.
"""
