"""Calls so small that what surrounds the kernels decides: CPU time of one thread, beside SDPA's.

    .venv/bin/python benchmarks/small_calls.py [LENGTH]

For each similarity the median microseconds of a call of B 1, H 8, L 16, D 64, and the median ratio
to SDPA, measured in turn. CPU time, so that other programs on the machine matter little.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable

import torch

import gnomon

ROUNDS, CALLS = 40, 200


def microseconds(call: Callable[[], object]) -> float:
    call()
    start = time.process_time()
    for _ in range(CALLS):
        call()
    return (time.process_time() - start) / CALLS * 1e6


def main() -> None:
    torch.set_num_threads(1)
    length = int(sys.argv[1]) if len(sys.argv) > 1 else 16
    q, k, v = torch.randn(3, 1, 8, length, 64).unbind()
    gamma = torch.ones(8)
    terms = gnomon.similarity
    calls: dict[str, Callable[[], object]] = {
        "sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v),
        "dot": lambda: gnomon.attention(q, k, v),
        "dot, causal": lambda: gnomon.attention(q, k, v, causal=True),
    }
    for similarity in (terms.Laplacian(gamma), terms.Umbral(gamma), terms.Penumbral(gamma)):
        call = functools.partial(gnomon.attention, q, k, v, similarity=similarity)
        calls[type(similarity).__name__.lower()] = call
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for _ in range(ROUNDS):
            for name, step in calls.items():
                times[name].append(microseconds(step))
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, times["sdpa"], strict=True))
        print(f"{name:12} {statistics.median(own):7.1f} us  {ratio:.2f}")


if __name__ == "__main__":
    main()
