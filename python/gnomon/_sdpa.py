"""scaled_dot_product_attention computed by gnomon.attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gnomon._attention import attention
from gnomon._checks import (
    as_autocast,
    check_flag,
    check_number,
    check_optional_number,
    check_tensors,
    checks_argument_names,
    wrong_type,
)
from gnomon._varlen import nested_attention
from gnomon.position import PairBias

_NAME = "scaled_dot_product_attention"
_MOST = 1e300


@checks_argument_names()
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Drop-in replacement for torch.nn.functional.scaled_dot_product_attention.

    The arguments and results are those of PyTorch's function. To replace it everywhere, assign
    ``torch.nn.functional.scaled_dot_product_attention = gnomon.scaled_dot_product_attention``. Use
    gnomon.attention for other similarities and positions, and for masks that need no tensor.

    Args:
        query: (..., H, L, E), with at least two axes; bfloat16, float16, float32 or float64.
        key: (..., H, S, E) in query's dtype. Its leading axes broadcast with query's.
        value: (..., H, S, Ev).
        attn_mask: a tensor that broadcasts to (..., H, L, S), or a bias object from
            torch.nn.attention.bias. A Boolean mask is True where a query attends to a key. A mask
            in query's dtype or float32 is added to the scores and receives a gradient.
        dropout_p: probability of dropping a weight, from 0 to 1. As in PyTorch, the seed comes from
            the default generator, but different weights are dropped.
        is_causal: whether query i attends only to keys 0 to i, even if L != S. It cannot be
            combined with attn_mask.
        scale: factor of the scores; 1/sqrt(E) by default.
        enable_gqa: whether key and value may have fewer heads (third axis from the end) than query.

    Returns:
        (..., H, L, Ev) in query's dtype. If all keys are masked for a query, its output is 0.

    Raises:
        ValueError: an invalid shape or value.
        TypeError: an invalid dtype or device.

    Example:
        >>> q, k, v = torch.randn(3, 2, 8, 256, 64).unbind()
        >>> o = gnomon.scaled_dot_product_attention(q, k, v, is_causal=True)
    """
    check_tensors(_NAME, query=query, key=key, value=value)
    is_causal = check_flag(_NAME, "is_causal", is_causal)
    enable_gqa = check_flag(_NAME, "enable_gqa", enable_gqa)
    dropout_p = check_number(_NAME, "dropout_p", dropout_p)
    scale = check_optional_number(_NAME, "scale", scale)
    if query.is_nested:
        return _of_nested(query, key, value, attn_mask, dropout_p, is_causal, scale)
    _check_tokens(query, key, value)
    query, key, value = as_autocast(query, key, value)
    arguments: dict[str, Any] = {}
    if is_causal:
        if attn_mask is not None:
            raise ValueError(
                f"gnomon.{_NAME}: is_causal is True and attn_mask is given; pass only one of them"
            )
        arguments = {"causal": True, "query_offset": 0}
    leading = _leading_sizes(query, key, value, enable_gqa)
    if attn_mask is not None:
        arguments = _mask_arguments(attn_mask, query, [*leading, query.shape[-2], key.shape[-2]])
    if 0 in leading:
        return query @ key.mT @ value
    q, k, v = _with_four_axes(query, key, value, leading)
    columns = v.shape[3]
    if q.shape[3] == 0:
        # With E = 0, every score is 0, as with a single zero coordinate.
        q, k, scale = pad(q, (0, 1)), pad(k, (0, 1)), 1.0
    if columns == 0:
        v = pad(v, (0, 1))
    if scale is not None:
        arguments["scale"] = scale
    if not 0 <= dropout_p <= 1:
        raise ValueError(
            f"gnomon.{_NAME}: dropout_p is {dropout_p}; expected a probability from 0 to 1"
        )
    if dropout_p > 0:
        arguments["dropout"] = dropout_p
    o = attention(q, k, v, **arguments)
    if columns == 0:
        o = o[..., :0]
    return o if len(leading) == 2 else o.reshape(*leading, *o.shape[2:])


def _of_nested(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
) -> Tensor:
    if attn_mask is not None:
        raise ValueError(
            f"gnomon.{_NAME}: attn_mask is not supported with nested tensors; expected None"
        )
    if is_causal and query.shape[2] != key.shape[2]:
        raise NotImplementedError(
            f"gnomon.{_NAME}: is_causal with nested tensors requires query and key of the same "
            "length; use gnomon.attention, which aligns the last tokens"
        )
    arguments: dict[str, Any] = {"causal": is_causal, "scale": scale, "dropout": dropout_p}
    o: Tensor = nested_attention(_NAME, query, key, value, False, arguments)
    return o


def _check_tokens(query: Tensor, key: Tensor, value: Tensor) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise ValueError(
                f"gnomon.{_NAME}: {name} has shape {list(tensor.shape)}; expected at least two "
                "axes, (..., length, head_dim)"
            )
        if tensor.dtype != query.dtype or tensor.device != query.device:
            raise TypeError(
                f"gnomon.{_NAME}: {name} is {tensor.dtype} on {tensor.device} and query "
                f"is {query.dtype} on {query.device}; expected the same dtype and device"
            )
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"gnomon.{_NAME}: key has head_dim {key.shape[-1]}, but query has {query.shape[-1]}; "
            "expected the same head_dim"
        )
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"gnomon.{_NAME}: value has length {value.shape[-2]} and key has {key.shape[-2]}; "
            "expected the same length"
        )


