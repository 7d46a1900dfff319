"""Compares the overhead of small gnomon.attention calls with that of SDPA, by CPU time.

    .venv/bin/python benchmarks/small_calls.py [LENGTH]

Reports the median time of a call in microseconds and the median ratio to SDPA, for each similarity,
with and without the backward pass. The default shape is B 1, H 8, L 16, D 64. Gradients are
computed for q, k, v and the similarity's own parameter. The calls alternate and run on one thread.
Other programs on the machine hardly affect CPU time.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import gnomon

ROUNDS, CALLS = 40, 200


def microseconds(call: Callable[[], object]) -> float:
    call()
    start = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - start) / CALLS * 1e6


def with_backward(call: Callable[[], Tensor], leaves: list[Tensor], d_o: Tensor) -> object:
    return torch.autograd.grad(call(), leaves, d_o)


def compare(calls: dict[str, Callable[[], object]]) -> None:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, step in calls.items():
            times[name].append(microseconds(step))
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, times["sdpa"], strict=True))
        print(f"  {name:12} {statistics.median(own):7.1f} us  {ratio:.2f}")


def main() -> None:
    torch.set_num_threads(1)
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    tokens = [torch.randn(1, 8, length, 64).requires_grad_() for _ in range(3)]
    d_o = torch.randn(1, 8, length, 64)
    gamma = torch.ones(8, requires_grad=True)
    terms = gnomon.similarity
    calls: dict[str, Callable[[], Tensor]] = {
        "sdpa": functools.partial(torch.nn.functional.scaled_dot_product_attention, *tokens),
        "dot": functools.partial(gnomon.attention, *tokens),
        "dot, causal": functools.partial(gnomon.attention, *tokens, causal=True),
    }
    leaves = dict.fromkeys(calls, tokens)
    for similarity in (terms.Laplacian(gamma), terms.Umbral(gamma), terms.Penumbral(gamma)):
        name = type(similarity).__name__.lower()
        calls[name] = functools.partial(gnomon.attention, *tokens, similarity=similarity)
        leaves[name] = [*tokens, gamma]
    print("forward")
    with torch.no_grad():
        compare(dict(calls))
    print("forward + backward")
    compare(
        {
            name: functools.partial(with_backward, call, leaves[name], d_o)
            for name, call in calls.items()
        }
    )


if __name__ == "__main__":
    main()
