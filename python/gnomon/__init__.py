"""Exact, linear-memory attention with any similarity and any position."""

import importlib
from types import ModuleType

from gnomon import (
    _flops,
    _lab,
    _library,
    _vmap,
    cones,
    distributed,
    lorentz,
    nn,
    position,
    similarity,
)
from gnomon._attention import attention, attention_weights
from gnomon._catalogue import catalogue, load_terms
from gnomon._encodings import (
    alibi_slopes,
    grid_sinusoid,
    hype_augment,
    sinusoid,
    t5_bucket,
)
from gnomon._graph_attention import csr, graph_attention
from gnomon._linear_attention import favor_projection, linear_attention
from gnomon._sdpa import scaled_dot_product_attention
from gnomon._varlen import varlen_attention

_flops.register()
_vmap.register()

__version__ = _library.VERSION


def __getattr__(name: str) -> ModuleType:
    """Imports a lab package, such as gnomon.report, on first use."""
    if name == "lab" or name in _lab.NAMES:
        return importlib.import_module(f"gnomon.{name}")
    raise AttributeError(f"module 'gnomon' has no attribute {name!r}")


__all__ = [
    "alibi_slopes",
    "attention",
    "attention_weights",
    "catalogue",
    "cones",
    "csr",
    "distributed",
    "favor_projection",
    "graph_attention",
    "grid_sinusoid",
    "hype_augment",
    "linear_attention",
    "load_terms",
    "lorentz",
    "nn",
    "position",
    "scaled_dot_product_attention",
    "similarity",
    "sinusoid",
    "t5_bucket",
    "varlen_attention",
]
