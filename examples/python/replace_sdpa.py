"""Replaces scaled_dot_product_attention with gnomon.attention."""

import torch

import gnomon

q, k, v = torch.randn(3, 2, 8, 256, 64).unbind()  # each (batch, heads, length, head_dim)

# Instead of torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True):
o = gnomon.attention(q, k, v, causal=True)

expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
print(f"largest difference {(o - expected).abs().max():.2g}")
