"""The function for transformers' AttentionInterface, and the operator call shared by all layers."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.utils.output_capturing import _active_collector

from gnomon._attention import AttentionArguments
from gnomon._catalogue import entry_of
from gnomon._position import to_positions
from gnomon.integrations import _terms
from gnomon.integrations._terms import POSITION, SIMILARITY
from gnomon.integrations.transformers._masks import (
    OPERATOR,
    Mask,
    both,
    given_or_plain,
    read_array,
    seen_by,
    segments_of,
    within_documents,
)
from gnomon.position import PairBias, Position

#: Negligible compared with any other score, and still finite after multiplication by log2(e).
_LOWEST_SCORE = -1e30

_REFUSED = {
    "output_attentions": "weights as an array (output_attentions); call "
    "gnomon.attention_weights for the rows of interest, or use_eager(model)",
    "head_mask": "head masks (head_mask); call use_eager(model)",
    "cache": "paged caches (cache); use generate() instead of generate_batch()",
}


def refusal(argument: str) -> NotImplementedError:
    return NotImplementedError(f"{OPERATOR}: not supported: {_REFUSED[argument]}")


def refuse(arguments: Mapping[str, object]) -> None:
    """Raises an error if one of these arguments requests an unsupported feature."""
    for name in _REFUSED:
        value = arguments.get(name)
        if name == "cache" and not _is_paged(value):
            # Since transformers 5.24, `cache` is also the name of the layers' key-value cache.
            continue
        if asks_for_something(value):
            raise refusal(name)


def _is_paged(cache: object) -> bool:
    """Returns whether this is generate_batch()'s paged cache, which holds several sequences."""
    return any(kind.__name__ == "PagedAttentionCache" for kind in type(cache).__mro__)


def asks_for_something(value: object, default: object = None) -> bool:
    """Returns whether an argument is set, that is, not None, False or its default."""
    if value is None or value is False or value is default:
        return False
    if isinstance(value, (list, tuple)):
        # A list has one value per layer or head.
        return any(asks_for_something(part) for part in value)
    if isinstance(value, (bool, int, float, str)):
        return type(value) is not type(default) or value != default
    return True


def weights_are_collected() -> bool:
    """Returns whether the caller of a running forward pass requested attention weights.

    Some models (GPT-2) do not pass this request on to their attention layers.
    """
    return any("attentions" in name for name in _active_collector.get() or ())


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Computes attention for transformers' AttentionInterface; returns (B, Lq, H, Dv)."""
    refuse(kwargs)
    if weights_are_collected():
        raise refusal("output_attentions")
    _check_known(module, kwargs)
    # In eager attention, a layer without a mask attends to all keys, even if its is_causal flag is
    # set (images in BridgeTower); layers that are really causal receive a mask.
    bias = kwargs.get("position_bias")
    o = attend(
        module,
        query,
        key,
        value,
        given_or_plain(attention_mask, query, key, causal=bool(is_causal)),
        scale=scaling,
        dropout=dropout,
        biases=() if bias is None else (bias,),
        chosen=_chosen(module, query, key, kwargs),
        documents=documents_of(kwargs, query, key),
        sink=_sink(module, kwargs),
        softcap=kwargs.get("softcap"),
    )
    return o, None


#: How many times packed sequences were read. A call with packed sequences must increase this count.
packed_reads = 0


