"""Replaces the attention of models whose bias arrays can be expressed as position terms.

A bias that depends only on the offset becomes a table, so no L x L array is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
import transformers
from torch import Tensor
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.deberta_v2.modeling_deberta_v2 import (
    DebertaV2Attention,
    DebertaV2Encoder,
)
from transformers.models.mpt.modeling_mpt import MptAttention, MptBlock
from transformers.models.mt5.modeling_mt5 import MT5Attention
from transformers.models.sew_d.modeling_sew_d import SEWDAttention, SEWDTransformerEncoder
from transformers.models.swin.modeling_swin import SwinAttention, SwinLayer
from transformers.models.t5.modeling_t5 import T5Attention

from gnomon._encodings import alibi_slopes
from gnomon.integrations.transformers._interface import (
    attend,
    documents_of,
    extra_arguments,
    refusal,
    refuse,
    refuse_extra,
)
from gnomon.integrations.transformers._masks import Mask, given_or_plain
from gnomon.nn._heads import split_heads
from gnomon.position import T5, ALiBi, Disentangled, GridBias, KeyBias, PairBias, Position

#: The value of attn_implementation that selects gnomon.
NAME = "gnomon"
#: Arguments that are not checked here: they do not affect the output, or refuse() checks them.
_KNOWN = ("self", "use_cache", "output_attentions", "head_mask")
#: Classes whose forward method is replaced, so that they need not be intercepted.
ADAPTED = (T5Attention, MT5Attention, BloomAttention, MptAttention, SwinAttention)


def replace_forwards() -> None:
    """Replaces methods of adapted classes; models that do not use gnomon keep the originals."""
    for layer in (T5Attention, MT5Attention):
        _replace(layer, "forward", _t5_forward, _has_our_config)
    _replace(BloomAttention, "forward", _bloom_forward, _has_our_mask)
    _replace(MptAttention, "forward", _mpt_forward, _has_our_mask)
    _replace(MptBlock, "forward", _mpt_block_forward, _asks_for_weights)
    for layer in (DebertaV2Attention, SEWDAttention):
        _replace(layer, "forward", _deberta_forward, _is_disentangled)
    for encoder in (DebertaV2Encoder, SEWDTransformerEncoder):
        _replace(encoder, "get_rel_pos", _no_distances, _has_disentangled_layers)
    _replace(SwinAttention, "forward", _swin_forward, _has_our_config)
    _replace(SwinLayer, "get_attn_mask", _swin_segments, _has_our_config)


def _replace(
    layer: type[torch.nn.Module],
    method: str,
    ours: Callable[..., Any],
    is_ours: Callable[[torch.nn.Module, Mapping[str, Any]], bool],
) -> None:
    theirs = getattr(layer, method)
    extra = {} if ours is _mpt_block_forward else extra_arguments(theirs, ours, _KNOWN)

    @functools.wraps(theirs)
    def chosen(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(self, kwargs):
            return theirs(self, *args, **kwargs)
        # Otherwise, **kwargs would silently ignore arguments that a newer release adds.
        refuse_extra(self, kwargs, extra)
        return ours(self, *args, **kwargs)

    setattr(layer, method, chosen)


def _has_our_config(layer: torch.nn.Module, _kwargs: Mapping[str, Any]) -> bool:
    holder: Any = layer.attention if isinstance(layer, SwinLayer) else layer
    return bool(holder.config._attn_implementation == NAME)


def _has_our_mask(_layer: torch.nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether the mask is gnomon's; BLOOM and MPT layers have no configuration to check."""
    return isinstance(kwargs.get("attention_mask"), Mask)


def _asks_for_weights(layer: torch.nn.Module, kwargs: Mapping[str, Any]) -> bool:
    return _has_our_mask(layer, kwargs) and bool(kwargs.get("output_attentions"))


def _mpt_block_forward(_layer: Any, *_args: object, **_kwargs: object) -> NoReturn:
    # The block raises the error, because its attention layer does not receive output_attentions.
    raise refusal("output_attentions")


def _one_cache(cache: Any, past_key_values: Any) -> Any:
    """Returns the key-value cache, whose argument was renamed in transformers 5.24."""
    return past_key_values if cache is None else cache


