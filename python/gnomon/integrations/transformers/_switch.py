"""Which models use gnomon."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from gnomon._checks import wrong_type
from gnomon.integrations.transformers import _cones
from gnomon.integrations.transformers._adapters import ADAPTED, NAME, replace_forwards
from gnomon.integrations.transformers._interface import OPERATOR, SIMILARITY, attention_forward
from gnomon.integrations.transformers._masks import give_arrays, to_mask
from gnomon.integrations.transformers._products import refuse_weights, see_products
from gnomon.integrations.transformers._sources import (
    asks_for_an_array,
    has_interface,
    has_own_softmax,
    is_named_attention,
)

#: The field of a configuration with the similarity of a model's layers.
_FIELD = "gnomon_similarity"
#: An attribute of modules: the configuration that theirs is a copy of, perhaps a larger model's.
_SHARED = "_gnomon_shared_config"


def register() -> None:
    """Makes "gnomon" a value of attn_implementation; calling it again does nothing.

    Sets the forward of T5Attention, MT5Attention, BloomAttention, MptAttention, MptBlock and
    SwinAttention and SwinLayer.get_attn_mask to functions that call the former ones unless the
    model's implementation is "gnomon", and PreTrainedModel's __init__, post_init, _from_config and
    from_pretrained to functions that call these: the first adds the name to a model's table of
    classes of attention (Falcon, GPT-J), the second makes the models that are built or loaded from
    then on what use_gnomon and with_cone_attention make of others, and the others warn of a model
    that cannot attend as it was asked to. So are its save_pretrained, which names the similarity of
    a model's parts in its configuration, _initialize_weights, which starts similarities that a
    checkpoint lacks, and set_attn_implementation, which refuses to take a similarity from a model.
    """
    if NAME in AttentionInterface().valid_keys():
        return
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, to_mask)
    replace_forwards()
    theirs = PreTrainedModel.post_init

    @functools.wraps(theirs)
    def post_init(self: PreTrainedModel) -> None:
        theirs(self)
        if (similarity := getattr(self.config, _FIELD, None)) is not None:
            with_cone_attention(self, similarity)
        elif self.config._attn_implementation == NAME:
            _switch_parts(self)

    PreTrainedModel.post_init = post_init
    for name in ("_from_config", "from_pretrained"):
        _warn_after(name)
    _wrap("__init__", _name_in_tables)
    _wrap("save_pretrained", _name_similarities)
    _wrap("_initialize_weights", _begin_similarity)
    _wrap("set_attn_implementation", _refuse_to_drop)


def _warn_after(name: str) -> None:
    """Has a class method that makes models warn of one that cannot attend as it was asked to."""
    make = getattr(PreTrainedModel, name).__func__

    @functools.wraps(make)
    def made(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        result = make(cls, *args, **kwargs)
        # from_pretrained may return what it knows of the loading beside the model.
        model = result[0] if isinstance(result, tuple) else result
        asked = kwargs.get("attn_implementation")
        if asked not in (None, NAME) and _has_similarity(model):
            warnings.warn(
                f"{OPERATOR}: attn_implementation is {asked!r}, which does not know the similarity "
                f"of this {cls.__name__}; it uses gnomon",
                stacklevel=2,
            )
        if model.config._attn_implementation == NAME and not _has_attention(model):
            warnings.warn(
                f"{OPERATOR}: {cls.__name__} has no attention that is known, and stays as it is",
                stacklevel=2,
            )
        return result

    setattr(PreTrainedModel, name, classmethod(made))


def _wrap(name: str, first: Callable[..., None]) -> None:
    """Has a method of models call another function with its arguments before it does its work."""
    theirs = getattr(PreTrainedModel, name)

    @functools.wraps(theirs)
    def method(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        first(self, *args, **kwargs)
        return theirs(self, *args, **kwargs)

    setattr(PreTrainedModel, name, method)


def _begin_similarity(
    _model: PreTrainedModel, module: torch.nn.Module, *_args: Any, **_kwargs: Any
) -> None:
    if isinstance(module, _cones.LearnedSimilarity):
        module.begin_what_is_missing()


def _refuse_to_drop(model: PreTrainedModel, attn_implementation: Any, *_: Any, **_k: Any) -> None:
    names = attn_implementation
    if isinstance(names, dict):
        names = set(names.values())
    if names != NAME and names != {NAME} and _has_similarity(model):
        raise ValueError(
            f"{OPERATOR}: attn_implementation is {attn_implementation!r}, and "
            f"{type(model).__name__} has the similarity of with_cone_attention, which it does not "
            f"know; expected {NAME!r}, or a model without one"
        )


def _name_similarities(model: PreTrainedModel, *_args: Any, **_kwargs: Any) -> None:
    """Has a model's configuration be made of those of its parts, where these have got their own.

    with_cone_attention may have been given a part.
    """
    own = {
        id(shared): part.config
        for part in model.modules()
        if (shared := part.__dict__.get(_SHARED)) is not None
    }

    def replaced(config: PreTrainedConfig) -> PreTrainedConfig:
        if id(config) in own:
            return own[id(config)]
        changed = {
            name: new
            for name, value in vars(config).items()
            if isinstance(value, PreTrainedConfig) and (new := replaced(value)) is not value
        }
        if changed:
            config = copy.copy(config)
        for name, value in changed.items():
            setattr(config, name, value)
        return config

    if own:
        model.config = replaced(model.config)


def _has_attention(model: torch.nn.Module) -> bool:
    return any(attends(layer) for layer in model.modules())


def _name_in_tables(model: PreTrainedModel, *_args: Any, **_kwargs: Any) -> None:
    """Makes NAME that of the eager class where a model looks its layers' class up by a name."""
    for family in type(model).__mro__:
        for name, table in vars(sys.modules[family.__module__]).items():
            if name.endswith("_ATTENTION_CLASSES") and isinstance(table, dict):
                if (eager := table.get("eager")) is not None:
                    table.setdefault(NAME, eager)


