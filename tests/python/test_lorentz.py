"""Lorentzian distances, centroids, and the attention layer of hyperbolic language models."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from test_nn import parameters_that_training_moves
from torch import Tensor

import gnomon
from gnomon import lorentz
from gnomon.nn import KVCache, LorentzMultiheadAttention
from gnomon.position import ALiBi, RoPE
from gnomon.similarity import Lorentz

B, H, HKV, L, D = 2, 4, 2, 9, 6


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def product(x: Tensor, y: Tensor) -> Tensor:
    """The Lorentzian inner products of all pairs of points; the first coordinate is time."""
    signs = torch.ones(x.shape[-1], dtype=x.dtype)
    signs[0] = -1
    return (x * signs) @ y.mT


def lifted(x: Tensor, c: Tensor | float) -> Tensor:
    time = (x.square().sum(-1, keepdim=True) + torch.as_tensor(c, dtype=x.dtype)[..., None]).sqrt()
    return torch.cat([time, x], -1)


def scores_of_pairs(similarity: Lorentz, x: Tensor, y: Tensor) -> Tensor:
    """The score of each query in x (n, D) and its single key in y."""
    q, k = x[:, None, None], y[:, None, None]
    return gnomon.attention(q, k, k, similarity=similarity, return_lse=True)[1].flatten()


def exact_scores(x: Tensor, y: Tensor, c: float) -> Tensor:
    """2 c + 2 <x, y> for the given floating-point numbers, computed with a hundred digits."""
    digits = 10**100

    def time(places: list[Fraction]) -> Fraction:
        square = sum((p * p for p in places), Fraction(c))
        return Fraction(math.isqrt(int(square * digits * digits)), digits)

    scores = []
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        a, b = [Fraction(p) for p in a], [Fraction(p) for p in b]
        inner = sum(p * q for p, q in zip(a, b, strict=True)) - time(a) * time(b)
        scores.append(float(2 * Fraction(c) + 2 * inner))
    return torch.tensor(scores, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("c", [1e-4, 1.0, 50.0])
@pytest.mark.parametrize("size", [1e-4, 1e-2, 1.0, 1e2, 1e4])
def test_scores_at_all_scales(size, c, dtype, request):
    """Errors are at most rounding errors of |x| |y|, most of which cancels far from the axis."""
    torch.manual_seed(0)
    x, y = (draw(40, D) * size).to(dtype), (draw(40, D) * size).to(dtype)
    # In some pairs, the points are equal or have the same direction, and in others, one or both are
    # the origin.
    y[:8] = 2 * x[:8]
    y[8:12] = x[8:12]
    y[12:14] = 0
    x[13] = 0
    expected = exact_scores(x.double(), y.double(), c)
    found = scores_of_pairs(Lorentz(1.0, c), x, y).double()
    # On a GPU, mapped tokens are rounded to their dtype.
    is_on_cpu = request.node.callspec.params["device"] in ("cpu", "other")
    eps = torch.finfo(torch.promote_types(dtype, torch.float32) if is_on_cpu else dtype).eps
    lengths = x.double().norm(dim=-1) * y.double().norm(dim=-1)
    # Distances are smoothed within 1e-6 of the axis, which causes errors of about 1e-12.
    smooth = 1e-12 * (1 + (x.double().norm(dim=-1) + y.double().norm(dim=-1)) / math.sqrt(c))
    assert ((found - expected).abs() <= 8 * eps * (lengths + expected.abs()) + smooth).all()
    assert (found <= 8 * eps * lengths).all()
    if size >= 1:
        naive = 2 * c + 2 * (
            (x * y).float().sum(-1)
            - (c + x.float().square().sum(-1)).sqrt() * (c + y.float().square().sum(-1)).sqrt()
        )
        if dtype == torch.float32:
            ours, theirs = (found - expected).abs(), (naive.double() - expected).abs()
            assert ours.mean() <= 2 * theirs.mean()


@pytest.mark.parametrize("c", [0.5, 4.0])
def test_along_a_ray_far_out_nothing_cancels(c):
    """The difference of products of about 1e8 has no correct digit, but our scores are accurate."""
    distances = torch.linspace(-12, 12, 50, dtype=torch.float64)
    x = (math.sqrt(c) * distances.sinh())[:, None]
    y = x.roll(1, 0)
    steps = distances - distances.roll(1)
    expected = 2 * c * (1 - steps.cosh())
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-4)):
        found = scores_of_pairs(Lorentz(1.0, c), x.to(dtype), y.to(dtype))
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("size", [0.1, 1.0, 10.0, 300.0])
def test_gradients_at_all_scales(size, dtype):
    """Gradients of tokens, scale and c, compared with the formula in float64 and in their dtype."""
    torch.manual_seed(0)
    inputs = {"q": draw(1, H, L, D) * size, "k": draw(1, HKV, L, D) * size, "v": draw(1, HKV, L, 3)}
    inputs |= {
        "scale": (torch.rand(H).double() + 0.5) / (1 + size**2),
        "c": torch.rand(H).double() + 0.5,
    }
    inputs = {name: x.to(dtype) for name, x in inputs.items()}

    def gradients(function, to):
        leaves = {name: x.to(to).requires_grad_() for name, x in inputs.items()}
        o = function(**leaves)
        weights = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).reshape(o.shape).to(to)
        return [o, *torch.autograd.grad((o * weights).sum(), list(leaves.values()))]

    def ours(q, k, v, scale, c):
        return gnomon.attention(q, k, v, similarity=Lorentz(scale, c))

    def theirs(q, k, v, scale, c):
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        c, scale = c[:, None], scale[:, None, None]
        inner = product(lifted(q, c), lifted(k, c))
        return (scale * (2 * c[..., None] + 2 * inner)).softmax(-1) @ v

    exact = gradients(theirs, torch.float64)
    found, plain = gradients(ours, dtype), gradients(theirs, dtype)
    for name, own, other, expected in zip(["o", *inputs], found, plain, exact, strict=True):
        scale = float(expected.detach().abs().max())
        error = float((own.double() - expected).detach().abs().max()) / scale
        allowed = 2 * float((other.double() - expected).detach().abs().max()) / scale
        assert error <= max(allowed, 500 * torch.finfo(dtype).eps), f"{name}: {error:.1e}"


def test_at_the_origin_gradients_are_finite():
    q, k, v = (torch.zeros(1, 1, 4, 3, dtype=torch.float64).requires_grad_() for _ in range(3))
    c = torch.ones(1, dtype=torch.float64, requires_grad=True)
    for map_name in ("space", "exp", "none"):
        o, lse = gnomon.attention(
            q, k, v, similarity=Lorentz(1.0, c, map=map_name), return_lse=True
        )
        torch.testing.assert_close(lse, torch.full_like(lse, math.log(4)))
        gradients = torch.autograd.grad(o.sum() + lse.sum(), (q, k, v, c))
        assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_points_beyond_the_farthest_are_finite(dtype):
    x = (draw(1, 1, 5, 3) * 1e20).to(dtype).requires_grad_()
    for map_name in ("space", "exp", "none"):
        o, lse = gnomon.attention(x, x, x, similarity=Lorentz(1e-20, map=map_name), return_lse=True)
        assert o.isfinite().all()
        assert lse.isfinite().all()
        assert torch.autograd.grad(o.sum(), x)[0].isfinite().all()


def test_the_time_of_points_is_not_read():
    x, y, v = draw(B, H, L, D), draw(B, H, L, D), draw(B, H, L, 3)
    points = [torch.cat([draw(B, H, L, 1), places], -1) for places in (x, y)]
    similarity = Lorentz(0.7, 1.3, map="none")
    torch.testing.assert_close(
        gnomon.attention(*points, v, similarity=similarity, position=RoPE()),
        gnomon.attention(x, y, v, similarity=Lorentz(0.7, 1.3), position=RoPE()),
    )


def test_isometries_change_no_score():
    """A boost is an isometry that changes every coordinate."""
    c = 1.7
    x, y, v = lifted(draw(B, 1, L, D), c), lifted(draw(B, 1, L, D), c), draw(B, 1, L, 3)
    boost = torch.eye(D + 1, dtype=torch.float64)
    boost[:2, :2] = torch.tensor([[math.cosh(0.8), math.sinh(0.8)]] * 2)
    boost[1, :2] = boost[0, [1, 0]]
    similarity = Lorentz(0.6, c, map="none")
    torch.testing.assert_close(
        gnomon.attention(x @ boost, y @ boost, v, similarity=similarity),
        gnomon.attention(x, y, v, similarity=similarity),
    )


# Centroids.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["dot", "lorentz", "lorentz in groups"])
def test_centroid(kind, dtype):
    torch.manual_seed(0)
    heads = HKV if "groups" in kind else H
    inputs = {"q": draw(B, H, L, D), "k": draw(B, heads, L, D), "v": draw(B, heads, L, D)}
    inputs["c"] = torch.rand(H).double() + 0.5
    inputs["v"] = lifted(inputs["v"], 1.0 if "groups" in kind else inputs["c"][:, None])

    def ours(q, k, v, c):
        similarity = None if kind == "dot" else Lorentz(0.4, c)
        return gnomon.attention(
            q, k, v, similarity=similarity, position=ALiBi(0.1), aggregation="lorentz_centroid",
            key_lengths=[L, 5], return_lse=True,
        )  # fmt: skip

    def theirs(q, k, v, c):
        k, v = (x.repeat_interleave(H // heads, 1) for x in (k, v))
        radius = c[:, None]
        if kind == "dot":
            scores = q @ k.mT / math.sqrt(D)
        else:
            scores = 0.4 * (
                2 * radius[..., None] + 2 * product(lifted(q, radius), lifted(k, radius))
            )
        scores = scores - 0.1 * (torch.arange(L) - torch.arange(L)[:, None]).abs().double()
        hidden = torch.arange(L) >= torch.tensor([L, 5])[:, None, None, None]
        scores = scores.masked_fill(hidden, -math.inf)
        total = scores.softmax(-1) @ v
        square = total[..., :1].square() - total[..., 1:].square().sum(-1, keepdim=True)
        root = 1.0 if kind == "dot" else c[:, None, None].sqrt()
        return root * total / square.abs().sqrt(), scores.logsumexp(-1)

    results = []
    for function, to in ((ours, dtype), (theirs, torch.float64)):
        leaves = {name: x.to(dtype).to(to).requires_grad_() for name, x in inputs.items()}
        o, lse = function(**leaves)
        weights = torch.linspace(-1, 1, o.numel(), dtype=torch.float64).reshape(o.shape).to(to)
        gradients = torch.autograd.grad(
            (o * weights).sum() + lse.sin().sum(), list(leaves.values()), allow_unused=True
        )
        results.append([o, lse, *gradients])
    tolerance = 1e-11 if dtype == torch.float64 else 3e-5
    for own, expected in zip(*results, strict=True):
        assert (own is None) == (expected is None)
        if expected is not None:
            scale = max(1.0, float(expected.detach().abs().max()))
            assert (own.double() - expected).abs().max() <= tolerance * scale


def test_centroids_are_on_the_hyperboloid_and_commute_with_isometries():
    torch.manual_seed(0)
    c = 0.8
    q, k, v = draw(B, 1, L, D), draw(B, 1, L, D), lifted(draw(B, 1, L, D) * 3, c)

    def centroid(values):
        return gnomon.attention(
            q, k, values, similarity=Lorentz(0.5, c), aggregation="lorentz_centroid", causal=True
        )

    o = centroid(v)
    squares = o[..., 1:].square().sum(-1) - o[..., 0].square()
    torch.testing.assert_close(squares, torch.full_like(squares, -c))
    boost = torch.eye(D + 1, dtype=torch.float64)
    boost[0, 0] = boost[2, 2] = math.cosh(1.1)
    boost[0, 2] = boost[2, 0] = math.sinh(1.1)
    torch.testing.assert_close(centroid(v @ boost), o @ boost)


def test_the_centroid_has_the_least_sum_of_squared_distances():
    torch.manual_seed(0)
    c = 1.4
    places = draw(7, 3)
    points = lifted(places, c)
    found = lorentz.centroid(points, c)
    free = found[1:].clone().requires_grad_()
    loss = -(2 * c + 2 * product(lifted(free[None], c), points)).sum()
    (gradient,) = torch.autograd.grad(loss, free)
    torch.testing.assert_close(gradient, torch.zeros(3).double(), atol=1e-12, rtol=0)


def test_rows_that_see_nothing_are_zero():
    q, k, v = (draw(1, 1, 4, 3).requires_grad_() for _ in range(3))
    o = gnomon.attention(q, k, v, aggregation="lorentz_centroid", key_lengths=[0])
    assert not o.any()
    for gradient in torch.autograd.grad(o.sum(), (q, k, v)):
        assert not gradient.any()


def test_hidden_values_may_be_nan():
    q, k, v = draw(1, 1, 9, 4), draw(1, 1, 9, 4), lifted(draw(1, 1, 9, 4), 1.0)
    v[:, :, 6:] = math.nan
    k[:, :, 6:] = math.nan
    v.requires_grad_()
    o = gnomon.attention(
        q, k, v, similarity="lorentz", aggregation="lorentz_centroid", key_lengths=[6]
    )
    o.sum().backward()
    assert o.isfinite().all()
    assert v.grad.isfinite().all()


def test_lift_and_centroid():
    torch.manual_seed(0)
    x = torch.randn(B, H, L, D)
    c = (torch.rand(H, 1) + 0.5).requires_grad_()
    points = lorentz.lift(x, c)
    torch.testing.assert_close(points, lifted(x, c))
    middle = lorentz.centroid(points, c[:, 0])
    assert middle.shape == (B, H, D + 1)
    squares = middle[..., 1:].square().sum(-1) - middle[..., 0].square()
    torch.testing.assert_close(squares, -c[:, 0].expand(B, H))
    assert torch.autograd.grad(middle.sum(), c)[0].isfinite().all()
    same = lorentz.centroid(points[:, :1, :1].expand(B, 1, 5, D + 1), c[0, 0])
    torch.testing.assert_close(same, points[:, :1, 0])
    assert lorentz.lift(x.bfloat16()).dtype == torch.bfloat16
    for call, error, message in (
        (lambda: lorentz.lift(x, 0.0), ValueError, "lift: c is 0; expected a positive"),
        (lambda: lorentz.lift(x, "1"), TypeError, "c is a str"),
        (
            lambda: lorentz.lift(x, torch.ones(3)),
            ValueError,
            r"c has shape \[3\]; expected a shape that",
        ),
        (lambda: lorentz.centroid(x, torch.ones(H, 2)), ValueError, "centroid: c has shape"),
        (lambda: lorentz.lift(x, torch.ones(1, device="meta")), TypeError, "c is on meta"),
        (lambda: lorentz.lift(x.long()), TypeError, "lift: points have dtype Long"),
        (lambda: lorentz.centroid(x[0, 0, 0]), ValueError, r"expected \(..., n, D\)"),
        (lambda: lorentz.centroid([1.0]), TypeError, "points is a list"),
    ):
        with pytest.raises(error, match=message):
            call()


# With a sink, the output depends on terms that otherwise cancel in the softmax.
def test_a_bias_moves_the_scores_and_with_them_sinks():
    q, k, v = draw(B, H, L, D), draw(B, H, L, D), draw(B, H, L, 3)
    bias = draw(H).requires_grad_()
    sink = draw(H)
    o = gnomon.attention(q, k, v, similarity=Lorentz(0.5, bias=bias), sink=sink)
    expected = gnomon.attention(q, k, v, similarity=Lorentz(0.5), sink=sink - bias)
    torch.testing.assert_close(o, expected)
    assert (torch.autograd.grad(o.sum(), bias)[0] != 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda q: gnomon.attention(q, q, q, similarity=Lorentz(1.0, 0.0)),
            r"c=0\.0 is invalid; expected",
        ),
        (lambda q: gnomon.attention(q, q, q, similarity="lorentz:c=-1"), "a positive number"),
        (
            lambda q: gnomon.attention(q, q, q, similarity=Lorentz(1.0, torch.tensor(-1.0).to(q))),
            "c of lorentz is -1 in one head; expected positive numbers",
        ),
        (
            lambda q: gnomon.attention(q, q, q, similarity=Lorentz(1.0, map="xi")),
            "space, exp, none",
        ),
        (
            lambda q: gnomon.attention(q[..., :1], q[..., :1], q, similarity="lorentz:map=none"),
            "lorentz needs at least 2, because the first coordinate is the time",
        ),
        (
            lambda q: gnomon.attention(q, q, q, similarity=Lorentz(torch.ones(3).double())),
            r"scale of lorentz has shape \[3\]",
        ),
        (
            lambda q: gnomon.attention(q, q, q, similarity=Lorentz(1.0, torch.ones(3).double())),
            r"c of lorentz has shape \[3\]",
        ),
        (
            lambda q: gnomon.attention(q, q, q, similarity="lorentz", scale=0.5),
            "scale applies to similarities such as dot",
        ),
        (
            lambda q: gnomon.nn.MultiheadAttention(32, 4, similarity="lorentz:bias=learned"),
            "bias=learned is not supported.*; expected a number",
        ),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call(draw(1, H, 5, 4))


def test_modules_learn_scale_and_curvature():
    torch.manual_seed(0)
    module = gnomon.nn.MultiheadAttention(
        32, 4, kv_heads=2, similarity="lorentz:c=learned", position="rope"
    )
    assert dict(module.named_parameters()).keys() >= {"scale_theta", "c_theta"}
    x = torch.randn(2, 20, 32)
    module(x, causal=True).square().mean().backward()
    assert (module.c_theta.grad != 0).all()
    assert (module.scale_theta.grad != 0).all()
    values = module.learned_values()
    torch.testing.assert_close(values["c"].value, torch.ones(4))
    torch.testing.assert_close(values["c"].start, torch.ones(4))
    given = torch.nn.Parameter(torch.rand(4) + 0.5)
    module = gnomon.nn.MultiheadAttention(32, 4, similarity=Lorentz(0.3, given))
    assert module.c is given
    module(x, causal=True).square().mean().backward()
    assert (given.grad != 0).all()


# LorentzMultiheadAttention compared with its formulas.


class Manifold(torch.nn.Module):
    """The manifold that HyperCore passes to its layers."""

    def __init__(self, c: float) -> None:
        super().__init__()
        self.k = torch.nn.Parameter(torch.tensor(c))
        self.c = self.k


def layer_formula(
    module: LorentzMultiheadAttention,
    x: Tensor,
    source: Tensor,
    c: Tensor | float,
    hidden: Tensor | None = None,
    rot_pos: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Chen et al. 2022, section 3.2, step by step."""
    heads = module.num_heads

    def split(columns: Tensor) -> Tensor:
        return columns.unflatten(2, (heads, -1)).transpose(1, 2)

    def place(space: Tensor) -> Tensor:
        return torch.cat([(space.square().sum(-1, keepdim=True) + c).sqrt(), space], -1)

    def centre(total: Tensor) -> Tensor:
        square = total[..., 1:].square().sum(-1, keepdim=True) - total[..., :1].square()
        return torch.as_tensor(c, dtype=total.dtype).sqrt() * total / square.abs().sqrt()

    q, k = split(module.Wq(x)), split(module.Wk(source))
    if rot_pos is not None:
        q, k = (
            torch.view_as_real(
                torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * rot_pos
            ).flatten(-2)
            for t in (q, k)
        )
    if module.normalize:
        q, k = (t / t.norm(dim=-1, keepdim=True) for t in (q, k))
    v = place(split(module.Wv(source))) if module.use_weight else split(source)
    scores = (2 * c + 2 * product(place(q), place(k))) / module.scale + module.bias
    if hidden is not None:
        scores = scores.masked_fill(hidden, -1e18)
    weights = scores.softmax(-1)
    o = centre(weights @ v)
    if module.trans_heads_concat:
        return place(module.final_linear(o.transpose(1, 2).flatten(2))), weights
    return centre(o.mean(1)), weights


