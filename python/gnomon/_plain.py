"""Attention in plain PyTorch operators, for exporters."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gnomon._library import ops


def plain_program(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """See gnomon.integrations.onnx.plain."""
    table = torch.export.default_decompositions()
    table[ops.attention_forward.default] = _attention_forward
    program = program.run_decompositions(table)
    for node in program.graph.nodes:
        if node.op == "call_function" and str(node.target).startswith("gnomon."):
            raise _without_form(f"the operator {node.target}")
    return program


def tell_onnx_exporter() -> None:
    """Registers the decomposition of attention if the ONNX exporter is tracing."""
    if torch.onnx.is_in_onnx_export():
        torch._decomp.decomposition_table.setdefault(
            ops.attention_forward.default, _attention_of_exporter
        )


def _attention_of_exporter(*values: Any) -> Any:
    operator = ops.attention_forward.default
    if torch.onnx.is_in_onnx_export():
        return _attention_forward(*values)
    # Remove the decomposition after the export: the table is global, and torch.compile() reads it
    # for symbolic shapes.
    torch._decomp.decomposition_table.pop(operator, None)
    return operator(*values)


def _without_form(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"gnomon: {what} cannot be exported to ONNX, because it has no decomposition into PyTorch "
        "operators; gnomon.integrations.onnx.plain lists the supported features"
    )


_Scalars = list[Tensor]


def _hyperbolic_square(g: Tensor, a: _Scalars, b: _Scalars) -> Tensor:
    difference = a[0] - b[0]
    return (difference * a[1]) * (difference * b[1]) + g * (a[2] * b[2])


def _hyperbolic(g: Tensor, a: _Scalars, b: _Scalars, _: _Scalars) -> Tensor:
    square = _hyperbolic_square(g, a, b)
    return torch.log1p(square + square.sqrt() * (square + 2).sqrt())


def _additive(_: Tensor, a: _Scalars, b: _Scalars, t: _Scalars) -> Tensor:
    z = a[0] + b[0]
    return torch.where(z >= 0, z, t[0] * z)


#: Input kind and value of each pair function (src/definitions), by name.
_FUNCTIONS: dict[str, tuple[str, Callable[[Tensor, _Scalars, _Scalars, _Scalars], Tensor]]] = {
    "dot": ("product", lambda g, a, b, t: g),
    "softcap": ("product", lambda g, a, b, t: torch.tanh(g * t[0])),
    "gaussian": ("distance", lambda g, a, b, t: g),
    "laplacian": ("distance", lambda g, a, b, t: g.sqrt()),
    "additive": ("product", _additive),
    "hyperbolic": ("distance", _hyperbolic),
    "lorentz": ("distance", lambda g, a, b, t: _hyperbolic_square(g, a, b)),
}


def _attention_forward(*values: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Computes gnomon::attention_forward in plain PyTorch operators, as in src/reference."""
    names = [argument.name for argument in ops.attention_forward.default._schema.arguments]
    call = SimpleNamespace(**dict(zip(names, values, strict=True)))
    if call.function not in _FUNCTIONS:
        raise _without_form(f"the pair function {call.function!r}")
    if call.dropout != 0:
        raise NotImplementedError(
            "gnomon: the model has dropout; call model.eval() before the export"
        )
    for name in ("relative_keys", "relative_values", "relative_queries", "grid", "bias_parameters"):
        if getattr(call, name) is not None:
            raise _without_form(f"{name.replace('_', ' ')} of a position")
    if call.page_table is not None:
        call.y = _in_a_row(call.key_pages, call.page_table)
        call.v = _in_a_row(call.value_pages, call.page_table)
    call.y, call.v = _without_hidden(call.y, call), _without_hidden(call.v, call)
    score = _scores(call)
    visible = _visible(call)
    if visible is not None:
        score = torch.where(visible, score, -torch.inf)
    largest = score.amax(-1, keepdim=True)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.exp(score - largest)
    total = weights.sum(-1, keepdim=True)
    v = _by_heads(call.v.to(score.dtype), call)
    o = weights @ v / torch.where(total == 0, 1.0, total)
    if call.rows_first:
        o = o.transpose(1, 2).contiguous().transpose(1, 2)
    lse = (total.log() + largest).squeeze(-1)
    # The row statistics are only used in the backward pass.
    return o, lse, torch.zeros((3, *lse.shape), dtype=lse.dtype, device=lse.device)


