"""Converts torch.nn masks, which are either Boolean (True hides a key) or added to the scores."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gnomon._checks import check_layout, wrong_type
from gnomon.nn._held_terms import Terms


def pair_mask(
    operator: str, name: str, pairs: Tensor | None, sizes: tuple[int, int, int, int]
) -> tuple[Tensor | None, Tensor | None]:
    """Converts a mask (Lq, Lk) or (B * H, Lq, Lk) to attention's arguments mask and pair_bias.

    `sizes` is (B, H, Lq, Lk).
    """
    if pairs is None:
        return None, None
    is_bool = _is_bool(operator, name, pairs)
    batch, heads, queries, columns = sizes
    shape = tuple(pairs.shape)
    if shape == (queries, columns):
        pairs = pairs[None, None]
    elif shape == (batch * heads, queries, columns):
        pairs = pairs.reshape(sizes)
    else:
        raise ValueError(
            f"gnomon.{operator}: {name} has shape {list(shape)}; expected (Lq, Lk) = "
            f"({queries}, {columns}) or (B H, Lq, Lk) = ({batch * heads}, {queries}, {columns})"
        )
    return (~pairs, None) if is_bool else (None, pairs)


class Masks(NamedTuple):
    """A module's mask arguments, converted to the form that the operators accept."""

    #: (B, Lk), True where a key is hidden.
    hidden: Tensor | None
    #: Terms added to the scores.
    biases: Terms | None


def to_masks(
    operator: str,
    sizes: tuple[int, int, int, int],
    like: Tensor,
    key_padding_mask: Tensor | None,
    pair_bias: Tensor | None = None,
) -> Masks:
    """Converts key_padding_mask (B, Lk) and pair_bias (1 or B, 1 or H, Lq, Lk) to Masks.

    `sizes` is (B, H, Lq, Lk). The biases are float64 if `like` is, and float32 otherwise.
    """
    if key_padding_mask is None and pair_bias is None:
        return Masks(None, None)
    batch, heads, _, columns = sizes
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    specs: list[str] = []
    tensors: list[Tensor] = []
    hidden = None
    if pair_bias is not None:
        if not isinstance(pair_bias, Tensor):
            raise wrong_type(operator, "pair_bias", pair_bias, "a Tensor, or None")
        check_layout(operator, "pair_bias", pair_bias)
        specs.append("pair_bias:bias=tensor")
        tensors.append(pair_bias.to(wide))
    if key_padding_mask is not None:
        is_bool = _is_bool(operator, "key_padding_mask", key_padding_mask)
        if tuple(key_padding_mask.shape) != (batch, columns):
            raise ValueError(
                f"gnomon.{operator}: key_padding_mask has shape {list(key_padding_mask.shape)}; "
                f"expected (B, Lk) = ({batch}, {columns})"
            )
        if is_bool:
            hidden = key_padding_mask
        else:
            specs.append("key_bias:bias=tensor")
            bias = key_padding_mask.to(wide)[:, None]
            tensors.append(bias.expand(batch, heads, columns))
    return Masks(hidden, Terms("+".join(specs), tensors) if specs else None)


def _is_bool(operator: str, name: str, mask: Any) -> bool:
    """Returns whether a mask is Boolean rather than additive."""
    if not isinstance(mask, Tensor):
        raise wrong_type(operator, name, mask, "a Tensor, or None")
    check_layout(operator, name, mask)
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(
            f"gnomon.{operator}: {name} has dtype {mask.dtype}; expected torch.bool, or a "
            "floating-point dtype for values that are added to the scores"
        )
    return mask.dtype == torch.bool


def is_causal_mask(pairs: Tensor) -> bool:
    """Returns whether a mask (Lq, Lk) or (B * H, Lq, Lk) hides exactly each query's future keys."""
    if pairs.dim() not in (2, 3):
        return False
    hidden = pairs if pairs.dtype == torch.bool else pairs == -torch.inf
    if pairs.dtype != torch.bool and not bool((hidden | (pairs == 0)).all()):
        return False
    future = torch.ones(hidden.shape[-2:], dtype=torch.bool, device=hidden.device).triu(1)
    return bool((hidden == future).all()) and bool(hidden.any())
