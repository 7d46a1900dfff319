"""Finds the head sizes of a model's layers, and excludes height coordinates from rotations."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

import torch
from torch import Tensor

from gnomon.integrations._terms import SIMILARITY
from gnomon.integrations.transformers._masks import OPERATOR
from gnomon.integrations.transformers._sources import source_of

#: Names of forward arguments that contain cosines and sines, or complex rotations, of positions.
_ANGLES = ("position_embeddings", "relative_position_embeddings", "freqs_ci")
#: A layer's attribute that stores the layout of cosines in the model's own rotation.
_LAYOUT = "_gnomon_cosines_lie_in"
#: Substrings in the names of cross-attention layers.
_CROSSES = re.compile(r"cross|encoder_attn|enc_?dec", re.IGNORECASE)
#: The code of a layer that unpacks the sines first (GPT-J).
_SINES_FIRST = re.compile(rf"\bsin, cos = ({'|'.join(_ANGLES)})\b")
_ROTATES = re.compile(r"\bapply_\w*rot\w*\(|\brotary_emb\(")


def shape_of_heads(layer: torch.nn.Module) -> tuple[int, int]:
    """Returns the number of query heads and their head dimension."""
    config = getattr(layer, "config", None)

    def find(*names: str) -> int | None:
        for holder in (layer, config):
            for name in names:
                value = getattr(holder, name, None)
                if isinstance(value, int):
                    return value
        return None

    heads = find("num_attention_heads", "num_heads", "n_heads", "n_head", "nhead")
    # Names of the full head dimension come first, because rotary models may rotate only part of it.
    width = find(
        "qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "head_size"
    )
    if width is None and heads is not None:
        # Older layers have only the embedding dimension, which is divided by the number of heads.
        size = find("embed_dim", "hidden_size", "all_head_size", "d_model", "n_embd")
        width = None if size is None else size // heads
    if heads is None or width is None:
        raise NotImplementedError(
            f"{OPERATOR}: cannot determine the heads of {type(layer).__name__}: it has no "
            f"{'num_attention_heads' if heads is None else 'head_dim'}; set that attribute"
        )
    return heads, width


def width_of_values(layer: torch.nn.Module, head_dim: int) -> int:
    """Returns the head dimension of the values."""
    for holder in (layer, getattr(layer, "config", None)):
        if isinstance(width := getattr(holder, "v_head_dim", None), int):
            return width
    return head_dim


def crosses(name: str, layer: torch.nn.Module) -> bool:
    """Returns whether a layer with this name uses cross-attention."""
    if getattr(layer, "is_cross_attention", False) is True:
        return True
    words = ".".join([*name.split(".")[-2:], type(layer).__name__])
    return _CROSSES.search(words) is not None


def check_rotation(layer: torch.nn.Module) -> None:
    """Raises an error if a layer rotates queries and keys by angles that are not passed to it."""
    if not _ROTATES.search(source_of(type(layer))):
        return
    names = inspect.signature(type(layer).forward).parameters
    if any(name in names for name in _ANGLES) or _rotary_parts(layer):
        return
    raise NotImplementedError(
        f"{OPERATOR}: {type(layer).__name__} rotates queries and keys itself, including the "
        "height of a similarity; use a similarity without a height, such as "
        "'hyperbolic:model=ball' or 'laplacian'"
    )


def keep_heights(layer: torch.nn.Module) -> None:
    """Excludes the height coordinate from a layer's rotation."""
    if not _ROTATES.search(source_of(type(layer))):
        return
    # The signature comes from the class, because an intercepted layer wraps its own forward method.
    names = tuple(inspect.signature(type(layer).forward).parameters)[1:]
    setattr(layer, _LAYOUT, _layout_of(type(layer)))
    layer.register_forward_pre_hook(functools.partial(_keep_heights, names), with_kwargs=True)
    for part in _rotary_parts(layer):
        part.register_forward_hook(functools.partial(_keep_heights_of_part, layer))


def _rotary_parts(layer: torch.nn.Module) -> list[torch.nn.Module]:
    """Returns a layer's submodules that compute cosines and sines."""
    return [part for part in layer.children() if "Rotary" in type(part).__name__]