@pytest.mark.parametrize("concat", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("manifold", [1.0, 2.5, "learned", "object"])
def test_the_layer_is_its_formula(manifold, normalize, concat):
    torch.manual_seed(0)
    kinds = {"learned": torch.nn.Parameter(torch.tensor(0.7)), "object": Manifold(1.3)}
    module = LorentzMultiheadAttention(
        kinds.get(manifold, manifold), 6, 5, H, trans_heads_concat=concat, normalize=normalize
    ).double()
    c = module.manifold.c if manifold == "object" else module.c
    x, source = draw(B, L, 6 * H), draw(B, L + 2, 6 * H)
    rot_pos = None
    o, weights = module(x, source, output_attentions=True, rot_pos=rot_pos)
    expected, expected_weights = layer_formula(module, x, source, c)
    torch.testing.assert_close(o, expected)
    torch.testing.assert_close(weights, expected_weights)
    assert o.shape == (B, L, 5 * H if concat else 5)
    assert module.scale.item() == pytest.approx(math.sqrt(5 * H))
    parameters = [p for p in module.parameters() if p is not module.bias]
    assert len(parameters) == 7 + 2 * concat + (manifold in kinds)
    for a, b in zip(
        torch.autograd.grad((o**3).sum(), parameters),
        torch.autograd.grad((expected**3).sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    # DistributedDataParallel requires a gradient for each parameter.
    (of_bias,) = torch.autograd.grad(module(x, source).sum(), module.bias)
    assert of_bias == 0


def test_the_layer_with_a_mask_and_rotations_of_its_users():
    torch.manual_seed(0)
    module = LorentzMultiheadAttention(1.0, 6, 5, H, trans_heads_concat=True).double()
    x = draw(B, L, 6 * H)
    angles = torch.outer(torch.arange(L).double(), torch.tensor([1.0, 0.1]).double())
    rot_pos = torch.polar(torch.ones_like(angles), angles)
    causal = torch.ones(L, L, dtype=torch.bool).triu(1)
    expected, _ = layer_formula(module, x, x, 1.0, causal, rot_pos)
    torch.testing.assert_close(module(x, x, mask=causal, rot_pos=rot_pos), expected)
    torch.testing.assert_close(module(x, causal=True, rot_pos=rot_pos), expected)
    rotated = LorentzMultiheadAttention(
        1.0, 6, 5, H, trans_heads_concat=True, position="rope:base=100"
    ).double()
    rotated.load_state_dict(module.state_dict())
    torch.testing.assert_close(rotated(x, causal=True), expected)
    cache = KVCache()
    parts = [rotated(part, causal=True, cache=cache) for part in x.split(4, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), expected)
    hidden = torch.rand(B, H, L, L) < 0.3
    hidden[..., 0] = False
    for mask, pairs in (
        (hidden, hidden),
        (hidden[:, :1], hidden[:, :1]),
        (hidden[:, 0], hidden[:, :1]),
        (hidden[:, 0, :1], hidden[:, :1, :1]),
        (hidden[:, 0, 0], hidden[:, :1, :1]),
        (hidden[:, :, 0], hidden[:, :, :1]),
    ):
        expected, _ = layer_formula(module, x, x, 1.0, pairs)
        torch.testing.assert_close(module(x, x, mask=mask), expected)
    with pytest.raises(ValueError, match=r"mask has shape \[3\]"):
        module(x, x, mask=torch.ones(3, dtype=torch.bool))
    with pytest.raises(TypeError, match="mask is a"):
        module(x, x, mask=torch.ones(L, L))


def test_the_layer_on_points_without_weights_of_values():
    torch.manual_seed(0)
    module = LorentzMultiheadAttention(1.0, 5, 5, H, use_weight=False).double()
    assert not hasattr(module, "Wv")
    points = lifted(draw(B, H, L, 4), 1.0).transpose(1, 2).flatten(2)
    torch.testing.assert_close(module(points), layer_formula(module, points, points, 1.0)[0])


def test_the_layer_takes_positions():
    torch.manual_seed(0)
    layer = LorentzMultiheadAttention(1.0, 6, 5, 4, position="rope")
    x = torch.randn(2, 7, 24)
    expected = layer(x, causal=True)
    order = torch.tensor([3, 0, 6, 1, 5, 2, 4])
    mixed = layer(x[:, order], causal=True, positions=order)
    torch.testing.assert_close(mixed, expected[:, order], atol=1e-5, rtol=1e-4)
    cache = KVCache()
    parts = [
        layer(x[:, first:last], causal=True, positions=torch.arange(first, last), cache=cache)
        for first, last in ((0, 4), (4, 7))
    ]
    torch.testing.assert_close(torch.cat(parts, 1), expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(cache.positions, torch.arange(7))
    with pytest.raises(
        ValueError, match=r"key_positions is None, but query has 2 tokens and key has 7"
    ):
        layer(x[:, :2], x, positions=torch.arange(2), cache=KVCache())
    with pytest.raises(ValueError, match="the cache contains positions"):
        layer(x, causal=True, cache=cache)


def test_its_state_has_the_names_of_its_users():
    module = LorentzMultiheadAttention(Manifold(1.0), 6, 5, H, trans_heads_concat=True)
    names = {"manifold.k", "manifold.c", "scale", "bias"} | {
        f"{layer}.{part}"
        for layer in ("Wq", "Wk", "Wv", "final_linear")
        for part in ("weight", "bias")
    }
    assert module.state_dict().keys() == names
    assert "manifold, 6, 5, 4, trans_heads_concat=True" in repr(module)


def test_two_steps_of_a_causal_layer():
    torch.manual_seed(0)
    c = torch.nn.Parameter(torch.tensor(1.0))
    module = LorentzMultiheadAttention(
        c, 6, 7, H, trans_heads_concat=True, position="rope", dropout=0.1
    )
    x = lorentz.lift(torch.randn(B, L, 6 * H - 1))
    target = lorentz.lift(torch.randn(B, L, 7 * H - 1))
    moved = parameters_that_training_moves(module, x, target)
    assert moved | {"bias"} == {name for name, _ in module.named_parameters()}
    compiled = torch.compile(module.eval(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, causal=True), module(x, causal=True))
    changed = x.clone()
    changed[:, 6] += 1
    assert torch.equal(module(changed, causal=True)[:, :6], module(x, causal=True)[:, :6])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((1.0, 6, 5, 4, True, 2.0, "linear_focused"), NotImplementedError, "linear_focused"),
        ((1.0, 6, 5, 4, True, 2.0, "whole"), ValueError, "attention_type is 'whole'"),
        ((-1.0, 6, 5, 4), ValueError, "manifold is -1.0; expected a positive c"),
        (("1", 6, 5, 4), TypeError, "manifold is a str"),
        ((torch.ones(2), 6, 5, 4), ValueError, r"c of manifold has shape \[2\]"),
        ((1.0, 0, 5, 4), ValueError, "in_channels is 0"),
        ((1.0, 6, 1, 4), ValueError, "out_channels is 1; expected at least 2"),
        ((1.0, 6, 5, 4, False), ValueError, "out_channels is 5 with use_weight=False"),
    ],
)
def test_wrong_layers(arguments, error, message):
    with pytest.raises(error, match=message):
        LorentzMultiheadAttention(*arguments)


def test_tokens_of_another_width():
    module = LorentzMultiheadAttention(1.0, 6, 5, 4)
    with pytest.raises(ValueError, match=r"query_input has shape \[2, 9, 6\]"):
        module(torch.randn(2, 9, 6))


@pytest.mark.parametrize("scale", [1e-15, 1e-25, 1e-37, 1e30])
def test_the_centroid_of_any_multiple(scale):
    """The squares of these points underflow or overflow."""
    points = torch.tensor([[1.5, 0.5, 1.0], [2.0, 0.1, -1.0]])
    expected = gnomon.lorentz.centroid(points)
    leaf = (points * scale).requires_grad_()
    found = gnomon.lorentz.centroid(leaf)
    torch.testing.assert_close(found, expected)
    assert (
        torch.autograd.grad((found * torch.tensor([1.0, 2.0, 3.0])).sum(), leaf)[0].isfinite().all()
    )


@pytest.mark.parametrize("place", ["sink", "alibi+sink"])
def test_modules_refuse_a_sink(place):
    with pytest.raises(ValueError, match=r"position has a sink.*no effect on centroids"):
        gnomon.nn.LorentzMultiheadAttention(1.0, 4, 5, 2, position=place)


def test_a_sink_moves_no_centroid():
    """A sink scales the weighted sum, which does not change its centroid, even for tiny weights."""
    torch.manual_seed(0)
    tokens = [torch.randn(1, 2, 9, 4) for _ in range(3)]
    similarity = Lorentz(1.0)
    plain = gnomon.attention(*tokens, similarity=similarity, aggregation="lorentz_centroid")
    for sink in (0.0, 45.0, 200.0):
        leaves = [x.clone().requires_grad_() for x in tokens]
        o = gnomon.attention(
            *leaves, similarity=similarity, aggregation="lorentz_centroid", sink=sink
        )
        torch.testing.assert_close(o, plain)
        assert all(g.isfinite().all() for g in torch.autograd.grad(o.square().sum(), leaves))
