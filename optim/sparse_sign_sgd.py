"""Sign SGD for a table of which a batch touches a few rows, the same for any number of ranks (the puzzle embedding)."""

# P = rows of the table, E = embedding size, B = slots (this rank's; after gathering, the global batch's), Q = rows here

import torch
from torch.distributed.tensor import DTensor

from utils.dist.world import World


@torch.no_grad()
def sparse_sign_sgd_(
    table_PE: torch.Tensor,
    ids_B: torch.Tensor,
    grad_BE: torch.Tensor,
    *,
    lr: float,
    weight_decay: float,
    world: World,
    num_slots: int | None = None,
) -> torch.Tensor:
    """In place, for every row p that some slot of any rank names: p = p (1 - lr wd) - lr sign(sum of its gradients).

    Every rank must call it, and each then holds the same table. No device synchronisation.

    Args:
        table_PE: on every rank, or a DTensor whose rows are sharded over the shares of the slots.
        ids_B, grad_BE: row and gradient of each of this rank's slots; a row may be named by many slots.
        num_slots: of all ranks, each of which has its slice of them; None: all have the same number.

    Returns:
        Whether all those sums are finite, a bool () that is the same on all ranks.
    """
    ids_B = world.gather_rows(ids_B, num_slots).long()
    grad_BE = world.gather_rows(grad_BE, num_slots)

    # The sort is stable, so a row's gradients are added in the order of the global slots, whoever holds which.
    ids_B, order_B = torch.sort(ids_B, stable=True)
    starts_B = torch.ones_like(ids_B, dtype=torch.bool)
    starts_B[1:] = ids_B[1:] != ids_B[:-1]
    group_B = starts_B.cumsum(0) - 1
    sums_BE = torch.zeros_like(grad_BE)
    if sums_BE.is_cuda:
        # Here index_add_ adds in any order, so that a sum of nearly nothing could have one sign on this rank and
        # another on the next, whose tables would then differ for good; this sorts and adds in order.
        sums_BE.index_put_((group_B,), grad_BE[order_B], accumulate=True)
    else:
        sums_BE.index_add_(0, group_B, grad_BE[order_B])
    are_finite = sums_BE.isfinite().all()
    signs_BE = sums_BE.sign_()[group_B]

    if isinstance(table_PE, DTensor):
        num_rows = -(-len(table_PE) // world.data_size)  # of each share but the last, as DTensor cuts them
        ids_B = ids_B - world.data_rank * num_rows
        _update_own_(table_PE.to_local(), ids_B, signs_BE, lr=lr, weight_decay=weight_decay)
    else:
        # `unique` would make the host wait for the number of rows; instead every slot writes its row, duplicates alike.
        table_PE.index_copy_(0, ids_B, table_PE[ids_B] * (1 - lr * weight_decay) - lr * signs_BE)
    return are_finite


def _update_own_(
    rows_QE: torch.Tensor, ids_B: torch.Tensor, signs_BE: torch.Tensor, *, lr: float, weight_decay: float
) -> None:
    """The update of a shard. Args: ids_B: sorted, and counted from the shard's first row; others lie outside."""
    if not len(rows_QE):  # more ranks than rows
        return
    # Slots of other ranks' rows must write something too, as their number is only known on the device: what the nearest
    # slot with a row of this rank writes or, where there is none, row 0 as it is.
    first, end = (torch.searchsorted(ids_B, bound) for bound in (0, len(rows_QE)))
    nearest_B = torch.arange(len(ids_B), device=ids_B.device).clamp(min=first, max=(end - 1).clamp(min=0))
    ids_B, signs_BE = ids_B[nearest_B], signs_BE[nearest_B]
    is_own_B = (ids_B >= 0) & (ids_B < len(rows_QE))
    ids_B = torch.where(is_own_B, ids_B, 0)
    old_BE = rows_QE[ids_B]
    new_BE = old_BE * (1 - lr * weight_decay) - lr * signs_BE
    rows_QE.index_copy_(0, ids_B, torch.where(is_own_B[:, None], new_BE, old_BE))