def _in_a_row(pages: Tensor, table: Tensor) -> Tensor:
    """Copies the tokens of each sequence (B, Hkv, Lk, D) from their pages (N, Hkv, size, D)."""
    found = pages.transpose(1, 2)[table.clamp(0, pages.shape[0] - 1)]
    return found.flatten(1, 2).transpose(1, 2)


def _without_hidden(tokens: Tensor, call: SimpleNamespace) -> Tensor:
    """Sets keys or values to 0 that key_starts and key_lengths hide, because they may be NaN."""
    j = torch.arange(tokens.shape[2], device=tokens.device)
    for bounds, is_start in ((call.key_starts, True), (call.key_lengths, False)):
        if bounds is not None:
            seen = (j >= bounds[:, None]) == is_start
            tokens = torch.where(seen[:, None, :, None], tokens, 0.0)
    return tokens


def _by_heads(keys: Tensor, call: SimpleNamespace, axis: int = 1) -> Tensor:
    """Repeats key heads so that each query head has one."""
    group = call.x.shape[1] // call.y.shape[1]
    return keys if group == 1 else keys.repeat_interleave(group, axis)


def _scores(call: SimpleNamespace) -> Tensor:
    dtype = torch.float64 if call.x.dtype == torch.float64 else torch.float32
    kind, function = _FUNCTIONS[call.function]
    x = call.x.to(dtype)
    y = _by_heads(call.y.to(dtype), call)
    queries, keys = x.shape[2], y.shape[2]
    if kind == "distance":
        # Centring reduces cancellation for tokens that are close together but far from 0.
        middle = y.mean(2, keepdim=True)
        x, y = x - middle, y - middle
        squares = x.square().sum(-1, keepdim=True) + y.square().sum(-1).unsqueeze(-2)
        g = (squares - 2 * (x @ y.transpose(-2, -1))).clamp_min(0)
    else:
        g = x @ y.transpose(-2, -1)
    a = [] if call.row_scalars is None else list(call.row_scalars.unsqueeze(-1).unbind(0))
    b = []
    if call.column_scalars is not None:
        b = list(_by_heads(call.column_scalars, call, 2).unsqueeze(-2).unbind(0))
    t = [] if call.head_scalars is None else list(call.head_scalars[:, :, None, None].unbind(0))
    score = call.factor[:, None, None] * function(g, a, b, t)
    if call.bias is not None:
        rows = torch.arange(queries, device=x.device)
        entries = queries - 1 + torch.arange(keys, device=x.device) - rows.unsqueeze(1)
        bias = call.bias.index_select(2, entries.reshape(-1))
        score = score + bias.reshape(*call.bias.shape[:2], queries, keys)
    if call.key_bias is not None:
        score = score + call.key_bias.unsqueeze(2)
    if call.key_bias_low is not None:
        score = score + (call.key_bias_low.unsqueeze(2) - call.key_bias_base.unsqueeze(3))
    if call.pair_bias is not None:
        score = score + call.pair_bias
    if call.temperature is not None:
        score = score * call.temperature.unsqueeze(3)
    return call.softcap * (score / call.softcap).tanh() if call.softcap else score


def _visible(call: SimpleNamespace) -> Tensor | None:
    """Returns the combined mask, broadcastable to (B, H, Lq, Lk); None if all keys are visible."""
    device = call.x.device
    columns = torch.arange(call.y.shape[2], device=device)
    if call.query_positions is not None:
        p, key = call.query_positions.unsqueeze(2), call.key_positions.unsqueeze(1)
    else:
        offset = call.query_offset
        if call.query_offsets is not None:
            offset = call.query_offsets[:, None, None]
        p = torch.arange(call.x.shape[2], device=device)[None, :, None] + offset
        key = columns[None, None, :]
    # Masks broadcastable to (B, Lq, Lk).
    seen = []
    if call.left is not None:
        seen.append(key >= p - call.left)
    if call.right is not None:
        seen.append(key <= p + call.right)
    if call.chunks is not None:
        size, before, after = call.chunks
        chunk = torch.div(p, size, rounding_mode="floor")
        seen.append((key >= (chunk - before) * size) & (key < (chunk + after + 1) * size))
    if call.key_starts is not None:
        seen.append(columns >= call.key_starts[:, None, None])
    if call.key_lengths is not None:
        seen.append(columns < call.key_lengths[:, None, None])
    if call.query_segments is not None:
        seen.append(call.query_segments.unsqueeze(2) == call.key_segments.unsqueeze(1))
    visible = None if call.mask is None else call.mask
    for part in seen:
        visible = part.unsqueeze(1) if visible is None else visible & part.unsqueeze(1)
    return visible
