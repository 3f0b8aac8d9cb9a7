"""Train on request like benchmarks.our_steps, with a switch of PyTorch that has no variable.

python -m benchmarks.gpu.switched_steps SWITCH OVERRIDE...

shape-pad           pad every product of matrices whose rows are not aligned, without asking first
                    whether that is faster. The fast recipe mixes 97 positions: the rows of those
                    weights have 194 bytes.
no-cudnn-attention  take another backend of attention where PyTorch would take that of cuDNN
"""

import sys

from benchmarks.on_request import answer_requests
from benchmarks.our_steps import OurTrainer


def _pad_shapes() -> None:
    import torch._inductor.config

    torch._inductor.config.force_shape_pad = True


def _leave_out_cudnn_attention() -> None:
    import torch._functorch.config

    torch.backends.cuda.enable_cudnn_sdp(False)
    # The key of this cache leaves out which backends are allowed. It would give the graph with
    # cuDNN to the steps without it (torch 2.13, tried with flash attention on a CPU).
    torch._functorch.config.enable_autograd_cache = False


SWITCHES = {"shape-pad": _pad_shapes, "no-cudnn-attention": _leave_out_cudnn_attention}


if __name__ == "__main__":
    switch, *overrides = sys.argv[1:]
    SWITCHES[switch]()
    answer_requests(OurTrainer(overrides))