def _check_model(model: object) -> None:
    if not isinstance(model, PreTrainedModel):
        raise wrong_type(
            "integrations.transformers", "model", model, "a transformers.PreTrainedModel"
        )


def use_gnomon(model: PreTrainedModel) -> PreTrainedModel:
    """Calls register() and makes a model that exists use gnomon; returns it.

    Modules that write their attention by hand, and so would not know, are watched while they run:
    their softmax of a product, times values, becomes a call of the operator. Where one of them
    does what the operator does not, its attention stays dense, and a warning says so, as it does
    of modules that are called attention and have neither.

    Raises:
        TypeError: it is no transformers.PreTrainedModel.
        NotImplementedError: it has no attention that is known. The model is as it was.
    """
    _check_model(model)
    register()
    if not _has_attention(model):
        raise NotImplementedError(
            f"{OPERATOR}: {type(model).__name__} has no attention that is known: none through "
            "transformers' AttentionInterface, and none that is a softmax of a product of its own; "
            "leave it as it is"
        )
    if dense := _unknown(model):
        # Before anything is switched, lest a warning that is an error leave half of it.
        warnings.warn(
            f"{OPERATOR}: {', '.join(dense)} of {type(model).__name__} attend in a way that is not "
            "known, and stay as they are",
            stacklevel=2,
        )
    _switch_parts(model)
    return model


def _unknown(model: torch.nn.Module) -> list[str]:
    """The classes of modules that are called attention and do not attend by the operator."""
    return sorted(
        {
            type(layer).__name__
            for layer in model.modules()
            if is_named_attention(type(layer))
            # Nothing calls a module without a forward pass (Funnel's attention structure).
            and type(layer).forward is not torch.nn.Module.forward
            and not any(attends(part) for part in layer.modules())
        }
    )


def attends(layer: torch.nn.Module) -> bool:
    """Whether a module calls the operator, not one of those around it."""
    kind = type(layer)
    if isinstance(layer, PreTrainedModel):
        return False
    return isinstance(layer, ADAPTED) or has_interface(kind) or has_own_softmax(kind)


def use_eager(model: PreTrainedModel) -> PreTrainedModel:
    """Undoes use_gnomon: a model attends as transformers writes it; returns the model.

    For models of the AttentionInterface this is set_attn_implementation("eager"), which others do
    not have. use_gnomon may follow again.

    Raises:
        TypeError: it is no transformers.PreTrainedModel.
        ValueError: with_cone_attention gave it a similarity, which its own attention does not know.
    """
    _check_model(model)
    if _has_similarity(model):
        raise ValueError(
            f"{OPERATOR}: {type(model).__name__} has the similarity of with_cone_attention, which "
            "eager attention does not know; expected a model without one"
        )
    _set_implementation(model, "eager")
    return model


