"""Positions on grids compared with a loop over tokens; height and width differ."""

import itertools
import math

import pytest
import torch
from formulas import (
    TOLERANCE,
    assert_near,
    check,
    pairwise,
    rotate_on_grid,
    t5_bucket,
    values_and_gradients,
)
from operator_checks import peak_memory

import gnomon
from gnomon._catalogue import biases_of_axes
from gnomon.nn import KVCache, MultiheadAttention
from gnomon.position import (
    T5,
    ALiBi,
    Grid,
    GridBias,
    HyPE,
    Kerple,
    OffsetBias,
    Relative2D,
    RoPE,
)

HEADS = 4
SHAPES = [(3, 5), (5, 3), (2, 3, 4), (1, 4), (4, 1), (6,), (1, 1)]


def rand(*shape, low=0.05, high=0.5):
    return low + (high - low) * torch.rand(shape, dtype=torch.float64)


# For each bias along an axis of length n: its parameters, the gnomon term, and the expected bias
# (H,) at offset d = j - i.
AXES = {
    "alibi": (
        lambda n: {"slopes": rand(HEADS)},
        lambda p: ALiBi(p["slopes"]),
        lambda p, d, n: -p["slopes"] * abs(d),
    ),
    "hype": (
        lambda n: {"tau": rand(HEADS), "mu": rand(HEADS)},
        lambda p: HyPE(p["tau"], p["mu"]),
        lambda p, d, n: -p["tau"] * torch.sinh(p["mu"] * abs(d)),
    ),
    "hype odd": (
        lambda n: {"tau": rand(HEADS), "mu": rand(HEADS)},
        lambda p: HyPE(p["tau"], p["mu"], mode="odd"),
        lambda p, d, n: -p["tau"] * torch.sinh(p["mu"] * -d),
    ),
    "hype cosh": (
        lambda n: {"tau": rand(HEADS), "mu": rand(HEADS)},
        lambda p: HyPE(p["tau"], p["mu"], mode="cosh"),
        lambda p, d, n: p["tau"] * (1 - torch.cosh(p["mu"] * d)),
    ),
    "t5": (
        lambda n: {"table": torch.randn(12, HEADS, dtype=torch.float64)},
        lambda p: T5(p["table"], True, max_distance=30),
        lambda p, d, n: p["table"][t5_bucket(d, True, 12, 30)],
    ),
    "kerple": (
        lambda n: {"r1": rand(HEADS), "r2": rand(HEADS)},
        lambda p: Kerple(p["r1"], p["r2"]),
        lambda p, d, n: -p["r1"] * torch.log(1 + p["r2"] * abs(d)),
    ),
    "offset_bias": (
        lambda n: {"table": torch.randn(HEADS, 2 * n - 1, dtype=torch.float64)},
        lambda p: OffsetBias(p["table"]),
        lambda p, d, n: p["table"][:, d + n - 1],
    ),
}


def loop(shape, prefix, value):
    """The bias (H, L, L) of all token pairs; `value` maps a tuple of offsets to a bias (H,)."""
    tokens = [None] * prefix + list(itertools.product(*map(range, shape)))
    nothing = torch.zeros(HEADS, dtype=torch.float64)
    rows = [
        torch.stack(
            [
                nothing
                if a is None or b is None
                else value(tuple(j - i for i, j in zip(a, b, strict=True)))
                for b in tokens
            ],
            1,
        )
        for a in tokens
    ]
    return torch.stack(rows, 1)


def inputs_of(length, key_heads=2):
    torch.manual_seed(0)
    return {
        "q": torch.randn(2, HEADS, length, 8, dtype=torch.float64),
        "k": torch.randn(2, key_heads, length, 8, dtype=torch.float64),
        "v": torch.randn(2, key_heads, length, 5, dtype=torch.float64),
    }


def dense(p, bias, q=None, k=None, scores=None):
    """Plain attention with a bias (H, L, L)."""
    groups = HEADS // p["k"].shape[1]
    k = (p["k"] if k is None else k).repeat_interleave(groups, 1)
    q = p["q"] if q is None else q
    if scores is None:
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])
    scores = scores + bias
    return scores.softmax(-1) @ p["v"].repeat_interleave(groups, 1), scores.logsumexp(-1)


def ours(p, position, **arguments):
    return gnomon.attention(p["q"], p["k"], p["v"], position=position, return_lse=True, **arguments)


