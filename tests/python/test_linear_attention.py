"""Linear attention compared with a quadratic float64 formula, term by term."""

import itertools
import math
import re

import pytest
import torch
from formulas import mostly_long, pairwise, rotate
from operator_checks import CHECKS, peak_memory
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import gnomon
from gnomon.position import ALiBi, RoPE

ops = torch.ops.gnomon
CHUNK = 64  # rows of a causal chunk with few value columns


def features(name: str, x: Tensor, projection: Tensor | None) -> Tensor:
    if name == "elu":
        return torch.nn.functional.elu(x) + 1
    if name == "relu":
        return x.clamp_min(0)
    x = x / x.shape[-1] ** 0.25
    exponent = torch.einsum("...d,md->...m", x, projection) - x.square().sum(-1, keepdim=True) / 2
    return exponent.exp() / math.sqrt(len(projection))


def quadratic(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature: str,
    causal: bool = False,
    rope: dict[str, object] | None = None,
    projection: Tensor | None = None,
    lengths: Tensor | None = None,
    offset: int = 0,
) -> Tensor:
    """The formula with all weights in one matrix. If all weights of a row are 0, its output is
    0."""
    group = q.shape[1] // k.shape[1]
    a = features(feature, q, projection)
    b = features(feature, k.repeat_interleave(group, 1), projection)
    seen = torch.ones(q.shape[0], 1, q.shape[2], k.shape[2], dtype=torch.bool)
    if causal:
        seen = seen.tril()
    if lengths is not None:
        seen = seen & (torch.arange(k.shape[2]) < lengths[:, None, None, None])
    weights = (a @ b.mT) * seen
    turned = weights
    if rope is not None:
        i = torch.arange(offset, offset + q.shape[2], dtype=q.dtype)
        j = torch.arange(k.shape[2], dtype=q.dtype)
        turned = (rotate(a, i, False, **rope) @ rotate(b, j, False, **rope).mT) * seen
    total = weights.sum(-1, keepdim=True)
    sums = turned @ v.repeat_interleave(group, 1)
    return torch.where(total > 0, sums / torch.where(total > 0, total, 1.0), 0.0)


def inputs(length: int, keys: int | None = None, heads: int = 2, key_heads: int = 2, dim: int = 4):
    torch.manual_seed(length)
    keys = length if keys is None else keys
    shapes = (2, heads, length, dim), (2, key_heads, keys, dim), (2, key_heads, keys, 3)
    return tuple(torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in shapes)


def projection(feature: str, dim: int = 4) -> Tensor | None:
    return gnomon.favor_projection(10, dim, seed=1).double() if feature == "favor" else None


