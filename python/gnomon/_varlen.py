"""Attention over packed or nested sequences of different lengths."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nested import nested_tensor_from_jagged
from typing_extensions import Unpack

from gnomon._attention import (
    Aggregation,
    Integers,
    Positions,
    Window,
    attention,
    lower,
    takes,
    unknown_argument,
)
from gnomon._catalogue import components_of
from gnomon._checks import (
    check_flag,
    check_integers,
    check_tensors,
    checks_argument_names,
    is_integer_type,
)
from gnomon._position import Position, to_positions
from gnomon._similarity import Similarity

_NAME = "varlen_attention"


class VarlenArguments(TypedDict, total=False):
    """The arguments of attention that do not depend on sequence lengths."""

    causal: bool
    window: Window | int | None
    chunks: tuple[int, int, int] | None
    similarity: Similarity | str | None
    position: Positions | None
    scale: float | None
    sink: Tensor | float | None
    temperature: Tensor | float | None
    score_softcap: float | None
    dropout: float
    seed: int | None
    aggregation: Aggregation
    tolerance: float


# Index kinds of term parameters that have one entry per token or depend on the lengths. Such
# parameters describe the packed tokens and are not split by sequence.
_OF_TOKENS = ("tokens", "key_entries", "pairs", "keys", "queries", "offsets")


# Terms that depend only on p_j - p_i, and their options (names, or names with values) that keep it
# so. Calls with other terms or options pass positions to the kernels, which is slower.
_BY_OFFSET = {
    "alibi": {"slopes"},
    "hype": {"tau", "mu", "mode"},
    "kerple": {"r1", "r2", "kind"},
    "rope": {"base", "layout", "dims", "prefix", "xpos=false", "section_order"},
    "sandwich": {"factor", "dims", "base"},
    "t5": {"table", "bidirectional", "max_distance"},
}

# The mean length below which sequences share a call on CPUs, because separate calls would take
# longer to start than to run.
_SHORT = 128


@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **arguments: Unpack[VarlenArguments],
) -> Tensor: ...
@overload
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = ...,
    *,
    return_lse: Literal[True],
    **arguments: Unpack[VarlenArguments],
) -> tuple[Tensor, Tensor]: ...
@checks_argument_names(lambda name: unknown_argument(_NAME, name, VarlenArguments))
@takes(VarlenArguments)
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None,
    *,
    return_lse: bool = False,
    **arguments: Unpack[VarlenArguments],
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes attention() separately for each packed sequence.

    The queries of sequence n are rows cu_seqlens_q[n] to cu_seqlens_q[n + 1] - 1 of q. Its keys and
    values are the rows of k and v that cu_seqlens_k selects in the same way. This is flash-attn's
    format, which needs no padding. Positions restart in each sequence: its keys have the positions
    0, 1, ..., and its last query has the position of its last key. With causal=True and fewer
    queries than keys, the last query therefore attends to all keys. This is flash-attn's
    bottom-right alignment; scaled_dot_product_attention aligns the mask to the top left.

    Args:
        q: (total_q, H, D). The dtypes and devices of q, k and v must be as in attention().
        k: (total_k, Hkv, D), where Hkv divides H.
        v: (total_k, Hkv, Dv).
        cu_seqlens_q: (n + 1,) non-decreasing integers from 0 to total_q, the boundaries of the n
            sequences. Sequences may be empty.
        cu_seqlens_k: (n + 1,) non-decreasing integers from 0 to total_k, the sequence boundaries in
            k and v; by default cu_seqlens_q.
        return_lse: whether to also return lse (H, total_q).

    The other arguments are those of attention. Tensors that have one entry per token in attention()
    have one entry per packed token here, and a batch axis of size 1: the tensors of KeyBias and
    Forget are (1, H, total_k), the query passed to Relative is (1, H, total_q, Dr), and sink and
    temperature are (1, H, total_q). The table of OffsetBias has the shape (H, 2 m - 1), with m
    greater than every |p_j - p_i|, and its middle entry is the bias for p_j = p_i.

    By default, cu_seqlens_q and cu_seqlens_k are read on the host, and consecutive sequences of
    equal length are computed as one batch. Under torch.compile, with dropout, or with tensors that
    have one entry per token, all sequences are computed in a single call with segments and
    positions. Such a call does not support RoPE scaling that depends on the length of a call. On
    CPUs, short sequences are also computed in a single call if there is no position term.

    Returns:
        o (total_q, H, Dv) in q's dtype, or (o, lse). If a sequence has no keys, o is 0 and lse is
        -inf for its queries.

    Raises:
        ValueError: an invalid shape or value.
        TypeError: an invalid dtype or device, or an unknown argument.
        NotImplementedError: as in attention.

    Example:
        >>> q, k, v = torch.randn(3, 100, 8, 64).unbind()
        >>> lengths = [0, 30, 30, 100]  # 30, 0 and 70 tokens
        >>> o = gnomon.varlen_attention(q, k, v, lengths, causal=True, position="alibi")
    """
    return_lse = check_flag(_NAME, "return_lse", return_lse)
    check_tensors(_NAME, q=q, k=k, v=v)
    for name, tokens in (("q", q), ("k", k), ("v", v)):
        if tokens.dim() != 3:
            raise ValueError(
                f"gnomon.{_NAME}: {name} has shape {list(tokens.shape)}; expected three axes, "
                "(total, heads, head_dim)"
            )
    ends_q = _ends("cu_seqlens_q", cu_seqlens_q, q)
    ends_k = ends_q if cu_seqlens_k is None else _ends("cu_seqlens_k", cu_seqlens_k, k)
    if ends_q.shape != ends_k.shape:
        raise ValueError(
            f"gnomon.{_NAME}: cu_seqlens_q has {ends_q.shape[0]} elements and cu_seqlens_k "
            f"has {ends_k.shape[0]}; expected the same number"
        )
    return _attend(q, k, v, Packing(ends_q, ends_k, cu_seqlens_k is None), return_lse, arguments)


