"""Caches of tokens from earlier calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gnomon._attention import OrderArguments
from gnomon._checks import check_optional_integers


class KVCache:
    """Projected keys and values of all tokens so far, before any rotation or feature map.

    k is (B, Hkv, L, D) and v is (B, Hkv, L, Dv), or None. projections holds other tensors
    (B, H, L, ...) that a position computes from key tokens. positions (B, L) or (L,) are the token
    positions if the calls pass them, otherwise None.

    A module whose rotation is the same in all calls also stores the rotated keys here, until k is
    read or set.
    """

    def __init__(self) -> None:
        # The keys of each call; unread while the cache has rotated keys.
        self._parts: tuple[Tensor, ...] = ()
        self._turned: Tensor | None = None
        self.v: Tensor | None = None
        self.projections: list[Tensor] = []
        self.positions: Tensor | None = None

    @property
    def k(self) -> Tensor | None:
        """The keys, or None."""
        # The caller may modify the returned keys.
        self._turned = None
        return self._keys()

    @k.setter
    def k(self, k: Tensor | None) -> None:
        self._parts = () if k is None else (k,)
        self._turned = None

    def _keys(self) -> Tensor | None:
        if len(self._parts) > 1:
            self._parts = (torch.cat(self._parts, 2),)
        return self._parts[0] if self._parts else None

    def _joined_turned(
        self, k: Tensor, v: Tensor, turn: Callable[[Tensor, int], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Like joined, with rotated keys.

        turn(keys, first) rotates keys whose first token has index `first`.
        """
        if not self._parts or self.v is None:
            return turn(k, 0), v
        self._check(k, v)
        if self._turned is None:
            return turn(self.joined(k, v)[0], 0), torch.cat([self.v, v], 2)
        return torch.cat([self._turned, turn(k, self.length())], 2), torch.cat([self.v, v], 2)

    def _check(self, k: Tensor, v: Tensor) -> None:
        for name, old, new in (("k", self._parts[0], k), ("v", self.v, v)):
            if old is None or old.shape[:2] != new.shape[:2] or old.shape[3] != new.shape[3]:
                raise ValueError(
                    f"gnomon.nn.KVCache: {name} has shape {list(new.shape)} and the cache "
                    f"{None if old is None else list(old.shape)}; expected the same but for the "
                    "length"
                )

    def _keep(self, k: Tensor, turned: Tensor) -> None:
        """Appends the keys of one call; `turned` holds all keys, rotated."""
        # Merging the parts at intervals bounds their number.
        many = 64
        self._parts = (*self._parts, k)
        if len(self._parts) > many:
            self._parts = (torch.cat(self._parts, 2),)
        self._turned = turned

    def length(self) -> int:
        """Number of cached tokens."""
        return sum(part.shape[2] for part in self._parts)

    def joined(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the cached keys and values followed by new ones, which are not stored."""
        known = self._keys()
        if known is None or self.v is None:
            return k, v
        self._check(k, v)
        return torch.cat([known, k], 2), torch.cat([self.v, v], 2)

    def joined_projections(self, projections: list[Tensor]) -> list[Tensor]:
        """Like joined, for projections."""
        if not self._parts:
            return projections
        if len(projections) != len(self.projections):
            raise ValueError(
                f"gnomon.nn.KVCache: it has {len(self.projections)} projections and takes "
                f"{len(projections)}; expected the same number"
            )
        return [torch.cat(pair, 2) for pair in zip(self.projections, projections, strict=True)]

    def joined_positions(self, positions: Tensor | None, batch: int) -> Tensor | None:
        """Like joined, for positions.

        If only the new tokens have positions, the cached tokens are assumed to be consecutive.
        """
        if not self._parts:
            return positions
        if positions is None:
            if self.positions is not None:
                raise ValueError(
                    "gnomon.nn.KVCache: it has positions of its tokens; expected those of the new "
                    "tokens, too"
                )
            return None
        known = self.positions
        if known is None:
            known = torch.arange(self.length(), device=positions.device)
        if 3 in (known.dim(), positions.dim()):
            # Positions with coordinates.
            if known.dim() != positions.dim() or known.shape[2] != positions.shape[2]:
                raise ValueError(
                    "gnomon.nn.KVCache: its tokens have positions with another number of axes; "
                    "expected positions like those of the first tokens"
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
        """Appends tokens; returns all keys and values."""
        of_keys = self.joined_projections(list(projections))
        places = self.joined_positions(positions, k.shape[0])
        k, v = self.joined(k, v)
        self.k, self.v = k, v
        self.projections, self.positions = of_keys, places
        return k, v

    def reset(self) -> None:
        """Removes all tokens."""
        self.k = self.v = self.positions = None
        self.projections = []


def place_tokens(
    operator: str, cache: KVCache, query: Tensor, key: Tensor, arguments: OrderArguments
) -> Tensor | None:
    """Sets a call's position arguments to follow the cached tokens.

    query (B, Lq, ...) and key (B, Lk, ...) hold only the call's own tokens. Returns the positions
    of all keys, for the cache to keep, or None if there are none.
    """
    positions = check_optional_integers(operator, "positions", arguments.get("positions"), query)
    # Coordinates do not affect masks.
    says_order = positions is not None and positions.dim() < 3
    if arguments.get("query_offset") is None and not says_order:
        arguments["query_offset"] = cache.length()
    of_keys = arguments.get("key_positions")
    if of_keys is None:
        of_keys = positions
        if positions is not None and query.shape[1] != key.shape[1]:
            raise ValueError(
                f"gnomon.{operator}: key_positions is None, query has {query.shape[1]} tokens "
                f"and key {key.shape[1]}; expected the positions of the keys"
            )
    of_keys = check_optional_integers(operator, "key_positions", of_keys, query)
    # Left padding may be longer than the keys so far.
    starts = check_optional_integers(operator, "key_starts", arguments.get("key_starts"), query)
    if starts is not None:
        arguments["key_starts"] = starts.clamp_max(cache.length() + key.shape[1])
    places = cache.joined_positions(of_keys, len(key))
    if places is not None:
        arguments["key_positions"] = places
    return places


class TokenCache:
    """State of token encodings between calls.

    embeddings (B, N, dim) are those of the last tokens, which the next ones read through a
    convolution, or None.
    """

    def __init__(self) -> None:
        self.embeddings: Tensor | None = None
        self._length = 0

    def length(self) -> int:
        """Number of tokens so far."""
        return self._length

    def append(self, embeddings: Tensor, history: int) -> None:
        """Appends tokens; keeps the last `history` of all tokens."""
        self._length += embeddings.shape[1]
        if history > 0:
            parts = [embeddings] if self.embeddings is None else [self.embeddings, embeddings]
            self.embeddings = torch.cat(parts, 1)[:, -history:]

    def reset(self) -> None:
        """Removes all tokens."""
        self.embeddings = None
        self._length = 0
