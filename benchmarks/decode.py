"""Compares gnomon.attention with SDPA in decoding (few queries, long cache), by CPU time.

    .venv/bin/python benchmarks/decode.py [--terms] [--keys 128,2048,32768] [--rounds 9]

Reports the median time of a call in microseconds and the median ratio to SDPA, for each combination
of dtype, head dimension, group size (query heads per key head), number of queries and cache length.
The batch size is 1, with 8 query heads. With --terms, the script instead compares biases, a causal
mask and other similarities with the dot product. The calls alternate and run on one thread. Other
programs on the machine hardly affect CPU time.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable

import torch

import gnomon

HEADS = 8
LEAST_SECONDS = 0.02
Call = Callable[[], object]


def microseconds(call: Call, count: int) -> float:
    start = time.process_time()
    for _ in range(count):
        call()
    return (time.process_time() - start) / count * 1e6


def in_turn(calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
    counts = {}
    for name, call in calls.items():
        call()
        counts[name] = max(1, int(LEAST_SECONDS * 1e6 / max(1.0, microseconds(call, 3))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(microseconds(call, counts[name]))
    return times


def tokens(
    queries: int, keys: int, dim: int, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = torch.randn(1, HEADS, queries, dim).to(dtype)
    k, v = torch.randn(2, 1, HEADS // group, keys, dim).to(dtype).unbind()
    return q, k, v


def beside_sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Call]:
    sdpa = torch.nn.functional.scaled_dot_product_attention
    grouped = q.shape[1] != k.shape[1]
    return {
        "sdpa": functools.partial(sdpa, q, k, v, enable_gqa=grouped),
        "dot": functools.partial(gnomon.attention, q, k, v, query_offset=k.shape[2] - q.shape[2]),
    }


def with_terms(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Call]:
    position, similarity = gnomon.position, gnomon.similarity
    keys, dim = k.shape[2:]
    call = functools.partial(gnomon.attention, q, k, v, query_offset=keys - q.shape[2])
    one = torch.ones(HEADS)
    return {
        "dot": call,
        "causal": functools.partial(call, causal=True),
        "alibi": functools.partial(call, position=position.ALiBi(gnomon.alibi_slopes(HEADS))),
        "key bias": functools.partial(call, position=position.KeyBias(torch.randn(1, HEADS, keys))),
        "relative": functools.partial(
            call, position=position.Relative(torch.randn(129, dim), max_offset=64)
        ),
        "laplacian": functools.partial(call, similarity=similarity.Laplacian(one)),
        "umbral": functools.partial(call, similarity=similarity.Umbral(one)),
        "penumbral": functools.partial(call, similarity=similarity.Penumbral(one)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--terms", action="store_true", help="compare terms with the dot product")
    parser.add_argument("--keys", default="128,2048,32768", help="cache lengths")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtypes = (torch.float32,) if args.terms else (torch.float32, torch.bfloat16)
    dims, groups = ((64,), (1,)) if args.terms else ((64, 128), (1, 4))
    for dtype, dim, group, queries in itertools.product(dtypes, dims, groups, (1, 4)):
        for keys in map(int, args.keys.split(",")):
            calls = (with_terms if args.terms else beside_sdpa)(
                *tokens(queries, keys, dim, group, dtype)
            )
            with torch.no_grad():
                times = in_turn(calls, args.rounds)
            case = f"{str(dtype)[6:]:8} D {dim:3} GQA {group} {queries} on {keys:5}"
            first, *others = times
            for name in others:
                ratio = statistics.median(
                    a / b for a, b in zip(times[name], times[first], strict=True)
                )
                print(
                    f"{case}  {name:9} {statistics.median(times[name]):9.1f} us  {ratio:.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
