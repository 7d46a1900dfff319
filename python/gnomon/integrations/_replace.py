"""Models of torch.nn and of timm with gnomon's attention."""

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
    """Has the attention modules of a model use gnomon, with the weights that they have.

        model = timm.create_model("vit_tiny_patch16_224")
        replace_attention(model, "laplacian", position="sink")

    torch.nn.MultiheadAttention is replaced by
    gnomon.nn.MultiheadAttention.from_torch(module, drop_in=True), which is called as it was.
    Attention and AttentionRope of timm.layers (ViT, DeiT and others) stay where they are, with
    another class: their parameters, the fused qkv among them, keep their names, so that timm's
    checkpoints load into them. With the dot product and no position the outputs are the model's
    own, up to rounding. What a similarity or a position learns is in the submodules
    "gnomon_similarity" and "gnomon_position" of timm's layers.

    Args:
        model: changed in place.
        similarity: a specification of the catalogue, "penumbral".
        position: a specification, "sink" or "grid_bias:shape=14x14:prefix=1", or a list of these
            for their sum; added to the positions that the model has.
        max_length: the most tokens, for positions that learn a row for each.

    Returns:
        The model.

    Raises:
        TypeError: an argument of another type, or the model is itself a
            torch.nn.MultiheadAttention, which has no module that it could be replaced in.
        ValueError: a specification, map=none among it, or a width of heads that it does not take.
        NotImplementedError: no module is known, or a position reads more than queries and keys.
    """
    if not isinstance(model, torch.nn.Module):
        raise wrong_type(OPERATOR, "model", model, "a torch.nn.Module")
    if isinstance(model, torch.nn.MultiheadAttention):
        raise TypeError(
            f"gnomon.{OPERATOR}: model is a torch.nn.MultiheadAttention; expected a model that has "
            "some; of one alone, use gnomon.nn.MultiheadAttention.from_torch"
        )
    if not isinstance(similarity, str):
        raise wrong_type(OPERATOR, "similarity", similarity, "a specification, a string")
    if position is not None and not isinstance(position, str):
        if not isinstance(position, Sequence) or not all(isinstance(p, str) for p in position):
            raise wrong_type(OPERATOR, "position", position, "a specification, or a list of them")
        position = "+".join(position)
    check_similarity(f"gnomon.{OPERATOR}", similarity)
    if position is not None:
        check_position(f"gnomon.{OPERATOR}", position)
    classes = _timm_classes()
    # All are made before any is replaced: what raises leaves the model as it was.
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
            f"gnomon.{OPERATOR}: {type(model).__name__} has no attention that is known, neither "
            "torch.nn.MultiheadAttention nor Attention or AttentionRope of timm.layers; use "
            "gnomon.nn.Attention in the place of its own"
        )
    known = {*of_torch, *(layer for layer, _ in of_timm)}
    unknown = sorted({type(layer).__name__ for layer in model.modules() if _stays(layer, known)})
    if unknown:
        warnings.warn(
            f"gnomon.{OPERATOR}: {', '.join(unknown)} of {type(model).__name__} attend in a way "
            "that is not known, and stay as they are",
            stacklevel=2,
        )
    for parent in list(model.modules()):
        # named_children() has a module of two names once.
        for name, child in list(parent._modules.items()):
            if child in of_torch:
                setattr(parent, name, of_torch[child])
    for layer, terms in of_timm:
        layer.__class__ = classes.get(type(layer), type(layer))
        like = layer.proj.weight
        for name in (SIMILARITY, POSITION):
            layer._modules.pop(name, None)
        for name, module in terms:
            setattr(layer, name, module.to(like.device, like.dtype).train(layer.training))
    return model


def _timm_classes() -> dict[type[torch.nn.Module], type[torch.nn.Module]]:
    """Where timm is not imported, no model has any."""
    if "timm.layers.attention" not in sys.modules:
        return {}
    from gnomon.integrations._timm import CLASSES

    return CLASSES


def _terms_of(
    layer: torch.nn.Module, similarity: str, position: str | None, max_length: int
) -> list[tuple[str, torch.nn.Module]]:
    heads, width = layer.num_heads, layer.head_dim
    terms: list[tuple[str, torch.nn.Module]] = []
    if similarity != "dot":
        terms.append((SIMILARITY, LearnedSimilarity(similarity, heads, width)))
    if position is not None:
        terms.append((POSITION, LearnedPosition(position, heads, width, width, max_length)))
    return terms


def _stays(layer: torch.nn.Module, known: set[torch.nn.Module]) -> bool:
    """Whether a module that is called attention has none that is replaced, itself or in it."""
    kind = type(layer)
    if "ttention" not in kind.__name__ or kind.__module__.startswith("gnomon."):
        return False
    return not any(part in known for part in layer.modules())
