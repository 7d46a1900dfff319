"""Writes docs/gallery.md and its pictures (docs/gallery) from gnomon's catalogue.

Each card shows one term's formula, a heat map of its scores, example code, cost and paper. `make
facades` updates only the page (which --page prints); to draw pictures as well, for example of a new
term, run this script.
"""

from __future__ import annotations

import pathlib
import sys
from typing import Any

import torch
from torch import Tensor

import gnomon

DOCS = pathlib.Path(__file__).resolve().parents[1]
LENGTH, DIM, GRID = 48, 64, (7, 7)

INTRODUCTION = """# Gallery

This page has one card for each similarity and one for each position. The [catalogue](catalogue.md)
lists all parameters, and [Choosing](choosing.md) compares the terms. `docs/figures/gallery.py`
generates the page from the catalogue.

*Cost* is the number of operations per query-key pair in the forward pass: simple operations +
special operations (roots, logarithms, divisions).

```python
import torch

import gnomon

q, k, v = torch.randn(3, 1, 4, 49, 16).unbind()  # batch, heads, length, head_dim
x = torch.randn(1, 49, 64)  # batch, length, embed_dim
```
"""

# Specifications with options; for all other terms, the name is enough.
SPECIFICATIONS = {
    "hype": "hype:tau=learned",
    "alibi": "alibi:slopes=learned",
    "rope_mixed": "rope_mixed:shape=7x7",
    "grid_bias": "grid_bias:shape=7x7",
    "relative": "relative:max_offset=16",
    "relative2d": "relative2d:shape=7x7",
    "offset_bias": "offset_bias:length=64",
}
# Terms whose tensors are passed with each call.
OF_A_CALL = {
    "key_bias": "gnomon.position.KeyBias(torch.randn(1, 4, 49))",
    "pair_bias": "gnomon.position.PairBias(torch.randn(1, 1, 49, 49))",
}
CAPTIONS = {
    "similarity": "Scores of one query (the cross) with the keys at each point of a plane",
    "additive": "Scores of queries (rows) and keys (columns) with head_dim 1",
    "bias": "Bias for query i (row) and key j (column)",
    "rotation": "Scores of query i (row) and key j (column) if all tokens are equal",
    "grid_bias": "Bias from a table for a grid of 7 x 7 tokens (rows: queries; columns: keys)",
    "forget": "Bias from random gates for query i (row) and key j (column)",
    "content": "Value of the term for random queries (rows) at each key position (columns)",
    "embedding": "Inner products of the encodings of positions i (row) and j (column)",
}


def scores(q: Tensor, k: Tensor, **arguments: Any) -> Tensor:
    """Returns the scores s_ij (queries, keys) of one head; masked pairs are -inf."""
    q, k = q[None, None], k[None, None]
    weights = gnomon.attention_weights(q, k, slice(None), **arguments)
    _, lse = gnomon.attention(q, k, k, return_lse=True, tolerance=0.0, **arguments)
    return (weights.log() + lse[..., None])[0, 0].detach()


def plane(name: str) -> Tensor:
    axis = torch.linspace(-2.5, 2.5, 61)
    keys = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1).flatten(0, 1)
    query = torch.tensor([[0.6, 0.4]]).expand(len(keys), 2)
    if name == "additive":
        column = torch.linspace(-2.5, 2.5, LENGTH)[:, None]
        return scores(column, column, similarity=name)
    pairs = [each[:, None, None, :].contiguous() for each in (query, keys)]
    _, lse = gnomon.attention(*pairs, pairs[1], similarity=name, return_lse=True)
    return lse.reshape(61, 61).detach()


def position_picture(name: str) -> Tensor | None:
    """Returns the picture of a position, or None if the gallery shows none."""
    torch.manual_seed(1)
    zeros = torch.zeros(LENGTH, DIM)
    tokens = torch.randn(LENGTH, DIM)
    if name == "rope":
        ones = torch.ones(LENGTH, DIM)
        return scores(ones, ones, position="rope")
    if name in ("alibi", "kerple", "sandwich"):
        return scores(zeros, zeros, position=name)
    if name == "hype":
        return scores(zeros, zeros, position=gnomon.position.HyPE(0.1, 0.08))
    if name == "t5":
        table = torch.randn(32, 1)
        return scores(zeros, zeros, position=gnomon.position.T5(table, True, max_distance=48))
    if name == "offset_bias":
        offsets = torch.arange(-(LENGTH - 1), LENGTH)
        table = torch.cos(offsets / 3) * torch.exp(-offsets.abs() / 20)
        return scores(zeros, zeros, position=gnomon.position.OffsetBias(table[None]))
    if name == "grid_bias":
        places = torch.arange(13) - 6
        table = -(places[:, None] ** 2 + places**2).float().sqrt()[None]
        grid = torch.zeros(49, DIM)
        return scores(grid, grid, position=gnomon.position.GridBias(table))
    if name == "forget":
        gates = torch.nn.functional.logsigmoid(2 + 2 * torch.randn(1, 1, LENGTH))
        return scores(zeros, zeros, position=gnomon.position.Forget(gates), causal=True)
    if name == "relative":
        table = torch.randn(2 * 16 + 1, DIM)
        return scores(tokens, zeros, position=gnomon.position.Relative(table, 16))
    if name == "absolute_keys":
        table = torch.randn(LENGTH, DIM)
        return scores(tokens, zeros, position=gnomon.position.AbsoluteKeys(table))
    if name == "sinusoidal":
        encoding = gnomon.nn.TokenPosition(name, DIM, LENGTH)
        rows = encoding(torch.zeros(1, LENGTH, DIM))[0].detach()
        return rows @ rows.T
    return None


