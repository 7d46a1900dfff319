"""Hyperbolic distances, entailment cones, and scores of small, large or cancelling numbers."""

import math

import pytest
import torch
from formulas import SIMILARITIES, Case, values_and_gradients

import gnomon
from gnomon.similarity import Entailment, Hyperbolic, Penumbral, Umbral

CURVED = [
    name
    for name in SIMILARITIES
    if name not in ("dot", "dot softcap", "laplacian", "gaussian", "additive", "penumbral height2")
]
# Similarities whose maps keep tokens of any size near the origin.
BOUNDED = [
    name for name in CURVED if "exp" in name or name.split()[0] in ("ball", "klein", "entailment")
]


def scores_of_pairs(similarity, q, k):
    """The scores (n,) of n pairs of tokens (n, D); with a single key, lse is the score."""
    q, k = q[:, None, None], k[:, None, None]
    return gnomon.attention(q, k, k, similarity=similarity, return_lse=True)[1].flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("similarity", CURVED)
def test_finite_tokens_give_finite_results(similarity, dtype):
    sizes = [0.0, 1e-38, 1e-30, 1e-12, 1e-6, 1.0, 1 + 1e-6, 30.0, 100.0, 1e4]
    if similarity in BOUNDED:
        sizes += [1e10, 1e18]
    values = torch.tensor([sign * size for size in sizes for sign in (1.0, -1.0)], dtype=dtype)
    torch.manual_seed(0)
    tokens = torch.cat(
        [
            torch.cartesian_prod(values, values),
            values[:, None].expand(-1, 2),
            torch.randn(40, 2, dtype=dtype),
        ]
    )
    tokens = torch.cat([tokens[:, :1] * 0.5, tokens], 1)[None, None]
    case = Case(similarity, heads=1, dim=3)
    parameters = {n: x.to(dtype) for n, x in case.inputs().items() if n not in "qkv"}
    inputs = {"q": tokens, "k": tokens.flip(2), "v": torch.randn_like(tokens)} | parameters
    for name, result in values_and_gradients(case.ours, inputs).items():
        assert result.isfinite().all(), name


def norm_at(similarity, radius):
    """The norm of the tokens of points at this distance from the origin."""
    return {
        ("hyperboloid", "none"): math.sinh(radius),
        ("ball", "none"): math.tanh(radius / 2),
        ("klein", "none"): math.tanh(radius),
    }.get((similarity.model, similarity.map), radius)


def shares_at(similarity, radius):
    """Relative changes of the coordinates that leave every point in its space."""
    limit = 1 - 1e-5 if similarity.model in ("ball", "klein") else math.inf
    norm = norm_at(similarity, radius)
    return [share for share in (1e-1, 1e-3, 1e-5) if norm * (1 + share / 2) < limit]


# `radius` is the distance from the origin.
@pytest.mark.parametrize(
    ("similarity", "radius"),
    [
        pytest.param(similarity, radius, id=f"{similarity.model} {similarity.map}-{radius}")
        for similarity in (
            Hyperbolic(1e3),
            Hyperbolic(1e3, map="exp"),
            Hyperbolic(1e3, map="none"),
            Hyperbolic(1e3, "half_space"),
            Hyperbolic(1e3, "half_space", "none"),
            Hyperbolic(1e3, "ball", "none"),
            Hyperbolic(1e3, "klein", "none"),
        )
        for radius in (1e-3, 0.5, 3.0, 8.0)
        if shares_at(similarity, radius)
    ],
)
def test_near_tokens_have_their_distance_in_float32(similarity, radius):
    torch.manual_seed(0)
    q = torch.randn(200, 5)
    if similarity.map in ("exp", "none"):
        q = q / q.norm(dim=1, keepdim=True) * norm_at(similarity, radius)
    else:
        q[:, -1] = radius
    if (similarity.model, similarity.map) == ("half_space", "none"):
        q[:, -1] = math.exp(-radius)
    # `resolution` is the change of a distance when coordinates are rounded far from the origin.
    resolution = torch.finfo(torch.float32).eps * math.cosh(radius)
    if similarity.model == "klein":
        resolution *= math.cosh(radius)
    for share in shares_at(similarity, radius):
        k = q * (1 + share * torch.rand_like(q).sub(0.5))
        leaves = [x.clone().requires_grad_() for x in (q, k)]
        scores = scores_of_pairs(similarity, *leaves)
        gradients = torch.autograd.grad(scores.sum(), leaves)
        exact_leaves = [x.double().requires_grad_() for x in (q, k)]
        exact = scores_of_pairs(similarity, *exact_leaves)
        exact_gradients = torch.autograd.grad(exact.sum(), exact_leaves)
        distance = -exact.detach() / 1e3
        error = (-scores.detach().double() / 1e3 - distance).abs()
        # Squared distances above a thousandth of the squared norms are computed from the norms and
        # the product.
        assert (error <= 8 * resolution + 1e-4 * distance).all(), float((error / resolution).max())
        # Rounding rotates the direction between near points, and the gradients rotate with it.
        for ours, theirs in zip(gradients, exact_gradients, strict=True):
            off = (ours.double() - theirs).norm(dim=1) / theirs.norm(dim=1).clamp_min(1e3)
            assert (off <= 0.002 + 20 * resolution / distance).all(), float(off.max())


