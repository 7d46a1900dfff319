"""Performance targets of gnomon: ratios to the usual alternatives and between its own variants.

The two steps of a comparison alternate in one process, so that a change in clock frequency affects
both. The result is the median, over the rounds, of the ratio of their times.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import itertools
import json
import multiprocessing
import os
import pathlib
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from measuring import (
    ROOT,
    Limit,
    Line,
    Measured,
    NotMeasuredError,
    Row,
    Step,
    against,
    interleaved,
    program,
    ratio,
)
from steps import (
    BIASES,
    DIM,
    HEADS,
    HYPE_MU,
    LENGTH,
    SIMILARITIES,
    Arrays,
    bias,
    decoding_step,
    document_lengths,
    flex_step,
    formula_step,
    leaf,
    linear_step,
    ours,
    ours_of,
    ours_placed,
    ours_with_bias,
    packed_step,
    relative_step,
    sdpa,
    sdpa_with_learned_mask,
    sdpa_with_mask,
    step,
    tokens,
    window_step,
)
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import gnomon

CORA = ROOT / "data" / "cora" / "edges.txt"
CORA_PAPERS = 2708
MEMORY_LENGTH = 32768
DECODE_KEYS = (128, 512, 2048, 8192, 32768)
SHORT_LENGTHS = (49, 64, 128, 197, 256)
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CURVE_LENGTHS = [2**n for n in range(10, 16)]
CURVE = "cost against length"


def measure_decode(dim: int, rounds: int) -> Measured:
    torch.manual_seed(0)
    q, k, v = leaf(1, 32, 1, dim), leaf(1, 8, 8192, dim), leaf(1, 8, 8192, dim)
    steps = [
        ours_of((q, k, v)),
        step(lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True), [], False),
        step(lambda: k.sum() + v.sum(), [], False),
    ]
    times = interleaved(steps, rounds)
    gigabytes = (k.nbytes + v.nbytes) / 1e9
    rates = [gigabytes / statistics.median(one[s] for one in times) for s in range(len(steps))]
    note = f"reads {rates[0]:.1f} GB/s; SDPA {rates[1]:.1f}, sums of k and v {rates[2]:.1f}"
    return Measured(ratio(times), note)


# A name, and two functions that create the steps to compare.
Case = tuple[str, Callable[[], Step], Callable[[], Step]]


def worst_of(cases: Sequence[Case]) -> Callable[[int], Measured]:
    """Measures all cases and returns the highest ratio."""

    def measure(rounds: int) -> Measured:
        figures = {name: against(*makers)(rounds).figure or 0.0 for name, *makers in cases}
        worst = max(figures, key=figures.__getitem__)
        median = statistics.median(figures.values())
        return Measured(figures[worst], f"at {worst}; median of {len(figures)} cases {median:.2f}")

    return measure


def decode_tokens(queries: int, keys: int, dim: int, group: int, dtype: torch.dtype) -> Arrays:
    q = torch.randn(1, HEADS, queries, dim).to(dtype)
    k, v = torch.randn(2, 1, HEADS // group, keys, dim).to(dtype).unbind()
    return q, k, v


def our_decode(*sizes: Any) -> Step:
    qkv = decode_tokens(*sizes)
    return ours_of(qkv, query_offset=qkv[1].shape[2] - qkv[0].shape[2])


def sdpa_decode(*sizes: Any) -> Step:
    qkv = decode_tokens(*sizes)
    grouped = qkv[0].shape[1] != qkv[1].shape[1]
    return step(lambda: scaled_dot_product_attention(*qkv, enable_gqa=grouped), [], False)


def decode_cases() -> Iterator[Case]:
    for type_name, dim, group, queries, keys in itertools.product(
        TYPES, (64, 128), (1, 4), (1, 4), DECODE_KEYS
    ):
        sizes = (queries, keys, dim, group, TYPES[type_name])
        yield (
            f"{type_name}, {queries} on {keys}, D {dim}, GQA {group}",
            functools.partial(our_decode, *sizes),
            functools.partial(sdpa_decode, *sizes),
        )


def short_cases(dtype: torch.dtype, backward: bool) -> Iterator[Case]:
    for length in SHORT_LENGTHS:
        shape = {"batch": LENGTH // length, "length": length, "dtype": dtype}
        yield (
            f"L {length}",
            functools.partial(ours, backward, **shape),
            functools.partial(sdpa, backward, **shape),
        )


def measure_threads(causal: bool, backward: bool, rounds: int) -> Measured:
    """Returns the speedup of two threads over one."""
    before = torch.get_num_threads()
    if before < 2:
        raise NotMeasuredError("needs two threads")
    torch.manual_seed(0)
    call = ours(backward, causal)

    def with_threads(count: int) -> None:
        torch.set_num_threads(count)
        call()

    try:
        steps = [functools.partial(with_threads, count) for count in (1, 2)]
        return Measured(ratio(interleaved(steps, rounds)))
    finally:
        torch.set_num_threads(before)


@functools.cache
def operator_record(target: str, rounds: int) -> dict[str, Any]:
    return program("bench", "--cases", "dot", "--repeats", rounds, target=target)


def measure_of_peak(mode: str, target: str, rounds: int) -> Measured:
    """Returns the dot product's speed as a percentage of the GEMM peak, from `gnomon bench`."""
    (record,) = (r for r in operator_record(target, rounds)["modes"] if r["mode"] == mode)
    (row,) = (r for r in record["cases"] if r["case"] == "dot")
    return Measured(100 * row["of_peak"], f"of {record['peak_gflops']:.0f} GFLOP/s")


