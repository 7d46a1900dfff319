"""Content terms compared with formulas in plain PyTorch: values, lse and every gradient."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import formulas
import pytest
import torch
from formulas import TOLERANCE, Case, Mask, Parameters, in_turn, pairwise
from operator_checks import peak_memory
from torch import Tensor

import gnomon
from gnomon.position import (
    AbsoluteKeys,
    ALiBi,
    Disentangled,
    GridBias,
    Relative,
    Relative2D,
    RoPE,
    TransformerXL,
)


def table(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64) / math.sqrt(sizes[-1])


@dataclass
class Content:
    """rows returns, for each pair, the row that multiplies q, with shape (B, H, Lq, Lk, D)."""

    ours: Callable[[Parameters, ContentCase], gnomon.position.Position]
    parameters: Callable[[ContentCase], Parameters]
    rows: Callable[[Parameters, Tensor, Tensor, ContentCase], Tensor]
    values: Callable[[Parameters, Tensor, Tensor, ContentCase], Tensor | float] = (
        lambda p, i, j, case: 0.0
    )
    # Names of parameters (H, D): u multiplies every key, and v is added to the query that
    # multiplies the rows.
    u: str | None = None
    v: str | None = None
    # Returns, for each pair, the row that multiplies k, with shape (B, H, Lq, Lk, D).
    queries: Callable[[Parameters, Tensor, Tensor, ContentCase], Tensor] | None = None
    # The name of a parameter that multiplies the rows instead of q, without the scale.
    query: str | None = None
    causal: bool = False
    dot_only: bool = False


@dataclass
class ContentCase(Case):
    content: str = "relative"
    scale: float | None = None

    def inputs(self) -> Parameters:
        return super().inputs() | CONTENT[self.content].parameters(self)

    def positions(self, inputs: Parameters) -> list[gnomon.position.Position]:
        return [*super().positions(inputs), CONTENT[self.content].ours(inputs, self)]

    def arguments(self) -> dict[str, object]:
        return super().arguments() | {"scale": self.scale}

    def places(self) -> tuple[Tensor, Tensor]:
        """The positions of queries (B, 1, Lq, 1) and keys (Lk,), as integers."""
        i = torch.arange(self.queries)[:, None] + self.mask.first(self.batch).long()
        return i, torch.arange(self.keys)

    def theirs(self, inputs: Parameters) -> tuple[Tensor, Tensor]:
        content = CONTENT[self.content]
        i, j = self.places()
        default = 1 / math.sqrt(self.dim)
        scale = default if self.scale is None else self.scale
        k = inputs["k"].repeat_interleave(self.heads // self.key_heads, 1)
        query = inputs["q"] + (inputs[content.v][:, None, :] if content.v else 0)
        if content.query:
            query, scale = inputs[content.query], 1.0
        rows = content.rows(inputs, i, j, self).expand(
            self.batch, self.heads, self.queries, self.keys, query.shape[-1]
        )
        added = torch.einsum("bhid,bhijd->bhij", query, rows)
        if content.u:
            added = added + torch.einsum("hd,bhjd->bhj", inputs[content.u], k)[:, :, None]
        if content.queries:
            rows = content.queries(inputs, i, j, self).expand(
                self.batch, self.heads, self.queries, self.keys, self.dim
            )
            added = added + torch.einsum("bhjd,bhijd->bhij", k, rows)
        scores = super().scores(inputs)
        if self.similarity == "dot" and self.scale is not None:
            scores = scores + (self.scale - default) * inputs["q"] @ k.transpose(-1, -2)
        scores = scores + scale * added
        sees = (scores > -math.inf).any(-1, keepdim=True)
        weights = torch.where(sees, scores, 0.0).softmax(-1) * sees
        lse = torch.where(sees, scores, 0.0).logsumexp(-1)
        v = inputs["v"].repeat_interleave(self.heads // self.key_heads, 1)
        values = v[:, :, None] + content.values(inputs, i, j, self)
        values = values.expand(self.batch, self.heads, self.queries, self.keys, self.value_dim)
        o = torch.einsum("bhij,bhijd->bhid", weights, values)
        return o, lse.masked_fill(~sees[..., 0], -math.inf)


def clipped(m: int, name: str) -> Callable[[Parameters, Tensor, Tensor, ContentCase], Tensor]:
    def rows(p: Parameters, i: Tensor, j: Tensor, case: ContentCase) -> Tensor:
        # Returns (B, 1, Lq, Lk, D), or (B, H, Lq, Lk, D) with a per-head table.
        index = (j - i).clamp(-m, m) + m
        return by_index(p[name], index)

    return rows


def zero_beyond(m: int, name: str) -> Callable[[Parameters, Tensor, Tensor, ContentCase], Tensor]:
    def rows(p: Parameters, i: Tensor, j: Tensor, case: ContentCase) -> Tensor:
        offset = j - i
        return by_index(p[name], offset.clamp(-m, m) + m) * (offset.abs() <= m)[..., None]

    return rows


def past_only(m: int, name: str) -> Callable[[Parameters, Tensor, Tensor, ContentCase], Tensor]:
    def rows(p: Parameters, i: Tensor, j: Tensor, case: ContentCase) -> Tensor:
        return by_index(p[name], (j - i).clamp(-m, 0) + m)

    return rows


def disentangled(
    span: int, max_distance: int, name: str
) -> Callable[[Parameters, Tensor, Tensor, ContentCase], Tensor]:
    def rows(p: Parameters, i: Tensor, j: Tensor, case: ContentCase) -> Tensor:
        return by_index(p[name], formulas.deberta_rows(i - j, span, max_distance))

    return rows


def by_index(rows: Tensor, index: Tensor) -> Tensor:
    """Indexes rows (n, D) or (H, n, D) with indices (B, 1, Lq, Lk)."""
    if rows.dim() == 2:
        return rows[index]
    return torch.stack([head[index[:, 0]] for head in rows], 1)


def on_plane(p: Parameters, i: Tensor, j: Tensor, case: ContentCase) -> Tensor:
    """The row of each pair, computed by loops over tokens."""
    cells = [None] + list(itertools.product(range(3), range(4)))
    zero = torch.zeros(case.dim, dtype=p["rows"].dtype)
    return torch.stack(
        [
            torch.stack(
                [
                    zero
                    if a is None or b is None
                    else p["rows"][b[0] - a[0] + 2] + p["columns"][b[1] - a[1] + 3]
                    for b in cells
                ]
            )
            for a in cells
        ]
    )


CONTENT = {
    "relative": Content(
        lambda p, case: Relative(p["table"], 3),
        lambda case: {"table": table(7, case.dim)},
        clipped(3, "table"),
    ),
    "relative per head": Content(
        lambda p, case: Relative(p["table"], 60, far="zero"),
        lambda case: {"table": table(case.heads, 121, case.dim)},
        zero_beyond(60, "table"),
    ),
    "music transformer": Content(
        lambda p, case: Relative(p["table"], 5, far="zero"),
        lambda case: {"table": table(11, case.dim)},
        zero_beyond(5, "table"),
    ),
    "shaw": Content(
        lambda p, case: Relative(p["table"], 4, values=p["values"]),
        lambda case: {"table": table(9, case.dim), "values": table(9, case.value_dim)},
        clipped(4, "table"),
        clipped(4, "values"),
    ),
    "shaw per head": Content(
        lambda p, case: Relative(p["table"], 2, values=p["values"]),
        lambda case: {
            "table": table(case.heads, 5, case.dim),
            "values": table(case.heads, 5, case.value_dim),
        },
        clipped(2, "table"),
        clipped(2, "values"),
    ),
    "separate query": Content(
        lambda p, case: Relative(p["table"], 5, far="zero", query=p["own"]),
        lambda case: {
            "table": table(11, 3),
            "own": table(case.batch, case.heads, case.queries, 3),
        },
        zero_beyond(5, "table"),
        query="own",
    ),
    "separate query, and values": Content(
        lambda p, case: Relative(p["table"], 4, values=p["values"], query=p["own"]),
        lambda case: {
            "table": table(case.heads, 5, 7),
            "values": table(5, case.value_dim),
            "own": table(case.batch, case.heads, case.queries, 7),
        },
        past_only(4, "table"),
        past_only(4, "values"),
        query="own",
        causal=True,
    ),
    "past": Content(
        lambda p, case: Relative(p["table"], 6, values=p["values"]),
        lambda case: {"table": table(7, case.dim), "values": table(7, case.value_dim)},
        past_only(6, "table"),
        past_only(6, "values"),
        causal=True,
    ),
    "disentangled": Content(
        lambda p, case: Disentangled(p["keys"], p["queries"]),
        lambda case: {"keys": table(10, case.dim), "queries": table(10, case.dim)},
        disentangled(5, 0, "keys"),
        queries=disentangled(5, 0, "queries"),
    ),
    "disentangled, log buckets": Content(
        lambda p, case: Disentangled(p["keys"], p["queries"], max_distance=30),
        lambda case: {
            "keys": table(case.heads, 16, case.dim),
            "queries": table(case.heads, 16, case.dim),
        },
        disentangled(8, 30, "keys"),
        queries=disentangled(8, 30, "queries"),
    ),
    "disentangled, per-head and shared tables": Content(
        lambda p, case: Disentangled(p["keys"], p["queries"]),
        lambda case: {"keys": table(130, case.dim), "queries": table(case.heads, 130, case.dim)},
        disentangled(65, 0, "keys"),
        queries=disentangled(65, 0, "queries"),
    ),
    "disentangled, large max_distance": Content(
        lambda p, case: Disentangled(p["keys"], p["queries"], max_distance=1 << 20),
        lambda case: {"keys": table(16, case.dim), "queries": table(case.heads, 16, case.dim)},
        disentangled(8, 1 << 20, "keys"),
        queries=disentangled(8, 1 << 20, "queries"),
    ),
    "transformer_xl": Content(
        lambda p, case: TransformerXL(p["u"], p["v_"], p["r"]),
        lambda case: {
            "u": table(case.heads, case.dim),
            "v_": table(case.heads, case.dim),
            "r": table(case.heads, 70, case.dim),
        },
        lambda p, i, j, case: by_index(p["r"], (i - j).clamp_min(0)),
        u="u",
        v="v_",
        causal=True,
        dot_only=True,
    ),
    "transformer_xl, bidirectional": Content(
        lambda p, case: TransformerXL(p["u"], p["v_"], p["r"], bidirectional=True),
        lambda case: {
            "u": table(case.heads, case.dim),
            "v_": table(case.heads, case.dim),
            "r": table(case.heads, 139, case.dim),
        },
        lambda p, i, j, case: by_index(p["r"], i - j + 69),
        u="u",
        v="v_",
        dot_only=True,
    ),
    "absolute keys": Content(
        lambda p, case: AbsoluteKeys(p["table"]),
        lambda case: {"table": table(case.keys, case.dim)},
        lambda p, i, j, case: p["table"],
    ),
    "absolute keys per head": Content(
        lambda p, case: AbsoluteKeys(p["table"]),
        lambda case: {"table": table(case.heads, case.keys, case.dim)},
        lambda p, i, j, case: p["table"][None, :, None],
    ),
    "relative2d": Content(
        lambda p, case: Relative2D(p["rows"], p["columns"], 3, 4, prefix=1),
        lambda case: {"rows": table(5, case.dim), "columns": table(7, case.dim)},
        on_plane,
    ),
}


def check(case: ContentCase, dtype: torch.dtype) -> None:
    formulas.check(case.ours, case.theirs, case.inputs(), dtype)


@in_turn(
    terms=[
        (content, similarity)
        for content, term in CONTENT.items()
        for similarity in ("dot", "penumbral", "laplacian", "hyperboloid", "additive")
        if similarity == "dot" or not term.dot_only
    ],
    dtype=TOLERANCE,
)
def test_every_content_term(terms, dtype):
    content, similarity = terms
    mask = Mask(causal=CONTENT[content].causal)
    check(ContentCase(similarity, content=content, key_heads=2, mask=mask), dtype)


# Terms that differ in the kernels' work: tables of keys, values and queries, shared and per head.
KINDS = [
    "relative per head",
    "shaw",
    "shaw per head",
    "separate query, and values",
    "disentangled, log buckets",
    "disentangled, per-head and shared tables",
    "transformer_xl",
    "absolute keys",
]


@pairwise(
    content=[*KINDS, "relative2d"],
    dims=[(1, 1), (3, 17), (17, 3), (64, 64), (80, 129)],
    dtype=TOLERANCE,
)
def test_head_dims(content, dims, dtype):
    dim, value_dim = dims
    mask = Mask(causal=CONTENT[content].causal)
    check(ContentCase(content=content, dim=dim, value_dim=value_dim, mask=mask), dtype)


@pairwise(
    content=KINDS,
    lengths_and_mask=[
        (5, 49, Mask(causal=True, query_offset=44)),
        (1, 33, Mask(causal=True, query_offset=32)),
        (49, 13, Mask(causal=True, query_offset=0)),
        (17, 60, Mask(causal=True, query_offset=(3, 40), key_starts=(0, 5), key_lengths=(60, 44))),
        (60, 60, Mask(causal=True, window=(20, 0))),
        (0, 5, Mask(causal=True, query_offset=0)),
        (5, 0, Mask(causal=True, query_offset=0)),
    ],
    dtype=TOLERANCE,
)
def test_cross_lengths_and_masks(content, lengths_and_mask, dtype):
    queries, keys, mask = lengths_and_mask
    case = ContentCase(content=content, queries=queries, keys=keys, key_heads=2, mask=mask)
    check(case, dtype)


@pytest.mark.parametrize("content", ["relative", "shaw", "disentangled", "absolute keys"])
def test_queries_that_look_ahead(content):
    for offset in (-20, 30):
        mask = Mask(query_offset=offset)
        check(ContentCase(content=content, queries=9, keys=30, mask=mask), torch.float64)


# The tokens of relative2d have no offsets.
@pytest.mark.parametrize("content", [name for name in CONTENT if name != "relative2d"])
@pytest.mark.parametrize("position", ["rope", "alibi"])
def test_sums_with_other_positions(content, position):
    mask = Mask(causal=CONTENT[content].causal)
    check(ContentCase("dot", position, content=content, mask=mask), torch.float64)


def test_scale_multiplies_content_terms_too():
    for similarity in ("dot", "penumbral"):
        check(ContentCase(similarity, content="shaw", scale=0.7), torch.float64)
    q = torch.randn(1, 1, 3, 4)
    with pytest.raises(
        ValueError, match="scale applies to similarities such as dot, not to laplacian"
    ):
        gnomon.attention(q, q, q, similarity=gnomon.similarity.Laplacian(1.0), scale=0.5)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("own", [1.0, -0.3])
def test_terms_with_a_scale_of_their_own(own, scale):
    """Tests each term separately: it adds the products with its rows, multiplied by `own`."""
    torch.manual_seed(0)
    n, dim = 7, 6
    q, k, v = torch.randn(3, 2, 4, n, dim, dtype=torch.float64).unbind()
    shaw, xl, keys, rows, columns, buckets = (
        torch.randn(4, count, dim, dtype=torch.float64) for count in (2 * n - 1, n, n, 3, 9, 6)
    )
    u = torch.randn(4, dim, dtype=torch.float64)
    i, j = torch.arange(n)[:, None], torch.arange(n)
    grid_q, grid_k = ((x // 5, x % 5) for x in (i, j))
    dy, dx = grid_k[0] - grid_q[0] + 1, grid_k[1] - grid_q[1] + 4
    far = (i - j + 3).clamp(0, 5)
    products = {
        "shaw": (
            gnomon.position.Relative(shaw, n - 1, scale=own),
            torch.einsum("bhid,hijd->bhij", q, shaw[:, j - i + n - 1]),
        ),
        "transformer_xl": (
            gnomon.position.TransformerXL(u, 2 * u, xl, scale=own),
            torch.einsum("hd,bhjd->bhj", u, k)[:, :, None]
            + torch.einsum("bhid,hijd->bhij", q + 2 * u[:, None], xl[:, (i - j).clamp_min(0)]),
        ),
        "absolute_keys": (
            gnomon.position.AbsoluteKeys(keys, scale=own),
            torch.einsum("bhid,hjd->bhij", q, keys),
        ),
        "disentangled": (
            gnomon.position.Disentangled(buckets, buckets.flip(1), scale=own),
            torch.einsum("bhid,hijd->bhij", q, buckets[:, far])
            + torch.einsum("bhjd,hijd->bhij", k, buckets.flip(1)[:, far]),
        ),
        "relative2d": (
            gnomon.position.Relative2D(rows, columns, 2, 5, scale=own),
            torch.einsum("bhid,hijd->bhij", q, rows[:, dy] + columns[:, dx]),
        ),
    }
    hidden = (i < j).to(torch.float64) * -1e9
    for name, (term, product) in products.items():
        # The tokens are the first seven of a grid of ten.
        arguments = {"query_offset": 0} if name == "relative2d" else {}
        scores = q @ k.mT * (dim**-0.5 if scale is None else scale) + own * product
        expected = (scores + hidden).softmax(-1) @ v
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-4)):
            o = gnomon.attention(
                *(x.to(dtype) for x in (q, k, v)), position=to_dtype(term, dtype), causal=True,
                scale=scale, **arguments,
            )  # fmt: skip
            torch.testing.assert_close(o.double(), expected, atol=tolerance, rtol=0, msg=name)


def test_a_separate_scale_with_a_similarity_without_scale():
    q = torch.randn(1, 1, 3, 4)
    term = gnomon.position.AbsoluteKeys(torch.randn(3, 4), scale=1.0)
    gnomon.attention(q, q, q, position=term, similarity=gnomon.similarity.Laplacian(1.0))
    with pytest.raises(ValueError, match=r"content terms.*their own scale"):
        gnomon.attention(
            q, q, q, position=term, similarity=gnomon.similarity.Laplacian(1.0), scale=0.5
        )
    module = gnomon.nn.MultiheadAttention(8, 2, position="relative:max_offset=4:scale=1")
    assert module(torch.randn(1, 5, 8)).isfinite().all()


def to_dtype(term, dtype):
    """A term with tensors of the given dtype."""
    fields = {f.name: getattr(term, f.name) for f in dataclasses.fields(term)}
    return dataclasses.replace(
        term, **{n: x.to(dtype) for n, x in fields.items() if isinstance(x, Tensor)}
    )


@dataclass
class OwnScaleCase(ContentCase):
    """A case whose content term has the argument scale."""

    def positions(self, inputs: Parameters) -> list[gnomon.position.Position]:
        *others, term = super().positions(inputs)
        return [*others, dataclasses.replace(term, scale=-0.6)]


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        *((ContentCase, name) for name in CONTENT),
        *((OwnScaleCase, name) for name, content in CONTENT.items() if not content.query),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_gradcheck(kind, content):
    if content == "relative2d":
        case = kind(content=content, batch=1, heads=2, key_heads=1, dim=2, value_dim=2)
    else:
        mask = Mask(causal=True, query_offset=2)
        case = kind(
            content=content, batch=1, heads=2, key_heads=1, queries=4, keys=6, dim=2, value_dim=2,
            mask=mask,
        )  # fmt: skip
    leaves = {name: x.requires_grad_() for name, x in case.inputs().items()}
    attend = lambda *values: case.ours(dict(zip(leaves, values, strict=True)))  # noqa: E731
    assert torch.autograd.gradcheck(attend, tuple(leaves.values()))


def test_the_future_first_is_the_past_first_reversed():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 4) for _ in range(3))
    rows, values = torch.randn(11, 4), torch.randn(11, 4)
    ours = gnomon.attention(
        q, k, v, position=Relative.from_future_first(rows, 5, "zero", values=values)
    )
    i, j = torch.arange(9)[:, None], torch.arange(9)
    index = (5 - (j - i)).clamp(0, 10)
    inside = ((j - i).abs() <= 5)[..., None]
    scores = (q @ k.mT + torch.einsum("bhid,ijd->bhij", q, rows[index] * inside)) / 2
    weights = scores.softmax(-1)
    theirs = weights @ v + torch.einsum("bhij,ijd->bhid", weights, values[index] * inside)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


# Compares with the skewing procedure of the Music Transformer: pad, reshape, slice.
def test_skewing():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 16, 8, dtype=torch.float64) for _ in range(3))
    rows = torch.randn(3, 16, 8, dtype=torch.float64)
    products = torch.nn.functional.pad(q @ rows.mT, (1, 0))
    skewed = products.reshape(2, 3, 17, 16)[:, :, 1:]
    scores = (q @ k.mT + skewed) / math.sqrt(8)
    hidden = torch.ones(16, 16, dtype=torch.bool).triu(1)
    theirs = scores.masked_fill(hidden, -math.inf).softmax(-1) @ v
    ours = gnomon.attention(q, k, v, position=Relative(rows, 15), causal=True)
    torch.testing.assert_close(ours, theirs)


# A property that does not depend on the formula: relative terms do not change if the sequence is
# shifted.
@pytest.mark.parametrize(
    "content", ["relative", "shaw per head", "music transformer", "disentangled, log buckets"]
)
def test_translation_equivariance(content):
    torch.manual_seed(0)
    case = ContentCase(content=content, queries=20, keys=20, mask=Mask(window=(4, 4)))
    inputs = case.inputs()
    o, lse = case.ours(inputs)
    moved = inputs | {name: inputs[name].roll(3, 2) for name in ("q", "k", "v")}
    o_moved, lse_moved = case.ours(moved)
    # These rows attend neither to the ends nor to tokens that wrapped around.
    torch.testing.assert_close(o_moved[:, :, 8:15], o[:, :, 5:12])
    torch.testing.assert_close(lse_moved[:, :, 8:15], lse[:, :, 5:12])


def test_decoding_step_by_step_is_the_whole():
    for content in ("relative", "shaw", "past", "disentangled", "transformer_xl", "absolute keys"):
        case = ContentCase(content=content, mask=Mask(causal=True))
        inputs = case.inputs()
        o, _ = case.ours(inputs)
        for t in range(case.queries):
            step = ContentCase(
                content=content, queries=1, keys=t + 1, mask=Mask(causal=True, query_offset=t)
            )
            prefix = inputs | {
                "q": inputs["q"][:, :, t : t + 1],
                "k": inputs["k"][:, :, : t + 1],
                "v": inputs["v"][:, :, : t + 1],
            }
            if content == "absolute keys":
                prefix["table"] = inputs["table"][: t + 1]
            torch.testing.assert_close(step.ours(prefix)[0], o[:, :, t : t + 1])


def test_relative2d_goes_with_biases_on_the_same_grid():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 12, 4, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(2, 5, 7, dtype=torch.float64)
    rows, columns = torch.randn(5, 4).double(), torch.randn(2, 7, 4).double()
    ours = gnomon.attention(q, k, v, position=[Relative2D(rows, columns, 3, 4), GridBias(bias)])
    scores = q @ k.mT / 2
    for a, b in itertools.product(range(12), range(12)):
        dy, dx = b // 4 - a // 4, b % 4 - a % 4
        for h in range(2):
            row = rows[dy + 2] + columns[h, dx + 3]
            scores[0, h, a, b] += q[0, h, a] @ row / 2 + bias[h, dy + 2, dx + 3]
    torch.testing.assert_close(ours, scores.softmax(-1) @ v)
    with pytest.raises(ValueError, match="in the sequence, or all on one grid"):
        gnomon.attention(
            q, k, v, position=[Relative2D(rows, columns, 3, 4), ALiBi(torch.ones(2).double())]
        )


@pytest.mark.parametrize("content", ["shaw", "disentangled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_is_rounded_at_the_ends(dtype, content):
    case = ContentCase(content=content, queries=70, keys=70, dim=32, value_dim=32)
    inputs = {name: x.to(dtype) for name, x in case.inputs().items()}
    exact, _ = case.ours({name: x.double() for name, x in inputs.items()})
    ours, lse = case.ours(inputs)
    assert ours.dtype == dtype
    assert lse.dtype == torch.float32
    step = torch.finfo(dtype).eps
    assert (ours.double() - exact).abs().max() < step * exact.abs().max()


@pytest.mark.parametrize("content", ["shaw", "disentangled, log buckets"])
def test_compiles_in_one_graph(content):
    case = ContentCase(content=content, mask=Mask(causal=True))
    inputs = {name: x.float() for name, x in case.inputs().items()}
    compiled = torch.compile(lambda p: case.ours(p)[0], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(inputs), case.ours(inputs)[0])


def test_two_content_terms_are_an_error():
    q = torch.randn(1, 2, 3, 4)
    rows = torch.randn(3, 4)
    with pytest.raises(ValueError, match="contains two content terms; expected at most one"):
        gnomon.attention(q, q, q, position=[Relative(rows, 1), AbsoluteKeys(rows)])


def attend(position, causal=False, similarity=None, **keywords):
    q = torch.randn(2, 2, 3, 4)
    return gnomon.attention(q, q, q, position=position, causal=causal, similarity=similarity,
                            **keywords)  # fmt: skip


WRONG = {
    r"table of relative has 4 rows, but max_offset is 2; "
    r"expected 5 rows \(past to future\) or 3 \(past only\)": (
        lambda: attend(Relative(torch.randn(4, 4), 2))
    ),
    r"3 rows \(past only\), but causal is False": (lambda: attend(Relative(torch.randn(3, 4), 2))),
    r"table of relative has shape \[5, 3\]; expected \(n, 4\) or \(2, n, 4\)": (
        lambda: attend(Relative(torch.randn(5, 3), 2))
    ),
    r"table of relative has shape \[3, 5, 4\]": lambda: attend(Relative(torch.randn(3, 5, 4), 2)),
    r"values of relative has 3 rows, but its table has 5": (
        lambda: attend(Relative(torch.randn(5, 4), 2, values=torch.randn(3, 4)))
    ),
    r"values of relative has shape \[5, 3\]": (
        lambda: attend(Relative(torch.randn(5, 4), 2, values=torch.randn(5, 3)))
    ),
    r"relative:far=near is invalid; expected clip or zero|far": (
        lambda: attend(Relative(torch.randn(5, 4), 2, far="near"))
    ),
    r"max_offset": lambda: attend(Relative(torch.randn(5, 4), -1)),
    r"keys of disentangled has 5 rows; expected an even number": (
        lambda: attend(Disentangled(torch.randn(5, 4), torch.randn(5, 4)))
    ),
    r"queries of disentangled has 4 rows, but its keys have 6; expected the same": (
        lambda: attend(Disentangled(torch.randn(6, 4), torch.randn(4, 4)))
    ),
    r"queries of disentangled has shape \[6, 3\]; expected \(n, 4\) or \(2, n, 4\)": (
        lambda: attend(Disentangled(torch.randn(6, 4), torch.randn(6, 3)))
    ),
    r"max_distance of disentangled is 9 and its span .* a table\) is 3; .* an even span": (
        lambda: attend(Disentangled(torch.randn(6, 4), torch.randn(6, 4), max_distance=9))
    ),
    r"max_distance of disentangled is 5 and its span \(half the rows .*\) is 8; .* above 5": (
        lambda: attend(Disentangled(torch.randn(16, 4), torch.randn(16, 4), max_distance=5))
    ),
    r"transformer_xl requires causal=True, or bidirectional=True": (
        lambda: attend(TransformerXL(torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 3, 4)))
    ),
    r"transformer_xl works only with the similarity dot": (
        lambda: attend(
            TransformerXL(torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 3, 4)),
            causal=True,
            similarity=gnomon.similarity.Laplacian(1.0),
        )
    ),
    r"u of transformer_xl has shape \[4\]; expected \(H, D\) = \(2, 4\)": (
        lambda: attend(
            TransformerXL(torch.randn(4), torch.randn(2, 4), torch.randn(2, 3, 4)), causal=True
        )
    ),
    r"rows for 2 distances; expected at least Lq \+ query_offset = 3": (
        lambda: attend(
            TransformerXL(torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 2, 4)), causal=True
        )
    ),
    r"table of the position has 2 rows; expected 3": lambda: attend(
        AbsoluteKeys(torch.randn(2, 4))
    ),
    r"rows of relative2d has 5 rows; expected 1 = 2 height - 1": (
        lambda: attend(Relative2D(torch.randn(5, 4), torch.randn(5, 4), 1, 3))
    ),
    r"Lq is 3 and Lk is 3; expected 6 tokens": (
        lambda: attend(Relative2D(torch.randn(3, 4), torch.randn(5, 4), 2, 3))
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_tables_are_value_errors(message):
    with pytest.raises(ValueError, match=message):
        WRONG[message]()


def test_wrong_types_are_type_errors():
    for make in (
        lambda: Relative([1.0], 2),
        lambda: attend(Relative(torch.randn(5, 4), 2, values=3)),
        lambda: AbsoluteKeys(None),
        lambda: TransformerXL(1.0, torch.randn(2, 4), torch.randn(2, 3, 4)),
        lambda: Relative2D(torch.randn(3, 4), None, 2, 3),
        lambda: attend(Relative(torch.randn(5, 4).double(), 2)),
    ):
        with pytest.raises(TypeError):
            make()


MEMORY = """
from gnomon.position import AbsoluteKeys, Disentangled, Relative, Relative2D

