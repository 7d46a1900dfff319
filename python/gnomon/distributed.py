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

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, cast, get_args, overload

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from gnomon import position as position_terms
from gnomon import similarity as similarity_terms
from gnomon._attention import UNSET, Aggregation, ScoreArguments, lower, lower_call, takes
from gnomon._catalogue import components_of
from gnomon._checks import check_flag, check_integer, check_string, check_tensors
from gnomon._derivatives import first_derivatives_only
from gnomon._library import ops
from gnomon._position import to_components, to_positions
from gnomon._similarity import to_similarity
from gnomon._terms import Term

__all__ = ["context_parallel_attention", "context_parallel_rows"]

_NAME = "distributed.context_parallel_attention"
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

_T = TypeVar("_T", bound=Term)

#: Which rows of a sequence a process has.
Layout: TypeAlias = Literal["contiguous", "zigzag"]


class ContextParallelArguments(ScoreArguments, total=False):
    """Those of gnomon.attention but for a seed: what dropout drops depends on all rows."""

    dropout: float
    aggregation: Aggregation
    tolerance: float


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
            RoPE that depend on the length of a call; Forget, which sums over keys; and the
            arguments positions and key_positions.
        RuntimeError: torch.distributed is not initialised.
    """
    check_tensors(_NAME, q=q, k=k, v=v)
    _check_layout(_NAME, layout)
    return_lse = check_flag(_NAME, "return_lse", return_lse)
    similarity, position = arguments.pop("similarity", None), arguments.pop("position", None)
    call = UNSET | lower_call(_NAME, q, arguments, ContextParallelArguments)
    if call["dropout"] != 0:
        raise NotImplementedError(f"gnomon.{_NAME}: dropout is {call['dropout']}; expected 0")
    for name in ("positions", "key_positions"):
        if call[name] is not None:
            raise NotImplementedError(
                f"gnomon.{_NAME}: {name} is given; expected tokens that stand one after the other, "
                "at query_offset"
            )
    similarity_spec, similarity_tensors = to_similarity(_NAME, similarity)._lower()
    similarity = similarity_terms.Specified(similarity_spec, tuple(similarity_tensors))
    positions = to_components(to_positions(_NAME, position))
    for term in positions:
        _check_position(term)
    if (call["query_segments"] is None) != (call["key_segments"] is None):
        given = "query_segments" if call["key_segments"] is None else "key_segments"
        raise ValueError(
            f"gnomon.{_NAME}: {given} is given alone; expected both query_segments and "
            "key_segments, or neither"
        )
    _check_initialised(_NAME)
    parts = _Parts.exchange(q, k, v, [similarity, *positions], group, layout)
    if call["query_offset"] is None and call["query_offsets"] is None:
        placed = call["causal"] or call["left"] is not None or call["right"] is not None
        if sum(parts.queries) != sum(parts.keys) and (positions or placed):
            raise ValueError(
                f"gnomon.{_NAME}: query_offset is None, the queries are {sum(parts.queries)} and "
                f"the keys {sum(parts.keys)}; expected the position of the first query"
            )
        call["query_offset"] = 0
    if call["key_segments"] is not None:
        call["key_segments"] = parts.gather_segments(call["key_segments"], k)
    if call["causal"]:
        call["right"] = 0
    sequence = _Sequence(
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
    tensors = _all_tensors([similarity, *positions])
    if temperature is not None:
        tensors.append(temperature)
    o, lse = _RingAttention.apply(sequence, q, k, v, *tensors)
    if sink is not None:
        o, lse = ops.add_sink(o, lse, sink)
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
    _check_layout(operator, layout)
    _check_initialised(operator)
    rank, size = _place_in(operator, group)
    if length < size:
        raise ValueError(
            f"gnomon.{operator}: length is {length}; expected at least a row for each of the "
            f"{size} processes"
        )
    if layout == "contiguous":
        return torch.arange(length).tensor_split(size)[rank]
    pieces = torch.arange(length).tensor_split(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def _check_layout(operator: str, layout: str) -> None:
    check_string(operator, "layout", layout)
    if layout not in get_args(Layout):
        raise ValueError(
            f"gnomon.{operator}: layout is {layout!r}; expected 'contiguous' or 'zigzag'"
        )


def _check_initialised(operator: str) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"gnomon.{operator}: torch.distributed is not initialised; call "
            "torch.distributed.init_process_group first"
        )


def _place_in(operator: str, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """The rank in the group, and its size."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(f"gnomon.{operator}: this process is not in the group")
    return rank, dist.get_world_size(group)


