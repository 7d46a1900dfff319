"""The attention operator."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypedDict, TypeVar, get_type_hints, overload

import torch
from torch import Tensor
from torch.compiler import is_exporting
from typing_extensions import Unpack

from gnomon._checks import (
    as_autocast,
    check_flag,
    check_integer,
    check_integers,
    check_layout,
    check_number,
    check_optional_integer,
    check_optional_integers,
    check_optional_number,
    check_string,
    check_tensors,
    is_integer_type,
    plain,
    shown,
    unknown_name,
    wrong_type,
)
from gnomon._library import ops
from gnomon._plain import tell_onnx_exporter
from gnomon._position import Position, to_positions
from gnomon._similarity import Similarity, to_similarity

Window = tuple[int | None, int | None]
#: An integer tensor, or values that can be converted to one.
Integers: TypeAlias = Tensor | Sequence[Any] | int
Aggregation = Literal["mean", "einstein_midpoint", "lorentz_centroid"]
#: A position argument: a position, a specification, or a sequence of these, which are summed.
Positions: TypeAlias = Position | str | Sequence[Position | str]


class OrderArguments(TypedDict, total=False):
    """Arguments for masks and positions."""

    causal: bool
    window: Window | int | None
    key_lengths: Integers | None
    key_starts: Integers | None
    query_segments: Integers | None
    key_segments: Integers | None
    query_offset: Integers | None
    positions: Integers | None
    key_positions: Integers | None
    chunks: tuple[int, int, int] | None


class MaskArguments(OrderArguments, total=False):
    """OrderArguments plus a pairwise mask."""

    mask: Tensor | None


class ScoreArguments(MaskArguments, total=False):
    """MaskArguments plus the arguments that define the scores."""

    similarity: Similarity | str | None
    position: Positions | None
    scale: float | None
    sink: Tensor | float | None
    temperature: Tensor | float | None
    score_softcap: float | None


class WeightArguments(ScoreArguments, total=False):
    """ScoreArguments plus the arguments that define how the weights are used."""

    dropout: float
    aggregation: Aggregation
    tolerance: float


class AttentionArguments(WeightArguments, total=False):
    """WeightArguments plus a dropout seed and a page table."""

    seed: int | None
    page_table: Integers | None


#: Operator arguments by name. Each _lower_... function sets one or two of them.
_Lowered = dict[str, Any]


def _lower_flag(operator: str, name: str, value: Any, like: Tensor, lowered: _Lowered) -> None:
    lowered[name] = check_flag(operator, name, value)


def _lower_integers(operator: str, name: str, value: Any, like: Tensor, lowered: _Lowered) -> None:
    lowered[name] = check_optional_integers(operator, name, value, like)


def _lower_number(operator: str, name: str, value: Any, like: Tensor, lowered: _Lowered) -> None:
    lowered[name] = check_number(operator, name, value)


def _lower_optional_number(
    operator: str, name: str, value: Any, like: Tensor, lowered: _Lowered
) -> None:
    lowered[name] = check_optional_number(operator, name, value)


def _lower_string(operator: str, name: str, value: Any, like: Tensor, lowered: _Lowered) -> None:
    check_string(operator, name, value)
    lowered[name] = value


def _lower_seed(operator: str, name: str, value: Any, like: Tensor, lowered: _Lowered) -> None:
    seed = check_optional_integer(operator, name, value)
    lowered[name] = None if seed is None else torch.tensor([seed])


def _check_device(operator: str, name: str, value: Tensor | None, like: Tensor) -> None:
    """Checks that a tensor is dense and on q's device."""
    if value is None:
        return
    check_layout(operator, name, value)
    if value.device != like.device:
        raise TypeError(
            f"gnomon.{operator}: {name} is on {value.device}, but q is on {like.device}; expected "
            "the same device"
        )


