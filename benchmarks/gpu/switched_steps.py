"""Train on request like benchmarks.our_steps, with a switch of PyTorch that has no variable.

python -m benchmarks.gpu.switched_steps SWITCH OVERRIDE...

mark-steps          say where each step begins. With CUDA graphs (TORCHINDUCTOR_CUDAGRAPHS=1), each
                    call of a compiled level may overwrite what the calls before it have returned,
                    which the recursion needs. The mark says that only the next step may. Steps
                    without evaluations and with one microbatch need no copy of the carry.
shape-pad           pad every product of matrices whose rows are not aligned, without asking first
                    whether that is faster. The fast recipe mixes 97 positions: the rows of those
                    weights have 194 bytes.
no-cudnn-attention  take another backend of attention where PyTorch would take that of cuDNN
"""

import sys

import torch
import torch._functorch.config
import torch._inductor.config

from benchmarks.on_request import WARMUP, answer_requests
from benchmarks.our_steps import OurTrainer


def _pad_shapes() -> None:
    torch._inductor.config.force_shape_pad = True


def _leave_out_cudnn_attention() -> None:
    torch.backends.cuda.enable_cudnn_sdp(False)
    # The key of this cache leaves out which backends are allowed. It would give the graph with
    # cuDNN to the steps without it (torch 2.13, tried with flash attention on a CPU).
    torch._functorch.config.enable_autograd_cache = False


class MarkedTrainer(OurTrainer):
    def _step(self) -> None:
        torch.compiler.cudagraph_mark_step_begin()
        super()._step()


SWITCHES = {"mark-steps": lambda: None, "shape-pad": _pad_shapes, "no-cudnn-attention": _leave_out_cudnn_attention}


if __name__ == "__main__":
    switch, *overrides = sys.argv[1:]
    SWITCHES[switch]()
    trainer = (MarkedTrainer if switch == "mark-steps" else OurTrainer)(overrides)
    answer_requests(trainer, lambda: trainer.train(WARMUP))