def _t5_forward(
    layer: Any,
    hidden_states: Tensor,
    mask: Mask | Tensor | None = None,
    key_value_states: Tensor | None = None,
    position_bias: Position | Tensor | None = None,
    cache: Any = None,
    past_key_values: Any = None,
    **kwargs: object,
) -> tuple[Tensor, Position | None, None]:
    """Computes T5 attention; the first layer creates the bias as a term for all later layers."""
    whole = _one_cache(cache, past_key_values)
    refuse({**kwargs, "cache": whole})
    q = split_heads(layer.q(hidden_states), layer.n_heads)
    crosses = key_value_states is not None
    cache, is_kept = whole, False
    if isinstance(whole, transformers.EncoderDecoderCache):
        is_kept = crosses and bool(whole.is_updated.get(layer.layer_idx))
        cache = whole.cross_attention_cache if crosses else whole.self_attention_cache
    if is_kept:
        k, v = cache.layers[layer.layer_idx].keys, cache.layers[layer.layer_idx].values
    else:
        source = key_value_states if crosses else hidden_states
        k, v = (split_heads(part(source), layer.n_heads) for part in (layer.k, layer.v))
        if cache is not None:
            k, v = cache.update(k, v, layer.layer_idx)
            if cache is not whole and crosses:
                whole.is_updated[layer.layer_idx] = True
    if layer.has_relative_attention_bias:
        position_bias = T5(
            layer.relative_attention_bias.weight,
            bidirectional=not layer.is_decoder,
            max_distance=layer.relative_attention_max_distance,
        )
    elif isinstance(position_bias, Tensor):
        position_bias = PairBias(position_bias.to(q.dtype))
    o = attend(
        layer,
        q,
        k,
        v,
        given_or_plain(mask, q, k, layer.is_causal),
        documents=documents_of(kwargs, q, k),
        position=position_bias,
        scale=layer.scaling,
        dropout=layer.dropout if layer.training else 0.0,
    )
    return layer.o(o.flatten(2)), position_bias, None