class Packing(NamedTuple):
    """The boundaries of n packed sequences: one tensor (n + 1,) for queries, and one for keys."""

    queries: Tensor
    keys: Tensor
    #: Whether queries and keys come from the same tokens.
    is_self: bool

    def arguments(self, total_q: int, total_k: int, with_positions: bool) -> dict[str, Tensor]:
        """Returns the arguments of attention that describe all sequences as one packed sequence.

        Without `with_positions`, self-attention gets no positions. The indices of the packed
        tokens then serve as positions, because their differences within a sequence are the same.
        """
        rows = torch.arange(total_q, device=self.queries.device)
        of_queries = torch.searchsorted(self.queries[1:], rows, right=True)
        if self.is_self:
            arguments = {"query_segments": of_queries, "key_segments": of_queries}
            if with_positions:
                arguments["positions"] = rows - self.queries[of_queries]
            return arguments
        columns = torch.arange(total_k, device=self.keys.device)
        of_keys = torch.searchsorted(self.keys[1:], columns, right=True)
        from_the_end = rows - self.queries[of_queries + 1]
        return {
            "query_segments": of_queries,
            "key_segments": of_keys,
            "positions": from_the_end + self.keys.diff()[of_queries],
            "key_positions": columns - self.keys[of_keys],
        }


