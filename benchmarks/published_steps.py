"""Train a model of the published HRM or TRM code on request, for benchmarks.throughput --against.

python -m benchmarks.published_steps REPOSITORY [--arch hrm] [--dtype bfloat16] [--eager]
                                     [KEY=VALUE...]
e.g. python -m benchmarks.published_steps ../HRM hidden_size=256 num_heads=4 batch_size=32

The model, its loss and the optimizer of its puzzle rows are those of a clone of the published code,
and a step does what its train_batch does. Three things differ, because the code runs only on CUDA.
Attention without flash_attn is PyTorch's. The weights' optimizer is this project's AdamATan2. The
tensors are made on the device at hand.
"""

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.harness import REPOSITORY
from benchmarks.on_request import WARMUP, Program, answer_requests, timed

# B = slots, S = tokens, T = positions, N = heads, H = head size

PUBLISHED_ARCHS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "hrm": (
        "models.hrm.hrm_act_v1",
        "HierarchicalReasoningModel_ACTV1",
        {"H_cycles": 2, "L_cycles": 2, "H_layers": 4, "L_layers": 4, "pos_encodings": "rope"},
    ),
    "trm": (
        "models.recursive_reasoning.trm",
        "TinyRecursiveReasoningModel_ACTV1",
        {"H_cycles": 3, "L_cycles": 6, "H_layers": 0, "L_layers": 2, "pos_encodings": "rope"},
    ),
    "trm_mlp": (
        "models.recursive_reasoning.trm",
        "TinyRecursiveReasoningModel_ACTV1",
        {"H_cycles": 3, "L_cycles": 6, "H_layers": 0, "L_layers": 2, "pos_encodings": "none", "mlp_t": True},
    ),
}
_SIZES = {"batch_size": 768, "seq_len": 81, "vocab_size": 11, "num_puzzle_identifiers": 1}
_OPTIONS = {"hidden_size": 512, "num_heads": 8, "expansion": 4, "halt_max_steps": 16, "halt_exploration_prob": 0.1}


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return attention of tensors (B,T,N,H), as flash_attn_func does."""
    assert not causal
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


def use_clone(repository: Path) -> None:
    """Let a clone of the published code take the place of this project's packages in imports."""
    for name in [name for name in sys.modules if name.split(".")[0] in ("models", "dataset", "utils")]:
        del sys.modules[name]
    # Its packages have no __init__.py, so that ours of the same name would come first.
    sys.path[:] = [str(repository), *(path for path in sys.path if Path(path or ".").resolve() != REPOSITORY)]
    attention = ModuleType("flash_attn")
    attention.flash_attn_func = flash_attention  # type: ignore[attr-defined]
    sys.modules.setdefault("flash_attn", attention)


class PublishedTrainer(Program):
    """Trains a published model on random puzzles."""

    def __init__(self, repository: Path, arch: str, dtype: str, options: dict[str, int], *, eager: bool) -> None:
        from optim.adam import AdamATan2  # before its package `models` takes the place of ours

        use_clone(repository)
        module, class_name, own = PUBLISHED_ARCHS[arch]
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config: dict[str, Any] = _SIZES | _OPTIONS | own | options | {"forward_dtype": dtype, "causal": False}
        config.setdefault("puzzle_emb_ndim", config["hidden_size"])
        self._config, self._what = config, f"published {arch}, {dtype}, {'eager' if eager else 'compiled'}"
        with torch.device(self._device):
            model = getattr(importlib.import_module(module), class_name)(config)
            self._model = importlib.import_module("models.losses").ACTLossHead(model, "stablemax_cross_entropy")
        sparse = importlib.import_module("models.sparse_embedding").CastedSparseEmbeddingSignSGD_Distributed
        self._optimizers = [
            sparse(self._model.model.puzzle_emb.buffers(), lr=1e-2, weight_decay=0.1, world_size=1),
            AdamATan2(self._model.parameters(), lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95)),
        ]
        self._called: Any = self._model if eager else torch.compile(self._model, dynamic=False)
        self._carry: Any = None
        self._draws = torch.Generator().manual_seed(0)

    def describe(self) -> dict[str, Any]:
        return {"what": self._what, "torch": torch.__version__, "batch_size": self._config["batch_size"]}

    def steps(self, num_steps: int) -> dict[str, float]:
        return timed(self._step, num_steps, self._device)

    def _step(self) -> None:
        shape = (self._config["batch_size"], self._config["seq_len"])
        tokens = [torch.randint(1, self._config["vocab_size"], shape, generator=self._draws) for _ in range(2)]
        batch = {"inputs": tokens[0], "labels": tokens[1], "puzzle_identifiers": torch.zeros(shape[0])}
        batch = {name: tensor.to(self._device, torch.int32) for name, tensor in batch.items()}
        if self._carry is None:
            with torch.device(self._device):
                self._carry = self._called.initial_carry(batch)
        self._carry, loss, metrics, _, _ = self._called(carry=self._carry, batch=batch, return_keys=[])
        (loss / shape[0]).backward()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        torch.stack(list(metrics.values())).cpu()  # the published loop waits for the metrics of each step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository", type=Path, help="a clone of the published code")
    parser.add_argument("options", nargs="*", metavar="KEY=VALUE", help="integers of the model's config")
    parser.add_argument("--arch", choices=list(PUBLISHED_ARCHS), default="hrm")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--eager", action="store_true")
    args = parser.parse_intermixed_args()
    options = {key: int(value) for key, _, value in (option.partition("=") for option in args.options)}
    trainer = PublishedTrainer(args.repository.resolve(), args.arch, args.dtype, options, eager=args.eager)
    answer_requests(trainer, lambda: trainer.steps(WARMUP))


if __name__ == "__main__":
    main()