def _lower_tensor(operator: str, name: str, value: Any, like: Tensor, lowered: _Lowered) -> None:
    """Lowers a tensor, or a number that applies to all entries."""
    if value is None or isinstance(value, Tensor):
        _check_device(operator, name, value, like)
        lowered[name] = value
    else:
        number = check_number(operator, name, value, "a Tensor, a number, or None")
        wide = torch.float64 if like.dtype == torch.float64 else torch.float32
        lowered[name] = torch.tensor(number, dtype=wide, device=like.device)


def _lower_mask(operator: str, name: str, value: Any, like: Tensor, lowered: _Lowered) -> None:
    if value is not None and not isinstance(value, Tensor):
        raise wrong_type(operator, name, value, "a Tensor of booleans, or None")
    _check_device(operator, name, value, like)
    lowered[name] = value


def _lower_window(operator: str, name: str, value: Any, like: Tensor, lowered: _Lowered) -> None:
    if value is None:
        return
    if isinstance(value, (list, tuple)):
        if len(value) != 2:
            raise ValueError(
                f"gnomon.{operator}: window is {shown(value)}; expected (left, right), where None "
                "means unbounded, or one number for both sides"
            )
        lowered["left"] = check_optional_integer(operator, "window's left", value[0])
        lowered["right"] = check_optional_integer(operator, "window's right", value[1])
        return
    expected = "(left, right), one number for both sides, or None"
    lowered["left"] = lowered["right"] = check_integer(operator, name, value, expected)


def _lower_chunks(operator: str, name: str, value: Any, like: Tensor, lowered: _Lowered) -> None:
    if value is None:
        return
    if not isinstance(value, (list, tuple)) or len(value) != 3:
        raise ValueError(
            f"gnomon.{operator}: chunks is {shown(value)}; expected (size, before, after), or None"
        )
    lowered[name] = [check_integer(operator, "a value in chunks", number) for number in value]


def _lower_offset(operator: str, name: str, value: Any, like: Tensor, lowered: _Lowered) -> None:
    if value is None:
        return
    value = plain(value)
    if isinstance(value, (Tensor, list, tuple)) or hasattr(value, "tolist"):
        lowered["query_offsets"] = check_integers(operator, name, value, like)
    else:
        lowered[name] = check_integer(operator, name, value, "an integer, or None")


