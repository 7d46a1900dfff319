"""Attention layers of timm's Swin and EVA, computed by gnomon's operator."""

from __future__ import annotations

from typing import Any

import torch
from timm.models.eva import EvaAttention
from timm.models.swin_transformer import WindowAttention
from torch import Tensor

from gnomon.integrations._terms import attend
from gnomon.integrations._timm import OPERATOR, attended
from gnomon.position import GridBias


class GnomonWindowAttention(WindowAttention):
    """Swin's WindowAttention on gnomon's operator, with the same parameters and parameter names.

    The relative position table becomes a GridBias, so no bias array of window_area^2 entries is
    created.
    """

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Computes timm's attention for tokens x (B * windows, L, C)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        table = self.relative_position_bias_table.t()
        table = table.unflatten(1, [2 * length - 1 for length in self.window_size])
        if mask is not None:
            # The mask is 0 where a query attends to a key, and -100 or -inf elsewhere.
            seen = (mask == 0).unsqueeze(1)
            mask = seen.repeat(x.shape[0] // len(seen), 1, 1, 1)
        o = attend(
            OPERATOR,
            self,
            q,
            k,
            v,
            [GridBias.from_query_minus_key(table)],
            {"mask": mask, "dropout": self.attn_drop.p if self.training else 0.0},
        )
        out: Tensor = self.proj_drop(self.proj(o.transpose(1, 2).flatten(2)))
        return out


class GnomonEvaAttention(EvaAttention):
    """timm's EvaAttention on gnomon's operator, with the same parameters and parameter names."""

    def forward(
        self,
        x: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Computes timm's attention for tokens x (B, L, C)."""
        if self.qkv is None:
            projections: Any = (self.q_proj, self.k_proj, self.v_proj)
            q, k, v = (project(x).unflatten(-1, (self.num_heads, -1)) for project in projections)
        else:
            qkv = self.qkv(x)
            if self.q_bias is not None:
                qkv = qkv + torch.cat((self.q_bias, self.k_bias, self.v_bias)).to(qkv.dtype)
            q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        return attended(self, x, q, k, v, rope, attn_mask, is_causal)


#: Replacements for timm's classes.
CLASSES: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    WindowAttention: GnomonWindowAttention,
    EvaAttention: GnomonEvaAttention,
}
