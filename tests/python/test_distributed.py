"""Several processes compared with one: context-parallel attention, and training from the command
line."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import pathlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import other_device
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.func import jvp, vmap
from warm_python import run_together

import gnomon
from gnomon.distributed import context_parallel_attention, context_parallel_rows
from gnomon.position import (
    T5,
    AbsoluteKeys,
    ALiBi,
    Disentangled,
    Forget,
    Grid,
    GridBias,
    HyPE,
    Kerple,
    KeyBias,
    OffsetBias,
    PairBias,
    Relative,
    Relative2D,
    RoPE,
    RoPEMixed,
    Sum,
    TransformerXL,
)
from gnomon.similarity import (
    Dot,
    Entailment,
    Gaussian,
    Hyperbolic,
    Laplacian,
    Lorentz,
    Penumbral,
    Umbral,
)

pytestmark = pytest.mark.cpu("starts its own processes")

B, H, HKV, D, DV = 2, 4, 2, 6, 5
PROCESSES = 3

# Row counts per process, for groups of three and two processes: odd, unequal, and a single row.
ROWS = {3: [7, 5, 1], 2: [5, 8]}
# Row counts of keys, for cases where they differ from those of queries.
KEY_ROWS = {"chunks": {3: [5, 5, 3], 2: [10, 3]}}
LENGTH = 13


class Draw:
    """Random tensors that are equal in all processes."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, *shape: int, scale: float = 1.0, learned: bool = True) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, dtype=torch.float64, device="cpu")
        drawn = (drawn * scale).to(torch.get_default_device(), self.dtype)
        return drawn.requires_grad_(learned)

    def heads(self) -> Tensor:
        return self(H).detach().abs().add(0.3).requires_grad_()


def masked_table(draw: Draw) -> Tensor:
    table = draw(H, 2 * LENGTH - 1).detach()
    table[:, ::5] = -torch.inf
    return table.requires_grad_()


def packed() -> Tensor:
    return torch.tensor([0] * 4 + [1] * 6 + [2] * 3).expand(B, -1)


