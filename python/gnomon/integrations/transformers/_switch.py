"""Which models use gnomon."""

from __future__ import annotations

import copy
import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)

from gnomon._checks import wrong_type
from gnomon.integrations._terms import (
    POSITION,
    SIMILARITY,
    LearnedPosition,
    LearnedSimilarity,
    check_position,
    check_similarity,
)
from gnomon.integrations.transformers import _cones
from gnomon.integrations.transformers._adapters import ADAPTED, NAME, replace_forwards
from gnomon.integrations.transformers._interface import attention_forward
from gnomon.integrations.transformers._masks import OPERATOR, give_arrays, to_mask
from gnomon.integrations.transformers._products import refuse_weights, see_products
from gnomon.integrations.transformers._sources import (
    asks_for_an_array,
    has_interface,
    has_own_softmax,
    is_named_attention,
)

#: The fields of a configuration with the terms of a model's layers, and these's submodules.
_FIELDS = (SIMILARITY, POSITION)
_NAME = OPERATOR.removeprefix("gnomon.")
#: A model of transformers, or of PEFT around one.
Model = TypeVar("Model", bound=torch.nn.Module)
#: An attribute of modules: the configuration that theirs is a copy of, perhaps a larger model's.
_SHARED = "_gnomon_shared_config"


def register() -> None:
    """Makes "gnomon" a value of attn_implementation; calling it again does nothing.

    Sets the forward of T5Attention, MT5Attention, BloomAttention, MptAttention, MptBlock and
    SwinAttention and SwinLayer.get_attn_mask to functions that call the former ones unless the
    model's implementation is "gnomon", and PreTrainedModel's __init__, post_init, _from_config and
    from_pretrained to functions that call these: the first adds the name to a model's table of
    classes of attention (Falcon, GPT-J), the second makes the models that are built or loaded from
    then on what use_gnomon and with_attention make of others, and the others warn of a model
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
        similarity, position = (getattr(self.config, field, None) for field in _FIELDS)
        if similarity is not None or position is not None:
            with_attention(self, similarity, position)
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
        if asked not in (None, NAME) and _has_terms(model):
            warnings.warn(
                f"{OPERATOR}: attn_implementation is {asked!r}, which does not know the similarity "
                f"or the position of this {cls.__name__}; it uses gnomon",
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
    if isinstance(module, (LearnedSimilarity, LearnedPosition)):
        module.begin_what_is_missing()


def _refuse_to_drop(model: PreTrainedModel, attn_implementation: Any, *_: Any, **_k: Any) -> None:
    names = attn_implementation
    if isinstance(names, dict):
        names = set(names.values())
    if names != NAME and names != {NAME} and _has_terms(model):
        raise ValueError(
            f"{OPERATOR}: attn_implementation is {attn_implementation!r}, and "
            f"{type(model).__name__} has terms of with_attention, which it does not know; expected "
            f"{NAME!r}, or a model without them"
        )


def _name_similarities(model: PreTrainedModel, *_args: Any, **_kwargs: Any) -> None:
    """Has a model's configuration be made of those of its parts, where these have got their own.

    with_attention may have been given a part.
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


def _base_of(model: object) -> PreTrainedModel:
    """The model of transformers itself, of a model of PEFT the one that it adapts."""
    base = model
    if not isinstance(model, PreTrainedModel) and callable(
        get_base := getattr(model, "get_base_model", None)
    ):
        base = get_base()
    if not isinstance(base, PreTrainedModel):
        raise wrong_type(
            "integrations.transformers",
            "model",
            model,
            "a transformers.PreTrainedModel, or a PEFT model of one",
        )
    return base


def use_gnomon(model: Model) -> Model:
    """Calls register() and makes a model that exists use gnomon; returns it.

    It may be one of PEFT, whose base model is switched.

    Modules that write their attention by hand, and so would not know, are watched while they run:
    their softmax of a product, times values, becomes a call of the operator. Where one of them
    does what the operator does not, its attention stays dense, and a warning says so, as it does
    of modules that are called attention and have neither.

    Raises:
        TypeError: it is no transformers.PreTrainedModel, nor one in a PEFT model.
        NotImplementedError: it has no attention that is known. The model is as it was.
    """
    base = _base_of(model)
    register()
    if not _has_attention(base):
        raise NotImplementedError(
            f"{OPERATOR}: {type(base).__name__} has no attention that is known: none through "
            "transformers' AttentionInterface, and none that is a softmax of a product of its own; "
            "leave it as it is"
        )
    if dense := _unknown(base):
        # Before anything is switched, lest a warning that is an error leave half of it.
        warnings.warn(
            f"{OPERATOR}: {', '.join(dense)} of {type(base).__name__} attend in a way that is not "
            "known, and stay as they are",
            stacklevel=2,
        )
    _switch_parts(base)
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