def measure_model(rounds: int) -> Measured:
    record = program("bench", "--model", "dot/none,penumbral/hype", "--repeats", rounds)
    times = [f"{row['ms']:.0f}" for row in record["models"]]
    return Measured(record["models"][1]["to_first"], f"{times[1]} ms, {times[0]} ms")


def cora_graph() -> tuple[Tensor, Tensor, Tensor]:
    """Returns Cora's edges (2, E), in both directions and with self-loops, and the graph in CSR."""
    if not CORA.exists():
        raise NotMeasuredError("data/cora is missing; run: gnomon data get cora --out data/cora")
    pairs = [[int(node) for node in line.split()] for line in CORA.read_text().splitlines()]
    one_way = torch.tensor(pairs).t()
    loops = torch.arange(CORA_PAPERS).repeat(2, 1)
    edges = torch.cat([one_way, one_way.flip(0), loops], 1)
    sources, targets = edges[:, (edges[1] * CORA_PAPERS + edges[0]).argsort()]
    degrees = torch.bincount(targets, minlength=CORA_PAPERS)
    return edges, torch.cat([torch.zeros(1, dtype=torch.long), degrees.cumsum(0)]), sources


def measure_graph(rounds: int) -> Measured:
    """Compares graph attention on projected features with GATConv."""
    try:
        from torch_geometric.nn import GATConv
    except ImportError:
        raise NotMeasuredError("torch_geometric is not installed") from None
    edges, indptr, indices = cora_graph()
    torch.manual_seed(0)
    width = 8
    features = leaf(CORA_PAPERS, HEADS * width)
    layer = GATConv(HEADS * width, width, heads=HEADS, add_self_loops=False, bias=False)
    layer.lin = torch.nn.Identity()

    def attend() -> Tensor:
        h = features.view(CORA_PAPERS, HEADS, width)
        q = (h * layer.att_dst).sum(-1, keepdim=True)
        k = (h * layer.att_src).sum(-1, keepdim=True)
        o = gnomon.graph_attention(q, k, h, indptr, indices, gnomon.similarity.Additive())
        return o.flatten(1)

    def convolve() -> Tensor:
        o: Tensor = layer(features, edges)
        return o

    torch.testing.assert_close(attend(), convolve())
    inputs = [features, layer.att_src, layer.att_dst]
    steps = [step(call, inputs, True) for call in (attend, convolve)]
    return Measured(ratio(interleaved(steps, rounds)))


