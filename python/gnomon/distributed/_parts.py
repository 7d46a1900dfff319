"""Assigns the rows of a sequence to processes and exchanges them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from gnomon._checks import check_string

NAME = "distributed.context_parallel_attention"
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

#: How the rows of a sequence are assigned to processes.
Layout: TypeAlias = Literal["contiguous", "zigzag"]


def check_layout(operator: str, layout: str) -> None:
    check_string(operator, "layout", layout)
    if layout not in get_args(Layout):
        raise ValueError(
            f"gnomon.{operator}: layout is {layout!r}; expected 'contiguous' or 'zigzag'"
        )


def check_initialised(operator: str) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            f"gnomon.{operator}: torch.distributed is not initialised; call "
            "torch.distributed.init_process_group first"
        )


def place_in(operator: str, group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Returns this process's rank in the group, and the group's size."""
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            f"gnomon.{operator}: this process does not belong to group; make the call only in "
            "processes of the group"
        )
    return rank, dist.get_world_size(group)


def _error_in_tokens(q: Tensor, k: Tensor, v: Tensor) -> Exception | None:
    for name, tensor in {"q": q, "k": k, "v": v}.items():
        if tensor.dtype not in DTYPES or tensor.dtype != q.dtype or tensor.device != q.device:
            return TypeError(
                f"gnomon.{NAME}: {name} is {tensor.dtype} on {tensor.device}, but q is {q.dtype} "
                f"on {q.device}; expected the same device and dtype (bfloat16, float16, float32 or "
                "float64)"
            )
        if tensor.dim() != 4 or tensor.size(2) < 1:
            return ValueError(
                f"gnomon.{NAME}: {name} has shape {list(tensor.shape)}; expected (batch, heads, "
                "length, head_dim) with a length of at least 1"
            )
    if k.size(0) != q.size(0) or v.shape[:3] != k.shape[:3]:
        return ValueError(
            f"gnomon.{NAME}: q, k and v have shapes {list(q.shape)}, {list(k.shape)} and "
            f"{list(v.shape)}; expected (B, H, Lq, D), (B, Hkv, Lk, D) and (B, Hkv, Lk, Dv)"
        )
    return None


class Piece(NamedTuple):
    """Consecutive rows of the sequence that belong to one process."""

    begin: int  # index in the sequence
    rows: slice  # indices in the process's tensors

    @property
    def length(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def end(self) -> int:
        return self.begin + self.length


def _pieces(lengths: Sequence[int], layout: Layout) -> list[list[Piece]]:
    """Returns the non-empty pieces of each process."""
    if layout == "contiguous":
        begins = [sum(lengths[:part]) for part in range(len(lengths))]
        return [
            [Piece(begin, slice(0, length))] for begin, length in zip(begins, lengths, strict=True)
        ]
    halves = [(length + 1) // 2 for length in lengths]
    pieces = []
    for part, length in enumerate(lengths):
        half = halves[part]
        # All second halves follow all first halves, with the processes in reverse order.
        later = [lengths[n] - halves[n] for n in range(part + 1, len(lengths))]
        first = Piece(sum(halves[:part]), slice(0, half))
        second = Piece(sum(halves) + sum(later), slice(half, length))
        pieces.append([first] if length == half else [first, second])
    return pieces


@dataclass
class Parts:
    """The assignment of rows to processes."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    queries: list[int]  # Lq of each process
    keys: list[int]  # Lk of each process
    query_pieces: list[list[Piece]]  # of each process
    key_pieces: list[list[Piece]]

    @classmethod
    def exchange(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tensors: Sequence[Tensor],
        group: dist.ProcessGroup | None,
        layout: Layout,
    ) -> Parts:
        """Exchanges the shapes of q, k and v between all processes in a collective call.

        If the arguments of one process are invalid, all processes raise an error.

        `tensors` are those of the similarity and the position.
        """
        rank, size = place_in(NAME, group)
        mine = [-1] * 14
        error = _error_in_tokens(q, k, v)
        if error is None:
            shape = [q.size(0), q.size(1), q.size(3), k.size(1), k.size(3), v.size(3)]
            learned = any(tensor.requires_grad for tensor in tensors)
            needs = [q.requires_grad, k.requires_grad, v.requires_grad, learned]
            recorded = [int(need and torch.is_grad_enabled()) for need in needs]
            mine = [q.size(2), k.size(2), DTYPES.index(q.dtype), *shape, *recorded]
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
                    f"gnomon.{NAME}: q, k or v of process {process} is invalid; see the error of "
                    "that process"
                )
            first = all_facts[0]
            if its[2] != first[2]:
                raise ValueError(
                    f"gnomon.{NAME}: q has dtype {DTYPES[its[2]]} in process {process} and "
                    f"{DTYPES[first[2]]} in process 0; expected the same dtype"
                )
            if its[3:9] != first[3:9]:
                raise ValueError(
                    f"gnomon.{NAME}: (B, H, D) of q, (Hkv, D) of k and Dv of v are {its[3:9]} in "
                    f"process {process} and {first[3:9]} in process 0; expected equal sizes"
                )
            if its[9:13] != first[9:13]:
                raise ValueError(
                    f"gnomon.{NAME}: requires_grad of q, k, v and of any tensor in similarity "
                    f"or position is {[bool(need) for need in its[9:13]]} in process {process} "
                    f"and {[bool(need) for need in first[9:13]]} in process 0; expected equal flags"
                )
            if its[13] != first[13]:
                layouts = get_args(Layout)
                raise ValueError(
                    f"gnomon.{NAME}: layout is {layouts[its[13]]!r} in process {process} and "
                    f"{layouts[first[13]]!r} in process 0; expected the same layout"
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
        """Gathers the key segments of the whole sequence, (B, sum of Lk), in a collective call."""
        if key_segments.is_floating_point() or key_segments.dtype == torch.bool:
            raise TypeError(
                f"gnomon.{NAME}: key_segments has dtype {key_segments.dtype}; expected integers"
            )
        expected = (k.size(0), k.size(2))
        if key_segments.shape == expected[1:]:
            key_segments = key_segments.expand(expected)
        if key_segments.shape != expected:
            raise ValueError(
                f"gnomon.{NAME}: key_segments has shape {list(key_segments.shape)}; expected "
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
        """Returns the process whose keys this process holds at a step of the ring."""
        return (self.rank - step) % self.size

    def send_around(self, tensor: Tensor, length: int, hops: int = 1) -> Passage:
        """Sends a tensor (B, Hkv, L, C) around the ring and receives one with `length` rows."""
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
        return Passage(works, sent, received)


@dataclass
class Passage:
    """A tensor in transit; `sent` must stay alive until the transfer is complete."""

    works: list[dist.Work]
    sent: Tensor
    received: Tensor

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.received
