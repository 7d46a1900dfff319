"""FLOP counts of the operators' matrix products, for torch.utils.flop_counter.FlopCounterMode."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from gnomon._library import ops

_MODULE = "torch.utils.flop_counter"


def _pairs(x: Sequence[int], y: Sequence[int]) -> int:
    batch, heads, queries, _ = x
    return batch * heads * queries * y[2]


def _attention_forward(x: Any, y: Any, v: Any, *_: Any, **__: Any) -> int:
    """Counts q.k and p v for every pair, as PyTorch does for scaled_dot_product_attention."""
    return int(2 * _pairs(x, y) * (x[3] + v[3]))


def _attention_backward(
    d_o: Any, d_lse: Any, o: Any, lse: Any, statistics: Any, x: Any, y: Any, v: Any,
    *_: Any, **__: Any,
) -> int:  # fmt: skip
    """Counts q.k, which is recomputed, d_o.v, and the gradients of q, k and v."""
    return int(2 * _pairs(x, y) * (3 * x[3] + 2 * v[3]))


def _graph_forward(
    x: Any, y: Any, v: Any, row: Any, column: Any, head: Any, factor: Any, edge_bias: Any,
    indptr: Any, indices: Any, *_: Any, **__: Any,
) -> int:  # fmt: skip
    return int(2 * indices[0] * x[1] * (x[2] + v[2]))


def _graph_backward(
    d_o: Any, d_lse: Any, o: Any, lse: Any, statistics: Any, x: Any, y: Any, v: Any, row: Any,
    column: Any, head: Any, factor: Any, edge_bias: Any, indptr: Any, indices: Any, *_: Any,
    **__: Any,
) -> int:  # fmt: skip
    return int(2 * indices[0] * x[1] * (3 * x[2] + 2 * v[2]))


_FORMULAS = {
    ops.attention_forward: _attention_forward,
    ops.attention_backward: _attention_backward,
    ops.graph_forward: _graph_forward,
    ops.graph_backward: _graph_backward,
}


def _add_to(counter: Any) -> None:
    for operator, formula in _FORMULAS.items():
        counter.register_flop_formula(operator)(formula)


class _Finder(importlib.abc.MetaPathFinder):
    """Registers the formulas once the counter is imported.

    gnomon does not import the counter itself, because that takes as long as importing gnomon.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_add(module: ModuleType) -> None:
            execute(module)
            _add_to(module)

        spec.loader.exec_module = execute_and_add  # type: ignore[method-assign]
        return spec


def register() -> None:
    counter = sys.modules.get(_MODULE)
    if counter is not None:
        _add_to(counter)
    else:
        sys.meta_path.insert(0, _Finder())
