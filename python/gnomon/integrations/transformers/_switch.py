"""Switches models to gnomon and back."""

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

#: The configuration fields for the specifications of a model's terms; each layer's submodules have
#: the same names.
_FIELDS = (SIMILARITY, POSITION)
_NAME = OPERATOR.removeprefix("gnomon.")
#: A transformers model, or a PEFT model around one.
Model = TypeVar("Model", bound=torch.nn.Module)
#: A module's attribute that stores the original of a copied configuration. Another model, such as
#: one that contains this model, may share the original.
_SHARED = "_gnomon_shared_config"


def register() -> None:
    """Makes "gnomon" a valid attn_implementation; repeated calls have no effect.

    This patches the following methods of transformers. The patched methods call the originals:

    - The forward methods of T5Attention, MT5Attention, BloomAttention, MptAttention, MptBlock,
      DebertaV2Attention, SEWDAttention and SwinAttention, as well as DebertaV2Encoder.get_rel_pos,
      SEWDTransformerEncoder.get_rel_pos and SwinLayer.get_attn_mask, change only for the
      implementation "gnomon".
    - PreTrainedModel.__init__ adds "gnomon" to a model's table of attention classes (Falcon,
      GPT-J).
    - PreTrainedModel.post_init applies use_gnomon and with_attention to new and loaded models.
    - _from_config and from_pretrained warn if a model cannot use the requested attention.
    - save_pretrained writes the similarities and positions of a model's parts to its configuration.
    - _initialize_weights initialises the parameters of similarities and positions that a checkpoint
      lacks.
    - set_attn_implementation raises an error if it would disable a model's similarity or position.

    Example:
        >>> from transformers import AutoModelForCausalLM  # doctest: +SKIP
        >>> gnomon.integrations.transformers.register()  # doctest: +SKIP
        >>> model = AutoModelForCausalLM.from_pretrained(  # doctest: +SKIP
        ...     "gpt2", attn_implementation="gnomon"
        ... )
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
    """Makes a class method warn if it creates a model that cannot use the requested attention."""
    make = getattr(PreTrainedModel, name).__func__

    @functools.wraps(make)
    def made(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
        result = make(cls, *args, **kwargs)
        # from_pretrained may return loading information with the model.
        model = result[0] if isinstance(result, tuple) else result
        asked = kwargs.get("attn_implementation")
        if asked not in (None, NAME) and _has_terms(model):
            warnings.warn(
                f"{OPERATOR}: attn_implementation is {asked!r}, which ignores the similarity or "
                f"the position of this {cls.__name__}; using gnomon instead",
                stacklevel=2,
            )
        if model.config._attn_implementation == NAME and not _has_attention(model):
            warnings.warn(
                f"{OPERATOR}: {cls.__name__} has no supported attention and is left unchanged",
                stacklevel=2,
            )
        return result

    setattr(PreTrainedModel, name, classmethod(made))


def _wrap(name: str, first: Callable[..., None]) -> None:
    """Makes a model method first call another function with its arguments."""
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
            f"{OPERATOR}: attn_implementation is {attn_implementation!r}, which ignores the "
            f"terms that with_attention added to {type(model).__name__}; expected {NAME!r}, or a "
            "model without these terms"
        )


def _name_similarities(model: PreTrainedModel, *_args: Any, **_kwargs: Any) -> None:
    """Inserts the copied configurations of a model's parts into the model's configuration.

    with_attention creates these copies, even if it is called on only a part of the model.
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
    """Maps NAME to the eager class if a model looks up its attention class by name."""
    for family in type(model).__mro__:
        for name, table in vars(sys.modules[family.__module__]).items():
            if name.endswith("_ATTENTION_CLASSES") and isinstance(table, dict):
                if (eager := table.get("eager")) is not None:
                    table.setdefault(NAME, eager)


