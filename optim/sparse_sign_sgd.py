"""Sign SGD for the puzzle table, which updates only the rows that a batch names."""

# P = rows of the table, E = embedding size, Q = rows of this rank's part of the table,
# B = slots (of this rank; after gathering, of the global batch)

import torch

from optim.replayable import Number
from utils.ranks.world import World, is_dtensor


@torch.no_grad()
def sparse_sign_sgd_(
    table_PE: torch.Tensor,
    ids_B: torch.Tensor,
    grad_BE: torch.Tensor,
    *,
    lr: Number,
    weight_decay: float,
    world: World,
    num_slots: int | None = None,
) -> torch.Tensor:
    """Update in place every row p that a slot of any rank names. Every rank.

    p = p (1 - lr wd) - lr sign(sum of the row's gradients)

    Args:
        table_PE: the whole table on every rank, or a DTensor whose rows are sharded over the shares
            of the slots.
        ids_B, grad_BE: the row that each slot of this rank names, and its gradient.
        num_slots: the number of slots of all ranks, of which each rank has a slice; None: all
            ranks have the same number.

    Returns:
        Whether all sums of gradients are finite, a bool () that is the same on all ranks.
    """
    ids_B = world.gather_rows(ids_B, num_slots).long()
    grad_BE = world.gather_rows(grad_BE, num_slots)

    # The sort is stable. So the gradients of a row are added in the order of the global slots,
    # whichever ranks hold them.
    ids_B, order_B = torch.sort(ids_B, stable=True)
    starts_B = torch.ones_like(ids_B, dtype=torch.bool)
    starts_B[1:] = ids_B[1:] != ids_B[:-1]
    group_B = starts_B.cumsum(0) - 1
    sums_BE = torch.zeros_like(grad_BE)
    if sums_BE.is_cuda:
        # On CUDA index_add_ adds in any order. A sum close to 0 could then have different signs on
        # two ranks, whose tables would differ from then on. index_put_ sorts and adds in order.
        sums_BE.index_put_((group_B,), grad_BE[order_B], accumulate=True)
    else:
        sums_BE.index_add_(0, group_B, grad_BE[order_B])
    are_finite = sums_BE.isfinite().all()
    signs_BE = sums_BE.sign_()[group_B]

    if is_dtensor(table_PE):
        num_rows = -(-len(table_PE) // world.data_size)  # DTensor gives every share but the last this many rows
        ids_B = ids_B - world.data_rank * num_rows
        _update_own_(table_PE.to_local(), ids_B, signs_BE, lr=lr, weight_decay=weight_decay)
    else:
        # `unique` would make the host wait for the number of rows. Instead every slot writes its
        # row; slots that name the same row write the same values.
        table_PE.index_copy_(0, ids_B, table_PE[ids_B] * (1 - lr * weight_decay) - lr * signs_BE)
    return are_finite


def _update_own_(
    rows_QE: torch.Tensor, ids_B: torch.Tensor, signs_BE: torch.Tensor, *, lr: Number, weight_decay: float
) -> None:
    """Update this rank's rows in place. Rows of other ranks have ids outside of 0..Q-1."""
    if not len(rows_QE):  # more ranks than rows
        return
    # Only the device knows how many slots name rows of other ranks, so these slots must write too.
    # Each writes the same as the nearest slot that names a row of this rank. If there is no such
    # slot, each writes row 0 unchanged.
    first, end = (torch.searchsorted(ids_B, bound) for bound in (0, len(rows_QE)))
    nearest_B = torch.arange(len(ids_B), device=ids_B.device).clamp(min=first, max=(end - 1).clamp(min=0))
    ids_B, signs_BE = ids_B[nearest_B], signs_BE[nearest_B]
    is_own_B = (ids_B >= 0) & (ids_B < len(rows_QE))
    ids_B = torch.where(is_own_B, ids_B, 0)
    old_BE = rows_QE[ids_B]
    new_BE = old_BE * (1 - lr * weight_decay) - lr * signs_BE
    rows_QE.index_copy_(0, ids_B, torch.where(is_own_B[:, None], new_BE, old_BE))
