"""Another similarity than the dot product in the layers of a model."""

from __future__ import annotations

import functools
import inspect
import re
from typing import Any

import torch
from torch import Tensor

from gnomon._catalogue import components_of
from gnomon._library import ops
from gnomon._terms import to_spec
from gnomon.integrations.transformers._interface import OPERATOR, SIMILARITY
from gnomon.integrations.transformers._sources import source_of
from gnomon.similarity import Similarity, Specified

#: The names of forwards' arguments that are cosines and sines, or complex numbers, of positions.
_ANGLES = ("position_embeddings", "relative_position_embeddings", "freqs_ci")
_ROTATES = re.compile(r"\bapply_\w*rot\w*\(|\brotary_emb\(")


def check_map(spec: str) -> None:
    """Raises where a similarity takes tokens for points, which a model's projections are not."""
    for component in components_of(spec):
        if component.options.get("map") == "none":
            raise ValueError(
                f"{OPERATOR}: {spec!r}: map=none takes queries and keys for points already, which "
                f"lie where {component.name} has them; those of a model are any numbers; leave map "
                "out, or give another one"
            )


class LearnedSimilarity(torch.nn.Module):
    """A similarity with a factor for each head; parameters as in gnomon.nn.MultiheadAttention."""

    def __init__(self, spec: str, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        names, starts, learned = ops.module_tensors(
            spec, "none", num_heads, head_dim, head_dim, 1, 0, 0, []
        )
        (component,) = components_of(spec)
        tensors = [p["name"] for p in component.entry["parameters"] if p["takes_tensor"]]
        #: What is held here, learned or not: the factor of the scores and other numbers of heads.
        self._held = [n for n in tensors if f"{n}_start" in names or f"{n}_theta" in names]
        # To the operator, what is held is a tensor.
        options = dict(component.options) | dict.fromkeys(self._held, "tensor")
        self.spec = to_spec(component.name, **options)
        for name, start, is_learned in zip(names, starts, learned, strict=True):
            value = start.to(torch.get_default_dtype())
            if is_learned:
                self.register_parameter(name, torch.nn.Parameter(value))
            else:
                self.register_buffer(name, value)
        # Of others than the factor a module knows the start without a tensor. As numbers: a buffer
        # that is not saved would not be filled where a model is built before it is loaded.
        known = ops.module_learned(spec, "none", num_heads, head_dim, head_dim, starts)
        self._starts: dict[str, list[float]] = {
            name: start.double().flatten().tolist()
            for name, _, start in zip(*known, strict=True)
            if f"{name}_start" not in names
        }
        #: Whether the last coordinate is a height, which a rotation would mix with another.
        self.has_height: bool = ops.has_height(spec)
        #: Whether the model's scale applies.
        self.takes_scale: bool = component.entry["takes_scale"]

    def forward(self) -> Similarity:
        """The similarity of the present parameters."""
        values = []
        for name in self._held:
            theta: Tensor | None = getattr(self, f"{name}_theta", None)
            if theta is not None and name in self._starts:
                value = theta.new_tensor(self._starts[name])
            else:
                value = getattr(self, f"{name}_start")
            value = value.expand(self.num_heads)
            values.append(value if theta is None else ops.learned_number(value, theta))
        return Specified(self.spec, tuple(values))

    def extra_repr(self) -> str:
        """The specification, for print()."""
        return repr(self.spec)


def shape_of_heads(layer: torch.nn.Module) -> tuple[int, int]:
    """The number of query heads and their width."""
    config = getattr(layer, "config", None)

    def find(*names: str) -> int | None:
        for holder in (layer, config):
            for name in names:
                value = getattr(holder, name, None)
                if isinstance(value, int):
                    return value
        return None

    heads = find("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead")
    # Of a head whose first coordinates alone are no rotated ones, its whole width first.
    width = find(
        "qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size"
    )
    if width is None and heads is not None:
        # What an older layer divides by them.
        size = find("embed_dim", "hidden_size", "all_head_size", "d_model", "n_embd")
        width = None if size is None else size // heads
    if heads is None or width is None:
        raise NotImplementedError(
            f"{OPERATOR}: the heads of {type(layer).__name__} are not known: it has no "
            f"{'num_attention_heads' if heads is None else 'head_dim'}; give it that attribute"
        )
    return heads, width


def check_rotation(layer: torch.nn.Module) -> None:
    """Raises where a layer rotates its queries and keys otherwise than by arguments it is given."""
    if not _ROTATES.search(source_of(type(layer))):
        return
    names = inspect.signature(layer.forward).parameters
    if any(name in names for name in _ANGLES) or _rotary_parts(layer):
        return
    raise NotImplementedError(
        f"{OPERATOR}: {type(layer).__name__} rotates queries and keys by itself, the height of a "
        "similarity with one included; use one without, as 'hyperbolic:model=ball' or 'laplacian'"
    )


def keep_heights(layer: torch.nn.Module) -> None:
    """Has a layer's rotation leave the last coordinate, the height, as it is."""
    if not _ROTATES.search(source_of(type(layer))):
        return
    names = tuple(inspect.signature(layer.forward).parameters)
    layer.register_forward_pre_hook(functools.partial(_keep_heights, names), with_kwargs=True)
    for part in _rotary_parts(layer):
        part.register_forward_hook(functools.partial(_keep_heights_of_part, layer))


def _rotary_parts(layer: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules of a layer that return cosines and sines."""
    return [part for part in layer.children() if "Rotary" in type(part).__name__]


def _keep_heights(
    names: tuple[str, ...], layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replaces cosines and sines (B, L, D) by those that leave the last coordinate as it is."""
    kwargs = dict(zip(names, args, strict=False)) | kwargs
    if not getattr(layer, SIMILARITY).has_height:
        return (), kwargs
    for name in _ANGLES:
        if kwargs.get(name) is not None:
            kwargs[name] = _without_the_last(layer, kwargs[name])
    return (), kwargs


def _keep_heights_of_part(
    layer: torch.nn.Module, _part: torch.nn.Module, _args: Any, angles: Any
) -> Any:
    return _without_the_last(layer, angles) if getattr(layer, SIMILARITY).has_height else angles


def _without_the_last(layer: torch.nn.Module, angles: Any) -> Any:
    """Angles whose last pair of coordinates is not rotated."""
    if isinstance(angles, Tensor) and angles.is_complex():
        angles = angles.clone()
        angles[..., -1] = 1
        return angles
    cos, sin = angles
    rotated = cos.shape[-1]
    width = shape_of_heads(layer)[1]
    if rotated < width and not _rotates_the_end(layer):
        return angles
    # What is not rotated by halves is by neighbours.
    if torch.equal(cos[..., : rotated // 2], cos[..., rotated // 2 :]):
        pair = [rotated // 2 - 1, rotated - 1]
    elif torch.equal(cos[..., 0::2], cos[..., 1::2]):
        pair = [rotated - 2, rotated - 1]
    else:
        raise NotImplementedError(
            f"{OPERATOR}: {type(layer).__name__} rotates neither coordinates i and i + D / 2 nor "
            "2 i and 2 i + 1 together, and which one is paired with the height is not known; use a "
            "similarity without a height, as 'hyperbolic:model=ball' or 'laplacian'"
        )
    cos, sin = cos.clone(), sin.clone()
    cos[..., pair], sin[..., pair] = 1, 0
    return (
        type(angles)((cos, sin)) if isinstance(angles, (tuple, list)) else torch.stack((cos, sin))
    )


def _rotates_the_end(layer: torch.nn.Module) -> bool:
    """Whether the coordinates that are rotated are a head's last ones, as in latent attention."""
    return any(
        getattr(holder, "qk_rope_head_dim", None) is not None
        for holder in (layer, getattr(layer, "config", None))
    )