def code(entry: dict[str, Any], kind: str) -> str:
    name = entry["name"]
    text = SPECIFICATIONS.get(name, name)
    causal = ", causal=True" if entry["needs_causal"] else ""
    if kind == "similarity":
        if name == "additive":
            return (
                'o = gnomon.attention(q[..., :1], k[..., :1], v, similarity="additive")\n'
                'module = gnomon.nn.MultiheadAttention(64, 4, qk_dim=1, similarity="additive")\n'
                "y = module(x)"
            )
        return (
            f'o = gnomon.attention(q, k, v, similarity="{text}", position="rope")\n'
            f'module = gnomon.nn.MultiheadAttention(64, 4, similarity="{text}")\n'
            "y = module(x)"
        )
    if entry["role"] == "embedding":
        return f'encoding = gnomon.nn.TokenPosition("{text}", 64, max_length=49)\nx1 = encoding(x)'
    if name in OF_A_CALL:
        return f"bias = {OF_A_CALL[name]}\no = gnomon.attention(q, k, v, position=bias)"
    return (
        f'module = gnomon.nn.MultiheadAttention(64, 4, position="{text}")\n'
        f"y = module(x{causal})\n"
        f"print(module.learned_values().keys())"
    )


def card(entry: dict[str, Any], kind: str) -> str:
    name = entry["name"]
    picture = DOCS / "gallery" / f"{name}.png"
    title = entry["title"][0].upper() + entry["title"][1:]
    lines = [f"### {title}", "", f"`{name}`"]
    if picture.exists():
        caption = CAPTIONS.get(name) or CAPTIONS[entry["role"]]
        lines += ["", f"![{caption}](gallery/{name}.png)", "", f"*{caption}.*"]
    if entry["latex"]:
        lines += ["", entry["lead"], "", f"$$\n{entry['latex']}\n$$"]
    else:
        lines += ["", f"{entry['formula'][0].upper()}{entry['formula'][1:]}."]
    if entry["note"]:
        lines += ["", f"{entry['note']}."]
    lines += ["", f"```python\n{code(entry, kind)}\n```"]
    lines += ["", f"Cost: {entry['cost']}. Source: {entry['source']}."]
    return "\n".join(lines)


def page() -> str:
    catalogue = gnomon.catalogue()
    parts = [INTRODUCTION, "## Similarities\n"]
    parts += [card(entry, "similarity") + "\n" for entry in catalogue["similarities"]]
    parts += ["## Positions\n"]
    entries = [entry for entry in catalogue["positions"] if entry["name"] != "none"]
    parts += [card(entry, "position") + "\n" for entry in entries]
    return "\n".join(parts)


def draw(name: str, values: Tensor, cross: bool) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    finite = values.masked_fill(~values.isfinite(), float("nan"))
    figure, ax = plt.subplots(figsize=(2.4, 2.2), layout="constrained")
    if cross:
        image = ax.imshow(finite, cmap="viridis", origin="lower", extent=(-2.5, 2.5, -2.5, 2.5))
        ax.plot(0.6, 0.4, "+", color="white", ms=9, mew=2)
    else:
        image = ax.imshow(finite, cmap="viridis")
    ax.tick_params(labelsize=6, length=2)
    bar = figure.colorbar(image, ax=ax, shrink=0.85)
    bar.ax.tick_params(labelsize=6, length=2)
    figure.savefig(DOCS / "gallery" / f"{name}.png", dpi=120, metadata={"Software": None})
    plt.close(figure)


def main() -> None:
    if "--page" in sys.argv[1:]:
        print(page(), end="")
        return
    (DOCS / "gallery").mkdir(exist_ok=True)
    catalogue = gnomon.catalogue()
    for entry in catalogue["similarities"]:
        draw(entry["name"], plane(entry["name"]), cross=entry["name"] != "additive")
    for entry in catalogue["positions"]:
        values = position_picture(entry["name"])
        if values is not None:
            draw(entry["name"], values, cross=False)
    (DOCS / "gallery.md").write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
