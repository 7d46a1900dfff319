"""Checks of the arguments of modules."""

from __future__ import annotations

import torch
from torch import Tensor

from gnomon._checks import check_tensors, wrong_type

SPECIFICATION = "a specification, a string"
# The types that autocast casts to its own.
_AUTOCAST = (torch.float32, torch.bfloat16, torch.float16)


def check_embeddings(
    module: str, argument: str, tokens: Tensor, dim: int, layer: torch.nn.Module | None = None
) -> None:
    """Checks the shape of tokens (B, L, dim), and their type against the layer that reads them."""
    check_tensors(f"nn.{module}", **{argument: tokens})
    if tokens.dim() != 3 or tokens.shape[2] != dim:
        raise ValueError(
            f"gnomon.nn.{module}: {argument} has shape {tuple(tokens.shape)}; expected "
            f"(B, L, {dim})"
        )
    # Other layers, such as those with quantized weights, check what they read themselves.
    if layer is None or type(layer) is not torch.nn.Linear:
        return
    weight = layer.weight
    if tokens.device != weight.device:
        raise TypeError(
            f"gnomon.nn.{module}: {argument} is on {tokens.device} and the module on "
            f"{weight.device}; expected the same"
        )
    if tokens.dtype == weight.dtype:
        return
    cast = all(dtype in _AUTOCAST for dtype in (tokens.dtype, weight.dtype))
    if not (cast and torch.is_autocast_enabled(tokens.device.type)):
        raise TypeError(
            f"gnomon.nn.{module}: {argument} has dtype {tokens.dtype} and the module "
            f"{weight.dtype}; expected the same"
        )


def is_hidden(operator: str, argument: str, mask: object) -> Tensor:
    """A mask of torch.nn, True or -inf where hidden, as booleans."""
    if not isinstance(mask, Tensor):
        raise wrong_type(operator, argument, mask, "a Tensor, or None")
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise TypeError(
            f"gnomon.{operator}: {argument} has dtype {mask.dtype}; expected booleans, or numbers "
            "that are 0 or -inf"
        )
    hidden = mask == -torch.inf
    if not torch.compiler.is_compiling() and not bool((hidden | (mask == 0)).all()):
        raise NotImplementedError(
            f"gnomon.{operator}: {argument} has numbers other than 0 and -inf, which are added to "
            "scores; expected booleans"
        )
    return hidden
