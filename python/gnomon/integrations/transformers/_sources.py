"""What classes of models say in their sources.

transformers itself looks there whether a model has its interface.
"""

from __future__ import annotations

import inspect
import re

import torch

_FUNCTION = re.compile(r"scaled_dot_product_attention\(|multi_head_attention_forward\(")
_PRODUCT = re.compile(r"matmul\(|bmm\(|einsum\(| @ ")


# Reading one takes longer than looking into it.
_SOURCES: dict[type[torch.nn.Module], str] = {}


def source_of(module_class: type[torch.nn.Module]) -> str:
    """Of a class and of those that it inherits from, PyTorch's aside."""
    if module_class in _SOURCES:
        return _SOURCES[module_class]
    sources = []
    for part in module_class.__mro__:
        if part.__module__.split(".")[0] == "torch" or part is object:
            continue
        try:
            sources.append(inspect.getsource(part))
        except (OSError, TypeError):
            continue
    _SOURCES[module_class] = "\n".join(sources)
    return _SOURCES[module_class]


def has_interface(module_class: type[torch.nn.Module]) -> bool:
    """Whether a module attends through transformers' AttentionInterface."""
    return "get_interface(" in source_of(module_class)


def is_named_attention(module_class: type[torch.nn.Module]) -> bool:
    """Whether a module's name says that it attends, itself or by a part."""
    return "ttention" in module_class.__name__


def has_own_softmax(module_class: type[torch.nn.Module]) -> bool:
    """Whether a module attends by a softmax and products, or PyTorch's functions, of its own."""
    if not is_named_attention(module_class):
        return False
    if issubclass(module_class, torch.nn.MultiheadAttention):
        return True
    source = source_of(module_class)
    if _FUNCTION.search(source) is not None:
        return True
    return re.search("[sS]oftmax\\(", source) is not None and _PRODUCT.search(source) is not None
