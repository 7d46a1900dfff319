"""Draws the margin by which a similarity separates descendants from other nodes of a tree.

The experiment follows Tseng et al. 2023, section 7.7. In two dimensions, a cone can contain any set
of descendants, and gives them equal scores. A half-plane (the dot product) can also separate a set,
but with a margin that shrinks with the number of nodes. The margin that Adam reaches is a lower
bound on the best margin. For cones in two dimensions, this bound can be loose, because there is
only one axis besides the height, and nodes rarely pass each other along it during optimisation.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import textwrap
from collections.abc import Iterator
from typing import Any

import torch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from torch import Tensor

import gnomon
from gnomon.lab._plots import line_style
from gnomon.lab.inspect._pictures import (
    Picture,
    integer,
    integers,
    items,
    new_figure,
    seed,
)
from gnomon.similarity import Similarity

#: A margin that rises by more than this in the last quarter of the steps has not converged.
RISING = 0.05


def descendants(branching: int, depth: int) -> Tensor:
    """Returns a mask (N, N): whether node j of a complete tree (root: 0) is node i or below it."""
    nodes = sum(branching**level for level in range(depth + 1))
    below = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        below[:, node] |= below[:, (node - 1) // branching]
    return below


def scores(similarity: Similarity | str, q: Tensor, k: Tensor) -> Tensor:
    """Returns the scores s_ij (R, N, N) of queries and keys (R, N, d).

    Each query attends to a single key, so the log-sum-exp (lse) is the score.
    """
    one_key = k.transpose(0, 1).unsqueeze(2)
    _, lse = gnomon.attention(
        q.expand(len(one_key), -1, -1, -1),
        one_key,
        torch.zeros_like(one_key[..., :1]),
        similarity=similarity,
        query_offset=0,
        return_lse=True,
    )
    return lse.permute(1, 2, 0)


def margins(s: Tensor, below: Tensor) -> Tensor:
    """Returns the margin (...) by which scores (..., N, N) separate descendants from other nodes.

    For each node i with at least one non-descendant, take the lowest s_ij of a descendant j minus
    the highest s_ij of a non-descendant. The margin is the minimum over i, divided by the standard
    deviation of all these s_ij about their mean over j. It is therefore invariant to scaling the
    scores and to adding terms that depend only on i, which softmax cancels.
    """
    rows = ~below.all(1)
    s, below = s[..., rows, :], below[rows]
    low = s.masked_fill(~below, math.inf).amin(-1)
    high = s.masked_fill(below, -math.inf).amax(-1)
    return (low - high).amin(-1) / _spread(s)


def _spread(s: Tensor) -> Tensor:
    return (s - s.mean(-1, keepdim=True)).square().mean((-2, -1)).sqrt()


def train(
    similarity: Similarity | str, dim: int, below: Tensor, *, steps: int, restarts: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Returns the margins (restarts,) that Adam reaches with queries and keys of `dim` coordinates.

    The second result contains the margins before the last quarter of the steps. If they are lower,
    more steps would probably increase the margins.

    The loss is a soft maximum, with increasing sharpness, of the non-descendant's score minus the
    descendant's over all triples (node, descendant, non-descendant). Each restart's margin is that
    of its best step.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (restarts, len(below), dim)
    q, k = (torch.randn(shape, generator=generator).requires_grad_() for _ in range(2))
    optimizer = torch.optim.Adam([q, k])
    rows = ~below.all(1)
    inside = below[rows]
    best = torch.full((restarts,), -math.inf)
    before = best
    for step in range(steps):
        done = step / steps
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * (1 + math.cos(math.pi * done)) / 2
        temperature = 0.3 * 0.03**done
        s = scores(similarity, q, k)
        best = torch.maximum(best, margins(s.detach(), below))
        if done <= 0.75:
            before = best
        chosen = s[:, rows]
        z = chosen / (_spread(chosen)[:, None, None] * temperature)
        low = (-z).masked_fill(~inside, -math.inf).logsumexp(-1)
        high = z.masked_fill(inside, -math.inf).logsumexp(-1)
        # Summing the losses is valid because the restarts are independent.
        loss = temperature * (low + high).logsumexp(-1).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return best, before


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--similarity",
        type=items,
        default="dot,penumbral,umbral",
        help="comma-separated specifications (default %(default)s)",
    )
    parser.add_argument(
        "--dims",
        type=integers(2, 1024),
        default="2,3,4,8",
        help="comma-separated dimensions, each at least 2 (default %(default)s)",
    )
    parser.add_argument(
        "--branching",
        type=integer(1, 1000),
        default=2,
        help="children per node (default %(default)s)",
    )
    parser.add_argument(
        "--depth",
        type=integer(2, 1000),
        default=3,
        help="levels below the root (default %(default)s)",
    )
    parser.add_argument(
        "--steps", type=integer(1, 10**9), default=500, help="Adam steps (default %(default)s)"
    )
    parser.add_argument(
        "--restarts",
        type=integer(1, 10_000),
        default=8,
        help="number of random initialisations; the best result counts (default %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=seed,
        default=0,
        help="random seed of the initialisations (default %(default)s)",
    )


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Uses one thread, which is faster for such small tensors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@_one_thread()
def draw(options: argparse.Namespace) -> Picture:
    names = options.similarity
    dims = options.dims
    if (options.depth + 1) * options.branching**options.depth > 2000:
        raise ValueError(
            f"--depth is {options.depth} and --branching is {options.branching}; expected a "
            "smaller tree"
        )
    below = descendants(options.branching, options.depth)
    results: list[dict[str, Any]] = []
    rising: list[str] = []
    figure = new_figure(7.2, 4.8)
    axes = figure.add_subplot()
    for index, name in enumerate(names):
        reached = [
            train(
                name,
                dim,
                below,
                steps=options.steps,
                restarts=options.restarts,
                seed=options.seed,
            )
            for dim in dims
        ]
        for dim, (margin, before) in zip(dims, reached, strict=True):
            results.append(
                {
                    "similarity": name,
                    "dim": dim,
                    "margins": margin,
                    "margins_before_last_quarter": before,
                }
            )
            if float(margin.max() - before.max()) > RISING:
                rising.append(f"{name} in {dim}")
        best = [float(margin.max()) for margin, _ in reached]
        axes.plot(dims, best, label=name, marker="o", markersize=6, **line_style(index))
    axes.axhline(0, color="#888888", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(dims))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:.0f}"))
    axes.set_xlabel("dimensions per node")
    axes.set_ylabel("margin, standard deviations of the scores")
    axes.set_title(
        f"Separating descendants from other nodes, in a tree of {len(below)} nodes", fontsize=11
    )
    axes.legend()
    note = f"Best of {options.restarts} runs with {options.steps} steps of Adam: a lower bound. "
    if rising:
        note += f"Still rising in the last quarter of the steps: {', '.join(rising)} dimensions."
    else:
        note += f"None rose by more than {RISING:g} in the last quarter of the steps."
    figure.supxlabel(textwrap.fill(note, 100), fontsize=9, color="#555555", x=0.02, ha="left")
    numbers = {
        "branching": options.branching,
        "depth": options.depth,
        "nodes": len(below),
        "steps": options.steps,
        "seed": options.seed,
        "results": results,
    }
    return Picture(figure, numbers)
