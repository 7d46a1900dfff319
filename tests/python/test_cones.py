"""gnomon.cones compared with shadows, and the exponential map with high-precision arithmetic."""

import math

import mpmath
import pytest
import torch
from formulas import generator_of

import gnomon
from gnomon.cones import ancestor, lowest_common_ancestor

CONES = [("umbral", 0.1), ("umbral", 0.7), ("penumbral", 1.0), ("penumbral", 2.5)]


def points(*shape, ceiling, spread, seed=0):
    generator = generator_of(seed)
    x = torch.rand(*shape, generator=generator, dtype=torch.float64)
    return torch.cat([spread * (2 * x[..., :-1] - 1), ceiling * (0.01 + 0.98 * x[..., -1:])], -1)


def in_shadow(apex, t, cone, r):
    """Whether t is in the shadow of apex, computed from light rays, not the library's formulas."""
    distance = (apex[..., :-1] - t[..., :-1]).norm(dim=-1)
    u, v = apex[..., -1], t[..., -1]
    if cone == "umbral":
        # Vertical light rays pass hyperbolic balls of radius r, which are Euclidean balls of radius
        # height * sinh(r).
        return distance + v * math.sinh(r) <= u * math.sinh(r)
    # The shadow is below the half-circle of radius r through the apex that touches the light on the
    # far side.
    centre = (r * r - u * u).clamp_min(0).sqrt()
    return ((distance + centre).square() + v * v <= r * r) & (u <= r)


@pytest.mark.parametrize("dim", [2, 3, 6])
@pytest.mark.parametrize(("cone", "r"), CONES)
def test_ancestor(cone, r, dim):
    ceiling = r if cone == "penumbral" else 2.0
    spread = r if cone == "penumbral" else 2 * math.sinh(r)
    u, v = (points(2000, dim, ceiling=ceiling, spread=spread / dim, seed=n) for n in (1, 2))
    expected = in_shadow(u, v, cone, r)
    assert torch.equal(ancestor(u, v, cone=cone, r=r), expected)
    assert 0.02 < expected.double().mean() < 0.9
    assert ancestor(u, u, cone=cone, r=r).all()


def test_default_radii_and_broadcasting():
    u, v = points(5, 1, 3, ceiling=1, spread=0.3), points(4, 3, ceiling=1, spread=0.3, seed=1)
    for function in (ancestor, lowest_common_ancestor):
        for cone, r in (("umbral", 0.1), ("penumbral", 1.0)):
            assert torch.equal(function(u, v, cone=cone), function(u, v, cone=cone, r=r))
        assert torch.equal(function(u, v), function(u, v, cone="penumbral"))
    assert ancestor(u, v).shape == (5, 4)
    assert lowest_common_ancestor(u, v).shape == (5, 4, 3)
    assert lowest_common_ancestor(u.float(), v.float()).dtype == torch.float32


def raised(point, by):
    return torch.cat([point[..., :-1], point[..., -1:] + by], -1)


@pytest.mark.parametrize(("cone", "r"), CONES)
def test_lowest_common_ancestor_is_the_lowest_of_a_search(cone, r):
    """In the half-plane, no lower apex on a fine grid of positions has both points in its cone."""
    penumbral = cone == "penumbral"
    ceiling = 0.9 * r if penumbral else 2.0
    spread = 0.6 * r if penumbral else 2 * math.sinh(r)
    u, v = (points(60, 2, ceiling=ceiling, spread=spread, seed=n) for n in (3, 4))
    lca = lowest_common_ancestor(u, v, cone=cone, r=r)
    shared = lca[:, -1] <= r if penumbral else torch.ones(60, dtype=torch.bool)
    assert shared.sum() > 20
    nested = ancestor(u, v, cone=cone, r=r) | ancestor(v, u, cone=cone, r=r)
    assert 5 < nested.sum() < 55
    higher = raised(lca, 1e-9)
    for n in torch.nonzero(shared)[:, 0].tolist():
        # The cone of a point just above the ancestor contains both points. No lower cone does.
        for child in (u[n], v[n]):
            assert ancestor(higher[n], child, cone=cone, r=r)
            assert in_shadow(higher[n], child, cone, r)
        low, high = min(u[n, 0], v[n, 0]), max(u[n, 0], v[n, 0])
        places = torch.linspace(float(low), float(high), 400, dtype=torch.float64)
        heights = torch.linspace(0, 1, 400, dtype=torch.float64) * lca[n, 1] * (1 - 1e-6)
        apexes = torch.cartesian_prod(places, heights)
        holds = in_shadow(apexes, u[n], cone, r) & in_shadow(apexes, v[n], cone, r)
        assert not holds.any()


@pytest.mark.parametrize("dim", [2, 5])
@pytest.mark.parametrize(("cone", "r"), CONES)
def test_its_height_is_the_score(cone, r, dim):
    penumbral = cone == "penumbral"
    u, v = (points(300, dim, ceiling=r if penumbral else 2.0, spread=2 * r, seed=n) for n in (5, 6))
    kind = gnomon.similarity.Penumbral if penumbral else gnomon.similarity.Umbral
    # With a single key, lse is the score.
    _, lse = gnomon.attention(
        u[:, None, None],
        v[:, None, None],
        v[:, None, None],
        similarity=kind(1.0, r=r, map="none"),
        return_lse=True,
    )
    height = lowest_common_ancestor(u, v, cone=cone, r=r)[:, -1]
    torch.testing.assert_close(-lse[:, 0, 0], height)