def assert_same(ours: Tensor, theirs: Tensor, leaves: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=1e-9)
    weights = torch.randn(theirs.shape, dtype=torch.float64)
    for got, want in zip(
        torch.autograd.grad(ours, leaves, weights, allow_unused=True),
        torch.autograd.grad(theirs, leaves, weights, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(got, want, atol=1e-9, rtol=1e-8)


FEATURES = ["elu", "relu", "favor"]
LENGTHS = [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 5 * CHUNK]
ROPES = {
    "none": None,
    "interleaved": {},
    "half": {"layout": "half", "base": 100.0},
    "partial": {"dims": 2},
}


@pairwise(length=LENGTHS, rope=ROPES, feature=FEATURES, causal=[False, True])
def test_against_the_quadratic_formula(feature, causal, length, rope):
    q, k, v = leaves = inputs(length)
    matrix = projection(feature)
    arguments = ROPES[rope]
    ours = gnomon.linear_attention(
        *leaves,
        feature,
        None if arguments is None else RoPE(**arguments),
        causal,
        projection=matrix,
    )
    assert_same(ours, quadratic(q, k, v, feature, causal, arguments, matrix), leaves)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("rope", ["none", "interleaved"])
def test_grouped_heads_and_lengths(feature, causal, rope):
    q, k, v = leaves = inputs(CHUNK + 9, heads=6, key_heads=2)
    matrix = projection(feature)
    arguments = ROPES[rope]
    lengths = torch.tensor([0, CHUNK - 3])
    expected = quadratic(q, k, v, feature, causal, arguments, matrix, lengths)
    hidden = torch.arange(k.shape[2])[:, None] >= lengths[:, None, None, None]
    ours = gnomon.linear_attention(
        q,
        torch.where(hidden, math.nan, k),
        torch.where(hidden, math.inf, v),
        feature,
        None if arguments is None else RoPE(),
        causal,
        key_lengths=lengths,
        projection=matrix,
    )
    assert torch.equal(ours[0], torch.zeros_like(ours[0]))
    assert_same(ours, expected, leaves)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(("length", "keys"), [(5, 90), (90, 5), (1, 1), (3, 0), (0, 3), (0, 0)])
def test_cross_lengths(feature, length, keys):
    q, k, v = leaves = inputs(length, keys)
    matrix = projection(feature)
    ours = gnomon.linear_attention(*leaves, feature, projection=matrix)
    assert_same(ours, quadratic(q, k, v, feature, projection=matrix), leaves)
    ours = gnomon.linear_attention(*leaves, feature, RoPE(), query_offset=7, projection=matrix)
    expected = quadratic(q, k, v, feature, rope={}, projection=matrix, offset=7)
    assert_same(ours, expected, leaves)


@pytest.mark.parametrize("value_columns", [1, 65, 130])
def test_value_columns(value_columns):
    q, k, _ = inputs(300)
    v = torch.randn(2, 2, 300, value_columns, dtype=torch.float64, requires_grad=True)
    for feature in FEATURES:
        matrix = projection(feature)
        ours = gnomon.linear_attention(q, k, v, feature, causal=True, projection=matrix)
        assert_same(ours, quadratic(q, k, v, feature, True, None, matrix), (q, k, v))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
def test_gradcheck(feature, causal):
    q, k, v = (x[:1] for x in inputs(5, heads=2, key_heads=1))
    matrix = projection(feature)
    if matrix is not None:
        matrix.requires_grad_()
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def attend(q, k, v, *matrices):
        rest = {"projection": matrices[0]} if matrices else {}
        return gnomon.linear_attention(q, k, v, feature, RoPE(), causal, **rest)

    torch.autograd.gradcheck(attend, leaves + ([matrix] if matrix is not None else []))


@pytest.mark.parametrize("causal", [False, True])
def test_a_denominator_of_zero(causal):
    q, k, v = (x.detach() for x in inputs(CHUNK + 2))
    q[:, :, ::3] = -1.0  # relu: all features are 0
    k[:, :, :10] = -1.0
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = gnomon.linear_attention(*leaves, "relu", causal=causal)
    assert torch.equal(o[:, :, ::3], torch.zeros_like(o[:, :, ::3]))
    if causal:
        assert torch.equal(o[:, :, :10], torch.zeros_like(o[:, :, :10]))
    assert o.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(o.square().sum(), leaves))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rope", [None, RoPE()])
def test_exponents_far_beyond_the_range_of_exp(causal, rope):
    """Features range from e^-6000 to e^600, beyond float32, but their ratios are moderate."""
    length = 2 * CHUNK + 7
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 4) for _ in range(3))
    # Norms alternately grow and shrink along the sequence.
    size = 25 * (1 + torch.sin(torch.arange(length) / 7.0))[:, None]
    matrix = gnomon.favor_projection(10, 4, seed=1)
    q, k = q * 3, k * size
    if rope is not None:  # the rotation mixes features, so sums would cancel
        q, k = q / 3, k / 8
    o = gnomon.linear_attention(q, k, v, "favor", rope, causal, projection=matrix)
    a, b = (x.double() / 4**0.25 for x in (q, k))
    exponents = [(x @ matrix.double().T - x.square().sum(-1, keepdim=True) / 2) for x in (a, b)]
    # The full sum, pair by pair, relative to the largest exponent of each row.
    pairs = exponents[0][:, :, :, None, :] + exponents[1][:, :, None, :, :]
    seen = torch.ones(length, length, dtype=torch.bool)
    seen = (seen.tril() if causal else seen)[..., None]
    pairs = pairs.masked_fill(~seen, -math.inf)
    largest = pairs.amax((-1, -2), keepdim=True)
    weights = (pairs - largest).exp().sum(-1)
    if rope is None:
        expected = weights @ v.double() / weights.sum(-1, keepdim=True)
        assert float(exponents[1].min()) < -300
    else:
        expected = quadratic(
            q.double(), k.double(), v.double(), "favor", causal, {}, matrix.double()
        )
    torch.testing.assert_close(o.double(), expected, atol=3e-4, rtol=3e-4)


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("rope", [None, RoPE()])
def test_later_tokens_change_nothing(feature, rope):
    length = 2 * CHUNK + 30
    q, k, v = (x.detach().float() for x in inputs(length, heads=4, key_heads=2))
    expected = gnomon.linear_attention(q, k, v, feature, rope, True)
    for t in (0, 1, 5, CHUNK - 1, CHUNK, CHUNK + 17, length - 1):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[:, :, t:] = 3 * torch.randn(x[:, :, t:].shape)
        o = gnomon.linear_attention(*changed, feature, rope, True)
        assert torch.equal(o[:, :, :t], expected[:, :, :t])
        assert not torch.equal(o[:, :, t:], expected[:, :, t:])


