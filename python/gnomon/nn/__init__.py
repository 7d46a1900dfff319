"""Modules. Positions and similarities are terms or specifications (include/gnomon/catalogue.h).

The parameters have the same names as in C++ (include/gnomon/torch/nn.h).
"""

from gnomon._names import publish
from gnomon.nn._caches import KVCache, TokenCache
from gnomon.nn._grids import resize_grid, resize_grid_table
from gnomon.nn._lorentz import LorentzMultiheadAttention
from gnomon.nn._multihead_attention import LearnedValue, MultiheadAttention
from gnomon.nn._token_encodings import (
    CAPE,
    Convolutional,
    LearnedAbsolute,
    Sinusoidal,
    TokenEncoding,
    TokenPosition,
    attention_position,
)
from gnomon.nn._transformer_layers import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "CAPE",
    "Convolutional",
    "KVCache",
    "LearnedAbsolute",
    "LearnedValue",
    "LorentzMultiheadAttention",
    "MultiheadAttention",
    "Sinusoidal",
    "TokenCache",
    "TokenEncoding",
    "TokenPosition",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "attention_position",
    "resize_grid",
    "resize_grid_table",
]

publish(__name__, __all__)
