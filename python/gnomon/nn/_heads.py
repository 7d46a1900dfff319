"""Splits tokens into heads."""

from torch import Tensor


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Reshapes (B, L, heads * D) to (B, heads, L, D)."""
    # PyTorch 2.11 cannot trace unflatten() under a default device.
    return x.reshape(*x.shape[:2], heads, x.shape[2] // heads).transpose(1, 2)
