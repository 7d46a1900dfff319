"""Represents transformers' masks as gnomon's arguments instead of arrays (B, 1, Lq, Lk)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import masking_utils

from gnomon._attention import Window

OPERATOR = "gnomon.integrations.transformers"
#: The segment of keys that no query attends to.
_HIDDEN = -(2**31)
#: A value at or below this limit hides a key when it is added to the key's score.
LOWEST = -1e4


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask that is converted to an array only if a model computes with it.

    The array is the one that transformers' eager attention adds to the scores. Its entries are 0
    where a query attends to a key; otherwise, they are the minimum of the dtype.
    """

    shape: tuple[int, int, int, int]
    #: The position of the first query; a one-element tensor if a graph with a static cache is
    #: traced.
    query_offset: int | Tensor = 0
    causal: bool = False
    window: Window = (None, None)
    key_starts: Tensor | None = None
    key_lengths: Tensor | None = None
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None
    #: An additional mask, True for visible keys: (B, 1, Lq, Lk).
    seen: Tensor | None = None
    #: Whether the mask hides nothing, so that eager attention would receive None.
    is_none: bool = False
    dtype: torch.dtype = torch.float32
    device: torch.device | str = "cpu"

    #: transformers reads ndim and shape from masks that generate() created earlier.
    ndim: ClassVar[int] = 4

    def is_seen(self) -> Tensor:
        """Returns (B, 1, Lq, Lk), True where a query attends to a key."""
        _, _, queries, keys = self.shape
        key = torch.arange(keys, device=self.device)
        query = torch.arange(queries, device=self.device)[:, None] + self.query_offset
        seen = torch.ones(self.shape, dtype=torch.bool, device=self.device)
        left, right = self.window
        if self.causal:
            seen = seen & (key <= query)
        if left is not None:
            seen = seen & (key >= query - left)
        if right is not None:
            seen = seen & (key <= query + right)
        if self.key_starts is not None:
            seen = seen & (key >= self.key_starts[:, None, None, None])
        if self.key_lengths is not None:
            seen = seen & (key < self.key_lengths[:, None, None, None])
        if self.query_segments is not None and self.key_segments is not None:
            same = self.query_segments[..., :, None] == self.key_segments[..., None, :]
            seen = seen & same[:, None]
        return seen if self.seen is None else seen & self.seen

    def array(self) -> Tensor:
        """Returns the mask as an array (B, 1, Lq, Lk): additive, or True where a key is hidden."""
        hidden = ~self.is_seen()
        if self.dtype == torch.bool:
            return hidden
        scores = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return scores.masked_fill(hidden, torch.finfo(self.dtype).min)

    def size(self, dim: int | None = None) -> torch.Size | int:
        """Same as Tensor.size."""
        return torch.Size(self.shape) if dim is None else self.shape[dim]

    def dim(self) -> int:
        """Same as Tensor.dim."""
        return self.ndim

    def contiguous(self) -> Mask:
        """Returns self; generate() calls this with static caches."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Mask | Tensor:
        """Returns the mask in another floating-point or Boolean dtype, or on another device."""
        dtype = kwargs.get("dtype", next((a for a in args if isinstance(a, torch.dtype)), None))
        device = kwargs.get("device", next((a for a in args if _is_device(a)), self.device))
        like = next((a for a in args if isinstance(a, Tensor)), None)
        if like is not None:
            dtype, device = like.dtype, like.device
        if self.dtype == torch.bool or not (
            dtype is None or dtype == torch.bool or dtype.is_floating_point
        ):
            return self.array().to(*args, **kwargs)
        return replace(self, dtype=dtype or self.dtype, device=device)

    def __getitem__(self, index: Any) -> Mask | Tensor:
        """Returns self if slices cover the whole mask, as for a cache's keys; else, an array."""
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) <= 4 and all(
            part is Ellipsis or (isinstance(part, slice) and _takes_all(part, length))
            for part, length in zip(parts, self.shape, strict=False)
        ):
            return self
        return self.array()[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        return getattr(self.array(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], _types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = torch.utils._pytree.tree_map_only(
            Mask, lambda mask: mask.array(), (args, kwargs or {})
        )
        return function(*args, **kwargs)


def give_arrays(layer: torch.nn.Module) -> None:
    """Makes a layer receive arrays instead of Mask objects; repeated calls have no effect."""
    if _to_arrays not in layer._forward_pre_hooks.values():
        layer.register_forward_pre_hook(_to_arrays, with_kwargs=True)


def _to_arrays(
    _layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    def given(value: Any) -> Any:
        return value.array() if isinstance(value, Mask) else value

    return tuple(map(given, args)), {name: given(value) for name, value in kwargs.items()}


def _as_arrays(name: str) -> Callable[..., Any]:
    def operator(self: Mask, *args: Any) -> Any:
        return getattr(self.array(), name)(*args)

    return operator


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "invert", "neg", "and", "or"):
    setattr(Mask, f"__{_name}__", _as_arrays(f"__{_name}__"))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Mask, f"__{_name}__", _as_arrays(f"__{_name}__"))
# As for a Tensor, == compares values, but the hash is that of the object.
Mask.__hash__ = object.__hash__  # type: ignore[method-assign, assignment]


def _is_device(value: object) -> bool:
    return isinstance(value, (torch.device, str))


def _takes_all(part: slice, length: int) -> bool:
    return part.indices(length) == (0, length, 1)


@dataclass(frozen=True, eq=False)
class _Pattern:
    """The pattern that a transformers mask function of (batch, head, query, key) describes."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    segments: Tensor | None = None
    chunk: int | None = None
    chunk_starts: Tensor | None = None

    def within(self, left: int, right: int | None) -> _Pattern:
        """Restricts the pattern to a window."""
        narrowed = left if self.left is None else min(left, self.left)
        if right is not None and self.right is not None:
            right = min(right, self.right)
        return replace(self, left=narrowed, right=self.right if right is None else right)


def _read(function: Callable[..., Any], pattern: _Pattern) -> _Pattern | None:
    """Adds the pattern of a function of masking_utils; returns None for other functions.

    These functions are closures whose captured variables describe the mask. Other functions can
    only be evaluated for all L x L pairs.
    """
    if function is masking_utils.causal_mask_function:
        return replace(pattern, causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return pattern
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return None
    name = function.__qualname__.split(".")[0]
    cells = function.__closure__ or ()
    held = dict(
        zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True)
    )
    if name == "and_masks":
        read: _Pattern | None = pattern
        for part in held["mask_functions"]:
            read = None if read is None else _read(part, read)
        return read
    if name == "sliding_window_overlay":
        return pattern.within(held["sliding_window"] - 1, None)
    if name == "sliding_window_bidirectional_overlay":
        return pattern.within(held["sliding_window"], held["sliding_window"])
    if name == "packed_sequence_mask_function":
        return replace(pattern, segments=held["packed_sequence_mask"])
    if name == "remap_positions_for_packed_sequence":
        # Positions are consecutive within a segment, so renumbering them keeps their differences,
        # but would change their division into chunks.
        inner = _read(held["mask_function"], _Pattern())
        if inner is None or inner.chunk is not None:
            return None
        return _read(held["mask_function"], pattern)
    if name == "chunked_overlay":
        return replace(pattern, chunk=held["chunk_size"], chunk_starts=held["left_padding"])
    return None


def to_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | Mask | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **_kwargs: object,
) -> Mask:
    """Creates a mask; transformers calls this once per kind of layer in each forward pass."""
    if isinstance(attention_mask, Mask):
        return attention_mask
    if attention_mask is not None and attention_mask.dim() not in (2, 3):
        raise ValueError(
            f"{OPERATOR}: attention_mask has shape {list(attention_mask.shape)}; expected (B, Lk), "
            "(B, Lq, Lk) or (B, 1 or H, Lq, Lk)"
        )
    first_query, first_key = _offset(q_offset), int(kv_offset)
    shape = (batch_size, 1, q_length, kv_length)
    pattern = _read(mask_function, _Pattern())
    if pattern is None:
        rows = attention_mask if attention_mask is not None and attention_mask.dim() == 3 else None
        seen = masking_utils.sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            first_query,
            first_key,
            mask_function,
            attention_mask if rows is None else None,
            allow_is_causal_skip=False,
            use_vmap=use_vmap,
            device=device,
        )
        mask = Mask(shape, seen=seen, dtype=dtype, device=device)
        if rows is None:
            return mask
        return replace(mask, seen=seen & _seen_by_rows(rows, mask, first_key))
    mask = Mask(
        shape,
        query_offset=first_query - first_key,
        causal=pattern.causal,
        window=(pattern.left, pattern.right),
        dtype=dtype,
        device=device,
    )
    if pattern.segments is not None:
        mask = replace(mask, query_segments=pattern.segments, key_segments=pattern.segments)
    if pattern.chunk is not None and pattern.chunk_starts is not None:
        starts = pattern.chunk_starts[:, None]

        def chunks(first: int | Tensor, length: int) -> Tensor:
            places = torch.arange(length, device=starts.device) + first - starts
            numbers = places.div(pattern.chunk, rounding_mode="floor")
            return numbers.expand(batch_size, -1)

        mask = replace(
            mask,
            query_segments=chunks(first_query, q_length),
            key_segments=chunks(first_key, kv_length),
        )
    is_plain = (
        allow_is_bidirectional_skip and mask_function is masking_utils.bidirectional_mask_function
    )
    if attention_mask is None:
        return replace(mask, is_none=is_plain)
    if attention_mask.dim() == 3:
        return replace(mask, seen=_seen_by_rows(attention_mask, mask, first_key))
    # With several codebooks (MusicGen), attention_mask has more rows, of which only the first
    # batch_size are used.
    visible = attention_mask[:batch_size, first_key : first_key + kv_length].bool()
    visible = torch.nn.functional.pad(visible, (0, kv_length - visible.shape[1]))
    narrowed = without_padding(mask, visible)
    return replace(mask, is_none=is_plain) if narrowed is mask else narrowed


def _seen_by_rows(attention_mask: Tensor, mask: Mask, first_key: int) -> Tensor:
    """Returns a Boolean mask (B, 1, Lq, Lk) for an attention_mask (1 or B, 1 or Lq, Lk)."""
    batch, _, queries, keys = mask.shape
    given = list(attention_mask.shape)
    if attention_mask.is_floating_point():
        raise TypeError(
            f"{OPERATOR}: attention_mask (B, Lq, Lk) has dtype {attention_mask.dtype}; expected "
            "booleans or integers, 1 where a query attends to a key; a mask that is added to "
            "the scores must have four axes, (B, 1 or H, Lq, Lk)"
        )
    seen = attention_mask[..., first_key : first_key + keys]
    if given[0] not in (1, batch) or given[1] not in (1, queries) or seen.shape[-1] != keys:
        raise ValueError(
            f"{OPERATOR}: attention_mask has shape {given}; expected (B, Lq, Lk) = "
            f"({batch}, {queries}, {first_key + keys})"
        )
    return seen.bool()[:, None].expand(mask.shape)


def _offset(offset: int | Tensor) -> int | Tensor:
    """Returns the offset as an integer, or unchanged if it is a tensor in a traced graph."""
    if isinstance(offset, Tensor) and torch.compiler.is_compiling():
        return offset
    return int(offset)


def without_padding(mask: Mask, visible: Tensor) -> Mask:
    """Restricts the mask to the visible keys (B, Lk)."""
    if torch.compiler.is_compiling():
        # Tensor values cannot be read while a graph is traced.
        return _hiding(mask, visible)
    count = visible.sum(1)
    length = visible.shape[1]
    if int(count.min()) == length:
        return mask
    starts = visible.int().argmax(1)
    ends = torch.where(count > 0, length - visible.int().flip(1).argmax(1), 0)
    if torch.equal(ends - starts, count):
        return replace(mask, key_starts=starts, key_lengths=ends)
    return _hiding(mask, visible)


def _hiding(mask: Mask, visible: Tensor) -> Mask:
    """Hides keys where `visible` (B, Lk) is False, by assigning them a segment without queries."""
    batch, _, queries, keys = mask.shape
    query_segments, key_segments = mask.query_segments, mask.key_segments
    if query_segments is None or key_segments is None:
        query_segments, key_segments = (
            torch.zeros(batch, n, dtype=torch.int64, device=visible.device) for n in (queries, keys)
        )
    return replace(
        mask,
        query_segments=query_segments,
        key_segments=key_segments.masked_fill(~visible, _HIDDEN),
    )


def given_or_plain(mask: Mask | Tensor | None, q: Tensor, k: Tensor, causal: bool) -> Mask | Tensor:
    """Returns the mask or, if it is None, a mask that is causal or hides nothing."""
    if mask is not None:
        return mask
    queries, keys = q.shape[2], k.shape[2]
    # As in transformers, a single query is the last token, so it attends to all keys.
    is_causal, causal = causal, causal and queries > 1
    if causal and queries != keys:
        raise NotImplementedError(
            f"{OPERATOR}: the positions of {queries} causal queries over {keys} keys are unknown "
            "without a mask; pass attention_mask to the model"
        )
    shape = (q.shape[0], 1, queries, keys)
    offset = keys - 1 if queries == 1 and is_causal else 0
    return Mask(shape, query_offset=offset, causal=causal, device=q.device)


def segments_of(name: str, ends: Tensor, batch: int, length: int) -> Tensor:
    """Returns each token's sequence index (B, L), given the boundaries of packed sequences."""
    total = batch * length
    ends = ends.long()
    if not torch.compiler.is_compiling():
        rows = torch.arange(0, total + 1, length, device=ends.device)
        if int(ends[0]) != 0 or int(ends[-1]) != total or not bool(torch.isin(rows, ends).all()):
            raise ValueError(
                f"{OPERATOR}: {name} is {ends.tolist()}; expected offsets from 0 to {total} (the "
                f"number of tokens) that include the start of each row ({batch} rows of {length} "
                "tokens)"
            )
    places = torch.arange(total, device=ends.device)
    return torch.searchsorted(ends, places, right=True).view(batch, length)


def within_documents(mask: Mask, of_queries: Tensor, of_keys: Tensor) -> Mask:
    """Restricts attention to the query's document, given document numbers (B, Lq) and (B, Lk)."""
    if mask.causal or mask.window != (None, None):
        if of_queries.shape != of_keys.shape or not (
            torch.compiler.is_compiling() or torch.equal(of_queries, of_keys)
        ):
            raise NotImplementedError(
                f"{OPERATOR}: cu_seq_lens_q and cu_seq_lens_k differ, so the query "
                "positions, which causal and windowed attention need, are unknown; expected equal "
                "values"
            )
    if mask.query_segments is None or mask.key_segments is None:
        return replace(mask, query_segments=of_queries, key_segments=of_keys)
    # Encode a pair of segments as one number; there are at most as many documents as tokens.
    count = max(mask.shape[2:]) * mask.shape[0] + 1
    keys = mask.key_segments * count + of_keys
    return replace(
        mask,
        query_segments=mask.query_segments * count + of_queries,
        key_segments=keys.masked_fill(mask.key_segments == _HIDDEN, _HIDDEN),
    )


def seen_by(array: Tensor) -> Tensor | None:
    """Converts an additive mask to a Boolean one, True where it is 0; returns None for biases.

    In a mask, each value is 0 or so low that the weight vanishes.
    """
    if array.requires_grad or torch.compiler.is_compiling():
        return None
    seen = array == 0
    return seen if bool((seen | (array <= LOWEST)).all()) else None


def read_array(seen: Tensor, shape: tuple[int, int, int, int]) -> Mask | None:
    """Converts a band (1 or B, 1 or H, 1 or Lq, 1 or Lk) to a Mask; returns None for other arrays.

    The result is also None while a graph is traced, because reading the array would break the
    graph.

    In a band, each query attends to `left` keys before and `right` keys after its position, except
    for keys to which no query attends. The last query is aligned with the last key.
    """
    if torch.compiler.is_compiling():
        return None
    batch, _, queries, keys = shape
    seen = seen.reshape(*(1,) * (4 - seen.dim()), *seen.shape)
    if seen.shape[1] > 1:
        if not torch.equal(seen, seen[:, :1].expand_as(seen)):
            return None
        seen = seen[:, :1]
    seen = seen.expand(batch, 1, queries, keys)[:, 0]
    there = seen.any(1)
    offset = keys - queries
    query = torch.arange(queries, device=seen.device)[:, None] + offset
    behind = query - torch.arange(keys, device=seen.device)
    left, right = (max(int(x.masked_fill(~seen, 0).max()), 0) for x in (behind, -behind))
    if not torch.equal(seen, there[:, None] & (behind <= left) & (-behind <= right)):
        return None
    # A bound that reaches all keys is omitted.
    window = (left if left < keys - 1 else None, right if right < queries - 1 else None)
    mask = Mask(shape, query_offset=offset, window=window, device=seen.device)
    return without_padding(mask, there)


def both(mask: Mask, other: Mask) -> Mask | None:
    """Returns the intersection of two equally shaped masks; None if Mask cannot represent it."""
    if mask.query_segments is not None:
        mask, other = other, mask
    if mask.query_segments is not None:
        return None
    left, right = mask.window
    right = min(0, right or 0) if mask.causal else right
    if (left, right) != (None, None):
        if other.causal or other.window != (None, None):
            if mask.query_offset != other.query_offset:
                return None
            left, right = (_least(pair) for pair in zip((left, right), other.window, strict=True))
        other = replace(other, query_offset=mask.query_offset, window=(left, right))
    if mask.key_starts is None or mask.key_lengths is None:
        return other
    there = _there(mask, mask.key_starts, mask.key_lengths)
    if other.key_starts is not None and other.key_lengths is not None:
        there &= _there(other, other.key_starts, other.key_lengths)
        other = replace(other, key_starts=None, key_lengths=None)
    return without_padding(other, there)


def _least(numbers: tuple[int | None, ...]) -> int | None:
    """Returns the minimum of window bounds, where None means unbounded."""
    return min((number for number in numbers if number is not None), default=None)


def _there(mask: Mask, starts: Tensor, lengths: Tensor) -> Tensor:
    """Returns (B, Lk), True for the keys from `starts` up to, but not including, `lengths`."""
    key = torch.arange(mask.shape[3], device=mask.device)
    return (key >= starts[:, None]) & (key < lengths[:, None])