def _base_of(model: object) -> PreTrainedModel:
    """Returns the transformers model; for a PEFT model, this is its base model."""
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
    """Calls register(), makes an existing model use gnomon, and returns the model.

    For a PEFT model, this switches the base model.

    Modules that compute attention themselves are intercepted while they run: the softmax of a
    product, multiplied by values, becomes a call to gnomon's operator. If such a module does
    anything that the operator does not support, its attention stays dense, and a warning says so.
    Attention modules (by class name) that gnomon does not recognise also cause a warning.

    Raises:
        TypeError: the model is not a transformers.PreTrainedModel or a PEFT model of one.
        NotImplementedError: the model has no supported attention. It is left unchanged.

    Example:
        >>> from transformers import AutoModelForCausalLM  # doctest: +SKIP
        >>> model = AutoModelForCausalLM.from_pretrained("gpt2")  # doctest: +SKIP
        >>> model = gnomon.integrations.transformers.use_gnomon(model)  # doctest: +SKIP
    """
    base = _base_of(model)
    register()
    if not _has_attention(base):
        raise NotImplementedError(
            f"{OPERATOR}: {type(base).__name__} has no supported attention: it neither uses "
            "transformers' AttentionInterface nor computes softmax(Q K^T) V in a recognised "
            "way. The model is unchanged"
        )
    if dense := _unknown(base):
        # Warn before switching, so that the model stays unchanged if warnings are errors.
        warnings.warn(
            f"{OPERATOR}: layers of {type(base).__name__} with unsupported attention are left "
            f"unchanged: {', '.join(dense)}",
            stacklevel=2,
        )
    _switch_parts(base)
    return model


def _unknown(model: torch.nn.Module) -> list[str]:
    """Returns the names of the model's attention classes that do not use the operator."""
    return sorted(
        {
            type(layer).__name__
            for layer in model.modules()
            if is_named_attention(type(layer))
            # A module without a forward method, such as Funnel's attention structure, is never
            # called.
            and type(layer).forward is not torch.nn.Module.forward
            and not any(attends(part) for part in layer.modules())
        }
    )


def attends(layer: torch.nn.Module) -> bool:
    """Returns whether a module itself calls the operator; a model only contains such modules."""
    kind = type(layer)
    if isinstance(layer, PreTrainedModel):
        return False
    return isinstance(layer, ADAPTED) or has_interface(kind) or has_own_softmax(kind)


def use_eager(model: Model) -> Model:
    """Undoes use_gnomon and returns the model, which uses transformers' eager attention again.

    For models that use the AttentionInterface, this is equivalent to
    set_attn_implementation("eager"). It also works for other models, which do not support that
    method. You can call use_gnomon again afterwards.

    Raises:
        TypeError: the model is not a transformers.PreTrainedModel or a PEFT model of one.
        ValueError: with_attention has set a similarity or a position, which eager attention does
            not support.

    Example:
        >>> model = gnomon.integrations.transformers.use_eager(model)  # doctest: +SKIP
    """
    base = _base_of(model)
    if _has_terms(base):
        raise ValueError(
            f"{OPERATOR}: {type(base).__name__} has terms that with_attention added, which eager "
            "attention ignores; expected a model without these terms"
        )
    _set_implementation(base, "eager")
    return model


def _has_terms(model: torch.nn.Module) -> bool:
    return any(hasattr(layer, field) for layer in model.modules() for field in _FIELDS)


def _set_implementation(model: PreTrainedModel, name: str) -> None:
    """Sets the implementation; unlike set_attn_implementation(), this supports all models."""
    for part in model.modules():
        # Layers may have a copy of their model's configuration (X-CLIP).
        if isinstance(config := getattr(part, "config", None), PreTrainedConfig):
            config._attn_implementation = name


def _separate_configurations(model: PreTrainedModel) -> None:
    """Copies a model's configurations, because another model may share them."""
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
            # Whole models are not changed: since transformers 5.24, their generate() checks whether
            # masks are arrays, but does not compute with masks.
            elif attends(layer) and has_interface(kind) and asks_for_an_array(kind):
                give_arrays(layer)


def with_cone_attention(model: Model, similarity: str = "penumbral") -> Model:
    """Replaces the dot product with a cone similarity in all layers; see with_attention.

    Example:
        >>> model = gnomon.integrations.transformers.with_cone_attention(  # doctest: +SKIP
        ...     model, "penumbral"
        ... )
    """
    if not isinstance(similarity, str):
        raise wrong_type(_NAME, "similarity", similarity, "a specification string")
    return with_attention(model, similarity)


