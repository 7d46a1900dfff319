"""Replaces the attention modules of torch.nn and timm models with gnomon's."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from typing import TypeVar

import torch

from gnomon._checks import wrong_type
from gnomon.integrations._terms import (
    POSITION,
    SIMILARITY,
    LearnedPosition,
    LearnedSimilarity,
    check_position,
    check_similarity,
)
from gnomon.nn import MultiheadAttention

OPERATOR = "integrations.replace_attention"
_Model = TypeVar("_Model", bound=torch.nn.Module)


def replace_attention(
    model: _Model,
    similarity: str = "dot",
    position: str | Sequence[str] | None = None,
    *,
    max_length: int = 512,
) -> _Model:
    """Replaces the attention modules of a model with gnomon's, which keep the trained weights.

        model = timm.create_model("vit_tiny_patch16_224")
        replace_attention(model, "laplacian", position="sink")

    Each torch.nn.MultiheadAttention is replaced by gnomon.nn.MultiheadAttention.from_torch(module,
    drop_in=True), which has the same signature. For timm's Attention and AttentionRope (ViT, DeiT
    and others), WindowAttention (Swin) and EvaAttention, only the class of the module changes.
    Their parameters, including the fused qkv, keep their names, so timm checkpoints still load. The
    parameters of the similarity and the position are in the submodules "gnomon_similarity" and
    "gnomon_position". With the dot product and no position, the outputs match the original model up
    to rounding.

    Args:
        model: modified in place.
        similarity: a catalogue specification such as "penumbral".
        position: a specification such as "sink" or "grid_bias:shape=14x14:prefix=1", or a list of
            specifications to sum. It is added to the model's own positions.
        max_length: the maximum number of tokens, for positions that have one learned row per token.

    Returns:
        The model.

    Raises:
        TypeError: an argument has the wrong type, or the model is itself a
            torch.nn.MultiheadAttention and has no parent module.
        ValueError: a specification is invalid or has map=none, or the similarity does not support
            the head dimension.
        NotImplementedError: the model has no supported module, or a position requires inputs other
            than queries and keys.

    Example:
        >>> model = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> model = gnomon.integrations.replace_attention(model, "gaussian", "alibi")
    """
    if not isinstance(model, torch.nn.Module):
        raise wrong_type(OPERATOR, "model", model, "a torch.nn.Module")
    if isinstance(model, torch.nn.MultiheadAttention):
        raise TypeError(
            f"gnomon.{OPERATOR}: model is itself a torch.nn.MultiheadAttention; expected a model "
            "that contains such modules. To convert a single module, use "
            "gnomon.nn.MultiheadAttention.from_torch"
        )
    if not isinstance(similarity, str):
        raise wrong_type(OPERATOR, "similarity", similarity, "a specification string")
    if position is not None and not isinstance(position, str):
        if not isinstance(position, Sequence) or not all(isinstance(p, str) for p in position):
            raise wrong_type(
                OPERATOR, "position", position, "a specification string, or a list of them"
            )
        position = "+".join(position)
    check_similarity(f"gnomon.{OPERATOR}", similarity)
    if position is not None:
        check_position(f"gnomon.{OPERATOR}", position)
    classes = _timm_classes()
    # Build all replacements first, so that an error leaves the model unchanged.
    of_torch: dict[torch.nn.Module, torch.nn.Module] = {}
    of_timm: list[tuple[torch.nn.Module, list[tuple[str, torch.nn.Module]]]] = []
    for layer in model.modules():
        if type(layer) is torch.nn.MultiheadAttention:
            of_torch[layer] = MultiheadAttention.from_torch(
                layer, drop_in=True, similarity=similarity, position=position
            )
        elif type(layer) in classes or type(layer) in classes.values():
            of_timm.append((layer, _terms_of(layer, similarity, position, max_length)))
    if not of_torch and not of_timm:
        raise NotImplementedError(
            f"gnomon.{OPERATOR}: {type(model).__name__} contains no supported attention module "
            "(torch.nn.MultiheadAttention, or the attention of timm's ViT, Swin or EVA); use "
            "gnomon.nn.Attention in the model's code instead"
        )
    known = {*of_torch, *(layer for layer, _ in of_timm)}
    unknown = sorted({type(layer).__name__ for layer in model.modules() if _stays(layer, known)})
    if unknown:
        warnings.warn(
            f"gnomon.{OPERATOR}: layers of {type(model).__name__} with unsupported attention are "
            f"left unchanged: {', '.join(unknown)}",
            stacklevel=2,
        )
    for parent in list(model.modules()):
        # named_children() would yield a module that has two names only once.
        for name, child in list(parent._modules.items()):
            if child in of_torch:
                setattr(parent, name, of_torch[child])
    for layer, terms in of_timm:
        layer.__class__ = classes.get(type(layer), type(layer))
        for name in (SIMILARITY, POSITION):
            layer._modules.pop(name, None)
        for name, module in terms:
            setattr(layer, name, module.train(layer.training))
    return model


def _timm_classes() -> dict[type[torch.nn.Module], type[torch.nn.Module]]:
    """Maps timm's classes to their replacements; empty if timm has not been imported."""
    classes: dict[type[torch.nn.Module], type[torch.nn.Module]] = {}
    if "timm.layers.attention" in sys.modules:
        from gnomon.integrations import _timm

        classes |= _timm.CLASSES
    # Do not import these modules here, because that would import all timm models.
    if "timm.models.swin_transformer" in sys.modules and "timm.models.eva" in sys.modules:
        from gnomon.integrations import _timm_models

        classes |= _timm_models.CLASSES
    return classes


def _terms_of(
    layer: torch.nn.Module, similarity: str, position: str | None, max_length: int
) -> list[tuple[str, torch.nn.Module]]:
    heads, width = layer.num_heads, layer.proj.in_features // layer.num_heads
    like = layer.proj.weight
    made = {"device": like.device, "dtype": like.dtype}
    terms: list[tuple[str, torch.nn.Module]] = []
    if similarity != "dot":
        terms.append((SIMILARITY, LearnedSimilarity(similarity, heads, width, **made)))
    if position is not None:
        terms.append((POSITION, LearnedPosition(position, heads, width, width, max_length, **made)))
    return terms


def _stays(layer: torch.nn.Module, known: set[torch.nn.Module]) -> bool:
    """Returns whether this is an attention module that neither is nor contains a replaced one."""
    kind = type(layer)
    if kind.__module__.startswith("gnomon."):
        return False
    # Subclasses of torch's module are not replaced, because they may compute something else.
    if "ttention" not in kind.__name__ and not isinstance(layer, torch.nn.MultiheadAttention):
        return False
    return not any(part in known for part in layer.modules())
