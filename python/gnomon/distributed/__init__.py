"""Attention over a sequence that is sharded across processes (context parallelism).

Each process of a group has one shard of the queries, keys and values. Keys and values are passed
around a ring (Liu et al. 2023, Ring Attention), and the partial results are merged. Outputs and
gradients are exact, and no process ever stores more than two shards of the keys and values.

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
from torch.autograd import forward_ad
from typing_extensions import Unpack

from gnomon import similarity as similarity_terms
from gnomon._attention import UNSET, WeightArguments, lower_call, takes
from gnomon._checks import check_flag, check_integer, check_tensors
from gnomon._library import ops
from gnomon._position import to_components, to_positions
from gnomon._similarity import to_similarity
from gnomon.distributed._composed import composed_ring
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
    """The arguments of gnomon.attention except seed.

    Dropout is not supported, because its mask would depend on the rows of all processes.
    """


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
    """Computes gnomon.attention over the whole sequence, for the queries of this process.

    All processes of the group must make the same calls in the same order; if one computes a
    backward pass, all must. Apart from q, k, v, the segments and tensors with one row per query,
    the arguments must be the same in all processes. Shards may differ in length between processes,
    and between q and k. Positions refer to the whole sequence, whose first key has position 0.

    Each process stores two shards of k and v and, in the backward pass, two shards of their
    gradients; scores are recomputed. Memory is linear in the length of a shard, except for tables
    and key segments, which every process stores for the whole sequence. Communication overlaps with
    computation. With causal or a window, a process skips shards to which none of its queries
    attends, and communication ends once no process needs further shards. With causal and the
    contiguous layout, the first processes wait for the last one, whose queries attend to all keys;
    the zigzag layout balances the work.

    Args:
        q: (B, H, Lq, D), the shard of this process, with Lq at least 1.
        k: (B, Hkv, Lk, D), the shard of this process.
        v: (B, Hkv, Lk, Dv), the shard of this process.
        similarity: as in gnomon.attention, like causal, window, query_offset, scale, aggregation
            and tolerance. tolerance applies separately to each shard of the keys.
        position: a position for the whole sequence. With Nq queries and Nk keys in all processes,
            the table of OffsetBias is (H, Nq + Nk - 1), the table of AbsoluteKeys has Nk rows, and
            the bias of KeyBias has Nk elements per head. PairBias and mask have rows for the
            queries of this process and columns for all Nk keys. A temperature has entries for the
            queries of this process.
        key_lengths: (B,) integers; like key_starts, they refer to the keys of the whole sequence.
        chunks: as in gnomon.attention; each shard of k must begin at a multiple of the chunk size.
        query_segments: (B, Lq) integers for this process's queries.
        key_segments: (B, Lk) integers for this process's keys.
        dropout: must be 0.
        group: a torch.distributed group; the default group if None.
        layout: "contiguous": the rows of process r follow those of process r - 1. "zigzag": with n
            processes, the sequence is split into 2 n pieces. Process r has pieces r and 2 n - 1 -
            r, in this order; if the number of its rows is odd, the first piece has one additional
            row. context_parallel_rows returns the rows of this process.
        return_lse: whether to also return lse (B, H, Lq), which is differentiable.

    Forward mode, second derivatives and torch.func work on CPUs, as for gnomon.attention; all
    processes must compute them in the same order. For them, each process keeps every shard of k and
    v that it has received.

    The gradients of q, k and v are complete. For tensors that all processes share (those of
    similarity and position, and projection weights), each process computes only the contribution of
    its own queries. Sum these gradients over the group (all_reduce).

    Returns:
        o (B, H, Lq, Dv) in q's dtype, or (o, lse), with lse in float32 or float64.

    Raises:
        ValueError: a shape or value is invalid, or processes disagree on a shape.
        TypeError: a dtype or device is wrong.
        NotImplementedError: an unsupported feature: grids (RoPE with a shape, Grid, GridBias,
            Relative2D), dropout, RoPE scaling that depends on the length of a call, Forget, sinks,
            temperatures or gates passed as positions, and the arguments positions and
            key_positions.
        RuntimeError: torch.distributed is not initialised.

    Example:
        >>> rows = gnomon.distributed.context_parallel_rows(length)  # doctest: +SKIP
        >>> o = gnomon.distributed.context_parallel_attention(  # doctest: +SKIP
        ...     q[:, :, rows], k[:, :, rows], v[:, :, rows], causal=True
        ... )
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
                f"gnomon.{NAME}: {name} is given, but tokens must be consecutive; pass "
                "query_offset instead"
            )
    similarity_spec, similarity_tensors = to_similarity(NAME, similarity)._lower()
    similarity = similarity_terms.Specified(similarity_spec, tuple(similarity_tensors))
    positions = to_components(to_positions(NAME, position))
    for term in positions:
        check_position(term)
    if (call["query_segments"] is None) != (call["key_segments"] is None):
        given = "query_segments" if call["key_segments"] is None else "key_segments"
        raise ValueError(
            f"gnomon.{NAME}: only {given} is given; expected both query_segments and key_segments, "
            "or neither"
        )
    check_initialised(NAME)
    tensors = [tensor for term in (similarity, *positions) for tensor in term._own_tensors()]
    parts = Parts.exchange(q, k, v, tensors, group, layout)
    if call["query_offset"] is None and call["query_offsets"] is None:
        placed = call["causal"] or call["left"] is not None or call["right"] is not None
        if sum(parts.queries) != sum(parts.keys) and (positions or placed):
            raise ValueError(
                f"gnomon.{NAME}: query_offset is None, but there are {sum(parts.queries)} queries "
                f"and {sum(parts.keys)} keys; pass the position of the first query"
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
    # First merge the means of all shards; the centroid is computed from the merged mean.
    is_centroid = call["aggregation"] == "lorentz_centroid"
    if is_centroid:
        call["aggregation"] = "mean"
    # The sink is added once, after the shards are merged.
    sink, call["sink"] = call["sink"], None
    # Pass the temperature with the tensors of the terms, because its gradient is also a sum over
    # all shards.
    temperature, call["temperature"] = call["temperature"], None
    if temperature is not None:
        tensors.append(temperature)
    attend = composed_ring if _in_transform() else RingAttention.apply
    o, lse = attend(sequence, q, k, v, *tensors)
    if sink is not None:
        less, lse = ops.add_sink(o, lse, sink)
        # Scaling the mean does not change the centroid, so use the mean before the sink shrinks it.
        o = o if is_centroid else less
    if is_centroid:
        o = ops.aggregate_centroid(o, q, similarity_spec, similarity_tensors)
    return (o, lse) if return_lse else o


def _in_transform() -> bool:
    """Whether a transform of torch.func or forward-mode differentiation is active."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    )


def context_parallel_rows(
    length: int, *, group: dist.ProcessGroup | None = None, layout: Layout = "contiguous"
) -> Tensor:
    """Returns the indices (n,) of this process's rows in a sequence of this length, in order.

    The lengths of the shards differ by at most one.

    Raises:
        ValueError: the length is less than the number of processes, the layout is unknown, or the
            process is not in the group.
        RuntimeError: torch.distributed is not initialised.

    Example:
        >>> rows = gnomon.distributed.context_parallel_rows(1024)  # doctest: +SKIP
        >>> q = q[:, :, rows]  # doctest: +SKIP
    """
    operator = "distributed.context_parallel_rows"
    length = check_integer(operator, "length", length)
    check_layout(operator, layout)
    check_initialised(operator)
    rank, size = place_in(operator, group)
    if length < size:
        raise ValueError(
            f"gnomon.{operator}: length is {length}; expected at least one row for each of the "
            f"{size} processes"
        )
    if layout == "contiguous":
        return torch.arange(length).tensor_split(size)[rank]
    pieces = torch.arange(length).tensor_split(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])