def step(shape):
    length = shape[0] * shape[1]
    q, k, v = (torch.randn(1, 1, length, 4, requires_grad=True) for _ in range(3))
    if sys.argv[1] == "whole":
        rows = torch.randn(2 * length - 1, 4, requires_grad=True)
        position = Relative(rows, length - 1, values=torch.randn(2 * length - 1, 4))
    elif sys.argv[1] == "shaw":
        position = Relative(torch.randn(33, 4, requires_grad=True), 16)
    elif sys.argv[1] == "disentangled":
        keys, queries = (torch.randn(2 * length, 4, requires_grad=True) for _ in range(2))
        position = Disentangled(keys, queries)
    elif sys.argv[1] == "keys":
        position = AbsoluteKeys(torch.randn(length, 4, requires_grad=True))
    else:
        rows = torch.randn(2 * shape[0] - 1, 4, requires_grad=True)
        position = Relative2D(rows, torch.randn(2 * shape[1] - 1, 4), *shape)
    gnomon.attention(q, k, v, position=position, causal=True).sum().backward()

step((16, 32))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["whole", "shaw", "disentangled", "keys", "plane"])
def test_memory_is_linear_in_the_length(kind):
    # One array of L x L bytes would take 256 MiB.
    assert peak_memory(MEMORY, "step((128, 128))", kind) < 200 * 1024


def test_rope_turns_the_similarity_and_not_the_content():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 7, 4, dtype=torch.float64) for _ in range(3))
    rows = torch.randn(7, 4, dtype=torch.float64)
    both = gnomon.attention(q, k, v, position=[RoPE(), AbsoluteKeys(rows)])
    # Tokens with twice the columns give the same scores: [rotated, unrotated] times [rotated,
    # rows].
    _, lse = gnomon.attention(q, k, v, position=[RoPE()], return_lse=True)
    turned_q, turned_k = turn(q), turn(k)
    wide_q = torch.cat([turned_q, q], -1)
    wide_k = torch.cat([turned_k, rows.expand(1, 1, 7, 4)], -1)
    torch.testing.assert_close(both, gnomon.attention(wide_q, wide_k, v, scale=0.5))
    torch.testing.assert_close(lse, (turned_q @ turned_k.mT / 2).logsumexp(-1))


def turn(x: Tensor) -> Tensor:
    """RoPE with four columns."""
    angle = torch.arange(x.shape[2], dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.01])
    pairs = torch.view_as_complex(x.unflatten(-1, (2, 2))) * torch.polar(
        torch.ones_like(angle), angle
    )
    return torch.view_as_real(pairs).flatten(-2)
