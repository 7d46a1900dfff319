"""Converts FlexAttention masks to gnomon's arguments by inspecting their values."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_mask

from gnomon._attention import attention
from gnomon._checks import check_flag, check_integer, check_tensors, wrong_type

_FLEX = "integrations.flex.flex_attention"
_MASK = "integrations.flex.mask_arguments"
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

# Converted masks are cached, because a mask is usually created once and used many times.
_known: weakref.WeakKeyDictionary[BlockMask, dict[str, Any]] = weakref.WeakKeyDictionary()


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes PyTorch's flex_attention with gnomon.attention; score_mod is not supported.

    Args:
        query: (B, H, Lq, D).
        key: (B, Hkv, Lk, D).
        value: (B, Hkv, Lk, Dv).
        score_mod: must be None; use gnomon.attention with a position instead.
        block_mask: a BlockMask, or None for no mask. The first call converts it with mask_arguments
            and caches the result.
        scale: scaling factor of the scores; 1/sqrt(D) by default.
        enable_gqa: whether key and value may have fewer heads than query.
        return_lse: whether to also return the log-sum-exp of the scores (B, H, Lq).

    Returns:
        o (B, H, Lq, Dv), or (o, lse). If all keys are masked for a query, its o is 0 and its lse is
        -inf.

    Raises:
        ValueError: a shape or value is invalid.
        TypeError: a type or device is wrong.
        NotImplementedError: score_mod is given.

    Example:
        >>> q, k, v = torch.randn(3, 2, 8, 16, 32).unbind()  # (B, H, L, D)
        >>> o = gnomon.integrations.flex.flex_attention(q, k, v)
    """
    check_tensors(_FLEX, query=query, key=key, value=value)
    if score_mod is not None:
        raise NotImplementedError(
            f"gnomon.{_FLEX}: score_mod is not supported; use gnomon.attention with a term of "
            "gnomon.position: OffsetBias adds a bias per offset, and PairBias adds an arbitrary "
            "bias per query-key pair"
        )
    if not check_flag(_FLEX, "enable_gqa", enable_gqa) and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"gnomon.{_FLEX}: query has {query.shape[1]} heads and key has {key.shape[1]}; "
            "expected the same number, or enable_gqa=True"
        )
    arguments: dict[str, Any] = {}
    if block_mask is not None:
        if not isinstance(block_mask, BlockMask):
            raise wrong_type(_FLEX, "block_mask", block_mask, "a BlockMask, or None")
        lengths = list(block_mask.seq_lengths)
        if lengths != [query.shape[2], key.shape[2]]:
            raise ValueError(
                f"gnomon.{_FLEX}: block_mask is for {lengths[0]} queries and {lengths[1]} keys; "
                f"expected {query.shape[2]} and {key.shape[2]}"
            )
        if block_mask not in _known:
            _known[block_mask] = mask_arguments(block_mask)
        arguments = dict(_known[block_mask])
    if scale is not None:
        arguments["scale"] = scale
    return attention(query, key, value, return_lse=return_lse, **arguments)  # type: ignore[call-overload,no-any-return]


def mask_arguments(
    mask: BlockMask | MaskMod,
    B: int | None = None,
    H: int | None = None,
    Q_LEN: int | None = None,
    KV_LEN: int | None = None,
    device: torch.device | str | None = None,
) -> dict[str, Any]:
    """Returns the arguments of gnomon.attention that are equivalent to a FlexAttention mask.

    The mask is evaluated once for all pairs, and the arguments are checked against it, so the two
    are exactly equivalent. Causal masks, windows, per-batch lengths and starts, documents and
    chunks, in any combination, become arguments that need no L x L array. Any other mask becomes
    the Boolean array ``mask``. The evaluation takes time quadratic in the length, so call this
    function once and reuse the result. For a causal mask with Lq != Lk, the result also contains
    query_offset, which position terms use as well.

    Args:
        mask: a BlockMask, or a mask_mod(b, h, q_idx, kv_idx).
        B: for a mask_mod, the batch size as in create_block_mask, or None if the mask does not
            depend on b.
        H: for a mask_mod, the number of heads, or None if the mask does not depend on h.
        Q_LEN: the number of queries, for a mask_mod.
        KV_LEN: the number of keys, for a mask_mod.
        device: the device of the tensors; by default the BlockMask's device, or torch's default
            device.

    Returns:
        A dictionary of the gnomon.attention arguments that express the mask (some of causal,
        window, query_offset, key_starts, key_lengths, query_segments, key_segments and mask).

    Raises:
        ValueError: Q_LEN or KV_LEN is missing.
        TypeError: mask is neither a BlockMask nor a mask_mod.

    Example:
        >>> def causal(b, h, q, k):
        ...     return q >= k
        >>> gnomon.integrations.flex.mask_arguments(causal, Q_LEN=128, KV_LEN=128)
        {'causal': True}
    """
    if isinstance(mask, BlockMask):
        batch, heads = mask.shape[:2]
        queries, keys = mask.seq_lengths
        device = mask.kv_num_blocks.device if device is None else device
        mask_mod = mask.mask_mod
    elif callable(mask):
        if Q_LEN is None or KV_LEN is None:
            raise ValueError(f"gnomon.{_MASK}: mask is a mask_mod; also pass Q_LEN and KV_LEN")
        batch, heads = B or 1, H or 1
        queries = check_integer(_MASK, "Q_LEN", Q_LEN)
        keys = check_integer(_MASK, "KV_LEN", KV_LEN)
        mask_mod = mask
    else:
        raise wrong_type(_MASK, "mask", mask, "a BlockMask or a mask_mod")
    device = torch.get_default_device() if device is None else torch.device(device)
    with torch.no_grad():
        seen: Tensor = create_mask(mask_mod, batch, heads, queries, keys, device=str(device))
        if seen.numel() == 0:
            return {}
        # Reduce an axis to size 1 if all entries along it are equal.
        for axis in (0, 1):
            first = seen.narrow(axis, 0, 1)
            if torch.equal(first.expand_as(seen), seen):
                seen = first
        if seen.shape[1] == 1:
            by_columns, found = _by_columns(seen[:, 0])
            if not found:
                by_columns, found = _by_segments(seen[:, 0])
            if found:
                return by_columns
        return {"mask": seen}