def _ends(name: str, given: Integers, tokens: Tensor) -> Tensor:
    ends = check_integers(_NAME, name, given, tokens, "a Tensor or a sequence of integers")
    if ends.dim() != 1 or ends.shape[0] < 1 or not is_integer_type(ends.dtype):
        raise ValueError(
            f"gnomon.{_NAME}: {name} has shape {list(ends.shape)} and dtype {ends.dtype}; expected "
            "(sequences + 1,) integers"
        )
    return ends.to(torch.int64)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    return_lse: bool,
    arguments: Mapping[str, Any],
) -> Any:
    given: Any = dict(arguments)
    positions = to_positions(_NAME, given.get("position"))
    if positions:
        given["position"] = positions
    is_one_call = is_compiling() or not _applies_to_each(positions, given)
    if packing.queries.device.type == "meta":
        is_one_call = True
    elif not is_compiling():
        lengths_q = _lengths("cu_seqlens_q", packing.queries, q.shape[0])
        lengths_k = (
            lengths_q if packing.is_self else _lengths("cu_seqlens_k", packing.keys, k.shape[0])
        )
        is_one_call = is_one_call or (
            q.device.type == "cpu"
            and packing.is_self
            and not positions
            and given.get("chunks") is None
            and q.shape[0] < _SHORT * len(lengths_q)
        )
    if is_one_call:
        with_positions = given.get("chunks") is not None or not _depend_on_offsets(positions)
        given |= packing.arguments(q.shape[0], k.shape[0], with_positions)
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        o, lse = attention(q, k, v, return_lse=True, **given)
        return (o[0].transpose(0, 1), lse[0]) if return_lse else o[0].transpose(0, 1)
    runs = [
        (len(list(same)), *lengths)
        for lengths, same in itertools.groupby(zip(lengths_q, lengths_k, strict=True))
    ]
    rows = [count * length for count, length, _ in runs]
    columns = [count * length for count, _, length in runs]
    outputs, sums = [], []
    for (count, queries, keys), *tokens in zip(
        runs, q.split(rows), k.split(columns), v.split(columns), strict=True
    ):
        a, b, c = (
            x.view(count, length, *x.shape[1:]).transpose(1, 2)
            for x, length in zip(tokens, (queries, keys, keys), strict=True)
        )
        call = given if queries == keys else given | {"query_offset": keys - queries}
        o, lse = attention(a, b, c, return_lse=True, **call)
        # These are views, which torch.cat copies once.
        outputs.extend(o.transpose(1, 2).unbind(0))
        if return_lse:
            sums.append(lse.transpose(0, 1).flatten(1))
    if not runs:
        outputs = [q.new_empty(0, q.shape[1], v.shape[2])]
        sums = [q.new_empty(0, q.shape[1]).T.to(outputs[0].dtype)]
    o = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if not return_lse:
        return o
    return o, sums[0] if len(sums) == 1 else torch.cat(sums, 1)


def _applies_to_each(positions: list[Position], given: Mapping[str, Any]) -> bool:
    """Returns whether separate calls for each sequence can use these arguments unchanged."""
    if given.get("dropout", 0.0) != 0 and given.get("dropout") is not None:
        return False
    for name in ("sink", "temperature"):
        value = given.get(name)
        if isinstance(value, Tensor) and value.dim() > 1:
            return False
    for position in positions:
        spec, tensors = lower(_NAME, None, position)[2:]
        components = [component for part in spec for component in components_of(part)]
        for component in components:
            if set(component.tables(*_OF_TOKENS)) & set(component.tensors):
                return False
            if component.name == "sink" and any(tensor.dim() > 1 for tensor in tensors):
                return False
    return True


def _depend_on_offsets(positions: list[Position]) -> bool:
    """Returns whether all terms are known to depend only on p_j - p_i, which packing preserves.

    If so, token positions are omitted, because they slow down the kernels.
    """
    for position in positions:
        # torch.compile cannot trace components_of().
        for term in "+".join(lower(_NAME, None, position)[2]).split("+"):
            name, *options = term.split(":")
            known = _BY_OFFSET.get(name)
            if known is None:
                return False
            if not all(option in known or option.partition("=")[0] in known for option in options):
                return False
    return True


def _lengths(name: str, ends: Tensor, total: int) -> list[int]:
    numbers: list[int] = ends.tolist()
    lengths = [end - begin for begin, end in itertools.pairwise(numbers)]
    if numbers[0] != 0 or numbers[-1] != total or min(lengths, default=0) < 0:
        raise ValueError(
            f"gnomon.{_NAME}: {name} is {_shortened(numbers)}; expected non-decreasing offsets "
            f"from 0 to {total}, the number of tokens"
        )
    return lengths


def _shortened(numbers: list[int]) -> str:
    if len(numbers) <= 8:
        return str(numbers)
    return f"[{', '.join(map(str, numbers[:4]))}, ..., {', '.join(map(str, numbers[-3:]))}]"