# The arguments of each call on the whole sequence; calls are causal where this matters.
CASES: dict[str, Callable[[Draw], dict[str, Any]]] = {
    "dot": lambda draw: {"scale": 0.7},
    "dot causal": lambda draw: {"causal": True},
    "dot causal window": lambda draw: {"causal": True, "window": (3, None)},
    "two-sided window": lambda draw: {"window": (2, 1)},
    "laplacian alibi": lambda draw: {
        "similarity": Laplacian(draw.heads()),
        "position": ALiBi(draw.heads()),
    },
    "specifications": lambda draw: {
        "similarity": "penumbral:gamma=0.7",
        "position": ["rope+hype:mu=0.05", ALiBi(draw.heads()) + "kerple"],
        "causal": True,
    },
    "penumbral causal hype": lambda draw: {
        "similarity": Penumbral(draw.heads()),
        "position": HyPE(draw.heads(), draw(H, scale=0.1)),
        "causal": True,
    },
    "t5": lambda draw: {"position": T5(draw(8, H), bidirectional=True, max_distance=16)},
    "kerple causal": lambda draw: {
        "position": Kerple(draw.heads(), draw.heads()),
        "causal": True,
    },
    "offset bias": lambda draw: {"position": OffsetBias(masked_table(draw))},
    "offset bias causal window": lambda draw: {
        "position": OffsetBias(draw(H, 2 * LENGTH - 1)),
        "causal": True,
        "window": (6, None),
    },
    "rope hype causal": lambda draw: {
        "position": [RoPE(), HyPE(draw.heads(), 0.05)],
        "causal": True,
    },
    "gaussian rope": lambda draw: {"similarity": Gaussian(0.4), "position": RoPE(layout="half")},
    "penumbral rope": lambda draw: {"similarity": Penumbral(draw.heads()), "position": RoPE()},
    "umbral exp rope": lambda draw: {"similarity": Umbral(0.5, map="exp"), "position": RoPE()},
    "hyperbolic rope": lambda draw: {"similarity": Hyperbolic(draw.heads()), "position": RoPE()},
    "entailment rope": lambda draw: {
        "similarity": Entailment(draw.heads()),
        "position": RoPE(dims=4),
    },
    "relative keys and values": lambda draw: {
        "position": Relative(draw(9, D), 4, values=draw(9, DV))
    },
    "relative causal alibi": lambda draw: {
        "position": [Relative(draw(H, 4, D), 3, far="zero"), ALiBi(0.3)],
        "causal": True,
    },
    "disentangled": lambda draw: {
        "position": Disentangled(draw(8, D), draw(H, 8, D), max_distance=6)
    },
    "transformer_xl": lambda draw: {
        "position": TransformerXL(draw(H, D), draw(H, D), draw(H, LENGTH, D)),
        "causal": True,
    },
    "absolute keys": lambda draw: {"position": AbsoluteKeys(draw(LENGTH, D))},
    "key lengths and starts": lambda draw: {
        "position": ALiBi(0.2),
        "key_lengths": torch.tensor([4, 12]),
        "key_starts": torch.tensor([1, 8]),
    },
    "packed documents": lambda draw: {
        "query_segments": packed(),
        "key_segments": packed(),
        "position": RoPE(),
    },
    "queries before the keys": lambda draw: {"query_offset": -6, "causal": True},
    "per-batch offsets": lambda draw: {
        "query_offset": torch.tensor([2, -3]),
        "causal": True,
        "position": HyPE(0.1, 0.1),
    },
    "chunks": lambda draw: {"chunks": (5, 1, 0), "position": ALiBi(0.1)},
    "chunks of size 1": lambda draw: {"chunks": (1, 4, 2), "position": ALiBi(0.1)},
    "sinks": lambda draw: {"sink": draw(H), "causal": True, "similarity": Penumbral(draw.heads())},
    "per-row sinks": lambda draw: {"sink": draw(B, H, LENGTH), "key_lengths": [0, 9]},
    "soft cap, yarn and xpos": lambda draw: {
        "similarity": Dot(softcap=0.8),
        "position": RoPE(scaling="yarn:factor=4:original_max_position_embeddings=8", xpos=True),
        "causal": True,
    },
    "masks, biases and temperatures": lambda draw: {
        "mask": draw(B, 1, LENGTH, LENGTH, learned=False) > -0.5,
        "position": [
            KeyBias(draw(B, H, LENGTH)),
            PairBias(draw(1, H, LENGTH, LENGTH)),
            Relative(draw(4, 3), 3, far="zero", query=draw(B, H, LENGTH, 3)),
        ],
        "temperature": draw(B, H, LENGTH),
        "causal": True,
    },
    "biases shared by rows or keys": lambda draw: {
        "position": [
            PairBias(draw(1, H, 1, LENGTH)),
            PairBias(draw(B, 1, LENGTH, 1)),
            PairBias(draw(H, 1, 1)),
        ],
        "sink": draw(H),
        "causal": True,
    },
    "a key mask": lambda draw: {"mask": draw(B, 1, 1, LENGTH, learned=False) > -0.5},
    "einstein midpoint": lambda draw: {"aggregation": "einstein_midpoint"},
    "einstein midpoint with a temperature": lambda draw: {
        "aggregation": "einstein_midpoint",
        "temperature": draw(B, H, LENGTH),
    },
    "lorentz centroid": lambda draw: {
        "similarity": Lorentz(draw.heads(), draw.heads()),
        "position": RoPE(),
        "aggregation": "lorentz_centroid",
    },
    "lorentz centroid with a dominating sink": lambda draw: {
        "similarity": Lorentz(draw.heads()),
        "aggregation": "lorentz_centroid",
        "sink": 900.0,
    },
    "mixed frequencies": lambda draw: {"position": RoPEMixed(draw(H, 1, D // 2)), "causal": True},
    "scalar gamma, length and window": lambda draw: {
        "similarity": Gaussian(draw().detach().abs().requires_grad_()),
        "position": ALiBi(draw(scale=0.1)),
        "key_lengths": 11,
        "key_starts": [1, 0],
        "query_offset": torch.tensor(1),
        "window": 4,
    },
}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
# Tolerances for o, lse and the gradients, relative to the largest magnitude of each.
TOLERANCE = {"float64": 1e-11, "float32": 2e-5, "bfloat16": 2e-2}
LAYOUTS = ("contiguous", "zigzag")
RUNS = [
    (case, dtype, layout)
    for case, dtype in [
        *((case, "float64") for case in CASES),
        ("dot causal", "float32"),
        ("laplacian alibi", "float32"),
        ("penumbral causal hype", "float32"),
        ("rope hype causal", "float32"),
        ("dot causal", "bfloat16"),
    ]
    for layout in LAYOUTS
    if (case, layout) != ("chunks", "zigzag")  # parts must begin at multiples of the chunk size
]


def is_run(size: int, case: str, dtype: str, layout: str) -> bool:
    """Whether groups of this size compute the case; three processes compute each in one layout."""
    return size == 2 or (dtype == "float64" and layout == LAYOUTS[list(CASES).index(case) % 2])


def tensors_of(arguments: dict[str, Any]) -> list[Tensor]:
    terms = [arguments.get("similarity"), arguments.get("position")]
    flat = [t for term in terms for t in (term if isinstance(term, list) else [term])]
    flat = [t for term in flat for t in (term.terms if isinstance(term, Sum) else [term])]
    flat = [term for term in flat if not isinstance(term, str)]
    values = [value for term in flat if term is not None for value in vars(term).values()]
    values += [arguments.get("sink"), arguments.get("temperature")]
    return [value for value in values if isinstance(value, Tensor)]


def split_up(tensor: Tensor, rows: list[int], rank: int, axis: int, layout: str) -> Tensor:
    if layout == "contiguous":
        return tensor.split(rows, axis)[rank]
    halves = [-(-length // 2) for length in rows]
    pieces = tensor.split(halves + [length // 2 for length in reversed(rows)], axis)
    return torch.cat([pieces[rank], pieces[-1 - rank]], axis)


def compare(
    name: str, dtype: str, group: dist.ProcessGroup | None, key_rows: list[int], layout: str
) -> None:
    part_of = functools.partial(split_up, layout=layout)
    rank = dist.get_rank(group)
    rows = ROWS[dist.get_world_size(group)]
    draw = Draw(DTYPES[dtype])
    arguments = CASES[name](draw)
    values = 0.1 if "midpoint" in name else 1.0
    whole = [draw(B, H, LENGTH, D), draw(B, HKV, LENGTH, D), draw(B, HKV, LENGTH, DV, scale=values)]
    learned = tensors_of(arguments)
    attend = functools.partial(gnomon.attention, **arguments, return_lse=True)
    o, lse = attend(*whole)
    d_o = draw(*o.shape, learned=False)
    seen = lse > -torch.inf
    d_lse = torch.where(seen, draw(*lse.shape, learned=False).to(lse.dtype), 0.0)
    expected = torch.autograd.grad((o, lse), [*whole, *learned], (d_o, d_lse))

    its_rows = [rows, key_rows, key_rows]
    parts = [
        part_of(tensor.detach(), of, rank, 2).clone().requires_grad_()
        for tensor, of in zip(whole, its_rows, strict=True)
    ]
    if "query_segments" in arguments:
        arguments["query_segments"] = part_of(arguments["query_segments"], rows, rank, 1)
        arguments["key_segments"] = part_of(arguments["key_segments"], key_rows, rank, 1)
    sink = arguments.get("sink")
    if isinstance(sink, Tensor) and sink.dim() == 3:
        arguments["sink"] = part_of(sink, rows, rank, 2)
    if "temperature" in arguments:
        arguments["temperature"] = part_of(arguments["temperature"], rows, rank, 2)
    if "mask" in arguments and arguments["mask"].shape[2] > 1:
        arguments["mask"] = part_of(arguments["mask"], rows, rank, 2)
    if isinstance(arguments.get("position"), list):
        # These tensors have one row per query.
        arguments["position"] = [
            dataclasses.replace(term, **{field: part_of(getattr(term, field), rows, rank, 2)})
            if (field := {PairBias: "bias", Relative: "query"}.get(type(term)))
            and getattr(term, field) is not None
            and getattr(term, field).size(-2) > 1
            else term
            for term in arguments["position"]
        ]
    attend_part = functools.partial(
        context_parallel_attention, **arguments, group=group, layout=layout, return_lse=True
    )
    part_o, part_lse = attend_part(*parts)
    got = torch.autograd.grad(
        (part_o, part_lse),
        [*parts, *learned],
        (part_of(d_o, rows, rank, 2), part_of(d_lse, rows, rank, 2)),
    )

    def check(what: str, actual: Tensor, wanted: Tensor) -> None:
        assert (actual.dtype, actual.device) == (wanted.dtype, wanted.device), what
        actual, wanted = actual.cpu(), wanted.cpu()
        finite = wanted.isfinite()
        assert torch.equal(finite, actual.isfinite()), what
        scale = wanted[finite].abs().max().item() if finite.any() else 0
        torch.testing.assert_close(
            actual, wanted, rtol=0, atol=TOLERANCE[dtype] * max(scale, 1), msg=lambda m: what + m
        )

    check("o", part_o, part_of(o, rows, rank, 2))
    check("lse", part_lse, part_of(lse, rows, rank, 2))

    def check_gradients(what: str, got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
        for n, of in enumerate(its_rows):
            check(f"{what} {'qkv'[n]}", got[n], part_of(expected[n], of, rank, 2))
        for n in range(3, len(got)):
            share = got[n].clone()
            dist.all_reduce(share, group=group)
            check(f"{what} tensor {n - 3}", share, expected[n])

    check_gradients("d", got, expected)
    # Each case has the other derivatives in one layout, on CPUs.
    place = list(CASES).index(name)
    is_chosen = layout == LAYOUTS[place % 2] and dist.get_world_size(group) == 2 + place // 2 % 2
    if dtype != "float64" or not is_chosen or torch.get_default_device().type != "cpu":
        return
    directions = [draw(*tensor.shape, learned=False) for tensor in whole]
    of_parts = [
        part_of(direction, of, rank, 2) for direction, of in zip(directions, its_rows, strict=True)
    ]
    _, tangents = jvp(attend, (*whole,), (*directions,))
    _, part_tangents = jvp(attend_part, (*parts,), (*of_parts,))
    for what, tangent, part_tangent in zip(("o", "lse"), tangents, part_tangents, strict=True):
        check(f"tangent of {what}", part_tangent, part_of(tangent, rows, rank, 2))
    if name == "dot causal":
        _, tangent = jvp(lambda k: attend(whole[0], k, whole[2])[0], (whole[1],), (directions[1],))
        twice = vmap(
            lambda u: jvp(lambda k: attend_part(parts[0], k, parts[2])[0], (parts[1],), (u,))[1]
        )(torch.stack([of_parts[1], 2 * of_parts[1]]))
        for factor, part_tangent in zip((1, 2), twice, strict=True):
            check("tangent in vmap", part_tangent, factor * part_of(tangent, rows, rank, 2))
    check_gradients(
        "second d",
        second_derivatives(attend_part, parts, learned, of_parts),
        second_derivatives(attend, whole, learned, directions),
    )


def second_derivatives(
    attend: Callable[..., tuple[Tensor, Tensor]],
    tokens: list[Tensor],
    learned: list[Tensor],
    directions: list[Tensor],
) -> Sequence[Tensor]:
    """The gradients of the gradients of q, k and v in the given directions."""
    o, lse = attend(*tokens)
    loss = o.square().sum() + torch.where(lse.isinf(), 0.0, lse).sin().sum()
    leaves = [*tokens, *learned]
    gradients = torch.autograd.grad(loss, leaves, create_graph=True)
    product = sum((d * u).sum() for d, u in zip(gradients, directions, strict=False))
    return torch.autograd.grad(product, leaves, materialize_grads=True)


def errors(group: dist.ProcessGroup) -> dict[str, str]:
    """The errors of invalid calls, which must be equal in all processes."""
    rank = dist.get_rank(group)
    q = torch.zeros(1, 2, 4, 4)
    table = torch.zeros(2, 7)
    calls: dict[str, Callable[[], object]] = {
        "grid": lambda: ring(q, position=Grid((2, 2), [ALiBi(1.0), ALiBi(1.0)])),
        "grid bias": lambda: ring(q, position=GridBias(torch.zeros(2, 3, 3))),
        "relative 2d": lambda: ring(q, position=Relative2D(table[:1, :4], table[:1, :4], 1, 1)),
        "rope on a grid": lambda: ring(q, position=[RoPE(shape=(2, 2))]),
        "dropout": lambda: ring(q, dropout=0.1),
        "table of one process's rows": lambda: ring(q, position=OffsetBias(table)),
        "forget gates": lambda: ring(q, position=Forget(torch.zeros(1, 2, 8))),
        "key bias of one process's rows": lambda: ring(q, position=KeyBias(torch.zeros(1, 2, 4))),
        "mask of one process's rows": lambda: ring(q, mask=torch.ones(4, 4, dtype=torch.bool)),
        "absolute keys of one process's rows": lambda: ring(
            q, position=AbsoluteKeys(torch.zeros(4, 4))
        ),
        "no offset": lambda: context_parallel_attention(
            q[:, :, :3], q, q, causal=True, group=group
        ),
        "chunks across processes": lambda: ring(q, chunks=(3, 1, 0)),
        "segments alone": lambda: ring(q, key_segments=torch.zeros(1, 4)),
        "segments with a wrong shape": lambda: ring(
            q,
            query_segments=torch.zeros(1, 4, dtype=torch.int64),
            key_segments=torch.zeros(1, 3, dtype=torch.int64),
        ),
        "segments with a wrong dtype": lambda: ring(
            q,
            query_segments=torch.zeros(1, 4, dtype=torch.int64),
            key_segments=torch.zeros(1, 4),
        ),
        "window": lambda: ring(q, window=(-9, 0)),
        "gamma": lambda: ring(
            q, similarity=Laplacian(torch.ones(3)), query_offset=-99, causal=True
        ),
        "other shape": lambda: ring(torch.zeros(1, 2, 4, 4 + rank)),
        "other dtype": lambda: ring(q.to([torch.float32, torch.float64][rank % 2])),
        "other gradients": lambda: ring(q.clone().requires_grad_(rank == 0)),
        "one process without rows": lambda: ring(q[:, :, : 4 * (1 - rank)]),
        "three axes": lambda: ring(q[0]),
        "other values": lambda: context_parallel_attention(q, q, q[:, :, 1:], group=group),
        "other keys": lambda: context_parallel_attention(q, q.double(), q.double(), group=group),
        "no tensor": lambda: ring(None),
        "similarity": lambda: ring(q, similarity=1),
        "position": lambda: ring(q, position=[1]),
        "grid in a specification": lambda: ring(q, position=RoPE() + "alibi:shape=2x2"),
        "unknown layout": lambda: ring(q, layout="striped"),
        "other layout": lambda: ring(q, layout=LAYOUTS[rank]),
        "fewer rows than processes": lambda: context_parallel_rows(1, group=group),
        "rotation that depends on the length": lambda: ring(
            q, position=RoPE(scaling="longrope:factor=2")
        ),
    }

    def ring(x: Any, **arguments: Any) -> object:
        return context_parallel_attention(x, x, x, **arguments, group=group)

    answers = {}
    for name, call in calls.items():
        try:
            call()
        except (ValueError, TypeError, NotImplementedError) as error:
            answers[name] = f"{type(error).__name__}: {error}"
    return answers


def outcome(*arguments: Any) -> str:
    """The traceback of a comparison that fails; otherwise, an empty string."""
    try:
        compare(*arguments)
    except Exception:
        return traceback.format_exc()
    return ""


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=PROCESSES
    )
    two = dist.new_group([1, 2])  # in addition to the default group
    groups = {3: None} | ({2: two} if rank > 0 else {})
    outcomes: dict[str, str] = {}
    rows = {
        f"{layout} {length}": context_parallel_rows(length, layout=layout).tolist()
        for layout in LAYOUTS
        for length in (3, 12, 13, 17)
    }
    answers: dict[str, str] = {}
    try:
        for size, group in groups.items():
            for case, dtype, layout in RUNS:
                if is_run(size, case, dtype, layout):
                    outcomes[f"{size} {case} {dtype} {layout}"] = outcome(
                        case, dtype, group, KEY_ROWS.get(case, ROWS)[size], layout
                    )
        # The keys are divided differently from the queries.
        if 2 in groups:
            for layout in LAYOUTS:
                outcomes[f"uneven {layout}"] = outcome(
                    "rope hype causal", "float64", two, [3, 10], layout
                )
            answers = errors(two)
    finally:
        path = pathlib.Path(folder) / f"{rank}.json"
        path.write_text(json.dumps({"outcomes": outcomes, "answers": answers, "rows": rows}))
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def record(tmp_path_factory) -> list[dict[str, dict[str, str]]]:
    folder = tmp_path_factory.mktemp("ring")
    run_together(PROCESSES, __file__, "ring", folder)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.parametrize(("case", "dtype", "layout"), RUNS)
def test_ring_is_attention_of_the_whole_sequence(record, case, dtype, layout):
    for rank, its in enumerate(record):
        for size in (2, 3) if rank > 0 else (3,):
            if is_run(size, case, dtype, layout):
                failure = its["outcomes"][f"{size} {case} {dtype} {layout}"]
                assert not failure, f"process {rank}: {failure}"


def work_on_another_device(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    there = other_device.install()
    other_device.install_groups()
    dist.init_process_group(
        other_device.NAME, init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    with there:
        assert Draw(torch.float64)(1).device == there
        outcomes = {
            f"{case} {layout}": outcome(case, dtype, None, KEY_ROWS.get(case, ROWS)[2], layout)
            for case, dtype, layout in RUNS
            if dtype == "float64"
        }
    (pathlib.Path(folder) / f"{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()
    other_device.leave()


def test_ring_on_another_device(tmp_path):
    if not other_device.LIBRARY.exists():
        pytest.skip(f"{other_device.LIBRARY.name} is not built")
    run_together(2, __file__, "other device", tmp_path)
    expected = {f"{case} {layout}": "" for case, dtype, layout in RUNS if dtype == "float64"}
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == expected


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parts_of_keys_may_be_others_than_those_of_queries(record, layout):
    for its in record[1:]:
        failure = its["outcomes"][f"uneven {layout}"]
        assert not failure, failure


def test_rows_of_a_layout(record):
    """Each row belongs to exactly one process; zigzag order balances the pairs of a causal mask."""
    for layout in LAYOUTS:
        for length in (3, 12, 13, 17):
            rows = [its["rows"][f"{layout} {length}"] for its in record]
            assert sorted(itertools.chain(*rows)) == list(range(length))
            sizes = [len(part) for part in rows]
            assert max(sizes) - min(sizes) <= 1
    pairs = [sum(row + 1 for row in its["rows"]["zigzag 12"]) for its in record]
    assert pairs == [26, 26, 26]


@pytest.mark.parametrize(
    ("call", "error", "parts"),
    [
        ("grid", "NotImplementedError", ["needs a grid"]),
        ("grid bias", "NotImplementedError", ["grid_bias", "needs a grid"]),
        ("relative 2d", "NotImplementedError", ["relative2d", "needs a grid"]),
        ("rope on a grid", "NotImplementedError", ["position is rope", "needs a grid"]),
        ("dropout", "NotImplementedError", ["dropout is 0.1"]),
        (
            "table of one process's rows",
            "ValueError",
            ["table of offset_bias has shape [2, 7]", "(2, 15)"],
        ),
        ("forget gates", "NotImplementedError", ["position is forget", "sums over the keys"]),
        ("key bias of one process's rows", "ValueError", ["shape [1, 2, 4]", "8 entries"]),
        ("mask of one process's rows", "ValueError", ["mask has shape [4, 4]", "8 columns"]),
        ("absolute keys of one process's rows", "ValueError", ["shape [4, 4]", "8 rows"]),
        ("no offset", "ValueError", ["query_offset is None", "there are 6 queries and 8 keys"]),
        (
            "chunks across processes",
            "ValueError",
            ["begin at [0, 4]", "multiples of the chunk size, 3"],
        ),
        ("segments alone", "ValueError", ["only key_segments is given"]),
        ("segments with a wrong shape", "ValueError", ["key_segments has shape [1, 3]"]),
        ("segments with a wrong dtype", "TypeError", ["key_segments has dtype torch.float32"]),
        ("other shape", "ValueError", ["[1, 2, 5, 2, 5, 5] in process 1"]),
        ("other dtype", "ValueError", ["torch.float64 in process 1", "torch.float32"]),
        ("other gradients", "ValueError", ["requires_grad of q, k, v", "in process 1"]),
        ("three axes", "ValueError", ["q has shape [2, 4, 4]"]),
        ("other values", "ValueError", ["[1, 2, 3, 4]", "(B, Hkv, Lk, Dv)"]),
        ("other keys", "TypeError", ["k is torch.float64", "q is torch.float32"]),
        ("no tensor", "TypeError", ["q is a NoneType"]),
        ("similarity", "TypeError", ["similarity is an int"]),
        ("position", "TypeError", ["position is an int"]),
        ("grid in a specification", "NotImplementedError", ["position is alibi:shape=2x2"]),
        ("unknown layout", "ValueError", ["layout is 'striped'; expected 'contiguous' or"]),
        ("other layout", "ValueError", ["layout is 'zigzag' in process 1 and 'contiguous'"]),
        (
            "rotation that depends on the length",
            "NotImplementedError",
            ["scaling=longrope", "depends on the length"],
        ),
    ],
)
def test_wrong_calls_are_refused_in_every_process(record, call, error, parts):
    for its in record[1:]:
        answer = its["answers"][call]
        assert answer.startswith(f"{error}: gnomon.distributed.context_parallel_attention: ")
        for part in parts:
            assert part in answer


def test_rows_are_refused(record):
    for its in record[1:]:
        answer = its["answers"]["fewer rows than processes"]
        assert answer.endswith("length is 1; expected at least one row for each of the 2 processes")
        assert answer.startswith("ValueError: gnomon.distributed.context_parallel_rows: ")


def test_invalid_attention_is_rejected_in_every_process(record):
    for its in record[1:]:
        assert "left of window is -9" in its["answers"]["window"]
        assert "gamma" in its["answers"]["gamma"]


def test_a_wrong_part_in_one_process_is_an_error_in_all(record):
    assert "q, k or v of process 1 is invalid" in record[1]["answers"]["one process without rows"]
    assert "q has shape [1, 2, 0, 4]" in record[2]["answers"]["one process without rows"]


def test_without_processes_the_error_tells_what_to_do():
    q = torch.zeros(1, 1, 2, 2)
    with pytest.raises(RuntimeError, match="init_process_group"):
        context_parallel_attention(q, q, q)


WORK = {"ring": work, "other device": work_on_another_device}

if __name__ == "__main__":
    kind, folder, rank = sys.argv[1:]
    WORK[kind](int(rank), folder)
