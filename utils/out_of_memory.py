"""Say which settings to change when memory runs out, with the numbers that matter."""

import torch

from utils.perf.devices import max_memory_gb

_GB = 1e9
# In the messages of the host's allocator, of MPS and CUDA, and of cuBLAS for its workspace.
_SAID = ("can't allocate memory", "out of memory", "STATUS_ALLOC_FAILED")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that the device or the host ran out of memory."""
    said = isinstance(error, RuntimeError) and any(words in str(error) for words in _SAID)
    return said or isinstance(error, torch.OutOfMemoryError | MemoryError)


def advice(
    device: torch.device,
    *,
    num_slots: int,
    divisible_slots: int,
    global_batch_size: int,
    grad_accumulation: int,
    activation_checkpointing: str,
    parallel: str,
    num_state_bytes: int | None,
) -> str:
    """Return one line that says what to change on a rank that ran out of memory.

    Args:
        num_slots: slots of this rank, which computes them in `grad_accumulation` parts.
        divisible_slots: the number whose divisors are the values of grad_accumulation that suit
            all ranks.
        num_state_bytes: bytes of weights, gradients and optimizer state on this rank; None: they
            were not built yet.
    """
    at_once = num_slots // grad_accumulation
    turns = []
    parts = next((n for n in range(grad_accumulation + 1, divisible_slots + 1) if divisible_slots % n == 0), None)
    if parts is not None:
        turns.append(f"grad_accumulation={parts} ({num_slots // parts} slots at a time)")
    if activation_checkpointing == "none":
        turns.append("arch.activation_checkpointing=block")
    if parallel == "ddp":
        size = f"the {num_state_bytes / _GB:.2f} GB of " if num_state_bytes is not None else ""
        turns.append(f"parallel=fsdp over more ranks (splits {size}weights, gradients and optimizer state)")
    same = f"; these leave the result as it is: {', '.join(turns)}" if turns else ""
    return (
        f"out of memory with {at_once} slots at a time ({num_slots} of global_batch_size={global_batch_size} on this "
        f"rank, grad_accumulation={grad_accumulation}), {_in_use(device)}; lower global_batch_size, in evaluation "
        f"eval_batch_size{same}"
    )


def _in_use(device: torch.device) -> str:
    at_most = max_memory_gb(device)
    if device.type != "cuda":
        return f"{at_most:.2f} GB taken by this process at most"
    free, total = torch.cuda.mem_get_info(device)
    mine = torch.cuda.memory_allocated(device)
    return (
        f"{mine / _GB:.2f} GB allocated by this rank (at most {at_most:.2f} before), {free / _GB:.2f} of "
        f"{total / _GB:.2f} GB free on {device}"
    )
