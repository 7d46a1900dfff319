"""The attention operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias, overload

import torch
from torch import Tensor

from gnomon._checks import (
    check_flag,
    check_integer,
    check_integers,
    check_number,
    check_optional_integer,
    check_optional_integers,
    check_optional_number,
    check_string,
    check_tensors,
    is_integer_type,
    plain,
)
from gnomon._library import ops
from gnomon.position import Position, to_positions
from gnomon.similarity import Similarity, to_similarity

Window = tuple[int | None, int | None]
#: Integers, or what makes a tensor of them.
Integers: TypeAlias = Tensor | Sequence[Any] | int
Aggregation = Literal["mean", "einstein_midpoint"]
#: What takes a position: one, a specification, or several of them for their sum.
Positions: TypeAlias = Position | str | Sequence[Position | str]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    similarity: Similarity | str | None = ...,
    position: Positions | None = ...,
    causal: bool = ...,
    window: Window | int | None = ...,
    key_lengths: Integers | None = ...,
    key_starts: Integers | None = ...,
    query_segments: Integers | None = ...,
    key_segments: Integers | None = ...,
    query_offset: Integers | None = ...,
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
    similarity: Similarity | str | None = ...,
    position: Positions | None = ...,
    causal: bool = ...,
    window: Window | int | None = ...,
    key_lengths: Integers | None = ...,
    key_starts: Integers | None = ...,
    query_segments: Integers | None = ...,
    key_segments: Integers | None = ...,
    query_offset: Integers | None = ...,
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
    similarity: Similarity | str | None = None,
    position: Positions | None = None,
    causal: bool = False,
    window: Window | int | None = None,
    key_lengths: Integers | None = None,
    key_starts: Integers | None = None,
    query_segments: Integers | None = None,
    key_segments: Integers | None = None,
    query_offset: Integers | None = None,
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
        similarity: of gnomon.similarity, or a specification, "penumbral:gamma=0.5"; None is Dot().
        position: of gnomon.position, a sum of them, ``RoPE() + ALiBi(slopes)``, a specification,
            "rope+alibi", or a list of these for their sum. What a specification does not mention
            is as gnomon.nn.MultiheadAttention has it at its start.
        causal: p_j <= p_i only.
        window: (left, right), both inclusive: p_i - left <= p_j <= p_i + right; None is unbounded,
            and one number n is (n, n).
        key_lengths: (B,) integers: batch b sees the columns before key_lengths[b] only. One
            number, or a tensor without axes, is for all batches, and a list will do for a tensor,
            here and below.
        key_starts: (B,) integers: batch b sees the columns from key_starts[b] on only. Columns
            outside may hold NaN; they shift no position.
        query_segments: (B, Lq) integers within int32, or (Lq,) for all batches: a query sees the
            keys of its own segment only (packed documents). They shift no position.
        key_segments: (B, Lk) or (Lk,) integers; with query_segments.
        query_offset: of any sign, or (B,) integers, one for each batch. None is 0 where Lq = Lk;
            elsewhere, with causal, a window or a position, it is an error.
        scale: of the dot product and of content terms, by default 1/sqrt(D); an error without them.
        chunks: (size, before, after): positions lie in chunks of that size, of which a query sees
            its own and so many before and after it. With Relative, the relative local attention of
            the Music Transformer (Huang et al. 2019).
        dropout: the probability of dropping a weight, 0 to 1; the others are multiplied by
            1 / (1 - dropout), and lse is that of all.
        seed: of the dropout, which depends on it and on the batch, head, row and column of a pair
            alone; by default drawn by Torch's generator.
        aggregation: "mean", sum_j p_ij v_j; "einstein_midpoint", sum_j p_ij g_j v_j /
            sum_j p_ij g_j with g_j = 1 / sqrt(1 - |v_j|^2), of values in the Klein ball, where
            those outside are pulled to its edge (Gulcehre et al. 2019): log g_j is added to s_ij.
        return_lse: also return lse (B, H, Lq), the natural logarithm of sum_j exp(s_ij), s as
            documented, constants included; differentiable.

    Tensors of similarity and position have q's dtype, or float32 where that is lower; where they
    are (H,), one without axes is for all heads. Derivatives are of reverse mode and of first order;
    torch.func.grad, vjp, jacrev and vmap work.

    Returns:
        o (B, H, Lq, Dv) in q's dtype, or (o, lse), lse in float32 or float64. A row that sees no
        key gives 0, and lse = -inf.

    Raises:
        ValueError: a shape or a value.
        TypeError: a dtype or a device.
        NotImplementedError: an argument that this version does not offer, forward-mode
            differentiation, or a gradient of the gradient.
    """
    return_lse = check_flag("attention", "return_lse", return_lse)
    o, lse, _ = attention_and_statistics(
        q,
        k,
        v,
        similarity=similarity,
        position=position,
        causal=causal,
        window=window,
        key_lengths=key_lengths,
        key_starts=key_starts,
        query_segments=query_segments,
        key_segments=key_segments,
        query_offset=query_offset,
        scale=scale,
        chunks=chunks,
        dropout=dropout,
        seed=seed,
        aggregation=aggregation,
        return_lse=return_lse,
    )
    return (o, lse) if return_lse else o