def _offsets(seen: Tensor) -> Tensor:
    rows = torch.arange(seen.shape[1], dtype=torch.int32, device=seen.device)
    columns = torch.arange(seen.shape[2], dtype=torch.int32, device=seen.device)
    return columns - rows[:, None]


def _within(seen: Tensor, candidates: Tensor) -> tuple[dict[str, Any], bool]:
    """Returns the window that restricts the candidate pairs to the mask, and whether one exists."""
    if not seen.any():
        return {}, not candidates.any()
    offsets = _offsets(seen)
    of_seen = offsets.expand_as(seen)[seen]
    first, last = int(of_seen.min()), int(of_seen.max())
    inside = candidates & (offsets >= first) & (offsets <= last)
    if not torch.equal(inside, seen):
        return {}, False
    left = -first if bool((candidates & (offsets < first)).any()) else None
    right = last if bool((candidates & (offsets > last)).any()) else None
    if left is None and right is None:
        return {}, True
    arguments: dict[str, Any] = {}
    # Choose the offset in p_i = offset + i so that both ends of the window are at least 0.
    is_square = seen.shape[1] == seen.shape[2]
    offset = 0 if right is None or (is_square and right >= 0) else right
    if left is not None:
        offset = max(offset, -left)
    if right == offset:
        arguments["causal"] = True
    if left is not None or right != offset:
        most_right = None if right is None or right == offset else right - offset
        arguments["window"] = (None if left is None else left + offset, most_right)
    if offset != 0 or not is_square:
        arguments["query_offset"] = offset
    return arguments, right is None or right >= offset


def _by_columns(seen: Tensor) -> tuple[dict[str, Any], bool]:
    """Represents the mask by an interval of keys per batch element, and a window."""
    keys = seen.shape[2]
    visible = seen.any(1)
    starts = visible.int().argmax(1)
    ends = keys - visible.flip(1).int().argmax(1)
    ends = torch.where(visible.any(1), ends, starts)
    columns = torch.arange(keys, device=seen.device)
    inside = (columns >= starts[:, None]) & (columns < ends[:, None])
    arguments, found = _within(seen, inside[:, None].expand_as(seen))
    if not found:
        return {}, False
    # The window alone may already hide the keys outside these intervals.
    alone, is_window = _within(seen, torch.ones_like(seen))
    if is_window:
        return alone, True
    if bool((starts > 0).any()):
        arguments["key_starts"] = starts if starts.shape[0] > 1 else int(starts)
    if bool((ends < keys).any()):
        arguments["key_lengths"] = ends if ends.shape[0] > 1 else int(ends)
    return arguments, True


def _by_segments(seen: Tensor) -> tuple[dict[str, Any], bool]:
    """Represents the mask by segments (its connected components) and a window."""
    keys = seen.shape[2]
    labels = torch.arange(keys, device=seen.device).expand(seen.shape[0], keys)
    for _ in range(64):
        of_rows = torch.where(seen, labels[:, None], keys).amin(2)
        spread = torch.where(seen, of_rows[:, :, None], keys).amin(1)
        spread = torch.where(seen.any(1), spread, labels)
        if torch.equal(spread, labels):
            break
        labels = spread
    # Put queries without keys, and keys that no query attends to, into separate segments.
    of_rows = torch.where(of_rows == keys, -1, of_rows)
    labels = torch.where(seen.any(1), labels, -2)
    arguments, found = _within(seen, of_rows[:, :, None] == labels[:, None])
    if not found:
        return {}, False
    is_shared = seen.shape[0] == 1
    arguments["query_segments"] = of_rows[0] if is_shared else of_rows
    arguments["key_segments"] = labels[0] if is_shared else labels
    return arguments, True