def _leading_sizes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> list[int]:
    """Returns the sizes of the result's axes before the last two."""
    tokens = (query, key, value)
    heads: list[int] = []
    if enable_gqa:
        if min(x.dim() for x in tokens) < 3:
            raise ValueError(
                f"gnomon.{_NAME}: enable_gqa requires at least three axes, (..., heads, length, "
                "head_dim)"
            )
        heads = [query.shape[-3]]
        for name, tensor in (("key", key), ("value", value)):
            if tensor.shape[-3] == 0 or heads[0] % tensor.shape[-3] != 0:
                raise ValueError(
                    f"gnomon.{_NAME}: query has {heads[0]} heads and {name} has "
                    f"{tensor.shape[-3]}; expected query's head count to be a multiple of {name}'s"
                )
    end = -3 if enable_gqa else -2
    shapes = [list(x.shape[:end]) for x in tokens]
    count = max(len(shape) for shape in shapes)
    sizes = []
    for axis in range(-count, 0):
        given = [shape[axis] for shape in shapes if len(shape) >= -axis]
        size = next((n for n in given if n != 1), 1)
        if any(n not in (1, size) for n in given):
            hint = "" if enable_gqa else "; set enable_gqa=True if query has more heads than key"
            raise ValueError(
                f"gnomon.{_NAME}: query, key and value have shapes {list(query.shape)}, "
                f"{list(key.shape)} and {list(value.shape)}; expected leading axes that "
                f"broadcast{hint}"
            )
        sizes.append(size)
    return sizes + heads


def _with_four_axes(
    query: Tensor, key: Tensor, value: Tensor, leading: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Reshapes to (B, H, L, E), (B, Hkv, S, E) and (B, Hkv, S, Ev), as views where possible."""
    heads = leading[-1] if leading else 1
    key_heads, value_heads = (x.shape[-3] if x.dim() > 2 else 1 for x in (key, value))
    if key_heads != value_heads:
        key, value = (_repeated(x, heads) for x in (key, value))
        key_heads = heads
    batch = list(leading[:-1])
    merged = math.prod(batch)

    def merge(x: Tensor, count: int) -> Tensor:
        if x.dim() == 4 and len(batch) == 1 and x.shape[:2] == (merged, count):
            return x
        sizes = x.shape[-2:]
        return x.expand(*batch, count, *sizes).reshape(merged, count, *sizes)

    return merge(query, heads), merge(key, key_heads), merge(value, key_heads)


def _repeated(x: Tensor, heads: int) -> Tensor:
    if x.dim() < 3 or x.shape[-3] in (1, heads):
        return x.expand(*x.shape[:-3], heads, *x.shape[-2:])
    return x.repeat_interleave(heads // x.shape[-3], -3)


def _mask_arguments(mask: Tensor, query: Tensor, sizes: Sequence[int]) -> dict[str, Any]:
    """Converts a mask to arguments of attention; sizes is the shape of the scores."""
    if not isinstance(mask, Tensor):
        raise wrong_type(_NAME, "attn_mask", mask, "a Tensor, or None")
    kind = type(mask)
    # Compared by name, because importing the class takes longer than importing gnomon.
    if kind.__name__ == "CausalBias" and kind.__module__ == "torch.nn.attention.bias":
        bias: Any = mask
        if [bias.seq_len_q, bias.seq_len_kv] != sizes[-2:]:
            raise ValueError(
                f"gnomon.{_NAME}: attn_mask is a causal bias for {bias.seq_len_q} queries and "
                f"{bias.seq_len_kv} keys; expected {sizes[-2]} and {sizes[-1]}"
            )
        is_lower_right = bias.variant.name == "LOWER_RIGHT"
        return {"causal": True, "query_offset": sizes[-1] - sizes[-2] if is_lower_right else 0}
    if mask.dtype not in (torch.bool, torch.float32, query.dtype):
        raise TypeError(
            f"gnomon.{_NAME}: attn_mask has dtype {mask.dtype}; expected torch.bool, "
            f"torch.float32 or query's dtype, {query.dtype}"
        )
    given = list(mask.shape)
    aligned = list(sizes[len(sizes) - len(given) :])
    if len(given) > len(sizes) or any(
        size not in (1, expected) for size, expected in zip(given, aligned, strict=True)
    ):
        raise ValueError(
            f"gnomon.{_NAME}: attn_mask has shape {given}; expected {list(sizes)}, or a shape "
            "that broadcasts to it"
        )
    if len(given) > 4 or (len(given) == 4 and len(sizes) > 4):
        # Merge the batch axes.
        if any(size != 1 for size in given[:-3]):
            mask = mask.expand(*sizes[:-3], *given[-3:])
        mask = mask.flatten(0, -4)
    if mask.dtype == torch.bool:
        return {"mask": mask}
    if query.dtype == torch.float64:
        mask = mask.to(torch.float64)
        # The kernels work in log2 units, where the lowest finite number would overflow.
        finite = mask.detach().clamp(-_MOST, _MOST)
        mask = mask + torch.where(mask.detach().isinf(), 0.0, finite - mask.detach())
    return {"position": PairBias(mask)}