def high_water() -> int:
    """Returns the peak memory of this process in bytes since the last reset."""
    status = pathlib.Path("/proc/self/status").read_text()
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.M)
    assert found
    return 1024 * int(found[1])


def peak_of_bias(name: str) -> float:
    """Returns the peak MiB of a step with a learned bias, beyond inputs, output and gradients."""

    def run(length: int) -> list[Tensor]:
        qkv = tokens(heads=1, length=length)
        position, parameters = bias(name, True, heads=1)
        d_o = torch.randn(1, 1, length, DIM)
        pathlib.Path("/proc/self/clear_refs").write_text("5")
        before.append(high_water())
        o = gnomon.attention(*qkv, position=position)
        return [o, *torch.autograd.grad(o, [*qkv, *parameters], d_o)]

    before: list[int] = []
    run(128)  # exclude memory that only the first call allocates
    results = run(MEMORY_LENGTH)
    return (high_water() - before[-1] - sum(result.nbytes for result in results)) / 2**20


def measure_memory(name: str, rounds: int) -> Measured:
    """Measures peak_of_bias in a new process, only once because the result is reproducible."""
    if not pathlib.Path("/proc/self/clear_refs").exists():
        raise NotMeasuredError("needs /proc/self/clear_refs")
    # By default, glibc raises this threshold as blocks are freed, and keeps freed blocks below it.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    try:
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            return Measured(pool.submit(peak_of_bias, name).result())
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]


def with_backward(name: str, backward: bool) -> str:
    return name + (", forward + backward" if backward else "")


def compare(
    name: str, most: float | None, make_ours: Callable[[], Step], make_theirs: Callable[[], Step]
) -> Row:
    return Row(name, against(make_ours, make_theirs), None if most is None else Limit(most))


def plain_rows() -> Iterator[Row]:
    for name, most, backward, causal in (
        ("dot, full / SDPA", 0.95, False, False),
        ("dot, causal / SDPA", 0.65, False, True),
        ("dot, causal, forward + backward / SDPA", 0.70, True, True),
    ):
        yield compare(
            name,
            most,
            functools.partial(ours, backward, causal),
            functools.partial(sdpa, backward, causal),
        )
    for cone in ("umbral", "penumbral h"):
        yield compare(
            f"{cone}, causal, forward + backward / SDPA's dot product",
            0.95,
            functools.partial(ours, True, True, cone),
            functools.partial(sdpa, True, True),
        )


def bias_rows() -> Iterator[Row]:
    for name in BIASES:
        yield compare(
            f"{name}, full / SDPA with the bias as a mask",
            0.75,
            functools.partial(ours_with_bias, name, False),
            functools.partial(sdpa_with_mask, name),
        )
    for name in ("T5", "HyPE"):
        yield compare(
            f"{name} learned, forward + backward / SDPA with a learned mask",
            0.25,
            functools.partial(ours_with_bias, name, True, True),
            functools.partial(sdpa_with_learned_mask, name),
        )
    for backward, most in ((False, 1.04), (True, 1.10)):
        for name in BIASES:
            yield compare(
                with_backward(f"{name} learned", backward) + " / our dot",
                most,
                functools.partial(ours_with_bias, name, True, backward),
                functools.partial(ours, backward),
            )
    yield compare(
        "compiled FlexAttention with ALiBi (it has no backward on a CPU) / ours",
        None,
        flex_step,
        functools.partial(ours_with_bias, "ALiBi", False),
    )