def documents_of(
    arguments: Mapping[str, Any], q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Returns the segments of packed sequences, or None if their boundaries are not passed."""
    global packed_reads
    ends = [arguments.get(f"cu_seq_lens_{which}") for which in "qk"]
    if ends == [None, None]:
        return None
    if any(part is None for part in ends):
        raise ValueError(
            f"{OPERATOR}: only one of cu_seq_lens_q and cu_seq_lens_k is given; expected both"
        )
    packed_reads += 1
    of_queries, of_keys = (
        segments_of(f"cu_seq_lens_{which}", part, x.shape[0], x.shape[2])
        for which, part, x in zip("qk", ends, (q, k), strict=True)
    )
    return of_queries, of_keys


def _chosen(
    module: torch.nn.Module, q: Tensor, k: Tensor, arguments: Mapping[str, Any]
) -> Tensor | None:
    """Returns (B, 1 or H, Lq, Lk), True for the keys that a layer selects for each query.

    Such layers pass the selection to eager attention as a mask. Other implementations receive the
    indices of keys (B, Lq, n), or of blocks of keys (B, 1 or head groups, Lq, n), where -1 marks an
    unused entry.
    """
    keys = k.shape[2]
    if (indices := arguments.get("indices")) is not None:
        chosen = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=k.device)
        return chosen.scatter(-1, indices.long(), True)[:, None]
    if (blocks := arguments.get("block_indices")) is None:
        return None
    size = getattr(getattr(module, "indexer", None), "block_size", None)
    if size is None:
        raise NotImplementedError(
            f"{OPERATOR}: {type(module).__name__} selects blocks of keys (block_indices) but has "
            "no indexer.block_size; call use_eager(model)"
        )
    count = -(-keys // size)
    chosen = torch.zeros(*blocks.shape[:3], count + 1, dtype=torch.bool, device=k.device)
    chosen = chosen.scatter(-1, blocks.long().masked_fill(blocks < 0, count), True)[..., :count]
    chosen = chosen.repeat_interleave(size, -1)[..., :keys]
    return chosen.repeat_interleave(q.shape[1] // chosen.shape[1], 1)


def _sink(module: torch.nn.Module, arguments: Mapping[str, Any]) -> Tensor | None:
    """Returns the sink scores, (H,) or (B, H, Lq)."""
    # Some eager implementations read the sinks from the module.
    for sink in (arguments.get("s_aux"), arguments.get("sinks"), getattr(module, "sinks", None)):
        if isinstance(sink, Tensor):
            return sink.squeeze(-1) if sink.dim() == 4 else sink
    return None


#: Supported arguments that only some eager implementations have.
_KNOWN = {"position_bias", "s_aux", "sinks", "softcap", "sliding_window"}


@functools.cache
def _extra_arguments(module_name: str) -> dict[str, object]:
    """Returns the arguments that only the eager implementation in a module's file supports.

    The result maps argument names to their defaults.
    """
    eager = getattr(sys.modules.get(module_name), "eager_attention_forward", None)
    return {} if eager is None else extra_arguments(eager, attention_forward, _KNOWN)


def extra_arguments(
    theirs: Callable[..., Any], ours: Callable[..., Any], known: Iterable[str] = ()
) -> dict[str, object]:
    """Returns the arguments that only the function `theirs` has, with their defaults."""
    names = {*inspect.signature(ours).parameters, *known}
    return {
        name: None if parameter.default is inspect.Parameter.empty else parameter.default
        for name, parameter in inspect.signature(theirs).parameters.items()
        if name not in names
        and parameter.kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    }


def _check_known(module: torch.nn.Module, arguments: Mapping[str, Any]) -> None:
    """Raises an error if a layer passes arguments that would be ignored here."""
    if torch.compiler.is_compiling():
        return
    refuse_extra(module, arguments, _extra_arguments(type(module).__module__))


def refuse_extra(
    module: torch.nn.Module, arguments: Mapping[str, Any], extra: Mapping[str, object]
) -> None:
    """Raises an error if an argument named in `extra` is set; `extra` contains the defaults."""
    for name, default in extra.items():
        if asks_for_something(arguments.get(name), default):
            raise NotImplementedError(
                f"{OPERATOR}: {type(module).__name__} passes {name} to its attention, which is "
                "not supported; call use_eager(model)"
            )


def attend(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | Tensor,
    *,
    biases: tuple[Tensor, ...] = (),
    chosen: Tensor | None = None,
    documents: tuple[Tensor, Tensor] | None = None,
    **arguments: Any,
) -> Tensor:
    """Computes attention with a mask that may be an array; the other arguments are those of call().

    Args:
        chosen: True where a query may attend to a key.
        documents: segments of queries (B, Lq) and keys (B, Lk), in addition to those of the mask.

    Returns:
        (B, Lq, H, Dv), contiguous.
    """
    is_bias = isinstance(mask, Tensor) and mask.dtype != torch.bool
    if chosen is not None and isinstance(mask, Tensor) and not is_bias:
        mask = mask & chosen
    elif chosen is not None and isinstance(mask, Mask):
        mask = replace(mask, seen=chosen if mask.seen is None else mask.seen & chosen)
    elif chosen is not None:
        biases, mask, is_bias = (*biases, mask), chosen, False
    intervals = mask if isinstance(mask, Mask) else None
    if documents is not None:
        if intervals is None:
            intervals = Mask((q.shape[0], 1, q.shape[2], k.shape[2]), device=q.device)
        intervals = within_documents(intervals, *documents)
    o = call(
        module,
        q,
        k,
        v,
        intervals,
        biases=(*biases, mask) if isinstance(mask, Tensor) and is_bias else biases,
        hidden=None if is_bias or isinstance(mask, Mask) else ~mask,
        **arguments,
    )
    # Models call view() to reshape the output to (B, Lq, H * Dv), so make it contiguous.
    return o.transpose(1, 2).contiguous()


def call(
    module: torch.nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None,
    *,
    biases: tuple[Tensor, ...] = (),
    hidden: Tensor | None = None,
    position: Position | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    sink: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Calls the operator with a module's similarity and position.

    Args:
        biases: values of shape (1 or B, 1 or H, 1 or Lq, 1 or Lk) that are added to the scores.
        hidden: True where a query does not attend to a key, with the shape of a bias.
        sink: (H,) or (B, H, Lq), the scores of a sink without a value (GPT-OSS).
        softcap: bounds the dot product to [-softcap, softcap] (Gemma 2).

    Returns:
        (B, H, Lq, Dv).
    """
    shape = (q.shape[0], 1, q.shape[2], k.shape[2])
    if mask is None or (mask.is_none and mask.shape[2:] != shape[2:]):
        mask = Mask(shape, device=q.device)
    if mask.shape[2:] == (1, shape[3]) and not mask.causal and mask.window == (None, None):
        # The mask has a single row, which all queries share.
        mask = replace(mask, shape=shape)
    if mask.shape[2:] != shape[2:]:
        raise NotImplementedError(
            f"{OPERATOR}: the mask of {type(module).__name__} has {mask.shape[2]} queries and "
            f"{mask.shape[3]} keys, but attention has {shape[2]} and {shape[3]}, which is not "
            "supported; call use_eager(model)"
        )
    _check_arrays(module, (*shape[:1], q.shape[1], *shape[2:]), (*biases, hidden))
    mask, left_over = _with_arrays(mask, biases, hidden, shape)
    positions = [] if position is None else [position]
    positions += [PairBias(bias.to(q.dtype)) for bias in left_over]
    learned, own = getattr(module, SIMILARITY, None), getattr(module, POSITION, None)
    offset = mask.query_offset
    takes_scale = learned is None or learned.takes_scale or _has_content(position)
    arguments: AttentionArguments = {
        "causal": mask.causal,
        "window": mask.window,
        "key_starts": mask.key_starts,
        "key_lengths": mask.key_lengths,
        "query_segments": mask.query_segments,
        "key_segments": mask.key_segments,
        "query_offset": offset.expand(shape[0]) if isinstance(offset, Tensor) else offset,
        "mask": mask.seen,
        "scale": scale if takes_scale or (own is not None and own.takes_scale) else None,
        "sink": sink,
        "dropout": dropout,
    }
    if own is not None:
        _check_offset(module, own, mask)
    # The soft cap, like the scale, applies only to the dot product.
    name = OPERATOR.removeprefix("gnomon.")
    return _terms.attend(name, module, q, k, v, positions, arguments, softcap)


def _check_offset(module: torch.nn.Module, own: Any, mask: Mask) -> None:
    """Raises an error if a position from with_attention needs query positions that are unknown."""
    queries, keys = mask.shape[2:]
    is_plain = not mask.causal and mask.window == (None, None)
    if own.reads_positions and queries != keys and is_plain and _is_zero(mask.query_offset):
        raise NotImplementedError(
            f"{OPERATOR}: {type(module).__name__} has {queries} queries and {keys} keys but no "
            f"query positions, which the position {own.module_spec!r} requires; call "
            "with_attention only on the submodules that use self-attention"
        )


def _is_zero(offset: int | Tensor) -> bool:
    return not isinstance(offset, Tensor) and offset == 0


def _has_content(position: Position | None) -> bool:
    """Returns whether a position adds dot products with its own vectors, to which scale applies."""
    entries = [entry_of(term._name) or {} for term in to_positions(OPERATOR, position)]
    return any(entry.get("role") == "content" for entry in entries)


def _check_arrays(
    module: torch.nn.Module, shape: tuple[int, ...], arrays: tuple[Tensor | None, ...]
) -> None:
    """Raises an error if an array does not broadcast to (B, H, Lq, Lk)."""
    for array in arrays:
        if array is None:
            continue
        pairs = zip(reversed(array.shape), reversed(shape), strict=False)
        if array.dim() > len(shape) or any(size not in (1, whole) for size, whole in pairs):
            raise ValueError(
                f"{OPERATOR}: a mask or a bias of {type(module).__name__} has shape "
                f"{list(array.shape)}; expected (B, H, Lq, Lk) = {list(shape)}, or a shape that "
                "broadcasts to it"
            )


def _with_arrays(
    mask: Mask,
    biases: tuple[Tensor, ...],
    hidden: Tensor | None,
    shape: tuple[int, int, int, int],
) -> tuple[Mask, list[Tensor]]:
    """Merges the mask with biases that act as masks; also returns the other biases."""
    seen = [] if hidden is None else [~hidden]
    left_over = []
    for bias in biases:
        array = seen_by(bias)
        if array is not None and not bool(array.any(-1).all()):
            # In eager attention, a query whose scores all have the lowest value attends to all keys
            # equally. With finite scores, the operator does the same.
            array, bias = None, bias.clamp(min=_LOWEST_SCORE)
        if array is None:
            left_over.append(bias)
        else:
            seen.append(array)
    if mask.seen is not None:
        seen.append(mask.seen)
        mask = replace(mask, seen=None)
    pairs: Tensor | None = None
    for array in seen:
        # A causal mask or a window costs less than an array.
        read = read_array(array, shape)
        together = None if read is None else both(mask, read)
        if together is not None:
            mask = together
        else:
            pairs = array if pairs is None else pairs & array
    return replace(mask, seen=pairs), left_over
