"""Documents in a packed sequence: who may attend to whom when none shall see another's tokens.

Rotary positions are relative, so a document needs no positions of its own: what it computes is what it would alone.
Shape suffixes: see transformer.py.
"""

from __future__ import annotations

import torch
from torch import Tensor


def document_mask(tokens_BS: Tensor, end: int, queries: range, dtype: torch.dtype) -> Tensor:
    """Return a mask [B, L, S] to add to scores: each query sees the keys of its own document up to itself.

    Args:
        tokens_BS: whole sequences.
        end: the token that ends a document, and belongs to it.
        queries: the L consecutive positions that ask.
        dtype: of the queries.
    """
    ends_BS = tokens_BS == end
    document_BS = ends_BS.cumsum(dim=1) - ends_BS.long()  # how many have ended before
    keys_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    asks = slice(queries.start, queries.stop)
    return added((document_BS[:, asks, None] == document_BS[:, None, :]) & (keys_S <= keys_S[asks, None]), dtype)


def added(visible_BLS: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what to add to scores so that only what is visible counts.

    A mask of truth values would be turned into this in every layer, and kept by each.
    """
    return torch.zeros(visible_BLS.shape, dtype=dtype, device=visible_BLS.device).masked_fill_(~visible_BLS, -torch.inf)