def test_too_far_for_a_shadow_is_the_top_of_the_geodesic():
    u, v = points(50, 3, ceiling=1, spread=0.3), points(50, 3, ceiling=1, spread=0.3, seed=1)
    v[:, 0] += 5
    top = lowest_common_ancestor(u, v)
    assert (top[:, -1] > 1).all()
    # The half-circle is centred below its top, so both points are equally far from the centre.
    foot = raised(top, 0.0)
    foot[:, -1] = 0
    for point in (u, v):
        torch.testing.assert_close((point - foot).norm(dim=-1), top[:, -1])
    # The ancestor lies on the line between the two points.
    along = (foot - u)[:, :-1] / (v - u)[:, :-1]
    torch.testing.assert_close(along[:, 0], along[:, 1])


@pytest.mark.parametrize(("cone", "r"), CONES)
def test_an_ancestor_is_its_own_lowest_common_ancestor(cone, r):
    child = torch.tensor([0.2, -0.1, 0.3], dtype=torch.float64)
    for parent in (raised(child, 0.2), child, raised(child, 0.4) + torch.tensor([0.001, 0, 0])):
        for pair in ((parent, child), (child, parent)):
            torch.testing.assert_close(lowest_common_ancestor(*pair, cone=cone, r=r), parent)


@pytest.mark.parametrize(("cone", "r"), CONES)
def test_lowest_common_ancestor_has_gradients(cone, r):
    u, v = (points(6, 3, ceiling=0.9 * r, spread=r, seed=n).requires_grad_() for n in (7, 8))
    assert torch.autograd.gradcheck(
        lambda a, b: lowest_common_ancestor(a, b, cone=cone, r=r), (u, v)
    )
    point = lowest_common_ancestor(u, u, cone=cone, r=r)
    assert torch.autograd.grad(point.sum(), u)[0].isfinite().all()


def exp_map_height(v):
    """The height of the exponential map at (0, ..., 0, 1), computed with 60 digits."""
    with mpmath.workdps(60):
        v = [mpmath.mpf(float(x)) for x in v]
        n = mpmath.sqrt(sum(x * x for x in v))
        ratio = mpmath.sinh(n) / n if n else mpmath.mpf(1)
        return float(1 / (mpmath.cosh(n) - v[-1] * ratio))


def exp_map_inputs():
    torch.manual_seed(0)
    special = [
        *([0.0, 0.0, 8.0], [0.0, 0.0, -8.0], [8.0, 0.0, 0.0], [1e-4, 0.0, 8.0], [0.0, 1e-4, -8.0]),
        *([0.0, 0.0, 0.0], [1e-5, 0.0, 0.0], [0.0, 0.0, 1e-5], [0.0, 0.0, 20.0], [3.0, 4.0, 12.0]),
        *([0.0, 0.009, 0.003], [0.0, 0.011, 0.003], [0.001, 0.0, 15.0]),
    ]
    scales = 10 ** torch.linspace(-6, 1, 200)[:, None]
    return torch.cat([torch.tensor(special), torch.randn(200, 3) * scales])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_exponential_map_is_exact_in_every_direction(dtype):
    v = exp_map_inputs().to(dtype)
    v = v[v.norm(dim=-1) < 25]
    x = v[:, None, None]
    # A point is its own lowest common ancestor.
    _, lse = gnomon.attention(
        x, x, x, similarity=gnomon.similarity.Umbral(1.0, map="exp", score="log"), return_lse=True
    )
    expected = torch.tensor([exp_map_height(row) for row in v], dtype=torch.float64).log()
    tolerance = 4 * torch.finfo(dtype).eps * (1 + v.double().norm(dim=-1))
    assert ((-lse[:, 0, 0].double() - expected).abs() <= tolerance).all()


@pytest.mark.parametrize("at", [[0.0, 0.0], [0.0, 2.0], [0.0, -2.0], [1e-3, 0.0], [0.01, 1e-4]])
def test_the_exponential_map_has_gradients_on_its_axis(at):
    v = torch.tensor(at, dtype=torch.float64, requires_grad=True)
    x = v.reshape(1, 1, 1, 2)
    _, lse = gnomon.attention(
        x, x, x, similarity=gnomon.similarity.Umbral(1.0, map="exp"), return_lse=True
    )
    (gradient,) = torch.autograd.grad(-lse.sum(), v)
    with mpmath.workdps(60):
        for n in range(2):
            step = [mpmath.mpf(0), mpmath.mpf(0)]
            step[n] = mpmath.mpf(10) ** -20

            def height(sign, step=step):
                w = [mpmath.mpf(a) + sign * s for a, s in zip(at, step, strict=True)]
                r = mpmath.sqrt(w[0] ** 2 + w[1] ** 2)
                return 1 / (mpmath.cosh(r) - w[1] * mpmath.sinh(r) / r)

            slope = (height(1) - height(-1)) / (2 * step[n])
            assert abs(float(gradient[n]) - float(slope)) < 1e-9 * max(1, abs(float(slope)))


@pytest.mark.parametrize(
    ("name", "score"),
    [
        ("Penumbral", "height"),
        ("Penumbral", "height2"),
        ("Penumbral", "log"),
        ("Umbral", "height"),
        ("Umbral", "log"),
    ],
)
def test_nearly_equal_heights_have_finite_gradients(name, score):
    heights = torch.full((1, 1, 64, 1), 0.5)
    heights += torch.arange(64)[:, None] * 2.0**-24
    points = torch.cat([torch.zeros(1, 1, 64, 2), heights], -1).requires_grad_()
    similarity = getattr(gnomon.similarity, name)(1.0, map="none", score=score)
    o = gnomon.attention(points, points, heights, similarity=similarity)
    (gradient,) = torch.autograd.grad(o.square().sum(), points)
    assert gradient.isfinite().all()
