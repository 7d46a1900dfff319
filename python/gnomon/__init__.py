"""Attention with any similarity and any position, exact and linear in memory."""

from gnomon import _library, cones, nn, position, similarity
from gnomon._attention import attention, graph_attention, linear_attention
from gnomon._encodings import (
    alibi_slopes,
    grid_sinusoid,
    hype_augment,
    sinusoid,
    t5_bucket,
)

__version__ = _library.VERSION

__all__ = [
    "alibi_slopes",
    "attention",
    "cones",
    "graph_attention",
    "grid_sinusoid",
    "hype_augment",
    "linear_attention",
    "nn",
    "position",
    "similarity",
    "sinusoid",
    "t5_bucket",
]
