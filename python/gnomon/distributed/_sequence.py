"""Computes attention between pieces of queries and keys at their places in the whole sequence."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from gnomon import position as position_terms
from gnomon import similarity as similarity_terms
from gnomon._attention import lower
from gnomon._catalogue import components_of
from gnomon._library import ops, query
from gnomon._terms import Term
from gnomon.distributed._parts import NAME, Parts, Piece

_T = TypeVar("_T", bound=Term)

#: The roles of terms that cannot be computed from one shard of the keys, each with the reason and
#: an alternative for the error message.
_OF_WHOLE_ROWS = {
    "sink": "which would be added once for each shard of the keys; pass the argument sink instead",
    "temperature": "which may depend on all keys of a query; pass the argument temperature instead",
    "gate": (
        "which applies to the merged output; multiply the returned output by the gate instead"
    ),
}


def check_position(term: position_terms.Specified) -> None:
    if any(component.lies_on_a_grid for component in components_of(term.spec)):
        raise NotImplementedError(
            f"gnomon.{NAME}: position is {term.spec}, which needs a grid; expected a position "
            "without a grid"
        )
    if any(component.entry.get("sums_over_keys") for component in components_of(term.spec)):
        raise NotImplementedError(
            f"gnomon.{NAME}: position is {term.spec}, which sums over the keys of all processes; "
            "expected a KeyBias that contains these sums"
        )
    for component in components_of(term.spec):
        if (role := component.entry.get("role")) in _OF_WHOLE_ROWS:
            raise NotImplementedError(
                f"gnomon.{NAME}: position is {component.spec}, {_OF_WHOLE_ROWS[role]}"
            )
    for component in components_of(term.spec):
        if rows := set(component.tables("tokens")) & set(component.tensors):
            raise NotImplementedError(
                f"gnomon.{NAME}: position is {component.spec}, whose {min(rows)} has a row for "
                "each token of the whole sequence; rotate q and k before the call instead"
            )
    if query("goes_by_length", term.spec):
        raise NotImplementedError(
            f"gnomon.{NAME}: position is {term.spec}, which depends on the length of the "
            "call; expected a rotation that does not depend on it"
        )


#: Index kinds of tables that are sliced along the sequence.
_CUT = ("offsets", "keys", "key_entries", "pairs")


@functools.cache
def _name_and_indices(spec: str) -> tuple[str, tuple[str | None, ...]]:
    """Returns the term's name, and the index kind of each tensor (None if it is not in _CUT)."""
    (component,) = components_of(spec)
    indices = {table: index for index in _CUT for table in component.tables(index)}
    return component.name, tuple(indices.get(tensor) for tensor in component.tensors)


def _axis(argument: str, letter: str, axes: int) -> int | None:
    """Returns the negative index of an argument's query or key axis (`letter`), or None."""
    axis: int | None = query("axis_of_call", argument, letter, axes)
    return axis


def _with_rows(term: position_terms.Specified, whole: int, rows: slice) -> position_terms.Specified:
    """Selects `rows` in those of the term's tensors that have one row per query."""
    (component,) = components_of(term.spec)
    of_rows = component.tables("queries", "pairs")
    tensors = tuple(
        _cut_rows(tensor, -2, whole, rows) if name in of_rows else tensor
        for name, tensor in zip(component.tensors, term.tensors, strict=True)
    )
    return dataclasses.replace(term, tensors=tensors)


def _with_tensors(term: _T, tensors: list[Tensor]) -> _T:
    """Returns the term with new tensors, which are removed from the start of the list."""
    own = tuple(tensors.pop(0) for _ in term._own_tensors())
    return dataclasses.replace(cast(Any, term), tensors=own)


def _cut(table: Tensor, axis: int, entries: slice) -> Tensor:
    """Selects entries along an axis, unless the axis has size 1."""
    if table.size(axis) == 1:
        return table
    return table.narrow(axis, entries.start, entries.stop - entries.start)


def _cut_rows(tensor: Tensor, axis: int, whole: int, rows: slice) -> Tensor:
    """Selects rows if there are `whole` of them; otherwise, the operator reports the error."""
    if tensor.dim() < -axis or tensor.size(axis) != whole:
        return tensor
    return _cut(tensor, axis, rows)