def use_eager(model: Model) -> Model:
    """Undoes use_gnomon: a model attends as transformers writes it; returns the model.

    For models of the AttentionInterface this is set_attn_implementation("eager"), which others do
    not have. use_gnomon may follow again.

    Raises:
        TypeError: it is no transformers.PreTrainedModel, nor one in a PEFT model.
        ValueError: with_attention gave it a similarity or a position, which its own attention does
            not know.
    """
    base = _base_of(model)
    if _has_terms(base):
        raise ValueError(
            f"{OPERATOR}: {type(base).__name__} has terms of with_attention, which eager attention "
            "does not know; expected a model without them"
        )
    _set_implementation(base, "eager")
    return model


def _has_terms(model: torch.nn.Module) -> bool:
    return any(hasattr(layer, field) for layer in model.modules() for field in _FIELDS)


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
            # A model has generate(), which looks at masks since 5.24 and keeps them as they are.
            elif attends(layer) and has_interface(kind) and asks_for_an_array(kind):
                give_arrays(layer)


def with_cone_attention(model: Model, similarity: str = "penumbral") -> Model:
    """with_attention(model, similarity): cones in the place of the dot product in all layers."""
    if not isinstance(similarity, str):
        raise wrong_type(_NAME, "similarity", similarity, "a specification, a string")
    return with_attention(model, similarity)


