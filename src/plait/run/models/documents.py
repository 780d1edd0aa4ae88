"""Masks and positions for rows that hold several documents: no token attends to a document other than its own.

    documents_T   0 0 0 1 1 2        mask_TT   1 . . . . .
    position_T    0 1 2 0 1 0                  1 1 . . . .
                                               1 1 1 . . .
                                               . . . 1 . .
                                               . . . 1 1 .
                                               . . . . . 1

A document is a run of equal numbers.  Each token sees itself, so no row of the mask is empty.
"""

import torch
from torch import Tensor


def positions(documents_BT: Tensor) -> Tensor:
    """position_BT int64: the position of each token in its document, from 0."""
    place_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    opens_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    opens_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    start_BT = torch.where(opens_BT, place_T, 0).cummax(1).values
    return place_T - start_BT


def attention_mask(documents_BT: Tensor) -> Tensor:
    """mask_B1TT bool: True where the row's token sees the column's: in the same document, and not later."""
    start_BT = torch.arange(documents_BT.shape[1], device=documents_BT.device) - positions(documents_BT)
    same_B1TT = start_BT[:, None, :, None] == start_BT[:, None, None, :]
    return same_B1TT.tril()