def _has_similarity(model: torch.nn.Module) -> bool:
    return any(hasattr(layer, SIMILARITY) for layer in model.modules())


def _set_implementation(model: PreTrainedModel, name: str) -> None:
    """Not as set_attn_implementation(), which leaves those without the interface as they are."""
    for part in model.modules():
        # Layers may have a copy of their model's (X-CLIP).
        if isinstance(config := getattr(part, "config", None), PreTrainedConfig):
            config._attn_implementation = name


def _separate_configurations(model: PreTrainedModel) -> None:
    """Gives a model configurations of its own: another may have been built from the same ones."""
    copied: dict[int, Any] = {}
    for part in model.modules():
        if isinstance(config := getattr(part, "config", None), PreTrainedConfig):
            part.config = copy.deepcopy(config, copied)
            part.__dict__.setdefault(_SHARED, config)


def _switch_parts(model: PreTrainedModel) -> None:
    _set_implementation(model, NAME)
    owners = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    for owner in reversed(owners):
        refuse_weights(owner, NAME)
        for layer in owner.modules():
            kind = type(layer)
            if has_own_softmax(kind) and not has_interface(kind) and not isinstance(layer, ADAPTED):
                see_products(layer, owner.config, NAME)
            elif has_interface(kind) and asks_for_an_array(kind):
                give_arrays(layer)


def with_cone_attention(model: PreTrainedModel, similarity: str = "penumbral") -> PreTrainedModel:
    """Calls use_gnomon and swaps the similarity of all attention layers; returns the model.

    Each attention module gets a submodule "gnomon_similarity" with the parameter "gamma_theta" (H,)
    and the buffer "gamma_start" (or of beta, scale: what the similarity calls its factor), as in
    gnomon.nn.MultiheadAttention: gamma = gamma_start * exp(5 theta), and theta starts at 0, where
    the logits of N(0, 1) tokens have a spread of 1. They train, and are saved with the model: its
    configuration names the similarity, so that after register() from_pretrained() loads them.
    Calling it again starts the similarity anew. The model's own scale of the dot product has no
    meaning then, but where a layer that writes its products itself multiplies queries or keys by it
    first: the similarity reads them so.

    Rotary positions leave the coordinate of a head that is a height, the last one of cones, and the
    coordinate that it is paired with as they are, as gnomon.position.RoPE does.

    Args:
        model: of transformers, one that use_gnomon takes, with two coordinates a head or more.
        similarity: a specification of the catalogue, "penumbral:score=height2". The model's
            configuration, which names it, is a copy from then on.

    Raises:
        ValueError: the specification, map=none among it, since tokens of a model are no points of a
            space; or a width of the heads that the similarity does not take.
        NotImplementedError: as use_gnomon, or the heads of a layer are not known, or it rotates
            them in a way that is not known. But in a forward pass, the model is as it was.
    """
    if not isinstance(similarity, str):
        raise wrong_type(
            "integrations.transformers", "similarity", similarity, "a specification, a string"
        )
    _check_model(model)
    _cones.check_map(similarity)
    if dense := _unknown(model):
        raise NotImplementedError(
            f"{OPERATOR}: {', '.join(dense)} of {type(model).__name__} attend in a way that is not "
            "known, and would keep the dot product; give a part of the model without them"
        )
    layers = [layer for layer in model.modules() if attends(layer)]
    learned = [
        _cones.LearnedSimilarity(similarity, *_cones.shape_of_heads(layer)) for layer in layers
    ]
    for layer, its in zip(layers, learned, strict=True):
        if its.height is not None:
            _cones.check_rotation(layer)
    if getattr(model.config, _FIELD, None) != similarity:
        _separate_configurations(model)
    use_gnomon(model)
    for layer, its in zip(layers, learned, strict=True):
        if not hasattr(layer, SIMILARITY):
            _cones.keep_heights(layer)
        setattr(layer, SIMILARITY, its.to(model.device, model.dtype))
    setattr(model.config, _FIELD, similarity)
    return model
