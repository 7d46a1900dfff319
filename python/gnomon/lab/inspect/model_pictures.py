"""Draws a trained model's attention and its learned position tables."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from matplotlib.colors import PowerNorm
from matplotlib.ticker import FixedLocator, FuncFormatter
from torch import Tensor

from gnomon._catalogue import ModuleTensor, module_tensors
from gnomon.lab.inspect._model import load_model
from gnomon.lab.inspect._pictures import (
    SIGNED,
    Picture,
    colour_of_head,
    heat_map,
    new_figure,
    path,
    signed,
    symbol,
)
from gnomon.lab.inspect._probe import biases, weights
from gnomon.lab.models import LanguageModel
from gnomon.nn import MultiheadAttention, TokenEncoding

# The index kinds of tables that contain scores; the rows of other tables are vectors.
SCORES = ("buckets", "offsets", "grid")
# The maximum number of tokens that are labelled.
NAMED_TOKENS = 64
LONGEST_TEXT = 1024
# The maximum distance plotted for a table of buckets.
FARTHEST = 256


def attention_of(model: LanguageModel, text: str) -> Tensor:
    """Returns the attention weights (layers, H, L, L) of a model over the bytes of a text."""
    tokens = torch.tensor(list(text.encode()))
    with torch.no_grad():
        states = model.layer_inputs(tokens[None])
    return torch.stack(
        [
            weights(block.attention, block.attention_norm(state), causal=True)
            for block, state in zip(model.blocks, states, strict=False)
        ]
    )


def add_attention_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=path, required=True, help="a checkpoint file or a run folder"
    )
    parser.add_argument(
        "--text",
        action="append",
        help="text to process; give it twice for two texts side by side (default: two sentences "
        "that differ in one word)",
    )
    parser.add_argument("--layer", type=int, help="index of the only layer to draw (first: 0)")
    parser.add_argument("--head", type=int, help="index of the only head to draw (first: 0)")


def draw_attention(options: argparse.Namespace) -> Picture:
    texts = options.text or ["the cat sat on the mat", "the dog sat on the mat"]
    for text in texts:
        if not 1 <= len(text.encode()) <= LONGEST_TEXT:
            raise ValueError(f"--text has {len(text.encode())} bytes; expected 1 to {LONGEST_TEXT}")
    checkpoint = load_model(options.model)
    model, kind = checkpoint.model, checkpoint.tokenizer.kind
    if kind != "bytes":
        raise ValueError(
            f"--model is {options.model}, which reads {kind}; expected a model that reads bytes"
        )
    layers = _chosen("layer", options.layer, model.options["depth"])
    heads = _chosen("head", options.head, model.options["heads"])
    maps = [attention_of(model, text)[layers][:, heads] for text in texts]
    groups = [
        (f'"{_shortened(text)}"', text, values) for text, values in zip(texts, maps, strict=True)
    ]
    if len(maps) == 2 and maps[0].shape == maps[1].shape:
        groups.append(("second text minus first text", texts[1], maps[1] - maps[0]))
    longest = max(len(text.encode()) for text in texts)
    named = longest <= NAMED_TOKENS
    single = len(layers) == 1 and len(heads) == 1
    size = 5.2 if single else max(1.5, 0.085 * longest) if named else 1.5
    width = len(heads) * size + 0.5
    figure = new_figure(len(groups) * (width + 0.8), len(layers) * size + 1)
    parts = figure.subfigures(1, len(groups), squeeze=False)[0]
    for number, (part, (title, text, values)) in enumerate(zip(parts, groups, strict=True)):
        part.suptitle(title, fontsize=11)
        panels = part.subplots(len(layers), len(heads), squeeze=False)
        colours: dict[str, Any] = {"cmap": "Blues", "norm": PowerNorm(0.5, 0, 1)}
        if number == len(maps):
            colours = signed(values)
        names = [_name(byte) for byte in text.encode()] if named else []
        for row, layer in enumerate(layers):
            for column, head in enumerate(heads):
                axes = panels[row, column]
                image = heat_map(axes, values[row, column], **colours)
                _name_tokens(axes.set_yticks, names if column == 0 else [], single)
                _name_tokens(axes.set_xticks, names if row + 1 == len(layers) else [], single)
                if row == 0 or single:
                    axes.set_title(f"layer {layer}, head {head}" if single else f"head {head}",
                                   fontsize=10)  # fmt: skip
                if column == 0:
                    axes.set_ylabel("query" if single else f"layer {layer}", fontsize=10)
                if single:
                    axes.set_xlabel("key")
        bar = part.colorbar(image, ax=panels, shrink=min(0.8, 3.2 / (len(layers) * size)))
        if number < len(maps):
            bar.set_ticks([0, 0.01, 0.1, 0.25, 0.5, 1])
        bar.set_label("difference of the weights" if number == len(maps) else "weight", fontsize=10)
    numbers = {
        "model": str(options.model),
        "position": model.options["position"],
        "similarity": model.options["similarity"],
        "layers": layers,
        "heads": heads,
        "texts": [
            {"text": text, "weights": values} for text, values in zip(texts, maps, strict=True)
        ],
    }
    return Picture(figure, numbers)


def _chosen(name: str, index: int | None, count: int) -> list[int]:
    if index is None:
        return list(range(count))
    if not 0 <= index < count:
        raise ValueError(f"--{name} is {index}; expected 0 to {count - 1}")
    return [index]


def _shortened(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= NAMED_TOKENS else line[: NAMED_TOKENS - 1] + "…"


def _name_tokens(ticks: Callable[..., Any], names: list[str], large: bool) -> None:
    ticks(range(len(names)), names, fontsize=9 if large else 6)


def _name(byte: int) -> str:
    return symbol(chr(byte)) if 32 <= byte < 127 else f"{byte:02x}"


def add_tables_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=path, required=True, help="a checkpoint file or a run folder"
    )


def draw_tables(options: argparse.Namespace) -> Picture:
    model = load_model(options.model).model
    tables = learned_tables(model)
    if not tables:
        position = model.options["position"]
        raise ValueError(
            f'{options.model} has no learned position table, because its position is "{position}"; '
            "`gnomon inspect decay --model` draws distance biases"
        )
    panels: list[_Panel] = []
    for table in tables:
        rows, scores = table.rows, table.indexed_by in SCORES
        if scores and rows.dim() == 2:
            by_distance = table.indexed_by == "buckets"
            spec = table.spec if by_distance else None
            panels.append(_Panel(table.name, rows if by_distance else rows.T, True, spec))
            continue
        # One map per head.
        for head, its in enumerate([rows] if rows.dim() == 2 else rows):
            title = table.name if rows.dim() == 2 else f"{table.name}, head {head}"
            while scores and its.dim() > 2:
                its = its[len(its) // 2]  # offset 0 along the other axes
            panels.append(_Panel(title, its if scores else cosines(its), scores))
    columns = min(4, len(panels))
    rows_of_panels = -(-len(panels) // columns)
    figure = new_figure(max(4.2 * columns, 5.5), 3.8 * rows_of_panels)
    grid = figure.subplots(rows_of_panels, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        axes.set_title(panel.title, fontsize=10)
        if panel.spec is not None:
            _draw_buckets(axes, panel.spec, panel.values)
            continue
        limits = signed(panel.values) if panel.scores else {"cmap": SIGNED, "vmin": -1, "vmax": 1}
        aspect = "auto" if panel.scores else "equal"
        image = heat_map(axes, panel.values, aspect=aspect, **limits)
        figure.colorbar(image, ax=axes, shrink=0.85)
        if not panel.scores:
            axes.set_xlabel("row j")
            axes.set_ylabel("row i")
    kinds = {panel.scores for panel in panels}
    title = {
        frozenset({True}): "Learned biases",
        frozenset({False}): "Cosine of the learned rows",
    }.get(frozenset(kinds), "Cosine of the learned rows; learned biases")
    figure.suptitle(title, fontsize=12)
    numbers = {
        "model": str(options.model),
        "tables": [
            {
                "name": panel.title,
                "kind": "biases" if panel.scores else "cosines",
                "values": panel.values,
            }
            for panel in panels
        ],
    }
    return Picture(figure, numbers)


class _Panel(NamedTuple):
    """A matrix to draw: scores, or cosines between a table's rows."""

    title: str
    values: Tensor
    scores: bool
    #: The position of a bucket table, which is drawn as a function of distance instead.
    spec: str | None = None