def with_attention(
    model: Model, similarity: str | None = None, position: str | Sequence[str] | None = None
) -> Model:
    """Calls use_gnomon and gives all attention layers another similarity, a position, or both.

        with_attention(model, "penumbral", position="alibi+sink")

    Each attention module gets a submodule "gnomon_similarity" with the parameter "gamma_theta" (H,)
    and the buffer "gamma_start" (or of beta, scale: what the similarity calls its factor), as in
    gnomon.nn.MultiheadAttention: gamma = gamma_start * exp(5 theta), and theta starts at 0, where
    the logits of N(0, 1) tokens have a spread of 1. A position is a submodule "gnomon_position"
    with the tensors that gnomon.nn.MultiheadAttention has for it, "t5_table". They train, and are
    saved with the model: its configuration names the terms, so that after register()
    from_pretrained() loads them. Calling it again starts what is given anew, and leaves the other
    as it is. The model's own scale of the dot product has no meaning to another similarity, but
    where a layer that writes its products itself multiplies queries or keys by it first: the
    similarity reads them so.

    A position comes on top of those that the model has, rotations and biases; layers that attend to
    the tokens of an encoder get none. Rotary positions leave the coordinate of a head that is a
    height, the last one of cones, and the coordinate that it is paired with as they are, as
    gnomon.position.RoPE does.

    In a model of PEFT the submodules are modules_to_save of its adapters: they train and
    save_pretrained() writes them. To load them, give the base model the same terms before
    PeftModel.from_pretrained(). Of a base model that has them already PEFT trains what its
    configuration names: LoraConfig(..., modules_to_save=["gnomon_similarity", "gnomon_position"]).

    Args:
        model: of transformers, one that use_gnomon takes, with two coordinates a head or more.
        similarity: a specification of the catalogue, "penumbral:score=height2"; None leaves the one
            that the layers have. The model's configuration, which names it, is a copy from then on.
        position: a specification, "alibi", "t5+sink" or "hype:tau=learned", or a list of these for
            their sum; None leaves the one that the layers have.

    Raises:
        ValueError: neither is given; the specification, map=none among it, since tokens of a model
            are no points of a space; or a width of the heads that a term does not take.
        NotImplementedError: as use_gnomon, or the heads of a layer are not known, or it rotates
            them in a way that is not known, or a position reads more than queries and keys
            ("forget", "sinusoidal"), or adapters cannot save the parameters. But in a forward pass,
            the model is as it was.
    """
    base = _base_of(model)
    if position is not None and not isinstance(position, str):
        if not isinstance(position, Sequence) or not all(isinstance(p, str) for p in position):
            raise wrong_type(_NAME, "position", position, "a specification, or a list of them")
        position = "+".join(position)
    if similarity is not None and not isinstance(similarity, str):
        raise wrong_type(_NAME, "similarity", similarity, "a specification, a string")
    if similarity is None and position is None:
        raise ValueError(
            f"{OPERATOR}: neither a similarity nor a position is given; expected one of them"
        )
    if similarity is not None:
        check_similarity(OPERATOR, similarity)
    if position is not None:
        check_position(OPERATOR, position)
    if base is not model:
        _check_adapters(model)
    if dense := _unknown(base):
        raise NotImplementedError(
            f"{OPERATOR}: {', '.join(dense)} of {type(base).__name__} attend in a way that is not "
            "known, and would keep the dot product and their positions; give a part of the model "
            "without them"
        )
    made = []
    for name, layer in base.named_modules():
        if not attends(layer):
            continue
        heads, width = _cones.shape_of_heads(layer)
        its = None if similarity is None else LearnedSimilarity(similarity, heads, width)
        if its is not None and its.height is not None:
            _cones.check_rotation(layer)
        where = None
        if position is not None and not _cones.crosses(name, layer):
            values, length = _cones.width_of_values(layer, width), _length_of(base)
            where = LearnedPosition(position, heads, width, values, length)
        made.append((layer, its, where))
    if position is not None and all(where is None for _, _, where in made):
        raise NotImplementedError(
            f"{OPERATOR}: no layer of {type(base).__name__} attends to its own tokens, as a "
            "position expects; give the model that has such layers"
        )
    given = {SIMILARITY: similarity, POSITION: position}
    if any(
        spec is not None and getattr(base.config, field, None) != spec
        for field, spec in given.items()
    ):
        _separate_configurations(base)
    use_gnomon(base)
    for layer, its, where in made:
        if its is not None:
            if not hasattr(layer, SIMILARITY):
                _cones.keep_heights(layer)
            setattr(layer, SIMILARITY, its.to(base.device, base.dtype))
        if where is not None:
            setattr(layer, POSITION, where.to(base.device, base.dtype))
    for field, spec in given.items():
        if spec is not None:
            setattr(base.config, field, spec)
    if base is not model:
        _add_to_adapters(model, [layer for layer, _, _ in made])
    return model


def _length_of(model: PreTrainedModel) -> int:
    """The most tokens, for tables that have a row for each."""
    config = model.config.get_text_config()
    length = getattr(config, "max_position_embeddings", None)
    return length if isinstance(length, int) else 512


def _check_adapters(model: Any) -> None:
    """Raises where a model of PEFT cannot save other modules."""
    for name, config in model.peft_config.items():
        if not hasattr(config, "modules_to_save"):
            raise NotImplementedError(
                f"{OPERATOR}: the adapter {name!r} is of {type(config).__name__}, which has no "
                "modules_to_save and would not save what with_attention adds; give it the base "
                "model, before get_peft_model, and save both"
            )


def _add_to_adapters(model: Any, layers: list[torch.nn.Module]) -> None:
    """Has the adapters of a model of PEFT train and save the terms of its layers."""
    from peft.utils import ModulesToSaveWrapper

    fields = [f for f in _FIELDS if any(hasattr(layer, f) for layer in layers)]
    for layer in layers:
        for field in fields:
            part = getattr(layer, field, None)
            if part is None or isinstance(part, ModulesToSaveWrapper):
                continue
            first, *others = model.peft_config
            wrapper = ModulesToSaveWrapper(part, first)
            for name in others:
                wrapper.update(name)
            active = model.active_adapters
            frozen = all(model.peft_config[name].inference_mode for name in active)
            wrapper.set_adapter(active, inference_mode=frozen)
            setattr(layer, field, wrapper)
    for config in model.peft_config.values():
        config.modules_to_save = sorted({*(config.modules_to_save or ()), *fields})
    # Of the base model, a copy by now.
    model.config = model.get_base_model().config
