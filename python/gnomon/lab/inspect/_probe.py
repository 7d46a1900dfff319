"""Measures attention weights and position biases of a module by calling its forward pass.

An attention module's output is linear in its values. If the values are unit vectors, the output
therefore contains the attention weights, for any similarity and position.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from gnomon.nn import MultiheadAttention


class _FirstColumns(torch.nn.Module):
    def __init__(self, columns: int) -> None:
        super().__init__()
        self.columns = columns

    def forward(self, x: Tensor) -> Tensor:
        return x[..., : self.columns]


class _Zeros(_FirstColumns):
    def forward(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.columns)


def _with_projections(
    module: MultiheadAttention, **projections: torch.nn.Module
) -> MultiheadAttention:
    """Returns a copy of a module that shares its parameters, but has different projections."""
    probe = copy.copy(module)
    probe._modules = {**module._modules, **projections}
    return probe


@torch.no_grad()
def weights(
    module: MultiheadAttention,
    query: Tensor,
    key: Tensor | None = None,
    *,
    causal: bool = False,
    query_offset: int | None = None,
) -> Tensor:
    """Returns the weights (H, Lq, Lk) of query (1, Lq, embed_dim) over key (1, Lk, embed_dim)."""
    key = query if key is None else key
    width = module.embed_dim // module.num_heads
    probe = _with_projections(
        module,
        v_proj=_FirstColumns(module.kv_heads * width),
        out_proj=torch.nn.Identity(),
    )

    def attend(values: Tensor) -> Tensor:
        padded = torch.zeros_like(key)
        padded[..., : values.shape[-1]] = values
        o = probe(query, key, padded, causal=causal, query_offset=query_offset)
        return o[0].unflatten(1, (module.num_heads, width)).transpose(0, 1)

    keys = key.shape[1]
    # Subtract the terms that a position adds to the values.
    nothing = attend(key.new_zeros(1, keys, 0))
    parts = []
    for first in range(0, keys, width):
        values = key.new_zeros(keys, module.kv_heads, width)
        for column in range(min(width, keys - first)):
            values[first + column, :, column] = 1
        parts.append(attend(values.flatten(1)[None]) - nothing)
    return torch.cat(parts, 2)[..., :keys]


@torch.no_grad()
def biases(module: MultiheadAttention, distance: int) -> Tensor:
    """Returns the position's biases (H, distance + 1) for keys 0 to `distance` tokens back.

    Biases are relative to distance 0, because softmax is invariant to adding a constant. Queries
    and keys are all zeros, so rotations have no effect.
    """
    probe = _with_projections(
        module,
        q_proj=_Zeros(module.num_heads * module.qk_dim),
        k_proj=_Zeros(module.kv_heads * module.qk_dim),
    )
    like = next(module.parameters())
    # The query at position p has distances p and p - 1 to keys 0 and 1.
    share = weights(
        probe,
        like.new_zeros(1, distance, module.embed_dim),
        like.new_zeros(1, 2, module.embed_dim),
        causal=True,
        query_offset=1,
    )
    steps = share[..., 0].log() - share[..., 1].log()
    return torch.nn.functional.pad(steps.cumsum(1), (1, 0))
