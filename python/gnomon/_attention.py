"""The attention operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

from torch import Tensor

from gnomon._checks import (
    check_flag,
    check_number,
    check_optional_integer,
    check_scale,
    check_tensors,
    wrong_type,
)
from gnomon._library import ops
from gnomon.position import Position
from gnomon.similarity import Dot, Similarity

Window = tuple[int | None, int | None]


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
    dropout: float = ...,
    seed: int | None = ...,
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
    dropout: float = ...,
    seed: int | None = ...,
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
    dropout: float = 0.0,
    seed: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(similarity + position) v, memory linear in the lengths, with exact gradients.

    Query row i stands at p_i = query_offset + i, key column j at p_j = j.

    Args:
        q: (B, H, Lq, D), bfloat16, float16, float32 or float64, on the CPU; k and v as q. bfloat16
            and float16 are computed in float32 and rounded at the end.
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
        scale: of the dot product, by default 1/sqrt(D); an error with another similarity.
        dropout: of the weights; only 0 in this version.
        seed: of the dropout; not in this version.
        return_lse: also return lse (B, H, Lq), the natural logarithm of sum_j exp(s_ij), s as
            documented, constants included; differentiable.

    Tensors of similarity and position have q's dtype, or float32 where that is lower.

    Returns:
        o (B, H, Lq, Dv) in q's dtype, or (o, lse), lse in float32 or float64. A row that sees no
        key gives 0, and lse = -inf.

    Raises:
        ValueError: a shape or a value.
        TypeError: a dtype or a device.
        NotImplementedError: an argument that this version does not offer.
    """
    check_tensors("attention", q=q, k=k, v=v)
    for name, integers, shape in (
        ("key_lengths", key_lengths, "(B,)"),
        ("key_starts", key_starts, "(B,)"),
        ("query_segments", query_segments, "(B, Lq)"),
        ("key_segments", key_segments, "(B, Lk)"),
    ):
        if integers is not None and not isinstance(integers, Tensor):
            expected = f"a Tensor {shape} of integers, or None"
            raise wrong_type("attention", name, integers, expected)
    check_flag("attention", "causal", causal)
    check_scale("attention", scale)
    check_number("attention", "dropout", dropout)
    _refuse_later(
        dropout=dropout != 0,
        seed=seed is not None,
    )
    query_offsets = query_offset if isinstance(query_offset, Tensor) else None
    first_query = None if isinstance(query_offset, Tensor) else query_offset
    check_optional_integer("attention", "query_offset", first_query)
    similarity = Dot() if similarity is None else similarity
    if not isinstance(similarity, Similarity):
        raise wrong_type("attention", "similarity", similarity, "one of gnomon.similarity")
    similarity_spec, similarity_tensors = similarity._lower()
    position_specs: list[str] = []
    position_tensors: list[Tensor] = []
    for term in _as_list(position):
        if not isinstance(term, Position):
            raise wrong_type(
                "attention", "position", term, "one of gnomon.position, or a list of them"
            )
        spec, tensors = term._lower()
        position_specs.append(spec)
        position_tensors += tensors
    left, right = _window(window)
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
    )
    return (o, lse) if return_lse else o


def _refuse_later(**arguments: bool) -> None:
    for name, is_given in arguments.items():
        if is_given:
            raise NotImplementedError(
                f"gnomon.attention: {name} is not implemented in this version"
            )


def _as_list(position: Position | Sequence[Position] | None) -> Sequence[Position]:
    if position is None:
        return ()
    return position if isinstance(position, Sequence) else [position]


def _window(window: Window | None) -> Window:
    if window is None:
        return None, None
    if not isinstance(window, (list, tuple)) or len(window) != 2:
        raise ValueError(
            f"gnomon.attention: window is {window!r}; expected (left, right), None for unbounded"
        )
    left, right = window
    check_optional_integer("attention", "window's left", left)
    check_optional_integer("attention", "window's right", right)
    return left, right