def test_favor_comes_closer_to_softmax_with_more_features():
    torch.manual_seed(0)
    q, k, v = (0.5 * torch.randn(1, 4, 64, 16, dtype=torch.float64) for _ in range(3))
    for causal in (False, True):
        exact = gnomon.attention(q, k, v, causal=causal)

        def error(num_features, causal=causal, exact=exact):
            squares = [
                (
                    gnomon.linear_attention(
                        q, k, v, "favor", causal=causal, num_features=num_features, seed=seed
                    )
                    - exact
                )
                .square()
                .mean()
                for seed in range(8)
            ]
            return float(torch.stack(squares).mean().sqrt())

        errors = [error(n) for n in (16, 64, 256, 1024)]
        # Errors are proportional to 1/sqrt(features), so each step should halve them.
        assert all(b < 0.7 * a for a, b in itertools.pairwise(errors))
        assert errors[-1] < 0.1 * float(exact.square().mean().sqrt())


def test_projection():
    matrix = gnomon.favor_projection(50, 16, seed=3)
    assert matrix.shape == (50, 16)
    assert matrix.dtype == torch.get_default_dtype()
    for block in matrix.split(16):
        gram = block @ block.T
        torch.testing.assert_close(gram, gram.diag().diag(), atol=1e-5, rtol=0)
    assert torch.equal(matrix, gnomon.favor_projection(50, 16, seed=3))
    assert not torch.equal(matrix, gnomon.favor_projection(50, 16, seed=4))
    # A seed determines the rows on every machine, for any number of features.
    torch.testing.assert_close(gnomon.favor_projection(40, 16, seed=3), matrix[:40])
    many = gnomon.favor_projection(4096, 16)
    assert abs(float(many.mean())) < 0.02
    assert abs(float(many.var()) - 1) < 0.03
    # |w|^2 has a chi^2 distribution with 16 degrees of freedom: mean 16, variance 32.
    norms = many.square().sum(1)
    assert abs(float(norms.mean()) - 16) < 0.4
    assert abs(float(norms.var()) - 32) < 4
    drawn = [
        gnomon.linear_attention(*[torch.ones(1, 1, 2, 16)] * 3, "favor", seed=seed, num_features=50)
        for seed in (3, 3)
    ]
    assert torch.equal(*drawn)