#: By role, what to do instead of a term that a part of the keys cannot know.
_OF_WHOLE_ROWS = {
    "sink": "which joins the sum of all parts; expected the argument sink",
    "temperature": "which depends on all keys of a row; expected the argument temperature",
    "gate": "of the output of all parts; expected its product with what comes back",
}


def _check_position(term: position_terms.Specified) -> None:
    if any(component.lies_on_a_grid for component in components_of(term.spec)):
        raise NotImplementedError(
            f"gnomon.{_NAME}: position is {term.spec}, on a grid; expected positions in the "
            "sequence"
        )
    if any(component.entry.get("sums_over_keys") for component in components_of(term.spec)):
        raise NotImplementedError(
            f"gnomon.{_NAME}: position is {term.spec}, which sums over the keys of all processes; "
            "expected a KeyBias of these sums"
        )
    for component in components_of(term.spec):
        if (role := component.entry.get("role")) in _OF_WHOLE_ROWS:
            raise NotImplementedError(
                f"gnomon.{_NAME}: position is {component.spec}, {_OF_WHOLE_ROWS[role]}"
            )
    for component in components_of(term.spec):
        if rows := set(component.tables("tokens")) & set(component.tensors):
            raise NotImplementedError(
                f"gnomon.{_NAME}: position is {component.spec}, whose {min(rows)} has the rows of "
                "the whole sequence; expected q and k to be rotated before the call"
            )
    if ops.goes_by_length(term.spec):
        raise NotImplementedError(
            f"gnomon.{_NAME}: position is {term.spec}, which depends on the length of a call; "
            "expected one that is the same in all parts"
        )


#: What a table may be indexed by that the sequence is shared out by.
_CUT = ("offsets", "keys", "key_entries", "pairs")


@functools.cache
def _name_and_indices(spec: str) -> tuple[str, tuple[str | None, ...]]:
    """Its name, and what each of its tensors is indexed by, if by one of _CUT."""
    (component,) = components_of(spec)
    indices = {table: index for index in _CUT for table in component.tables(index)}
    return component.name, tuple(indices.get(tensor) for tensor in component.tensors)


def _with_rows(term: position_terms.Specified, whole: int, rows: slice) -> position_terms.Specified:
    """Some rows of the tensors that have those of the queries."""
    (component,) = components_of(term.spec)
    of_rows = component.tables("queries", "pairs")
    tensors = tuple(
        _cut_rows(tensor, -2, whole, rows) if name in of_rows else tensor
        for name, tensor in zip(component.tensors, term.tensors, strict=True)
    )
    return dataclasses.replace(term, tensors=tensors)


def _error_in_tokens(q: Tensor, k: Tensor, v: Tensor) -> Exception | None:
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        if tensor.dtype not in _DTYPES or tensor.dtype != q.dtype or tensor.device != q.device:
            return TypeError(
                f"gnomon.{_NAME}: {name} is {tensor.dtype} on {tensor.device} and q {q.dtype} on "
                f"{q.device}; expected the same, bfloat16, float16, float32 or float64"
            )
        if tensor.dim() != 4 or tensor.size(2) < 1:
            return ValueError(
                f"gnomon.{_NAME}: {name} has shape {list(tensor.shape)}; expected (batch, heads, "
                "length, columns) with a length of at least 1"
            )
    if k.size(0) != q.size(0) or v.shape[:3] != k.shape[:3]:
        return ValueError(
            f"gnomon.{_NAME}: q, k and v have shapes {list(q.shape)}, {list(k.shape)} and "
            f"{list(v.shape)}; expected (B, H, Lq, D), (B, Hkv, Lk, D) and (B, Hkv, Lk, Dv)"
        )
    return None


def _all_tensors(terms: Sequence[Term]) -> list[Tensor]:
    return [tensor for term in terms for tensor in term._own_tensors()]


