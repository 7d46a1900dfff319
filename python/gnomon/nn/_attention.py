"""Attention module without projections."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from gnomon._attention import UNSET, Aggregation, MaskArguments, Rows, check_rows, takes
from gnomon._checks import (
    Device,
    as_autocast,
    check_flag,
    check_integer,
    check_number,
    check_optional_integer,
    check_tensors,
)
from gnomon._library import ops, query
from gnomon._position import Position, Sum, to_positions
from gnomon._similarity import Similarity, to_similarity
from gnomon.nn._caches import KVCache
from gnomon.nn._checks import check_factory
from gnomon.nn._held_terms import HeldTerms, TermSizes, reset_children
from gnomon.nn._masks import to_masks

_NAME = "nn.Attention"


class ScaledArguments(MaskArguments, total=False):
    """Call arguments of modules that receive projected queries and keys."""

    scale: float | None
    temperature: Tensor | float | None
    score_softcap: float | None


class Attention(HeldTerms):
    """The module form of gnomon.attention; it owns the parameters of its similarity and position.

    It has no projections of q, k, v or the output. Use it in models that have their own
    projections, such as a fused QKV projection. See MultiheadAttention for the names of the
    parameters ("gamma_theta", "t5_table") and their initial values.

        attention = gnomon.nn.Attention(8, 64, similarity="penumbral", position="hype:tau=learned")
        o = attention(q, k, v, causal=True)

    Args:
        num_heads: number of query heads.
        head_dim: head dimension of q and k.
        similarity: see MultiheadAttention.
        position: see MultiheadAttention.
        value_dim: head dimension of v; head_dim by default.
        dropout: probability of dropping an attention weight during training.
        max_length: see MultiheadAttention.
        token_dim: embedding dimension of the tokens, required if the position projects tokens
            ("forget", "content_bias", "gate"); each call must then pass tokens.
        key_token_dim: embedding dimension of the key tokens; token_dim by default.
        sink: see MultiheadAttention.
        tolerance: see gnomon.attention.
        device: device of parameters and buffers; the default device if None.
        dtype: floating-point dtype of parameters and buffers; the default dtype if None.

    Raises:
        ValueError: a value is invalid, or token_dim is None and the position projects tokens.
        TypeError: an argument has the wrong type.

    Example:
        >>> layer = gnomon.nn.Attention(8, 32, similarity="gaussian", position="alibi")
        >>> q, k, v = torch.randn(3, 2, 8, 16, 32).unbind()  # (B, H, L, D)
        >>> o = layer(q, k, v, causal=True)
    """

    _head_dim_name = "head_dim"

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        similarity: Similarity | str = "dot",
        position: Position | Sequence[Position | str] | str | None = None,
        value_dim: int | None = None,
        dropout: float = 0.0,
        max_length: int = 512,
        token_dim: int | None = None,
        key_token_dim: int | None = None,
        sink: bool = False,
        tolerance: float = UNSET["tolerance"],
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = check_integer(_NAME, "num_heads", num_heads)
        self.head_dim = check_integer(_NAME, "head_dim", head_dim)
        value_dim = check_optional_integer(_NAME, "value_dim", value_dim)
        self.value_dim = self.head_dim if value_dim is None else value_dim
        for name in ("num_heads", "head_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"gnomon.{_NAME}: {name} is {getattr(self, name)}; expected at least 1"
                )
        max_length = check_integer(_NAME, "max_length", max_length)
        self.token_dim = check_optional_integer(_NAME, "token_dim", token_dim)
        key_token_dim = check_optional_integer(_NAME, "key_token_dim", key_token_dim)
        self.key_token_dim = self.token_dim if key_token_dim is None else key_token_dim
        check_factory(_NAME, device, dtype)
        similarity_spec, given = to_similarity(_NAME, similarity)._lower()
        position_spec, position_tensors = Sum(to_positions(_NAME, position))._lower()
        self.dropout = check_number(_NAME, "dropout", dropout)
        self.tolerance = check_number(_NAME, "tolerance", tolerance)
        has_sink = check_flag(_NAME, "sink", sink)
        ops.check_module(
            f"gnomon.{_NAME}", self.dropout, self.tolerance, has_sink, position=position_spec
        )
        if self.token_dim is None and query("module_has_projections", position_spec):
            raise ValueError(
                f"gnomon.{_NAME}: position is {position_spec!r}, which projects tokens, but "
                "token_dim is None; expected the embedding dimension of the tokens"
            )
        self._hold_terms(
            similarity_spec,
            position_spec,
            [*given, *position_tensors],
            TermSizes(
                self.num_heads,
                self.head_dim,
                self.value_dim,
                max_length,
                self.token_dim or 1,
                self.key_token_dim or 1,
            ),
            device,
            dtype,
            has_sink,
        )

    def reset_parameters(self) -> None:
        """Resets all parameters and buffers to their initial values, and redraws random ones."""
        reset_children(self)
        self._reset_terms()

    @takes(ScaledArguments)
    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        tokens: Tensor | None = None,
        key_tokens: Tensor | None = None,
        cache: KVCache | None = None,
        key_padding_mask: Tensor | None = None,
        pair_bias: Tensor | None = None,
        aggregation: Aggregation = "mean",
        **arguments: Unpack[ScaledArguments],
    ) -> Tensor:
        """Computes attention and returns the output (B, H, Lq, Dv).

        Args:
            q: queries (B, H, Lq, D), with H = num_heads and D = head_dim.
            k: keys (B, Hkv, Lk, D), where Hkv divides H.
            v: values (B, Hkv, Lk, Dv), with Dv = value_dim.
            tokens: (B, Lq, token_dim), the embeddings of the query tokens; required if the position
                projects tokens.
            key_tokens: (B, Lk, key_token_dim), the embeddings of the key tokens; tokens by default.
            cache: see MultiheadAttention.
            key_padding_mask: see MultiheadAttention.
            pair_bias: see MultiheadAttention.
            aggregation: see gnomon.attention.

        The other arguments are those of gnomon.attention.
        """
        check_tensors(_NAME, q=q, k=k, v=v)
        q, k, v = as_autocast(q, k, v)
        self._check_heads(q, k)
        if v.dim() == 4 and v.shape[3] != self.value_dim:
            raise ValueError(
                f"gnomon.{_NAME}: v has shape {list(v.shape)}; expected (B, Hkv, Lk, Dv) with Dv = "
                f"{self.value_dim}"
            )
        known = cache.length() if isinstance(cache, KVCache) else 0
        sizes = (q.shape[0], self.num_heads, q.shape[2], k.shape[2] + known)
        masks = to_masks(_NAME, sizes, q, key_padding_mask, pair_bias)
        attended = self._attend(
            _NAME,
            (q, k, v),
            self._tokens(q, k, tokens, key_tokens),
            arguments,
            ScaledArguments,
            self._own_arguments(),
            dropout=self.dropout if self.training else 0.0,
            aggregation=aggregation,
            cache=cache,
            hidden=masks.hidden,
            more=masks.biases,
        )
        attended.keep()
        return attended.o

    @takes(ScaledArguments)
    def attention_weights(
        self,
        q: Tensor,
        k: Tensor,
        rows: Rows = -1,
        *,
        tokens: Tensor | None = None,
        key_tokens: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        pair_bias: Tensor | None = None,
        **arguments: Unpack[ScaledArguments],
    ) -> Tensor:
        """Returns the attention weights (B, H, n, Lk) of n queries.

        `rows` selects the queries; by default, only the last one. q is (B, H, Lq, D). The weights
        are those of gnomon.attention_weights with this module's similarity and position, without
        dropout. The other arguments are those of forward.
        """
        operator = f"{_NAME}.attention_weights"
        check_tensors(operator, q=q, k=k)
        q, k = as_autocast(q, k)
        self._check_heads(q, k)
        sizes = (q.shape[0], self.num_heads, q.shape[2], k.shape[2])
        masks = to_masks(operator, sizes, q, key_padding_mask, pair_bias)
        return self._weights(
            operator,
            (q, k),
            self._tokens(q, k, tokens, key_tokens),
            check_rows(operator, rows, q),
            arguments,
            ScaledArguments,
            self._own_arguments(),
            hidden=masks.hidden,
            more=masks.biases,
        )

    def _check_heads(self, q: Tensor, k: Tensor) -> None:
        if q.dim() != 4 or q.shape[1] != self.num_heads or q.shape[3] != self.head_dim:
            raise ValueError(
                f"gnomon.{_NAME}: q has shape {list(q.shape)}; expected (B, H, Lq, D) with H = "
                f"{self.num_heads} and D = {self.head_dim}"
            )
        if k.dim() != 4 or k.shape[3] != self.head_dim:
            raise ValueError(
                f"gnomon.{_NAME}: k has shape {list(k.shape)}; expected (B, Hkv, Lk, D) with D = "
                f"{self.head_dim}"
            )

    def _tokens(
        self, q: Tensor, k: Tensor, tokens: Tensor | None, key_tokens: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the query and key tokens, or placeholders (B, L, ...) if no term reads tokens."""
        if not self._has_projections:
            return q.transpose(1, 2), k.transpose(1, 2)
        key_tokens = tokens if key_tokens is None else key_tokens
        for name, given, dim, length in (
            ("tokens", tokens, self.token_dim, q.shape[2]),
            ("key_tokens", key_tokens, self.key_token_dim, k.shape[2]),
        ):
            check_tensors(_NAME, **{name: given})
            assert given is not None
            if tuple(given.shape) != (q.shape[0], length, dim):
                raise ValueError(
                    f"gnomon.{_NAME}: {name} has shape {list(given.shape)}; expected (B, L, "
                    f"dim) = ({q.shape[0]}, {length}, {dim})"
                )
        assert tokens is not None
        assert key_tokens is not None
        return tokens, key_tokens

    def extra_repr(self) -> str:
        """Returns the non-default arguments, for print()."""
        defaults = {
            "similarity": "dot",
            "position": "none",
            "value_dim": self.head_dim,
            "dropout": 0.0,
            "token_dim": None,
            "tolerance": UNSET["tolerance"],
        }
        given = [
            f"{name}={getattr(self, name)!r}"
            for name, default in defaults.items()
            if getattr(self, name) != default
        ]
        if self.sink is not None:
            given.append("sink=True")
        return ", ".join([str(self.num_heads), str(self.head_dim), *given])
