"""Attention modules with a configurable similarity and position.

Parameters have the same names in C++ (include/gnomon/torch/nn.h).
"""

from gnomon._checks import name_unknown_arguments
from gnomon._names import publish
from gnomon.nn import _encodings
from gnomon.nn._attention import Attention
from gnomon.nn._caches import KVCache, TokenCache
from gnomon.nn._encodings import *  # noqa: F403 -- its __all__ is written by `make facades`
from gnomon.nn._grids import resize_grid, resize_grid_table
from gnomon.nn._held_terms import LearnedValue
from gnomon.nn._lorentz import LorentzMultiheadAttention
from gnomon.nn._multihead_attention import MultiheadAttention
from gnomon.nn._token_encodings import TokenEncoding, TokenPosition, attention_position
from gnomon.nn._torch_multihead_attention import TorchMultiheadAttention
from gnomon.nn._transformer_layers import TransformerDecoderLayer, TransformerEncoderLayer

__all__ = [
    "Attention",
    "KVCache",
    "LearnedValue",
    "LorentzMultiheadAttention",
    "MultiheadAttention",
    "TokenCache",
    "TokenEncoding",
    "TokenPosition",
    "TorchMultiheadAttention",
    "TransformerDecoderLayer",
    "TransformerEncoderLayer",
    "attention_position",
    "resize_grid",
    "resize_grid_table",
]
__all__ += _encodings.__all__

publish(__name__, __all__)

_TORCH = "gnomon.nn.TorchMultiheadAttention accepts torch.nn.MultiheadAttention's arguments"
for _name in __all__:
    _member = globals()[_name]
    if isinstance(_member, type):
        name_unknown_arguments(
            _member, dict.fromkeys(("batch_first", "add_bias_kv", "add_zero_attn"), _TORCH)
        )