class LearnedTable(NamedTuple):
    """A learned table that belongs to one of a model's positions."""

    name: str
    rows: Tensor
    #: The index kind in the catalogue.
    indexed_by: str
    #: The position component that the table belongs to.
    spec: str


def learned_tables(model: torch.nn.Module) -> list[LearnedTable]:
    """Returns the learned tables of a model's positions, in the order of its modules."""
    tables = []
    for place, module in model.named_modules():
        known: dict[str, tuple[str, str]] = {}
        if isinstance(module, MultiheadAttention):
            known = {
                tensor.name: (tensor.indexed_by, tensor.component.spec)
                for tensor in module_tensors(module.similarity, module.position)
                if tensor.indexed_by
            }
        elif isinstance(module, TokenEncoding) and module.max_length is not None:
            known = {
                name: ("positions", module.spec)
                for name, parameter in module.named_parameters(recurse=False)
                if len(parameter) == module.max_length
            }
        tables += [
            LearnedTable(f"{place}.{name}", parameter.detach(), *known[name])
            for name, parameter in module.named_parameters(recurse=False)
            if name in known
        ]
    return tables


def _draw_buckets(axes: Any, position: str, table: Tensor) -> None:
    """Draws a T5-style table (buckets, H) as biases by distance."""
    heads = table.shape[1]
    spec = _table_of_buckets(position).component.spec
    module = MultiheadAttention(heads, heads, position=spec).to(table.dtype)
    with torch.no_grad():
        getattr(module, _table_of_buckets(spec).name).copy_(table)
    bias = biases(module, FARTHEST)
    for head, curve in enumerate(bias):
        axes.plot(
            range(FARTHEST + 1),
            curve,
            color=colour_of_head(head, heads),
            label=f"head {head}",
            drawstyle="steps-mid",
        )
    # Short distances have one bucket each; longer ones share buckets of logarithmic width.
    axes.set_xscale("symlog", base=2, linthresh=8, linscale=2)
    axes.xaxis.set_major_locator(FixedLocator([0, 2, 4, 8, 16, 32, 64, 128, 256]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    axes.set_xlabel("distance, tokens back")
    axes.set_ylabel("bias relative to distance 0")
    axes.legend(fontsize=8)


def _table_of_buckets(position: str) -> ModuleTensor:
    tensors = module_tensors("dot", position)
    return next(tensor for tensor in tensors if tensor.indexed_by == "buckets")


def cosines(rows: Tensor) -> Tensor:
    """Returns the cosine similarity of each pair of rows."""
    unit = torch.nn.functional.normalize(rows, dim=1)
    return unit @ unit.T