def test_seed_is_that_of_the_projection():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    for count in (None, 6):
        ours = gnomon.linear_attention(q, k, v, "favor", seed=5, num_features=count)
        matrix = gnomon.favor_projection(count or 46, 16, 5)  # 16 ln 16 = 44.4
        expected = gnomon.linear_attention(q, k, v, "favor", projection=matrix)
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_low_precision_rounds_only_inputs_and_outputs(dtype):
    q, k, v = (x.detach().to(dtype) for x in inputs(70))
    for feature in FEATURES:
        o = gnomon.linear_attention(q, k, v, feature, causal=True)
        exact = gnomon.linear_attention(q.float(), k.float(), v.float(), feature, causal=True)
        assert torch.equal(o, exact.to(dtype))


@pytest.mark.parametrize(
    ("feature", "causal", "dynamic"),
    mostly_long(
        [
            *(("elu", False, True), ("relu", True, False), ("favor", True, True)),
            *(("elu", True, False), ("relu", False, True), ("favor", False, False)),
        ],
        ordinary=3,
    ),
)
def test_compile(feature, causal, dynamic):
    torch.compiler.reset()

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def layer(q, k, v):
        return gnomon.linear_attention(q, k, v, feature, RoPE(), causal)

    for length in (CHUNK + 3, 2 * CHUNK - 5):  # with two chunks each
        leaves = inputs(length, heads=4, key_heads=2)
        assert_same(
            layer(*leaves), gnomon.linear_attention(*leaves, feature, RoPE(), causal), leaves
        )


def sums_formula(x: Tensor, y: Tensor, z: Tensor, reverse: bool) -> Tensor:
    group = x.shape[1] // y.shape[1]
    y, z = (t.repeat_interleave(group, 1) for t in (y, z))
    products = x @ y.mT
    return (products.triu() if reverse else products.tril()) @ z


@pairwise(
    length=[1, CHUNK - 1, CHUNK + 1, 19 * CHUNK + 5],  # the last is computed in parts
    columns=[1, 16, 21],
    reverse=[False, True],
    dtype=[torch.float32, torch.float64],
)
def test_causal_sums(length, columns, reverse, dtype):
    torch.manual_seed(length)
    x = torch.randn(2, length, 4, 5, dtype=dtype).transpose(1, 2)
    y, z = (
        torch.randn(2, 2, length, 5, dtype=dtype),
        torch.randn(2, 2, length, columns, dtype=dtype),
    )
    leaves = [t.requires_grad_() for t in (x, y, z)]
    exact = [t.detach().double().requires_grad_() for t in leaves]
    weights = torch.randn(2, 4, length, columns, dtype=dtype)
    ours = ops.causal_sums(*leaves, reverse)
    theirs = sums_formula(*exact, reverse)
    got = [ours.detach(), *torch.autograd.grad(ours, leaves, weights)]
    want = [theirs.detach(), *torch.autograd.grad(theirs, exact, weights.double())]
    for a, b in zip(got, want, strict=True):
        size = float(b.abs().max())
        tolerance = 1e-6 if dtype == torch.float32 else 1e-14
        torch.testing.assert_close(a.double() / size, b / size, atol=tolerance, rtol=0)


@pytest.mark.parametrize("length", [1, CHUNK + 1, 19 * CHUNK + 5])
@pytest.mark.parametrize("feature", ["elu", "relu"])
@pytest.mark.parametrize("rope", ["none", "interleaved"])
def test_single_precision(feature, length, rope):
    torch.manual_seed(length)
    q, k, v = (torch.randn(1, heads, length, 6) for heads in (4, 2, 2))
    q[:, 0, ::7] = -1.0  # relu: a denominator of 0
    k = 30 * k  # elu: features of e^-80 to 100
    arguments = ROPES[rope]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    turns = None if arguments is None else RoPE(**arguments)
    ours = gnomon.linear_attention(*leaves, feature, turns, True)
    theirs = quadratic(*exact, feature, True, arguments)
    torch.testing.assert_close(ours.double(), theirs, atol=1e-4, rtol=1e-4)
    weights = torch.randn(ours.shape)
    for got, want in zip(
        torch.autograd.grad(ours, leaves, weights),
        torch.autograd.grad(theirs, exact, weights.double()),
        strict=True,
    ):
        size = max(1.0, float(want.abs().max()))
        torch.testing.assert_close(got.double() / size, want / size, atol=1e-4, rtol=0)


