"""gnomon as an attention implementation of Hugging Face's transformers.

    from gnomon.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="gnomon")

No L x L array is made, neither of masks nor of biases: transformers' masks become gnomon's causal
flag, window, starts and lengths of keys, segments and offset. It serves the models that attend
through transformers' AttentionInterface and leave their masks to transformers (Llama, Mistral,
Qwen, GPT-2, BERT, ViT, Bart and others), with rotary positions as these models apply them. In T5
and MT5 (learned buckets), BLOOM and MPT (ALiBi) and Swin (tables over shifted windows) the
attention itself is replaced, where a model's implementation is "gnomon". Dropout of weights is
honoured in training.

Refused, with NotImplementedError: output_attentions, soft caps (Gemma 2), attention sinks
(GPT-OSS), masks as arrays of four dimensions, masks by functions of the caller, biases of other
models than those above (BEiT, Swin v2, UMT5), paged caches. Masks are read from the values of
padding, so that torch.compile breaks its graph there. A query that sees no key, padding on the
left, gives 0, where the eager implementation gives the mean of all values.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor

from gnomon._attention import Window, attention
from gnomon._catalogue import components_of
from gnomon._checks import wrong_type
from gnomon._encodings import alibi_slopes
from gnomon._library import ops
from gnomon._terms import to_spec
from gnomon.position import T5, ALiBi, GridBias, Position
from gnomon.similarity import Similarity, Specified

try:
    import transformers
    from transformers import (
        AttentionInterface,
        AttentionMaskInterface,
        PreTrainedModel,
        masking_utils,
    )
    from transformers.models.bloom.modeling_bloom import BloomAttention, BloomPreTrainedModel
    from transformers.models.mpt.modeling_mpt import MptAttention, MptBlock, MptPreTrainedModel
    from transformers.models.mt5.modeling_mt5 import MT5Attention
    from transformers.models.swin.modeling_swin import SwinAttention, SwinLayer
    from transformers.models.t5.modeling_t5 import T5Attention
    from transformers.utils.output_capturing import _active_collector
except ImportError as error:
    raise ImportError(
        "gnomon.integrations.transformers: the package transformers, 5.23 or newer, is needed: "
        "pip install 'transformers>=5.23'"
    ) from error

# The attention of older models has other arguments.
if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < (5, 23):
    raise ImportError(
        f"gnomon.integrations.transformers: transformers is {transformers.__version__}; "
        "expected 5.23 or newer"
    )

__all__ = ["NAME", "register", "use_gnomon", "with_cone_attention"]

#: The name of the implementation, for attn_implementation.
NAME = "gnomon"

_OPERATOR = "gnomon.integrations.transformers"
#: The similarity of an attention module that has another than the dot product.
_SIMILARITY = "gnomon_similarity"
#: The segment of keys that no query sees.
_HIDDEN = -(2**31)


def register() -> None:
    """Makes "gnomon" a value of attn_implementation; calling it again does nothing.

    Sets the forward of T5Attention, MT5Attention, BloomAttention, MptAttention, MptBlock and
    SwinAttention and SwinLayer.get_attn_mask to functions that call the former ones unless the
    model's implementation is "gnomon".
    """
    if NAME in AttentionInterface().valid_keys():
        return
    AttentionInterface.register(NAME, _attention_forward)
    AttentionMaskInterface.register(NAME, _to_mask)
    for layer in (T5Attention, MT5Attention):
        _replace(layer, "forward", _t5_forward, _has_our_config)
    _replace(BloomAttention, "forward", _bloom_forward, _has_our_mask)
    _replace(MptAttention, "forward", _mpt_forward, _has_our_mask)
    _replace(MptBlock, "forward", _mpt_block_forward, _asks_for_weights)
    _replace(SwinAttention, "forward", _swin_forward, _has_our_config)
    _replace(SwinLayer, "get_attn_mask", _swin_segments, _has_our_config)


def use_gnomon(model: PreTrainedModel) -> PreTrainedModel:
    """Calls register() and makes a model that exists use gnomon; returns it.

    Raises:
        TypeError: it is no transformers.PreTrainedModel.
        NotImplementedError: it, or a model in it, neither attends through transformers'
            AttentionInterface nor is one of those that register() names.
    """
    if not isinstance(model, PreTrainedModel):
        raise wrong_type(
            "integrations.transformers", "model", model, "a transformers.PreTrainedModel"
        )
    register()
    for part in model.modules():
        if not isinstance(part, PreTrainedModel):
            continue
        if isinstance(part, (BloomPreTrainedModel, MptPreTrainedModel)):
            # They do not use the interface, and would refuse a name of it.
            part.config._attn_implementation = NAME
        else:
            part.set_attn_implementation(NAME)
        if part.config._attn_implementation != NAME:
            raise NotImplementedError(
                f"{_OPERATOR}: {type(part).__name__} does not attend through transformers' "
                "AttentionInterface"
            )
    return model


def with_cone_attention(model: PreTrainedModel, similarity: str = "penumbral") -> PreTrainedModel:
    """Calls use_gnomon and swaps the similarity of all attention layers; returns the model.

    Each attention module gets a submodule "gnomon_similarity" with the parameter "gamma_theta" (or
    "beta_theta") (H,) and the buffer "gamma_start", as in gnomon.nn.MultiheadAttention: gamma =
    gamma_start * exp(5 theta), and theta starts at 0, where the logits of N(0, 1) tokens have a
    spread of 1. They train, and are saved with the model; before loading them, call this on a model
    of the same configuration. Calling it again starts the similarity anew. The model's own scale of
    the dot product has no meaning then.

    Rotary positions leave the last coordinate of a head, the height of cones, and the coordinate
    that it is paired with as they are, as gnomon.position.RoPE does.

    Args:
        model: of transformers, one that use_gnomon takes, with two coordinates a head or more.
        similarity: a specification of the catalogue, "penumbral:score=height2".

    Raises:
        ValueError: the specification, or a width of the heads that the similarity does not take.
        NotImplementedError: as use_gnomon, or the model has no attention layer that is known, or
            rotates in another layout than by halves all of its coordinates.
    """
    if not isinstance(similarity, str):
        raise wrong_type(
            "integrations.transformers", "similarity", similarity, "a specification, a string"
        )
    use_gnomon(model)
    layers = [layer for layer in model.modules() if _attends(layer)]
    if not layers:
        raise NotImplementedError(
            f"{_OPERATOR}: {type(model).__name__} has no attention layer that is known"
        )
    for layer in layers:
        learned = _LearnedSimilarity(similarity, *_shape_of_heads(layer))
        if not hasattr(layer, _SIMILARITY):
            names = tuple(inspect.signature(layer.forward).parameters)
            layer.register_forward_pre_hook(
                functools.partial(_keep_heights, names), with_kwargs=True
            )
        setattr(layer, _SIMILARITY, learned.to(model.device, model.dtype))
    return model


class _LearnedSimilarity(torch.nn.Module):
    """A similarity with a factor for each head; parameters as in gnomon.nn.MultiheadAttention."""

    def __init__(self, spec: str, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self._heads = num_heads
        names, starts, learned = ops.module_tensors(
            spec, "none", num_heads, head_dim, head_dim, 1, []
        )
        (component,) = components_of(spec)
        per_head = [p["name"] for p in component.entry["parameters"] if p["kind"] == "per_head"]
        #: The factor of the scores that is held here, learned or not.
        self._factor = next((name for name in per_head if f"{name}_start" in names), "")
        # To the operator, what is held is a tensor.
        options = dict(component.options)
        if self._factor:
            options[self._factor] = "tensor"
        self.spec = to_spec(component.name, **options)
        for name, start, is_learned in zip(names, starts, learned, strict=True):
            value = start.to(torch.get_default_dtype())
            if is_learned:
                self.register_parameter(name, torch.nn.Parameter(value))
            else:
                self.register_buffer(name, value)
        #: Whether the last coordinate is a height, which a rotation would mix with another.
        self.has_height: bool = ops.has_height(spec)
        #: Whether the model's scale applies.
        self.takes_scale: bool = component.entry["takes_scale"]

    def forward(self) -> Similarity:
        """The similarity of the present parameters."""
        if not self._factor:
            return Specified(self.spec)
        factor = getattr(self, f"{self._factor}_start").expand(self._heads)
        if (theta := getattr(self, f"{self._factor}_theta", None)) is not None:
            factor = factor * (5 * theta).exp()
        return Specified(self.spec, (factor,))

    def extra_repr(self) -> str:
        """The specification, for print()."""
        return repr(self.spec)


def _attends(layer: torch.nn.Module) -> bool:
    """Whether it is a module that calls the operator, not one of those around it."""
    if isinstance(layer, (BloomAttention, MptAttention)):
        return True
    return "Attention" in type(layer).__name__ and hasattr(layer, "is_causal")


def _shape_of_heads(layer: torch.nn.Module) -> tuple[int, int]:
    """The number of query heads and their width."""
    config = getattr(layer, "config", None)

    def find(*names: str) -> int | None:
        for holder in (layer, config):
            for name in names:
                value = getattr(holder, name, None)
                if isinstance(value, int):
                    return value
        return None

    heads = find("num_attention_heads", "num_heads", "n_heads")
    width = find("head_dim", "attention_head_size", "key_value_proj_dim", "head_size")
    if heads is None or width is None:
        raise NotImplementedError(
            f"{_OPERATOR}: the heads of {type(layer).__name__} are not known: it has no "
            f"{'num_attention_heads' if heads is None else 'head_dim'}"
        )
    return heads, width


def _keep_heights(
    names: tuple[str, ...], layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replaces cos and sin (B, L, D) by those that leave the last coordinate as it is."""
    kwargs = dict(zip(names, args, strict=False)) | kwargs
    angles = kwargs.get("position_embeddings")
    if angles is None or not getattr(layer, _SIMILARITY).has_height:
        return (), kwargs
    cos, sin = angles
    rotated = cos.shape[-1]
    if rotated < _shape_of_heads(layer)[1]:
        return (), kwargs
    if not torch.equal(cos[..., : rotated // 2], cos[..., rotated // 2 :]):
        raise NotImplementedError(
            f"{_OPERATOR}: {type(layer).__name__} does not rotate coordinates i and i + D / 2 "
            "together, and which one is paired with the height is not known"
        )
    pair = [rotated // 2 - 1, rotated - 1]
    cos, sin = cos.clone(), sin.clone()
    cos[..., pair], sin[..., pair] = 1, 0
    return (), kwargs | {"position_embeddings": (cos, sin)}


# Masks.


@dataclass(frozen=True, eq=False)
class _Mask:
    """A mask as gnomon's arguments, in the place of transformers' array (B, 1, Lq, Lk)."""

    shape: tuple[int, int, int, int]
    query_offset: int = 0
    causal: bool = False
    window: Window = (None, None)
    key_starts: Tensor | None = None
    key_lengths: Tensor | None = None
    query_segments: Tensor | None = None
    key_segments: Tensor | None = None

    #: With shape, what transformers asks of a mask that it has made itself before (generate()).
    ndim: ClassVar[int] = 4

    def to(self, *_args: object, **_kwargs: object) -> _Mask:
        """Itself: MPT asks for booleans."""
        return self

    def contiguous(self) -> _Mask:
        """Itself, for generate() with static caches."""
        return self

    def __getitem__(self, _index: object) -> NoReturn:
        raise _array_needed()

    @classmethod
    def __torch_function__(
        cls, _function: object, _types: object, _args: object = (), _kwargs: object = None
    ) -> NoReturn:
        raise _array_needed()


def _array_needed() -> NotImplementedError:
    return NotImplementedError(
        f"{_OPERATOR}: this model computes with its mask as an array, and gnomon makes none"
    )


@dataclass(frozen=True, eq=False)
class _Pattern:
    """What transformers' functions of (batch, head, query, key) say."""

    causal: bool = False
    left: int | None = None
    right: int | None = None
    segments: Tensor | None = None
    chunk: int | None = None
    chunk_starts: Tensor | None = None

    def within(self, left: int, right: int | None) -> _Pattern:
        """Narrowed to a window."""
        narrowed = left if self.left is None else min(left, self.left)
        if right is not None and self.right is not None:
            right = min(right, self.right)
        return replace(self, left=narrowed, right=self.right if right is None else right)


def _read(function: Callable[..., Any], pattern: _Pattern) -> _Pattern:
    """Adds what a function of transformers' masking_utils says.

    They are closures, and what they close over says what they do; a function of the caller says
    nothing but its values, L x L of them.
    """
    if function is masking_utils.causal_mask_function:
        return replace(pattern, causal=True)
    if function is masking_utils.bidirectional_mask_function:
        return pattern
    name = getattr(function, "__qualname__", repr(function)).split(".")[0]
    if getattr(function, "__module__", None) == masking_utils.__name__:
        cells = function.__closure__ or ()
        held = dict(
            zip(function.__code__.co_freevars, (cell.cell_contents for cell in cells), strict=True)
        )
        if name == "and_masks":
            for part in held["mask_functions"]:
                pattern = _read(part, pattern)
            return pattern
        if name == "sliding_window_overlay":
            return pattern.within(held["sliding_window"] - 1, None)
        if name == "sliding_window_bidirectional_overlay":
            return pattern.within(held["sliding_window"], held["sliding_window"])
        if name == "packed_sequence_mask_function":
            return replace(pattern, segments=held["packed_sequence_mask"])
        if name == "remap_positions_for_packed_sequence":
            # Positions count on within a segment, so that differences stay what they are.
            inner = _read(held["mask_function"], _Pattern())
            if inner.chunk is None:
                return _read(held["mask_function"], pattern)
            name = "chunks of packed sequences"
        if name == "chunked_overlay":
            return replace(pattern, chunk=held["chunk_size"], chunk_starts=held["left_padding"])
    raise NotImplementedError(
        f"{_OPERATOR}: masks by {name} are not supported; expected causal, bidirectional, sliding, "
        "chunked, packed or padded ones"
    )


def _to_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int | Tensor = 0,
    mask_function: Callable[..., Any] = masking_utils.causal_mask_function,
    attention_mask: Tensor | _Mask | None = None,
    **_kwargs: object,
) -> _Mask:
    """The mask function that transformers calls, once for a forward and a kind of layer."""
    if isinstance(attention_mask, _Mask):
        return attention_mask
    # Static caches count in tensors.
    first_query, first_key = int(q_offset), int(kv_offset)
    pattern = _read(mask_function, _Pattern())
    mask = _Mask(
        (batch_size, 1, q_length, kv_length),
        query_offset=first_query - first_key,
        causal=pattern.causal,
        window=(pattern.left, pattern.right),
    )
    if pattern.segments is not None:
        mask = replace(mask, query_segments=pattern.segments, key_segments=pattern.segments)
    if pattern.chunk is not None and pattern.chunk_starts is not None:
        starts = pattern.chunk_starts[:, None]
        places = torch.arange(
            min(first_query, first_key),
            max(first_query + q_length, first_key + kv_length),
            device=starts.device,
        )
        chunks = (places - starts).div(pattern.chunk, rounding_mode="floor")
        chunks = chunks.expand(batch_size, -1)
        query, key = first_query - int(places[0]), first_key - int(places[0])
        mask = replace(
            mask,
            query_segments=chunks[:, query : query + q_length],
            key_segments=chunks[:, key : key + kv_length],
        )
    if attention_mask is None:
        return mask
    visible = attention_mask[:, first_key : first_key + kv_length].bool()
    visible = torch.nn.functional.pad(visible, (0, kv_length - visible.shape[1]))
    return _without_padding(mask, visible)


def _without_padding(mask: _Mask, visible: Tensor) -> _Mask:
    """Narrowed to the keys that are visible (B, Lk)."""
    count = visible.sum(1)
    length = visible.shape[1]
    if int(count.min()) == length:
        return mask
    starts = visible.int().argmax(1)
    ends = torch.where(count > 0, length - visible.int().flip(1).argmax(1), 0)
    if torch.equal(ends - starts, count):
        return replace(mask, key_starts=starts, key_lengths=ends)
    batch, _, queries, keys = mask.shape
    query_segments, key_segments = mask.query_segments, mask.key_segments
    if query_segments is None or key_segments is None:
        query_segments, key_segments = (
            torch.zeros(batch, n, dtype=torch.int64, device=visible.device) for n in (queries, keys)
        )
    return replace(
        mask,
        query_segments=query_segments,
        key_segments=key_segments.masked_fill(~visible, _HIDDEN),
    )


# Attention.

_REFUSED = {
    "output_attentions": "weights as an array (output_attentions)",
    "softcap": "soft caps of the scores (softcap)",
    "s_aux": "attention sinks (s_aux)",
    "position_bias": "biases as an array (position_bias)",
    "head_mask": "masks of heads (head_mask)",
    "cache": "paged caches (cache)",
}


def _refusal(argument: str) -> NotImplementedError:
    return NotImplementedError(f"{_OPERATOR}: not supported: {_REFUSED[argument]}")


def _refuse(arguments: Mapping[str, object]) -> None:
    for name in _REFUSED:
        value = arguments.get(name)
        if value is not None and value is not False:
            raise _refusal(name)


def _attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: _Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The function of transformers' AttentionInterface; returns (B, Lq, H, Dv)."""
    _refuse(kwargs)
    # Some models (GPT-2) do not tell their attention that its weights are collected.
    if any("attentions" in name for name in _active_collector.get() or ()):
        raise _refusal("output_attentions")
    if attention_mask is None and kwargs.get("sliding_window") is not None:
        raise NotImplementedError(f"{_OPERATOR}: a window without a mask is not supported")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask = _given_or_plain(attention_mask, query, key, bool(causal))
    return _attend(module, query, key, value, mask, scale=scaling, dropout=dropout), None


def _given_or_plain(mask: _Mask | Tensor | None, q: Tensor, k: Tensor, causal: bool) -> _Mask:
    if isinstance(mask, _Mask):
        return mask
    if mask is not None:
        raise NotImplementedError(
            f"{_OPERATOR}: a mask as an array, here of shape {list(mask.shape)}, is not supported; "
            "expected attention_mask (batch, length), or position_ids of packed sequences"
        )
    queries, keys = q.shape[2], k.shape[2]
    # As transformers has it: a single query is the last one, and sees all.
    causal = causal and queries > 1
    if causal and queries != keys:
        raise NotImplementedError(
            f"{_OPERATOR}: {queries} causal queries of {keys} keys without a mask do not say "
            "where they stand"
        )
    return _Mask((q.shape[0], 1, queries, keys), causal=causal)


def _attend(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: _Mask,
    *,
    position: Position | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    if mask.shape[2:] != (q.shape[2], k.shape[2]):
        raise ValueError(
            f"{_OPERATOR}: the mask is of {mask.shape[2]} queries and {mask.shape[3]} keys; "
            f"expected {q.shape[2]} and {k.shape[2]}"
        )
    learned = getattr(module, _SIMILARITY, None)
    o = attention(
        q,
        k,
        v,
        similarity=None if learned is None else learned(),
        position=position,
        causal=mask.causal,
        window=mask.window,
        key_starts=mask.key_starts,
        key_lengths=mask.key_lengths,
        query_segments=mask.query_segments,
        key_segments=mask.key_segments,
        query_offset=mask.query_offset,
        scale=scale if learned is None or learned.takes_scale else None,
        dropout=dropout,
    )
    return o.transpose(1, 2)


# Models that do not attend through the interface, or hand it an array of biases.


def _replace(
    layer: type[torch.nn.Module],
    method: str,
    ours: Callable[..., Any],
    is_ours: Callable[[torch.nn.Module, Mapping[str, Any]], bool],
) -> None:
    theirs = getattr(layer, method)

    @functools.wraps(theirs)
    def chosen(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (ours if is_ours(self, kwargs) else theirs)(self, *args, **kwargs)

    setattr(layer, method, chosen)


def _has_our_config(layer: torch.nn.Module, _kwargs: Mapping[str, Any]) -> bool:
    holder: Any = layer.attention if isinstance(layer, SwinLayer) else layer
    return bool(holder.config._attn_implementation == NAME)


def _has_our_mask(_layer: torch.nn.Module, kwargs: Mapping[str, Any]) -> bool:
    """Of modules that have no configuration."""
    return isinstance(kwargs.get("attention_mask"), _Mask)


def _asks_for_weights(layer: torch.nn.Module, kwargs: Mapping[str, Any]) -> bool:
    return _has_our_mask(layer, kwargs) and bool(kwargs.get("output_attentions"))


def _mpt_block_forward(_layer: Any, *_args: object, **_kwargs: object) -> NoReturn:
    # Its attention is not told that weights are wanted.
    raise _refusal("output_attentions")


def _t5_forward(
    layer: Any,
    hidden_states: Tensor,
    mask: _Mask | Tensor | None = None,
    key_value_states: Tensor | None = None,
    position_bias: T5 | Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: object,
) -> tuple[Tensor, T5 | None, None]:
    """The first layer makes the bias and hands it on, as a term instead of an array."""
    _refuse(kwargs)
    if isinstance(position_bias, Tensor):
        raise _refusal("position_bias")
    heads = (layer.n_heads, layer.key_value_proj_dim)
    q = layer.q(hidden_states).unflatten(2, heads).transpose(1, 2)
    crosses = key_value_states is not None
    cache, is_kept = past_key_values, False
    if isinstance(cache, transformers.EncoderDecoderCache):
        is_kept = crosses and bool(cache.is_updated.get(layer.layer_idx))
        cache = cache.cross_attention_cache if crosses else cache.self_attention_cache
    if is_kept:
        k, v = cache.layers[layer.layer_idx].keys, cache.layers[layer.layer_idx].values
    else:
        source = key_value_states if crosses else hidden_states
        k, v = (part(source).unflatten(2, heads).transpose(1, 2) for part in (layer.k, layer.v))
        if cache is not None:
            k, v = cache.update(k, v, layer.layer_idx)
            if cache is not past_key_values and crosses:
                past_key_values.is_updated[layer.layer_idx] = True
    if layer.has_relative_attention_bias:
        position_bias = T5(
            layer.relative_attention_bias.weight,
            bidirectional=not layer.is_decoder,
            max_distance=layer.relative_attention_max_distance,
        )
    o = _attend(
        layer,
        q,
        k,
        v,
        _given_or_plain(mask, q, k, layer.is_causal),
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
    attention_mask: _Mask,
    layer_past: Any = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Its array of biases, slope * column, differs from ALiBi's by a constant of the row."""
    _refuse(kwargs)
    if attention_mask.key_segments is not None:
        raise NotImplementedError(
            f"{_OPERATOR}: padding between the tokens, over which BLOOM counts no distance, is not "
            "supported"
        )
    qkv = layer.query_key_value(hidden_states).unflatten(2, (layer.num_heads, 3, layer.head_dim))
    q, k, v = qkv.transpose(1, 2).unbind(3)
    if layer_past is not None:
        k, v = layer_past.update(k, v, layer.layer_idx)
    o = _attend(
        layer,
        q,
        k,
        v,
        attention_mask,
        position=ALiBi(_slopes_for(q, alibi_slopes(layer.num_heads))),
        scale=layer.inv_norm_factor,
        dropout=layer.attention_dropout.p if layer.training else 0.0,
    )
    out = torch.nn.functional.dropout(
        layer.dense(o.flatten(2)), layer.hidden_dropout, layer.training
    )
    return residual + out, None


def _slopes_for(q: Tensor, slopes: Tensor) -> Tensor:
    return slopes.to(q.device, torch.promote_types(q.dtype, torch.float32))


def _mpt_forward(
    layer: Any,
    hidden_states: Tensor,
    position_bias: Tensor | None,
    past_key_values: Any = None,
    attention_mask: _Mask | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Its biases (H, 1, n), slope * (column - (n - 1)), have the slopes one before the end."""
    _refuse(kwargs)
    qkv = layer.Wqkv(hidden_states)
    if layer.clip_qkv:
        qkv = qkv.clamp(-layer.clip_qkv, layer.clip_qkv)
    qkv = qkv.unflatten(2, (3, layer.n_heads, layer.head_dim))
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, layer.layer_idx)
    position = None
    if position_bias is not None and position_bias.shape[2] > 1:
        position = ALiBi(_slopes_for(q, -position_bias[:, 0, -2]))
    o = _attend(
        layer,
        q,
        k,
        v,
        _given_or_plain(attention_mask, q, k, causal=True),
        position=position,
        scale=layer.softmax_scale,
        dropout=layer.attn_dropout_p if layer.training else 0.0,
    )
    return layer.out_proj(o.flatten(2)), None


def _swin_segments(
    layer: Any, height: int, width: int, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """(windows, tokens): tokens that lay together before the shift share a number."""
    if layer.shift_size <= 0:
        return None
    size = layer.window_size

    def bands(length: int) -> Tensor:
        places = torch.arange(length, device=device)
        return (places >= length - size).long() + (places >= length - layer.shift_size).long()

    image = 3 * bands(height)[:, None] + bands(width)
    windows = image.unflatten(0, (-1, size)).unflatten(2, (-1, size)).transpose(1, 2)
    return windows.reshape(-1, size * size)


def _swin_forward(
    layer: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: object
) -> tuple[Tensor, None]:
    """hidden_states (B * windows, tokens, channels); attention_mask as _swin_segments makes it."""
    _refuse(kwargs)
    windows, tokens, _ = hidden_states.shape
    q, k, v = (
        part(hidden_states).unflatten(2, (layer.num_attention_heads, -1)).transpose(1, 2)
        for part in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    mask = _Mask((windows, 1, tokens, tokens))
    if attention_mask is not None:
        segments = attention_mask.repeat(windows // attention_mask.shape[0], 1)
        mask = replace(mask, query_segments=segments, key_segments=segments)
    height, width = layer.relative_position_bias.window_size
    table = layer.relative_position_bias.relative_position_bias_table
    # Its rows are differences query - key.
    table = table.unflatten(0, (2 * height - 1, 2 * width - 1)).permute(2, 0, 1).flip(1, 2)
    o = _attend(
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