# If the inputs are points, and not mapped tokens, small distances keep all digits.
@pytest.mark.parametrize("model", ["half_space", "ball"])
def test_distances_of_points_are_exact_to_the_last_digits(model):
    torch.manual_seed(0)
    q = torch.rand(500, 4) * 0.2 + 0.1
    k = q + 0.005 * torch.rand_like(q) * 10 ** (-5 * torch.rand(500, 1))
    similarity = Hyperbolic(1e6, model, "none")
    ours = scores_of_pairs(similarity, q, k).double()
    exact = scores_of_pairs(similarity, q.double(), k.double())
    torch.testing.assert_close(ours, exact, atol=0, rtol=2e-6)


@pytest.mark.parametrize("similarity", [n for n in CURVED if n.startswith(("hyp", "ball", "kl"))])
def test_gradients_at_the_origin(similarity):
    case = Case(similarity, heads=1, key_heads=1, queries=3, keys=4, dim=3, value_dim=2)
    inputs = case.inputs()
    if similarity == "hyperboloid":
        inputs["q"][..., -1] = 0  # the distance from the origin
    elif similarity == "hyperboloid none":
        inputs["q"][..., :-1] = 0
    else:
        inputs["q"].zero_()
    names, leaves = zip(*inputs.items(), strict=True)
    leaves = [x.requires_grad_() for x in leaves]
    assert torch.autograd.gradcheck(
        lambda *x: case.ours(dict(zip(names, x, strict=True))), leaves, nondet_tol=0.0
    )
    assert torch.autograd.grad(case.ours(inputs)[1].sum(), inputs["q"])[0].abs().max() > 1e-3


def test_a_zero_direction_is_a_single_direction():
    x = torch.tensor([[0.0, 0.0, 2.0], [0.0, 0.0, 2.0], [0.0, 0.0, -1.0]], dtype=torch.float64)
    y = torch.tensor([[0.0, 0.0, 2.0], [0.0, 0.0, 0.5], [0.0, 0.0, 0.0]], dtype=torch.float64)
    distance = -scores_of_pairs(Hyperbolic(1.0), x, y)
    torch.testing.assert_close(distance, torch.tensor([0.0, 1.5, 1.0], dtype=torch.float64))


def test_a_negative_distance_turns_round():
    x = torch.tensor([[0.6, 0.8, 2.0]], dtype=torch.float64)
    y = torch.tensor([[-0.6, -0.8, -2.0]], dtype=torch.float64)
    z = torch.tensor([[0.6, 0.8, -0.5]], dtype=torch.float64)
    assert float(scores_of_pairs(Hyperbolic(1.0), x, y)) == 0
    assert abs(float(scores_of_pairs(Hyperbolic(1.0), x, z)) + 2.5) < 1e-12


def test_far_points_stop_at_a_distance_of_thirty():
    far = torch.tensor([[1.0, 0.0, 50.0]]), torch.tensor([[-1.0, 0.0, 1e6]])
    for dtype in (torch.float32, torch.float64):
        distance = -scores_of_pairs(Hyperbolic(1.0), *(x.to(dtype) for x in far))
        assert abs(float(distance) - 60) < 1e-4


@pytest.mark.parametrize("cone", [Umbral, Penumbral])
def test_a_log_score_is_the_logarithm_of_the_height(cone):
    torch.manual_seed(0)
    q, k = (torch.randn(100, 4, dtype=torch.float64) for _ in range(2))
    for r in (0.1, 1.0, 3.0):
        height = -scores_of_pairs(cone(1.0, r=r), q, k)
        by_log = scores_of_pairs(cone(0.7, r=r, score="log"), q, k)
        scale = r if cone is Penumbral else 1.0
        torch.testing.assert_close(by_log, 0.7 * (scale / height).log())


def test_entailment_is_zero_inside_the_cone_and_grows_to_behind_it():
    k = 0.1
    x = torch.tensor([0.6, 0.0], dtype=torch.float64)
    aperture = math.asin(k * (1 - 0.36) / 0.6)
    ahead, behind, beside = (
        torch.tensor(y, dtype=torch.float64) for y in ([0.9, 0.0], [0.1, 0.0], [0.6, 1e-7])
    )
    similarity = Entailment(1.0, k, map="none")
    energies = -scores_of_pairs(similarity, x.expand(4, 2), torch.stack([ahead, behind, beside, x]))
    expected = torch.tensor([0.0, math.pi, math.pi / 2, 0.0], dtype=torch.float64)
    expected[1:3] -= aperture
    torch.testing.assert_close(energies, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("slope", [0.2, 0.0, -0.5, 1.5])
def test_slopes_of_additive_scores(slope):
    torch.manual_seed(0)
    q, k = (torch.randn(2, 3, n, 1, dtype=torch.float64) for n in (5, 7))
    v = torch.randn(2, 3, 7, 4, dtype=torch.float64)
    scores = torch.nn.functional.leaky_relu(q + k.transpose(2, 3), slope)
    ours = gnomon.attention(q, k, v, similarity=gnomon.similarity.Additive(slope))
    torch.testing.assert_close(ours, scores.softmax(-1) @ v)
