"""The attention operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from gnomon._checks import (
    check_flag,
    check_integer,
    check_number,
    check_optional_integer,
    check_optional_number,
    check_string,
    check_tensors,
    wrong_type,
)
from gnomon._library import ops
from gnomon.position import Position
from gnomon.similarity import Dot, Similarity

Window = tuple[int | None, int | None]
Aggregation = Literal["mean", "einstein_midpoint"]
_DOT = Dot()


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    similarity: Similarity | None = ...,
    position: Position | Sequence[Position] | None = ...,
    causal: bool = ...,
    window: Window | None = ...,
    key_lengths: Tensor | None = ...,
    key_starts: Tensor | None = ...,
    query_segments: Tensor | None = ...,
    key_segments: Tensor | None = ...,
    query_offset: int | Tensor | None = ...,
    scale: float | None = ...,
    chunks: tuple[int, int, int] | None = ...,
    dropout: float = ...,
    seed: int | None = ...,
    aggregation: Aggregation = ...,
    return_lse: Literal[False] = ...,
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    similarity: Similarity | None = ...,
    position: Position | Sequence[Position] | None = ...,
    causal: bool = ...,
    window: Window | None = ...,
    key_lengths: Tensor | None = ...,
    key_starts: Tensor | None = ...,
    query_segments: Tensor | None = ...,
    key_segments: Tensor | None = ...,
    query_offset: int | Tensor | None = ...,
    scale: float | None = ...,
    chunks: tuple[int, int, int] | None = ...,
    dropout: float = ...,
    seed: int | None = ...,
    aggregation: Aggregation = ...,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    similarity: Similarity | None = None,
    position: Position | Sequence[Position] | None = None,
    causal: bool = False,
    window: Window | None = None,
    key_lengths: Tensor | None = None,
    key_starts: Tensor | None = None,
    query_segments: Tensor | None = None,
    key_segments: Tensor | None = None,
    query_offset: int | Tensor | None = None,
    scale: float | None = None,
    chunks: tuple[int, int, int] | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    aggregation: Aggregation = "mean",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(similarity + position) v, memory linear in the lengths, with exact gradients.

    Query row i stands at p_i = query_offset + i, key column j at p_j = j.

    Args:
        q: (B, H, Lq, D), bfloat16, float16, float32 or float64, on the CPU; k and v as q. bfloat16
            and float16 are computed in float32 and rounded at the end; where the processor
            multiplies bfloat16 itself, the forward pass lets it, with the weights rounded to it.
        k: (B, Hkv, Lk, D), H a multiple of Hkv.
        v: (B, Hkv, Lk, Dv).
        similarity: of gnomon.similarity; None is Dot().
        position: of gnomon.position, or several of them for their sum.
        causal: p_j <= p_i only.
        window: (left, right), both inclusive: p_i - left <= p_j <= p_i + right; None is unbounded.
        key_lengths: (B,) integers: batch b sees the columns before key_lengths[b] only.
        key_starts: (B,) integers: batch b sees the columns from key_starts[b] on only. Columns
            outside may hold NaN; they shift no position.
        query_segments: (B, Lq) integers within int32: a query sees the keys of its own segment only
            (packed documents). They shift no position.
        key_segments: (B, Lk) integers; with query_segments.
        query_offset: of any sign, or (B,) integers, one for each batch. None is 0 where Lq = Lk;
            elsewhere, with causal, a window or a position, it is an error.
        scale: of the dot product and of content terms, by default 1/sqrt(D); an error without them.
        chunks: (size, before, after): positions lie in chunks of that size, of which a query sees
            its own and so many before and after it. With Relative, the relative local attention of
            the Music Transformer (Huang et al. 2019).
        dropout: the chance with which a weight is dropped, 0 to 1; the others are multiplied by
            1 / (1 - dropout), and lse is that of all.
        seed: of the dropout, which depends on it and on the batch, head, row and column of a pair
            alone; by default drawn by Torch's generator.
        aggregation: "mean", sum_j p_ij v_j; "einstein_midpoint", sum_j p_ij g_j v_j /
            sum_j p_ij g_j with g_j = 1 / sqrt(1 - |v_j|^2), of values in the Klein ball, where
            those outside are pulled to its edge (Gulcehre et al. 2019): log g_j is added to s_ij.
        return_lse: also return lse (B, H, Lq), the natural logarithm of sum_j exp(s_ij), s as
            documented, constants included; differentiable.

    Tensors of similarity and position have q's dtype, or float32 where that is lower. Derivatives
    are of reverse mode and of first order; torch.func.grad, vjp, jacrev and vmap work.

    Returns:
        o (B, H, Lq, Dv) in q's dtype, or (o, lse), lse in float32 or float64. A row that sees no
        key gives 0, and lse = -inf.

    Raises:
        ValueError: a shape or a value.
        TypeError: a dtype or a device.
        NotImplementedError: an argument that this version does not offer, or forward-mode
            differentiation.
    """
    check_tensors("attention", q=q, k=k, v=v)
    first_query, query_offsets = check_call(
        "attention",
        causal,
        query_offset,
        {
            "key_lengths": key_lengths,
            "key_starts": key_starts,
            "query_segments": query_segments,
            "key_segments": key_segments,
        },
    )
    check_optional_number("attention", "scale", scale)
    check_number("attention", "dropout", dropout)
    seed = check_optional_integer("attention", "seed", seed)
    check_string("attention", "aggregation", aggregation)
    check_flag("attention", "return_lse", return_lse)
    similarity = _DOT if similarity is None else similarity
    if not isinstance(similarity, Similarity):
        raise wrong_type("attention", "similarity", similarity, "one of gnomon.similarity")
    similarity_spec, similarity_tensors = similarity._lower()
    position_specs: list[str] = []
    position_tensors: list[Tensor] = []
    for term in as_list(position):
        if not isinstance(term, Position):
            raise wrong_type(
                "attention", "position", term, "one of gnomon.position, or a list of them"
            )
        spec, tensors = term._lower()
        position_specs.append(spec)
        position_tensors += tensors
    left, right = check_window("attention", window)
    o, lse = ops.attention(
        q,
        k,
        v,
        similarity_spec,
        similarity_tensors,
        position_specs,
        position_tensors,
        causal,
        left,
        right,
        key_starts,
        key_lengths,
        query_segments,
        key_segments,
        first_query,
        query_offsets,
        scale,
        check_chunks("attention", chunks),
        dropout,
        None if seed is None else torch.tensor([seed]),
        aggregation,
        return_lse,
    )
    return (o, lse) if return_lse else o


