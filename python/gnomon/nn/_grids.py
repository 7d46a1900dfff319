"""Adapts models with grid positions to another resolution."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from gnomon._catalogue import components_of, module_tensors
from gnomon._checks import wrong_type
from gnomon._library import query
from gnomon._terms import check_shape, to_spec
from gnomon.nn._held_terms import HeldTerms
from gnomon.nn._token_encodings import TokenEncoding, TokenPosition

#: Index kinds of row tables along grid axes, in axis order.
_AXES = ("first_axis", "second_axis")
_Change = Callable[[Tensor], Tensor]


def resize_grid_table(table: Tensor, shape: Sequence[int]) -> Tensor:
    """Interpolates a grid-bias table (H, 2 h - 1, 2 w - 1) for a grid of another shape.

    Offset 0 stays at offset 0, and the largest offsets of the old grid become those of the new one.
    Interpolation is bicubic for two axes and linear for one or three.

    Args:
        table: the table of a gnomon.position.GridBias with one to three axes, in any floating-point
            dtype.
        shape: axis lengths of the new grid, one per table axis.

    Returns:
        (H, 2 h' - 1, 2 w' - 1) for the new shape (h', w'), in the table's dtype; differentiable.

    Raises:
        ValueError: the table has the wrong number of axes, or an even number of offsets.
        TypeError: table is not a floating-point tensor, or shape does not contain integers.

    Example:
        >>> table = torch.randn(4, 13, 13)  # for a grid of 7 x 7
        >>> gnomon.nn.resize_grid_table(table, (14, 14)).shape
        torch.Size([4, 27, 27])
    """
    name = "nn.resize_grid_table"
    if not isinstance(table, Tensor):
        raise wrong_type(name, "table", table, "a Tensor")
    if not table.is_floating_point():
        raise TypeError(
            f"gnomon.{name}: table has dtype {table.dtype}; expected a floating-point dtype"
        )
    sizes = check_shape(f"gnomon.{name}: shape", shape)
    if min(sizes) < 1:
        raise ValueError(f"gnomon.{name}: shape is {tuple(sizes)}; expected positive sizes")
    axes = table.dim() - 1
    if not 1 <= axes <= 3 or any(size % 2 == 0 for size in table.shape[1:]):
        raise ValueError(
            f"gnomon.{name}: table has shape {list(table.shape)}; expected (H, 2 h - 1, 2 w - "
            "1), or the equivalent for a grid with one or three axes"
        )
    if len(sizes) != axes:
        raise ValueError(
            f"gnomon.{name}: shape is {tuple(sizes)}; expected {axes} axes, as many as the table "
            "has"
        )
    target = [2 * size - 1 for size in sizes]
    if list(table.shape[1:]) == target:
        return table.clone()
    wide = table if table.dtype == torch.float64 else table.float()
    for axis, new in enumerate(target, 1):
        if new == 1:
            # Keep only offset 0, because interpolation to length 1 would pick the first offset.
            wide = wide.narrow(axis, table.shape[axis] // 2, 1)
    mode = {1: "linear", 2: "bicubic", 3: "trilinear"}[axes]
    resized = torch.nn.functional.interpolate(wide[None], target, mode=mode, align_corners=True)
    return resized[0].to(table.dtype)


def resize_grid(module: torch.nn.Module, shape: Sequence[int]) -> torch.nn.Module:
    """Adapts a model with grid positions to another grid shape in place, and returns the model.

    Use it to fine-tune a model at another resolution. All positions on a grid (in attention
    modules, TokenPosition and TokenEncoding) get the new shape. The bias tables of "grid_bias" and
    of "offset_bias" on a grid, and the tables of "relative2d", are interpolated as in
    resize_grid_table. Sequence positions do not change. Create a new optimizer afterwards, because
    the table parameters are replaced.

    Args:
        module: an attention module, or a model that contains one or more.
        shape: axis lengths of the new grid; the number of axes cannot change.

    Raises:
        ValueError: the module has no grid position, or its grid has a different number of axes.
        TypeError: module is not a module, or shape does not contain integers.

    Example:
        >>> layer = gnomon.nn.MultiheadAttention(64, 4, position="grid_bias:shape=7x7")
        >>> layer = gnomon.nn.resize_grid(layer, (14, 14))
        >>> y = layer(torch.randn(2, 14 * 14, 64))
    """
    name = "nn.resize_grid"
    if not isinstance(module, torch.nn.Module):
        raise wrong_type(name, "module", module, "a torch.nn.Module")
    sizes = check_shape(f"gnomon.{name}: shape", shape)
    if min(sizes) < 1:
        raise ValueError(f"gnomon.{name}: shape is {tuple(sizes)}; expected positive sizes")
    parts = [
        part
        for part in module.modules()
        if isinstance(part, (HeldTerms, TokenPosition, TokenEncoding))
        and any(component.lies_on_a_grid for component in components_of(_spec_of(part)))
    ]
    if not parts:
        raise ValueError(
            f"gnomon.{name}: module has no position on a grid; expected a module with a position "
            "such as grid_bias"
        )
    for part in parts:
        for component in components_of(_spec_of(part)):
            old = component.grid[1:]
            if old and len(old) != len(sizes):
                raise ValueError(
                    f"gnomon.{name}: shape is {tuple(sizes)}, but {_spec_of(part)} has the shape "
                    f"{old}; expected the same number of axes"
                )
    # Collect all changes before the first one, so that an error leaves the model as it was.
    changes = [
        (part, table, change)
        for part in parts
        if isinstance(part, HeldTerms)
        for table, change in _changes(part, sizes)
    ]
    for held, table, change in changes:
        _replace(held, table, change)
    for part in parts:
        spec = "+".join(
            to_spec(
                component.name,
                **{
                    key: sizes if key == "shape" else value
                    for key, value in component.options.items()
                },
            )
            for component in components_of(_spec_of(part))
        )
        setattr(part, "spec" if isinstance(part, TokenEncoding) else "position", spec)
        if isinstance(part, TokenEncoding):
            part.max_length = TokenEncoding(spec, part.dim, part.causal, "meta").max_length
    for part in parts:
        if isinstance(part, TokenPosition):
            _, end = query("token_encodings", part.position, 1)
            ends = [encoding.max_length for encoding in part.children()]
            part.max_length = min((n for n in [end, *ends] if n is not None), default=None)
    return module


def _spec_of(part: HeldTerms | TokenPosition | TokenEncoding) -> str:
    return part.spec if isinstance(part, TokenEncoding) else part.position


def _changes(module: HeldTerms, shape: list[int]) -> list[tuple[str, _Change]]:
    """Returns the names of a module's tables that depend on the grid, and how each changes."""
    changes: list[tuple[str, _Change]] = []
    for tensor in module_tensors(module.similarity, module.position):
        component, index = tensor.component, tensor.indexed_by
        if index == "grid":
            changes.append((tensor.name, functools.partial(resize_grid_table, shape=shape)))
        elif index in _AXES:
            size = shape[_AXES.index(index)]
            changes.append((tensor.name, functools.partial(_resize_rows, size=size)))
        elif index == "offsets" and component.lies_on_a_grid:
            along = component.options.get("axis")
            if along is None and len(set(shape)) > 1:
                raise ValueError(
                    f"gnomon.nn.resize_grid: shape is {tuple(shape)} and {component.spec} has "
                    "one table for all axes; expected axes of equal length"
                )
            of_axis = [shape[int(along or 0)]]
            changes.append((tensor.name, functools.partial(resize_grid_table, shape=of_axis)))
    return changes


def _resize_rows(table: Tensor, size: int) -> Tensor:
    """Interpolates the rows of a table (n, D) or (H, n, D)."""
    each = table.unsqueeze(0) if table.dim() == 2 else table
    moved = [resize_grid_table(one.T, [size]).T for one in each]
    return moved[0] if table.dim() == 2 else torch.stack(moved)


def _replace(module: HeldTerms, name: str, change: _Change) -> None:
    old = getattr(module, name)
    with torch.no_grad():
        new = change(old.detach()).contiguous()
    if name in module._given_starts:
        module._given_starts[name] = change(module._given_starts[name]).contiguous()
    if isinstance(old, torch.nn.Parameter):
        module.register_parameter(name, torch.nn.Parameter(new, requires_grad=old.requires_grad))
    else:
        module.register_buffer(name, new)