def similarity_rows() -> Iterator[Row]:
    for dim, backward, limits in (
        (64, False, (1.10, 1.12, 1.18, 1.22)),
        (64, True, (1.3,) * 4),
        (128, False, (1.12,) * 4),
        (128, True, (1.3,) * 4),
    ):
        for name, most in zip(SIMILARITIES, limits, strict=True):
            yield compare(
                with_backward(f"{name}, D {dim}", backward) + " / our dot",
                most,
                functools.partial(ours, backward, similarity=name, dim=dim),
                functools.partial(ours, backward, dim=dim),
            )
    for compiled, most in ((True, 0.18), (False, 0.05)):
        yield compare(
            "penumbral h, causal, forward + backward / the formula in PyTorch, "
            + ("compiled" if compiled else "eager"),
            most,
            functools.partial(ours, True, True, "penumbral h"),
            functools.partial(formula_step, compiled),
        )


def relative_rows() -> Iterator[Row]:
    for kind, most_offset, limits in (
        ("a row for every offset", LENGTH - 1, (1.7, 1.9)),
        ("clipped at 16", 16, (1.15, 1.15)),
    ):
        for backward, most in zip((False, True), limits, strict=True):
            yield compare(
                with_backward(f"relative keys, {kind}", backward) + " / our dot",
                most,
                functools.partial(relative_step, most_offset, backward),
                functools.partial(ours, backward),
            )


def long_position(name: str) -> Any:
    slopes = gnomon.alibi_slopes(HEADS)
    if name == "ALiBi":
        return gnomon.position.ALiBi(slopes)
    return gnomon.position.HyPE(slopes / HYPE_MU, HYPE_MU, mode="abs")


def long_step(
    name: str, length: int, backward: bool, causal: bool = True, **arguments: Any
) -> Step:
    """Returns a step on long sequences, where tiles of provably negligible weight are skipped."""
    return ours_of(
        tokens(length=length), backward, position=long_position(name), causal=causal, **arguments
    )


def packed_rows() -> Iterator[Row]:
    """Rows for documents of mixed lengths, packed into one sequence."""
    for kind, longest, key_heads in (("", 600, HEADS), ("short ", 100, HEADS), ("", 600, 2)):
        lengths = document_lengths(longest)
        heads = "" if key_heads == HEADS else f", {HEADS} heads on {key_heads}"
        for causal, backward in itertools.product((False, True), (False, True)):
            packed = functools.partial(packed_step, lengths, backward, causal, key_heads)
            name = f"packed {kind}documents, {'causal' if causal else 'full'}{heads}"
            yield compare(
                with_backward(name, backward) + " / a loop over the documents",
                1.05,
                packed,
                functools.partial(packed, looped=True),
            )
    for backward in (False, True):
        packed = functools.partial(
            packed_step, document_lengths(100, 400), backward, True, dtype=torch.float64
        )
        yield compare(
            with_backward("packed short documents, causal, float64", backward)
            + " / a loop over the documents",
            1.05,
            packed,
            functools.partial(packed, looped=True),
        )
    for backward in (False, True):
        packed = functools.partial(packed_step, document_lengths(600), backward, True)
        yield compare(
            with_backward("packed documents, causal, positions that restart", backward)
            + " / without positions",
            1.3,
            functools.partial(packed, restarts=True),
            packed,
        )


def position_rows() -> Iterator[Row]:
    """Rows for rotations, explicit positions, and small grids."""
    slopes = gnomon.alibi_slopes(HEADS)
    for backward in (False, True):
        alibi = functools.partial(
            ours_placed, backward, causal=True, position=gnomon.position.ALiBi(slopes)
        )
        yield compare(
            with_backward("ALiBi, causal, positions = arange(L)", backward)
            + " / without positions",
            1.1,
            functools.partial(alibi, positions=torch.arange(LENGTH)),
            alibi,
        )
    for length in (256, 512, 1024, 2048):
        call = functools.partial(ours_placed, True, length=length, causal=True)
        yield compare(
            f"RoPE, causal, L {length}, forward + backward / without RoPE",
            1.1,
            functools.partial(call, position=gnomon.position.RoPE()),
            call,
        )
    yield compare(
        f"decode: a module with RoPE, 1 query on {LENGTH} cached keys, D 32 / without RoPE",
        1.1,
        functools.partial(decoding_step, "rope"),
        functools.partial(decoding_step, None),
    )
    for segmented in (False, True):
        yield compare(
            f"GridBias, windows of 7 x 7{', segments' if segmented else ''}, forward + backward / "
            "the same bias gathered into PairBias",
            1.0,
            functools.partial(window_step, False, segmented),
            functools.partial(window_step, True, segmented),
        )