def attention_and_statistics(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    similarity: Similarity | str | None = None,
    position: Positions | None = None,
    causal: bool = False,
    window: Window | int | None = None,
    key_lengths: Integers | None = None,
    key_starts: Integers | None = None,
    query_segments: Integers | None = None,
    key_segments: Integers | None = None,
    query_offset: Integers | None = None,
    scale: float | None = None,
    chunks: tuple[int, int, int] | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    aggregation: Aggregation = "mean",
    return_lse: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """attention, and the statistics of include/gnomon/attention.h, (3, B, H, Lq).

    They are each row's largest score, in units of log2, the sum of its weights by it, and its key;
    they have no gradient. Without return_lse, they and lse are empty.
    """
    check_tensors("attention", q=q, k=k, v=v)
    call = check_call(
        "attention",
        q,
        causal,
        key_lengths,
        key_starts,
        query_segments,
        key_segments,
        query_offset,
    )
    scale = check_optional_number("attention", "scale", scale)
    dropout = check_number("attention", "dropout", dropout)
    seed = check_optional_integer("attention", "seed", seed)
    check_string("attention", "aggregation", aggregation)
    left, right = check_window("attention", window)
    return ops.attention(
        q,
        k,
        v,
        *lower("attention", similarity, position),
        call.causal,
        left,
        right,
        call.key_starts,
        call.key_lengths,
        call.query_segments,
        call.key_segments,
        call.query_offset,
        call.query_offsets,
        scale,
        check_chunks("attention", chunks),
        dropout,
        None if seed is None else torch.tensor([seed]),
        aggregation,
        return_lse,
    )


#: Rows of q: one, several, or a slice of all.
Rows: TypeAlias = Integers | slice


def attention_weights(
    q: Tensor,
    k: Tensor,
    rows: Rows = -1,
    *,
    similarity: Similarity | str | None = None,
    position: Positions | None = None,
    causal: bool = False,
    window: Window | int | None = None,
    key_lengths: Integers | None = None,
    key_starts: Integers | None = None,
    query_segments: Integers | None = None,
    key_segments: Integers | None = None,
    query_offset: Integers | None = None,
    scale: float | None = None,
    chunks: tuple[int, int, int] | None = None,
) -> Tensor:
    """The weights p_ij that attention gives the values, of the rows of q that are asked for.

    To look at: memory is linear in their number times Lk, and the operator's own pass gives them,
    so that they are those of any similarity, position and mask. Positions on a grid and the table
    of OffsetBias compute all rows for it.

    Args:
        q: (B, H, Lq, D), as for attention, and so are k and the other arguments.
        k: (B, Hkv, Lk, D).
        rows: a row, several, or a slice, ``slice(None)`` for all; -1 is the last one. By default
            that.

    Returns:
        (B, H, n, Lk) for n rows, in q's dtype; differentiable. A row that sees no key gives 0.

    Raises:
        ValueError: a shape or a value.
        TypeError: a dtype or a device.
        NotImplementedError: as attention.
    """
    operator = "attention_weights"
    check_tensors(operator, q=q, k=k)
    call = check_call(
        operator, q, causal, key_lengths, key_starts, query_segments, key_segments, query_offset
    )
    left, right = check_window(operator, window)
    weights: Tensor = ops.attention_weights(
        q,
        k,
        check_rows(operator, rows, q),
        *lower(operator, similarity, position),
        call.causal,
        left,
        right,
        call.key_starts,
        call.key_lengths,
        call.query_segments,
        call.key_segments,
        call.query_offset,
        call.query_offsets,
        check_optional_number(operator, "scale", scale),
        check_chunks(operator, chunks),
    )
    return weights


def lower(
    operator: str, similarity: Similarity | str | None, position: Positions | None
) -> tuple[str, list[Tensor], list[str], list[Tensor]]:
    """A similarity and a sum of positions as the operators take them: specifications, tensors."""
    spec, tensors = to_similarity(operator, similarity)._lower()
    terms = [term._lower() for term in to_positions(operator, position)]
    return (
        spec,
        tensors,
        [spec for spec, _ in terms],
        [tensor for _, tensors in terms for tensor in tensors],
    )


def check_rows(operator: str, rows: Rows, q: Tensor) -> list[int]:
    """The rows as a list, those of a slice from 0 on."""
    if isinstance(rows, slice):
        return list(range(*rows.indices(q.shape[2] if q.dim() == 4 else 0)))
    numbers = check_integers(
        operator, "rows", rows, expected="an integer, a sequence of integers or a slice"
    )
    if numbers.dim() > 1 or not is_integer_type(numbers.dtype):
        raise ValueError(
            f"gnomon.{operator}: rows has shape {list(numbers.shape)} and dtype {numbers.dtype}; "
            "expected integers, one or a sequence of them"
        )
    return [int(number) for number in numbers.reshape(-1).tolist()]


class Call(NamedTuple):
    """Arguments that calls of attention have in common, as the operators take them."""

    causal: bool
    key_lengths: Tensor | None
    key_starts: Tensor | None
    query_segments: Tensor | None
    key_segments: Tensor | None
    #: One of them at most, the second where there is a tensor.
    query_offset: int | None
    query_offsets: Tensor | None


def check_call(
    operator: str,
    like: Tensor,
    causal: object,
    key_lengths: object,
    key_starts: object,
    query_segments: object,
    key_segments: object,
    query_offset: object,
) -> Call:
    """Checks types."""
    number, offsets = None, None
    if query_offset is not None:
        query_offset = plain(query_offset)
        if isinstance(query_offset, (Tensor, list, tuple)) or hasattr(query_offset, "tolist"):
            offsets = check_integers(operator, "query_offset", query_offset, like)
        else:
            number = check_integer(operator, "query_offset", query_offset, "an integer, or None")
    return Call(
        check_flag(operator, "causal", causal),
        check_optional_integers(operator, "key_lengths", key_lengths, like),
        check_optional_integers(operator, "key_starts", key_starts, like),
        check_optional_integers(operator, "query_segments", query_segments, like),
        check_optional_integers(operator, "key_segments", key_segments, like),
        number,
        offsets,
    )


def check_window(operator: str, window: Window | int | None) -> Window:
    if window is None:
        return None, None
    if isinstance(window, (list, tuple)):
        if len(window) != 2:
            raise ValueError(
                f"gnomon.{operator}: window is {window!r}; expected (left, right), None for "
                "unbounded, or one number for both"
            )
        left, right = window
        left = check_optional_integer(operator, "window's left", left)
        right = check_optional_integer(operator, "window's right", right)
        return left, right
    expected = "(left, right), one number for both, or None"
    both = check_integer(operator, "window", window, expected)
    return both, both


def check_chunks(operator: str, chunks: tuple[int, int, int] | None) -> list[int] | None:
    if chunks is None:
        return None
    if not isinstance(chunks, (list, tuple)) or len(chunks) != 3:
        raise ValueError(
            f"gnomon.{operator}: chunks is {chunks!r}; expected (size, before, after), or None"
        )
    return [check_integer(operator, "a number of chunks", number) for number in chunks]