def nested_attention(
    operator: str, q: Tensor, k: Tensor, v: Tensor, return_lse: bool, arguments: Mapping[str, Any]
) -> Any:
    """Computes attention() for jagged nested tensors (B, H, length, D)."""
    for name in arguments:
        if name not in VarlenArguments.__optional_keys__:
            raise NotImplementedError(
                f"gnomon.{operator}: {name} is not supported with nested tensors; supported "
                "arguments: "
                f"{', '.join(sorted(VarlenArguments.__optional_keys__))}"
            )
    values, ends = [], []
    for name, tokens in (("q", q), ("k", k), ("v", v)):
        axes = "(batch, heads, length, head_dim)"
        packed = tokens.transpose(1, 2) if tokens.is_nested and tokens.dim() == 4 else tokens
        its_values, its_ends = _unnested(operator, name, packed, 4, axes)
        values.append(its_values)
        ends.append(its_ends)
    queries, keys, of_values = ends
    if queries.shape != keys.shape or keys.shape != of_values.shape:
        raise ValueError(
            f"gnomon.{operator}: q, k and v are nested tensors with different batch sizes; "
            "expected equal batch sizes"
        )
    packing = Packing(queries, keys, keys is queries)
    found = _attend(values[0], values[1], values[2], packing, return_lse, arguments)
    o, lse = found if return_lse else (found, None)
    nested: Any = nested_tensor_from_jagged(o, queries).transpose(1, 2)
    if lse is None:
        return nested
    return nested, nested_tensor_from_jagged(lse.T, queries).transpose(1, 2)


def _unnested(
    operator: str, name: str, tokens: Tensor, axes: int, expected: str
) -> tuple[Tensor, Tensor]:
    """Returns the packed values of a nested tensor (B, length, ...) and its sequence offsets."""
    check_tensors(operator, **{name: tokens})
    if not tokens.is_nested:
        raise TypeError(
            f"gnomon.{operator}: {name} is not nested, but other inputs are; expected all inputs "
            "to be nested, or none"
        )
    jagged: Any = tokens
    if tokens.dim() != axes or jagged._ragged_idx != 1:
        raise ValueError(
            f"gnomon.{operator}: {name} is a nested tensor with {tokens.dim()} axes; expected "
            f"{expected} with jagged lengths"
        )
    if jagged.lengths() is not None:
        raise NotImplementedError(
            f"gnomon.{operator}: {name} is a nested tensor with gaps between its sequences; pass "
            f"{name}.contiguous()"
        )
    return jagged.values(), jagged.offsets()


def nested_module(
    operator: str,
    forward: Callable[..., Tensor],
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    others: Mapping[str, Any],
    arguments: Mapping[str, Any],
) -> Tensor:
    """Runs a module's forward on nested tokens (B, length, dim) as one packed sequence.

    `others` contains module arguments that apply only to padded batches; each must be None.
    """
    known = ("causal", "window", "chunks")
    for name, given in {**others, **arguments}.items():
        if given is not None and name not in known:
            raise NotImplementedError(
                f"gnomon.{operator}: {name} is not supported with nested tensors; supported "
                "arguments: "
                f"{', '.join(known)}"
            )
    axes = "(batch, length, embed_dim)"
    values, queries = _unnested(operator, "query", query, 3, axes)
    keys, of_keys, of_values = None, values, None
    key_ends = queries
    if key is not None and key is not query:
        of_keys, key_ends = _unnested(operator, "key", key, 3, axes)
        keys = of_keys.unsqueeze(0)
    if value is not None and value is not key:
        packed, value_ends = _unnested(operator, "value", value, 3, axes)
        if value_ends.shape != key_ends.shape or packed.shape[0] != of_keys.shape[0]:
            raise ValueError(
                f"gnomon.{operator}: value and key are nested tensors with different lengths; "
                "expected equal lengths"
            )
        of_values = packed.unsqueeze(0)
    if key_ends.shape != queries.shape:
        raise ValueError(
            f"gnomon.{operator}: query and key are nested tensors with different batch sizes; "
            "expected equal batch sizes"
        )
    packing = Packing(queries, key_ends, key_ends is queries)
    given = packing.arguments(values.shape[0], of_keys.shape[0], with_positions=True)
    o = forward(values.unsqueeze(0), keys, of_values, **given, **arguments)
    nested: Tensor = nested_tensor_from_jagged(o.squeeze(0), queries)
    return nested