#: The types of all call arguments, by name.
_TYPES: dict[str, Any] = get_type_hints(AttentionArguments)
#: The lowering function of each type; query_offset has its own.
_LOWER: dict[Any, Callable[[str, str, Any, Tensor, _Lowered], None]] = {
    bool: _lower_flag,
    Window | int | None: _lower_window,
    Integers | None: _lower_integers,
    tuple[int, int, int] | None: _lower_chunks,
    Tensor | None: _lower_mask,
    float | None: _lower_optional_number,
    Tensor | float | None: _lower_tensor,
    float: _lower_number,
    Aggregation: _lower_string,
    int | None: _lower_seed,
}
_TERMS = ("similarity", "position")
#: Lowering function of each argument in AttentionArguments except the terms.
_ARGUMENTS = {name: _LOWER[its] for name, its in _TYPES.items() if name not in _TERMS}
_ARGUMENTS["query_offset"] = _lower_offset
_LENGTHS = "expected key_lengths=, the number of keys of each batch element"
_PAGES = (
    "expected page_table=, together with k and v of shape (pages, Hkv, page size, D), such as "
    "k.transpose(1, 2) for pages of shape (page size, Hkv, D)"
)
_MASK = (
    "expected mask=, a Boolean mask that is True where a query attends to a key, or "
    "position=gnomon.position.PairBias(...), which adds values to the scores"
)
_PACKED = "call gnomon.varlen_attention instead, which accepts packed sequences"
_SCORES = (
    "expected position=, a term of gnomon.position: OffsetBias adds a bias per offset, and "
    "PairBias adds an arbitrary bias per query-key pair"
)
_WEIGHTS = "call gnomon.attention_weights, which returns the weights of selected rows"
_SINK = "expected sink="
_SOFTCAP = (
    "expected similarity=gnomon.similarity.Dot(softcap=...), which caps dot products before biases "
    "are added, or score_softcap=, which caps scores after biases are added"
)
#: Arguments of PyTorch, flash-attn and FlexAttention functions, each with the gnomon argument that
#: replaces it (if any) and advice for the error message. If a gnomon function lacks the
#: replacement, the argument is reported as unknown.
FOREIGN_ARGUMENTS: dict[str, tuple[str | None, str]] = {
    "attn_mask": ("mask", _MASK),
    "attention_mask": ("mask", _MASK),
    "attn_bias": ("position", "expected position=gnomon.position.PairBias(...)"),
    "bias": ("position", "expected position=gnomon.position.PairBias(...)"),
    "is_causal": ("causal", "expected causal=, together with query_offset= if Lq and Lk differ"),
    "dropout_p": ("dropout", "expected dropout="),
    "enable_gqa": (None, "leave it out; k and v may have fewer heads than q"),
    "key_padding_mask": (
        "mask",
        "expected key_lengths=, key_starts=, or mask=~key_padding_mask[:, None, None]",
    ),
    "need_weights": (None, _WEIGHTS),
    "return_attn_probs": (None, _WEIGHTS),
    "score_mod": ("position", _SCORES),
    "mask_mod": (
        "mask",
        "expected causal=, window=, segments or mask=; gnomon.integrations.flex.mask_arguments "
        "converts a mask_mod",
    ),
    "block_mask": (
        "mask",
        "expected **gnomon.integrations.flex.mask_arguments(block_mask)",
    ),
    "softmax_scale": ("scale", "expected scale="),
    "sm_scale": ("scale", "expected scale="),
    "window_size": ("window", "expected window=(left, right), where None means unbounded"),
    "sliding_window": (
        "window",
        "expected window=(left, right), neither of which counts the query's own position",
    ),
    "alibi_slopes": ("position", "expected position=gnomon.position.ALiBi(slopes)"),
    "softcap": ("similarity", _SOFTCAP),
    "logits_soft_cap": ("similarity", _SOFTCAP),
    "s_aux": ("sink", _SINK),
    "sinks": ("sink", _SINK),
    "return_softmax_lse": (None, "expected return_lse="),
    "deterministic": (None, "leave it out; results are always bitwise reproducible"),
    "cu_seqlens": (None, _PACKED),
    "cu_seqlens_q": (None, _PACKED),
    "cu_seqlens_k": (None, _PACKED),
    "max_seqlen": (None, _PACKED),
    "max_seqlen_q": (None, _PACKED),
    "max_seqlen_k": (None, _PACKED),
    "cache_seqlens": ("key_lengths", _LENGTHS),
    "seqused_k": ("key_lengths", _LENGTHS),
    "block_table": ("page_table", _PAGES),
    "block_tables": ("page_table", _PAGES),
}
#: Defaults of the operator arguments that follow the tokens and terms, in order.
UNSET: _Lowered = {
    argument.name: argument.default_value
    for argument in ops.module_attention.default._schema.arguments[6:]
}
_IN_ORDER = list(UNSET.items())
_INDICES = {name: index for index, name in enumerate(UNSET)}

# Stored because looking up an operator takes a noticeable part of a small call's time.
_attention = ops.attention.default

_Function = TypeVar("_Function", bound=Callable[..., Any])


def takes(arguments: Any) -> Callable[[_Function], _Function]:
    """Decorates a function so that its signature lists the arguments in a TypedDict."""
    own = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=UNSET.get(name),
            annotation=_TYPES[name],
        )
        for name in _in_order(arguments)
    ]

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        others = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        count = sum(other.kind is not inspect.Parameter.KEYWORD_ONLY for other in others)
        whole = signature.replace(parameters=[*others[:count], *own, *others[count:]])
        function.__signature__ = whole  # type: ignore[attr-defined]
        return function

    return decorate


