"""Draws position biases and rotation bounds by distance, as computed by the operators."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor

import gnomon
from gnomon._catalogue import Component, components_of, module_tensors
from gnomon._library import query
from gnomon.lab.inspect._model import load_model
from gnomon.lab.inspect._pictures import Picture, colour_of_head, integer, items, new_figure, path
from gnomon.lab.inspect._probe import biases
from gnomon.nn import MultiheadAttention, attention_position

#: Limited because every curve stores a value and plots a point for each distance.
LONGEST_DISTANCE = 100_000


def rope_bound(spec: str, distance: int, dim: int) -> Tensor:
    """Returns the mean over j of |sum_{i < j} e^(sqrt(-1) t theta_i)| for t = 0 .. distance.

    Up to a factor that does not depend on the distance t, this mean bounds the score between
    rotated tokens (Su et al. 2021, section 3.4.3).
    """
    units = torch.eye(dim, dtype=torch.float64)

    def turned(queries: Tensor, keys: Tensor) -> Tensor:
        # One head per unit vector; with a single key, lse is the score.
        q = queries[None, :, None].expand(-1, -1, distance + 1, -1)
        _, lse = gnomon.attention(
            q,
            keys[None, :, None],
            keys.new_zeros(1, dim, 1, 1),
            position=spec,
            query_offset=0,
            scale=1.0,
            return_lse=True,
        )
        return lse[0]

    # R_t e has cos(t theta) at the coordinate of e, and -sin(t theta) or sin(t theta) at the
    # partner coordinate.
    cosine = turned(units, units)
    sine = turned(units, torch.ones_like(units)) - cosine
    # At distance 1, the sine of each pair's first coordinate is positive, unless it is not rotated.
    first = sine[:, min(1, distance)] > 1e-12
    waves = torch.complex(cosine[first], sine[first])
    return waves.cumsum(0).abs().mean(0)


def learned_table(part: Component) -> str | None:
    """Returns the name of the table that contains a rotation's learned angles, or None."""
    for parameter in part.entry["parameters"]:
        if parameter["kind"] == "table" and parameter["argument"] == "required":
            return str(parameter["name"])
    return None


def turned_columns(module: MultiheadAttention) -> int:
    """Returns how many coordinates per head RoPE rotates by default, excluding a cone's height."""
    return (
        (module.qk_dim - 1) // 2 * 2
        if query("height_coordinate", module.similarity) is not None
        else module.qk_dim
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--position",
        type=items,
        default="rope,alibi,hype,t5,kerple",
        help="comma-separated specifications (default %(default)s)",
    )
    parser.add_argument(
        "--model", type=path, help="draw what each layer of this checkpoint has learned"
    )
    parser.add_argument(
        "--distance",
        type=integer(1, LONGEST_DISTANCE),
        default=256,
        help=f"maximum distance in tokens, at most {LONGEST_DISTANCE} (default %(default)s)",
    )
    parser.add_argument("--heads", type=integer(1, 256), default=8, help="(default %(default)s)")
    parser.add_argument(
        "--head-dim",
        type=integer(1, 1024),
        default=64,
        help="head dimension (default %(default)s)",
    )


def _curves(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns panels, each with a title and curves (heads, distance + 1); RoPE has one curve."""
    panels = []
    if options.model is None:
        parts = [part for spec in options.position for part in components_of(spec)]
        for part in parts:
            spec = part.spec
            if part.entry.get("role") == "rotation":
                if table := learned_table(part):
                    raise ValueError(
                        f"{spec} rotates by its learned {table}; expected a rotation with angles "
                        "fixed by the specification"
                    )
                bound = rope_bound(spec, options.distance, options.head_dim)
                panels.append({"title": spec, "kind": "bound", "curves": bound[None]})
                continue
            module = MultiheadAttention(
                options.heads * options.head_dim, options.heads, position=attention_position(spec)
            ).double()
            title = spec
            for tensor in module_tensors(module.similarity, module.position):
                if tensor.indexed_by != "buckets":
                    continue
                # Bucket tables are initialised to 0, so draw example values instead.
                table = getattr(module, tensor.name)
                with torch.no_grad():
                    table -= torch.arange(len(table), dtype=table.dtype)[:, None]
                title += f", with {tensor.parameter}[b] = -b"
            panels.append(
                {"title": title, "kind": "bias", "curves": _biases(spec, module, options)}
            )
        return panels
    model = load_model(options.model).model
    # Draw a rotation only once if several layers share it.
    rotations = {
        part.spec: block.attention
        for block in reversed(model.blocks)
        for part in components_of(block.attention.position)
        if part.entry.get("role") == "rotation" and learned_table(part) is None
    }
    for spec, module in reversed(rotations.items()):
        bound = rope_bound(spec, options.distance, turned_columns(module))
        panels.append({"title": spec, "kind": "bound", "curves": bound[None]})
    for layer, block in enumerate(model.blocks):
        curves = biases(block.attention, options.distance)
        if curves.abs().max() > 0:
            # The bias before training, drawn dashed.
            starts = biases(_start_of(block.attention), options.distance)
            panels.append(
                {"title": f"layer {layer}", "kind": "bias", "curves": curves, "starts": starts}
            )
    if not panels:
        position = model.options["position"]
        raise ValueError(f'the position of {options.model}, "{position}", adds no distance bias')
    return panels


def _start_of(trained: MultiheadAttention) -> MultiheadAttention:
    """Returns a module with the options of `trained`, but with initial parameter values."""
    return MultiheadAttention(
        trained.embed_dim,
        trained.num_heads,
        similarity=trained.similarity,
        position=trained.position,
    ).double()


def _biases(spec: str, module: MultiheadAttention, options: argparse.Namespace) -> Tensor:
    curves = biases(module, options.distance)
    if not curves.abs().max() > 0:
        raise ValueError(f'position "{spec}" adds no distance bias to the scores')
    return curves


def draw(options: argparse.Namespace) -> Picture:
    panels = _curves(options)
    columns = min(3, len(panels))
    rows = -(-len(panels) // columns)
    figure = new_figure(3.9 * columns + 0.3, 3.2 * rows)
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    distances = torch.arange(options.distance + 1)
    for axes, panel in zip(grid.flat, panels, strict=False):
        curves = panel["curves"]
        starts = panel.get("starts", [])
        for head, curve in enumerate(starts):
            axes.plot(
                distances,
                curve,
                color=colour_of_head(head, len(starts)),
                linewidth=1,
                linestyle="--",
                label="before training" if head == 0 else None,
            )
        if bool((curves == curves[0]).all()):
            axes.plot(distances, curves[0], color="black", linewidth=1.6)
            curves = []
        for head, curve in enumerate(curves):
            axes.plot(
                distances,
                curve,
                color=colour_of_head(head, len(curves)),
                linewidth=1.6,
                label=f"head {head}",
            )
        axes.set_title(panel["title"], fontsize=11)
        axes.set_xlabel("distance, tokens back")
        axes.set_ylabel("bound" if panel["kind"] == "bound" else "bias")
    handles, names = max(
        (axes.get_legend_handles_labels() for axes in grid.flat), key=lambda pair: len(pair[0])
    )
    if handles:
        figure.legend(handles, names, loc="outside right upper", fontsize=10)
    numbers = {"distance": options.distance, "panels": panels}
    return Picture(figure, numbers)
