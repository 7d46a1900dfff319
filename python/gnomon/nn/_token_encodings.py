"""Positions added to embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gnomon._attention import Integers
from gnomon._checks import (
    Device,
    by_default,
    check_flag,
    check_integer,
    check_optional_integer,
    check_optional_integers,
    check_string,
    check_tensors,
    wrong_type,
)
from gnomon._library import ops, query
from gnomon._position import Position, Sum, to_positions
from gnomon.nn._caches import TokenCache
from gnomon.nn._checks import SPECIFICATION, check_embeddings, check_factory
from gnomon.nn._held_terms import reset_children, set_start


def attention_position(position: str) -> str:
    """Returns the components of a position that act inside attention, or "none" if there are none.

    Use this function in models whose position is configurable. Pass the full position to
    TokenPosition, which applies the components that are added to embeddings. MultiheadAttention
    rejects these components, so pass it the result of this function.

    Raises:
        ValueError: the specification is invalid.

    Example:
        >>> gnomon.nn.attention_position("sinusoidal+alibi")
        'alibi'
    """
    check_string("nn.attention_position", "position", position, SPECIFICATION)
    acts: str = query("attention_position", position)
    return acts


# The attribute that torch.compiler.assume_constant_result sets. The decorator itself would import
# all of torch._dynamo, which would double the time of `import gnomon`.
attention_position._dynamo_marked_constant = True  # type: ignore[attr-defined]


class TokenEncoding(torch.nn.Module):
    """A position component that is added to embeddings.

    Its subclasses, one for each component, document the trainable parameters.

    Args:
        spec: the specification of one component, such as "conv:kernel=64".
        dim: embedding dimension.
        causal: whether encodings must not depend on later tokens.
        device: device of the parameters; the default device if None.
        dtype: floating-point dtype of the parameters; the default dtype if None.

    Example:
        >>> encoding = gnomon.nn.TokenEncoding("sinusoidal", dim=64)
        >>> x = encoding(torch.randn(2, 16, 64))
    """

    def __init__(
        self,
        spec: str,
        dim: int,
        causal: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made = check_factory("nn.TokenEncoding", device, dtype)
        dim, causal = _check_encoding("TokenEncoding", "spec", spec, dim, causal)
        names, starts, max_length, history = ops.token_encoding_tensors(spec, dim, causal)
        self.spec = spec
        self.dim = dim
        self.causal = causal
        #: Number of positions with an encoding; None means unlimited.
        self.max_length: int | None = max_length
        #: Number of preceding tokens that the encoding reads.
        self.history: int = history
        self._tensor_names = tuple(names)
        for name, start in zip(names, starts, strict=True):
            self.register_parameter(name, torch.nn.Parameter(by_default(start, **made)))

    def reset_parameters(self) -> None:
        """Draws new initial values for all parameters."""
        _, starts, _, _ = ops.token_encoding_tensors(self.spec, self.dim, self.causal)
        for name, start in zip(self._tensor_names, starts, strict=True):
            set_start(getattr(self, name), start)

    def encode(
        self,
        embeddings: Tensor,
        offset: int = 0,
        before: Tensor | None = None,
        lengths: Integers | None = None,
        generator: torch.Generator | None = None,
        positions: Integers | None = None,
    ) -> Tensor:
        """Returns the encoding that forward adds; it broadcasts with the embeddings.

        before (B, N, dim) contains the embeddings of the N tokens that precede this call.
        """
        encoding: Tensor = ops.encode_tokens(
            embeddings,
            self.spec,
            self.dim,
            self.causal,
            [getattr(self, name) for name in self._tensor_names],
            check_integer("nn", "offset", offset),
            self.training,
            check_optional_integers("nn", "lengths", lengths, embeddings),
            before,
            generator,
            check_optional_integers("nn", "positions", positions, embeddings),
        )
        return encoding

    def forward(
        self,
        embeddings: Tensor,
        offset: int | None = None,
        *,
        lengths: Integers | None = None,
        cache: TokenCache | None = None,
        generator: torch.Generator | None = None,
        positions: Integers | None = None,
    ) -> Tensor:
        """Returns embeddings (B, L, dim) plus their encoding.

        The first token has the position `offset`, which is by default the length of the cache
        before the call, or 0 without a cache. `positions`, integers of shape (B, L), or (L,) if
        shared across the batch, replace the default consecutive positions, which start at `offset`.
        `lengths`, integers of shape (B,) or one integer for the whole batch, contains the sequence
        lengths: later tokens are padding, which does not affect other tokens. `lengths` cannot be
        combined with a cache. Random numbers in training come from `generator`, by default
        PyTorch's default generator.
        """
        return _add_encodings([self], embeddings, offset, lengths, cache, generator, positions)

    def extra_repr(self) -> str:
        """Returns the arguments, for print()."""
        return f"{self.spec!r}, {self.dim}, causal={self.causal}"


class TokenPosition(torch.nn.Module):
    """Adds the token encodings of a position, such as "sinusoidal", to embeddings.

    Components that act inside attention are ignored. Every encoding is computed from the original
    embeddings, so the order of components does not matter. Submodules are named "<name><n>", where
    n is the index of the component among those with that name.

    Args:
        position: a specification, or anything else that MultiheadAttention accepts.
        dim: embedding dimension.
        max_length: number of rows of a learned table; "learned:length=N" overrides it.
        causal: whether encodings must not depend on later tokens.
        device: device of the parameters; the default device if None.
        dtype: floating-point dtype of the parameters; the default dtype if None.

    Example:
        >>> position = gnomon.nn.TokenPosition("sinusoidal+alibi", dim=64, max_length=128)
        >>> x = position(torch.randn(2, 16, 64))  # adds the sinusoids, ignores alibi
    """

    def __init__(
        self,
        position: Position | Sequence[Position | str] | str | None,
        dim: int,
        max_length: int,
        causal: bool = False,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        made = check_factory("nn.TokenPosition", device, dtype)
        position, _ = Sum(to_positions("nn.TokenPosition", position))._lower()
        dim, causal = _check_encoding("TokenPosition", "position", position, dim, causal)
        max_length = check_integer("nn.TokenPosition", "max_length", max_length)
        self.position = position
        self.dim = dim
        count: dict[str, int] = {}
        encodings, end = query("token_encodings", position, max_length)
        # Positions that act inside attention may also limit the length, such as ALiBi on a grid.
        ends: list[int] = [] if end is None else [end]
        for name, spec in encodings:
            n = count[name] = count.get(name, -1) + 1
            encoding = TokenEncoding(spec, dim, causal, **made)
            self.add_module(f"{name}{n}", encoding)
            if encoding.max_length is not None:
                ends.append(encoding.max_length)
        #: Maximum length supported by all components; None means unlimited.
        self.max_length: int | None = min(ends, default=None)

    def reset_parameters(self) -> None:
        """Draws new initial values for all parameters."""
        reset_children(self)

    def forward(
        self,
        embeddings: Tensor,
        offset: int | None = None,
        *,
        lengths: Integers | None = None,
        cache: TokenCache | None = None,
        generator: torch.Generator | None = None,
        positions: Integers | None = None,
    ) -> Tensor:
        """Returns embeddings (B, L, dim) plus encodings; see TokenEncoding.forward."""
        check_embeddings("TokenPosition", "embeddings", embeddings, self.dim)
        return _add_encodings(
            list(self.children()), embeddings, offset, lengths, cache, generator, positions
        )


def _add_encodings(
    encodings: Sequence[Any],
    embeddings: Tensor,
    offset: int | None,
    lengths: Integers | None,
    cache: TokenCache | None,
    generator: torch.Generator | None,
    positions: Integers | None,
) -> Tensor:
    """Adds all encodings to the embeddings."""
    check_tensors("nn", embeddings=embeddings)
    lengths = check_optional_integers("nn", "lengths", lengths, embeddings)
    offset = check_optional_integer("nn", "offset", offset)
    if cache is not None and not isinstance(cache, TokenCache):
        raise wrong_type("nn", "cache", cache, "a TokenCache, or None")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise wrong_type("nn", "generator", generator, "a torch.Generator, or None")
    if lengths is not None and cache is not None:
        raise ValueError(
            "gnomon.nn: lengths and a cache are both given; pass lengths only in calls without a "
            "cache, which contain all tokens"
        )
    positions = check_optional_integers("nn", "positions", positions, embeddings)
    if positions is not None and offset is not None:
        raise ValueError("gnomon.nn: positions and offset are both given; pass only one of them")
    if offset is None:
        offset = 0 if cache is None or positions is not None else cache.length()
    before = None if cache is None else cache.embeddings
    tokens = embeddings
    for encoding in encodings:
        tokens = tokens + encoding.encode(embeddings, offset, before, lengths, generator, positions)
    if cache is not None:
        cache.append(embeddings, max((encoding.history for encoding in encodings), default=0))
    return tokens


def _check_encoding(
    module: str, argument: str, spec: object, dim: object, causal: object
) -> tuple[int, bool]:
    """Checks spec, dim and causal, and returns dim and causal."""
    check_string(f"nn.{module}", argument, spec, SPECIFICATION)
    return check_integer(f"nn.{module}", "dim", dim), check_flag(f"nn.{module}", "causal", causal)
