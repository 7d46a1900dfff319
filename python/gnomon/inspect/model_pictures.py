"""What a trained model attends to, and the position tables that it has learned."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from matplotlib.colors import PowerNorm
from torch import Tensor

from gnomon.inspect._model import load_model
from gnomon.inspect._pictures import SIGNED, Picture, heat_map, new_figure, path, signed, symbol
from gnomon.inspect._probe import weights
from gnomon.models import LanguageModel

# Tables end in one of these.
TABLES = ("table", "values", "rows", "columns")
# Tables of scores, by bucket or offset; the rows of other tables are vectors.
SCORE_TABLES = ("t5_table", "offset_bias_table", "grid_bias_table")
# Tokens whose names fit beside a map.
NAMED_TOKENS = 64
LONGEST_TEXT = 1024


def attention_of(model: LanguageModel, text: str) -> Tensor:
    """The attention weights of all layers and heads over the bytes of a text, (layers, H, L, L)."""
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
        "--model", type=path, required=True, help="a checkpoint file, or a run's folder"
    )
    parser.add_argument(
        "--text",
        action="append",
        help="what it reads; give it twice for two texts side by side "
        "(default: two sentences that differ in one word)",
    )
    parser.add_argument("--layer", type=int, help="only this layer, from 0")
    parser.add_argument("--head", type=int, help="only this head, from 0")


def draw_attention(options: argparse.Namespace) -> Picture:
    texts = options.text or ["the cat sat on the mat", "the dog sat on the mat"]
    for text in texts:
        if not 1 <= len(text.encode()) <= LONGEST_TEXT:
            raise ValueError(f"--text: {len(text.encode())} bytes; expected 1 to {LONGEST_TEXT}")
    checkpoint = load_model(options.model)
    model, kind = checkpoint.model, checkpoint.tokenizer.kind
    if kind != "bytes":
        raise ValueError(f"--model: {options.model} reads {kind}; expected a model of bytes")
    layers = _chosen("layer", options.layer, model.options["depth"])
    heads = _chosen("head", options.head, model.options["heads"])
    maps = [attention_of(model, text)[layers][:, heads] for text in texts]
    single = len(layers) == 1 and len(heads) == 1
    size = 5.2 if single else 1.5
    width = len(heads) * size + 0.4
    figure = new_figure(len(texts) * width + 0.8, len(layers) * size + 1)
    image: Any = None
    *parts, margin = figure.subfigures(
        1, len(texts) + 1, squeeze=False, width_ratios=[*(width for _ in texts), 0.8]
    )[0]
    for part, text, values in zip(parts, texts, maps, strict=True):
        part.suptitle(f'"{_shortened(text, int(10 * len(heads) * size))}"', fontsize=11)
        panels = part.subplots(len(layers), len(heads), squeeze=False)
        for row, layer in enumerate(layers):
            for column, head in enumerate(heads):
                axes = panels[row, column]
                image = heat_map(axes, values[row, column], cmap="Blues", norm=PowerNorm(0.5, 0, 1))
                axes.set_xticks([])
                axes.set_yticks([])
                if row == 0 or single:
                    axes.set_title(f"layer {layer}, head {head}" if single else f"head {head}",
                                   fontsize=10)  # fmt: skip
                if column == 0 and not single:
                    axes.set_ylabel(f"layer {layer}", fontsize=10)
        if single and len(text.encode()) <= NAMED_TOKENS:
            names = [_name(byte) for byte in text.encode()]
            for ticks in (panels[0, 0].set_xticks, panels[0, 0].set_yticks):
                ticks(range(len(names)), names, fontsize=9)
            panels[0, 0].set_xlabel("key")
            panels[0, 0].set_ylabel("query")
    bar = margin.colorbar(image, cax=margin.add_axes((0.05, 0.15, 0.2, 0.6)))
    bar.set_ticks([0, 0.01, 0.1, 0.25, 0.5, 1])
    margin.suptitle("weight", fontsize=10)
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
        raise ValueError(f"--{name}: {index}; the model has {count}, from 0 to {count - 1}")
    return [index]


def _shortened(text: str, most: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else line[: most - 1] + "…"


def _name(byte: int) -> str:
    return symbol(chr(byte)) if 32 <= byte < 127 else f"{byte:02x}"


def add_tables_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=path, required=True, help="a checkpoint file, or a run's folder"
    )


def draw_tables(options: argparse.Namespace) -> Picture:
    model = load_model(options.model).model
    tables = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if name.endswith(TABLES)
    }
    if not tables:
        position = model.options["position"]
        raise ValueError(
            f'{options.model} has learned no position table, its position being "{position}"; '
            "`gnomon inspect decay --model` draws biases by distance"
        )
    panels: list[tuple[str, Tensor, bool]] = []
    for name, table in tables.items():
        scores = name.endswith(SCORE_TABLES)
        if scores and table.dim() == 2:
            panels.append((name, table if name.endswith("t5_table") else table.T, True))
        else:
            # One for each head.
            each = [table] if table.dim() == 2 else list(table)
            for head, rows in enumerate(each):
                title = name if table.dim() == 2 else f"{name}, head {head}"
                while scores and rows.dim() > 2:
                    rows = rows[len(rows) // 2]  # of the farther axes, offset 0
                panels.append((title, rows if scores else cosines(rows), scores))
    columns = min(4, len(panels))
    rows_of_panels = -(-len(panels) // columns)
    figure = new_figure(max(4.2 * columns, 5.5), 3.8 * rows_of_panels)
    grid = figure.subplots(rows_of_panels, columns, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (title, values, scores) in zip(grid.flat, panels, strict=False):
        limits = signed(values) if scores else {"cmap": SIGNED, "vmin": -1, "vmax": 1}
        image = heat_map(axes, values, aspect="auto" if scores else "equal", **limits)
        figure.colorbar(image, ax=axes, shrink=0.85)
        axes.set_title(title, fontsize=10)
        if title.endswith("t5_table"):
            axes.set_xlabel("head")
            axes.set_ylabel("bucket")
        elif not scores:
            axes.set_xlabel("row j")
            axes.set_ylabel("row i")
    kinds = {scores for _, _, scores in panels}
    title = {
        frozenset({True}): "Learned biases",
        frozenset({False}): "Cosine of the learned rows",
    }.get(frozenset(kinds), "Cosine of the learned rows; learned biases")
    figure.suptitle(title, fontsize=12)
    numbers = {
        "model": str(options.model),
        "tables": [
            {"name": name, "kind": "biases" if scores else "cosines", "values": values}
            for name, values, scores in panels
        ],
    }
    return Picture(figure, numbers)


def cosines(rows: Tensor) -> Tensor:
    """Cosines of the angles between rows."""
    unit = torch.nn.functional.normalize(rows, dim=1)
    return unit @ unit.T