def few_rounds(measure: Callable[[int], Measured]) -> Callable[[int], Measured]:
    """Reduces the number of rounds, for a row whose calls take several seconds."""
    return lambda rounds: measure(max(1, rounds // 3))


def long_rows() -> Iterator[Row]:
    for name, most in (("ALiBi", 0.35), ("HyPE", 0.20)):
        long = functools.partial(long_step, name, 16384, True)
        yield Row(
            f"{name}, causal, L 16384, forward + backward / without skipping tiles",
            few_rounds(against(long, functools.partial(long, tolerance=0.0))),
            Limit(most),
        )
    longest = functools.partial(long_step, "HyPE", 65536, False)
    yield Row(
        "HyPE, causal, L 65536 / SDPA, causal",
        few_rounds(against(longest, functools.partial(sdpa, causal=True, length=65536))),
        Limit(0.06),
    )
    yield Row(
        "HyPE, causal, L 65536 / L 16384 (linear: 4)",
        against(longest, functools.partial(long_step, "HyPE", 16384, False)),
        Limit(6.0),
    )


def shape_rows() -> Iterator[Row]:
    """Rows for other dtypes, lengths and head dimensions."""
    dtype = torch.bfloat16
    shapes: list[tuple[str, float, dict[str, Any]]] = [
        ("bf16 dot, full / SDPA bf16", 0.60, {"dtype": dtype}),
        (
            "bf16 dot, full, forward + backward / SDPA bf16",
            0.60,
            {"dtype": dtype, "backward": True},
        ),
    ]
    for dim in (16, 32, 64, 80, 96, 128, 256):
        shapes.append((f"dot, full, D {dim} / SDPA", 1.15, {"dim": dim}))
    for dim, value_dim in ((64, 128), (128, 64), (80, 16)):
        sizes = {"dim": dim, "value_dim": value_dim}
        shapes.append((f"dot, full, D {dim}, Dv {value_dim} / SDPA", 1.15, sizes))
    for name, most, shape in shapes:
        yield compare(
            name, most, functools.partial(ours, **shape), functools.partial(sdpa, **shape)
        )
    for (type_name, dtype), limits in zip(TYPES.items(), ((0.95, 0.6), (0.9, 0.8)), strict=True):
        for backward, most in zip((False, True), limits, strict=True):
            name = with_backward(f"short: {type_name}, L 49 to 256 in batches", backward)
            yield Row(
                f"{name} / SDPA, worst", worst_of([*short_cases(dtype, backward)]), Limit(most)
            )
    for similarity, limits in (
        (None, (1.3, 1.6)),
        ("umbral", (1.8, 1.6)),
        ("penumbral h", (1.8, 1.6)),
    ):
        for backward, most in zip((False, True), limits, strict=True):
            yield compare(
                with_backward(f"a call at L 16: {similarity or 'dot'}", backward) + " / SDPA",
                most,
                functools.partial(ours, backward, similarity=similarity, length=16),
                functools.partial(sdpa, backward, length=16),
            )


def use_rows() -> Iterator[Row]:
    """Rows for workloads other than training on text."""
    yield Row(
        "decode: 1 and 4 queries, 128 to 32768 keys / SDPA, worst",
        worst_of([*decode_cases()]),
        Limit(1.0),
    )
    for dim in (64, 128):
        yield Row(
            f"decode: 1 query, 8192 keys, 32 heads on 8, D {dim} / SDPA",
            functools.partial(measure_decode, dim),
            Limit(1.0),
        )
    yield compare(
        "linear attention, causal, L 8192 / our exact causal dot",
        0.1,
        linear_step,
        functools.partial(ours, causal=True, length=8192),
    )
    yield Row(
        "graph attention, Cora, 8 heads, forward + backward / torch_geometric's GATConv",
        measure_graph,
        Limit(0.5),
    )
    yield Row(
        "a training step of the language model, penumbral with HyPE / dot without a position",
        measure_model,
        Limit(1.1),
    )


def machine_rows() -> Iterator[Row]:
    """Rows for hardware utilisation and memory."""
    for mode, least, target in (
        ("forward, full", 86, ""),
        ("forward, causal", 80, ""),
        ("forward + backward, full", 75, ""),
        ("forward + backward, causal", 75, ""),
        ("forward, full", 80, "AVX2"),
    ):
        yield Row(
            f"dot, {mode}: share of the GEMM peak" + (f" of {target}" if target else ""),
            functools.partial(measure_of_peak, mode, target),
            Limit(least, at_least=True, digits=0, unit="%"),
        )
    for backward in (False, True):
        for causal in (False, True):
            name = with_backward(f"dot, {'causal' if causal else 'full'}", backward)
            yield Row(
                f"{name}: speedup of two threads over one",
                functools.partial(measure_threads, causal, backward),
                Limit(1.9, at_least=True),
            )
    for name in BIASES:
        yield Row(
            f"{name} learned, L {MEMORY_LENGTH}, 1 head, forward + backward: memory beyond inputs, "
            "output and gradients",
            functools.partial(measure_memory, name),
            Limit(64, digits=0, unit=" MiB"),
        )


def rows() -> list[Row]:
    groups = (
        *(plain_rows, bias_rows, similarity_rows, relative_rows),
        *(packed_rows, position_rows, shape_rows, long_rows, use_rows, machine_rows),
    )
    return [row for group in groups for row in group()]


def measure_row(row: Row, rounds: int) -> Line:
    try:
        return Line(row, row.measure(rounds))
    except NotMeasuredError as error:
        return Line(row, Measured(None, f"not measured: {error}"))


def targets_table(lines: Sequence[Line]) -> str:
    return "\n".join(["| case | ratio | target | |", "|:--|--:|--:|:--|", *map(str, lines)])


def length_curve(rounds: int) -> list[tuple[int, float, float]]:
    """Returns L, milliseconds, and time / L^2 relative to L 2048: forward, full, one head."""
    torch.manual_seed(0)
    times = interleaved([ours(heads=1, length=length) for length in CURVE_LENGTHS], rounds)
    base = CURVE_LENGTHS.index(LENGTH)
    return [
        (
            length,
            1e3 * statistics.median(one[n] for one in times),
            ratio(times, n, base) * (LENGTH / length) ** 2,
        )
        for n, length in enumerate(CURVE_LENGTHS)
    ]


def curve_table(curve: Sequence[tuple[int, float, float]]) -> str:
    heading = [f"| L | ms | time / L², relative to L {LENGTH} |", "|--:|--:|--:|"]
    return "\n".join([*heading, *(f"| {n} | {ms:.1f} | {to:.2f} |" for n, ms, to in curve)])


def measure_all(only: str, rounds: int) -> tuple[list[Line], list[tuple[int, float, float]]]:
    """Measures the rows whose name contains `only`, and prints each line to stderr."""
    lines = []
    for row in rows():
        if only in row.name:
            lines.append(measure_row(row, rounds))
            print(lines[-1], file=sys.stderr, flush=True)
    # The longest calls take seconds, so fewer rounds are measured.
    curve = length_curve(max(1, rounds // 3)) if only in CURVE else []
    return lines, curve


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases that contain TEXT")
    parser.add_argument("--rounds", type=int, default=9, help="rounds per case (default 9)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="also write the results")
    flags = parser.parse_args()
    lines, curve = measure_all(flags.only, flags.rounds)
    if lines:
        print(targets_table(lines))
    if curve:
        print(f"\n{CURVE}, 1 head, D {DIM}, full, forward\n\n{curve_table(curve)}")
    if flags.json:
        record = {"rows": [line.record() for line in lines], "curve": curve}
        flags.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
