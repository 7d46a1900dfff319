"""Determines properties of model classes from their source code.

transformers detects support for its AttentionInterface in the same way.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys

import torch

_FUNCTION = re.compile(r"scaled_dot_product_attention\(|multi_head_attention_forward\(")
_PRODUCT = re.compile(r"[mM]at[mM]ul\w*\(|bmm\(|einsum\(| @ ")
_ASKS = re.compile(r"isinstance\(\w*mask, (torch\.)?Tensor\)")
_SOFTMAX = re.compile(r"[sS]oftmax(\.apply)?\(")


_SOURCES: dict[type[torch.nn.Module], str] = {}


def source_of(module_class: type[torch.nn.Module]) -> str:
    """Returns the source of a class and its base classes, except those of PyTorch."""
    if module_class in _SOURCES:
        return _SOURCES[module_class]
    sources = []
    for part in module_class.__mro__:
        if part.__module__.split(".")[0] == "torch" or part is object:
            continue
        sources.append(_classes_of_module(part.__module__).get(part.__qualname__, ""))
    _SOURCES[module_class] = "\n".join(sources)
    return _SOURCES[module_class]


@functools.cache
def _classes_of_module(module_name: str) -> dict[str, str]:
    """Returns the sources of a module's classes by qualified name; empty if the source is missing.

    Unlike inspect.getsource, this parses the module once instead of once per class.
    """
    try:
        source = inspect.getsource(sys.modules[module_name])
    except (KeyError, OSError, TypeError):
        return {}
    lines = source.splitlines()
    found: dict[str, str] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.ClassDef):
                # A class may have several definitions in branches of the module; include all.
                text = "\n".join(lines[part.lineno - 1 : part.end_lineno])
                found[prefix + part.name] = "\n".join([found.get(prefix + part.name, ""), text])
                visit(part, f"{prefix}{part.name}.")
            elif isinstance(part, (ast.FunctionDef, ast.AsyncFunctionDef)):
                visit(part, f"{prefix}{part.name}.<locals>.")
            elif isinstance(part, ast.stmt):
                visit(part, prefix)

    visit(ast.parse(source), "")
    return found


def has_interface(module_class: type[torch.nn.Module]) -> bool:
    """Returns whether a module uses transformers' AttentionInterface."""
    return "get_interface(" in source_of(module_class)


def is_named_attention(module_class: type[torch.nn.Module]) -> bool:
    """Returns whether the name of a module's class contains "attention" or "Attention"."""
    return "ttention" in module_class.__name__


def has_own_softmax(module_class: type[torch.nn.Module]) -> bool:
    """Returns whether a module computes attention itself or calls PyTorch's attention functions."""
    if not is_named_attention(module_class):
        return False
    if issubclass(module_class, torch.nn.MultiheadAttention):
        return True
    source = source_of(module_class)
    if _FUNCTION.search(source) is not None:
        return True
    return _SOFTMAX.search(source) is not None and _PRODUCT.search(source) is not None


def asks_for_an_array(module_class: type[torch.nn.Module]) -> bool:
    """Returns whether a module checks that its mask is an array before computing with it."""
    return _ASKS.search(source_of(module_class)) is not None