def as_list(position: Position | Sequence[Position] | None) -> Sequence[Position]:
    if position is None:
        return ()
    return position if isinstance(position, Sequence) else [position]


def check_call(
    operator: str,
    causal: object,
    query_offset: object,
    integers: dict[str, object],
) -> tuple[int | None, Tensor | None]:
    """Checks types; returns query_offset as one number or as one for each batch."""
    for name, tensor in integers.items():
        if tensor is not None and not isinstance(tensor, Tensor):
            raise wrong_type(operator, name, tensor, "a Tensor of integers, or None")
    check_flag(operator, "causal", causal)
    if isinstance(query_offset, Tensor):
        return None, query_offset
    return check_optional_integer(operator, "query_offset", query_offset), None


def check_window(operator: str, window: Window | None) -> Window:
    if window is None:
        return None, None
    if not isinstance(window, (list, tuple)) or len(window) != 2:
        raise ValueError(
            f"gnomon.{operator}: window is {window!r}; expected (left, right), None for unbounded"
        )
    left, right = window
    left = check_optional_integer(operator, "window's left", left)
    right = check_optional_integer(operator, "window's right", right)
    return left, right


def check_chunks(operator: str, chunks: tuple[int, int, int] | None) -> list[int] | None:
    if chunks is None:
        return None
    if not isinstance(chunks, (list, tuple)) or len(chunks) != 3:
        raise ValueError(
            f"gnomon.{operator}: chunks is {chunks!r}; expected (size, before, after), or None"
        )
    return [check_integer(operator, "a number of chunks", number) for number in chunks]
