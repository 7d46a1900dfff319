"""timm's attention layers, computed by gnomon's operator."""

from __future__ import annotations

from typing import Any

import torch
from timm.layers.attention import Attention, AttentionRope
from timm.layers.pos_embed_sincos import apply_rot_embed_cat
from torch import Tensor

from gnomon.integrations._terms import SIMILARITY, attend
from gnomon.position import PairBias

OPERATOR = "integrations.replace_attention"


class GnomonAttention(Attention):
    """timm's Attention on gnomon's operator, with the same parameters and parameter names."""

    def forward(
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """Computes timm's attention for tokens x (B, L, C)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        return attended(self, x, q, k, v, None, attn_mask, is_causal)


class GnomonAttentionRope(AttentionRope):
    """timm's AttentionRope on gnomon's operator, with the same parameters and parameter names."""

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Computes timm's attention for tokens x (B, L, C)."""
        if self.qkv is not None:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        else:
            projections: Any = (self.q_proj, self.k_proj, self.v_proj)
            q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in projections)
        return attended(self, x, q, k, v, rope, attn_mask, is_causal)


#: Replacements for timm's classes.
CLASSES: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    Attention: GnomonAttention,
    AttentionRope: GnomonAttentionRope,
}


def attended(
    layer: Any,
    x: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rope: Tensor | None,
    mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """Computes a layer's output from q, k and v (B, L, H, D)."""
    q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    q, k = layer.q_norm(q), layer.k_norm(k)
    if rope is not None:
        learned = getattr(layer, SIMILARITY, None)
        if learned is not None and learned.height is not None:
            raise NotImplementedError(
                f"gnomon.{OPERATOR}: {type(layer).__name__} rotates all coordinates of its "
                f"queries and keys, including the height of {learned.module_spec!r}; use a "
                "similarity without a height, such as 'hyperbolic:model=ball' or 'laplacian'"
            )
        first = layer.num_prefix_tokens
        q, k = (
            torch.cat(
                [
                    heads[:, :, :first],
                    apply_rot_embed_cat(heads[:, :, first:], rope, half=layer.rotate_half),
                ],
                2,
            ).type_as(v)
            for heads in (q, k)
        )
    if mask is not None:
        mask = mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape)
        mask = mask.expand(*mask.shape[:2], q.shape[2], k.shape[2])
    is_bias = mask is not None and mask.dtype != torch.bool
    o = attend(
        OPERATOR,
        layer,
        q,
        k,
        v,
        [PairBias(mask.to(q.dtype))] if mask is not None and is_bias else [],
        {
            "causal": is_causal,
            "mask": None if is_bias else mask,
            "dropout": layer.attn_drop.p if layer.training else 0.0,
        },
    )
    o = layer.norm(o.transpose(1, 2).flatten(2))
    if layer.gate is not None:
        o = o * layer.gate(x).sigmoid()
    out: Tensor = layer.proj_drop(layer.proj(o))
    return out
