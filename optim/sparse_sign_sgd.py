"""Sign SGD for a table of which a batch touches a few rows, the same for any number of ranks (the puzzle embedding)."""

# P = rows of the table, E = embedding size, B = slots (this rank's; after gathering, the global batch's)

import torch

from utils.dist import World


@torch.no_grad()
def sparse_sign_sgd_(
    table_PE: torch.Tensor,
    ids_B: torch.Tensor,
    grad_BE: torch.Tensor,
    *,
    lr: float,
    weight_decay: float,
    world: World,
) -> None:
    """In place, for every row p that some slot of any rank names: p = p (1 - lr wd) - lr sign(sum of its gradients).

    Every rank must call it, and each then holds the same table. No device synchronisation.

    Args:
        ids_B, grad_BE: row and gradient of each of this rank's slots; a row may be named by many slots.
    """
    ids_B = world.gather_rows(ids_B).long()
    grad_BE = world.gather_rows(grad_BE)

    # The sort is stable, so a row's gradients are added in the order of the global slots, whoever holds which.
    ids_B, order_B = torch.sort(ids_B, stable=True)
    starts_B = torch.ones_like(ids_B, dtype=torch.bool)
    starts_B[1:] = ids_B[1:] != ids_B[:-1]
    group_B = starts_B.cumsum(0) - 1
    sums_BE = torch.zeros_like(grad_BE).index_add_(0, group_B, grad_BE[order_B])

    # `unique` would make the host wait for the number of rows; instead every slot writes its row, duplicates alike.
    rows_BE = table_PE[ids_B] * (1 - lr * weight_decay) - lr * sums_BE[group_B].sign()
    table_PE.index_copy_(0, ids_B, rows_BE)
