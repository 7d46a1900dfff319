"""Tokens by heads."""

from torch import Tensor


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(B, L, heads D) as (B, heads, L, D)."""
    # PyTorch 2.11 does not trace unflatten() where a default device is set.
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)