def with_attention(
    model: Model, similarity: str | None = None, position: str | Sequence[str] | None = None
) -> Model:
    """Calls use_gnomon and sets the similarity, the position, or both, of all attention layers.

        with_attention(model, "penumbral", position="alibi+sink")

    Each attention module gets a submodule "gnomon_similarity" with the parameter "gamma_theta" (H,)
    and the buffer "gamma_start"; some similarities call the factor beta or scale instead of gamma.
    As in gnomon.nn.MultiheadAttention, gamma = gamma_start * exp(5 theta). theta is initialised to
    0, so the logits of N(0, 1) tokens have a standard deviation of 1. The model's own scale applies
    only to the dot product. Layers that compute their own products may scale queries or keys first;
    a similarity then receives the scaled ones.

    A position becomes a submodule "gnomon_position" with the same tensors as in
    gnomon.nn.MultiheadAttention, such as "t5_table". It is added to the model's own positions,
    rotations and biases. Cross-attention layers do not get a position. If a similarity treats a
    coordinate as a height (the last one for cones), the model's rotary positions do not rotate this
    coordinate or the one paired with it, as in gnomon.position.RoPE.

    The submodules are trained and saved with the model. The configuration names the terms, so
    from_pretrained() restores them if register() was called first. Calling this function again
    reinitialises the given terms and keeps the others.

    In a PEFT model, the submodules become modules_to_save of its adapters, so they are trained and
    save_pretrained() writes them. To load them, call with_attention with the same terms on the base
    model before you call PeftModel.from_pretrained(). If the base model already has these
    submodules, name them in PEFT's configuration to train them: LoraConfig(...,
    modules_to_save=["gnomon_similarity", "gnomon_position"]).

    Args:
        model: a transformers model that use_gnomon supports, with a head dimension of at least 2.
        similarity: a catalogue specification such as "penumbral:score=height2"; None keeps the
            current one. It is stored in a copy of the model's configuration.
        position: a specification such as "alibi", "t5+sink" or "hype:tau=learned", or a list of
            specifications to sum; None keeps the current one.

    Returns:
        The model.

    Raises:
        ValueError: neither a similarity nor a position is given; a specification is invalid; it has
            map=none, although a model's tokens are not points; or a term does not support the head
            dimension.
        NotImplementedError: as in use_gnomon; a layer's heads or rotation are unknown; a position
            requires inputs other than queries and keys ("forget", "sinusoidal"); or adapters cannot
            save the parameters. The model is left unchanged, unless a forward pass raises the
            error.

    Example:
        >>> model = gnomon.integrations.transformers.with_attention(  # doctest: +SKIP
        ...     model, similarity="gaussian", position="alibi"
        ... )
    """
    base = _base_of(model)
    if position is not None and not isinstance(position, str):
        if not isinstance(position, Sequence) or not all(isinstance(p, str) for p in position):
            raise wrong_type(
                _NAME, "position", position, "a specification string, or a list of them"
            )
        position = "+".join(position)
    if similarity is not None and not isinstance(similarity, str):
        raise wrong_type(_NAME, "similarity", similarity, "a specification string")
    if similarity is None and position is None:
        raise ValueError(
            f"{OPERATOR}: neither a similarity nor a position is given; expected at least one"
        )
    if similarity is not None:
        check_similarity(OPERATOR, similarity)
    if position is not None:
        check_position(OPERATOR, position)
    if base is not model:
        _check_adapters(model)
    if dense := _unknown(base):
        raise NotImplementedError(
            f"{OPERATOR}: layers of {type(base).__name__} with unsupported attention would keep "
            f"the dot product and their positions: {', '.join(dense)}; pass a part of the model "
            "without these layers"
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
            f"{OPERATOR}: position needs self-attention, which no layer of {type(base).__name__} "
            "has; pass a model with self-attention"
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
    """Returns the maximum number of tokens, for tables with one row per token."""
    config = model.config.get_text_config()
    length = getattr(config, "max_position_embeddings", None)
    return length if isinstance(length, int) else 512


def _check_adapters(model: Any) -> None:
    """Raises an error if an adapter of a PEFT model has no `modules_to_save`."""
    for name, config in model.peft_config.items():
        if not hasattr(config, "modules_to_save"):
            raise NotImplementedError(
                f"{OPERATOR}: the adapter {name!r} uses {type(config).__name__}, which has no "
                "modules_to_save and would not save the parameters that with_attention adds; "
                "call with_attention on the base model before get_peft_model, and save both models"
            )


def _add_to_adapters(model: Any, layers: list[torch.nn.Module]) -> None:
    """Makes the adapters of a PEFT model train and save the terms of its layers."""
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
    # The base model's configuration was replaced with a copy.
    model.config = model.get_base_model().config