def axes_of(names, shape):
    """The per-axis parameters of a bias, the gnomon Grid, and the formula."""
    names = list(itertools.islice(itertools.cycle(names), len(shape)))
    parameters = {
        f"{name}{a}": value
        for a, n in enumerate(shape)
        for name, value in AXES[names[a]][0](n).items()
    }

    def of_axis(p, a):
        return {name: p[f"{name}{a}"] for name in AXES[names[a]][0](1)}

    def grid(p, prefix):
        return Grid(shape, [AXES[n][1](of_axis(p, a)) for a, n in enumerate(names)], prefix)

    def bias(p, prefix):
        def value(offsets):
            return sum(AXES[n][2](of_axis(p, a), offsets[a], shape[a]) for a, n in enumerate(names))

        return loop(shape, prefix, value)

    return parameters, grid, bias


@pairwise(shape=SHAPES, prefix=[0, 1, 3], dtype=TOLERANCE)
def test_grid(shape, prefix, dtype):
    length = prefix + math.prod(shape)
    for first in range(0, len(AXES), len(shape)):
        names = list(itertools.islice(itertools.cycle(AXES), first, first + len(shape)))
        parameters, grid, bias = axes_of(names, shape)
        check(
            lambda p: ours(p, grid(p, prefix)),  # noqa: B023
            lambda p: dense(p, bias(p, prefix)),  # noqa: B023
            inputs_of(length) | parameters,
            dtype,
        )


def test_a_cache_on_a_grid():
    torch.manual_seed(0)
    module = MultiheadAttention(8, 2, position="grid_bias:shape=3x4:prefix=1").double()
    torch.nn.init.normal_(module.grid_bias_table)
    x = torch.randn(2, 13, 8, dtype=torch.float64)
    cache = KVCache()
    parts = [module(part, causal=True, cache=cache) for part in x.split([1, 4, 1, 7], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), module(x, causal=True))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", ["axes", "table", "rows"])
