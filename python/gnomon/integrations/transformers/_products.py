"""Intercepts attention that a model computes itself, softmax(q k^T ...) v, while it runs.

A module that does not use transformers' interface runs unchanged, but each matrix product with
three or more axes returns a placeholder. Scaling it, or adding a bias or a mask, returns another
placeholder, and softmax returns a placeholder for the weights. Multiplying the weights by the
values then calls the operator once. Any other operation receives the actual array: the module then
computes its usual attention, and a warning states that its attention stays dense.
"""

from __future__ import annotations

import functools
import math
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_any, tree_map_only

from gnomon._checks import as_autocast
from gnomon.integrations._terms import POSITION, SIMILARITY
from gnomon.integrations.transformers import _interface
from gnomon.integrations.transformers._interface import (
    call,
    refusal,
    weights_are_collected,
)
from gnomon.integrations.transformers._masks import LOWEST, OPERATOR, Mask
from gnomon.nn._heads import split_heads


@dataclass(frozen=True, eq=False)
class _Product:
    """The product scale * q k^T + addends; the leading axes of q and k are equal or broadcast."""

    q: Tensor
    k: Tensor
    scale: float = 1.0
    #: Arrays that broadcast to the product's shape.
    addends: tuple[Tensor, ...] = ()
    mask: Mask | None = None
    #: True for hidden keys.
    hidden: Tensor | None = None
    #: A 0/1 factor of the product; the next addend must hide the keys whose factor is 0.
    kept: Tensor | None = None

    @property
    def lead(self) -> torch.Size:
        """The shape of the leading axes, that is, all except the last two."""
        return torch.broadcast_shapes(self.q.shape[:-2], self.k.shape[:-2])

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.lead, self.q.shape[-2], self.k.shape[-2]))

    def array(self) -> Tensor:
        """Returns the product as an array."""
        scores = torch.matmul(self.q, self.k.transpose(-1, -2))
        if self.scale != 1:
            scores = scores * self.scale
        if self.kept is not None:
            scores = scores * self.kept
        for addend in self.addends:
            scores = scores + addend
        if self.mask is not None:
            scores = scores + self.mask.array()
        if self.hidden is not None:
            scores = scores.masked_fill(self.hidden, torch.finfo(scores.dtype).min)
        return scores

    def times(self, factor: float) -> _Product:
        addends = tuple(addend * factor for addend in self.addends)
        return replace(self, scale=self.scale * factor, addends=addends)

    def hiding(self, hidden: Tensor) -> _Product:
        return replace(self, hidden=hidden if self.hidden is None else self.hidden | hidden)

    def reshaped(self, lead: Sequence[int]) -> _Product:
        """Returns the product with its leading axes reshaped."""

        def lead_of(tensor: Tensor) -> Tensor:
            rows, columns = tensor.shape[-2:] if tensor.dim() > 1 else (1, tensor.shape[-1])
            whole = tensor.expand(*self.lead, rows, columns)
            return whole.reshape(*lead, rows, columns)

        return _Product(
            lead_of(self.q),
            lead_of(self.k),
            self.scale,
            tuple(lead_of(addend) for addend in self._arrays()),
            None,
            None if self.hidden is None else lead_of(self.hidden),
            None if self.kept is None else lead_of(self.kept),
        )

    def _arrays(self) -> tuple[Tensor, ...]:
        return self.addends if self.mask is None else (*self.addends, self.mask.array())


@dataclass(frozen=True, eq=False)
class _Weights:
    """The softmax of a product."""

    product: _Product
    dropout: float = 0.0

    @property
    def shape(self) -> torch.Size:
        return self.product.shape

    def array(self) -> Tensor:
        weights = self.product.array().softmax(-1)
        return torch.nn.functional.dropout(weights, self.dropout) if self.dropout else weights

    def reshaped(self, lead: Sequence[int]) -> _Weights:
        return replace(self, product=self.product.reshaped(lead))