def _names(arguments: Any) -> frozenset[str]:
    names: frozenset[str] = arguments.__optional_keys__
    return names


def _in_order(arguments: Any) -> list[str]:
    return [name for name in (*_TERMS, *_ARGUMENTS) if name in _names(arguments)]


def lower_call(
    operator: str, like: Tensor, given: Mapping[str, Any], arguments: Any, **own: Any
) -> _Lowered:
    """Converts `given`, a call's arguments other than its terms, to operator arguments.

    `arguments` is the TypedDict of valid names. `own` contains additional operator arguments.
    """
    if is_exporting():
        tell_onnx_exporter()
    lowered = own
    for name, value in given.items():
        if name not in _names(arguments):
            raise unknown_argument(operator, name, arguments)
        _ARGUMENTS[name](operator, name, value, like, lowered)
    return lowered


def passed(lowered: _Lowered) -> list[Any]:
    """Returns the positional operator arguments, up to the last one that lower_call set.

    The rest are omitted, because passing all of them takes as long as attention over a few tokens.
    """
    if not lowered:
        return []
    count = 0
    for name in lowered:
        count = max(count, _INDICES[name] + 1)
    return [lowered.get(name, unset) for name, unset in _IN_ORDER[:count]]


# Arguments of each function that are not in its TypedDict.
_OWN_ARGUMENTS = {
    "attention": ("return_lse",),
    "attention_weights": ("rows",),
    "varlen_attention": ("cu_seqlens_q", "cu_seqlens_k", "return_lse"),
}


