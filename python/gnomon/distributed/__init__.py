"""Attention over a sequence that is shared out over processes (context or sequence parallelism).

Each process of a group has a part of the queries, and of the keys and values. The parts of keys and
values go around in a ring (Liu et al. 2023, Ring Attention), and what a process attends to in each
is merged: exact, forward and backward, and no process ever has more of the sequence than two parts
of it.

    import torch.distributed
    from gnomon.distributed import context_parallel_attention, context_parallel_rows

    torch.distributed.init_process_group()
    rows = context_parallel_rows(tokens.size(1), layout="zigzag")
    q, k, v = project(tokens[:, rows])
    o = context_parallel_attention(q, k, v, layout="zigzag", position="rope", causal=True)
"""

from __future__ import annotations

from typing import Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from gnomon import similarity as similarity_terms
from gnomon._attention import UNSET, WeightArguments, lower_call, takes
from gnomon._checks import check_flag, check_integer, check_tensors
from gnomon._library import ops
from gnomon._position import to_components, to_positions
from gnomon._similarity import to_similarity
from gnomon.distributed._parts import (
    NAME,
    Layout,
    Parts,
    check_initialised,
    check_layout,
    place_in,
)
from gnomon.distributed._ring import RingAttention
from gnomon.distributed._sequence import WholeSequence, check_position

__all__ = ["context_parallel_attention", "context_parallel_rows"]


class ContextParallelArguments(WeightArguments, total=False):
    """Those of gnomon.attention but for a seed: what dropout drops depends on all rows."""