def _with_tensors(term: _T, tensors: list[Tensor]) -> _T:
    """The term with these in the place of its own, which are taken from the list."""
    own = tuple(tensors.pop(0) for _ in term._own_tensors())
    return dataclasses.replace(cast(Any, term), tensors=own)


def _cut(table: Tensor, axis: int, entries: slice) -> Tensor:
    """Some entries; one that is for all of an axis stays."""
    if table.size(axis) == 1:
        return table
    return table.narrow(axis, entries.start, entries.stop - entries.start)


def _cut_rows(tensor: Tensor, axis: int, whole: int, rows: slice) -> Tensor:
    """Some rows of those that have as many as there are; the operator says what is wrong."""
    if tensor.dim() < -axis or tensor.size(axis) != whole:
        return tensor
    return _cut(tensor, axis, rows)


class _Piece(NamedTuple):
    """Rows of a process that follow each other in the sequence."""

    begin: int  # in the sequence
    rows: slice  # of the process

    @property
    def length(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def end(self) -> int:
        return self.begin + self.length


def _pieces(lengths: Sequence[int], layout: Layout) -> list[list[_Piece]]:
    """Those of each process, none of them empty."""
    if layout == "contiguous":
        begins = [sum(lengths[:part]) for part in range(len(lengths))]
        return [
            [_Piece(begin, slice(0, length))] for begin, length in zip(begins, lengths, strict=True)
        ]
    halves = [(length + 1) // 2 for length in lengths]
    pieces = []
    for part, length in enumerate(lengths):
        half = halves[part]
        # The second halves follow all the first ones, that of the last process first.
        later = [lengths[n] - halves[n] for n in range(part + 1, len(lengths))]
        first = _Piece(sum(halves[:part]), slice(0, half))
        second = _Piece(sum(halves) + sum(later), slice(half, length))
        pieces.append([first] if length == half else [first, second])
    return pieces


@dataclass
class _Parts:
    """Who has which rows of the sequence."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    queries: list[int]  # Lq of each process
    keys: list[int]  # Lk of each process
    query_pieces: list[list[_Piece]]  # of each process
    key_pieces: list[list[_Piece]]

    @classmethod
    def exchange(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        terms: Sequence[Term],
        group: dist.ProcessGroup | None,
        layout: Layout,
    ) -> _Parts:
        """A collective. What is wrong with the tokens of any process is an error in all."""
        rank, size = _place_in(_NAME, group)
        mine = [-1] * 14
        error = _error_in_tokens(q, k, v)
        if error is None:
            shape = [q.size(0), q.size(1), q.size(3), k.size(1), k.size(3), v.size(3)]
            learned = any(tensor.requires_grad for tensor in _all_tensors(terms))
            needs = [q.requires_grad, k.requires_grad, v.requires_grad, learned]
            recorded = [int(need and torch.is_grad_enabled()) for need in needs]
            mine = [q.size(2), k.size(2), _DTYPES.index(q.dtype), *shape, *recorded]
            mine.append(get_args(Layout).index(layout))
        facts = torch.empty(size * len(mine), dtype=torch.int64, device=q.device)
        dist.all_gather_into_tensor(
            facts, torch.tensor(mine, dtype=torch.int64, device=q.device), group=group
        )
        all_facts = facts.view(size, -1).tolist()
        if error is not None:
            raise error
        for process, its in enumerate(all_facts):
            if its[0] < 0:
                raise ValueError(
                    f"gnomon.{_NAME}: q, k or v of process {process} is wrong, as it says"
                )
            first = all_facts[0]
            if its[2] != first[2]:
                raise ValueError(
                    f"gnomon.{_NAME}: q has dtype {_DTYPES[its[2]]} in process {process} and "
                    f"{_DTYPES[first[2]]} in process 0; expected the same"
                )
            if its[3:9] != first[3:9]:
                raise ValueError(
                    f"gnomon.{_NAME}: (B, H, D) of q, (Hkv, D) of k and Dv of v are {its[3:9]} in "
                    f"process {process} and {first[3:9]} in process 0; expected the same"
                )
            if its[9:13] != first[9:13]:
                raise ValueError(
                    f"gnomon.{_NAME}: whether q, k, v and a tensor of similarity or position "
                    f"require grad is {[bool(need) for need in its[9:13]]} in process {process} "
                    f"and {[bool(need) for need in first[9:13]]} in process 0; expected the same"
                )
            if its[13] != first[13]:
                layouts = get_args(Layout)
                raise ValueError(
                    f"gnomon.{_NAME}: layout is {layouts[its[13]]!r} in process {process} and "
                    f"{layouts[first[13]]!r} in process 0; expected the same"
                )
        queries, keys = ([its[n] for its in all_facts] for n in (0, 1))
        return cls(
            group=group,
            rank=rank,
            size=size,
            queries=queries,
            keys=keys,
            query_pieces=_pieces(queries, layout),
            key_pieces=_pieces(keys, layout),
        )

    def gather_segments(self, key_segments: Tensor, k: Tensor) -> Tensor:
        """Those of the whole sequence, (B, sum of Lk); a collective."""
        if key_segments.is_floating_point() or key_segments.dtype == torch.bool:
            raise TypeError(
                f"gnomon.{_NAME}: key_segments has dtype {key_segments.dtype}; expected integers"
            )
        expected = (k.size(0), k.size(2))
        if key_segments.shape == expected[1:]:
            key_segments = key_segments.expand(expected)
        if key_segments.shape != expected:
            raise ValueError(
                f"gnomon.{_NAME}: key_segments has shape {list(key_segments.shape)}; expected "
                f"(B, Lk) = {expected}"
            )
        longest = max(self.keys)
        mine = torch.zeros(longest, k.size(0), dtype=torch.int64, device=k.device)
        mine[: k.size(2)] = key_segments.t()
        everyone = mine.new_empty(self.size * longest, k.size(0))
        dist.all_gather_into_tensor(everyone, mine, group=self.group)
        whole = mine.new_empty(sum(self.keys), k.size(0))
        for part, pieces in zip(everyone.split(longest), self.key_pieces, strict=True):
            for piece in pieces:
                whole[piece.begin : piece.end] = part[piece.rows]
        return whole.t().contiguous()

    def source(self, step: int) -> int:
        """Whose keys this process has at a step of the ring."""
        return (self.rank - step) % self.size

    def send_around(self, tensor: Tensor, length: int, hops: int = 1) -> _Passage:
        """Sends (B, Hkv, L, C) on; another comes in its place, with `length` rows."""
        shape = list(tensor.shape)
        shape[2] = length
        received = tensor.new_empty(shape)
        sent = tensor.contiguous()
        to, by = (self.rank + hops) % self.size, (self.rank - hops) % self.size
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=self.group, group_peer=to),
                dist.P2POp(dist.irecv, received, group=self.group, group_peer=by),
            ]
        )
        return _Passage(works, sent, received)


@dataclass
class _Passage:
    """A tensor on its way; what is sent must live until it has left."""

    works: list[dist.Work]
    sent: Tensor
    received: Tensor

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received


@dataclass
class _Sequence:
    """What does not change from part to part."""

    parts: _Parts
    dtype: torch.dtype  # of q
    similarity: similarity_terms.Specified
    positions: list[position_terms.Specified]
    #: As the operator takes them, of the whole sequence but for query_segments.
    call: dict[str, Any]

    def check_tables(self, heads: int) -> None:
        """Of the tables that are cut into parts; the operator sees the parts alone."""
        queries, keys = sum(self.parts.queries), sum(self.parts.keys)
        for term in self.positions:
            name, indices = _name_and_indices(term.spec)
            for table, index in zip(term.tensors, indices, strict=True):
                given = f"gnomon.{_NAME}: the table of {name} has shape {list(table.shape)}; "
                if index == "offsets" and table.shape != (heads, queries + keys - 1):
                    raise ValueError(
                        f"{given}expected (H, Lq + Lk - 1) = ({heads}, {queries + keys - 1}) of "
                        "the whole sequence"
                    )
                if index == "keys" and (table.dim() < 2 or table.size(-2) != keys):
                    raise ValueError(f"{given}expected {keys} rows, the keys of the whole sequence")
                if index == "key_entries" and (table.dim() < 1 or table.size(-1) != keys):
                    raise ValueError(
                        f"{given}expected {keys} entries, the keys of the whole sequence"
                    )
                if index == "pairs":
                    self._check_columns(table, given)
        mask = self.call["mask"]
        if mask is not None:
            self._check_columns(mask, f"gnomon.{_NAME}: mask has shape {list(mask.shape)}; ")

    def _check_columns(self, pairs: Tensor, given: str) -> None:
        keys = sum(self.parts.keys)
        if pairs.dim() < 1 or pairs.size(-1) not in (1, keys):
            raise ValueError(f"{given}expected {keys} columns, the keys of the whole sequence")

    def check_chunks(self) -> None:
        chunks = self.call["chunks"]
        if chunks is None or chunks[0] < 1:
            return
        begins = [piece.begin for pieces in self.parts.key_pieces for piece in pieces]
        if any(begin % chunks[0] != 0 for begin in begins):
            raise ValueError(
                f"gnomon.{_NAME}: the parts of k begin at {begins}; expected multiples of the "
                f"size of chunks, {chunks[0]}"
            )

    def sees(self, queries: _Piece, keys: _Piece) -> bool:
        """Whether one of the queries may see one of the keys."""
        if self.call["query_offsets"] is not None:
            return True
        left, right = self.call["left"], self.call["right"]
        offset = self.call["query_offset"]
        least = keys.begin - (offset + queries.end - 1)
        most = keys.end - 1 - (offset + queries.begin)
        return (left is None or most >= -left) and (right is None or least <= right)

    def seen(self, rank: int, source: int) -> list[tuple[int, _Piece]]:
        """The pieces of the queries of process `rank`, by number, with those of the keys of process
        `source` that they may see."""
        return [
            (n, keys)
            for n, queries in enumerate(self.parts.query_pieces[rank])
            for keys in self.parts.key_pieces[source]
            if self.sees(queries, keys)
        ]

    def last_step(self) -> int:
        """The last step of the ring at which any process sees the keys that it has."""
        size = self.parts.size
        return max(
            step
            for step in range(size)
            if step == 0 or any(self.seen(rank, (rank - step) % size) for rank in range(size))
        )

    def attend(
        self,
        rows: _Piece,
        columns: _Piece,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """o, lse and statistics of a piece of this process's queries over one of some keys."""
        parts = self.parts
        mine = parts.queries[parts.rank]
        first_query, first_key, end = rows.begin, columns.begin, columns.end
        # The operator takes parameters in the dtype of its tokens.
        left_over = [
            tensor.to(q.dtype) if tensor.dtype == self.dtype else tensor for tensor in tensors
        ]
        similarity = _with_tensors(self.similarity, left_over)
        positions = [_with_tensors(term, left_over) for term in self.positions]
        for n, term in enumerate(positions):
            # Entry 0 of offsets is for the first column and the last row of the sequence.
            begin = first_key + sum(parts.queries) - first_query - q.size(2)
            places: dict[str | None, tuple[int, slice]] = {
                "offsets": (-1, slice(begin, begin + q.size(2) + k.size(2) - 1)),
                "keys": (-2, slice(first_key, end)),
                "key_entries": (-1, slice(first_key, end)),
                "pairs": (-1, slice(first_key, end)),
            }
            _, indices = _name_and_indices(term.spec)
            tables = tuple(
                _cut(table, *places[index]) if index in places else table
                for table, index in zip(term.tensors, indices, strict=True)
            )
            term = dataclasses.replace(term, tensors=tables)
            positions[n] = _with_rows(term, mine, rows.rows)

        call = dict(self.call)
        if left_over:
            call["temperature"] = _cut_rows(left_over[0], -1, mine, rows.rows)
        if call["mask"] is not None:
            mask = _cut(call["mask"], -1, slice(first_key, end))
            call["mask"] = _cut_rows(mask, -2, mine, rows.rows)
        if call["query_segments"] is not None:
            call["query_segments"] = _cut_rows(call["query_segments"], -1, mine, rows.rows)
        for name in ("key_starts", "key_lengths"):
            if call[name] is not None:
                call[name] = (call[name] - first_key).clamp(0, k.size(2))
        if call["key_segments"] is not None:
            call["key_segments"] = call["key_segments"][:, first_key:end]
        for name in ("query_offset", "query_offsets"):
            if call[name] is not None:
                call[name] = call[name] + (first_query - first_key)
        results: tuple[Tensor, Tensor, Tensor] = ops.attention_with_lse.default(
            q, k, v, *lower(_NAME, similarity, positions), *call.values()
        )
        return results


class _Sums(NamedTuple):
    """What rows have summed up: 2^(score - largest), with scores in units of log2.

    Parts are merged by these, not by lse, whose rounding would be an error in every weight: e^0.06
    where lse is a million.
    """

    largest: Tensor
    weight: Tensor

    @staticmethod
    def of(statistics: Tensor) -> _Sums:
        return _Sums(statistics[0], statistics[1])

    def plus(self, other: _Sums) -> _Sums:
        largest = torch.maximum(self.largest, other.largest)
        return _Sums(largest, self._by(largest) + other._by(largest))

    def _by(self, largest: Tensor) -> Tensor:
        """The weight by another largest score; 0 of a row that has seen nothing."""
        return torch.where(self.weight == 0, 0.0, self.weight * (self.largest - largest).exp2())

    def share_of(self, total: _Sums) -> Tensor:
        """(B, H, Lq, 1): what part of the total this is; 0 of a row that has seen nothing."""
        share = self._by(total.largest) / total.weight
        return torch.where(self.weight == 0, 0.0, share).unsqueeze(3)


class _Result(NamedTuple):
    """What rows have attended to so far."""

    o: Tensor
    lse: Tensor
    sums: _Sums

    @classmethod
    def of_nothing(cls, q: Tensor, columns: int) -> _Result:
        lse = q.new_full(q.shape[:3], -torch.inf)
        return cls(q.new_zeros(*q.shape[:3], columns), lse, _Sums(lse, torch.zeros_like(lse)))

    def plus(self, o: Tensor, lse: Tensor, statistics: Tensor) -> _Result:
        part = _Sums.of(statistics)
        total = self.sums.plus(part)
        return _Result(
            self.o * self.sums.share_of(total) + o * part.share_of(total),
            torch.logaddexp(self.lse, lse),
            total,
        )

    @classmethod
    def of_rows(cls, results: list[_Result]) -> _Result:
        """Of rows that follow each other."""
        if len(results) == 1:
            return results[0]
        o, lse, sums = zip(*results, strict=True)
        largest, weight = (torch.cat(parts, 2) for parts in zip(*sums, strict=True))
        return cls(torch.cat(o, 2), torch.cat(lse, 2), _Sums(largest, weight))


class _RingAttention(torch.autograd.Function):
    """o and lse of (sequence, q, k, v, the tensors of its terms and, if given, the temperature)."""

    @staticmethod
    def forward(
        ctx: Any, sequence: _Sequence, q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, Tensor]:
        parts = sequence.parts
        # Low precision is rounded at both ends, not in each part.
        computing = torch.promote_types(q.dtype, torch.float32)
        query = q.to(computing)
        last = sequence.last_step()
        head_dim = k.size(3)
        keys = torch.cat([k, v], 3)
        pieces = parts.query_pieces[parts.rank]
        results = [_Result.of_nothing(query[:, :, piece.rows], v.size(3)) for piece in pieces]
        for step in range(last + 1):
            source = parts.source(step)
            passage = None
            if step < last:
                passage = parts.send_around(keys, parts.keys[parts.source(step + 1)])
            seen = sequence.seen(parts.rank, source)
            if step == 0 and not seen:
                # Of its own part it asks in any case, so that all processes find what is wrong.
                seen = [(0, parts.key_pieces[source][0])]
            try:
                for n, columns in seen:
                    part = keys[:, :, columns.rows].to(computing)
                    key, value = part.split([head_dim, v.size(3)], 3)
                    rows = pieces[n]
                    results[n] = results[n].plus(
                        *sequence.attend(rows, columns, query[:, :, rows.rows], key, value, tensors)
                    )
            except Exception:
                if passage is not None:
                    passage.wait()
                raise
            if passage is not None:
                keys = passage.wait()
        whole = _Result.of_rows(results)
        o, lse, sums = whole.o, whole.lse, whole.sums
        ctx.sequence = sequence
        ctx.last = last
        ctx.save_for_backward(q, k, v, o, *sums, *tensors)
        ctx.set_materialize_grads(False)
        return o.to(q.dtype), lse

    @staticmethod
    @first_derivatives_only(_NAME)
    def backward(ctx: Any, d_o: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        sequence: _Sequence = ctx.sequence
        parts = sequence.parts
        last: int = ctx.last
        q, k, v, o, largest, sum_of_weights, *tensors = ctx.saved_tensors
        pieces = parts.query_pieces[parts.rank]
        totals = [
            _Sums(largest[:, :, piece.rows], sum_of_weights[:, :, piece.rows]) for piece in pieces
        ]
        d_out = torch.zeros_like(o) if d_o is None else d_o.to(o.dtype)
        d_total = torch.zeros_like(largest) if d_lse is None else d_lse
        # d_lse of a part is w (d_o . part_o - d_o . o + d_lse): w (d_o . part_o + rest).
        rest = d_total - (d_out * o).sum(3)
        query = q.to(o.dtype).detach()
        head_dim = k.size(3)
        needs_q, needs_terms = ctx.needs_input_grad[1], ctx.needs_input_grad[4:]
        needs_keys = ctx.needs_input_grad[2] or ctx.needs_input_grad[3]
        d_q = torch.zeros_like(query)
        d_tensors = [
            torch.zeros_like(tensor) if needs else None
            for tensor, needs in zip(tensors, needs_terms, strict=True)
        ]
        keys = torch.cat([k, v], 3).detach()
        d_keys = torch.zeros_like(keys, dtype=o.dtype) if needs_keys else None
        d_passage = None
        for step in range(last + 1):
            source = parts.source(step)
            passage = None
            if step < last:
                passage = parts.send_around(keys, parts.keys[parts.source(step + 1)])
            d_part = None
            for n, columns in sequence.seen(parts.rank, source):
                rows = pieces[n]
                with torch.enable_grad():
                    leaf_q = query[:, :, rows.rows].detach().requires_grad_(needs_q)
                    leaf_keys = keys[:, :, columns.rows].to(o.dtype).detach()
                    leaf_keys.requires_grad_(needs_keys)
                    leaves = [
                        tensor.detach().requires_grad_(needs)
                        for tensor, needs in zip(tensors, needs_terms, strict=True)
                    ]
                    key, value = leaf_keys.split([head_dim, v.size(3)], 3)
                    part_o, part_lse, statistics = sequence.attend(
                        rows, columns, leaf_q, key, value, leaves
                    )
                weight = _Sums.of(statistics).share_of(totals[n])
                d_part_o = weight * d_out[:, :, rows.rows]
                d_part_lse = (d_part_o * part_o.detach()).sum(3)
                d_part_lse += weight.squeeze(3) * rest[:, :, rows.rows]
                inputs = [leaf for leaf in (leaf_q, leaf_keys, *leaves) if leaf.requires_grad]
                gradients = iter(
                    torch.autograd.grad((part_o, part_lse), inputs, (d_part_o, d_part_lse))
                )
                if needs_q:
                    d_q[:, :, rows.rows] += next(gradients)
                if needs_keys:
                    if d_part is None:
                        d_part = torch.zeros_like(keys, dtype=o.dtype)
                    d_part[:, :, columns.rows] += next(gradients)
                for sum_of, gradient in zip(
                    [d_tensor for d_tensor in d_tensors if d_tensor is not None],
                    gradients,
                    strict=True,
                ):
                    sum_of += gradient
            # The gradient of keys arrives after they do: it waits for the process before.
            if d_passage is not None:
                d_keys = d_passage.wait()
            if d_keys is not None and d_part is not None:
                d_keys = d_keys + d_part
            if passage is not None:
                keys = passage.wait()
                if d_keys is not None:
                    d_passage = parts.send_around(d_keys, keys.size(2))
        if d_keys is not None and last > 0:
            # Home, to the process that the keys came from.
            d_keys = parts.send_around(d_keys, k.size(2), hops=-last).wait()
        d_k = d_v = None
        if d_keys is not None:
            d_k, d_v = d_keys.split([head_dim, v.size(3)], 3)
        return (
            None,
            d_q.to(q.dtype) if needs_q else None,
            d_k.to(k.dtype) if d_k is not None and ctx.needs_input_grad[2] else None,
            d_v.to(v.dtype) if d_v is not None and ctx.needs_input_grad[3] else None,
            *d_tensors,
        )
