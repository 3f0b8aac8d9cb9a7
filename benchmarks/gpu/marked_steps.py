"""Train on request like benchmarks.our_steps, and say where each step begins.

python -m benchmarks.gpu.marked_steps OVERRIDE...

With CUDA graphs (TORCHINDUCTOR_CUDAGRAPHS=1), each call of a compiled level may overwrite what the
calls before it have returned. The recursion needs those results. The mark says that only the next
step may overwrite them. The recurrent state is read at the start of that step, before it calls a
level. So steps without evaluations and with one microbatch need no copy of it.
"""

import sys

import torch

from benchmarks.on_request import answer_requests
from benchmarks.our_steps import OurTrainer


class MarkedTrainer(OurTrainer):
    def _step(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        super()._step()


if __name__ == "__main__":
    answer_requests(MarkedTrainer(sys.argv[1:]))
