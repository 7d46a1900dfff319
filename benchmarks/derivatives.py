"""Compares forward-mode and second derivatives with forward and backward passes, by CPU time.

    .venv/bin/python benchmarks/derivatives.py [--length N] [--rounds N] [--similarity S]
        [--terms NAME | --graph EDGES] [--math | --float64]

Reports the median time in milliseconds and a median ratio. A jvp is compared with the forward pass,
a gradient of a gradient (double backward) with the backward pass, and a mean-flow step (a jvp in a
loss, and the backward pass of that loss) with a forward and a backward pass. The calls alternate
and run on one thread. With --math, the script also times PyTorch's unfused implementation
(SDPBackend.MATH). --terms adds a term, a mask or another argument to the call. With --graph, the
calls are those of gnomon.graph_attention with N nodes and EDGES edges from each node to random
nodes. With --float64, the script instead compares each call in float64 with the same call in
float32. Other programs on the machine hardly affect CPU time.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable

import torch
from torch.func import jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

import gnomon

HEADS, HEAD_DIM = 8, 64
Attend = Callable[..., torch.Tensor]


def math_of(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def terms(name: str | None, length: int) -> dict[str, object]:
    """Returns the arguments that add the term to a call of gnomon.attention."""
    torch.manual_seed(1)
    documents = torch.arange(length).div(256, rounding_mode="floor")[None]
    return {
        None: lambda: {},
        "temperature": lambda: {"temperature": torch.rand(1, HEADS, length) + 0.5},
        "soft cap": lambda: {"score_softcap": 20.0},
        "dropout": lambda: {"dropout": 0.1, "seed": 0},
        "segments": lambda: {"query_segments": documents, "key_segments": documents},
        "mask": lambda: {"mask": torch.rand(1, 1, length, length) < 0.9},
        "pair bias": lambda: {
            "position": gnomon.position.PairBias(torch.randn(1, HEADS, length, length))
        },
        "relative keys": lambda: {
            "position": gnomon.position.Relative(
                torch.randn(2 * length - 1, HEAD_DIM) / 8, length - 1
            )
        },
        "disentangled": lambda: {
            "position": gnomon.position.Disentangled(
                torch.randn(512, HEAD_DIM) / 8, torch.randn(512, HEAD_DIM) / 8, max_distance=512
            )
        },
    }[name]()


def attend_in_graph(
    edges: int, length: int, similarity: str | None
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns graph attention for tokens (1, H, L, D), as a function of q, k and v."""
    torch.manual_seed(1)
    indptr = torch.arange(length + 1) * edges
    indices = torch.randint(length, (length * edges,))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (q, k, v))
        return gnomon.graph_attention(q, k, v, indptr, indices, similarity=similarity)

    return attend


def calls(
    attend: Attend, length: int, dtype: torch.dtype = torch.float32
) -> dict[str, Callable[[], object]]:
    torch.manual_seed(0)
    tokens = tuple(torch.randn(1, HEADS, length, HEAD_DIM, dtype=dtype) for _ in range(3))
    tangents = tuple(torch.randn_like(x) for x in tokens)
    leaves = tuple(x.clone().requires_grad_() for x in tokens)
    o = attend(*leaves)
    d_o = torch.randn_like(o).requires_grad_()
    first = torch.autograd.grad(o, leaves, d_o, create_graph=True)

    def step() -> None:
        torch.autograd.grad(attend(*leaves), leaves, d_o)

    def mean_flow() -> None:
        value, tangent = jvp(attend, leaves, tangents)
        torch.autograd.grad((value + tangent).square().mean(), leaves)

    return {
        "forward": functools.partial(attend, *tokens),
        "jvp": functools.partial(jvp, attend, tokens, tangents),
        "backward": lambda: torch.autograd.grad(o, leaves, d_o, retain_graph=True),
        "gradient of a gradient": lambda: torch.autograd.grad(
            first, (*leaves, d_o), tangents, retain_graph=True
        ),
        "forward + backward": step,
        "mean-flow step": mean_flow,
    }


BASES = {
    "jvp": "forward",
    "gradient of a gradient": "backward",
    "mean-flow step": "forward + backward",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--similarity")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--terms")
    kind.add_argument("--graph", type=int, metavar="EDGES")
    other = parser.add_mutually_exclusive_group()
    other.add_argument("--math", action="store_true")
    other.add_argument("--float64", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    attend: Attend
    if options.graph:
        attend = attend_in_graph(options.graph, options.length, options.similarity)
    else:
        attend = functools.partial(
            gnomon.attention,
            similarity=options.similarity,
            causal=True,
            **terms(options.terms, options.length),
        )
    attends: dict[str, Attend] = {"gnomon": attend}
    if options.math:
        attends["math"] = math_of
    if options.float64:
        timed = {
            (name, call_name): call
            for name, dtype in (("float32", torch.float32), ("float64", torch.float64))
            for call_name, call in calls(attend, options.length, dtype).items()
        }
    else:
        timed = {
            (name, call_name): call
            for name, attend in attends.items()
            for call_name, call in calls(attend, options.length).items()
        }
    times: dict[tuple[str, str], list[float]] = {key: [] for key in timed}
    for call in timed.values():
        call()
    for _ in range(options.rounds):
        for key, call in timed.items():
            start = time.process_time()
            call()
            times[key].append((time.process_time() - start) * 1e3)
    for (name, call_name), own in times.items():
        line = f"{name:8} {call_name:24} {statistics.median(own):9.1f} ms"
        base_key = ("float32", call_name) if name == "float64" else (name, BASES.get(call_name, ""))
        if base_key in times:
            ratio = statistics.median(a / b for a, b in zip(own, times[base_key], strict=True))
            line += f"  {ratio:6.2f} x {' '.join(base_key).removeprefix(f'{name} ')}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
