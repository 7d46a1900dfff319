"""Caches of tokens from earlier calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gnomon._attention import OrderArguments
from gnomon._checks import check_optional_integers


class _Room:
    """Memory that holds a cached tensor and spare rows, shared by the copies of a cache.

    The first `used` rows are in use by some cache. A cache whose tensor has exactly these rows may
    append in place; any other cache, such as an outdated copy, must move to new memory.
    """

    def __init__(self, tensor: Tensor, used: int) -> None:
        self.tensor = tensor
        self.used = used

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # Pickles and deep copies have no spare rows.
        return type(None), ()


class _Rows(NamedTuple):
    """A cached tensor (B, H, L, D), and the memory with spare rows that holds it, if any."""

    tensor: Tensor
    room: _Room | None = None
    has_grown: bool = False


def _extended(rows: _Rows | None, more: Tensor, *, writes: bool = True) -> _Rows:
    """Returns `rows` followed by `more`, appending in place if possible.

    The first concatenation allocates no spare rows. After that, memory grows geometrically, so that
    appending one token rarely copies the others. If `writes` is False, the caller writes the new
    rows and must already have checked _grows_in_place().
    """
    if rows is None:
        return _Rows(more)
    known, room = rows.tensor, rows.room
    length, total = known.shape[2], known.shape[2] + more.shape[2]
    if writes and not _grows_in_place(known, more):
        return _Rows(torch.cat([known, more], 2))
    if room is None or not _has_room(room, length, total):
        if not rows.has_grown:
            return _Rows(torch.cat([known, more], 2), has_grown=True)
        sizes = list(known.shape)
        sizes[2] = total + total // 2
        room = _Room(known.new_empty(sizes), total)
        room.tensor.narrow(2, 0, length).copy_(known)
    room.used = total
    if writes:
        # Writing to .data bypasses autograd's version check. This is safe, because the rows of
        # earlier views, which autograd may have saved, do not change.
        room.tensor.data.narrow(2, length, more.shape[2]).copy_(more)
    return _Rows(room.tensor.narrow(2, 0, total), room, has_grown=True)


def _joined(keys: Sequence[Tensor]) -> Tensor:
    """Concatenates the keys of several calls; records gradients if any of the calls did."""
    if not any(one.requires_grad for one in keys):
        return torch.cat(list(keys), 2)
    with torch.inference_mode(False), torch.enable_grad():
        return torch.cat(list(keys), 2)


def _grows_in_place(known: Tensor, more: Tensor) -> bool:
    """Returns whether rows may be written in place (not under autograd, torch.func or compile)."""
    return (
        type(known) is Tensor
        and type(more) is Tensor
        and (known.dtype, known.device) == (more.dtype, more.device)
        and not torch.is_grad_enabled()
        and not torch.compiler.is_compiling()
        and not torch._C._functorch.is_functorch_wrapped_tensor(known)
        and not torch._C._functorch.is_functorch_wrapped_tensor(more)
    )


def _has_room(room: _Room, length: int, total: int) -> bool:
    writable = not room.tensor.is_inference() or torch.is_inference_mode_enabled()
    return room.used == length and room.tensor.shape[2] >= total and writable


class KVCache:
    """Stores the projected keys and values of all tokens so far, for generation.

    The attributes k (B, Hkv, L, D) and v (B, Hkv, L, Dv) contain the unrotated keys and the values,
    or None if the cache is empty. projections contains other tensors (B, H, L, ...) that a position
    computes from key tokens. positions (B, L) or (L,) contains the token positions if the calls
    pass them; otherwise, it is None.

    Under torch.no_grad() or torch.inference_mode(), the cache allocates 50% spare memory, so that
    most calls append their tokens without copying earlier ones. k and v are views of this memory.

    If a module's rotation is the same in all calls, the cache also stores rotated keys. Reading or
    setting k, or setting positions, discards the rotated keys. Reading k at each step is therefore
    slow; use length() instead of k.shape[2]. Copies made with copy.copy share memory with the
    original, so replace their k and v instead of modifying them in place.

    Example:
        >>> layer = gnomon.nn.MultiheadAttention(64, 4, position="rope").eval()
        >>> cache = gnomon.nn.KVCache()
        >>> prompt, token = torch.randn(2, 10, 64), torch.randn(2, 1, 64)
        >>> with torch.no_grad():
        ...     y = layer(prompt, causal=True, cache=cache)
        ...     y = layer(token, causal=True, cache=cache)
    """

    def __init__(self) -> None:
        self._k: _Rows | None = None
        # Keys that are not yet appended to _k, because _k is not read while the cache has rotated
        # keys. The keys in _latest, those of the last calls, are not yet concatenated.
        self._later: tuple[Tensor, ...] = ()
        self._latest: tuple[Tensor, ...] = ()
        self._later_rows = 0
        self._turned: _Rows | None = None
        self._rotation: tuple[str, ...] = ()  # rotation of the rotated keys
        self._v: _Rows | None = None
        self.projections: list[Tensor] = []
        self._positions: Tensor | None = None

    @property
    def positions(self) -> Tensor | None:
        """The token positions, or None."""
        return self._positions

    @positions.setter
    def positions(self, positions: Tensor | None) -> None:
        self._key_rows()
        self._positions = positions
        self._turned = None

    @property
    def k(self) -> Tensor | None:
        """The keys before rotation, or None."""
        # Discard the rotated keys, because the caller may modify the returned keys.
        self._turned = None
        rows = self._key_rows()
        return None if rows is None else rows.tensor

    @k.setter
    def k(self, k: Tensor | None) -> None:
        self._k = None if k is None else _Rows(k)
        self._later, self._latest, self._later_rows = (), (), 0
        self._turned = None

    @property
    def v(self) -> Tensor | None:
        """The values, or None."""
        return None if self._v is None else self._v.tensor

    @v.setter
    def v(self, v: Tensor | None) -> None:
        self._v = None if v is None else _Rows(v)

    def _key_rows(self) -> _Rows | None:
        if self._k is not None and self._later_rows:
            later = _joined([*self._later, *self._latest])
            self._k = (
                _Rows(_joined([self._k.tensor, later]))
                if self._k.tensor.requires_grad or later.requires_grad
                else _extended(self._k, later)
            )
            self._later, self._latest, self._later_rows = (), (), 0
        return self._k

    def _append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Appends keys and values, and returns all of them."""
        self._check(k, v)
        self._k, self._v = _extended(self._key_rows(), k), _extended(self._v, v)
        self._turned = None
        return self._k.tensor, self._v.tensor

    def _append_turned(
        self,
        k: Tensor,
        v: Tensor,
        turn: Callable[[Tensor, int], Tensor],
        rotation: tuple[str, ...],
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Like _append, but returns rotated keys.

        turn(keys, first) rotates keys whose first token has index `first`. If the stored keys were
        rotated with a different `rotation`, all keys are rotated again from their unrotated values.
        If the third result is not None, it contains keys that are not yet rotated; the caller must
        rotate them and write them to the last rows of the first result.
        """
        if self._turned is None or self._rotation != rotation:
            keys, values = self._append(k, v)
            self._turned, self._rotation = _Rows(turn(keys, 0)), rotation
            return self._turned.tensor, values, None
        self._check(k, v)
        new = k if _grows_in_place(self._turned.tensor, k) else None
        more = turn(k, self.length()) if new is None else k
        self._turned = _extended(self._turned, more, writes=new is None)
        self._v = _extended(self._v, v)
        self._latest = (*self._latest, k)
        self._later_rows += k.shape[2]
        many = 64
        if len(self._latest) == many:
            self._later, self._latest = (*self._later, _joined(self._latest)), ()
        return self._turned.tensor, self._v.tensor, new

    def _draft(self) -> KVCache:
        """Returns a copy to modify in a call; _keep() commits it after all steps that can fail."""
        draft = KVCache()
        draft._keep(self)
        return draft

    def _keep(self, draft: KVCache) -> None:
        self._k, self._v = draft._k, draft._v
        self._turned, self._rotation = draft._turned, draft._rotation
        self._later, self._latest = draft._later, draft._latest
        self._later_rows = draft._later_rows
        self.projections, self._positions = draft.projections, draft._positions

    def _check(self, k: Tensor, v: Tensor) -> None:
        if self._k is None:
            return
        for name, rows, new in (("k", self._k, k), ("v", self._v, v)):
            if rows is not None:
                batch, heads, _, dim = rows.tensor.shape
                new_batch, new_heads, _, new_dim = new.shape
                if (batch, heads, dim) == (new_batch, new_heads, new_dim):
                    continue
            raise ValueError(
                f"gnomon.nn.KVCache: {name} has shape {list(new.shape)} and the cache has "
                f"{None if rows is None else list(rows.tensor.shape)}; expected equal shapes, "
                "except for the length"
            )

    def length(self) -> int:
        """Returns the number of cached tokens."""
        known = 0 if self._k is None else self._k.tensor.shape[2]
        return known + self._later_rows

    def joined(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the cached keys and values followed by k and v; the cache does not change."""
        known = self._key_rows()
        if known is None or self.v is None:
            return k, v
        self._check(k, v)
        return torch.cat([known.tensor, k], 2), torch.cat([self.v, v], 2)

    def joined_projections(self, projections: list[Tensor]) -> list[Tensor]:
        """Returns the cached projections followed by `projections`; the cache does not change."""
        if self._k is None:
            return projections
        if len(projections) != len(self.projections):
            raise ValueError(
                f"gnomon.nn.KVCache: the cache contains {len(self.projections)} projections, but "
                f"the call has {len(projections)}; expected the same number"
            )
        return [torch.cat(pair, 2) for pair in zip(self.projections, projections, strict=True)]

    def joined_positions(self, positions: Tensor | None, batch: int) -> Tensor | None:
        """Returns the cached positions followed by `positions`; the cache does not change.

        If only the new tokens have positions, the cached tokens are assumed to have consecutive
        positions starting at 0.
        """
        if self._k is None:
            return positions
        if positions is None:
            if self._positions is not None:
                raise ValueError(
                    "gnomon.nn.KVCache: the cache contains positions, but the new tokens have "
                    "none; pass the positions of the new tokens"
                )
            return None
        known = self._positions
        if known is None:
            known = torch.arange(self.length(), device=positions.device)
        if 3 in (known.dim(), positions.dim()):
            # Positions with coordinates have a third axis.
            if known.dim() != positions.dim() or known.shape[2] != positions.shape[2]:
                raise ValueError(
                    "gnomon.nn.KVCache: the new positions and the cached ones have different "
                    "numbers of axes; expected the same number"
                )
            if len(known) != len(positions):
                known, positions = (one.expand(batch, -1, -1) for one in (known, positions))
            return torch.cat([known, positions], 1)
        axes = max(known.dim(), positions.dim())
        parts = [one if one.dim() == axes else one.expand(batch, -1) for one in (known, positions)]
        return torch.cat(parts, -1)

    def append(
        self,
        k: Tensor,
        v: Tensor,
        projections: Sequence[Tensor] = (),
        positions: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Appends tokens, and returns all keys and values."""
        of_keys = self.joined_projections(list(projections))
        places = self.joined_positions(positions, k.shape[0])
        k, v = self._append(k, v)
        self.projections, self._positions = of_keys, places
        return k, v

    def reset(self) -> None:
        """Removes all tokens."""
        self.k = self.v = self.positions = None
        self.projections = []


def place_tokens(
    operator: str, cache: KVCache, query: Tensor, key: Tensor, arguments: OrderArguments
) -> Tensor | None:
    """Sets a call's position arguments so that its tokens follow the cached ones.

    query (B, Lq, ...) and key (B, Lk, ...) contain only the call's own tokens. Returns the
    positions of all keys, to be stored in the cache, or None if the call has no positions.
    """
    positions = check_optional_integers(operator, "positions", arguments.get("positions"), query)
    # Positions with a coordinate axis do not affect masks.
    says_order = positions is not None and positions.dim() < 3
    if arguments.get("query_offset") is None and not says_order:
        arguments["query_offset"] = cache.length()
    of_keys = arguments.get("key_positions")
    if of_keys is None:
        of_keys = positions
        if positions is not None and query.shape[1] != key.shape[1]:
            raise ValueError(
                f"gnomon.{operator}: key_positions is None, but query has {query.shape[1]} tokens "
                f"and key has {key.shape[1]}; pass the positions of the keys"
            )
    of_keys = check_optional_integers(operator, "key_positions", of_keys, query)
    # key_starts counts left padding, which may be longer than the keys so far.
    starts = check_optional_integers(operator, "key_starts", arguments.get("key_starts"), query)
    if starts is not None:
        arguments["key_starts"] = starts.clamp_max(cache.length() + key.shape[1])
    places = cache.joined_positions(of_keys, len(key))
    if places is not None:
        arguments["key_positions"] = places
    return places


class TokenCache:
    """Stores the state of token encodings between calls, for generation.

    The attribute embeddings (B, N, dim) contains the embeddings of the last N tokens if a
    convolution needs them to encode the next tokens; otherwise, it is None.

    Example:
        >>> position = gnomon.nn.TokenPosition("sinusoidal", dim=64, max_length=128)
        >>> cache = gnomon.nn.TokenCache()
        >>> x = position(torch.randn(2, 10, 64), cache=cache)
        >>> x = position(torch.randn(2, 1, 64), cache=cache)  # position 10
    """

    def __init__(self) -> None:
        self.embeddings: Tensor | None = None
        self._length = 0

    def length(self) -> int:
        """Returns the number of tokens so far."""
        return self._length

    def append(self, embeddings: Tensor, history: int) -> None:
        """Appends tokens, keeping only the embeddings of the last `history` tokens."""
        self._length += embeddings.shape[1]
        if history > 0:
            parts = [embeddings] if self.embeddings is None else [self.embeddings, embeddings]
            self.embeddings = torch.cat(parts, 1)[:, -history:]

    def reset(self) -> None:
        """Removes all tokens."""
        self.embeddings = None
        self._length = 0
