"""Argument checks for modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gnomon._checks import Device, check_tensors, kind_of
from gnomon.nn._held_terms import Projection

SPECIFICATION = "a specification string"
# The dtypes that autocast converts.
_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)


def check_factory(operator: str, device: Device, dtype: torch.dtype | None) -> dict[str, Any]:
    """Checks a module's dtype, and returns its device and dtype as keyword arguments."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        what = dtype if isinstance(dtype, torch.dtype) else kind_of(dtype)
        raise TypeError(
            f"gnomon.{operator}: dtype is {what}; expected a floating-point dtype, or None"
        )
    return {"device": device, "dtype": dtype}


def check_embeddings(
    module: str, argument: str, tokens: Tensor, dim: int, layer: torch.nn.Module | None = None
) -> None:
    """Checks the shape of tokens (B, L, dim), and that they have the layer's device and dtype."""
    check_tensors(f"nn.{module}", **{argument: tokens})
    if tokens.dim() != 3 or tokens.shape[2] != dim:
        raise ValueError(
            f"gnomon.nn.{module}: {argument} has shape {tuple(tokens.shape)}; expected "
            f"(B, L, {dim})"
        )
    # Other layers, such as quantized ones, check their own input.
    if type(layer) not in (torch.nn.Linear, Projection):
        return
    assert layer is not None
    weight = layer.weight
    if tokens.device != weight.device:
        raise TypeError(
            f"gnomon.nn.{module}: {argument} is on {tokens.device}, but the module is "
            f"on {weight.device}; expected the same device"
        )
    if tokens.dtype == weight.dtype:
        return
    cast = all(dtype in _AUTOCAST for dtype in (tokens.dtype, weight.dtype))
    if not (cast and torch.is_autocast_enabled(tokens.device.type)):
        raise TypeError(
            f"gnomon.nn.{module}: {argument} has dtype {tokens.dtype} and the module has "
            f"{weight.dtype}; expected the same dtype"
        )