@pytest.mark.parametrize(
    ("prefix", "offset", "rows", "memory"),
    [(1, 0, 1, 0), (2, 3, 5, 4), (0, 0, 12, 3), (3, 3, 12, 0), (0, 11, 1, 70)],
)
def test_some_tokens_of_a_grid_and_memory_keys(prefix, offset, rows, memory, kind, dtype):
    """Queries are a subset of the tokens (Lq < Lk), and keys outside the grid have no bias."""
    torch.manual_seed(0)
    shape, length = (3, 4), prefix + 12
    inputs = {
        "q": torch.randn(2, HEADS, rows, 8, dtype=torch.float64),
        "k": torch.randn(2, HEADS, length + memory, 8, dtype=torch.float64),
        "v": torch.randn(2, HEADS, length + memory, 8, dtype=torch.float64),
        "table": torch.randn(HEADS, 5, 7, dtype=torch.float64),
        "slopes": torch.rand(HEADS, dtype=torch.float64),
        "rows": torch.randn(5, 8, dtype=torch.float64),
        "columns": torch.randn(7, 8, dtype=torch.float64),
    }

    def fused(p):
        position = {
            "axes": lambda: Grid(shape, [ALiBi(p["slopes"])] * 2, prefix),
            "table": lambda: GridBias(p["table"], prefix),
            "rows": lambda: Relative2D(p["rows"], p["columns"], *shape, prefix=prefix),
        }[kind]()
        own = {"axes": ("slopes",), "table": ("table",), "rows": ("rows", "columns")}[kind]
        unused = sum(p[n].sum() * 0 for n in ("slopes", "table", "rows", "columns") if n not in own)
        o = gnomon.attention(p["q"], p["k"], p["v"], position=position, query_offset=offset)
        return o + unused.to(o.dtype)

    def formula(p):
        place = torch.arange(length + memory) - prefix
        seen = (place >= 0) & (place < 12)
        y, x = place // 4, place % 4
        of_rows = slice(offset, offset + rows)
        both = seen[of_rows, None] & seen
        dy, dx = ((c - c[of_rows, None]).masked_fill(~both, 0) for c in (y, x))
        if kind == "axes":
            bias = -p["slopes"][:, None, None] * (dy.abs() + dx.abs())
        elif kind == "table":
            bias = p["table"][:, dy + 2, dx + 3]
        else:
            of_pairs = p["rows"][dy + 2] + p["columns"][dx + 3]
            bias = torch.einsum("bhid,ijd->bhij", p["q"], of_pairs) * 8**-0.5
        scores = p["q"] @ p["k"].mT * 8**-0.5 + torch.where(both, bias, 0.0)
        unused = sum(p[n].sum() * 0 for n in ("slopes", "table", "rows", "columns"))
        return scores.softmax(-1) @ p["v"] + unused

    check(fused, formula, inputs, dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_grid_bias(shape, prefix, dtype):
    inputs = inputs_of(prefix + math.prod(shape))
    inputs["table"] = torch.randn(HEADS, *(2 * n - 1 for n in shape), dtype=torch.float64)

    def formula(p):
        def value(offsets):
            index = [d + n - 1 for d, n in zip(offsets, shape, strict=True)]
            return p["table"][(slice(None), *index)]

        return dense(p, loop(shape, prefix, value))

    check(lambda p: ours(p, GridBias(p["table"], prefix)), formula, inputs, dtype)


def test_sums_with_rotation_and_masks():
    """Combines two grid biases, RoPE on the grid, GQA, a causal mask, a window and lengths."""
    shape, prefix = (4, 5), 1
    length = prefix + math.prod(shape)
    parameters, grid, bias = axes_of(["alibi", "offset_bias"], shape)
    inputs = inputs_of(length) | parameters
    inputs["full"] = torch.randn(HEADS, 7, 9, dtype=torch.float64)
    lengths = [length, 13]
    i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    hidden = (j > i) | (j < i - 9) | (j[None] >= torch.tensor(lengths)[:, None, None])
    hidden = hidden[:, None]

    def formula(p):
        full = loop(shape, prefix, lambda d: p["full"][:, d[0] + 3, d[1] + 4])
        q, k = (rotate_on_grid(p[name], shape, prefix) for name in ("q", "k"))
        mask = torch.where(hidden, -math.inf, 0.0)
        return dense(p, bias(p, prefix) + full + mask, q, k)

    def attend(p):
        position = [grid(p, prefix), GridBias(p["full"], prefix), RoPE(shape=shape, prefix=prefix)]
        return ours(p, position, causal=True, window=(9, None), key_lengths=torch.tensor(lengths))

    check(attend, formula, inputs)


def test_segments_are_shifted_windows():
    """In Swin's shifted windows, tokens of different regions do not attend to each other."""
    height, width = 4, 5
    inputs = inputs_of(height * width)
    inputs["table"] = torch.randn(HEADS, 7, 9, dtype=torch.float64)
    y, x = (c.flatten() for c in torch.meshgrid(torch.arange(4), torch.arange(5), indexing="ij"))
    segments = (2 * (y >= 3) + (x >= 2)).expand(2, -1)

    def formula(p):
        bias = loop((height, width), 0, lambda d: p["table"][:, d[0] + 3, d[1] + 4])
        apart = segments[0][:, None] != segments[0][None, :]
        return dense(p, bias.masked_fill(apart, -math.inf))

    def attend(p):
        return ours(p, GridBias(p["table"]), query_segments=segments, key_segments=segments)

    for dtype in TOLERANCE:
        check(attend, formula, inputs, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tables_are_not_rounded_with_the_tokens(dtype):
    # The table entries differ by less than the resolution of the token dtype.
    q = torch.zeros(1, 1, 4, 4, dtype=dtype)
    v = torch.eye(4, dtype=dtype)[None, None]
    table = 1024 + torch.tensor([[[0.0, 0.5, 0.25], [0.75, 0.0, 0.5], [0.5, 0.25, 1.0]]])
    p, lse = gnomon.attention(q, q, v, position=GridBias(table), return_lse=True)
    cells = list(itertools.product(range(2), range(2)))
    scores = torch.stack(
        [torch.stack([table[0, c - a + 1, d - b + 1] for c, d in cells]) for a, b in cells]
    )
    assert (p[0, 0].float() - scores.softmax(-1)).abs().max() < 4e-3
    assert (lse[0, 0] - scores.logsumexp(-1)).abs().max() < 1e-3


MEMORY = """
from gnomon.position import ALiBi, Grid, GridBias, RoPE

def step(height, width):
    q, k, v = (torch.randn(1, 1, height * width, 4, requires_grad=True) for _ in range(3))
    table = torch.randn(1, 2 * height - 1, 2 * width - 1, requires_grad=True)
    slopes = torch.ones(1, requires_grad=True)
    shape = (height, width)
    position = [GridBias(table), Grid(shape, [ALiBi(slopes)] * 2), RoPE(shape=shape)]
    o = gnomon.attention(q, k, v, position=position, window=(3000, 3000))
    o.sum().backward()

step(16, 32)
"""


@pytest.mark.slow
def test_memory_is_linear_in_the_tokens():
    # One array of L x L bytes would take 1024 MiB.
    assert peak_memory(MEMORY, "step(128, 256)") < 100 * 1024


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    torch.compiler.reset()
    shape, prefix = (3, 4), 1
    parameters, grid, _ = axes_of(["hype", "t5"], shape)
    inputs = inputs_of(prefix + math.prod(shape)) | parameters
    inputs["full"] = torch.randn(HEADS, 5, 7, dtype=torch.float64)

    def attend(p):
        position = [grid(p, prefix), GridBias(p["full"], prefix), RoPE(shape=shape, prefix=prefix)]
        return ours(p, position)

    compiled = torch.compile(attend, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert_near(values_and_gradients(compiled, inputs), values_and_gradients(attend, inputs), 1e-12)


def test_with_a_similarity():
    shape = (3, 4)
    parameters, grid, bias = axes_of(["hype", "alibi"], shape)
    inputs = inputs_of(12, HEADS) | parameters

    def formula(p):
        scores = -0.7 * (p["q"][:, :, :, None] - p["k"][:, :, None]).square().sum(-1)
        return dense(p, bias(p, 0), scores=scores)

    check(
        lambda p: ours(p, grid(p, 0), similarity=gnomon.similarity.Gaussian(0.7)), formula, inputs
    )


def test_alibi_over_all_axes_is_the_city_block_distance():
    inputs = inputs_of(12)
    slopes = gnomon.alibi_slopes(HEADS).double()
    bias = loop((3, 4), 0, lambda d: -slopes * (abs(d[0]) + abs(d[1])))
    expected, _ = dense(inputs, bias)
    ours, _ = gnomon.attention(
        *(inputs[n] for n in "qkv"), position=Grid((3, 4), [ALiBi(slopes)] * 2), return_lse=True
    )
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("kernel", ["float32", "float64", "reference"])
def test_a_grid_as_large_as_an_image(kernel, monkeypatch):
    """The grid has more tokens than a tile has rows or columns."""
    dtype = torch.float32 if kernel == "float32" else torch.float64
    if kernel == "reference":
        monkeypatch.setenv("GNOMON_FLOAT64", "reference")
    torch.manual_seed(0)
    height, width, prefix = 17, 23, 1
    length = prefix + height * width
    q, k, v = (torch.randn(1, 2, length, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    table = torch.randn(2, 33, 45, dtype=dtype, requires_grad=True)
    o = gnomon.attention(q, k, v, position=GridBias(table, prefix))
    y, x = (c.flatten() for c in torch.meshgrid(torch.arange(17), torch.arange(23), indexing="ij"))
    bias = torch.zeros(2, length, length, dtype=torch.float64)
    bias[:, prefix:, prefix:] = table.double()[
        :, y[None] - y[:, None] + height - 1, x[None] - x[:, None] + width - 1
    ]
    scores = q.double() @ k.double().transpose(2, 3) / 8**0.5 + bias
    expected = scores.softmax(-1) @ v.double()
    tolerance = 10 * TOLERANCE[dtype]
    torch.testing.assert_close(o.double(), expected, atol=tolerance, rtol=0)
    direction = torch.randn(o.shape, dtype=dtype)
    leaves = (q, k, v, table)
    for got, want in zip(
        torch.autograd.grad(o, leaves, direction),
        torch.autograd.grad(expected, leaves, direction.double()),
        strict=True,
    ):
        torch.testing.assert_close(got, want.to(dtype), atol=tolerance, rtol=0)


def test_moving_all_tokens_moves_the_output():
    """By translation invariance, a smaller grid inside a larger one has the same biases."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, HEADS, 4, 6, 8, dtype=torch.float64) for _ in range(3))
    table = torch.randn(HEADS, 7, 11, dtype=torch.float64)

    def window(x, top, left):
        return x[:, :, top : top + 3, left : left + 4].flatten(2, 3)

    inner = GridBias(table[:, 1:-1, 2:-2])
    for top, left in ((0, 0), (1, 2), (0, 2)):
        small = gnomon.attention(*(window(x, top, left) for x in (q, k, v)), position=inner)
        inside = torch.zeros(4, 6, dtype=torch.bool)
        inside[top : top + 3, left : left + 4] = True
        hole = torch.where(inside.flatten(), 0.0, -math.inf).double()
        scores = q.flatten(2, 3) @ k.flatten(2, 3).transpose(2, 3) / 8**0.5
        bias = loop((4, 6), 0, lambda d: table[:, d[0] + 3, d[1] + 5])
        large = (scores + bias + hole).softmax(-1) @ v.flatten(2, 3)
        torch.testing.assert_close(small, window(large.unflatten(2, (4, 6)), top, left))


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 4), (7,)], ids=str)
def test_sdpa_on_augmented_tokens_is_the_sum_over_axes(shape, per_head, copies):
    length = math.prod(shape)
    inputs = inputs_of(length)
    tau, mu = 3.0, 0.2
    if per_head:
        inputs["tau"], inputs["mu"] = rand(HEADS, high=2.0), rand(HEADS)

    def bias(p):
        tau_h = p.get("tau", torch.full((HEADS,), tau, dtype=torch.float64))
        mu_h = p.get("mu", torch.full((HEADS,), mu, dtype=torch.float64))
        return loop(shape, 0, lambda d: -tau_h * sum(torch.sinh(mu_h * -n) for n in d))

    def augmented(p):
        q, k = gnomon.hype_augment(
            p["q"], p["k"], p.get("tau", tau), p.get("mu", mu), copies, axes=shape
        )
        assert q.shape[-1] == 8 + 2 * copies * len(shape)
        groups = HEADS // k.shape[1]
        k = k.repeat_interleave(groups, 1)
        v = p["v"].repeat_interleave(2, 1)
        sdpa = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=8**-0.5)
        return sdpa, (q @ k.transpose(2, 3) / 8**0.5).logsumexp(-1)

    check(augmented, lambda p: dense(p, bias(p)), inputs)
    hype = [HyPE(inputs.get("tau", tau), inputs.get("mu", mu), mode="odd")] * len(shape)
    grid, lse = ours(inputs, Grid(shape, hype))
    torch.testing.assert_close((grid, lse), augmented(inputs))


def test_augmented_queries_may_be_some_of_the_tokens():
    inputs = inputs_of(15)
    q, _ = gnomon.hype_augment(inputs["q"], inputs["k"], 2.0, 0.1, axes=(3, 5))
    some, _ = gnomon.hype_augment(
        inputs["q"][:, :, 4:9], inputs["k"], 2.0, 0.1, axes=(3, 5), query_offset=4
    )
    assert torch.equal(some, q[:, :, 4:9])


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize(("shape", "dim"), [((3, 5), 8), ((2, 3, 2), 14), ((4, 3), 11)])
def test_rope_on_a_grid(shape, dim, prefix, layout):
    torch.manual_seed(0)
    length = prefix + math.prod(shape)
    inputs = {
        name: torch.randn(2, HEADS, length, dim, dtype=torch.float64) for name in ("q", "k", "v")
    }
    position = RoPE(100.0, layout, shape=shape, prefix=prefix)

    def formula(p):
        q, k = (rotate_on_grid(p[n], shape, prefix, base=100.0, layout=layout) for n in ("q", "k"))
        return dense(p, 0.0, q, k)

    check(lambda p: ours(p, position), formula, inputs)
    # Queries may be a subset of the tokens, as in decoding in raster order.
    whole, _ = ours(inputs, position, causal=True)
    last, _ = ours(inputs | {"q": inputs["q"][:, :, 4:7]}, position, causal=True, query_offset=4)
    torch.testing.assert_close(last, whole[:, :, 4:7])


def test_rope_on_a_grid_sees_offsets_only():
    torch.manual_seed(0)
    q, k = torch.randn(2, 12, dtype=torch.float64)
    height, width = 4, 6
    tokens = height * width
    position = RoPE(10.0, shape=(height, width))
    q, k = (x.expand(1, 1, tokens, 12) for x in (q, k))
    eye = torch.eye(tokens, dtype=torch.float64)[None, None]
    o, lse = gnomon.attention(q, k, eye, position=position, return_lse=True)
    scores = (o.log() + lse[..., None])[0, 0].unflatten(1, (height, width))
    scores = scores.unflatten(0, (height, width))
    torch.testing.assert_close(scores[1:, 1:, 1:, 1:], scores[:-1, :-1, :-1, :-1])
    assert not torch.allclose(scores[0, 0, 1, 0], scores[0, 0, 0, 1])


SPECS = {
    "grid_bias:shape=3x4": {"grid_bias_table": (2, 5, 7)},
    "grid_bias:shape=3x4:prefix=1": {"grid_bias_table": (2, 5, 7)},
    "alibi:shape=3x4": {},
    "alibi:shape=3x4:slopes=learned": {"alibi_slopes_theta": (2,)},
    "hype:shape=3x4:axis=0:tau=learned+hype:shape=3x4:axis=1:tau=learned:mode=abs": {
        "hype_tau_theta": (2,),
        "hype2_tau_theta": (2,),
    },
    "t5:shape=3x4:buckets=12:axis=1": {"t5_table": (12, 2)},
    "kerple:shape=3x4+rope:shape=3x4": {"kerple_r1_theta": (2,), "kerple_r2_theta": (2,)},
    "offset_bias:shape=3x4:axis=0+offset_bias:shape=3x4:axis=1": {
        "offset_bias_table": (2, 5),
        "offset_bias2_table": (2, 7),
    },
    "alibi:shape=2x3x2+grid_bias:shape=2x3x2": {"grid_bias_table": (2, 3, 5, 3)},
}


@pytest.mark.parametrize("spec", SPECS)
def test_modules(spec):
    torch.manual_seed(0)
    module = MultiheadAttention(16, 2, position=spec)
    terms = {n: tuple(p.shape) for n, p in module.named_parameters() if "_proj" not in n}
    assert terms == SPECS[spec]
    length = 13 if "prefix" in spec else 12
    x, target = torch.randn(2, length, 16), torch.randn(2, length, 16)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    losses = []
    for _ in range(3):
        loss = (module(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(not torch.equal(getattr(module, name), before[name]) for name in terms)


@pytest.mark.parametrize("causal", [False, True])
def test_a_module_is_its_grid(causal):
    torch.manual_seed(0)
    spec = "t5:shape=3x4:axis=0+alibi:shape=3x4+grid_bias:shape=3x4"
    module = MultiheadAttention(16, 2, position=spec).double()
    with torch.no_grad():
        module.t5_table.normal_()
        module.grid_bias_table.normal_()
    x = torch.randn(2, 12, 16, dtype=torch.float64)
    q, k, v = (
        projection(x).unflatten(2, (2, 8)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    slopes = gnomon.alibi_slopes(2).double()
    nothing = OffsetBias(torch.zeros(2, 7, dtype=torch.float64))
    position = [
        # Along an axis, offsets have both signs, even in a causal call.
        Grid((3, 4), [T5(module.t5_table, bidirectional=True), nothing]),
        Grid((3, 4), [ALiBi(slopes), ALiBi(slopes)]),
        GridBias(module.grid_bias_table),
    ]
    o = gnomon.attention(q, k, v, position=position, causal=causal)
    expected = module.out_proj(o.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x, causal=causal), expected)


def attend(position, length=12, key_length=None, **arguments):
    q = torch.zeros(1, HEADS, length, 8)
    k = torch.zeros(1, HEADS, length if key_length is None else key_length, 8)
    return gnomon.attention(q, k, k, position=position, **arguments)


SLOPES = torch.ones(HEADS)
ERRORS = {
    "too few tokens": (
        lambda: attend(Grid((3, 4), [ALiBi(SLOPES)] * 2), 11),
        "alibi on the grid 3x4, but Lq is 11 and Lk is 11; expected 12 tokens",
    ),
    "no prefix": (
        lambda: attend(Grid((3, 4), [ALiBi(SLOPES)] * 2, prefix=1)),
        "alibi on the grid 3x4 after 1, but Lq is 12 and Lk is 12; expected 13 tokens",
    ),
    "cross": (
        lambda: attend(GridBias(torch.zeros(HEADS, 5, 7)), 12, 24),
        "grid_bias on the grid 3x4, but Lq is 12 and Lk is 24",
    ),
    "offset": (
        lambda: attend(GridBias(torch.zeros(HEADS, 5, 7)), query_offset=1),
        "query_offset is 1 and Lq is 12, but position contains grid_bias on the grid 3x4; expected "
        "query_offset",
    ),
    "two grids": (
        lambda: attend([Grid((3, 4), [ALiBi(SLOPES)] * 2), GridBias(torch.zeros(HEADS, 7, 5))]),
        "position contains alibi on the grid 3x4 and grid_bias on the grid 4x3; expected all "
        "biases in the sequence, or all on one grid",
    ),
    "a rotation on a different grid": (
        lambda: attend([RoPE(shape=(4, 3)), GridBias(torch.zeros(HEADS, 5, 7))]),
        "position contains rope on the grid 4x3 and other terms on the grid 3x4; expected one grid",
    ),
    "two prefixes": (
        lambda: attend(
            [GridBias(torch.zeros(HEADS, 5, 7)), GridBias(torch.zeros(HEADS, 5, 7), prefix=1)]
        ),
        "on the grid 3x4 and grid_bias on the grid 3x4 after 1",
    ),
    "a sequence": (
        lambda: attend([Grid((3, 4), [ALiBi(SLOPES)] * 2), HyPE(1.0, 0.1)]),
        "alibi on the grid 3x4 and hype in the sequence; expected all biases in the sequence, "
        "or all on one grid",
    ),
    "a sequence first": (
        lambda: attend([HyPE(1.0, 0.1), GridBias(torch.zeros(HEADS, 5, 7))]),
        "hype in the sequence and grid_bias on the grid 3x4",
    ),
    "axes": (
        lambda: Grid((3, 4), [ALiBi(SLOPES)]),
        "shape has 2 axes and axes has 1 biases; expected one bias per axis",
    ),
    "a grid of grids": (
        lambda: attend(Grid((3, 4), [GridBias(torch.zeros(HEADS, 5))] * 2)),
        f"axes contains a GridBias; expected offset biases: {', '.join(biases_of_axes())}",
    ),
    "a rotation": (
        lambda: attend(Grid((3, 4), [RoPE(), RoPE()])),
        "axes contains a RoPE; expected offset biases",
    ),
    "length 0": (
        lambda: attend(Grid((3, 0), [ALiBi(SLOPES)] * 2)),
        "alibi:shape=3x0 is invalid; expected positive integers joined by x",
    ),
    "a negative prefix": (
        lambda: attend(Grid((3, 4), [ALiBi(SLOPES)] * 2, prefix=-1)),
        "prefix=-1 is invalid; expected an integer of at least 0",
    ),
    "an even table": (
        lambda: attend(GridBias(torch.zeros(HEADS, 5, 6))),
        r"table of GridBias has shape \[4, 5, 6\]; expected \(H, 2 height - 1",
    ),
    "a table without axes": (
        lambda: attend(GridBias(torch.zeros(HEADS))),
        r"table of GridBias has shape \[4\]",
    ),
    "heads": (
        lambda: attend(GridBias(torch.zeros(3, 5, 7))),
        r"table of GridBias has shape \[3, 5, 7\]; expected \[4, 5, 7\]",
    ),
    "a table of an axis": (
        lambda: attend(Grid((3, 4), [OffsetBias(torch.zeros(HEADS, 7))] * 2)),
        r"table of OffsetBias has shape \[4, 7\]; expected.*\(4, 5\)",
    ),
    "too many axes": (
        lambda: MultiheadAttention(8, 2, position="alibi:shape=3x4:axis=2"),
        "alibi:axis is 2; expected an axis of the shape 3x4, from 0 to 1",
    ),
    "an axis needs a shape": (
        lambda: MultiheadAttention(8, 2, position="alibi:axis=0"),
        "alibi:axis=0 needs a shape, such as shape=14x14",
    ),
    "one table for unequal axes": (
        lambda: MultiheadAttention(8, 2, position="offset_bias:shape=3x4"),
        "offset_bias:shape=3x4 has axes of different sizes, which cannot share one table",
    ),
    "a table without a grid": (
        lambda: MultiheadAttention(8, 2, position="offset_bias:axis=0"),
        "offset_bias:axis=0 needs a shape, such as shape=14x14",
    ),
    "too many tokens": (
        lambda: attend(RoPE(shape=(2**20, 2**20))),
        r"grid of shape \[1048576, 1048576\] with prefix 0 is too large; expected at most 2\^32",
    ),
    "decoding": (
        lambda: MultiheadAttention(8, 2, position="alibi:shape=3x4")(
            torch.zeros(1, 13, 8), causal=True, cache=KVCache()
        ),
        "query_offset is 0 and Lq is 13, but position contains alibi on the grid 3x4; expected "
        "query_offset",
    ),
    "a table needs a shape": (
        lambda: MultiheadAttention(8, 2, position="grid_bias"),
        "grid_bias in a module needs a shape, as in grid_bias:shape=14x14",
    ),
    "a prefix needs a shape": (
        lambda: attend(RoPE(prefix=1)),
        "rope:prefix=1 needs a shape",
    ),
    "odd dims": (
        lambda: attend(RoPE(dims=6, shape=(3, 4))),
        r"dims = 6; expected a multiple of 2 \* axes = 4",
    ),
    "few columns": (
        lambda: attend(RoPE(shape=(1, 1, 3, 4)), similarity=gnomon.similarity.Umbral(1.0)),
        "RoPE over the grid 1x1x3x4 rotates at least one pair of coordinates per axis, but q has "
        "head_dim 7 without the height; expected at least 8",
    ),
    "tokens of a rotation": (
        lambda: attend(RoPE(shape=(3, 4)), query_offset=3),
        "RoPE: token indices range from 3 to 14, but the grid 3x4 has 12",
    ),
    "tokens to augment": (
        lambda: gnomon.hype_augment(*[torch.zeros(1, 1, 7, 4)] * 2, 1.0, 0.1, axes=(2, 3)),
        "hype_augment: token indices range from 0 to 6, but the grid 2x3 has 6",
    ),
    "no axes": (
        lambda: Grid((), []),
        r"Grid: shape is \(\); expected at least one axis",
    ),
    "no axes to augment": (
        lambda: gnomon.hype_augment(*[torch.zeros(1, 1, 6, 4)] * 2, 1.0, 0.1, axes=()),
        r"hype_augment: axes is \(\); expected at least one axis",
    ),
    "wrong axes to augment": (
        lambda: gnomon.hype_augment(*[torch.zeros(1, 1, 6, 4)] * 2, 1.0, 0.1, axes=(2, 0)),
        r"the shape of a grid is \[2, 0\]; expected positive sizes",
    ),
}


@pytest.mark.cpu("errors are the same on all devices")
@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    call, message = ERRORS[name]
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: Grid((3, 4), ["alibi", "alibi"]),
            "Grid: axes contains a str; expected offset biases",
        ),
        (lambda: Grid(3, [ALiBi(SLOPES)]), "Grid: shape is 3; expected a sequence of integers"),
        (
            lambda: gnomon.hype_augment(*[torch.zeros(1, 1, 6, 4)] * 2, 1.0, 0.1, axes=(2, 3.0)),
            r"hype_augment: axes is \(2, 3.0\); expected a sequence of integers",
        ),
        (lambda: GridBias([[0.0]]), "GridBias: table is a list; expected a tensor"),
    ],
)
def test_wrong_types(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.parametrize("side", [7, 24])
def test_windows_of_any_size_are_their_pairs(side):
    """Small grids expand the rows of their tables once; larger grids read runs of the tables."""
    count = side * side
    generator = torch.Generator().manual_seed(side)
    batch = 3 if side == 7 else 1
    q, k, v = (
        torch.randn(batch, HEADS, count, 4, generator=generator).requires_grad_() for _ in range(3)
    )
    table = torch.randn(HEADS, 2 * side - 1, 2 * side - 1, generator=generator).requires_grad_()
    segments = torch.randint(0, 3, (batch, count), generator=generator).sort(1)[0]
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    y, x = (places[None, :] - places[:, None] + side - 1).unbind(-1)
    d_o = torch.randn(q.shape, generator=generator)
    for masks in ({}, {"query_segments": segments, "key_segments": segments}):
        results = []
        for bias in (GridBias(table), gnomon.position.PairBias(table[:, y, x][None])):
            o = gnomon.attention(q, k, v, position=bias, **masks)
            results.append([o, *torch.autograd.grad(o, (q, k, v, table), d_o)])
        for own, expected in zip(*results, strict=True):
            torch.testing.assert_close(own, expected, rtol=2e-5, atol=2e-5)