@dataclass
class WholeSequence:
    """Arguments for the whole sequence, from which each piece's call is derived."""

    parts: Parts
    dtype: torch.dtype  # q's dtype
    similarity: similarity_terms.Specified
    positions: list[position_terms.Specified]
    #: Operator arguments for the whole sequence, except query_segments.
    call: dict[str, Any]

    def check_tables(self, heads: int) -> None:
        """Checks the tables for the whole sequence, because the operator receives only slices."""
        queries, keys = sum(self.parts.queries), sum(self.parts.keys)
        for term in self.positions:
            name, indices = _name_and_indices(term.spec)
            for table, index in zip(term.tensors, indices, strict=True):
                given = f"gnomon.{NAME}: the table of {name} has shape {list(table.shape)}; "
                if index == "offsets" and table.shape != (heads, queries + keys - 1):
                    raise ValueError(
                        f"{given}expected (H, Lq + Lk - 1) = ({heads}, {queries + keys - 1}) for "
                        "the whole sequence"
                    )
                if index == "keys" and (table.dim() < 2 or table.size(-2) != keys):
                    raise ValueError(
                        f"{given}expected {keys} rows, one for each key of the whole sequence"
                    )
                if index == "key_entries" and (table.dim() < 1 or table.size(-1) != keys):
                    raise ValueError(
                        f"{given}expected {keys} entries, one for each key of the whole sequence"
                    )
                if index == "pairs":
                    self._check_columns(table, given)
        mask = self.call["mask"]
        if mask is not None:
            self._check_columns(mask, f"gnomon.{NAME}: mask has shape {list(mask.shape)}; ")

    def _check_columns(self, pairs: Tensor, given: str) -> None:
        keys = sum(self.parts.keys)
        if pairs.dim() < 1 or pairs.size(-1) not in (1, keys):
            raise ValueError(
                f"{given}expected {keys} columns, one for each key of the whole sequence"
            )

    def check_chunks(self) -> None:
        chunks = self.call["chunks"]
        if chunks is None or chunks[0] < 1:
            return
        begins = [piece.begin for pieces in self.parts.key_pieces for piece in pieces]
        if any(begin % chunks[0] != 0 for begin in begins):
            raise ValueError(
                f"gnomon.{NAME}: the shards of k begin at {begins}; expected multiples of the "
                f"chunk size, {chunks[0]}"
            )

    def sees(self, queries: Piece, keys: Piece) -> bool:
        """Returns whether any of the queries may attend to any of the keys."""
        if self.call["query_offsets"] is not None:
            return True
        left, right = self.call["left"], self.call["right"]
        offset = self.call["query_offset"]
        least = keys.begin - (offset + queries.end - 1)
        most = keys.end - 1 - (offset + queries.begin)
        return (left is None or most >= -left) and (right is None or least <= right)

    def seen(self, rank: int, source: int) -> list[tuple[int, Piece]]:
        """Returns the pairs of a query piece's index and a key piece that it may attend to.

        The query pieces are those of process `rank`, and the key pieces those of `source`.
        """
        return [
            (n, keys)
            for n, queries in enumerate(self.parts.query_pieces[rank])
            for keys in self.parts.key_pieces[source]
            if self.sees(queries, keys)
        ]

    def last_step(self) -> int:
        """Returns the last step of the ring at which any process attends to its current keys."""
        size = self.parts.size
        return max(
            step
            for step in range(size)
            if step == 0 or any(self.seen(rank, (rank - step) % size) for rank in range(size))
        )

    def attend(
        self,
        rows: Piece,
        columns: Piece,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Computes o, lse and statistics for one query piece of this process and one key piece."""
        parts = self.parts
        mine = parts.queries[parts.rank]
        first_query, first_key, end = rows.begin, columns.begin, columns.end
        # The operator expects parameters in the dtype of its tokens.
        left_over = [
            tensor.to(q.dtype) if tensor.dtype == self.dtype else tensor for tensor in tensors
        ]
        similarity = _with_tensors(self.similarity, left_over)
        positions = [_with_tensors(term, left_over) for term in self.positions]
        for n, term in enumerate(positions):
            # Entry 0 of an offset table is for the sequence's first key and last query.
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
            call["temperature"] = left_over[0]
        for name, value in call.items():
            if isinstance(value, Tensor):
                if (axis := _axis(name, "K", value.dim())) is not None:
                    call[name] = _cut(value, axis, slice(first_key, end))
                if (axis := _axis(name, "Q", value.dim())) is not None:
                    call[name] = _cut_rows(call[name], axis, mine, rows.rows)
        for name in ("key_starts", "key_lengths"):
            if call[name] is not None:
                call[name] = (call[name] - first_key).clamp(0, k.size(2))
        for name in ("query_offset", "query_offsets"):
            if call[name] is not None:
                call[name] = call[name] + (first_query - first_key)
        results: tuple[Tensor, Tensor, Tensor] = ops.attention_with_lse.default(
            q, k, v, *lower(NAME, similarity, positions), *call.values()
        )
        return results