def unknown_argument(operator: str, name: str, arguments: Any) -> TypeError:
    """Returns the error for an unknown argument, with advice if another library uses its name."""
    known = _in_order(arguments)
    ours, how = FOREIGN_ARGUMENTS.get(name, (None, ""))
    if operator == "varlen_attention" and how == _PACKED:
        how = "leave it out" if name.startswith("max_") else "expected cu_seqlens_q"
    if how and (ours is None or ours in known):
        return TypeError(f"gnomon.{operator}: unexpected argument {name}; {how}")
    known += _OWN_ARGUMENTS.get(operator, ())
    return unknown_name(f"gnomon.{operator}", "argument", name, known)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **arguments: Unpack[AttentionArguments],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **arguments: Unpack[AttentionArguments],
) -> tuple[Tensor, Tensor]: ...
@takes(AttentionArguments)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: bool = False,
    **arguments: Unpack[AttentionArguments],
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes softmax(similarity + position) v in linear memory, with exact gradients.

    The score of query i and key j is s_ij = similarity(q_i, k_j) + position(p_i, p_j), the weights
    are p_ij = softmax_j(s_ij), and the output is o_i = sum_j p_ij v_j. Unless positions are passed,
    query i has the position p_i = query_offset + i, and key j has the position p_j = j.

    Args:
        q: (B, H, Lq, D), bfloat16, float16, float32 or float64, on the CPU or an NVIDIA GPU
            (which computes float64 on the CPU). k and v must have the same dtype and device. On the
            CPU, bfloat16 and float16 inputs are converted to float32, and the result is rounded.
            CPUs with native bfloat16 instructions multiply in bfloat16 instead, and also round the
            weights to bfloat16. Under torch.autocast, q, k and v are first cast to the autocast
            dtype, unless they are float64.
        k: (B, Hkv, Lk, D), where Hkv divides H. Query head h uses key head h // (H / Hkv).
        v: (B, Hkv, Lk, Dv).
        similarity: an object from gnomon.similarity, or a specification such as
            "penumbral:gamma=0.5"; None means Dot().
        position: an object from gnomon.position, a sum such as ``RoPE() + ALiBi(slopes)``, a
            specification such as "rope+alibi", or a list of these, which is summed. Parameters
            omitted from a specification have the initial values of gnomon.nn.MultiheadAttention.
        causal: whether queries attend only to keys at their own or an earlier position, p_j <= p_i.
        window: (left, right): query i attends only to keys with p_i - left <= p_j <= p_i + right.
            None for one side means no limit on that side; a single number n means (n, n).
        key_lengths: (B,) integers: in batch element b, queries attend only to keys j <
            key_lengths[b]. Here and below, a number or a 0-d tensor applies to the whole batch, and
            lists are accepted in place of tensors.
        key_starts: (B,) integers: in batch element b, queries attend only to keys j >=
            key_starts[b]. The excluded keys may contain NaN. They still occupy positions: key j
            keeps the position j.
        query_segments: (B, Lq) integers in the int32 range, or (Lq,) if shared across the batch: a
            query attends only to keys in its own segment, such as a document in a packed sequence.
            Positions do not restart in each segment unless you pass positions.
        key_segments: (B, Lk) or (Lk,) integers; required with query_segments.
        query_offset: the position of the first query: an integer between -2^53 and 2^53, or (B,)
            integers, one per batch element. It defaults to 0 if Lq = Lk. If the lengths differ,
            calls with causal, a window, chunks or a position must pass it.
        positions: (B, Lq) integers, or (Lq,) if shared across the batch: the positions p_i of the
            queries, in any order; they may be negative. Masks and position terms then use them
            instead of query_offset and the key index. Pass positions for packed documents (with
            segments), trees, and random positions (Ruoss et al. 2023). On a grid, a position is a
            row-major index. With positions, the table of OffsetBias has the shape (H, 2 n - 1), and
            its middle entry is the bias for p_j = p_i. Positions in one batch element must differ
            by less than 2^30; with offset biases, there may be at most 2^22 different offsets. A
            tensor of shape (1 or B, Lq, axes) contains coordinates, which only RoPE accepts. Each
            axis then rotates its own section of RoPE's pairs (by default, an equal share of them),
            and masks still use query_offset and the key index.
        key_positions: (B, Lk) or (Lk,) integers: the positions p_j of the keys; by default those of
            the queries. If Lq and Lk differ, pass both positions and key_positions.
        scale: factor of the dot product and of relative keys; 1/sqrt(D) by default. Passing it
            raises an error if the call uses neither.
        chunks: (size, before, after): the sequence is divided into chunks of `size` positions. A
            query attends only to its own chunk, the `before` chunks before it and the `after`
            chunks after it. With Relative, this is the relative local attention of the Music
            Transformer (Huang et al. 2019).
        dropout: probability of dropping a weight, from 0 to 1. The remaining weights are multiplied
            by 1 / (1 - dropout); lse is computed before dropout.
        seed: seed of the dropout mask; by default, it is drawn from PyTorch's generator. For a
            given seed, whether a weight is dropped depends only on its batch, head, query and key.
        aggregation: how values are combined:
            "mean" is sum_j p_ij v_j.
            "einstein_midpoint" is sum_j p_ij g_j v_j / sum_j p_ij g_j with
            g_j = 1 / sqrt(1 - |v_j|^2), for values in the Klein ball; values outside the ball are
            moved to its boundary (Gulcehre et al. 2019). lse is then log sum_j g_j exp(s_ij).
            "lorentz_centroid" is m sqrt(c / |(m.m)_L|) with m = sum_j p_ij v_j, for values on the
            hyperboloid (v.v)_L = -v_0^2 + v_1^2 + ... = -c (Law et al. 2019). The time coordinate
            of v and o comes first. c is the c of similarity.Lorentz if the call uses it, otherwise
            1.
        mask: a Boolean tensor that broadcasts to (B, H, Lq, Lk): True where query i may attend to
            key j. Other masking arguments also apply. Fully masked blocks are skipped. Arguments
            such as causal, window and segments are faster if they can express the mask. For
            additive masks, use position.PairBias.
        sink: (H,), (B, H, Lq) or a number: the score, in each query's softmax, of an additional key
            without a value (Agarwal et al. 2025, gpt-oss). 0 adds 1 to the softmax denominator, and
            -inf means no sink. The returned lse includes the sink.
        temperature: a factor of s_ij, including biases but not the sink: a number, or a tensor that
            broadcasts to (B, H, Lq). A tensor that requires grad receives a gradient. For scalable
            softmax (Nakanishi 2025), pass s log(n), where s is a learned factor and n is the number
            of keys that the query attends to.
        score_softcap: a positive number z: the scores become z tanh(s_ij / z), where s_ij includes
            biases and temperature. similarity.Dot(softcap=z) caps only the dot product, before
            biases, as Gemma 2 does; without biases, both give the same result. score_softcap is not
            supported with Umbral, the "log" scores of cones, Lorentz, Forget or
            aggregation="einstein_midpoint": their kernels omit a per-query constant, which cancels
            in a softmax but not under a cap.
        tolerance: the fraction of each query's total weight that may be skipped, at least 0 and
            below 1. Forward and backward passes skip blocks of keys if a bound proves that their
            total weight is below this fraction. The bound follows from the norms of q and k and
            from biases that decrease with distance (ALiBi, HyPE, KERPLE, learned tables, Forget).
            All built-in similarities have such bounds; user-defined ones may lack them. The default
            is the rounding error of a float32 sum. Nothing is skipped if tolerance is 0, if the
            inputs are float64, or in decoding (few queries, many cached keys). Skipping does not
            change how NaN and infinity propagate.
        page_table: (B, T) integers, or (T,) if shared across the batch, for keys and values in
            pages, as the caches of inference servers store them. k then has the shape (N, Hkv,
            page size, D), and v the shape (N, Hkv, page size, Dv), in any memory layout; key j of
            batch element b is row j % (page size) of page page_table[b, j // (page size)], and
            Lk = T (page size). Pages may be shared. An entry may be arbitrary if key_starts and
            key_lengths hide all keys of its page. Other entries outside 0 ... N - 1 are errors on
            the CPU; on a GPU, in traced calls and under vmap, they are clamped. If the page size is
            a power of 2 and no derivatives are recorded, GPU kernels read the pages in place for
            dot products, distances such as Gaussian, and similarities of similarity.define, with
            any biases and masks. Otherwise, and on the CPU, the sequences are first copied out of
            their pages. Servers that rotate keys (RoPE) should store rotated keys.
        return_lse: whether to also return lse (B, H, Lq), the natural logarithm of sum_j exp(s_ij).
            lse is differentiable.

    The tensors of similarity and position must have q's dtype, or float32 if q is bfloat16 or
    float16. Where (H,) is expected, a 0-d tensor applies to all heads. torch.func transforms are
    supported, including vmap, forward-mode and second derivatives.

    Returns:
        o (B, H, Lq, Dv) in q's dtype, or (o, lse), with lse in float32 or float64. If all keys are
        masked for a query, its o is 0 and its lse is -inf. If q is a transposed view of a tensor
        (B, Lq, H, D), then o is a transposed view as well, so o.transpose(1, 2).view(B, Lq, -1)
        does not copy.

    Raises:
        ValueError: an invalid shape or value.
        TypeError: an invalid dtype or device.
        NotImplementedError: an argument that this version does not support, or a third derivative.

    Example:
        >>> q, k, v = torch.randn(3, 2, 8, 16, 32).unbind()  # (B, H, L, D)
        >>> o = gnomon.attention(q, k, v, similarity="umbral", position="alibi", causal=True)
    """
    return_lse = check_flag("attention", "return_lse", return_lse)
    check_tensors("attention", q=q, k=k, v=v)
    if q.is_nested:
        from gnomon._varlen import nested_attention

        found: Tensor = nested_attention("attention", q, k, v, return_lse, arguments)
        return found
    q, k, v = as_autocast(q, k, v)
    terms = lower("attention", arguments.pop("similarity", None), arguments.pop("position", None))
    call = lower_call("attention", q, arguments, AttentionArguments)
    if not return_lse:
        o: Tensor = _attention(q, k, v, *terms, *passed(call))
        return o
    o, lse, _ = ops.attention_with_lse.default(q, k, v, *terms, *passed(call))
    return o, lse


#: Row indices of q: an integer, several integers, or a slice.
Rows: TypeAlias = Integers | slice


@takes(ScoreArguments)
def attention_weights(
    q: Tensor, k: Tensor, rows: Rows = -1, **arguments: Unpack[ScoreArguments]
) -> Tensor:
    """Returns the attention weights p_ij of selected queries, for inspection.

    Memory is proportional to the number of selected queries times Lk. Every similarity, position
    and mask is supported, because the weights come from the attention operator itself. With grid
    positions or the table of OffsetBias, the weights of all queries are computed before the
    requested ones are selected.

    Args:
        q: (B, H, Lq, D); q, k and the other arguments are as in attention.
        k: (B, Hkv, Lk, D).
        rows: the index of a query, several indices, or a slice such as ``slice(None)`` for all
            queries; the default, -1, selects the last query.

    Returns:
        (B, H, n, Lk) for n selected queries, in q's dtype; differentiable. If all keys are masked
        for a query, its weights are 0.

    Raises:
        ValueError: an invalid shape or value.
        TypeError: an invalid dtype or device.
        NotImplementedError: as in attention.

    Example:
        >>> q, k, v = torch.randn(3, 2, 8, 16, 32).unbind()  # (B, H, L, D)
        >>> p = gnomon.attention_weights(q, k, rows=[0, -1], position="alibi")
        >>> p.shape
        torch.Size([2, 8, 2, 16])
    """
    operator = "attention_weights"
    check_tensors(operator, q=q, k=k)
    q, k = as_autocast(q, k)
    terms = lower(operator, arguments.pop("similarity", None), arguments.pop("position", None))
    call = lower_call(operator, q, arguments, ScoreArguments)
    weights: Tensor = ops.attention_weights.default(
        q, k, check_rows(operator, rows, q), *terms, *passed(call)
    )
    return weights


def lower(
    operator: str, similarity: Similarity | str | None, position: Positions | None
) -> tuple[str, Sequence[Tensor], list[str], list[Tensor]]:
    """Lowers a similarity and a sum of positions to specifications and tensors."""
    spec, tensors = to_similarity(operator, similarity)._lower()
    if position is None:
        return spec, tensors, [], []
    terms = [term._lower() for term in to_positions(operator, position)]
    return (
        spec,
        tensors,
        [spec for spec, _ in terms],
        [tensor for _, tensors in terms for tensor in tensors],
    )


def check_rows(operator: str, rows: Rows, q: Tensor) -> list[int]:
    """Converts rows to a list of indices, which are non-negative if rows is a slice."""
    if isinstance(rows, slice):
        return list(range(q.shape[2] if q.dim() == 4 else 0)[rows])
    # Do not convert a list to a tensor, whose values cannot be read during tracing.
    if isinstance(rows, (list, tuple)) and all(type(row) is int for row in rows):
        return list(rows)
    numbers = check_integers(
        operator, "rows", rows, expected="an integer, a sequence of integers or a slice"
    )
    if numbers.dim() > 1 or not is_integer_type(numbers.dtype):
        raise ValueError(
            f"gnomon.{operator}: rows has shape {list(numbers.shape)} and dtype {numbers.dtype}; "
            "expected an integer or a sequence of integers"
        )
    return [int(number) for number in numbers.reshape(-1).tolist()]
