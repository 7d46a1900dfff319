"""Modules. Positions and similarities are named by specifications (include/gnomon/catalogue.h).

The parameters have the same names as in C++ (include/gnomon/torch/nn.h).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnomon._attention import Window, _window
from gnomon._encodings import sinusoid
from gnomon._library import ops

__all__ = [
    "CAPE",
    "Convolutional",
    "KVCache",
    "LearnedAbsolute",
    "MultiheadAttention",
    "Sinusoidal",
    "TokenPosition",
]


class KVCache:
    """Projected keys and values of the tokens so far, before any rotation or map.

    k (B, Hkv, L, D) and v (B, Hkv, L, Dv), or None.
    """

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def length(self) -> int:
        """How many tokens it holds."""
        return 0 if self.k is None else self.k.shape[2]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds tokens; returns all keys and values."""
        self.k = k if self.k is None else torch.cat([self.k, k], 2)
        self.v = v if self.v is None else torch.cat([self.v, v], 2)
        return self.k, self.v

    def reset(self) -> None:
        """Forgets all tokens."""
        self.k = self.v = None


class MultiheadAttention(torch.nn.Module):
    """softmax(similarity + position) over heads, between projections.

    Submodules q_proj, k_proj, v_proj, out_proj: weights N(0, 1 / in_features), biases 0, so that
    inputs of unit variance give q and k of unit variance and logits of spread 1. Parameters of the
    similarity and of the position are (H,) tensors "<component>_<name>_theta" that start at 0,
    with value = start * exp(5 theta), "gamma_theta" or "beta_theta" among them, and "t5_table"
    (buckets, H), which starts at 0. The start of gamma or beta, the buffer "gamma_start" or
    "beta_start", makes the spread of the logits of N(0, 1) tokens 1.

    Args:
        embed_dim: columns of the input and the output.
        num_heads: query heads; a divisor of embed_dim.
        kv_heads: heads of keys and values, a divisor of num_heads; num_heads by default.
        qk_dim: columns of one head of q and k; embed_dim / num_heads by default, or the only number
            that the similarity takes (1 of "additive").
        similarity: a specification, "penumbral:score=height2".
        position: a specification, "rope+hype:mu=0.001:tau=learned"; None is "none". Components that
            are added to embeddings do nothing here: give the same specification to TokenPosition.
        dropout: of the weights; only 0 in this version.
        bias: whether the projections have one.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        kv_heads: int | None = None,
        qk_dim: int | None = None,
        similarity: str = "dot",
        position: str | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        if dropout != 0:
            raise NotImplementedError(
                f"gnomon.nn.MultiheadAttention: dropout is {dropout}; it is not implemented in "
                "this version"
            )
        if embed_dim < 1 or num_heads < 1 or embed_dim % num_heads != 0:
            raise ValueError(
                f"gnomon.nn.MultiheadAttention: embed_dim is {embed_dim} and num_heads "
                f"{num_heads}; expected a positive multiple"
            )
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.kv_heads = num_heads if kv_heads is None else kv_heads
        self.qk_dim = (
            ops.module_head_columns(similarity, embed_dim // num_heads)
            if qk_dim is None
            else qk_dim
        )
        self.similarity = similarity
        self.position = "none" if position is None else position
        if self.kv_heads < 1 or num_heads % self.kv_heads != 0:
            raise ValueError(
                f"gnomon.nn.MultiheadAttention: kv_heads is {kv_heads}; expected a divisor of "
                f"num_heads = {num_heads}"
            )
        if self.qk_dim < 1:
            raise ValueError(
                f"gnomon.nn.MultiheadAttention: qk_dim is {qk_dim}; expected at least 1"
            )
        value_dim = embed_dim // num_heads
        self.q_proj = torch.nn.Linear(embed_dim, num_heads * self.qk_dim, bias=bias)
        self.k_proj = torch.nn.Linear(embed_dim, self.kv_heads * self.qk_dim, bias=bias)
        self.v_proj = torch.nn.Linear(embed_dim, self.kv_heads * value_dim, bias=bias)
        self.out_proj = torch.nn.Linear(embed_dim, embed_dim, bias=bias)
        names, starts, learned = ops.module_tensors(
            self.similarity, self.position, num_heads, self.qk_dim
        )
        self._term_names = tuple(names)
        for name, start, is_learned in zip(names, starts, learned, strict=True):
            value = start.to(torch.get_default_dtype())
            if is_learned:
                self.register_parameter(name, torch.nn.Parameter(value))
            else:
                self.register_buffer(name, value)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the projections anew."""
        for layer in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            torch.nn.init.normal_(layer.weight, 0, self.embed_dim**-0.5)
            if layer.bias is not None:
                torch.nn.init.zeros_(layer.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        causal: bool = False,
        window: Window | None = None,
        key_lengths: Tensor | None = None,
        query_offset: int | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Attention of query (B, Lq, embed_dim) over key and value (B, Lk, embed_dim).

        key is query by default, value is key. The keys and values of this call are appended to the
        cache, the queries see all of it, and query_offset is its length before by default. The
        other arguments are those of gnomon.attention. Returns (B, Lq, embed_dim).
        """
        key = query if key is None else key
        value = key if value is None else value
        for name, tokens in (("query", query), ("key", key), ("value", value)):
            _check_embeddings("MultiheadAttention", name, tokens, self.embed_dim)
        q = self.q_proj(query).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        k = self.k_proj(key).unflatten(2, (self.kv_heads, -1)).transpose(1, 2)
        v = self.v_proj(value).unflatten(2, (self.kv_heads, -1)).transpose(1, 2)
        if cache is not None:
            if query_offset is None:
                query_offset = cache.length()
            k, v = cache.append(k, v)
        left, right = _window(window)
        o = ops.module_attention(
            q,
            k,
            v,
            self.similarity,
            self.position,
            [getattr(self, name) for name in self._term_names],
            causal,
            left,
            right,
            key_lengths,
            query_offset,
        )
        out: Tensor = self.out_proj(o.transpose(1, 2).flatten(2))
        return out

    def extra_repr(self) -> str:
        """The arguments, for print()."""
        return (
            f"{self.embed_dim}, {self.num_heads}, kv_heads={self.kv_heads}, qk_dim={self.qk_dim}, "
            f"similarity={self.similarity!r}, position={self.position!r}"
        )


class Sinusoidal(torch.nn.Module):
    """Adds the sinusoids of their positions to embeddings; see gnomon.sinusoid."""

    def __init__(self, dim: int, layout: str = "interleaved") -> None:
        super().__init__()
        sinusoid(torch.zeros(0), dim, layout=layout)
        self.dim = dim
        self.layout = layout

    def forward(self, embeddings: Tensor, offset: int = 0) -> Tensor:
        """embeddings (B, L, dim), the first of them at position `offset`; the same shape."""
        _check_embeddings("Sinusoidal", "embeddings", embeddings, self.dim)
        positions = torch.arange(
            offset, offset + embeddings.shape[1], device=embeddings.device, dtype=torch.int64
        )
        return embeddings + sinusoid(positions, self.dim, layout=self.layout).to(embeddings.dtype)


class LearnedAbsolute(torch.nn.Module):
    """Adds a learned table of positions to embeddings.

    Parameter `table` (max_length, dim), which starts as N(0, 0.02^2) (Radford et al. 2019).
    """

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__()
        self.max_length = max_length
        self.dim = dim
        self.table = torch.nn.Parameter(torch.empty(max_length, dim))
        torch.nn.init.normal_(self.table, 0, 0.02)

    def forward(self, embeddings: Tensor, offset: int = 0) -> Tensor:
        """embeddings (B, L, dim) at positions offset, ...; offset + L <= max_length."""
        _check_embeddings("LearnedAbsolute", "embeddings", embeddings, self.dim)
        length = embeddings.shape[1]
        if offset < 0 or offset + length > self.max_length:
            raise ValueError(
                f"gnomon.nn.LearnedAbsolute: positions {offset} to {offset + length - 1}; the "
                f"table has {self.max_length} rows"
            )
        return embeddings + self.table[offset : offset + length].to(embeddings.dtype)


class TokenPosition(torch.nn.Module):
    """Adds the token encodings of a position ("sinusoidal", "learned") to embeddings.

    Nothing for the components that act in attention. max_length is the number of rows of a learned
    table; "learned:length=N" in the specification overrides it.
    """

    def __init__(self, position: str, dim: int, max_length: int) -> None:
        super().__init__()
        self.position = position
        layouts, lengths = ops.token_encodings(position, max_length)
        encodings = list(zip(layouts, lengths, strict=True))
        learned = [length for layout, length in encodings if layout == "learned"]
        for n, length in enumerate(learned):
            self.add_module(f"learned{n}", LearnedAbsolute(length, dim))
        for n, layout in enumerate(layout for layout in layouts if layout != "learned"):
            self.add_module(f"sinusoidal{n}", Sinusoidal(dim, layout))
        #: The longest length at which the whole position is defined; None: any.
        self.max_length: int | None = min(learned, default=None)

    def forward(self, embeddings: Tensor, offset: int = 0) -> Tensor:
        """embeddings (B, L, dim), the first of them at position `offset`; the same shape."""
        for encoding in self.children():
            embeddings = encoding(embeddings, offset)
        return embeddings


class _Later(torch.nn.Module):
    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        raise NotImplementedError(
            f"gnomon.nn.{type(self).__name__} is not implemented in this version"
        )


class Convolutional(_Later):
    """Positions from a convolution; not in this version."""


class CAPE(_Later):
    """Continuous augmented positional embeddings; not in this version."""


def _check_embeddings(module: str, argument: str, tokens: Tensor, dim: int) -> None:
    if tokens.dim() != 3 or tokens.shape[2] != dim:
        raise ValueError(
            f"gnomon.nn.{module}: {argument} has shape {tuple(tokens.shape)}; expected "
            f"(B, L, {dim})"
        )