_Kind = TypeVar("_Kind", _Product, _Weights)


class _Standing(Tensor):
    """A placeholder for a product or weights, with their shape and dtype but no array."""

    meaning: _Product | _Weights

    @staticmethod
    def of(meaning: _Product | _Weights, dtype: torch.dtype) -> _Standing:
        device = (meaning if isinstance(meaning, _Product) else meaning.product).q.device
        standing: _Standing = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            _Standing, meaning.shape, dtype=dtype, device=device
        )
        standing.meaning = meaning
        return standing

    def array(self) -> Tensor:
        """Computes the array."""
        return self.meaning.array().to(self.dtype)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        # Reached only if the tensor is used outside the module that created it.
        return _apply(_Seen(torch.nn.Module()), function, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Replaces placeholders with arrays in operations that bypass __torch_function__."""
        arrays = tree_map_only(_Standing, lambda standing: standing.array(), (args, kwargs or {}))
        return function(*arrays[0], **arrays[1])


class _Seen(TorchFunctionMode):
    """Tracks a running module's products and their use."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.calls = 0
        #: The first operation that needed a product's array.
        self.needed_by = ""
        #: Whether the module computed the softmax of an array.
        self.is_dense = False

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _apply(self, function, args, kwargs or {})


def _apply(seen: _Seen, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    name = getattr(function, "__name__", "")
    stands = tree_any(lambda leaf: isinstance(leaf, _Standing), (args, kwargs))
    if not stands and name not in _PRODUCTS:
        seen.is_dense |= name == "softmax" and isinstance(args[0], Tensor) and args[0].dim() >= 3
        return function(*args, **kwargs)
    rule = _RULES.get(name)
    in_place = name.endswith("_") and not name.endswith("__")
    # If a product is added in place to an array, the result is an array.
    if rule is not None and not (in_place and _is_array(args[0])):
        result = rule(seen, function, *args, **kwargs)
        if result is not NotImplemented:
            if in_place and isinstance(result, _Standing):
                args[0].meaning = result.meaning
                return args[0]
            return result
    if not stands:
        return function(*args, **kwargs)
    seen.needed_by = seen.needed_by or name
    seen.is_dense |= name == "softmax"
    args, kwargs = tree_map_only(_Standing, lambda standing: standing.array(), (args, kwargs))
    return function(*args, **kwargs)


_RULES: dict[str, Callable[..., Any]] = {}
_Rule = TypeVar("_Rule", bound=Callable[..., Any])


def _rule(*names: str) -> Callable[[_Rule], _Rule]:
    def add(rule: _Rule) -> _Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return add


# Operations that create products from plain tensors.
_PRODUCTS = {"matmul", "__matmul__", "bmm", "baddbmm", "einsum"}
_PRODUCTS |= {"scaled_dot_product_attention", "multi_head_attention_forward"}
_METADATA = {"shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_cuda", "is_meta"}


@_rule("__get__")
def _attribute(_seen: _Seen, function: Any, *args: Any, **kwargs: Any) -> Any:
    if function.__self__.__name__ not in _METADATA:
        return NotImplemented
    return _metadata(_seen, function, *args, **kwargs)


@_rule("size", "dim", "ndimension", "numel", "is_floating_point", "is_complex", "__len__")
def _metadata(_seen: _Seen, function: Any, *args: Any, **kwargs: Any) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return function(*args, **kwargs)


def _product_of(value: Any) -> _Product | None:
    meaning = value.meaning if isinstance(value, _Standing) else None
    return meaning if isinstance(meaning, _Product) else None


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, _Standing)


def _number(value: Any) -> float | None:
    """Returns the value of a Python number, or None for other objects."""
    return float(value) if isinstance(value, (int, float)) else None


def _is_low(value: Any) -> bool:
    """Returns whether a score as low as this value hides a key."""
    if _is_array(value):
        return value.numel() == 1 and not value.requires_grad and float(value) <= LOWEST
    number = _number(value)
    return number is not None and number <= LOWEST


@_rule("matmul", "__matmul__", "bmm")
def _matmul(seen: _Seen, _function: Any, a: Any, b: Any, **kwargs: Any) -> Any:
    if kwargs:
        return NotImplemented
    if isinstance(a, _Standing) and isinstance(a.meaning, _Weights) and _is_array(b):
        return _values(seen, a, b)
    if not (_is_array(a) and _is_array(b)) or min(a.dim(), b.dim()) < 3:
        return NotImplemented
    if not (a.is_floating_point() and b.is_floating_point()):
        return NotImplemented
    return _product(a, b.transpose(-1, -2))


def _product(q: Tensor, k: Tensor, scale: float = 1.0) -> _Standing:
    q, k = as_autocast(q, k)
    return _Standing.of(_Product(q, k, scale), q.dtype)


@_rule("baddbmm")
def _baddbmm(
    _seen: _Seen, _function: Any, bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1
) -> Any:
    if not all(_is_array(part) for part in (bias, a, b)):
        return NotImplemented
    product = _product(a, b.transpose(-1, -2), float(alpha))
    if beta == 0:
        return product
    assert isinstance(product.meaning, _Product)
    meaning = replace(product.meaning, addends=(bias * beta,))
    return _Standing.of(meaning, product.dtype)


@_rule("einsum")
def _einsum(seen: _Seen, _function: Any, equation: Any, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    if not isinstance(equation, str) or len(operands) != 2:
        return NotImplemented
    if "..." in equation:
        more = [
            operand.dim() - len(part.replace(" ", "").replace("...", ""))
            for operand, part in zip(operands, equation.split("->")[0].split(","), strict=True)
        ]
        if more[0] != more[1] or re.search("[A-H]", equation) or equation.count("...") != 3:
            return NotImplemented
        equation = equation.replace("...", "ABCDEFGH"[: more[0]])
    left, _, out = equation.replace(" ", "").partition("->")
    a, _, b = left.partition(",")
    if len(out) < 3 or any(len(set(part)) != len(part) for part in (a, b, out)):
        return NotImplemented
    first, second = operands
    summed = [letter for letter in a if letter in b and letter not in out]
    own = [[x for x in part if x not in other] for part, other in ((a, b), (b, a))]
    if len(summed) != 1 or any(len(letters) != 1 for letters in own):
        return NotImplemented
    (d,), (i,), (j,) = summed, *own
    lead = [letter for letter in out if letter not in (i, j)]
    if isinstance(first, _Standing):
        if not isinstance(first.meaning, _Weights) or a != "".join([*lead, i, d]):
            return NotImplemented
        o = _values(seen, first, _arranged(second, b, [*lead, d, j]))
        return _arranged(o, "".join([*lead, i, j]), out)
    if out != "".join([*lead, i, j]) or not (_is_array(first) and _is_array(second)):
        return NotImplemented
    return _product(_arranged(first, a, [*lead, i, d]), _arranged(second, b, [*lead, j, d]))


def _arranged(tensor: Tensor, letters: str, order: Sequence[str]) -> Tensor:
    return tensor.permute(*(letters.index(letter) for letter in order))


@_rule("mul", "__mul__", "__rmul__", "multiply", "mul_", "__imul__")
def _mul(_seen: _Seen, _function: Any, a: Any, b: Any) -> Any:
    standing, factor = (a, b) if isinstance(a, _Standing) else (b, a)
    product = _product_of(standing)
    if product is None or isinstance(factor, _Standing):
        return NotImplemented
    if (number := _number(factor)) is not None:
        if number <= 0 and (product.mask is not None or product.hidden is not None):
            return NotImplemented
        return _Standing.of(product.times(number), standing.dtype)
    if not _is_array(factor) or not _fits(factor, product):
        return NotImplemented
    if product.addends or product.mask is not None or product.hidden is not None:
        return NotImplemented
    if factor.dim() > 0 and factor.shape[-1] != 1:
        # GPT multiplies the scores by its 0/1 mask, and adds a low number where the mask is 0.
        if product.kept is not None or factor.requires_grad:
            return NotImplemented
        if not bool(((factor == 0) | (factor == 1)).all()):
            return NotImplemented
        return _Standing.of(replace(product, kept=factor), standing.dtype)
    # A factor per head or per query is applied to the queries.
    return _Standing.of(replace(product, q=product.q * factor), standing.dtype)


@_rule("div", "__truediv__", "true_divide", "div_", "__itruediv__")
def _div(seen: _Seen, function: Any, a: Any, b: Any, **kwargs: Any) -> Any:
    if kwargs or not isinstance(a, _Standing) or isinstance(b, _Standing):
        return NotImplemented
    return _mul(seen, function, a, 1 / b)


def _fits(tensor: Tensor, product: _Product) -> bool:
    """Returns whether the tensor broadcasts to the product's shape."""
    try:
        return torch.broadcast_shapes(tensor.shape, product.shape) == product.shape
    except RuntimeError:
        return False


def _takes(product: _Product, mask: Mask) -> bool:
    """Returns whether the product has no mask yet and the same shape as the mask."""
    return product.mask is None and mask.shape == (*product.shape[:1], 1, *product.shape[2:])


@_rule("add", "__add__", "__radd__", "add_", "__iadd__")
def _add(_seen: _Seen, _function: Any, a: Any, b: Any, **kwargs: Any) -> Any:
    if kwargs:
        return NotImplemented
    if _product_of(a) is None:
        a, b = b, a
    product = _product_of(a)
    if product is None:
        return NotImplemented
    if isinstance(b, Mask):
        if _takes(product, b):
            return _Standing.of(replace(product, mask=b), a.dtype)
        b = b.array()
    if isinstance(b, _Standing):
        b = b.array()
    if _number(b) == 0:
        return a
    if not _is_array(b) or not b.is_floating_point() or not _fits(b, product):
        return NotImplemented
    if product.kept is not None:
        hidden = product.kept == 0
        if b.requires_grad or not bool((~hidden | (b <= LOWEST)).all()):
            return NotImplemented
        product = replace(product, kept=None).hiding(hidden)
        b = b.masked_fill(hidden, 0)
        if not bool(b.any()):
            return _Standing.of(product, a.dtype)
    return _Standing.of(replace(product, addends=(*product.addends, b)), a.dtype)


@_rule("sub", "__sub__", "sub_", "__isub__")
def _sub(seen: _Seen, function: Any, a: Any, b: Any, **kwargs: Any) -> Any:
    if kwargs or not _is_array(b):
        return NotImplemented
    return _add(seen, function, a, -b)


@_rule("masked_fill", "masked_fill_")
def _masked_fill(_seen: _Seen, _function: Any, a: Any, mask: Any, value: Any) -> Any:
    if isinstance(a, _Standing) and isinstance(a.meaning, _Weights):
        # Some models mask the weights again, so that a query without keys gives 0, as in gnomon.
        hidden = a.meaning.product.hidden
        again = value == 0 and hidden is not None and _is_array(mask) and torch.equal(mask, hidden)
        return a if again else NotImplemented
    product = _product_of(a)
    if isinstance(mask, Mask) and product is not None:
        if mask.dtype == torch.bool and _is_low(value) and _takes(product, mask):
            mask = replace(mask, dtype=torch.float32)
            return _Standing.of(replace(product, mask=mask), a.dtype)
        mask = mask.array()
    if product is None or not _is_array(mask) or not _is_low(value) or not _fits(mask, product):
        return NotImplemented
    return _Standing.of(product.hiding(mask), a.dtype)


@_rule("where")
def _where(_seen: _Seen, _function: Any, condition: Any, a: Any, b: Any) -> Any:
    product, low, hidden = _product_of(a), b, True
    standing = a
    if product is None:
        product, low, hidden, standing = _product_of(b), a, False, b
    if product is None or not _is_array(condition) or not _is_low(low):
        return NotImplemented
    if not _fits(condition, product):
        return NotImplemented
    return _Standing.of(product.hiding(~condition if hidden else condition), standing.dtype)


@_rule("max", "maximum", "clamp", "clamp_min")
def _at_least(_seen: _Seen, _function: Any, a: Any, b: Any = None, **kwargs: Any) -> Any:
    # A lower bound below all scores has no effect.
    low = kwargs.pop("min", b)
    return a if _product_of(a) is not None and not kwargs and _is_low(low) else NotImplemented


@_rule("view", "reshape", "flatten", "unflatten", "reshape_as", "view_as")
def _reshape(_seen: _Seen, function: Any, a: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(a, _Standing) or any(isinstance(arg, torch.dtype) for arg in args):
        return NotImplemented
    shape = function(torch.empty(a.meaning.shape, device="meta"), *args, **kwargs).shape
    if len(shape) < 3 or shape[-2:] != a.meaning.shape[-2:]:
        return NotImplemented
    return _Standing.of(a.meaning.reshaped(shape[:-2]), a.dtype)


@_rule("to", "type", "type_as", "float", "half", "bfloat16", "double", "contiguous", "clone")
def _to(_seen: _Seen, function: Any, a: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(a, _Standing):
        return NotImplemented
    if any(isinstance(arg, _Standing) for arg in args):
        args = tuple(
            torch.empty(0, dtype=arg.dtype, device=arg.device)
            if isinstance(arg, _Standing)
            else arg
            for arg in args
        )
    one = function(torch.empty(0, dtype=a.dtype, device=a.device), *args, **kwargs)
    if not isinstance(one, Tensor) or one.device != a.device or not one.is_floating_point():
        return NotImplemented
    return _Standing.of(a.meaning, one.dtype)


@_rule("softmax")
def _softmax(
    _seen: _Seen, _function: Any, a: Any, dim: Any = None, *args: Any, **kwargs: Any
) -> Any:
    product = _product_of(a)
    if product is None or product.kept is not None or dim not in (-1, len(product.shape) - 1):
        return NotImplemented
    dtype = kwargs.get("dtype") or next((x for x in args if isinstance(x, torch.dtype)), a.dtype)
    if torch.is_autocast_enabled(a.device.type):
        dtype = torch.float32
    return _Standing.of(_Weights(product), dtype)


@_rule("dropout")
def _dropout(
    _seen: _Seen,
    _function: Any,
    a: Any,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Any:
    if not isinstance(a, _Standing) or not isinstance(a.meaning, _Weights):
        return NotImplemented
    if not training or p == 0:
        return a
    if a.meaning.dropout:
        return NotImplemented
    return _Standing.of(replace(a.meaning, dropout=p), a.dtype)


def _values(seen: _Seen, weights: _Standing, v: Tensor) -> Tensor:
    """Returns weights times values (..., Lk, Dv), computed by the operator."""
    assert isinstance(weights.meaning, _Weights)
    product = weights.meaning.product
    (v,) = as_autocast(v)
    lead = torch.broadcast_shapes(product.lead, v.shape[:-2])
    # If there are several leading axes, the last one is the head axis. A single leading axis is the
    # batch axis, or batch and heads merged (DeBERTa); for learned terms, the two cases differ.
    learned = getattr(seen.module, SIMILARITY, getattr(seen.module, POSITION, None))
    heads = lead[-1] if len(lead) > 1 else 1
    if learned is not None and len(lead) == 1 and product.mask is None:
        heads = learned.num_heads if lead[0] % learned.num_heads == 0 else 1
    batch = math.prod(lead) // heads if heads else 0

    def in_four(tensor: Tensor, whole: bool) -> Tensor:
        """Returns (B, H, rows, columns); if `whole` is False, the first two axes may be 1."""
        rows = tensor.shape[-2:] if tensor.dim() > 1 else (1, *tensor.shape)
        if len(lead) == 2 and not whole:
            return tensor.reshape(*(1,) * (4 - tensor.dim()), *tensor.shape[:-2], *rows)
        return tensor.expand(*lead, *rows).reshape(batch, heads, *rows)

    q = in_four(product.q, whole=True)
    one_head = len(lead) == 2 and all(
        part.dim() == 4 and part.shape[:2] == (batch, 1) for part in (product.k, v)
    )
    k, values = (in_four(part, whole=not one_head) for part in (product.k, v))
    o = call(
        seen.module,
        q,
        k,
        values.to(q.dtype),
        product.mask,
        biases=tuple(in_four(addend, whole=False) for addend in product.addends),
        hidden=None if product.hidden is None else in_four(product.hidden, whole=False),
        scale=product.scale,
        dropout=weights.meaning.dropout,
    )
    seen.calls += 1
    o = o.reshape(*lead, *o.shape[-2:]).to(v.dtype)
    # The backward pass reads o, and the module may modify its result in place.
    return o.clone() if o.requires_grad else o


# PyTorch's fused attention functions.


@_rule("scaled_dot_product_attention")
def _sdpa(
    seen: _Seen,
    _function: Any,
    q: Any,
    k: Any,
    v: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if isinstance(attn_mask, _Standing):
        attn_mask = attn_mask.array()
    if not all(_is_array(x) and x.dim() == 4 for x in (q, k, v)):
        return NotImplemented
    if k.shape[1] != q.shape[1] and not enable_gqa:
        return NotImplemented
    mask = attn_mask if isinstance(attn_mask, Mask) else None
    if is_causal:
        # As in PyTorch, the first query is aligned with the first key.
        mask = Mask((q.shape[0], 1, q.shape[2], k.shape[2]), causal=True, device=q.device)
    biases, hidden = _as_bias_or_hidden(None if attn_mask is mask else attn_mask, seen=True)
    q, k, v = as_autocast(q, k, v)
    o = call(
        seen.module,
        q,
        k,
        v,
        mask,
        biases=biases,
        hidden=hidden,
        scale=scale,
        dropout=dropout_p,
    )
    seen.calls += 1
    return o


def _as_bias_or_hidden(mask: Tensor | None, seen: bool) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Converts a mask to biases or hidden keys; `seen` tells whether True means visible."""
    if mask is None:
        return (), None
    mask = mask.reshape(*(1,) * (4 - mask.dim()), *mask.shape)
    if mask.is_floating_point():
        return (mask,), None
    return (), ~mask.bool() if seen else mask.bool()


@_rule("multi_head_attention_forward")
def _multi_head(
    seen: _Seen,
    function: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _width: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:
    """Replaces torch.nn.MultiheadAttention's function; returns (L, B, E), and None as weights."""
    more = (bias_k, bias_v, static_k, static_v)
    if query.dim() != 3 or add_zero_attn or any(part is not None for part in more):
        return NotImplemented
    if use_separate_proj_weight:
        weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    else:
        assert in_proj_weight is not None
        weights = in_proj_weight.chunk(3)
    shifts = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    q, k, v = (
        split_heads(torch.nn.functional.linear(tokens, weight, shift).transpose(0, 1), num_heads)
        for tokens, weight, shift in zip((query, key, value), weights, shifts, strict=True)
    )
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.reshape(-1, num_heads, *attn_mask.shape[1:])
    biases, hidden = _as_bias_or_hidden(attn_mask, seen=False)
    if key_padding_mask is not None:
        more_biases, padding = _as_bias_or_hidden(key_padding_mask[:, None, None], seen=False)
        biases += more_biases
        if padding is not None:
            hidden = padding if hidden is None else hidden | padding
    q, k, v = as_autocast(q, k, v)
    o = call(
        seen.module,
        q,
        k,
        v,
        None,
        biases=biases,
        hidden=hidden,
        dropout=dropout_p if training else 0.0,
    )
    seen.calls += 1
    o = o.permute(2, 0, 1, 3).flatten(2)
    return torch.nn.functional.linear(o, out_proj_weight, out_proj_bias), None


# Modules.

#: A running model's attribute that stores the value of packed_reads before the call.
_READS = "_gnomon_packed_reads"


def see_products(module: torch.nn.Module, config: Any, name: str) -> None:
    """Intercepts a module while its configuration selects the implementation `name`."""
    forward = module.forward
    if isinstance(forward, functools.partial) and forward.func is _forward:
        forward = forward.args[0]
    module.forward = functools.partial(_forward, forward, module, config, name)


def refuse_weights(model: torch.nn.Module, name: str) -> None:
    """Makes a model reject requests for attention weights while its implementation is `name`."""
    if not any(
        isinstance(hook, functools.partial) and hook.func is _refuse
        for hook in model._forward_pre_hooks.values()
    ):
        model.register_forward_pre_hook(functools.partial(_refuse, name), with_kwargs=True)
        model.register_forward_hook(functools.partial(_check_packed, name), with_kwargs=True)


def _refuse(name: str, model: Any, _args: Any, kwargs: dict[str, Any]) -> None:
    asked = kwargs.get("output_attentions")
    if asked is None:
        asked = getattr(model.config, "output_attentions", False)
    if asked and model.config._attn_implementation == name:
        raise refusal("output_attentions")
    if kwargs.get("cu_seq_lens_q") is not None and not torch.compiler.is_compiling():
        model.__dict__[_READS] = _interface.packed_reads


def _check_packed(name: str, model: Any, _args: Any, kwargs: dict[str, Any], _output: Any) -> None:
    """Raises an error if a model received packed sequences, but no layer read their boundaries."""
    before = model.__dict__.pop(_READS, None)
    if before == _interface.packed_reads and model.config._attn_implementation == name:
        raise NotImplementedError(
            f"{OPERATOR}: {type(model).__name__} does not pass cu_seq_lens_q and cu_seq_lens_k "
            "to its attention, so its tokens would attend to other sequences; pass position_ids "
            "that restart with each sequence, or a padded batch"
        )


# A compiler would trace the module's operations without placeholders, so break the graph here.
@torch.compiler.disable(reason="gnomon recognises a softmax that a module computes while it runs")
def _forward(
    forward: Callable[..., Any],
    module: torch.nn.Module,
    config: Any,
    name: str,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if config._attn_implementation != name:
        return forward(*args, **kwargs)
    # Some models always request weights from their layers and then discard them, so check whether
    # the caller wants weights.
    if weights_are_collected():
        raise refusal("output_attentions")
    args = tuple(_given(arg) for arg in args)
    with _Seen(module) as seen:
        output = forward(*args, **{key: _given(arg) for key, arg in kwargs.items()})
    if seen.is_dense and not seen.calls:
        seen.needed_by = seen.needed_by or "softmax"
    if seen.needed_by and (seen.is_dense or not seen.calls):
        what = f"{OPERATOR}: {type(module).__name__} applies {seen.needed_by} to its scores"
        if hasattr(module, SIMILARITY) or hasattr(module, POSITION):
            raise NotImplementedError(
                f"{what}, so it would keep the dot product and its own positions; pass a part of "
                "the model without this module"
            )
        which = "some of its attention" if seen.calls else "its attention"
        warnings.warn(f"{what}: {which} stays dense", stacklevel=2)
    if isinstance(output, _Standing):
        return output.array()
    # Weights that the module returns with its output are not available.
    return tree_map_only(_Standing, lambda _: None, output)


def _given(value: Any) -> Any:
    """Returns None for a mask that hides nothing, so that the module does not read its size."""
    return None if isinstance(value, Mask) and value.is_none else value