def test_second_derivatives():
    q, k, v = (x[:1].detach() for x in inputs(5, heads=2, key_heads=1))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for reverse in (False, True):
        torch.autograd.gradgradcheck(lambda *x, r=reverse: ops.causal_sums(*x, r), leaves)
    for feature in ("elu", "relu"):
        torch.autograd.gradcheck(lambda *x, f=feature: ops.causal_linear(*x, f), leaves)
        torch.autograd.gradgradcheck(lambda *x, f=feature: ops.causal_linear(*x, f), leaves)


def exponents(length: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Exponents of random features, values, and the largest sum of exponents for each query."""
    query, key = (torch.randn(1, h, length, 3, dtype=dtype, requires_grad=True) for h in (2, 1))
    value = torch.randn(1, 1, length, 2, dtype=dtype, requires_grad=True)
    met = (query.detach() + key.detach().cummax(2).values).amax(3, keepdim=True)
    return [query, key, value, met]


@pytest.mark.parametrize("length", [1, CHUNK + 2])
@pytest.mark.parametrize("rope", [None, "rope"])
def test_causal_exponent_sums(length, rope):
    """The operator that replaces the composition in compiled graphs, and its gradient."""
    query, key, value, met = exponents(length)
    if rope is not None:
        query, key = (torch.cat([x, x[..., :1]], 3) for x in (query, key))
    sums = ops.causal_exponent_sums(query, key, value, met, rope)
    left, right = (query - met).exp(), key.exp().repeat_interleave(2, 1)
    if rope is not None:
        at = torch.arange(length, dtype=torch.float64)
        left, right = (rotate(x, at, False) for x in (left, right))
    formula = (left @ right.mT).tril() @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(sums, formula)
    leaves = [query, key, value]
    d = torch.randn_like(formula, requires_grad=True)
    first = [torch.autograd.grad(x, leaves, d, create_graph=True) for x in (sums, formula)]
    torch.testing.assert_close(*first)
    weights = [torch.randn_like(x) for x in leaves]
    second = [
        torch.autograd.grad(
            sum((x * w).sum() for x, w in zip(of, weights, strict=True)), [*leaves, d]
        )
        for of in first
    ]
    torch.testing.assert_close(*second)


def test_causal_random_features_are_traced_as_one_operator():
    q, k, v = inputs(2 * CHUNK)
    graph = make_fx(lambda q: gnomon.linear_attention(q, k, v, "favor", causal=True))(q)
    targets = [node.target for node in graph.graph.nodes]
    assert targets.count(ops.causal_exponent_sums.default) == 1
    assert len(targets) < 60


@pytest.mark.real_device
def test_opcheck():
    x = torch.randn(1, 4, 9, 4, requires_grad=True)
    y = torch.randn(1, 2, 9, 4, requires_grad=True)
    torch.library.opcheck(ops.causal_sums, (x, y, y, True), test_utils=CHECKS)
    torch.library.opcheck(ops.causal_linear, (x, y, y, "elu"), test_utils=CHECKS)
    q = torch.randn(1, 2, 9, 4, requires_grad=True)
    for feature, causal in (("elu", False), ("relu", True)):
        torch.library.opcheck(
            ops.linear_attention,
            (q, q, q, feature, "rope", causal, None, None, None, None, None),
            test_utils=CHECKS,
        )
    torch.library.opcheck(ops.favor_projection, (torch.empty(4), 6, 1), test_utils=CHECKS)
    tensors = exponents(9, torch.float32)
    torch.library.opcheck(ops.causal_exponent_sums, (*tensors, None), test_utils=CHECKS)
    d = torch.randn(1, 2, 9, 2)
    plain = [d, *(x.detach() for x in tensors)]
    torch.library.opcheck(ops.causal_exponent_sums_backward, (*plain, None), test_utils=CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("feature", FEATURES)
def test_memory_is_linear(feature):
    """The memory of the forward and the backward pass is linear in the length."""
    before = """
length = int(sys.argv[1])
q, k, v = (torch.randn(1, 2, length, 16, requires_grad=True) for _ in range(3))
"""
    step = """
o = gnomon.linear_attention(q, k, v, sys.argv[2], gnomon.position.RoPE(), True)
o.sum().backward()
"""
    peaks = [peak_memory(before, step, length, feature) for length in (8192, 16384)]
    # The weight matrices of the two heads would take 2.1 GB.
    assert 5_000 < peaks[1] < 1_000_000
    assert peaks[1] < 2.3 * peaks[0]


def attend(**changes):
    arguments = {name: torch.randn(2, 4, 6, 8) for name in ("q", "k", "v")}
    return gnomon.linear_attention(**(arguments | changes))


ERRORS = {
    "q is not a tensor": ({"q": 1.0}, TypeError, "q is a float; expected a Tensor"),
    "three axes": ({"q": torch.randn(4, 6, 8)}, ValueError, "q has shape [4, 6, 8]; expected four"),
    "columns": ({"k": torch.randn(2, 4, 6, 7)}, ValueError, "k has shape [2, 4, 6, 7]; expected"),
    "keys": ({"v": torch.randn(2, 4, 5, 8)}, ValueError, "v has shape [2, 4, 5, 8]; expected"),
    "heads": (
        {"k": torch.randn(2, 3, 6, 8), "v": torch.randn(2, 3, 6, 8)},
        ValueError,
        "q has 4 heads and k has 3; expected the number of heads of q to be a multiple",
    ),
    "dtype": (
        {"v": torch.randn(2, 4, 6, 8).double()},
        TypeError,
        "v has dtype Double, but q has Float",
    ),
    "feature": ({"feature": "softmax"}, ValueError, 'feature is "softmax"; expected elu, relu or'),
    "no word": ({"feature": None}, TypeError, "feature is a NoneType; expected"),
    "rope": ({"rope": ALiBi(1.0)}, TypeError, "rope is an ALiBi; expected a gnomon.position.RoPE"),
    "causal": ({"causal": 1}, TypeError, "causal is an int; expected True or False"),
    "causal lengths": (
        {"q": torch.randn(2, 4, 5, 8), "causal": True},
        ValueError,
        "causal is True, but Lq = 5 and Lk = 6 differ; pass as many queries as keys",
    ),
    "no offset": (
        {"q": torch.randn(2, 4, 5, 8), "rope": RoPE()},
        ValueError,
        "query_offset is None, but Lq = 5 and Lk = 6 differ; with rope, pass query_offset",
    ),
    "causal offset": (
        {"causal": True, "query_offset": 3},
        ValueError,
        "query_offset is 3, but causal is True; expected None or 0",
    ),
    "key_lengths": (
        {"key_lengths": torch.tensor([1])},
        ValueError,
        "key_lengths has shape [1]; expected (B,) = (2,)",
    ),
    "float lengths": (
        {"key_lengths": torch.ones(2)},
        TypeError,
        "key_lengths has dtype Float; expected integers",
    ),
    "num_features with elu": (
        {"num_features": 8},
        ValueError,
        'num_features applies only to feature="favor", but feature is "elu"',
    ),
    "seed with relu": (
        {"feature": "relu", "seed": 0},
        ValueError,
        'seed applies only to feature="favor", but feature is "relu"',
    ),
    "projection with elu": (
        {"projection": torch.randn(5, 8)},
        ValueError,
        'projection applies only to feature="favor", but feature is "elu"',
    ),
    "a float as seed": ({"seed": 1.0}, TypeError, "seed is a float; expected an integer, or None"),
    "seed and projection": (
        {"feature": "favor", "projection": torch.randn(5, 8), "seed": 1},
        ValueError,
        "projection and seed are both given; pass only one of them",
    ),
    "odd features to rotate": (
        {"feature": "favor", "num_features": 7, "rope": RoPE()},
        ValueError,
        "RoPE rotates pairs of coordinates, but q has head_dim 7; expected an even number",
    ),
    "too many columns to rotate": (
        {"rope": RoPE(dims=10)},
        ValueError,
        "RoPE has dims = 10; expected an even number, at most 8",
    ),
    "base": (
        {"rope": RoPE(base=0.0)},
        ValueError,
        "rope:base=0.0 is invalid; expected a positive number",
    ),
    "num_features of 0": (
        {"feature": "favor", "num_features": 0},
        ValueError,
        "num_features is 0; expected at least 1",
    ),
    "a string as num_features": (
        {"feature": "favor", "num_features": "8"},
        TypeError,
        "num_features is a str; expected an integer, or None",
    ),
    "projection's columns": (
        {"feature": "favor", "projection": torch.randn(5, 7)},
        ValueError,
        "projection has shape [5, 7]; expected (features, D) with D = 8",
    ),
    "projection's dtype": (
        {"feature": "favor", "projection": torch.randn(5, 8).double()},
        TypeError,
        "projection has dtype Double, but q has Float",
    ),
    "both": (
        {"feature": "favor", "projection": torch.randn(5, 8), "num_features": 5},
        ValueError,
        "projection and num_features are both given; pass only one of them",
    ),
}


@pytest.mark.cpu("errors are the same on all devices")
@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    changes, kind, message = ERRORS[name]
    with pytest.raises(kind, match=re.escape(message)) as error:
        attend(**changes)
    # Errors in a specification name its term; all others name the operator.
    assert message.startswith("rope:") or "gnomon.linear_attention" in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((0, 4), ValueError, "num_features is 0; expected at least 1"),
        ((4, 0), ValueError, "head_dim is 0; expected at least 1"),
        ((4, -1), ValueError, "head_dim is -1; expected at least 1"),
        ((4.0, 4), TypeError, "num_features is a float; expected an integer"),
        ((4, 4, None), TypeError, "seed is a NoneType; expected an integer"),
        ((4, 4, 2**63), ValueError, f"seed is {2**63}; expected an integer in the int64 range"),
    ],
)
def test_errors_of_the_projection(arguments, kind, message):
    with pytest.raises(kind, match=re.escape(f"gnomon.favor_projection: {message}")):
        gnomon.favor_projection(*arguments)


def test_the_operator_of_the_projection_checks_its_columns():
    for like in (torch.empty(0), torch.empty(())):
        with pytest.raises(ValueError, match="head_dim is 0; expected at least 1"):
            ops.favor_projection(like, 4, 0)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
def test_nan_propagates(feature, causal):
    """A NaN denominator is not treated as 0, and NaN in a query affects only its own row."""
    q, k, v = (x.detach() for x in inputs(CHUNK + 9))
    expected = gnomon.linear_attention(q, k, v, feature, causal=causal)
    q[:, :, 5] = math.nan
    o = gnomon.linear_attention(q, k, v, feature, causal=causal)
    assert o[:, :, 5].isnan().all()
    others = [i for i in range(q.shape[2]) if i != 5]
    torch.testing.assert_close(o[:, :, others], expected[:, :, others])
    k[:, :, 60] = math.nan
    o = gnomon.linear_attention(q, k, v, feature, causal=causal)
    assert o[:, :, 60:].isnan().all()
    assert causal == bool(o[:, :, 6:60].isfinite().all())