def _bloom_forward(
    layer: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Mask,
    layer_past: Any = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Computes BLOOM attention; its bias, slope * column, is ALiBi plus a constant per query."""
    refuse({**kwargs, "cache": layer_past})
    qkv = split_heads(layer.query_key_value(hidden_states), layer.num_heads)
    q, k, v = qkv.chunk(3, -1)
    if layer_past is not None:
        k, v = layer_past.update(k, v, layer.layer_idx)
    position: Position
    if attention_mask.key_segments is None:
        position = ALiBi(_slopes_for(q, alibi_slopes(layer.num_heads)))
    else:
        # The model's distances skip padding between tokens, so ALiBi does not apply.
        position = KeyBias(alibi.view(-1, layer.num_heads, alibi.shape[-1]).to(q.dtype))
    o = attend(
        layer,
        q,
        k,
        v,
        attention_mask,
        documents=documents_of(kwargs, q, k),
        position=position,
        scale=layer.inv_norm_factor,
        dropout=layer.attention_dropout.p if layer.training else 0.0,
    )
    out = torch.nn.functional.dropout(
        layer.dense(o.flatten(2)), layer.hidden_dropout, layer.training
    )
    return residual + out, None


def _is_disentangled(layer: Any, kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a term can represent the scores; otherwise, the layer is intercepted."""
    part = layer.self
    if layer.config._attn_implementation != NAME or not part.relative_attention:
        return False
    # A term cannot represent distances and query states that the caller passes.
    if any(kwargs.get(name) is not None for name in ("relative_pos", "query_states")):
        return False
    if not {"c2p", "p2c"} <= {*part.pos_att_type}:
        return False
    span = part.position_buckets
    return span <= 0 or (span % 2 == 0 and part.max_relative_positions - 1 > span // 2)


def _has_disentangled_layers(encoder: Any, kwargs: Mapping[str, Any]) -> bool:
    return any(_is_disentangled(layer.attention, kwargs) for layer in encoder.layer)


def _no_distances(
    _encoder: Any,
    hidden_states: Tensor,
    query_states: Tensor | None = None,
    relative_pos: Tensor | None = None,
) -> Tensor | None:
    """Returns relative_pos, which may be None; layers that need distances then compute them."""
    return relative_pos


def _has_disentangled_kernels(q: Tensor) -> bool:
    """Returns whether q's device has kernels for the term; otherwise, its scores are an array."""
    return not q.is_cuda


def _deberta_forward(
    layer: Any,
    hidden_states: Tensor,
    attention_mask: Tensor,
    output_attentions: bool = False,
    query_states: Tensor | None = None,
    relative_pos: Tensor | None = None,
    rel_embeddings: Tensor | None = None,
    **kwargs: object,
) -> Any:
    """Computes DeBERTa attention; the term's tables are the projected distance embeddings."""
    refuse({**kwargs, "output_attentions": output_attentions})
    # _is_disentangled only sees keyword arguments, so reject positional ones here.
    if query_states is not None or relative_pos is not None:
        raise TypeError(
            f"{type(layer).__name__}: expected query_states and relative_pos as keyword arguments"
        )
    part = layer.self
    assert rel_embeddings is not None

    def heads(project: torch.nn.Module, tokens: Tensor) -> Tensor:
        return split_heads(project(tokens), part.num_attention_heads)

    q, k, v = (
        heads(project, hidden_states)
        for project in (part.query_proj, part.key_proj, part.value_proj)
    )
    embeddings = part.pos_dropout(rel_embeddings[: 2 * part.pos_ebd_size])
    position: Position
    if _has_disentangled_kernels(q):
        shares = part.share_att_key
        keys, queries = (
            heads(project, embeddings[None])[0]
            for project in (
                part.key_proj if shares else part.pos_key_proj,
                part.query_proj if shares else part.pos_query_proj,
            )
        )
        distance = part.max_relative_positions if part.position_buckets > 0 else 0
        position = Disentangled(keys, queries, max_distance=distance)
    else:
        scores = part.disentangled_attention_bias(
            q.flatten(0, 1), k.flatten(0, 1), None, embeddings, 3
        )
        position = PairBias(scores.view(*q.shape[:3], k.shape[2]))
    dropout = part.dropout
    o = attend(
        part,
        q,
        k,
        v,
        attention_mask.bool(),
        position=position,
        scale=(3 * q.shape[-1]) ** -0.5,
        dropout=getattr(dropout, "p", getattr(dropout, "drop_prob", 0.0)) if part.training else 0.0,
    )
    out = layer.output(o.flatten(2), hidden_states)
    return out if isinstance(layer, SEWDAttention) else (out, None)


def _slopes_for(q: Tensor, slopes: Tensor) -> Tensor:
    return slopes.to(q.device, torch.promote_types(q.dtype, torch.float32))


def _mpt_forward(
    layer: Any,
    hidden_states: Tensor,
    position_bias: Tensor | None,
    cache: Any = None,
    attention_mask: Mask | None = None,
    past_key_values: Any = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Computes MPT attention; its biases are slope * (column - (n - 1)), of shape (H, 1, n)."""
    cache = _one_cache(cache, past_key_values)
    refuse({**kwargs, "cache": cache})
    qkv = layer.Wqkv(hidden_states)
    if layer.clip_qkv:
        qkv = qkv.clamp(-layer.clip_qkv, layer.clip_qkv)
    q, k, v = (split_heads(part, layer.n_heads) for part in qkv.chunk(3, -1))
    if cache is not None:
        k, v = cache.update(k, v, layer.layer_idx)
    position = None
    if position_bias is not None and position_bias.shape[2] > 1:
        position = ALiBi(_slopes_for(q, -position_bias[:, 0, -2]))
    o = attend(
        layer,
        q,
        k,
        v,
        given_or_plain(attention_mask, q, k, causal=True),
        documents=documents_of(kwargs, q, k),
        position=position,
        scale=layer.softmax_scale,
        dropout=layer.attn_dropout_p if layer.training else 0.0,
    )
    return layer.out_proj(o.flatten(2)), None


def _swin_segments(
    layer: Any, height: int, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """Returns segments (windows, tokens) that separate image regions joined by the cyclic shift."""
    if layer.shift_size <= 0:
        return None
    size = layer.window_size

    def bands(length: int) -> Tensor:
        places = torch.arange(length, device=device)
        return (places >= length - size).long() + (places >= length - layer.shift_size).long()

    image = 3 * bands(height)[:, None] + bands(width)
    windows = image.view(height // size, size, width // size, size).transpose(1, 2)
    return windows.reshape(-1, size * size)


def _swin_forward(
    layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: object
) -> tuple[Tensor, None]:
    """Computes Swin attention; attention_mask contains the result of _swin_segments.

    hidden_states is (B * windows, tokens, channels).
    """
    refuse(kwargs)
    windows, tokens, _ = hidden_states.shape
    q, k, v = (
        split_heads(part(hidden_states), layer.num_attention_heads)
        for part in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    mask = Mask((windows, 1, tokens, tokens))
    if attention_mask is not None:
        segments = attention_mask.repeat(windows // attention_mask.shape[0], 1)
        mask = replace(mask, query_segments=segments, key_segments=segments)
    height, width = layer.relative_position_bias.window_size
    table = layer.relative_position_bias.relative_position_bias_table
    # Swin's table is indexed by query - key. GridBias is indexed by key - query.
    table = table.view(2 * height - 1, 2 * width - 1, -1).permute(2, 0, 1).flip(1, 2)
    o = attend(
        layer,
        q,
        k,
        v,
        mask,
        position=GridBias(table),
        scale=layer.scaling,
        dropout=layer.attention_dropout if layer.training else 0.0,
    )
    return layer.o_proj(o.flatten(2)), None