@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = ...,
    layout: Layout = ...,
    return_lse: Literal[False] = ...,
    **arguments: Unpack[ContextParallelArguments],
) -> Tensor: ...
@overload
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = ...,
    layout: Layout = ...,
    return_lse: Literal[True],
    **arguments: Unpack[ContextParallelArguments],
) -> tuple[Tensor, Tensor]: ...
@takes(ContextParallelArguments)
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    layout: Layout = "contiguous",
    return_lse: bool = False,
    **arguments: Unpack[ContextParallelArguments],
) -> Tensor | tuple[Tensor, Tensor]:
    """gnomon.attention of the whole sequence, for the queries that this process has.

    All processes of the group make the call, and the backward pass where one of them does, in the
    same order and with the same arguments but for q, k, v and the segments. Parts may differ in
    length, those of q from those of k, too. Positions are those of the whole sequence: its first
    key stands at 0.

    Each process holds two parts of k and v, and of their gradients in the backward pass, which
    computes the scores of each part anew; memory is linear in the parts, but for tables and the
    segments of keys, which every process has whole. k and v travel while the part before is
    computed. With causal or a window, what no query of a process sees costs it nothing, and the
    ring ends where no process sees more. With causal and contiguous parts the first processes wait
    for the last one, whose queries see all keys; in a zigzag all have equally much to do.

    Args:
        q: (B, H, Lq, D), this process's part, Lq at least 1; k and v as q.
        k: (B, Hkv, Lk, D).
        v: (B, Hkv, Lk, Dv).
        similarity: as in gnomon.attention, as are causal, window, query_offset, scale,
            aggregation and tolerance, which holds in each part of the keys.
        position: of gnomon.position, of the whole sequence: the table of OffsetBias is
            (H, sum of Lq + sum of Lk - 1), that of AbsoluteKeys has the sum of Lk rows, and KeyBias
            as many entries. PairBias and mask have the rows of this process and the columns of the
            whole sequence; a temperature is that of this process's rows.
        key_lengths: (B,) integers, of the columns of the whole sequence, as are key_starts.
        chunks: as in gnomon.attention; each part of k must begin at a multiple of their size.
        query_segments: (B, Lq) integers, of this process's part; key_segments (B, Lk).
        dropout: must be 0.
        group: of torch.distributed; None is the default group.
        layout: "contiguous": process r has the rows that follow those of process r - 1. "zigzag":
            with n processes the sequence has 2 n pieces, of which process r has piece r, in the
            first half of its rows (the larger one, if their number is odd), and then piece
            2 n - 1 - r. context_parallel_rows says which rows these are.
        return_lse: also return lse (B, H, Lq); differentiable.

    Gradients of q, k and v are whole. Those of tensors of similarity and position, which every
    process has, are the share of this process's queries, as are those of any weight that is
    applied to its part of the sequence: their sum over the group (all_reduce) is the gradient.

    Returns:
        o (B, H, Lq, Dv) in q's dtype, or (o, lse), lse in float32 or float64.

    Raises:
        ValueError: a shape or a value, also where processes disagree on a shape.
        TypeError: a dtype or a device.
        NotImplementedError: grids (RoPE with a shape, Grid, GridBias, Relative2D), whose tokens
            are placed by rows of the whole sequence; dropout, for the same reason; frequencies of
            RoPE that depend on the length of a call; Forget, which sums over keys; positions that
            are sinks, temperatures or gates; and the arguments positions and key_positions.
        RuntimeError: torch.distributed is not initialised.
    """
    check_tensors(NAME, q=q, k=k, v=v)
    check_layout(NAME, layout)
    return_lse = check_flag(NAME, "return_lse", return_lse)
    similarity, position = arguments.pop("similarity", None), arguments.pop("position", None)
    call = UNSET | lower_call(NAME, q, arguments, ContextParallelArguments)
    if call["dropout"] != 0:
        raise NotImplementedError(f"gnomon.{NAME}: dropout is {call['dropout']}; expected 0")
    for name in ("positions", "key_positions"):
        if call[name] is not None:
            raise NotImplementedError(
                f"gnomon.{NAME}: {name} is given; expected tokens that stand one after the other, "
                "at query_offset"
            )
    similarity_spec, similarity_tensors = to_similarity(NAME, similarity)._lower()
    similarity = similarity_terms.Specified(similarity_spec, tuple(similarity_tensors))
    positions = to_components(to_positions(NAME, position))
    for term in positions:
        check_position(term)
    if (call["query_segments"] is None) != (call["key_segments"] is None):
        given = "query_segments" if call["key_segments"] is None else "key_segments"
        raise ValueError(
            f"gnomon.{NAME}: {given} is given alone; expected both query_segments and "
            "key_segments, or neither"
        )
    check_initialised(NAME)
    tensors = [tensor for term in (similarity, *positions) for tensor in term._own_tensors()]
    parts = Parts.exchange(q, k, v, tensors, group, layout)
    if call["query_offset"] is None and call["query_offsets"] is None:
        placed = call["causal"] or call["left"] is not None or call["right"] is not None
        if sum(parts.queries) != sum(parts.keys) and (positions or placed):
            raise ValueError(
                f"gnomon.{NAME}: query_offset is None, the queries are {sum(parts.queries)} and "
                f"the keys {sum(parts.keys)}; expected the position of the first query"
            )
        call["query_offset"] = 0
    if call["key_segments"] is not None:
        call["key_segments"] = parts.gather_segments(call["key_segments"], k)
    if call["causal"]:
        call["right"] = 0
    sequence = WholeSequence(
        parts=parts, dtype=q.dtype, similarity=similarity, positions=positions, call=call
    )
    sequence.check_tables(q.size(1))
    sequence.check_chunks()
    # The sums of the parts are summed up first.
    is_centroid = call["aggregation"] == "lorentz_centroid"
    if is_centroid:
        call["aggregation"] = "mean"
    # It joins the sum of all parts.
    sink, call["sink"] = call["sink"], None
    # Its gradient is, like those of the terms, a sum over all parts.
    temperature, call["temperature"] = call["temperature"], None
    if temperature is not None:
        tensors.append(temperature)
    o, lse = RingAttention.apply(sequence, q, k, v, *tensors)
    if sink is not None:
        less, lse = ops.add_sink(o, lse, sink)
        # A centroid is that of any multiple of the sum, also of one that a sink leaves little of.
        o = o if is_centroid else less
    if is_centroid:
        o = ops.aggregate_centroid(o, q, similarity_spec, similarity_tensors)
    return (o, lse) if return_lse else o


def context_parallel_rows(
    length: int, *, group: dist.ProcessGroup | None = None, layout: Layout = "contiguous"
) -> Tensor:
    """The rows of a sequence of that length that this process has, in its order: (n,), int64.

    Parts are as equal as they can be.

    Raises:
        ValueError: a length below the number of processes, an unknown layout, or a process that is
            not in the group.
        RuntimeError: torch.distributed is not initialised.
    """
    operator = "distributed.context_parallel_rows"
    length = check_integer(operator, "length", length)
    check_layout(operator, layout)
    check_initialised(operator)
    rank, size = place_in(operator, group)
    if length < size:
        raise ValueError(
            f"gnomon.{operator}: length is {length}; expected at least a row for each of the "
            f"{size} processes"
        )
    if layout == "contiguous":
        return torch.arange(length).tensor_split(size)[rank]
    pieces = torch.arange(length).tensor_split(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])