def _keep_heights(
    names: tuple[str, ...], layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replaces cosines and sines (B, L, D) so that the height is not rotated."""
    kwargs = dict(zip(names, args, strict=False)) | kwargs
    height = getattr(layer, SIMILARITY).height
    if height is None:
        return (), kwargs
    for name in _ANGLES:
        if kwargs.get(name) is not None:
            kwargs[name] = _without_height(layer, kwargs[name], height)
    return (), kwargs


def _keep_heights_of_part(
    layer: torch.nn.Module, _part: torch.nn.Module, _args: Any, angles: Any
) -> Any:
    height = getattr(layer, SIMILARITY).height
    return angles if height is None else _without_height(layer, angles, height)


def _without_height(layer: torch.nn.Module, angles: Any, height: int) -> Any:
    """Returns angles that do not rotate the pair containing coordinate `height` (-1 or 0)."""
    if isinstance(angles, dict):
        return {name: _without_height(layer, of_name, height) for name, of_name in angles.items()}
    if isinstance(angles, Tensor) and angles.is_complex():
        if height == 0 and _rotates_the_end(layer):
            return angles
        angles = angles.clone()
        angles[..., height] = 1
        return angles
    sines_first = _SINES_FIRST.search(source_of(type(layer))) is not None
    cos, sin = reversed(angles) if sines_first else angles
    rotated = cos.shape[-1]
    _, width = shape_of_heads(layer)
    layout = _layout(layer, cos, width)
    rotary_dim = getattr(layer, "rotary_dim", None)
    if layout is None and rotary_dim == 2 * rotated:
        # There is one value per pair, and the rotated coordinates come first.
        if height == -1 and rotary_dim < width:
            return angles
        places = [height % rotated]
    elif 2 * rotated == width and layout is None and not _rotates_a_part(layer):
        places = [height % rotated]  # one value per pair
    elif rotated < width and _rotates_the_end(layer) != (height == -1):
        return angles
    elif layout == "halves":
        places = [height % (rotated // 2), rotated // 2 + height % (rotated // 2)]
    elif layout == "neighbours":
        # The values repeat for each head if the layer rotates before splitting into heads.
        step = min(rotated, width)
        first = 0 if height == 0 else step - 2
        places = [n + first + k for n in range(0, rotated - step + 1, step) for k in (0, 1)]
    else:
        raise NotImplementedError(
            f"{OPERATOR}: {type(layer).__name__} uses an unknown rotation layout (neither i with "
            "i + D / 2 nor 2 i with 2 i + 1), so the coordinate paired with the height is unknown; "
            "use a similarity without a height, such as 'hyperbolic:model=ball' or 'laplacian'"
        )
    cos, sin = cos.clone(), sin.clone()
    cos[..., places], sin[..., places] = 1, 0
    both = (sin, cos) if sines_first else (cos, sin)
    return type(angles)(both) if isinstance(angles, (tuple, list)) else torch.stack(both)


def _layout(layer: torch.nn.Module, cos: Tensor, width: int) -> str | None:
    """Returns "halves" for pairs (i, i + D / 2), "neighbours" for (2 i, 2 i + 1), or None."""
    rotated = cos.shape[-1]
    is_one_head = rotated <= width  # both halves lie within one head
    if torch.compiler.is_compiling():
        found: str | None = getattr(layer, _LAYOUT, None)
        return found if is_one_head or found == "neighbours" else None
    if is_one_head and torch.equal(cos[..., : rotated // 2], cos[..., rotated // 2 :]):
        return "halves"
    return "neighbours" if torch.equal(cos[..., 0::2], cos[..., 1::2]) else None


def _layout_of(kind: type[torch.nn.Module]) -> str | None:
    """Finds the layout from a model's source code, as tensor values are unknown while tracing."""
    classes = [
        of_module
        for name, of_module in vars(sys.modules[kind.__module__]).items()
        if isinstance(of_module, type) and name.endswith("RotaryEmbedding")
    ]
    found = set()
    for of_module in classes:
        text = source_of(of_module)
        if re.search(r"\bcat\(\s*[(\[]\s*freqs\s*,\s*freqs\b", text):
            found.add("halves")
        if "repeat_interleave(freqs" in text or re.search(r"freqs\w*\.repeat_interleave", text):
            found.add("neighbours")
    return found.pop() if len(found) == 1 else None


def _rotates_a_part(layer: torch.nn.Module) -> bool:
    """Returns whether a layer is configured to rotate only a part of each head's coordinates."""
    config = getattr(layer, "config", None)
    for holder in (layer, config):
        for name in ("partial_rotary_factor", "rotary_pct", "rotary_percentage", "rotary_dim"):
            if getattr(holder, name, None) is not None:
                return True
    parameters = getattr(config, "rope_parameters", None) or {}
    # rope_parameters is one dictionary, or contains one dictionary per layer type.
    tables = [parameters, *(t for t in parameters.values() if isinstance(t, dict))]
    return any(table.get("partial_rotary_factor", 1) != 1 for table in tables)


def _rotates_the_end(layer: torch.nn.Module) -> bool:
    """Returns whether the rotated part is the end of each head, as in latent attention."""
    return any(
        getattr(holder, "qk_rope_head_dim", None) is not None
        for holder in (layer, getattr(layer, "config", None))
    )
